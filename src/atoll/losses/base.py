"""Robust losses as weighted sums of terms, each with a value and second derivatives in logit space.

Notation, per example: logits g (clean) and g' (adversarial), p = softmax(g), q = softmax(g').
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor

from atoll.errors import InputError
from atoll.losses.objectives import Objective
from atoll.models.centroid import Centroids
from atoll.registry import Registry


@dataclass
class Outputs:
    """The outputs of one training pass; parts that are not needed are None.

    ``certified_margin`` is eps K for every pair (j, i) of classes: the largest decrease of logit j minus logit i within
    eps.  ``certified_margin_all`` is the same for the vector of all logits, in l2.  ``head`` is the head of a Centroid
    Net.
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
        """Clean features and the centroids to compare them with."""
        if self.features is None or self.head is None:
            raise InputError("CentroidMargin requires a CentroidNet model and a plain training pass")
        return self.features, self.head


def require_margin(margin: Tensor | None) -> Tensor:
    """Return a certified margin; raises an InputError if the outputs of a method or measurement have none."""
    if margin is None:
        raise InputError("this loss requires Lipschitz constants, which only a plain training pass computes")
    return margin


@dataclass
class LogitCurvature:
    """Diagonals of the second derivatives of a loss in logit space, each ``(batch, classes)`` or None for zero.

    The trace of the Hessian with respect to a linear head is the dot product of these diagonals with squared feature
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
    """Base class of the terms of a loss; subclasses implement ``value``, and autograd computes the curvature."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Do not inherit a closed form of the curvature if a subclass overrides ``value``."""
        super().__init_subclass__(**options)
        if "value" in vars(cls) and "curvature" not in vars(cls):
            cls.curvature = Term.curvature  # type: ignore[method-assign]

    @abstractmethod
    def value(self, out: Outputs, y: Tensor) -> Tensor:
        """Return one value per example."""

    def curvature(self, out: Outputs, y: Tensor) -> LogitCurvature:
        """Return second derivatives in logit space; they are differentiable, for use in training."""
        return autograd_curvature(self, out, y)

    def with_clean_stopped(self, stopped: bool) -> Term:
        """Return this term with or without a constant clean prediction, if it depends on both predictions.

        A term with ``detach`` in its ``value`` holds the clean prediction constant in both cases.
        """
        return _Stopped(self) if stopped else self


class _Stopped(Term):
    """Wraps a term and, if it depends on both predictions, holds the clean one constant."""

    def __init__(self, term: Term) -> None:
        self.term = term

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        return self.term.value(self._stop(out, y), y)

    def curvature(self, out: Outputs, y: Tensor) -> LogitCurvature:
        stopped = self._stop(out, y)
        curvature = self.term.curvature(stopped, y)
        return curvature if stopped is out else LogitCurvature(adversarial=curvature.adversarial)

    def _stop(self, out: Outputs, y: Tensor) -> Outputs:
        if out.logits is None or out.adv_logits is None:
            return out
        leaves, detached = _leaves(replace(out, logits=out.g.detach(), adv_logits=out.g_adv.detach()))
        with torch.enable_grad():
            first = _grad(self.term.value(detached, y).sum(), list(leaves.values()))
        return out if any(gradient is None for gradient in first) else replace(out, logits=out.g.detach())


def _leaves(out: Outputs) -> tuple[dict[str, Tensor], Outputs]:
    """Return the logits of both predictions by name, with gradients, and outputs that contain them."""
    given = {name: g for name, g in (("clean", out.logits), ("adversarial", out.adv_logits)) if g is not None}
    leaves = {name: g if g.requires_grad else g.detach().requires_grad_() for name, g in given.items()}
    return leaves, replace(out, logits=leaves.get("clean"), adv_logits=leaves.get("adversarial"))


def hessian_blocks(term: Term | Loss, out: Outputs, y: Tensor) -> dict[str, Tensor]:
    """Return the blocks of the Hessian of each example in logit space, without a pass through the network.

    The blocks are ``clean``, ``cross`` (rows: clean logits, columns: adversarial logits) and ``adversarial``, each
    ``(batch, classes, classes)``.  Blocks of logits that the value does not depend on are omitted.

    >>> from atoll.losses import CrossEntropy
    >>> out = Outputs(logits=torch.zeros(1, 2), adv_logits=torch.zeros(1, 2))
    >>> {name: block.tolist() for name, block in hessian_blocks(CrossEntropy("clean"), out, torch.tensor([0])).items()}
    {'clean': [[[0.25, -0.25], [-0.25, 0.25]]]}
    """
    leaves, out = _leaves(out)
    logits, blocks = list(leaves.values()), {}
    with torch.enable_grad():
        value = term.value(out, y) if isinstance(term, Term) else sum(term.values(out, y).values(), torch.zeros(()))
        first = _grad(value.sum(), logits)
        for number, gradient in enumerate(first):
            if gradient is None:
                continue
            # The rows of the clean logits also contain the mixed derivatives.
            rows = [_grad(gradient[:, k].sum(), logits[number:]) for k in range(gradient.shape[1])]
            names = (list(leaves)[number], "cross")
            for name, depends, columns in zip(names, first[number:], zip(*rows, strict=True), strict=False):
                if depends is not None:
                    parts = [torch.zeros_like(gradient) if column is None else column for column in columns]
                    blocks[name] = torch.stack(parts, 1)
    return blocks


