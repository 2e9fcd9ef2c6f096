"""GloRo Nets (Leino et al., 2021): certificates from global Lipschitz constants of the logits' differences."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.certify.certificate import Certificate
from atoll.certify.layers import linear_map
from atoll.certify.lipschitz import UNIT_ROUNDOFF, Bound, LayerBound, gamma, lipschitz_of_body
from atoll.certify.norms import BUDGET
from atoll.errors import InputError
from atoll.models.base import Classifier
from atoll.modules import evaluation_mode

UP = 1 + 1e-12  # more than the rounding of a few hundred products and sums in float64


@dataclass(frozen=True)
class PairwiseLipschitz:
    r"""What the certificate of a network rests on, for all pairs of classes, ``(classes, classes)`` in float64.

    Args:
        lipschitz: :math:`K_{ji}`, of :math:`f_j - f_i`.
        relative: with ``absolute``, :math:`f_j - f_i` is computed to within :math:`A_{ji} \|x\| + B_{ji}`.
        absolute: see ``relative``.
    """

    lipschitz: Tensor
    relative: Tensor
    absolute: Tensor

    @staticmethod
    def estimated(matrix: Tensor) -> PairwiseLipschitz:
        """From an estimate of K, such as training makes: no proof."""
        matrix = matrix.detach().double()
        return PairwiseLipschitz(matrix, torch.zeros_like(matrix), torch.zeros_like(matrix))


def radius(logits: Tensor, size: Tensor, constants: PairwiseLipschitz) -> Tensor:
    r"""How far an input of l2 norm ``size`` can be moved before the prediction j changes, at least.

    .. math:: \min_{i \ne j} \frac{f_j - f_i - 2 (A_{ji} \|x\| + B_{ji})}{K_{ji} + A_{ji}}

    The computed margin may be too large by :math:`A \|x\| + B`.  At distance r it has lost at most :math:`r K`, and is
    itself computed with an error of at most :math:`A (\|x\| + r) + B`.  What is left is positive for all smaller r, so
    the computed prediction does not change either, and in exact arithmetic (A = B = 0) this is the radius of GloRo.

    >>> constants = PairwiseLipschitz.estimated(torch.tensor([[0.0, 2.0], [2.0, 0.0]]))
    >>> radius(torch.tensor([[3.0, 1.0]]), torch.ones(1), constants)
    tensor([1.], dtype=torch.float64)
    """
    return radius_per_class(logits, size, constants).amin(1)


def radius_per_class(logits: Tensor, size: Tensor, constants: PairwiseLipschitz) -> Tensor:
    """The radius within which the prediction is proven against each class, infinity for its own; see ``radius``.

    >>> constants = PairwiseLipschitz.estimated(torch.tensor([[0.0, 2.0, 1.0], [2.0, 0.0, 1.0], [1.0, 1.0, 0.0]]))
    >>> radius_per_class(torch.tensor([[3.0, 1.0, 0.0]]), torch.ones(1), constants)
    tensor([[inf, 1., 3.]], dtype=torch.float64)
    """
    f = logits.double()
    top = f.argmax(1)
    k, a, b = (matrix.to(f.device)[top] for matrix in (constants.lipschitz, constants.relative, constants.absolute))
    margin = f.gather(1, top[:, None]) - f - 2 * (a * size.double()[:, None] + b)
    # A pair of classes whose difference is constant can change nothing, unless it is a tie.
    ratio = torch.where(margin > 0, margin / (k + a), 0.0)
    return ratio.scatter(1, top[:, None], math.inf)


@dataclass(eq=False)
class GloRo:
    """Certifies any classifier with a linear head whose body has a Lipschitz constant.

    The network itself is run once, as for a prediction.  Certificates are about the network as it computes, in its
    own precision: rounding is counted in full, at its worst, which in float32 costs one to ten per cent of the radius,
    and in float64 (``model.double()``) nothing that could be seen.

    Args:
        model: the classifier, with the weights that the constants were computed from.
        constants: ``GloRo.proven`` makes them.
        layers: what they were made of, for the table.

    >>> from atoll.models import MLP
    >>> model = MLP((2,), 2, hidden=()).double()
    >>> _ = model.head.weight.data.copy_(torch.eye(2)), model.head.bias.data.zero_()
    >>> certificate = GloRo.proven(model)(torch.tensor([[0.8, 0.3]], dtype=torch.float64))
    >>> certificate.prediction, certificate.radius  # 0.5 / sqrt(2)
    (tensor([0]), tensor([0.3536], dtype=torch.float64))
    """

    model: nn.Module
    constants: PairwiseLipschitz
    layers: tuple[LayerBound, ...] = ()

    @property
    def lipschitz(self) -> float:
        """The largest constant of a difference of two logits."""
        return float(self.constants.lipschitz.max())

    @staticmethod
    def proven(
        model: Classifier, *, budget: float = BUDGET, on_layer: Callable[[LayerBound], None] | None = None
    ) -> GloRo:
        """With proven constants; an InputError names a layer that has none."""
        if linear_map(model.head) is None:
            raise InputError(f"head ({type(model.head).__name__}) cannot be certified: expected a linear layer")
        body = lipschitz_of_body(model, budget=budget, on_layer=on_layer)
        return GloRo(model, _pairs(model, body.bound), body.layers)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Certificate:
        x = x.to(next(self.model.parameters()).dtype)
        with evaluation_mode(self.model):
            logits = self.model(x)
        size = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)
        return Certificate(logits.argmax(1), radius(logits, size, self.constants))


@torch.no_grad()
def _pairs(model: Classifier, body: Bound) -> PairwiseLipschitz:
    """The constants of all pairs of logits of a linear head, and the error of computing them."""
    head = copy.deepcopy(model.head).double().cpu()
    linear = linear_map(head)
    assert linear is not None
    w, bias = linear.weight, torch.as_tensor(head.bias if head.bias is not None else 0.0).double()
    distance = UP * torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist")
    # One logit is a sum of products, at most |w| |z| large; a normalized head also rounds its weights.
    rounding = gamma(linear.terms + 8, UNIT_ROUNDOFF[next(model.parameters()).dtype])
    length, offset = (rounding * v.expand(len(w)) for v in (w.norm(dim=1), bias.abs()))
    lengths, offsets = length[:, None] + length, offset[:, None] + offset
    return PairwiseLipschitz(
        UP * distance * body.lipschitz,
        UP * (distance * body.relative + lengths * (body.lipschitz + body.relative)),
        UP * (distance * body.absolute + lengths * (body.offset + body.absolute) + offsets),
    )
