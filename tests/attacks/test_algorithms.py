"""Gradient attacks step by step: everything they evaluate for a point equals what the published algorithm evaluates.

The algorithms are written here once more, for a single point and with NumPy, from the papers.  Random starts are those
of the attack; other tests check them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from atoll.attacks import APGD, FAB, FMN, PDPGD, PGD, CarliniWagner, RayS, SigmaZero
from atoll.attacks.iterative import MinimumNormAttack
from atoll.threat import AttackNorm, Bounds, ThreatModel
from single_point import CLASSES, SEEDS, Array, Look, Point, flat, project, size


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


def margin(look: Look, y: int) -> Callable[[Array], tuple[float, Array]]:
    def value(point: Array) -> tuple[float, Array]:
        logits, slopes = look(point)
        other = max((c for c in range(CLASSES) if c != y), key=lambda c: float(logits[c]))
        return float(logits[other] - logits[y]), slopes[other] - slopes[y]

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
    bounds: tuple[float, float] = (0, 1),
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
        plain = project(current + eta * steepest(g, norm), x, norm, eps, *bounds)
        following = plain
        if k:
            following = project(current + 0.75 * (plain - current) + 0.25 * (current - before), x, norm, eps, *bounds)
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
    # After convergence, rounding decides which points are better; they differ by less than the tolerance.
    np.testing.assert_allclose(asked, seen, rtol=0, atol=1e-6)
    np.testing.assert_allclose(result, best, rtol=0, atol=1e-6)


class Script(nn.Module):
    """Each pass has another logit of the wrong class, with another slope, wherever the input is."""

    def __init__(self, seed: int, passes: int) -> None:
        super().__init__()
        draw = np.random.default_rng(seed)
        # Mostly up, but often below the best, and sometimes neither up nor down.
        rises = draw.choice([-1.0, 0.0, 0.02, 0.1, 0.5], passes, p=[0.1, 0.1, 0.35, 0.35, 0.1])
        self.logits = np.minimum(np.cumsum(rises) - 9, -0.1)  # never misclassified
        self.slopes = draw.normal(size=(passes, 12))
        self.asked: list[Array] = []

    def forward(self, x: Tensor) -> Tensor:
        number = len(self.asked)
        self.asked.append(flat(x))
        other = x.flatten(1) @ torch.tensor(self.slopes[number])
        return torch.stack([0 * other, other - other.detach() + self.logits[number]], 1)

    def values(self) -> Callable[[Array], tuple[float, Array]]:
        """Cross-entropy and its gradient, pass by pass after the clean one."""
        odds = iter(zip(self.logits[1:], self.slopes[1:], strict=True))

        def value(point: Array) -> tuple[float, Array]:
            logit, slope = next(odds)
            return math.log1p(math.exp(logit)), slope / (1 + math.exp(-logit))

        return value


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("steps", [20, 50])
def test_apgd_halves_its_step_size_whatever_the_values(norm: str, steps: int) -> None:
    threat, x = ThreatModel(norm, 0.1, None), torch.zeros(1, 12, dtype=torch.float64)  # type: ignore[arg-type]
    for seed in range(20):
        model = Script(seed, steps + 2)
        result = flat(APGD(threat, steps=steps)(model, x, torch.zeros(1, dtype=torch.long)))
        asked = model.asked[1:]
        seen, best = apgd(model.values(), asked[0], np.zeros(12), norm, 0.1, steps, bounds=(-math.inf, math.inf))
        np.testing.assert_allclose(asked, seen, rtol=0, atol=1e-12)
        np.testing.assert_allclose(result, best, rtol=0, atol=1e-12)


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


# Of 170 steps, only every second one is a checkpoint.
@pytest.mark.parametrize(("steps", "eps", "seed"), [*((60, 0.1, seed) for seed in SEEDS), (170, 0.3, 0)])
def test_sparse_apgd(steps: int, eps: float, seed: int) -> None:
    point = Point(seed, scale=1.5)
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


@pytest.mark.parametrize("seed", SEEDS)
def test_pgd_of_trades(seed: int) -> None:
    """Zhang et al. (2019): ascent of KL(clean, adversarial) from the clean point plus 0.001 N(0, I)."""
    point, eps, steps = Point(seed), 0.05, 5
    x = point.x.expand(200, -1, -1, -1)  # for the distribution of the start
    starts = PGD(ThreatModel("linf", eps, None), "kl", steps=1, step_size=0.0)(point.model, x, point.y.expand(200))
    noise = (starts - x).flatten().numpy()
    assert np.abs(noise).max() < 0.006
    assert math.isclose(noise.std(), 0.001, rel_tol=0.05)  # of 2400 numbers; the error of a standard deviation is 1.4 %

    clean, start, *rest = point.candidates(PGD(ThreatModel("linf", eps), "kl", steps=steps, step_size=0.02))[0]
    np.testing.assert_array_equal(clean, point.clean)
    p = np.exp(point.look(point.clean)[0])
    p /= p.sum()
    current, seen = start, []
    for _ in range(steps - 1):
        logits, slopes = point.look(current)
        q = np.exp(logits - logits.max())
        current = project(current + 0.02 * np.sign((q / q.sum() - p) @ slopes), point.clean, "linf", eps)
        seen.append(current)
    np.testing.assert_allclose(rest, seen, rtol=0, atol=1e-12)


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
@pytest.mark.parametrize(("targets", "runs"), [(0, 2), (2, 2), (3, 1)])
def test_fab(norm: str, targets: int, runs: int, seed: int) -> None:
    # With more steps, some iterates end on the boundary, up to rounding, and rounding decides on which side.
    point, steps, closest = Point(seed), 5, math.inf
    attack = FAB(ThreatModel(norm, 9.0), steps=steps, targets=targets, restarts=runs, minimum_norm=True)  # type: ignore[arg-type]
    asked, result = point.candidates(attack)
    order = [int(c) for c in np.argsort(-point.look(point.clean)[0]) if c != point.label]
    best = point.clean
    for number, target in enumerate(np.repeat(order[:targets] or [-1], runs)):
        if number % runs == 0:
            np.testing.assert_array_equal(asked[0], point.clean)
        else:  # at most half as far away as the closest one so far
            assert 0 < size(asked[0] - point.clean, norm) <= min(9.0, closest) / 2 * (1 + 1e-9)
        seen, nearer, closest = fab(point, asked[0], norm, steps, None if target < 0 else int(target), closest)
        best = best if nearer is None else nearer
        np.testing.assert_allclose(asked[: len(seen)], seen, rtol=0, atol=1e-7)
        asked = asked[len(seen) :]
    assert not asked
    assert point.wrong(result)
    np.testing.assert_allclose(result, best, rtol=0, atol=1e-7)


# --- Attacks that search for the closest adversarial point

LOW, HIGH = -0.1, 1.0  # bounds whose center, range and sum differ
BOUNDS = (LOW, HIGH)


class Adam:
    """Kingma & Ba (2015): what a step multiplies with the learning rate, as a numerator and a denominator."""

    def __init__(self) -> None:
        self.mean = self.square = np.zeros(1)
        self.count = 0

    def __call__(self, gradient: Array) -> tuple[Array, Array]:
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        return self.mean / (1 - 0.9**self.count), np.sqrt(self.square / (1 - 0.999**self.count)) + 1e-8


def cosine(progress: float, first: float, last: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * progress)) / 2


def check(point: Point, attack: MinimumNormAttack, seen: list[Array], *, confidence: float = 0.0) -> None:
    """Compare what the attack evaluates with ``seen``, and its result with the closest adversarial point."""
    asked, result = point.candidates(attack)
    np.testing.assert_allclose(asked, seen, rtol=0, atol=1e-7)
    missing = [confidence - margin(point.look, point.label)(z)[0] for z in seen]
    distance = [
        size(z - point.clean, attack.threat.norm) if m < 0 else math.inf for z, m in zip(seen, missing, strict=True)
    ]
    assert min(distance) < math.inf
    np.testing.assert_allclose(result, seen[int(np.argmin(distance))], rtol=0, atol=1e-7)


# --- Carlini-Wagner


def carlini_wagner(
    value: Callable[[Array], tuple[float, Array]],
    x: Array,
    *,
    steps: int,
    searches: int,
    rate: float,
    const: float | None = None,
    confidence: float = 0.0,
    patience: float = math.inf,
    bounded: bool = True,
) -> list[Array]:
    """Carlini & Wagner (2017), section VI: inputs are a tanh, here of 1.1 times the range, and then clipped.

    The first constant follows from the linearization.  Constants are at most 1e10, and the first one is at least 1e-10.
    """
    middle, reach = (LOW + HIGH) / 2, 1.1 * (HIGH - LOW) / 2
    seen: list[Array] = []
    works, fails = math.inf, 0.0
    for _ in range(searches):
        w = np.arctanh((x - middle) / reach) if bounded else x
        adam, success, lowest, waited = Adam(), False, math.inf, 0
        for _ in range(steps):
            z, slope = w, np.ones_like(w)
            if bounded:
                z, slope = np.clip(middle + reach * np.tanh(w), LOW, HIGH), reach * (1 - np.tanh(w) ** 2)
            seen.append(z)
            rise, gradient = value(z)
            missing = max(confidence - rise, 0)
            success |= rise > confidence
            if const is None:
                const = min(max(4 * missing / (gradient @ gradient), 1e-10), 1e10)
            loss = ((z - x) ** 2).sum() + const * missing
            lowest, waited = (loss, 0) if loss < 0.9999 * lowest else (lowest, waited + 1)
            if waited >= patience:
                break
            slopes = 2 * (z - x) - (const * gradient if missing else 0)
            mean, scale = adam(slopes * slope)
            w = w - rate * mean / scale
        assert const is not None
        works, fails = (const, fails) if success else (works, const)
        const = min(10 * fails, 1e10) if math.isinf(works) else (works + fails) / 2 if fails else works / 10
    return seen


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "case",
    [
        {"steps": 40, "searches": 5},
        {"steps": 30, "searches": 6, "const": 1e-2, "bounded": False},
        {"steps": 30, "searches": 6, "const": 1e3, "confidence": 0.3},
        {"steps": 110, "searches": 4, "patience": 11},
        {"steps": 15, "searches": 8, "patience": 1.5},
    ],
)
def test_carlini_wagner(case: dict[str, float], seed: int) -> None:
    point, rate = Point(seed), 0.05
    attack = CarliniWagner(
        ThreatModel("l2", 0.0, BOUNDS if case.get("bounded", True) else None),
        steps=int(case["steps"]),
        binary_search_steps=int(case["searches"]),
        learning_rate=rate,
        initial_const=case.get("const"),
        confidence=case.get("confidence", 0.0),
        abort_early="patience" in case,
        minimum_norm=True,
    )
    seen = carlini_wagner(margin(point.look, point.label), point.clean, rate=rate, **case)  # type: ignore[arg-type]
    check(point, attack, seen, confidence=case.get("confidence", 0.0))


@pytest.mark.parametrize(("scale", "const"), [(1e-12, None), (1e-12, 3e8), (1e12, None)])
def test_constants_of_carlini_wagner_are_limited(scale: float, const: float | None) -> None:
    """If the logits are tiny, no constant up to 1e10 suffices; if they are huge, the first one is far too large."""
    point = Point(0)
    for parameter in point.model[3].parameters():
        parameter.data.mul_(scale)  # also the weights in NumPy, which share the memory
    options = {"steps": 20, "binary_search_steps": 4, "learning_rate": 0.01, "initial_const": const}
    attack = CarliniWagner(ThreatModel("l2", 0.0, BOUNDS), abort_early=False, minimum_norm=True, **options)  # type: ignore[arg-type]
    value = margin(point.look, point.label)
    seen = carlini_wagner(value, point.clean, steps=20, searches=4, rate=0.01, const=const)
    np.testing.assert_allclose(point.candidates(attack)[0], seen, rtol=0, atol=1e-9)


# --- FMN


def fmn(
    value: Callable[[Array], tuple[float, Array]],
    x: Array,
    norm: str,
    steps: int,
    step_size: float,
    low: float,
    high: float,
) -> list[Array]:
    """Pintor et al. (2021), algorithm 1, with the steps and without the radius that Atoll starts with."""
    current, radius, closest = x, math.inf, math.inf
    width = high - low if math.isfinite(high) else 1
    seen: list[Array] = []
    for k in range(steps):
        seen.append(current)
        rise, gradient = value(current)
        gamma = cosine(k / steps, 0.05, 0.001)
        if rise > 0:
            closest = min(closest, size(current - x, norm))
            radius = min(radius * (1 - gamma), closest)
        else:
            radius *= 1 + gamma
        length = cosine(k / steps, step_size, 0.01 * step_size)
        if math.isinf(closest):
            move = 0.05 * width * 1.1**k * np.sign(gradient)
        elif norm == "linf":
            move = length * radius * np.sign(gradient)
        else:
            move = length * gradient / np.linalg.norm(gradient)
        current = project(current + move, x, norm, radius, low, high)
    return seen


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize(("step_size", "bounds"), [(1.0, BOUNDS), (0.3, None)])
def test_fmn(step_size: float, bounds: Bounds | None, norm: AttackNorm, seed: int) -> None:
    point, steps = Point(seed), 40
    attack = FMN(ThreatModel(norm, 0.0, bounds), steps=steps, step_size=step_size, minimum_norm=True)
    value, (low, high) = margin(point.look, point.label), bounds or (-math.inf, math.inf)
    check(point, attack, fmn(value, point.clean, norm, steps, step_size, low, high))


# --- PDPGD


def pdpgd(value: Callable[[Array], tuple[float, Array]], x: Array, steps: int, step_size: float) -> list[Array]:
    """Matyasko & Chau (2021), algorithm 2 with Adam, whose scale is the metric of the proximal operator.

    In this metric, the proximal operator of l1 has a closed form.
    """
    delta, adam, odds = np.zeros_like(x), Adam(), math.log(100)  # logarithm of the weight of the margin
    weight = 100 / 101  # its moving average, between 0 and 1
    seen: list[Array] = []
    for k in range(steps):
        seen.append(x + delta)
        rise, gradient = value(x + delta)
        mean, scale = adam(-gradient / (1 + math.exp(rise)) if rise < 0 else 0 * gradient)  # of softplus(-rise)
        rate = step_size * 0.01 ** (k / steps)
        delta = np.clip(x + delta - rate * mean / scale, LOW, HIGH) - x
        threshold = rate * (1 - weight) / weight / np.maximum(scale, 0.2 * scale.max())
        delta = np.sign(delta) * np.maximum(np.abs(delta) - threshold, 0)
        odds = min(odds + (0.1 - 0.09 * k / steps) * (-1 if rise > 0 else 1), math.log(1e6))
        weight = 0.9 * weight + 0.1 / (1 + math.exp(-odds))
    return seen


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("step_size", [0.1, 0.02])
def test_pdpgd(step_size: float, seed: int) -> None:
    point, steps = Point(seed), 150
    attack = PDPGD(ThreatModel("l1", 0.0, BOUNDS), steps=steps, step_size=step_size, minimum_norm=True)
    check(point, attack, pdpgd(margin(point.look, point.label), point.clean, steps, step_size))


def test_the_ratio_of_the_weights_of_pdpgd_is_limited() -> None:
    """After many small steps inside the class the ratio is a million, from where it can return."""
    point, steps, step_size = Point(0), 300, 4e-3
    attack = PDPGD(ThreatModel("l1", 0.0, BOUNDS), steps=steps, step_size=step_size, minimum_norm=True)
    seen = pdpgd(margin(point.look, point.label), point.clean, steps, step_size)
    np.testing.assert_allclose(point.candidates(attack)[0], seen, rtol=0, atol=1e-12)


# --- Sigma-zero


def sigma_zero(
    value: Callable[[Array], tuple[float, Array]], x: Array, steps: int, step_size: float, sigma: float
) -> list[Array]:
    """Cinà et al. (2024), algorithm 1."""
    delta, adam, threshold = np.zeros_like(x), Adam(), 0.3
    seen: list[Array] = []
    for k in range(steps):
        seen.append(x + delta)
        rise, gradient = value(x + delta)
        slope = 2 * sigma * delta / (delta**2 + sigma) ** 2 / len(x) - (gradient if rise < 0 else 0)
        mean, scale = adam(slope / max(np.abs(slope).max(), 1e-12))
        rate = cosine(k / steps, step_size, 0.1 * step_size)
        delta = np.clip(x + delta - rate * mean / scale, LOW, HIGH) - x
        threshold = np.clip(threshold + 0.01 * rate * (1 if rise > 0 else -1), 0, 1)
        delta = np.where(np.abs(delta) < threshold, 0, delta)
    return seen


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("step_size", "sigma"), [(1.0, 1e-3), (0.6, 0.02)])
def test_sigma_zero(step_size: float, sigma: float, seed: int) -> None:
    point, steps = Point(seed), 60
    attack = SigmaZero(ThreatModel("l0", 0, BOUNDS), steps=steps, step_size=step_size, sigma=sigma, minimum_norm=True)
    check(point, attack, sigma_zero(margin(point.look, point.label), point.clean, steps, step_size, sigma))


# --- eps


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kind", "norm"),
    [(CarliniWagner, "l2"), (FMN, "linf"), (FMN, "l2"), (FMN, "l1"), (PDPGD, "l1"), (SigmaZero, "l0"), (RayS, "linf")],
)
def test_stops_at_the_first_point_within_eps(kind: type, norm: AttackNorm, seed: int) -> None:
    options: dict[str, float] = {"queries": 100} if kind is RayS else {"steps": 40}
    point, options = Point(seed), options | ({"learning_rate": 0.05} if kind is CarliniWagner else {})
    everything, _ = point.candidates(kind(ThreatModel(norm, 0, BOUNDS), minimum_norm=True, **options))
    distance = [size(z - point.clean, norm) if point.wrong(z) else math.inf for z in everything]
    nearest = np.minimum.accumulate(distance)
    for eps in {min(nearest) * 1.001, float(np.median(nearest[np.isfinite(nearest)])) * 1.001}:
        eps = math.floor(eps) if norm == "l0" else eps
        first = int(np.argmax(nearest <= eps))
        asked, result = point.candidates(kind(ThreatModel(norm, eps, BOUNDS), **options))
        np.testing.assert_array_equal(asked, everything[: first + 1])
        np.testing.assert_array_equal(result, everything[first])
    eps = min(nearest) - 1 if norm == "l0" else min(nearest) * 0.999
    asked, result = point.candidates(kind(ThreatModel(norm, eps, BOUNDS), **options))
    np.testing.assert_array_equal(asked, everything)
    np.testing.assert_array_equal(result, point.clean)
