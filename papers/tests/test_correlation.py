"""Correlations compared with textbook formulas, and the robust gap."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from atoll.attacks import PGD
from atoll.curvature import robust_gap
from atoll.errors import InputError
from atoll.threat import ThreatModel
from atoll_papers.correlation import analyze, fit
from curvature.cases import problem


def series(seed: int, n: int = 12):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=n)
    return x, 2 * x + draw.normal(size=n)


def test_fit_is_the_textbook():
    x, y = series(0)
    n, line = len(x), fit(x, y)
    r = np.corrcoef(x, y)[0, 1]
    slope, intercept = np.linalg.lstsq(np.stack([x, np.ones(n)], 1), y, rcond=None)[0]
    residual = y - slope * x - intercept
    error = math.sqrt(residual @ residual / (n - 2) / ((x - x.mean()) @ (x - x.mean())))
    assert (line.n, line.r, line.r_squared) == (n, pytest.approx(r), pytest.approx(r**2))
    assert (line.slope, line.intercept) == (pytest.approx(slope), pytest.approx(intercept))
    assert 1 - residual @ residual / ((y - y.mean()) @ (y - y.mean())) == pytest.approx(line.r_squared)
    t_10 = 2.2281388519649385  # 97.5 % quantile of Student's t with 10 degrees of freedom, from a table
    assert line.slope_interval == (pytest.approx(slope - t_10 * error), pytest.approx(slope + t_10 * error))
    z, half = math.atanh(r), 1.959963984540054 / math.sqrt(n - 3)
    assert line.r_interval == (pytest.approx(math.tanh(z - half)), pytest.approx(math.tanh(z + half)))
    # The p-value against permutations.
    draw = np.random.default_rng(1)
    x, y = series(3)[0], np.random.default_rng(9).normal(size=12)
    shuffled = [abs(np.corrcoef(x, draw.permutation(y))[0, 1]) for _ in range(4000)]
    assert fit(x, y).p == pytest.approx(np.mean(np.array(shuffled) >= abs(np.corrcoef(x, y)[0, 1])), abs=0.04)


def test_intervals_of_the_slope_cover():
    inside = [low <= 2 <= high for low, high in (fit(*series(seed)).slope_interval for seed in range(300))]
    assert 0.91 < np.mean(inside) < 0.985


def test_analysis_within_across_and_over_seeds():
    both = {str(seed): series(seed, 5) for seed in range(4)}
    index, gap = ({seed: list(pair[k]) for seed, pair in both.items()} for k in (0, 1))
    analysis = analyze(index, gap)
    assert analysis.seeds == {seed: fit(*both[seed]) for seed in both}
    assert analysis.pooled == fit(np.concatenate(list(index.values())), np.concatenate(list(gap.values())))
    assert analysis.epochs[2] == fit([pair[0][2] for pair in both.values()], [pair[1][2] for pair in both.values()])
    assert analysis.pooled.n == 20
    two = {seed: index[seed] for seed in ("0", "1")}
    assert analyze(two, {seed: gap[seed] for seed in two}).epochs == ()


def test_degenerate_series():
    assert math.isnan(fit([1, 1, 1], [1, 2, 3]).r)
    assert fit([1, 2, 3], [1, 2, 4]).r_interval == (-1, 1)
    for x, y in (([1, 2], [1, 2]), ([1, 2, 3], [1, 2]), ([1, 2, math.nan], [1, 2, 3])):
        with pytest.raises(InputError, match="expected"):
            fit(x, y)
    for index, gap in (({}, {}), ({"0": [1, 2, 3]}, {"1": [1, 2, 3]}), ({"0": [1, 2, 3]}, {"0": [1, 2, 3, 4]})):
        with pytest.raises(InputError, match="expected"):
            analyze(index, gap)


def test_gap_is_measured_with_the_same_attack_on_both_sides():
    p = problem("conv-bn", points=24)
    train, test = (p.x[:15], p.y[:15]), (p.x[15:], p.y[15:])
    attack = PGD(ThreatModel("linf", 0.05), steps=2)
    p.model.train()  # switched to evaluation mode and restored
    gap = robust_gap(p.model, train, test, attack, batch_size=4)
    assert p.model.training
    p.model.eval()
    direct = []
    for x, y in (train, test):
        with torch.no_grad():
            logits = p.model(attack(p.model, x, y))
        losses = F.cross_entropy(logits, y, reduction="none")
        direct.append((float((logits.argmax(1) != y).double().mean()), float(losses.mean()), float(losses.std())))
    assert gap.error.value == pytest.approx(direct[1][0] - direct[0][0])
    assert gap.loss.value == pytest.approx(direct[1][1] - direct[0][1])
    assert gap.loss.standard_error == pytest.approx(math.hypot(direct[0][2] / 15**0.5, direct[1][2] / 3))
    assert gap.to_json()["train_error"]["value"] == pytest.approx(direct[0][0])
    with pytest.raises(InputError, match="one label each"):
        robust_gap(p.model, (p.x, p.y[:3]), test, attack)
