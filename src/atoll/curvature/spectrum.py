"""Eigenvalues of the Hessian: the largest ones, and the density of all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.curvature.products import HessianProducts
from atoll.curvature.risk import EmpiricalRisk, flatten
from atoll.data.decode import read_npz
from atoll.errors import AtollError, DataError, InputError, check_count
from atoll.files import write_arrays
from atoll.rng import generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]


def top_eigenvalues(risk: EmpiricalRisk, count: int = 5, *, tolerance: float = 1e-3, seed: object = 0) -> Array:
    """Return the largest eigenvalues, in descending order, to a relative tolerance, by restarted Lanczos (ARPACK).

    Each iteration is one product with the Hessian.  ARPACK stores ``max(2 count + 1, 12)`` vectors.

    >>> from atoll.losses import Standard
    >>> model = torch.nn.Linear(2, 2, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> risk = EmpiricalRisk(model, Standard(), torch.diag(torch.tensor([2.0, 1.0])), torch.tensor([0, 1]))
    >>> top_eigenvalues(risk, 2).round(3).tolist()
    [1.0, 0.25]
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh  # slow to import

    check_count(1, count=count)
    if count >= risk.size:
        raise InputError(f"count: expected 1 to {risk.size - 1} eigenvalues, got {count}")
    like, multiply = risk.parameters[0].detach(), HessianProducts(risk, seed=seed)

    def product(v: NDArray[np.floating]) -> NDArray[np.floating]:
        vector = torch.from_numpy(np.array(v).ravel()).to(like)
        return flatten(multiply(risk.split(vector))).cpu().numpy()

    if not product(np.ones(risk.size)).any() and not product(np.arange(1.0, risk.size + 1)).any():
        return np.zeros(count)  # a zero Hessian, which ARPACK does not accept
    operator = LinearOperator((risk.size, risk.size), matvec=product, dtype=like.cpu().numpy().dtype)
    start = torch.randn(risk.size, generator=generator(seed, "eigenvalues"), dtype=like.dtype).numpy()
    ncv = min(risk.size, max(2 * count + 1, 12))
    try:
        values = eigsh(
            operator, count, which="LA", v0=start, ncv=ncv, tol=tolerance, maxiter=100, return_eigenvectors=False
        )
    except ArpackNoConvergence as error:
        done = f"only {len(error.eigenvalues)} of {count} eigenvalues converged"
        raise AtollError(f"{done}; request fewer or increase the tolerance") from None
    return np.sort(values.astype(np.float64))[::-1]


@dataclass(frozen=True)
class Density:
    """A spectral density as weighted points, ``(vectors, steps)``; the weights of each vector sum to 1."""

    eigenvalues: Array
    weights: Array

    def moment(self, power: int) -> float:
        """Return the mean of a power of the eigenvalues."""
        return float((self.weights * self.eigenvalues**power).sum(1).mean())

    def smooth(self, points: int = 500, width: float | None = None) -> tuple[Array, Array]:
        """Return the density on a grid, with each point as a Gaussian (of 1 % of the range if not given)."""
        low, high = float(self.eigenvalues.min()), float(self.eigenvalues.max())
        sigma = width or 0.01 * (high - low) or 1.0
        grid = np.linspace(low - 5 * sigma, high + 5 * sigma, points)
        bumps = np.exp(-0.5 * ((grid - self.eigenvalues[..., None]) / sigma) ** 2) / (sigma * np.sqrt(2 * np.pi))
        return grid, (self.weights[..., None] * bumps).sum(1).mean(0)

    def save(self, path: Path) -> None:
        """Save the data as ``.npz``."""
        write_arrays(path, eigenvalues=self.eigenvalues, weights=self.weights)

    @staticmethod
    def load(path: Path) -> Density:
        """Load a file written by ``save``.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Density(np.zeros((1, 2)), np.full((1, 2), 0.5)).save(Path(folder, "some.npz"))
        ...     Density.load(Path(folder, "some.npz")).weights
        array([[0.5, 0.5]])
        """
        arrays = read_npz(path, ("eigenvalues", "weights"))
        shapes = {name: values.shape for name, values in arrays.items()}
        if len(arrays) < 2 or len(set(shapes.values())) > 1 or len(shapes["weights"]) != 2 or 0 in shapes["weights"]:
            raise DataError(f"{path}: expected eigenvalues and weights of one shape (vectors, steps), got {shapes}")
        try:
            return Density(**{name: values.astype(np.float64) for name, values in arrays.items()})
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}: expected numbers, got: {error}") from None

    def plot(self) -> Figure:
        """Plot the density on a logarithmic scale, because most eigenvalues are close to zero."""
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axis = figure.subplots()
        grid, height = self.smooth()
        axis.semilogy(grid, height + 1e-8)
        axis.set_xlabel("eigenvalue of the Hessian")
        axis.set_ylabel("density")
        return figure


def density(risk: EmpiricalRisk, *, vectors: int = 4, steps: int = 40, seed: object = 0) -> Density:
    r"""Return the density of all eigenvalues by stochastic Lanczos quadrature (Ubaru, Chen & Saad, 2017).

    For a random unit vector v, the expectation of :math:`v^T f(H) v` is the mean of f over the spectrum.  ``steps``
    products give a small tridiagonal matrix, whose eigenvalues and weights reproduce it exactly for polynomials f up to
    degree ``2 steps - 1``.  The Lanczos vectors are stored and reorthogonalized in every step.

    >>> from atoll.losses import Standard
    >>> model = torch.nn.Linear(1, 2, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> spectrum = density(EmpiricalRisk(model, Standard(), torch.ones(1, 1), torch.tensor([0])), vectors=1, steps=2)
    >>> abs(spectrum.eigenvalues).round(3).tolist(), round(float(spectrum.weights.sum()), 3)
    ([[0.0, 0.5]], 1.0)
    """
    check_count(1, vectors=vectors, steps=steps)
    steps = min(steps, risk.size)
    eigenvalues, weights = np.zeros((vectors, steps)), np.zeros((vectors, steps))
    products = HessianProducts(risk, seed=seed)
    for number in range(vectors):
        draw = generator(seed, "density", number)
        nodes, share = _quadrature(products, torch.randn(risk.size, generator=draw), steps)
        # Lanczos stops early if the spectrum has few values; the remaining points get no weight.
        eigenvalues[number], weights[number, : len(share)] = np.pad(nodes, (0, steps - len(nodes)), mode="edge"), share
    return Density(eigenvalues, weights)


def _quadrature(products: HessianProducts, start: Tensor, steps: int) -> tuple[Array, Array]:
    """Return eigenvalues and weights of the tridiagonal matrix of a Lanczos run."""
    from scipy.linalg import eigh_tridiagonal

    risk = products.risk
    v = start.to(risk.parameters[0])
    basis, diagonal, beside = [v / v.norm()], [], []
    for step in range(steps):
        w = flatten(products(risk.split(basis[-1])))
        diagonal.append(float(w @ basis[-1]))
        for _ in range(2):  # once is not enough in floating point
            for earlier in basis:
                w = w - (w @ earlier) * earlier
        length = float(w.norm())
        if step == steps - 1 or length <= 1e-6 * max(map(abs, diagonal)):
            break
        beside.append(length)
        basis.append(w / length)
    values, vectors = eigh_tridiagonal(np.array(diagonal), np.array(beside))
    return values, vectors[0] ** 2
