"""Attacks step by step: everything they evaluate for a point equals what the published algorithm evaluates.

The algorithms are written here once more, for a single point and with NumPy, from the papers.  Random starts are those
of the attack; other tests check them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from torch import Tensor, nn

from atoll.attacks import APGD, FAB, PGD, Square
from atoll.attacks.base import Attack
from atoll.threat import ThreatModel

Array = NDArray[Any]
Look = Callable[[Array], tuple[Array, Array]]  # logits, and their derivatives: classes times features

SHAPE = (3, 2, 2)
CLASSES = 6
SEEDS = range(4)


class Point:
    """A point, a network that classifies it correctly by some margin, and what an attack evaluates."""

    def __init__(self, seed: int, *, scale: float = 3.0) -> None:
        draw = torch.Generator().manual_seed(seed)
        features = math.prod(SHAPE)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()
        for parameter in self.model.parameters():
            parameter.data = scale * torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 4
        self.x = torch.rand(1, *SHAPE, generator=draw, dtype=torch.float64)
        self.y = self.model(self.x).argmax(1)

    def candidates(self, attack: Attack) -> tuple[list[Array], Array]:
        """Inputs that the attack evaluates after the clean one, and its result."""
        asked: list[Array] = []
        hook = self.model.register_forward_pre_hook(lambda _, inputs: asked.append(flat(inputs[0])))
        result = attack(self.model, self.x, self.y)
        hook.remove()
        return asked[1:] if attack.__class__ is not PGD else asked, flat(result)

    def look(self, point: Array) -> tuple[Array, Array]:
        inputs = torch.from_numpy(point.copy()).view(1, *SHAPE)
        jacobian = torch.autograd.functional.jacobian(lambda z: self.model(z)[0], inputs)
        return self.model(inputs)[0].detach().numpy(), jacobian.reshape(CLASSES, -1).numpy()

    @property
    def clean(self) -> Array:
        return flat(self.x)

    @property
    def label(self) -> int:
        return int(self.y)

    def wrong(self, point: Array) -> bool:
        return int(self.look(point)[0].argmax()) != self.label


def flat(x: Tensor) -> Array:
    return x.detach().reshape(-1).numpy().copy()


def size(delta: Array, norm: str) -> float:
    return float(np.linalg.norm(delta, {"linf": np.inf, "l2": 2, "l1": 1}[norm]))


def project(point: Array, x: Array, norm: str, eps: float) -> Array:
    """For l2, ball first and bounds second, as in AutoAttack; Atoll's l2 and l1 balls are smaller by 1e-6."""
    if norm == "linf":
        return np.clip(np.clip(point, x - eps, x + eps), 0, 1)
    eps *= 1 - 1e-6
    if norm == "l2":
        return np.clip(x + (point - x) * min(1, eps / max(size(point - x, "l2"), 1e-30)), 0, 1)

    def moved(threshold: float) -> Array:
        shrunk = np.sign(point - x) * np.maximum(np.abs(point - x) - threshold, 0)
        return np.clip(x + shrunk, 0, 1) - x

    if size(moved(0), "l1") <= eps:
        return x + moved(0)
    return x + moved(brentq(lambda t: size(moved(t), "l1") - eps, 0, np.abs(point - x).max(), xtol=1e-15))


def steepest(gradient: Array, norm: str) -> Array:
    return np.sign(gradient) if norm == "linf" else gradient / np.linalg.norm(gradient)


# --- objectives and their gradients


def cross_entropy(look: Look, y: int) -> Callable[[Array], tuple[float, Array]]:
    def value(point: Array) -> tuple[float, Array]:
        logits, slopes = look(point)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        return -math.log(p[y]), p @ slopes - slopes[y]

    return value


def targeted_dlr(look: Look, y: int, target: int) -> Callable[[Array], tuple[float, Array]]:
    """Croce & Hein (2020), equation 7, with the opposite sign."""

    def value(point: Array) -> tuple[float, Array]:
        logits, slopes = look(point)
        first, _, third, fourth = np.argsort(-logits)[:4]
        below = logits[first] - (logits[third] + logits[fourth]) / 2
        up, down = slopes[target] - slopes[y], slopes[first] - (slopes[third] + slopes[fourth]) / 2
        ratio = (logits[target] - logits[y]) / below
        return ratio, (up - ratio * down) / below

    return value


