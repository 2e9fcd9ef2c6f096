"""Clean and robust accuracy of a model on a split."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from atoll.attacks.base import Attack, check_labels, evaluation_mode
from atoll.data.base import Split, batches, in_order
from atoll.distributed import all_sum, rank, world_size
from atoll.errors import InputError
from atoll.statistics import Accuracy


def evaluate(
    model: nn.Module,
    split: Split,
    attacks: Mapping[str, Attack],
    *,
    batch_size: int = 256,
    seed: object = 0,
    device: torch.device | str = "cpu",
    on_batch: Callable[[int], None] | None = None,
) -> dict[str, Accuracy]:
    """Accuracy on clean points and under each attack; under torchrun the points are shared out.

    A point counts as robust under an attack only if it is also classified correctly without one, so points that are
    wrong already are not attacked.  With several attacks, ``"worst"`` is the pointwise worst case.

    Args:
        model: maps inputs to logits; evaluated in evaluation mode.
        split: the points.
        attacks: by the name under which they are reported (not ``clean`` or ``worst``).
        on_batch: called with the number of points done, for progress bars.
    """
    if clash := {"clean", "worst"} & attacks.keys():
        raise InputError(f"attacks: the names clean and worst are taken, got {', '.join(clash)}")
    names = ["clean", *attacks, *(["worst"] if len(attacks) > 1 else [])]
    correct = dict.fromkeys(names, 0)
    order = in_order(len(split), batch_size)[rank() :: world_size()]
    with evaluation_mode(model):
        for batch in batches(split, order, device=device):
            right = _right(model, batch.x, batch.y)
            correct["clean"] += int(right.sum())
            x, y, index = batch.x[right], batch.y[right], batch.index[right]
            standing = torch.ones_like(y, dtype=torch.bool)
            for name, attack in attacks.items():
                robust = _right(model, attack(model, x, y, seed=(seed, name), index=index), y)
                correct[name] += int(robust.sum())
                standing &= robust
            if "worst" in correct:
                correct["worst"] += int(standing.sum())
            if on_batch:
                on_batch(len(batch.y))
    counts = all_sum(torch.tensor([correct[name] for name in names], device=device))
    return {name: Accuracy(int(count), len(split)) for name, count in zip(names, counts, strict=True)}


@torch.no_grad()
def _right(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if not len(x):
        return torch.zeros(0, dtype=torch.bool, device=x.device)
    logits = model(x)
    check_labels(logits, y)
    if not logits.isfinite().all():
        raise InputError("model: expected finite logits, got NaN or infinity")
    return torch.eq(logits.argmax(1), y)
