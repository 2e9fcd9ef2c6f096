"""Robust losses as weighted sums of terms, each with its value and its second derivatives in logit space.

Notation, per example: logits g (clean) and g' (adversarial), p = softmax(g), q = softmax(g').
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from atoll.errors import InputError
from atoll.losses.objectives import Objective
from atoll.models.centroid import Centroids
from atoll.registry import Registry


@dataclass
class Outputs:
    """The outputs of one training pass; parts that nobody needs are None.

    ``certified_margin`` is eps K, for every pair (j, i) of classes: the most by which logit j minus logit i can fall
    within eps.  ``certified_margin_all`` is the same for all logits together, as a vector in l2.  ``head`` is that of a
    Centroid Net.
    """

    logits: Tensor | None = None
    features: Tensor | None = None
    adv_logits: Tensor | None = None
    adv_features: Tensor | None = None
    certified_margin: Tensor | None = None
    certified_margin_all: Tensor | None = None
    head: Centroids | None = None

    @property
    def g(self) -> Tensor:
        """Clean logits."""
        assert self.logits is not None, "this term needs a clean pass: set uses_clean"
        return self.logits

    @property
    def g_adv(self) -> Tensor:
        """Adversarial logits."""
        assert self.adv_logits is not None, "this term needs an adversarial pass: set an objective"
        return self.adv_logits

    @property
    def latent(self) -> tuple[Tensor, Centroids]:
        """Clean features and the centroids they are compared with."""
        if self.features is None or self.head is None:
            raise InputError("this loss needs the centroids of a CentroidNet, in the plain training pass")
        return self.features, self.head


def require_margin(margin: Tensor | None) -> Tensor:
    """A certified margin; an error for methods and measurements that make outputs without one."""
    if margin is None:
        raise InputError("this loss needs Lipschitz constants, which only the plain training pass computes")
    return margin


@dataclass
class LogitCurvature:
    """The diagonals of a loss's second derivatives in logit space, each ``(batch, classes)`` or None for zero.

    With these the trace of the Hessian with respect to a linear head is a dot product with squared feature
    norms; see ``atoll.training.methods``.
    """

    clean: Tensor | None = None  # d2 l / dg_k dg_k
    cross: Tensor | None = None  # d2 l / dg_k dg'_k
    adversarial: Tensor | None = None  # d2 l / dg'_k dg'_k

    def __add__(self, other: LogitCurvature) -> LogitCurvature:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return LogitCurvature(*(b if a is None else a if b is None else a + b for a, b in pairs))

    def __rmul__(self, weight: float) -> LogitCurvature:
        return LogitCurvature(*(None if a is None else weight * a for a in vars(self).values()))


class Term(ABC):
    """One summand of a loss.  A term of your own only needs ``value``: its curvature then comes from autograd."""

    @abstractmethod
    def value(self, out: Outputs, y: Tensor) -> Tensor:
        """One value per example."""

    def curvature(self, out: Outputs, y: Tensor) -> LogitCurvature:
        """Second derivatives in logit space; differentiable, so that they can be trained through."""
        return autograd_curvature(self, out, y)


def autograd_curvature(term: Term, out: Outputs, y: Tensor) -> LogitCurvature:
    """The three diagonals by automatic differentiation: K small products, no pass through the network.

    >>> from atoll.losses import CrossEntropy
    >>> g = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    >>> autograd_curvature(CrossEntropy("clean"), Outputs(logits=g), torch.tensor([0])).clean.tolist()
    [[0.25, 0.25]]
    """
    given = {name: g for name, g in (("clean", out.logits), ("adversarial", out.adv_logits)) if g is not None}
    # Logits that come without a graph (evaluation) still need one here.
    leaves = {name: g if g.requires_grad else g.detach().requires_grad_() for name, g in given.items()}
    out = replace(out, logits=leaves.get("clean"), adv_logits=leaves.get("adversarial"))
    logits, diagonals = list(leaves.values()), {}
    with torch.enable_grad():
        first = _grad(term.value(out, y).sum(), logits)
        for number, name in enumerate(leaves):
            # The mixed derivatives come with the clean ones.
            rows = [_grad(first[number][:, k].sum(), logits[number:]) for k in range(first[number].shape[1])]
            for part, row in zip((name, "cross"), zip(*rows, strict=True), strict=False):
                diagonals[part] = torch.stack([derivative[:, k] for k, derivative in enumerate(row)], 1)
    return LogitCurvature(**diagonals)


def _grad(value: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients that can be differentiated again; zeros where ``value`` does not depend on an input."""
    if not value.requires_grad:
        return [torch.zeros_like(i) for i in inputs]
    grads = torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for g, i in zip(grads, inputs, strict=True)]


LOSSES = Registry("loss", "losses", "atoll.losses.base.Loss", "atoll.losses")


class Loss:
    """A robust loss: named terms with weights, and the objective its adversarial inputs maximize.

    ``objective`` is None for losses without an attack; ``uses_clean`` says whether a clean pass is needed,
    ``uses_lipschitz`` whether the network's Lipschitz constants are (the threat model's norm is then l2).
    """

    registry: ClassVar[Registry] = LOSSES

    objective: ClassVar[Objective | None] = None
    uses_clean: ClassVar[bool] = True
    uses_lipschitz: ClassVar[bool] = False

    _arguments: dict[str, Any]

    def __new__(cls, *args: Any, **arguments: Any) -> Self:
        """Remembers the arguments for ``repr``."""
        loss = super().__new__(cls)
        loss._arguments = arguments
        return loss

    def __init__(self, **terms: tuple[float, Term]) -> None:
        self.terms = terms

    def __repr__(self) -> str:
        """The call that makes this loss, without arguments that have their default value.

        >>> from atoll.losses import TRADES
        >>> TRADES(lambda_t=3), TRADES(lambda_t=6.0)
        (TRADES(lambda_t=3), TRADES())
        """
        defaults = {name: p.default for name, p in inspect.signature(type(self)).parameters.items()}
        given = {name: value for name, value in self._arguments.items() if value != defaults.get(name)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def values(self, out: Outputs, y: Tensor) -> dict[str, Tensor]:
        """Weighted value of each term, one per example."""
        return {name: weight * term.value(out, y) for name, (weight, term) in self.terms.items()}

    def curvature(self, out: Outputs, y: Tensor) -> LogitCurvature:
        """Curvature of the whole loss in logit space."""
        return sum((weight * term.curvature(out, y) for weight, term in self.terms.values()), LogitCurvature())


def hard_labels(y: Tensor, loss: str) -> Tensor:
    """Class indices; mixed labels are an error for this loss."""
    if y.dim() != 1:
        raise InputError(f"{loss}: expected one class per example, got mixed labels (mixup and cutmix do not apply)")
    return y
