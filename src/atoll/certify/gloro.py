"""GloRo Nets (Leino et al., 2021): certificates from global Lipschitz constants of logit differences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.certify.bounds import Error, Shape, Value
from atoll.certify.certificate import Certificate, input_size, rounded_inputs
from atoll.certify.linear import Dense
from atoll.certify.lipschitz import OnLayer, check_arithmetic, ensure_captured, propagate
from atoll.certify.norms import BUDGET
from atoll.certify.propagation import LayerBound, Propagation
from atoll.graph import CapturedModel
from atoll.modules import evaluation_mode

UP = 1 + 1e-12  # more than the rounding of a few hundred products and sums in float64


@dataclass(frozen=True)
class PairwiseLipschitz:
    r"""Lipschitz constants and error bounds for all pairs of classes, ``(classes, classes)`` in float64.

    Args:
        lipschitz: :math:`K_{ji}`, the Lipschitz constant of :math:`f_j - f_i`.
        relative: A; the error of a computed :math:`f_j - f_i` is at most :math:`A_{ji} \|x\| + B_{ji}`.
        absolute: B, see ``relative``.
    """

    lipschitz: Tensor
    relative: Tensor
    absolute: Tensor

    @staticmethod
    def estimated(matrix: Tensor) -> PairwiseLipschitz:
        """Build from an estimate of K, as in training, which is not a proof."""
        matrix = matrix.detach().double()
        return PairwiseLipschitz(matrix, torch.zeros_like(matrix), torch.zeros_like(matrix))


def radius(
    logits: Tensor, size: Tensor, constants: PairwiseLipschitz, largest_input: float | Tensor = math.inf
) -> Tensor:
    r"""Return a radius within which the prediction j of an input of l2 norm ``size`` cannot change.

    .. math:: \min_{i \ne j} \frac{f_j - f_i - 2 (A_{ji} \|x\| + B_{ji})}{K_{ji} + A_{ji}}

    The computed margin may be too large by :math:`A \|x\| + B`.  At distance r it has decreased by at most :math:`r K`,
    and is itself computed with an error of at most :math:`A (\|x\| + r) + B`.  The rest is positive for all smaller r,
    so the computed prediction does not change.  In exact arithmetic (A = B = 0) this is the radius of GloRo.

    Inputs longer than ``largest_input`` may overflow, so no radius extends beyond it.

    >>> constants = PairwiseLipschitz.estimated(torch.tensor([[0.0, 2.0], [2.0, 0.0]]))
    >>> radius(torch.tensor([[3.0, 1.0]]), torch.ones(1), constants)
    tensor([1.], dtype=torch.float64)
    """
    nearest = radius_per_class(logits, size, constants).amin(1)
    room = (largest_input - size.double()).clamp_min(0)
    # NaN and infinity prove nothing.
    return torch.where(logits.isfinite().all(1) & (room > 0), torch.minimum(nearest, room), 0.0)


def radius_per_class(logits: Tensor, size: Tensor, constants: PairwiseLipschitz) -> Tensor:
    """Return the radius within which the prediction cannot change to each class, infinity for its own; see ``radius``.

    >>> constants = PairwiseLipschitz.estimated(torch.tensor([[0.0, 2.0, 1.0], [2.0, 0.0, 1.0], [1.0, 1.0, 0.0]]))
    >>> radius_per_class(torch.tensor([[3.0, 1.0, 0.0]]), torch.ones(1), constants)
    tensor([[inf, 1., 3.]], dtype=torch.float64)
    """
    f = logits.double()
    top = f.argmax(1)
    k, a, b = (matrix.to(f.device)[top] for matrix in (constants.lipschitz, constants.relative, constants.absolute))
    margin = f.gather(1, top[:, None]) - f - 2 * (a * size.double()[:, None] + b)
    # The order of two classes with a constant difference cannot change, unless it is a tie.
    ratio = margin / (k + a)
    ratio = torch.where((margin > 0) & (ratio > 0), ratio, 0.0)
    return ratio.scatter(1, top[:, None], math.inf)


@dataclass(eq=False)
class GloRo:
    """Certifier for any classifier whose operations have a certification rule.

    Certifying runs the captured graph once, as a prediction does.  Certificates cover the actual computation in the
    precision of the model: the worst-case rounding error is subtracted, which costs one to ten percent of the radius in
    float32 and a negligible amount in float64 (``model.double()``).

    Args:
        model: the captured classifier, whose digest every certificate contains; for an estimate, any classifier.
        constants: Lipschitz constants; see ``GloRo.proven``.
        layers: bounds of the layers, for reports.
        largest_input: largest norm of inputs that cannot overflow.

    >>> from atoll.models import MLP
    >>> model = MLP((2,), 2, hidden=()).double()
    >>> _ = model.head.weight.data.copy_(torch.eye(2)), model.head.bias.data.zero_()
    >>> certificate = GloRo.proven(model)(torch.tensor([[0.8, 0.3]], dtype=torch.float64))
    >>> certificate.prediction, certificate.radius  # 0.5 / sqrt(2)
    (tensor([0]), tensor([0.3536], dtype=torch.float64))
    """

    model: Any
    constants: PairwiseLipschitz
    layers: tuple[LayerBound, ...] = ()
    largest_input: float = math.inf

    @property
    def lipschitz(self) -> float:
        """The largest Lipschitz constant of a difference of two logits."""
        return float(self.constants.lipschitz.max())

    @staticmethod
    def proven(
        model: nn.Module, shape: Shape | None = None, *, budget: float = BUDGET, on_layer: OnLayer | None = None
    ) -> GloRo:
        """Build a certifier with proven constants.

        Raises an InputError that names the operation and its source line if an operation has no rule.
        """
        graph = ensure_captured(model, shape)
        propagation, logits = propagate(graph, budget=budget, on_layer=on_layer)
        constants = _pairs(propagation, logits)
        return GloRo(graph, constants, tuple(propagation.layers), propagation.largest_input)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Certificate:
        given = x.dtype
        x, logits = run_certified(self.model, x)
        size = input_size(x)
        function = self.model.digest if isinstance(self.model, CapturedModel) else ""
        radii = rounded_inputs(radius(logits, size, self.constants, self.largest_input), size, given, x.dtype)
        return Certificate(logits.argmax(1), radii, function)


def run_certified(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs in the precision of a model, and its logits.

    A captured model runs its generated code, without hooks, after a check that it has not changed since the capture.
    """
    if isinstance(model, CapturedModel):
        check_arithmetic(model)
        model.check_unchanged()
        x = x.to(model.dtype)
        return x, model(x)
    x = x.to(next(model.parameters()).dtype)
    with evaluation_mode(model):
        return x, model(x)


@torch.no_grad()
def _pairs(propagation: Propagation, logits: Value) -> PairwiseLipschitz:
    r"""Return the constants of all pairs of logits, and the error of computing them.

    For a linear head with rows w, they are :math:`\|w_j - w_i\|` times those of the features, otherwise
    :math:`\sqrt 2` times those of the vector of logits.
    """
    classes = logits.size
    if isinstance(logits.relation, Dense) and len(logits.shape) == 1:
        head, before, local = logits.relation, logits.base.bound, logits.local
        distance = _distances(head.weight) + 2 * head.error
    else:
        before, local = propagation.bound(logits), Error()
        distance = math.sqrt(2) * (1 - torch.eye(classes, dtype=torch.float64))
    local = local.times(math.sqrt(2))
    return PairwiseLipschitz(
        UP * distance * before.lipschitz,
        (1 + 1e-10) * (distance * before.relative + local.relative),  # also for rounding of the norm of x
        UP * (distance * before.absolute + local.absolute),
    )


def _distances(weight: Tensor) -> Tensor:
    scale = max(float(weight.abs().max()), torch.finfo(torch.float64).tiny)
    return UP * scale * torch.cdist(weight / scale, weight / scale, compute_mode="donot_use_mm_for_euclid_dist")
