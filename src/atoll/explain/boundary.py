"""The closest point found with another prediction, for every input, and the two sides of the boundary there."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from atoll.attacks.evaluate import OnProgress
from atoll.attacks.iterative import Points
from atoll.errors import InputError
from atoll.explain.pgd_cw_search import ladder
from atoll.explain.race import COARSE, Examples, race
from atoll.explain.search import NONE, Found, bisect
from atoll.modules import evaluation_mode
from atoll.rng import content_hash
from atoll.threat import Bounds, Norm, ThreatModel

Strategy = Literal["race", "ladder", "rungs"]
BUDGET = 400  # model calls per point of the race


@dataclass(frozen=True)
class BoundaryPoints:
    """Points on both sides of the decision boundary, one pair for each input, and how they were found.

    Args:
        x: the inputs.
        prediction: the class of each.
        inside: a point that still has this class (by a forward pass), on the way from x to ``across``.
        across: a point that has not, the closest one found.
        other: the class of that one.
        distance: of ``across`` from x, in the norm; infinite where there is none.
        method: what found it: ``FAB from examples``, ``FAB from clean``, ``example`` (an example of another prediction,
            no attack found anything closer), ``RayS``, ``PGD``, ``CW``, or ``none``.
        forward: model passes spent on each point.
        backward: the same, backward.
        shared_forward: passes that belong to no single point: predictions of the examples.
        norm: of the distance.
        tolerance: inside and across are apart by this share of the segment that was bisected, which ended at the point
            that the search had found.

    Where nothing was found, inside and across are x itself, and ``words`` says so.
    """

    x: Tensor
    prediction: Tensor
    inside: Tensor
    across: Tensor
    other: Tensor
    distance: Tensor
    method: tuple[str, ...]
    forward: Tensor
    backward: Tensor
    shared_forward: int
    norm: Norm
    tolerance: float

    def __len__(self) -> int:
        return len(self.x)

    @property
    def success(self) -> Tensor:
        """Which inputs have a boundary point."""
        return self.distance.isfinite()

    @property
    def calls(self) -> Tensor:
        """Model passes per point, forward and backward."""
        return self.forward + self.backward

    @property
    def words(self) -> str | None:
        """What to tell the user if some inputs have no boundary point."""
        missing = ~self.success
        if not missing.any():
            return None
        classes = ", ".join(map(str, sorted(set(self.prediction[missing].tolist()))))
        return (
            f"boundary: no other prediction was found for {int(missing.sum())} of {len(self)} inputs (class {classes});"
            " the model may be constant"
        )

    def __getitem__(self, rows: slice | Tensor) -> BoundaryPoints:
        chosen = range(len(self))[rows] if isinstance(rows, slice) else torch.arange(len(self))[rows.cpu()].tolist()
        picked = {name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return BoundaryPoints(**vars(self) | picked | {"method": tuple(self.method[i] for i in chosen)})

    def to_json(self) -> dict[str, Any]:
        found = self.distance[self.success].double()
        return {
            "norm": self.norm,
            "tolerance": self.tolerance,
            "points": len(self),
            "success": float(self.success.double().mean()),
            "mean_distance": float(found.mean()) if len(found) else None,
            "standard_error": float(found.std() / math.sqrt(len(found))) if len(found) > 1 else None,
            "median_distance": float(found.median()) if len(found) else None,
            "methods": dict(Counter(self.method)),
            "forward": int(self.forward.sum()),
            "backward": int(self.backward.sum()),
            "shared_forward": self.shared_forward,
            # JSON has no infinity.
            "distance": [d if math.isfinite(d) else None for d in self.distance.tolist()],
            "method": list(self.method),
        }


def boundary_search(
    model: nn.Module,
    x: Tensor,
    *,
    norm: Norm = "l2",
    strategy: Strategy = "race",
    budget: int | None = None,
    pool: Tensor | None = None,
    seed: object = 0,
    tolerance: float = 1e-3,
    bounds: Bounds | None = (0.0, 1.0),
    batch_size: int = 256,
    on_progress: OnProgress | None = None,
) -> BoundaryPoints:
    r"""For each input the closest point found whose prediction differs from its own; then bisection onto the boundary.

    ``race`` lets several runs of FAB compete, most of them started at the nearest examples of another prediction (see
    ``race``), so every input has a boundary point if some example or any input has another prediction; where there is
    none, and no gradient leads to one, RayS looks for one from labels alone.  ``ladder`` is the pipeline of the thesis
    (table B.1): PGD at growing eps until a point falls, then CW on all of them, and the closer one; it may find
    nothing.  ``rungs`` is the ladder without CW.

    What is found for a point depends on it, the model, the examples and the seed, not on the batch size (up to
    rounding).

    Args:
        model: any module from inputs to logits; used in evaluation mode and left as it was.
        x: inputs; the model's own prediction is the class, so no labels are needed.
        norm: that distances are measured in; the ladder knows l2 only.
        strategy: ``race``, ``ladder`` or ``rungs``.
        budget: model calls per point, forward and backward counted one each; never exceeded.  None for 400, or for all
            that the ladder asks for.
        pool: examples to start from, such as training images; the inputs themselves if None.  Their predictions are
            made once and counted apart.
        seed: of PGD's random starts; the race draws nothing.
        tolerance: how far both sides of the boundary may be apart, as a share of the segment that is bisected.
        bounds: valid range of inputs.
        batch_size: rows that go through the model together; the race keeps nine times as many images.
        on_progress: called now and then with ``boundary``, how many points are done, and of how many.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> found = boundary_search(model, torch.tensor([[0.6, 0.4], [0.2, 0.5]]))
    >>> [f"{d:.3f}" for d in found.distance], found.other.tolist(), bool((found.calls <= 400).all())
    (['0.141', '0.212'], [1, 0], True)
    """
    if strategy not in get_args(Strategy):
        raise InputError(f"strategy: expected race, ladder or rungs, got {strategy!r}")
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance: expected a share between 0 and 1, got {tolerance}")
    if batch_size < 1:
        raise InputError(f"batch_size: expected at least 1, got {batch_size}")
    threat = ThreatModel(norm, 0.0, bounds)
    if strategy != "race" and norm != "l2":
        raise InputError(f"strategy: the ladder expects l2, got {norm}")
    for inputs in (x,) if pool is None else (x, pool):
        threat.check(inputs)
    if x.dim() < 2 or not len(x) or (pool is not None and pool.shape[1:] != x.shape[1:]):
        shapes = f"{tuple(x.shape)}" if pool is None else f"{tuple(x.shape)} and {tuple(pool.shape)}"
        raise InputError(f"inputs: expected (points, ...), and a pool of the same shape, got {shapes}")
    halvings = math.ceil(math.log2(1 / tolerance))
    calls = _calls(strategy, budget, halvings)
    parts = []
    with evaluation_mode(model), torch.no_grad():
        logits = _logits(model, x, batch_size)
        points = Points(x.detach(), logits.argmax(1), _index(x), logits)
        examples = Examples(points.x, points.y)
        if pool is not None:
            pool = pool.detach().to(x)
            examples = Examples(pool, _logits(model, pool, batch_size).argmax(1))
        for start in range(0, len(x), batch_size):
            part = points[start : start + batch_size]
            if strategy == "race":
                found = race(model, threat, part, examples, int(calls), batch_size=batch_size)
            else:
                found = ladder(model, threat, part, calls, seed=seed, with_cw=strategy == "ladder")
            parts.append(_both_sides(model, threat, part, found, halvings))
            if on_progress is not None:
                on_progress("boundary", start + len(part), len(x))
    return BoundaryPoints(
        x=points.x,
        prediction=points.y,
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in TENSORS},
        method=tuple(method for part in parts for method in part.method),
        shared_forward=0 if pool is None else len(pool),
        norm=norm,
        tolerance=tolerance,
    )


def _calls(strategy: Strategy, budget: int | None, halvings: int) -> float:
    """What is left of a point's budget for the strategy itself."""
    fixed = 2 + halvings  # the clean pass, one that confirms what was found, bisection
    least = fixed + COARSE + 2  # one look of FAB, from an example
    if budget is None:
        budget = max(BUDGET, least)
        return budget - fixed if strategy == "race" else math.inf
    if budget < least:
        raise InputError(f"budget: expected at least {least} calls at this tolerance, got {budget}")
    return budget - fixed