# --- APGD


def apgd(
    value: Callable[[Array], tuple[float, Array]],
    start: Array,
    x: Array,
    norm: str,
    eps: float,
    steps: int,
    patience: float = math.inf,
) -> tuple[list[Array], Array]:
    """Croce & Hein (2020), algorithm 1: what it evaluates, and the best point."""
    ends, share, width = [], 0, max(1, int(0.22 * steps))
    while share + width <= steps:
        share += width
        ends.append(share)
        width = max(width - max(1, int(0.03 * steps)), max(1, int(0.06 * steps)))
    seen = [start]
    f, g = value(start)
    first, best, best_f, best_g, eta = f, start, f, g, 2 * eps
    before, current = start, start
    rises, window, halved, checked = 0, 0, True, f
    for k in range(steps):
        if k and k in ends:
            halve = rises <= 0.75 * (k - window) or (not halved and checked >= best_f)
            if best_f + patience * (best_f - first) < 0:
                return seen, best
            rises, window, halved, checked = 0, k, halve, best_f
            if halve:
                eta, current, g = eta / 2, best, best_g
        plain = project(current + eta * steepest(g, norm), x, norm, eps)
        following = plain
        if k:
            following = project(current + 0.75 * (plain - current) + 0.25 * (current - before), x, norm, eps)
        before, current = current, following
        seen.append(current)
        last, (f, g) = f, value(current)
        rises += f > last
        if f > best_f:
            best, best_f, best_g = current, f, g
    return seen, best


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("steps", [7, 40])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_apgd(norm: str, steps: int, seed: int) -> None:
    point, eps = Point(seed), {"linf": 0.02, "l2": 0.05}[norm]
    asked, result = point.candidates(APGD(ThreatModel(norm, eps), steps=steps))  # type: ignore[arg-type]
    assert not point.wrong(result)
    seen, best = apgd(cross_entropy(point.look, point.label), asked[0], point.clean, norm, eps, steps)
    np.testing.assert_allclose(asked, seen, rtol=0, atol=1e-9)
    np.testing.assert_allclose(result, best, rtol=0, atol=1e-9)


