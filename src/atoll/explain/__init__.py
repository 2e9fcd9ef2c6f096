"""Explanations of predictions: attributions, boundary search, faithfulness, sanity check and locality."""

from atoll.explain.attributions import (
    STANDARD,
    BoundaryIntegratedGradients,
    BoundaryNormal,
    BoundarySaliency,
    InputXGradient,
    IntegratedGradients,
    Saliency,
    SmoothGrad,
    attribution,
)
from atoll.explain.boundary import BoundaryPoints, boundary_search
from atoll.explain.faithfulness import attribution_lipschitz, completeness_gap, infidelity
from atoll.explain.importance import alignment, rho_importance
from atoll.explain.locality import Locality, locality
from atoll.explain.sanity import sanity_check

__all__ = [
    "STANDARD",
    "BoundaryIntegratedGradients",
    "BoundaryNormal",
    "BoundaryPoints",
    "BoundarySaliency",
    "InputXGradient",
    "IntegratedGradients",
    "Locality",
    "Saliency",
    "SmoothGrad",
    "alignment",
    "attribution",
    "attribution_lipschitz",
    "boundary_search",
    "completeness_gap",
    "infidelity",
    "locality",
    "rho_importance",
    "sanity_check",
]
