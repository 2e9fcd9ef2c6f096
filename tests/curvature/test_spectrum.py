"""Eigenvalues against a dense solver."""

import numpy as np
import pytest
import torch

from atoll.curvature import density, top_eigenvalues
from atoll.curvature.spectrum import Density
from atoll.errors import AtollError, InputError
from curvature.cases import CASES, make_risk, truth

SOME = [case for case in CASES if case[1] in ("at", "trades")]


@pytest.mark.parametrize(("model", "loss"), SOME)
def test_largest_eigenvalues(model, loss):
    exact = torch.linalg.eigvalsh(truth(model, loss)).flip(0).numpy()
    result = top_eigenvalues(make_risk(model, loss), 3, tolerance=1e-10)
    np.testing.assert_allclose(result, exact[:3], rtol=1e-7)


@pytest.mark.parametrize("model", ["mlp", "vit"])
def test_density_has_the_moments_of_the_spectrum(model):
    p, exact = make_risk(model), torch.linalg.eigvalsh(truth(model, "at")).numpy()
    result = density(p, vectors=20, steps=6)
    np.testing.assert_allclose(result.weights.sum(1), 1)
    for power in (1, 2, 3):
        each = (result.weights * result.eigenvalues**power).sum(1)
        assert abs(each.mean() - (exact**power).mean()) < 4 * each.std() / np.sqrt(len(each))
    assert result.eigenvalues.max() == pytest.approx(exact.max(), rel=0.02)
    grid, height = result.smooth(points=4000)
    assert float(((height[1:] + height[:-1]) / 2 * np.diff(grid)).sum()) == pytest.approx(1, abs=1e-3)
    assert len(result.plot().axes) == 1


def test_a_full_run_of_lanczos_finds_every_eigenvalue():
    p = make_risk("mlp")
    exact = torch.linalg.eigvalsh(truth("mlp", "at")).numpy()
    result = density(p, vectors=1, steps=p.size)
    visible = result.eigenvalues[0][result.weights[0] > 1e-12]
    for value in exact[np.abs(exact) > 1e-6]:
        assert np.abs(visible - value).min() < 1e-6


def test_a_spectrum_of_one_value_has_a_density_too():
    grid, height = Density(np.zeros((1, 1)), np.ones((1, 1))).smooth()
    assert np.isfinite(grid).all()
    assert np.isfinite(height).all()


def test_nonsense_is_refused():
    p = make_risk("mlp")
    for count in (0, p.size):
        with pytest.raises(InputError, match="count"):
            top_eigenvalues(p, count)
    with pytest.raises(InputError, match="steps: expected at least 1, got 0"):
        density(p, steps=0)


def test_what_does_not_converge_is_one_sentence(monkeypatch):
    from scipy.sparse.linalg import ArpackNoConvergence

    def fail(*arguments, **options):
        raise ArpackNoConvergence("no", np.zeros(1), np.zeros((1, 1)))

    monkeypatch.setattr("scipy.sparse.linalg.eigsh", fail)
    with pytest.raises(AtollError, match="only 1 of 2 eigenvalues converged"):
        top_eigenvalues(make_risk("mlp"), 2)