@pytest.mark.parametrize("patience", [None, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_targeted_apgd_with_restarts(seed: int, patience: float | None) -> None:
    """Two runs for each of the three likeliest other classes."""
    point, steps, eps = Point(seed), 30, 0.01
    attack = APGD(ThreatModel("linf", eps), "dlr", steps=steps, targets=3, restarts=2, patience=patience)
    asked, result = point.candidates(attack)
    assert not point.wrong(result)
    order = [int(c) for c in np.argsort(-point.look(point.clean)[0]) if c != point.label]
    best = asked[0]
    for target in (order[0], order[0], order[1], order[1], order[2], order[2]):
        value = targeted_dlr(point.look, point.label, target)
        seen, best = apgd(value, asked[0], point.clean, "linf", eps, steps, math.inf if patience is None else patience)
        np.testing.assert_allclose(asked[: len(seen)], seen, rtol=0, atol=1e-9)
        asked = asked[len(seen) :]
    assert not asked
    np.testing.assert_allclose(result, best, rtol=0, atol=1e-9)


def sparse_apgd(
    value: Callable[[Array], tuple[float, Array]], start: Array, x: Array, eps: float, steps: int
) -> tuple[list[Array], Array]:
    """Croce & Hein (2021), algorithm 1 with the schedule of AutoAttack."""
    counts = [(3, int(0.3 * steps)), (2, int(0.3 * steps))]
    seen: list[Array] = []
    current = start
    for times, count in [*counts, (1, steps - sum(count for _, count in counts))]:
        radius, every = times * eps, max(1, int(0.04 * count))
        current = project(current, x, "l1", radius) if seen else current
        best_f = -math.inf
        for k in range(count + 1):
            seen.append(current)
            f, g = value(current)
            if k == 0 or f > best_f:
                best, best_f, best_g = current, f, g
            if k == 0:
                moved, eta = np.count_nonzero(best != x), radius
            elif k % every == 0:
                now = np.count_nonzero(best != x)
                if now < 0.95 * moved:
                    eta, current, g = radius, best, best_g
                else:
                    eta = max(eta / 1.5, radius / 10)
                moved = now
            few = max(1, round(moved / 1.5))
            largest = np.argsort(-np.abs(g))[:few]
            direction = np.zeros_like(g)
            direction[largest] = np.sign(g[largest]) / few
            current = project(current + eta * direction, x, "l1", radius)
        current = best
    return seen, best


@pytest.mark.parametrize("seed", SEEDS)
def test_sparse_apgd(seed: int) -> None:
    point, eps, steps = Point(seed, scale=1.5), 0.1, 60
    asked, result = point.candidates(APGD(ThreatModel("l1", eps), steps=steps))
    assert not point.wrong(result)
    seen, best = sparse_apgd(cross_entropy(point.look, point.label), asked[0], point.clean, eps, steps)
    np.testing.assert_allclose(asked, seen, rtol=0, atol=1e-6)
    np.testing.assert_allclose(result, best, rtol=0, atol=1e-6)


# --- PGD


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_pgd(norm: str, seed: int) -> None:
    """Madry et al. (2018): projected steps from a random start; the last point is the result."""
    point, eps, steps = Point(seed), 0.05, 6
    asked, result = point.candidates(PGD(ThreatModel(norm, eps), steps=steps, step_size=0.02))  # type: ignore[arg-type]
    current, seen = asked[0], []
    for _ in range(steps):
        seen.append(current)
        gradient = cross_entropy(point.look, point.label)(current)[1]
        current = project(current + 0.02 * steepest(gradient, norm), point.clean, norm, eps)
    np.testing.assert_allclose(asked[:steps], seen, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result, current, rtol=0, atol=1e-12)


# --- FAB


def to_hyperplane(x: Array, w: Array, rise: float, norm: str) -> Array:
    """The smallest change of x inside the bounds with a given dot product with w, or the nearest product."""
    toward = np.sign(w) * np.sign(rise)
    room = np.where(toward > 0, 1 - x, x)
    if (np.abs(w) * room).sum() <= abs(rise):
        return toward * room
    if norm == "l1":  # the most useful coordinates first
        change, left = np.zeros_like(x), abs(rise)
        for i in np.argsort(-np.abs(w)):
            move = min(room[i], left / abs(w[i]))
            change[i], left = toward[i] * move, left - move * abs(w[i])
        return change

    def moved(t: float) -> Array:
        return toward * np.minimum(t if norm == "linf" else t * np.abs(w), room)

    most = 1.0 if norm == "linf" else 1 / np.abs(w).min()
    return moved(brentq(lambda t: abs(w @ moved(t)) - abs(rise), 0, most, xtol=1e-15, rtol=1e-14))


def fab(
    point: Point, start: Array, norm: str, steps: int, target: int | None, closest: float
) -> tuple[list[Array], Array | None, float]:
    """Croce & Hein (2020), "Minimally distorted adversarial examples": iterates, and the closest adversarial one.

    An adversarial iterate is pulled back to 0.9 of its perturbation, with the linearization at the iterate itself.
    """
    x, y, current, result, seen = point.clean, point.label, start, None, []
    dual = {"linf": 1, "l2": 2, "l1": np.inf}[norm]
    for _ in range(steps + 1):
        seen.append(current)
        logits, slopes = point.look(current)
        adversarial = logits.argmax() != y
        if adversarial and size(current - x, norm) < closest:
            result, closest = current, size(current - x, norm)
        others = [c for c in range(CLASSES) if c != y] if target is None else [target]
        f, w = min(
            ((logits[c] - logits[y], slopes[c] - slopes[y]) for c in others),
            key=lambda pair: abs(pair[0]) / np.linalg.norm(pair[1], dual),
        )
        pulled = x + 0.9 * (current - x) if adversarial else current
        d, d_x = (to_hyperplane(z, w, -f - w @ (z - current), norm) for z in (pulled, x))
        alpha = min(size(d, norm) / max(size(d, norm) + size(d_x, norm), 1e-12), 0.1)
        current = np.clip((1 - alpha) * (pulled + 1.05 * d) + alpha * (x + 1.05 * d_x), 0, 1)
    return seen, result, closest


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("targets", [0, 2])
def test_fab(norm: str, targets: int, seed: int) -> None:
    # With more steps, some iterates end on the boundary, up to rounding, and rounding decides on which side.
    point, steps, runs, closest = Point(seed), 5, 2, math.inf
    attack = FAB(ThreatModel(norm, 9.0), steps=steps, targets=targets, restarts=runs, minimum_norm=True)  # type: ignore[arg-type]
    asked, result = point.candidates(attack)
    order = [int(c) for c in np.argsort(-point.look(point.clean)[0]) if c != point.label]
    best = point.clean
    for number, target in enumerate(np.repeat(order[:targets] or [-1], runs)):
        if number % runs == 0:
            np.testing.assert_array_equal(asked[0], point.clean)
        else:  # at most half as far away as the closest one so far
            assert 0 < size(asked[0] - point.clean, norm) <= 9.0 / 2
        seen, nearer, closest = fab(point, asked[0], norm, steps, None if target < 0 else int(target), closest)
        best = best if nearer is None else nearer
        np.testing.assert_allclose(asked[: len(seen)], seen, rtol=0, atol=1e-7)
        asked = asked[len(seen) :]
    assert not asked
    assert point.wrong(result)
    np.testing.assert_allclose(result, best, rtol=0, atol=1e-7)


# --- Square


@pytest.mark.parametrize("seed", SEEDS)
def test_square(seed: int) -> None:
    """Each query changes a square of the scheduled side of the best candidate, one shift by eps for each channel."""
    draw = torch.Generator().manual_seed(seed)
    shape, eps, queries = (3, 9, 9), 0.05, 60
    model = nn.Sequential(nn.Flatten(), nn.Linear(243, 5)).double()
    model[1].weight.data = torch.randn(5, 243, generator=draw, dtype=torch.float64)
    x = torch.rand(1, *shape, generator=draw, dtype=torch.float64)
    y = model(x).argmax(1)
    model[1].bias.data = 30.0 * nn.functional.one_hot(y[0], 5).double()  # nothing can break it
    asked: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[0][0].clone()))
    result = Square(ThreatModel("linf", eps), queries=queries, horizon=300)(model, x, y)[0]
    start, *proposals = asked[1 : queries + 1]

    def margin(candidate: Tensor) -> float:
        logits = model[1](candidate.flatten()).detach()
        return float(logits[torch.arange(5) != y].max() - logits[y])

    low, high = (x[0] - eps).clamp_min(0), (x[0] + eps).clamp_max(1)
    stripes = (start == high).double()
    assert ((start == low) | (start == high)).all()
    assert (stripes.amin(1) == stripes.amax(1)).all()  # vertical
    best, sides = start, []
    for number, proposal in enumerate(proposals, 1):
        halvings = sum(number > limit * 300 / 10_000 for limit in (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000))
        side = min(8, max(1, round(math.sqrt(0.8 / 2**halvings * 81))))
        changed = (proposal != best).any(0)
        places = changed.nonzero()
        if len(places):
            top, left = places.amin(0).tolist()
            assert (places.amax(0) < torch.tensor([top + side, left + side])).all()
            sides.append((places.amax(0) - places.amin(0)).max().item() + 1 == side)
        for channel in range(3):
            moved = proposal[channel] != best[channel]
            assert torch.equal(proposal[channel][moved], high[channel][moved]) or torch.equal(
                proposal[channel][moved], low[channel][moved]
            )
        best = proposal if margin(proposal) > margin(best) else best
    assert sum(sides) > len(sides) / 2  # the squares are not smaller than scheduled, unless a change has no effect
    assert torch.equal(result, best)
    assert margin(best) > margin(start)
