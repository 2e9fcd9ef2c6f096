"""Eigenvalues against a dense solver."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from atoll.curvature import density, top_eigenvalues
from atoll.curvature.spectrum import Density
from atoll.errors import AtollError, DataError, InputError
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
        assert result.moment(power) == pytest.approx(each.mean())
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


def test_a_smooth_density_is_a_mixture_of_gaussians():
    values, shares = np.array([[0.0, 4.0], [1.0, 2.0]]), np.array([[0.25, 0.75], [1.0, 0.0]])
    for width, sigma in ((None, 0.04), (0.5, 0.5)):  # one percent of the range, unless the width is given
        grid, height = Density(values, shares).smooth(points=101, width=width)
        np.testing.assert_allclose(grid, np.linspace(-5 * sigma, 4 + 5 * sigma, 101), atol=1e-12)
        mixture = 0.125 * norm.pdf(grid, 0, sigma) + 0.375 * norm.pdf(grid, 4, sigma) + 0.5 * norm.pdf(grid, 1, sigma)
        np.testing.assert_allclose(height, mixture, atol=1e-12)


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"eigenvalues": np.zeros((1, 2))}, "of one shape"),
        ({"weights": np.zeros((1, 2))}, "of one shape"),
        ({"eigenvalues": np.zeros((1, 2)), "weights": np.zeros((1, 3))}, "of one shape"),
        ({"eigenvalues": np.zeros(2), "weights": np.zeros(2)}, r"of one shape \(vectors, steps\)"),
        ({"eigenvalues": np.zeros((2, 0)), "weights": np.zeros((2, 0))}, "of one shape"),
        ({"eigenvalues": np.full((1, 1), "many"), "weights": np.ones((1, 1))}, "expected numbers"),
    ],
)
def test_a_damaged_file_is_one_sentence(arrays, problem, tmp_path):
    np.savez(tmp_path / "density.npz", **arrays)
    with pytest.raises(DataError, match=f"density.npz: .*{problem}"):
        Density.load(tmp_path / "density.npz")


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
