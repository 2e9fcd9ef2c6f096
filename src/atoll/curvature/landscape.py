"""Loss landscapes over inputs and over weights, as data and figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.attacks.base import check_labels
from atoll.curvature.risk import EmpiricalRisk
from atoll.curvature.trace import OnProgress
from atoll.data.decode import read_npz
from atoll.errors import DataError, InputError, check_count, check_range
from atoll.files import write_arrays
from atoll.modules import evaluation_mode, preserve_buffers
from atoll.rng import PointRNG, generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Landscape:
    """The loss on a grid: ``loss[i, j]`` is at ``a[i]`` times the first direction plus ``b[j]`` times the second."""

    a: Tensor
    b: Tensor
    loss: Tensor
    axes: tuple[str, str]

    def save(self, path: Path) -> None:
        """Save the data as ``.npz``."""
        write_arrays(path, a=self.a.numpy(), b=self.b.numpy(), loss=self.loss.numpy(), axes=np.array(self.axes))

    @staticmethod
    def load(path: Path) -> Landscape:
        """Load a file written by ``save``.

        >>> import tempfile
        >>> line = torch.linspace(-1, 1, 3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Landscape(line, line, torch.eye(3), ("up", "down")).save(Path(folder, "some.npz"))
        ...     Landscape.load(Path(folder, "some.npz")).axes
        ('up', 'down')
        """
        arrays = read_npz(path, ("a", "b", "loss", "axes"))
        try:
            a, b, loss = (torch.from_numpy(arrays[name].astype(np.float64)) for name in ("a", "b", "loss"))
            first, second = (str(axis) for axis in arrays["axes"])
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(f"{path}: expected arrays a, b, loss and axes, got: {error}") from None
        if a.dim() != 1 or b.dim() != 1 or loss.shape != (len(a), len(b)):
            shapes = ", ".join(str(tuple(values.shape)) for values in (a, b, loss))
            raise DataError(f"{path}: expected a landscape over two axes, got shapes {shapes}")
        return Landscape(a, b, loss, (first, second))

    def plot(self) -> Figure:
        """Plot surface and contours side by side."""
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(10, 4), layout="constrained")
        a, b = np.meshgrid(self.a.numpy(), self.b.numpy(), indexing="ij")
        surface: Any = figure.add_subplot(1, 2, 1, projection="3d")
        surface.plot_surface(a, b, self.loss.numpy(), cmap="viridis")
        contour: Any = figure.add_subplot(1, 2, 2)
        figure.colorbar(contour.contourf(a, b, self.loss.numpy(), levels=20, cmap="viridis"), ax=contour, label="loss")
        for axis in (surface, contour):
            axis.set_xlabel(self.axes[0])
            axis.set_ylabel(self.axes[1])
        return figure


def input_landscape(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    radius: float,
    steps: int = 21,
    seed: object = 0,
    micro_batch: int = 128,
    on_progress: OnProgress | None = None,
) -> Landscape:
    r"""Compute mean cross-entropy at :math:`x + a\,\mathrm{sign}\nabla_x \ell + b\,r` (RAT, figure 2).

    r is a vector of random signs.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.eye(2))
    >>> landscape = input_landscape(model, torch.tensor([[0.6, 0.4]]), torch.tensor([0]), radius=0.1, steps=3)
    >>> landscape.loss[:, 1].round(decimals=3)  # along the gradient, through the point itself
    tensor([0.5130, 0.5980, 0.6930], dtype=torch.float64)
    """
    grid, loss = _grid(radius, steps)
    if not len(x) or len(x) != len(y):
        raise InputError(f"labels: expected one per point and at least one point, got {len(y)} for {len(x)} points")
    place = next(model.parameters())
    x, y = x.to(place), y.to(place.device)
    streams = PointRNG(seed, "landscape", index=torch.arange(len(x), device=x.device))
    signs = streams.rademacher(*x.shape[1:], dtype=x.dtype)
    with evaluation_mode(model), preserve_buffers(model):
        start = x.detach().requires_grad_()
        with torch.enable_grad():
            logits = model(start)
            check_labels(logits, y)
            (gradient,) = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), start)
        for i, a in enumerate(grid):
            row = torch.cat([x + float(a) * gradient.sign() + float(b) * signs for b in grid])
            with torch.no_grad():
                logits = torch.cat([model(part) for part in torch.split(row, micro_batch)])
            values = F.cross_entropy(logits, y.repeat(steps), reduction="none")
            loss[i] = values.view(steps, len(x)).double().mean(1).cpu()
            if on_progress:
                on_progress(i + 1, steps)
    return Landscape(grid, grid, loss, ("sign of the gradient", "random signs"))


def weight_landscape(
    risk: EmpiricalRisk,
    *,
    radius: float = 1.0,
    steps: int = 21,
    seed: object = 0,
    on_progress: OnProgress | None = None,
) -> Landscape:
    r"""Compute the loss at :math:`\theta + a\,d + b\,e`, with two random directions normalized filter by filter.

    Every filter (row) of a direction is scaled to the norm of the same filter of the network.  Biases and normalization
    layers do not move (Li et al., "Visualizing the loss landscape of neural nets", 2018).  The weights are restored
    exactly.

    >>> from atoll.losses import Standard
    >>> risk = EmpiricalRisk(nn.Linear(2, 2).eval(), Standard(), torch.rand(4, 2), torch.arange(4) % 2)
    >>> landscape = weight_landscape(risk, steps=3)
    >>> abs(float(landscape.loss[1, 1]) - risk.value()) < 1e-6
    True
    """
    grid, loss = _grid(radius, steps)
    first, second = (filter_normalized(risk, (seed, number)) for number in (0, 1))
    for i, a in enumerate(grid.tolist()):
        for j, b in enumerate(grid.tolist()):
            loss[i, j] = risk.values_at((a, first), (b, second)).mean()
        if on_progress:
            on_progress(i + 1, steps)
    return Landscape(grid, grid, loss, ("first random direction", "second random direction"))


def filter_normalized(risk: EmpiricalRisk, seed: object) -> list[Tensor]:
    """Return a random direction whose filters have the norms of the network's; zero except for weight matrices."""
    draw = generator(seed, "direction")
    direction = []
    for p in risk.parameters:
        if p.dim() < 2:
            direction.append(torch.zeros_like(p))
            continue
        d = torch.randn(p.shape, generator=draw, dtype=p.dtype).to(p.device)
        lengths = [t.detach().flatten(1).norm(dim=1).view(-1, *[1] * (p.dim() - 1)) for t in (p, d)]
        direction.append(d * lengths[0] / lengths[1])
    return direction


def _grid(radius: float, steps: int) -> tuple[Tensor, Tensor]:
    """Return the positions along an axis, and a tensor for the loss at all pairs of them."""
    check_range("(0, inf)", radius=radius)
    check_count(3, steps=steps)
    if steps % 2 == 0:
        raise InputError(f"steps: expected an odd number, so that the center is the point itself, got {steps}")
    return torch.linspace(-radius, radius, steps, dtype=torch.float64), torch.zeros(steps, steps, dtype=torch.float64)
