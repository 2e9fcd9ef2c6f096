"""Sum and spread of all eigenvalues against a dense solver."""

import numpy as np
import pytest

from atoll.curvature import EmpiricalRisk
from atoll_papers.moments import moments
from curvature.cases import CASES, RELU, Twice, dense, make_risk, truth

QUICK = [(model, "trades") for model in RELU]  # the transformer takes longest; losses change only the logits' part


@pytest.mark.parametrize(
    ("model", "loss"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in QUICK)]
)
def test_sum_and_spread_are_those_of_all_eigenvalues(model, loss):
    p, matrix = make_risk(model, loss), truth(model, loss).numpy()
    result, start = moments(p), 0
    blocks = {"": matrix}
    for name, w in zip(p.names, p.parameters, strict=True):
        blocks[name] = matrix[start : start + w.numel(), start : start + w.numel()]
        start += w.numel()
    assert result.keys() == blocks.keys()
    for name, block in blocks.items():
        exact = np.linalg.eigvalsh(block)
        assert result[name].count == len(exact)
        expected = pytest.approx((exact.sum(), exact.std()), rel=1e-7, abs=1e-9)
        assert (result[name].sum, result[name].std) == expected, name


def test_spread_of_a_net_whose_layers_are_not_linear():
    """A layer that is used twice: its own block is not Gauss-Newton, and no row may be left out."""
    given = make_risk("mlp")
    p = EmpiricalRisk(Twice().double().eval(), given.loss, given.x, given.y, given.x_adv)
    exact = np.linalg.eigvalsh(dense(p).numpy())
    assert (moments(p)[""].sum, moments(p)[""].std) == pytest.approx((exact.sum(), exact.std()))
