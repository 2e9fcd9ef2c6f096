"""Intervals of traces and of the index cover the truth as often as they say, over 200 seeds."""

import pytest

from atoll.curvature import wci
from curvature.cases import CASES, RELU, make_risk

LEAST = 177  # of 200: fewer have a probability of 1e-4 if 95 % is true
WAYS = {"few": {"group": 2, "max_probes": 3}, "enough": {"group": 4, "relative_error": 0.2, "max_probes": 60}}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("model", "loss", "estimator"),
    [(m, loss, e) for m, loss in CASES for e in ("gauss_newton", "hutchinson") if m in RELU or e == "hutchinson"],
)
def test_intervals_cover_the_truth(model, loss, estimator, way):
    risk = make_risk(model, loss)
    exact = wci(risk, "exact")
    runs = [wci(risk, estimator, seed=seed, **WAYS[way]) for seed in range(200)]
    index, trace = exact.index.value, exact.traces.total.value
    assert sum(low <= index <= high for low, high in (run.index.interval for run in runs)) >= LEAST
    assert sum(low <= trace <= high for low, high in (run.traces.total.interval for run in runs)) >= LEAST
