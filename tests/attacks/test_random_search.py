"""Attacks without gradients, query by query: everything they evaluate for a point equals what the algorithm evaluates.

The algorithms are written here once more, for a single point and with NumPy, from the papers.  Random numbers are those
of the attack.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll.attacks import RayS, Square
from atoll.rng import PointRNG
from atoll.threat import Norm, ThreatModel
from single_point import SEEDS, Array, Point, flat, project, size

# --- RayS


def blocks(length: int) -> Iterator[tuple[int, slice]]:
    """Numbers of the round, and blocks of coordinates: all, then halves, quarters and so on, rounded up."""
    for number in itertools.count():
        for level in range(math.ceil(math.log2(length)) + 1):
            width = math.ceil(length / 2**level)
            for start in range(0, length, width):
                yield number, slice(start, start + width)


def rays(wrong: Callable[[Array], bool], x: Array, queries: int, low: float, high: float) -> tuple[list[Array], Array]:
    """Chen & Gu (2020), algorithms 1 to 3, with steps inward before the bisection, and rounds until one does not help.

    Without bounds, the radius doubles after a round without an adversarial point.
    """
    seen: list[Array] = []
    best, closest = x, math.inf

    def query(radius: float, direction: Array) -> tuple[bool, float]:
        nonlocal best, closest
        if len(seen) == queries:
            return False, 0
        z = np.clip(x + radius * direction, low, high)
        seen.append(z)
        broken, distance = wrong(z), size(z - x, "linf")
        if broken and distance < closest:
            best, closest = z, distance
        return broken, distance

    direction = np.ones_like(x)
    radius = high - low if math.isfinite(high) else 1.0
    helped, last = True, -1
    attempts = itertools.chain([(-1, slice(0, 0))], blocks(len(x)))
    for number, block in attempts:
        if number > last and not helped:
            if math.isfinite(high) or math.isfinite(closest):
                break
            radius *= 2
        helped, last = helped and number == last, number
        attempt, before = direction.copy(), closest
        attempt[block] *= -1
        broken, distance = query(radius, attempt)
        if broken:
            direction = attempt
            step = math.inf if math.isinf(before) else 1e-3 * radius
            inside, radius = 0.0, min(radius, distance)
            while radius - inside > 1e-3 * radius:
                middle = max((inside + radius) / 2, radius - step)
                broken, distance = query(middle, attempt)
                if broken:
                    radius, step = min(middle, distance), 2 * step
                else:
                    inside = middle
            helped |= closest < before
        if len(seen) == queries:
            break
    return seen, best


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("bounds", "scale", "queries"),
    [((-0.1, 1.0), 3.0, 400), (None, 3.0, 60), (None, 0.1, 400)],  # two of the last start beyond 1
)
def test_rays(bounds: tuple[float, float] | None, scale: float, queries: int, seed: int) -> None:
    point = Point(seed, scale=scale)
    attack = RayS(ThreatModel("linf", 0, bounds), queries=queries, minimum_norm=True)
    asked, result = point.candidates(attack)
    seen, best = rays(point.wrong, point.clean, queries, *(bounds or (-math.inf, math.inf)))
    np.testing.assert_allclose(asked, seen, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result, best, rtol=0, atol=1e-12)


# --- Square

HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # queries out of 10,000


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [(3, 9, 9), (4, 1, 23), (3, 5, 2), (3, 4, 1)])
def test_square(shape: tuple[int, int, int], seed: int) -> None:
    """Each query changes a square of the scheduled side of the best candidate, one shift by eps for each channel.

    A square is smaller than the image, except that a window in a single row may be as wide as the row.
    """
    draw = torch.Generator().manual_seed(seed)
    (channels, height, width), features, eps, queries = shape, math.prod(shape), 0.05, 60
    model = nn.Sequential(nn.Flatten(), nn.Linear(features, 5)).double()
    model[1].weight.data = torch.randn(5, features, generator=draw, dtype=torch.float64)
    x = torch.rand(1, *shape, generator=draw, dtype=torch.float64)
    y = model(x).argmax(1)
    model[1].bias.data = 30.0 * nn.functional.one_hot(y[0], 5).double()  # nothing can break it
    asked: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[0][0].clone()))
    result = Square(ThreatModel("linf", eps), queries=queries, horizon=300, p_init=1.0)(model, x, y)[0]
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
        halvings = sum(number > limit * 300 / 10_000 for limit in HALVINGS)
        if height == 1:
            side = max(1, round(width / 2**halvings))
        else:
            side = max(1, min(height - 1, width - 1, round(math.sqrt(height * width / 2**halvings))))
        changed = (proposal != best).any(0)
        places = changed.nonzero()
        if len(places):
            top, left = places.amin(0).tolist()
            assert (places.amax(0) < torch.tensor([top + side, left + side])).all()
            sides.append((places.amax(0) - places.amin(0)).max().item() + 1 == side)
        for channel in range(channels):
            moved = proposal[channel] != best[channel]
            assert torch.equal(proposal[channel][moved], high[channel][moved]) or torch.equal(
                proposal[channel][moved], low[channel][moved]
            )
        best = proposal if margin(proposal) > margin(best) else best
    assert sum(sides) > len(sides) / 2  # the squares are not smaller than scheduled, unless a change has no effect
    assert torch.equal(result, best)
    assert margin(best) > margin(start)


def hill(height: int, width: int, norm: str) -> Array:
    """Andriushchenko et al. (2020), equation 2: squares around the center, up to the longer side, with unit norm."""
    result = np.zeros((height, width))
    for k in range(1, max(height, width) // 2 + 2):
        down = slice(max(height // 2 - k + 1, 0), height // 2 + k)
        across = slice(max(width // 2 - k + 1, 0), width // 2 + k)
        result[down, across] += k ** -(2.0 if norm == "l2" else 4.0)
    return result / max(size(result.ravel(), norm), 1e-30)


def two_hills(height: int, width: int, norm: str, upright: bool) -> Array:
    if not upright:
        return two_hills(width, height, norm, True).T
    both = np.concatenate([hill(height // 2, width, norm), -hill(height - height // 2, width, norm)])
    return (both / size(both.ravel(), norm)).astype(np.float32).astype(np.float64)  # Atoll's precision


def at_full_length(delta: Array, x: Array, norm: str, eps: float) -> Array:
    if norm == "l1":
        return project((x + delta).ravel(), x.ravel(), "l1", eps).reshape(x.shape)
    return np.clip(x + delta * eps * (1 - 1e-6) / size(delta.ravel(), norm), 0, 1)


def windows_start(x: Array, norm: str, eps: float, upright: Array, signs: Array) -> Array:
    """A grid of tiles with two hills each, as wide as a fifth of the shorter side, in the middle of the image."""
    channels, height, width = x.shape
    side = max(1, (width if height == 1 else min(height, width)) // 5)
    rows = min(side, height)
    down, across = height // rows, width // side
    top, left = (height - down * rows) // 2, (width - across * side) // 2
    delta = np.zeros_like(x)
    for channel, i, j in np.ndindex(channels, down, across):
        tile = signs[channel, i, j] * two_hills(rows, side, norm, bool(upright[i, j]))
        delta[channel, top + i * rows : top + (i + 1) * rows, left + j * side : left + (j + 1) * side] = tile
    return at_full_length(delta, x, norm, eps)


def move_mass(best: Array, x: Array, norm: str, eps: float, side: int, draw: Array) -> Array:
    """Andriushchenko et al. (2020), algorithm 3; for l1, with c times the mass, as Croce & Hein (2021)."""
    channels, height, width = x.shape
    rows, columns, power = min(side, height), side, 2 if norm == "l2" else 1
    tops = [math.floor(u * (height - rows + 1)) for u in (draw[0], draw[2])]
    lefts = [math.floor(u * (width - columns + 1)) for u in (draw[1], draw[3])]
    first, second = (np.s_[top : top + rows, left : left + columns] for top, left in zip(tops, lefts, strict=True))
    delta = best - x
    spare = max(eps**power - (np.abs(delta) ** power).sum(), 0) / channels
    result = delta.copy()
    for channel in range(channels):
        old, new = delta[channel], result[channel]
        union = np.zeros((height, width), dtype=bool)
        union[first] = union[second] = True
        mass = (np.abs(old[union]) ** power).sum() + spare
        shape = np.sign(draw[5 + channel] - 0.5) * two_hills(rows, columns, norm, bool(draw[4] < 0.5))
        shape = shape + old[first] / max(size(old[first].ravel(), norm), 1e-12)
        new[second] = 0
        length = math.sqrt(mass) if norm == "l2" else channels * mass
        new[first] = shape / size(shape.ravel(), norm) * length
    return at_full_length(result, x, norm, eps)


def record(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Array]:
    """Return a list of all later draws with a method of the random streams."""
    draws: list[Array] = []
    method: Callable[..., Tensor] = getattr(PointRNG, name)

    def draw(self: PointRNG, *args: int, **options: torch.dtype) -> Tensor:
        result = method(self, *args, **options)
        draws.append(result[0].numpy())
        return result

    monkeypatch.setattr(PointRNG, name, draw)
    return draws


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("norm", "shape", "eps"),
    [
        ("l2", (3, 13, 12), 2.0),
        ("l1", (3, 12, 13), 8.0),
        ("l2", (1, 17, 16), 1.0),
        ("l2", (2, 6, 6), 0.5),
        ("l1", (2, 6, 6), 30.0),
        ("l2", (23,), 0.4),
        ("l1", (23,), 1.0),
    ],
)
def test_square_moves_mass(
    norm: Norm, shape: tuple[int, ...], eps: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    signs, turns, moves = (record(name, monkeypatch) for name in ("rademacher", "integers", "uniform"))
    queries, horizon, runs, p_init = 45, 150, 2, 0.7
    draw, features = torch.Generator().manual_seed(seed), math.prod(shape)
    model = nn.Sequential(nn.Flatten(), nn.Linear(features, 5)).double()
    model[1].weight.data = torch.randn(5, features, generator=draw, dtype=torch.float64)
    x = torch.rand(1, *shape, generator=draw, dtype=torch.float64)
    y = model(x).argmax(1)
    model[1].bias.data = 300.0 * nn.functional.one_hot(y[0], 5).double()  # nothing can break it
    weights, bias = (parameter.detach().numpy() for parameter in model.parameters())
    asked: list[Array] = []
    model.register_forward_pre_hook(lambda _, inputs: asked.append(flat(inputs[0])))
    attack = Square(ThreatModel(norm, eps), queries=queries, horizon=horizon, restarts=runs, p_init=p_init)
    result = flat(attack(model, x, y))

    image = x[0].numpy().reshape((1, 1, *shape)[-3:])
    _, height, width = image.shape
    assert len(np.unique(turns)) == len(np.unique(signs)) == 2  # both directions, both signs
    seen, best, highest, improved = [], image, -math.inf, 0
    for run, number in itertools.product(range(runs), range(queries)):
        if number == 0:
            proposal, highest = windows_start(image, norm, eps, turns[run] == 0, signs[run]), -math.inf
        else:
            halvings = sum(number * 10_000 >= (limit + 1) * horizon for limit in HALVINGS)
            share = p_init / 2**halvings
            side = max(3, round(share * width if height == 1 else math.sqrt(share * height * width)))
            side = min(side + 1 - side % 2, width if height == 1 else min(height, width))
            proposal = move_mass(best, image, norm, eps, side, moves[run * queries + number - 1])
        seen.append(proposal.ravel())
        logits = weights @ proposal.ravel() + bias
        value = np.delete(logits, int(y)).max() - logits[int(y)]
        if value > highest:
            best, highest, improved = proposal, value, improved + 1
    # Rounding grows if the bump almost cancels the content of the window.
    np.testing.assert_allclose(asked[1:], seen, rtol=0, atol=1e-6)
    np.testing.assert_allclose(result, best.ravel(), rtol=0, atol=1e-6)
    assert improved > 10
