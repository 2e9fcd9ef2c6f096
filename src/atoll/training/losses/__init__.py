"""Robust losses."""

from atoll.training.losses.alp import ALP
from atoll.training.losses.at import AT
from atoll.training.losses.base import LogitCurvature, Loss, Outputs, Term, autograd_curvature
from atoll.training.losses.centroid_margin import CentroidMargin, PlaneDistance
from atoll.training.losses.emma import EMMA
from atoll.training.losses.fixed_margin import FixedMarginCE
from atoll.training.losses.gloro_ce import GloRoCE
from atoll.training.losses.gloro_trades import GloRoTRADES
from atoll.training.losses.lipschitz_margin import LipschitzMargin
from atoll.training.losses.lipschitz_terms import (
    AbstainCrossEntropy,
    Abstention,
    DynamicMargin,
    FixedMargin,
    GlobalMargin,
)
from atoll.training.losses.mart import MART
from atoll.training.losses.standard import Standard
from atoll.training.losses.terms import KL, CrossEntropy, Margin, Pairing, WeightedKL
from atoll.training.losses.trades import TRADES

__all__ = [
    "ALP",
    "AT",
    "EMMA",
    "KL",
    "MART",
    "TRADES",
    "AbstainCrossEntropy",
    "Abstention",
    "CentroidMargin",
    "CrossEntropy",
    "DynamicMargin",
    "FixedMargin",
    "FixedMarginCE",
    "GloRoCE",
    "GloRoTRADES",
    "GlobalMargin",
    "LipschitzMargin",
    "LogitCurvature",
    "Loss",
    "Margin",
    "Outputs",
    "Pairing",
    "PlaneDistance",
    "Standard",
    "Term",
    "WeightedKL",
    "autograd_curvature",
]
