"""Small nets whose attributions or boundaries are known, and checks of search strategies."""

import copy
import math
from functools import cache

import torch

from atoll.attacks.progress import AttackCounts
from atoll.explain.boundary import boundary_search
from atoll.modules import count_passes
from attack_cases import plane
from support import TinyData, tiny_trainer


@cache
def _trained():
    trainer = tiny_trainer("standard", batch_norm=True, double=True, epochs=6)
    trainer.fit()
    return trainer.model.eval()


def net(count=9):
    """A copy of the model (float64), and some of its test images of 1x8x8."""
    data = TinyData()
    data.double = True
    x, _ = data.tensors("test", count)
    model = copy.deepcopy(_trained())
    assert len(model(x).argmax(1).unique()) == min(count, 3)
    return model, x


def smooth(seed=0):
    """An untrained net without kinks, float64, for the same images."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Softplus(), torch.nn.Linear(32, 4)]
        return torch.nn.Sequential(*layers).double()


def linear():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4)).double()


class SmoothedReLU(torch.nn.Module):
    """The mean of ReLU(W(x + noise)) under Gaussian noise, in closed form: the smoothed model of a one-layer net."""

    def __init__(self, w, sigma):
        super().__init__()
        self.w, self.scale = torch.nn.Parameter(w), sigma * w.norm(dim=1)

    def forward(self, x):
        u = x @ self.w.T
        density = torch.exp(-((u / self.scale) ** 2) / 2) / math.sqrt(2 * math.pi)
        return u * torch.special.ndtr(u / self.scale) + self.scale * density


def one_layer(seed):
    """Random weights of a one-layer net with four classes, and 50 points of six numbers."""
    draw = torch.Generator().manual_seed(seed)
    w, x = (torch.randn(rows, 6, generator=draw, dtype=torch.float64) for rows in (4, 50))
    return w, x


def check_both_sides(strategy, budget):
    """Both points have the classes that the result states, and lie on one line."""
    model, x, y = plane(30, torch.float64)
    boundary = boundary_search(model, x, strategy=strategy, tolerance=0.01, budget=budget)
    ok = boundary.success
    assert ok.any()
    assert torch.equal(model(boundary.x_inside).argmax(1), y)
    assert torch.equal(model(boundary.x_outside).argmax(1), boundary.other)
    assert (boundary.other != y)[ok].all()
    torch.testing.assert_close(boundary.distance[ok], (boundary.x_outside - x).norm(dim=1)[ok])
    gap = (boundary.x_outside - boundary.x_inside).norm(dim=1)
    # The segment that was bisected ended at most sqrt(2), the diagonal of the bounds, away.
    assert (gap <= 0.01 * math.sqrt(2)).all()
    assert boundary.x_outside.min() >= 0
    assert boundary.x_outside.max() <= 1
    (dx, dy), (ex, ey) = (boundary.x_outside - x).unbind(1), (boundary.x_inside - x).unbind(1)
    assert (dx * ey - dy * ex).abs().max() < 1e-12  # x_inside is on the way to x_outside
    return boundary


def check_batch_sizes(model, x, strategy, budget, size):
    """Neither the batch size nor the other points change the result for a point."""
    whole = boundary_search(model, x, strategy=strategy, budget=budget, batch_size=256)
    parts = boundary_search(model, x, strategy=strategy, budget=budget, batch_size=size)
    assert whole.method == parts.method
    assert whole.success.any()
    for name in ("x_outside", "x_inside", "distance", "forward", "backward", "other"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name), rtol=1e-7, atol=1e-7)
    few = boundary_search(model, x[:4], pool=x, strategy=strategy, budget=budget)
    torch.testing.assert_close(few.x_outside, whole.x_outside[:4], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(whole[2:4].x_outside, whole.x_outside[2:4])
    assert whole[torch.tensor([3, 1])].method == (whole.method[3], whole.method[1])


def check_counts(strategy, budget):
    """The result counts every pass, and no point exceeds its budget."""
    model, x = net(10)
    tally = AttackCounts()
    with count_passes(model, tally):
        boundary = boundary_search(model, x, strategy=strategy, budget=budget)
    assert tally.forward == int(boundary.forward.sum())
    assert tally.backward == int(boundary.backward.sum())
    assert (boundary.calls <= budget).all()
    tally = AttackCounts()
    with count_passes(model, tally):
        pool = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        pooled = boundary_search(model, x, pool=pool, strategy=strategy, budget=budget)
    assert tally.forward == int(pooled.forward.sum()) + pooled.shared_forward
