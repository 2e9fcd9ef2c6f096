"""Eigenvalues against a dense solver."""

import numpy as np
import pytest
import torch

from atoll.curvature import Problem, all_eigenvalues, density, moments, top_eigenvalues
from atoll.curvature.spectrum import Density
from atoll.errors import AtollError, InputError
from curvature.cases import CASES, Twice, dense, problem, truth

SOME = [case for case in CASES if case[1] in ("at", "trades")]


@pytest.mark.parametrize(("model", "loss"), SOME)
def test_largest_eigenvalues(model, loss):
    exact = torch.linalg.eigvalsh(truth(model, loss)).flip(0).numpy()
    found = top_eigenvalues(problem(model, loss), 3, tolerance=1e-10)
    np.testing.assert_allclose(found, exact[:3], rtol=1e-7)


def test_all_eigenvalues_of_the_net_and_of_each_layer():
    p, matrix = problem("conv-bn", "trades"), truth("conv-bn", "trades")
    found = all_eigenvalues(p)
    np.testing.assert_allclose(found[""], torch.linalg.eigvalsh(matrix).numpy(), atol=1e-8)
    start = 0
    for name, w in zip(p.names, p.parameters, strict=True):
        block = matrix[start : start + w.numel(), start : start + w.numel()]
        np.testing.assert_allclose(found[name], torch.linalg.eigvalsh(block).numpy(), atol=1e-8)
        start += w.numel()


@pytest.mark.parametrize(("model", "loss"), CASES)
def test_sum_and_spread_are_those_of_all_eigenvalues(model, loss):
    p, matrix = problem(model, loss), truth(model, loss).numpy()
    found, start = moments(p), 0
    blocks = {"": matrix}
    for name, w in zip(p.names, p.parameters, strict=True):
        blocks[name] = matrix[start : start + w.numel(), start : start + w.numel()]
        start += w.numel()
    assert found.keys() == blocks.keys()
    for name, block in blocks.items():
        exact = np.linalg.eigvalsh(block)
        assert found[name].count == len(exact)
        assert (found[name].sum, found[name].std) == pytest.approx((exact.sum(), exact.std()), rel=1e-7, abs=1e-9), name


def test_spread_of_a_net_whose_layers_are_not_linear():
    """A layer that is used twice: its own block is not Gauss-Newton, and no row may be left out."""
    given = problem("mlp")
    p = Problem(Twice().double().eval(), given.loss, given.x, given.y, given.x_adv)
    exact = np.linalg.eigvalsh(dense(p).numpy())
    assert (moments(p)[""].sum, moments(p)[""].std) == pytest.approx((exact.sum(), exact.std()))


@pytest.mark.parametrize("model", ["mlp", "vit"])
def test_density_has_the_moments_of_the_spectrum(model):
    p, exact = problem(model), torch.linalg.eigvalsh(truth(model, "at")).numpy()
    found = density(p, vectors=20, steps=6)
    np.testing.assert_allclose(found.weights.sum(1), 1)
    for power in (1, 2, 3):
        each = (found.weights * found.eigenvalues**power).sum(1)
        assert abs(each.mean() - (exact**power).mean()) < 4 * each.std() / np.sqrt(len(each))
    assert found.eigenvalues.max() == pytest.approx(exact.max(), rel=0.02)
    grid, height = found.smooth(points=4000)
    assert float(((height[1:] + height[:-1]) / 2 * np.diff(grid)).sum()) == pytest.approx(1, abs=1e-3)
    assert len(found.plot().axes) == 1


def test_a_full_run_of_lanczos_finds_every_eigenvalue():
    p = problem("mlp")
    exact = torch.linalg.eigvalsh(truth("mlp", "at")).numpy()
    found = density(p, vectors=1, steps=p.size)
    visible = found.eigenvalues[0][found.weights[0] > 1e-12]
    for value in exact[np.abs(exact) > 1e-6]:
        assert np.abs(visible - value).min() < 1e-6


def test_a_spectrum_of_one_value_has_a_density_too():
    grid, height = Density(np.zeros((1, 1)), np.ones((1, 1))).smooth()
    assert np.isfinite(grid).all()
    assert np.isfinite(height).all()


def test_nonsense_is_refused():
    p = problem("mlp")
    for count in (0, p.size):
        with pytest.raises(InputError, match="count"):
            top_eigenvalues(p, count)
    with pytest.raises(InputError, match="vectors, steps"):
        density(p, steps=0)


def test_what_does_not_converge_is_one_sentence(monkeypatch):
    from scipy.sparse.linalg import ArpackNoConvergence

    def fail(*arguments, **options):
        raise ArpackNoConvergence("no", np.zeros(1), np.zeros((1, 1)))

    monkeypatch.setattr("scipy.sparse.linalg.eigsh", fail)
    with pytest.raises(AtollError, match="only 1 of 2 eigenvalues converged"):
        top_eigenvalues(problem("mlp"), 2)
