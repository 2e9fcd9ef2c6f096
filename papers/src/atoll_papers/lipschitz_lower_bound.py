"""Lower bounds of Lipschitz constants, proven by pairs of inputs from gradient ascent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.errors import InputError
from atoll.modules import evaluation_mode
from atoll.rng import PointRNG
from atoll.threat import Bounds, ThreatModel, per_point

CLOSEST = 1e-4  # for closer pairs, rounding of the logits would dominate
LENGTHS = (1.0, 1 / 8, 1 / 64, 1 / 512)  # initial lengths of the segments, relative to the first


@dataclass(frozen=True)
class WitnessPairs:
    """Pairs of inputs with a difference quotient for each: change of a difference of two logits per distance.

    Each value is a lower bound of a Lipschitz constant, proven by the pair (a, b).
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


def difference_quotients(model: nn.Module, a: Tensor, b: Tensor, j: Tensor | None = None) -> Tensor:
    r"""The largest difference quotient of a difference of two logits between a and b.

    .. math:: \max_i \frac{|f_j(a) - f_i(a) - (f_j(b) - f_i(b))|}{\|a - b\|}

    Each pair has one class j.  If j is None, the maximum is also over j.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    >>> difference_quotients(model, torch.tensor([[0.0, 4.0]]), torch.tensor([[3.0, 0.0]])).detach()
    tensor([5.])
    """
    change: Tensor = model(a) - model(b)
    every = change.amax(1) - change.amin(1) if j is None else (change.gather(1, j[:, None]) - change).abs().amax(1)
    return every / _lengths(a - b).clamp_min(CLOSEST)


def _lengths(x: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
    return lengths


def global_lower_bound(
    model: nn.Module, x: Tensor, *, bounds: Bounds | None = (0.0, 1.0), steps: int = 100, seed: object = 0
) -> WitnessPairs:
    """Lower bounds of the largest constant of a difference of two logits within the bounds (thesis, C.3).

    Each input is paired with another random input, and gradient ascent moves both.

    Args:
        model: the model; use float64 for bounds that are exact to the last digits.
        x: inputs to start from, at least two.
        bounds: bounds of the inputs.
        steps: steps of each of the four ascents.
        seed: seed of the random pairs.

    >>> model = nn.Linear(2, 2, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    >>> pairs = global_lower_bound(model, torch.rand(4, 2, dtype=torch.float64))
    >>> 4.99 < pairs.largest < 5 + 1e-9
    True
    """
    if len(x) < 2:
        raise InputError(f"x: expected at least two inputs, got {len(x)}")
    number = torch.arange(len(x), device=x.device)
    partner = (number + 1 + PointRNG(seed, "partner", index=number).integers(len(x) - 1)) % len(x)
    return _ascend(model, x.clone(), x[partner], None, ThreatModel("l2", 0.0, bounds).clamp, steps)


def local_lower_bound(
    model: nn.Module, x: Tensor, eps: float, *, bounds: Bounds | None = (0.0, 1.0), steps: int = 100, seed: object = 0
) -> WitnessPairs:
    """Lower bounds of the constants of the top logit minus another logit, within eps (l2) of each input (thesis, C.3).

    Args:
        model: the model; use float64 for bounds that are exact to the last digits.
        x: inputs; j is the class predicted for each of them.
        eps: radius of the ball that contains both ends of a pair.
        bounds: bounds of the inputs.
        steps: steps of each of the four ascents.
        seed: seed of the random starts.
    """
    if not CLOSEST < eps < math.inf:
        raise InputError(f"eps: expected a number > {CLOSEST:g}, got {eps}")
    threat = ThreatModel("l2", eps, bounds)
    streams = PointRNG(seed, "local", index=torch.arange(len(x), device=x.device))
    a, b = threat.random_start(x, streams), threat.random_start(x, streams)
    with torch.no_grad(), evaluation_mode(model):
        top = model(x).argmax(1)
    return _ascend(model, a, b, top, lambda moved: threat.project(moved, x), steps)


def _ascend(
    model: nn.Module, a: Tensor, b: Tensor, j: Tensor | None, into: Callable[[Tensor], Tensor], steps: int
) -> WitnessPairs:
    """The best pair of each row during gradient ascent from long and short segments, projected ``into`` the region.

    Long segments cross many linear regions, and short segments find the slope of a single region.  Shortened segments
    stay within the region, because it is convex.  Gradients are normalized, and each step is a shrinking share of the
    length of the segment.
    """
    best = WitnessPairs(a, b, a.new_zeros(len(a)))
    with torch.enable_grad(), evaluation_mode(model):
        steepest = _steepest(model, a, j)
        reach = _lengths(b - a)
        for share in LENGTHS:
            # The shortest segments follow the gradient, because an ascent may never leave the classes it starts with.
            way = b - a if share > LENGTHS[-1] else steepest * per_point(reach, a)
            ends = [a.clone(), into(a + share * way)]
            length = _lengths(ends[0] - ends[1])
            for step in range(steps + 1):
                ends = [end.detach().requires_grad_() for end in ends]
                values = difference_quotients(model, ends[0], ends[1], j)
                best = _better(best, ends[0].detach(), ends[1].detach(), values.detach())
                # backward() would change the gradients of the weights.
                uphill = torch.autograd.grad(values.sum(), ends)
                size = _lengths(torch.cat([g.flatten(1) for g in uphill], 1)).clamp_min(1e-30)
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
    return way / per_point(_lengths(way).clamp_min(1e-30), x)


def _better(best: WitnessPairs, a: Tensor, b: Tensor, values: Tensor) -> WitnessPairs:
    rows = values > best.values
    wide = per_point(rows, a)
    return WitnessPairs(
        torch.where(wide, a, best.a), torch.where(wide, b, best.b), torch.where(rows, values, best.values)
    )
