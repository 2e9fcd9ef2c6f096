"""A few points before and after an attack, to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from atoll.attacks.base import Attack
from atoll.attacks.evaluate import MISCLASSIFIED, ROBUST, Evaluation
from atoll.data.base import Split, to_float
from atoll.files import write_atomic, write_figure
from atoll.modules import evaluation_mode
from atoll.plots import plot_adversarial

EXAMPLES = 8


@dataclass(frozen=True)
class Example:
    """What a model answers for one point, before and after an attack.

    Args:
        index: of the point in its split.
        label: the true class.
        before: the predicted class without an attack.
        after: the predicted class under attack; the label if no attack broke the point.
    """

    index: int
    label: str
    before: str
    after: str


def choose_examples(labels: Tensor, count: int = EXAMPLES) -> Tensor:
    """Indices of the first point of each class, then of the second ones, until there are enough.

    They depend on the labels alone, so models that are attacked on the same points have the same examples.

    >>> choose_examples(torch.tensor([4, 4, 4, 7, 0, 7]), 4)
    tensor([0, 3, 4, 1])
    """
    seen: dict[int, int] = {}
    turns = []
    for label in labels.tolist():
        seen[label] = seen.get(label, 0) + 1
        turns.append(seen[label])
    return torch.tensor(turns).argsort(stable=True)[:count]


def save_examples(
    model: nn.Module,
    split: Split,
    attacks: Mapping[str, Attack],
    evaluation: Evaluation,
    classes: Sequence[object],
    folder: Path,
    *,
    seed: object,
    device: torch.device | str,
) -> tuple[Example, ...]:
    """Store some images before and after the attacks (``examples.safetensors``, ``adversarial.png``).

    A point that was broken is shown with the input that broke it.  A point that is robust is shown with what the first
    attack tried: the attack runs on it again with the same random numbers.
    """
    assert evaluation.adversarial is not None
    if not attacks or evaluation.adversarial.dim() != 4:
        return ()
    index = choose_examples(split.labels)
    x, y, x_adv = to_float(split.fetch(index)), split.labels[index], evaluation.adversarial[index].clone()
    broken_by = evaluation.broken_by[index]
    robust = broken_by == ROBUST
    name, attack = next(iter(attacks.items()))
    tried = attack(model, x[robust].to(device), y[robust].to(device), seed=(seed, name), index=index[robust].to(device))
    x_adv[robust] = tried.cpu()
    with torch.no_grad(), evaluation_mode(model):
        before, logits = model(x.to(device)).argmax(1).cpu(), model(x_adv.to(device)).cpu()
    # The evaluation decides.  Here points near the boundary may fall on its other side, because the batch is another.
    others = logits.scatter(1, y[:, None], -torch.inf).argmax(1)
    before = torch.where(broken_by == MISCLASSIFIED, before, y)
    after = torch.where(robust, y, torch.where(broken_by == MISCLASSIFIED, before, others))
    write_atomic(folder / "examples.safetensors", save({"x": x.contiguous(), "x_adv": x_adv.contiguous()}))
    figure = plot_adversarial(model, x, x_adv, y, [str(each) for each in classes])
    write_figure(folder / "adversarial.png", figure)
    names = [[str(classes[label]) for label in labels.tolist()] for labels in (y, before, after)]
    return tuple(Example(*fields) for fields in zip(index.tolist(), *names, strict=True))
