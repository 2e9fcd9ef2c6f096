"""Steps of Auto-PGD for l1 (Croce & Hein, 2021, "Mind the box"): sparse, and from large radii to the true one."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.attacks.iterative import Rows
from atoll.rng import PointRNG
from atoll.threat import ThreatModel, per_point

FEWER = 0.95  # the best perturbation counts as sparser if it has less than this share of the coordinates before
THINNING = 1.5  # a step moves so many times fewer coordinates than the best perturbation has
SHRINK, FLOOR = 1.5, 0.1  # of the step size at a checkpoint that brought no sparsity, and its least share of the radius


class SparseSteps:
    r"""A step of l1 norm :math:`\eta` spread over the k largest coordinates of the gradient, projected exactly.

    :math:`x_{j+1} = \Pi(x_j + \eta\, \mathrm{sign}(g) 1_{top k} / k)`, with k two thirds of the number of coordinates
    in which the best point differs from the clean one.  At checkpoints (every 4 % of a phase) k is set anew; if the
    best point has become sparser, the search goes back to it with the full step :math:`\eta` = radius, else the step
    shrinks by 1.5, down to a tenth of the radius.

    Three phases of 30, 30 and 40 % of the steps have radii 3 eps, 2 eps and eps; each begins at the best point of the
    one before, projected.  Only candidates of the last phase count.

    >>> SparseSteps(ThreatModel("l1", 12.0), 100).times.bincount()  # looks at radius 0, 12, 24, 36
    tensor([ 0, 41, 31, 31])
    """

    def __init__(self, threat: ThreatModel, steps: int) -> None:
        short = 3 * steps // 10  # none of very short runs, which keep to the last phase
        phases = [(times, count) for times, count in ((3, short), (2, short), (1, steps - 2 * short)) if count]
        # By look, of which a phase has one more than steps: its radius in eps, its place in the phase, whether it is a
        # checkpoint, and the radius for the next candidate.
        self.times = torch.cat([torch.full((count + 1,), times) for times, count in phases])
        self.place = torch.cat([torch.arange(count + 1) for _, count in phases])
        self.check = torch.cat([torch.arange(count + 1) % max(1, int(0.04 * count)) == 0 for _, count in phases])
        self.next_times = torch.cat([self.times[1:], self.times[-1:]])
        self.threats = {times: ThreatModel("l1", times * threat.radius, threat.bounds) for times, _ in phases}
        self.radius = threat.radius
        self.looks = len(self.times)

    def start(self, x: Tensor, streams: PointRNG) -> Tensor:
        """Normal noise, projected: unlike a uniform draw from the ball it is sparse."""
        threat = self.threats[int(self.times[0])]
        return threat.project(x + streams.normal(*x.shape[1:], dtype=x.dtype), x)

    def state(self, x: Tensor) -> dict[str, Tensor]:
        zeros = x.new_zeros(len(x))
        return {"step": zeros, "sparsity": zeros.clone()}

    def opens(self, look: Tensor) -> Tensor:
        """Whether the best point before this look is to be forgotten: it belongs to another radius."""
        return self.place.to(look.device)[look] == 0

    def counts(self, look: Tensor) -> Tensor:
        """Whether the candidate of this look is inside the ball."""
        return self.times.to(look.device)[look] == 1

    def step(self, rows: Rows, look: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        """The next candidates, given the gradient at the present ones."""
        s, x, first = rows.state, rows.x, self.opens(look)
        radius = self.times.to(look.device)[look] * self.radius
        check = self.check.to(look.device)[look]
        sparsity = (s["best"] != x).flatten(1).sum(1).to(x.dtype)
        fewer = check & ~first & (sparsity < FEWER * s["sparsity"])
        shrunk = torch.maximum(s["step"] / SHRINK, FLOOR * radius)
        s["step"] = torch.where(first | fewer, radius, torch.where(check, shrunk, s["step"])).to(x.dtype)
        s["sparsity"] = torch.where(check, sparsity, s["sparsity"])
        back = fewer & ~rows.success
        rows.adv[back], gradient[back] = s["best"][back], s["best_gradient"][back]

        following = self._sparse(gradient, s["sparsity"]).mul_(per_point(s["step"], x)).add_(rows.adv)
        next_times = self.next_times.to(look.device)[look]
        last = next_times != self.times.to(look.device)[look]
        last |= look == self.looks - 1
        following[last] = s["best"][last]
        for times, threat in self.threats.items():
            here = next_times == times
            if here.any():
                following[here] = threat.project(following[here], x[here])
        return following

    @staticmethod
    def _sparse(gradient: Tensor, sparsity: Tensor) -> Tensor:
        """Signs of the largest coordinates, divided by their number."""
        flat = gradient.flatten(1)
        keep = (sparsity / THINNING).round().clamp_(1, flat.shape[1]).long()
        size = flat.abs()
        least = size.topk(int(keep.max()), dim=1).values.gather(1, keep[:, None] - 1)
        signs = flat.sign().mul_(size >= least)
        return signs.div_(signs.abs().sum(1, keepdim=True).clamp_min_(1)).view_as(gradient)
