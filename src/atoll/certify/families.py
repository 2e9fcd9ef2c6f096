"""Which certifier belongs to which kind of model."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Protocol

from torch import Tensor

from atoll.certify.certificate import Certificate
from atoll.certify.gloro import GloRo
from atoll.certify.lipschitz import LayerBound
from atoll.certify.norms import BUDGET
from atoll.errors import InputError
from atoll.models.base import Classifier

OnLayer = Callable[[LayerBound], None]


class Proof(Protocol):
    """A certifier and what it rests on."""

    @property
    def layers(self) -> tuple[LayerBound, ...]: ...

    @property
    def lipschitz(self) -> float: ...

    def __call__(self, x: Tensor) -> Certificate: ...


@singledispatch
def certifier_for(model: object, *, budget: float = BUDGET, on_layer: OnLayer | None = None) -> Proof:
    """The certifier of a model; other kinds than GloRo register theirs by the class of the model.

    >>> from atoll.models import MLP
    >>> type(certifier_for(MLP((2,), 2))).__name__
    'GloRo'
    """
    raise InputError(f"{type(model).__name__} cannot be certified: expected a Classifier")


@certifier_for.register
def _(model: Classifier, *, budget: float = BUDGET, on_layer: OnLayer | None = None) -> Proof:
    return GloRo.proven(model, budget=budget, on_layer=on_layer)