def autograd_curvature(term: Term, out: Outputs, y: Tensor) -> LogitCurvature:
    """Compute the three diagonals by automatic differentiation; parts that the term does not depend on are None.

    >>> from atoll.losses import CrossEntropy
    >>> g = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    >>> autograd_curvature(CrossEntropy("clean"), Outputs(logits=g), torch.tensor([0])).clean.tolist()
    [[0.25, 0.25]]
    """
    blocks = hessian_blocks(term, out, y)
    return LogitCurvature(**{name: block.diagonal(dim1=1, dim2=2) for name, block in blocks.items()})


def _grad(value: Tensor, inputs: list[Tensor]) -> list[Tensor | None]:
    """Return differentiable gradients, or None for inputs that ``value`` does not depend on."""
    if not value.requires_grad:
        return [None] * len(inputs)
    return list(torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True))


LOSSES = Registry("loss", "losses", "atoll.losses.base.Loss", "atoll.losses")


class Loss:
    """Base class of losses: named terms with weights, and the objective that the attack maximizes.

    ``objective`` is None for losses without an attack.  ``uses_clean`` says whether the loss needs a clean pass, and
    ``uses_lipschitz`` whether it needs the Lipschitz constants of the network.  ``certifies`` says whether the loss
    trains certified radii, as all losses with Lipschitz constants do; the norm of the threat model must then be l2, and
    verified accuracy selects the best checkpoint.  A subclass that overrides ``values`` must also override
    ``curvature`` to support methods that use it.
    """

    registry: ClassVar[Registry] = LOSSES

    objective: ClassVar[Objective | None] = None
    uses_clean: ClassVar[bool] = True
    uses_lipschitz: ClassVar[bool] = False
    certifies: ClassVar[bool] = False

    _arguments: dict[str, Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.certifies = cls.certifies or cls.uses_lipschitz
        if "values" in vars(cls) and "curvature" not in vars(cls):
            cls.curvature = _no_curvature  # type: ignore[assignment]

    def __new__(cls, *args: Any, **arguments: Any) -> Self:
        """Store the arguments for ``repr``."""
        loss = super().__new__(cls)
        loss._arguments = arguments
        return loss

    def __init__(self, **terms: tuple[float, Term]) -> None:
        self.terms = terms

    def __repr__(self) -> str:
        """Return the call that creates this loss, without arguments that have their default values.

        >>> from atoll.losses import TRADES
        >>> TRADES(lambda_t=3), TRADES(lambda_t=6.0)
        (TRADES(lambda_t=3), TRADES())
        """
        defaults = {name: p.default for name, p in inspect.signature(type(self)).parameters.items()}
        given = {name: value for name, value in self._arguments.items() if value != defaults.get(name)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def values(self, out: Outputs, y: Tensor) -> dict[str, Tensor]:
        """Return the weighted value of each term, one per example."""
        return {name: weight * term.value(out, y) for name, (weight, term) in self.terms.items()}

    def curvature(self, out: Outputs, y: Tensor) -> LogitCurvature:
        """Return the curvature of the loss in logit space."""
        return sum((weight * term.curvature(out, y) for weight, term in self.terms.values()), LogitCurvature())

    def with_clean_stopped(self, stopped: bool) -> Self:
        """Return this loss with or without a constant clean prediction in the terms that depend on both predictions.

        >>> from atoll.losses import TRADES
        >>> TRADES().with_clean_stopped(True).terms["kl"][1].stop_clean_gradient
        True
        """
        loss = copy.copy(self)
        terms = self.terms.items()
        loss.terms = {name: (weight, term.with_clean_stopped(stopped)) for name, (weight, term) in terms}
        return loss


def _no_curvature(loss: Loss, out: Outputs, y: Tensor) -> NoReturn:
    name = type(loss).__name__
    raise InputError(f"{name}: overrides values but not curvature; implement curvature, or define the loss by terms")


def hard_labels(y: Tensor, loss: str) -> Tensor:
    """Return class indices; raises an InputError for mixed labels, which the loss does not support."""
    if y.dim() != 1:
        raise InputError(f"{loss}: expected one class per example, got mixed labels; disable mixup and cutmix")
    return y
