"""How tight a Lipschitz constant is: pairs of inputs that prove it cannot be smaller, found by optimisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.certify import certifier_for
from atoll.errors import InputError
from atoll.models.base import Classifier
from atoll.modules import evaluation_mode
from atoll.rng import PointRNG
from atoll.threat import Bounds, ThreatModel, per_point

CLOSEST = 1e-4  # pairs closer to each other would measure the rounding of the logits
LENGTHS = (1.0, 1 / 8, 1 / 64, 1 / 512)  # of the segments that ascents start from, as shares of the first


@dataclass(frozen=True)
class Pairs:
    """Pairs of inputs, and for each by how much a difference of two logits changes between them, over their distance.

    Each value is a lower bound of a Lipschitz constant, with its proof: a and b.
    """

    a: Tensor
    b: Tensor
    values: Tensor

    @property
    def largest(self) -> float:
        return float(self.values.max())

    @property
    def mean(self) -> float:
        return float(self.values.mean())


@dataclass(frozen=True)
class Tightness:
    """A row of thesis table 5.3: the proven constant, and what was found below it (local: the mean over the points)."""

    upper: float
    lower: float
    local: float


def slopes(model: nn.Module, a: Tensor, b: Tensor, j: Tensor | None = None) -> Tensor:
    r"""How steep the steepest difference of two logits is between a and b.

    .. math:: \max_i \frac{|f_j(a) - f_i(a) - (f_j(b) - f_i(b))|}{\|a - b\|}

    Args:
        model: f.
        a: inputs.
        b: inputs.
        j: one class for each pair; the best of all if None.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    >>> slopes(model, torch.tensor([[0.0, 4.0]]), torch.tensor([[3.0, 0.0]])).detach()  # the norm of (3, -4)
    tensor([5.])
    """
    change = model(a) - model(b)
    every = change.amax(1) - change.amin(1) if j is None else (change.gather(1, j[:, None]) - change).abs().amax(1)
    found: Tensor = every / torch.linalg.vector_norm((a - b).flatten(1), dim=1).clamp_min(CLOSEST)
    return found


def global_lower(
    model: nn.Module, x: Tensor, *, bounds: Bounds | None = (0.0, 1.0), steps: int = 100, seed: object = 0
) -> Pairs:
    """Lower bounds of the largest constant of a difference of two logits within the bounds (thesis, C.3).

    Every input is a start, and another one, at random, its partner; gradient ascent moves both.

    Args:
        model: in float64 if the bounds are to be trusted to the last digits.
        x: inputs to start from, two at least.
        bounds: of inputs.
        steps: of each of the four ascents.
        seed: of the choice of partners.

    >>> model = nn.Linear(2, 2, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    >>> found = global_lower(model, torch.rand(4, 2, dtype=torch.float64))
    >>> 4.99 < found.largest < 5 + 1e-9
    True
    """
    if len(x) < 2:
        raise InputError(f"x: expected at least two inputs, got {len(x)}")
    number = torch.arange(len(x), device=x.device)
    partner = (number + 1 + PointRNG(seed, "partner", index=number).integers(len(x) - 1)) % len(x)
    a, b = x.clone(), x[partner].clone()
    box = ThreatModel("l2", 0.0, bounds)
    return _ascend(model, a, b, None, box.clamp, steps)


def local_lower(
    model: nn.Module, x: Tensor, eps: float, *, bounds: Bounds | None = (0.0, 1.0), steps: int = 100, seed: object = 0
) -> Pairs:
    """Lower bounds of the constants of the top logit minus another one, within eps (l2) of each input (thesis, C.3).

    Args:
        model: in float64 if the bounds are to be trusted to the last digits.
        x: inputs; j is the class predicted there.
        eps: radius of the ball that both ends stay in.
        bounds: of inputs.
        steps: of each of the four ascents.
        seed: of the random starts.
    """
    if not CLOSEST < eps < math.inf:
        raise InputError(f"eps: expected a number > {CLOSEST:g}, got {eps}")
    threat = ThreatModel("l2", eps, bounds)
    streams = PointRNG(seed, "local", index=torch.arange(len(x), device=x.device))
    a, b = threat.random_start(x, streams), threat.random_start(x, streams)
    with torch.no_grad(), evaluation_mode(model):
        top = model(x).argmax(1)
    return _ascend(model, a, b, top, lambda moved: threat.project(moved, x), steps)


def tightness(
    model: Classifier, x: Tensor, eps: float, *, bounds: Bounds | None = (0.0, 1.0), steps: int = 100, seed: object = 0
) -> Tightness:
    """The proven constant of a model next to what optimisation finds below it, from the same inputs.

    >>> from atoll.models import MLP
    >>> found = tightness(MLP((2,), 3, hidden=(4,)).double(), torch.rand(5, 2, dtype=torch.float64), 0.1, steps=20)
    >>> found.local <= found.upper and found.lower <= found.upper
    True
    """
    return Tightness(
        certifier_for(model).lipschitz,
        global_lower(model, x, bounds=bounds, steps=steps, seed=seed).largest,
        local_lower(model, x, eps, bounds=bounds, steps=steps, seed=seed).mean,
    )


def _ascend(
    model: nn.Module,
    a: Tensor,
    b: Tensor,
    j: Tensor | None,
    into: Callable[[Tensor], Tensor],
    steps: int,
) -> Pairs:
    """The best pair of each row on its way uphill, from long segments and from short ones.

    Long ones find their way through many linear regions, short ones the slope of a single one; gradients are
    normalised, and steps are a share of the segment that shrinks.

    Args:
        model: f.
        a: starts.
        b: starts; where shorter segments from a end, too, because the region is convex.
        j: as for ``slopes``.
        into: moves inputs to where they are allowed to be.
        steps: of each ascent.
    """
    best = Pairs(a, b, a.new_zeros(len(a)))
    with torch.enable_grad(), evaluation_mode(model):
        steepest = _steepest(model, a, j)
        reach = torch.linalg.vector_norm((b - a).flatten(1), dim=1)
        for share in LENGTHS:
            # The shortest follow the gradient: what starts with the wrong pair of classes may stay with it.
            way = b - a if share > LENGTHS[-1] else steepest * per_point(reach, a)
            ends = [a.clone(), into(a + share * way)]
            length = torch.linalg.vector_norm((ends[0] - ends[1]).flatten(1), dim=1)
            for step in range(steps + 1):
                ends = [end.detach().requires_grad_() for end in ends]
                values = slopes(model, ends[0], ends[1], j)
                best = _better(best, ends[0].detach(), ends[1].detach(), values.detach())
                # Not backward(), which would leave gradients on the model's weights.
                uphill = torch.autograd.grad(values.sum(), ends)
                size = torch.linalg.vector_norm(torch.cat([g.flatten(1) for g in uphill], 1), dim=1).clamp_min(1e-30)
                pace = per_point(0.5 * length * (1 - step / (steps + 1)) / size, a)
                ends = [into(end.detach() + pace * g) for end, g in zip(ends, uphill, strict=True)]
    return best


def _steepest(model: nn.Module, x: Tensor, j: Tensor | None) -> Tensor:
    """The direction of the largest gradient of a difference of two logits."""
    x = x.detach().requires_grad_()
    logits = model(x)
    classes = range(logits.shape[1])
    slope = torch.stack([torch.autograd.grad(logits[:, i].sum(), x, retain_graph=True)[0] for i in classes], 1)
    size = torch.cdist(slope.flatten(2), slope.flatten(2))
    rows = torch.arange(len(x), device=x.device)
    first = size.amax(2).argmax(1) if j is None else j
    way = slope[rows, first] - slope[rows, size[rows, first].argmax(1)]
    return way / per_point(torch.linalg.vector_norm(way.flatten(1), dim=1).clamp_min(1e-30), x)


def _better(best: Pairs, a: Tensor, b: Tensor, values: Tensor) -> Pairs:
    rows = values > best.values
    wide = per_point(rows, a)
    return Pairs(torch.where(wide, a, best.a), torch.where(wide, b, best.b), torch.where(rows, values, best.values))