def _logits(model: nn.Module, x: Tensor, batch_size: int) -> Tensor:
    found = torch.cat([model(part) for part in torch.split(x.detach(), batch_size)])
    if found.dim() != 2 or found.shape[1] < 2:
        raise InputError(f"model: expected logits of shape (batch, classes), got {tuple(found.shape)}")
    if not found.isfinite().all():
        raise InputError("model: expected finite logits, got NaN or infinity")
    return found


def _index(x: Tensor) -> Tensor:
    """Points are known by their numbers, not by their places."""
    return torch.tensor([content_hash(point) for point in x], device=x.device)


@dataclass(frozen=True)
class _Sides:
    """A part of what ``BoundaryPoints`` holds."""

    inside: Tensor
    across: Tensor
    other: Tensor
    distance: Tensor
    forward: Tensor
    backward: Tensor
    method: tuple[str, ...]


TENSORS = [field.name for field in fields(_Sides) if field.name != "method"]


def _both_sides(model: nn.Module, threat: ThreatModel, points: Points, found: Found, halvings: int) -> _Sides:
    """Bisection; no claim is believed: what is found has to have another prediction in a plain pass first."""
    x, y = points.x, points.y
    inside, across, other = x.clone(), x.clone(), y.clone()
    rows = torch.tensor([row for row, name in enumerate(found.method) if name != NONE], device=x.device, dtype=y.dtype)
    if len(rows):
        classes = model(found.adv[rows]).argmax(1)
        holds = classes != y[rows]
        sides = bisect(model, x[rows], y[rows], found.adv[rows], classes, halvings)
        for whole, part in zip((inside, across, other), sides, strict=True):
            whole[rows[holds]] = part[holds]
        found.spend(rows, 1 + halvings)
    success = other != y
    return _Sides(
        inside,
        across,
        other,
        torch.where(success, threat.distance(across, x), math.inf),
        found.forward + 1,  # the clean pass
        found.backward,
        tuple(name if holds else NONE for name, holds in zip(found.method, success.tolist(), strict=True)),
    )
