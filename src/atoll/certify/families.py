"""Which certifier belongs to which kind of model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Protocol

from torch import Tensor

from atoll.certify.centroids import NearestCentroid
from atoll.certify.certificate import Certificate, Certifier
from atoll.certify.gloro import GloRo, PairwiseLipschitz
from atoll.certify.lipschitz import Bound, LayerBound
from atoll.certify.norms import BUDGET
from atoll.certify.power import LipschitzEstimate
from atoll.errors import InputError
from atoll.models.base import Classifier
from atoll.models.centroid import CentroidNet

OnLayer = Callable[[LayerBound], None]


class Proof(Protocol):
    """A certifier and what it rests on."""

    @property
    def layers(self) -> tuple[LayerBound, ...]: ...

    @property
    def lipschitz(self) -> float: ...

    def __call__(self, x: Tensor) -> Certificate: ...


@singledispatch
def certifier_for(
    model: object,
    *,
    budget: float = BUDGET,
    on_layer: OnLayer | None = None,
    radii: Sequence[float] = (),
    eta: float = 0.0,
) -> Proof:
    """The certifier of a model; other kinds than GloRo register theirs by the class of the model.

    Args:
        model: the classifier.
        budget: operations that the proof of one layer may take.
        on_layer: told of every layer that is done.
        radii: that matter; some certifiers take the time to look closer where these are not reached.
        eta: of an eta-layer, which only Centroid Nets can have.

    >>> from atoll.models import MLP
    >>> type(certifier_for(MLP((2,), 2))).__name__
    'GloRo'
    """
    raise InputError(f"{type(model).__name__} cannot be certified: expected a Classifier")


@certifier_for.register
def _(
    model: Classifier,
    *,
    budget: float = BUDGET,
    on_layer: OnLayer | None = None,
    radii: Sequence[float] = (),
    eta: float = 0.0,
) -> Proof:
    if eta:
        raise InputError(f"eta: expected a CentroidNet, got {type(model).__name__}")
    return GloRo.proven(model, budget=budget, on_layer=on_layer)


@certifier_for.register
def _(
    model: CentroidNet,
    *,
    budget: float = BUDGET,
    on_layer: OnLayer | None = None,
    radii: Sequence[float] = (),
    eta: float = 0.0,
) -> Proof:
    return NearestCentroid.proven(model, budget=budget, on_layer=on_layer, radii=radii, eta=eta)


def heuristic_certifier(model: Classifier, lipschitz: LipschitzEstimate) -> Certifier:
    """What the certifier would say if the constants that training goes by were right: no proof."""
    pairs = lipschitz.converged()
    if isinstance(model, CentroidNet):
        return NearestCentroid(model, Bound(float(pairs[0, 1]) / (2 * model.head.lipschitz)))
    return GloRo(model, PairwiseLipschitz.estimated(pairs))
