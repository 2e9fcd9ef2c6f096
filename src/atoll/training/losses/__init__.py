"""Robust losses."""

from atoll.training.losses.alp import ALP
from atoll.training.losses.at import AT
from atoll.training.losses.base import LogitCurvature, Loss, Outputs, Term, autograd_curvature
from atoll.training.losses.mart import MART
from atoll.training.losses.standard import Standard
from atoll.training.losses.terms import KL, CrossEntropy, Margin, Pairing, WeightedKL
from atoll.training.losses.trades import TRADES

__all__ = [
    "ALP",
    "AT",
    "KL",
    "MART",
    "TRADES",
    "CrossEntropy",
    "LogitCurvature",
    "Loss",
    "Margin",
    "Outputs",
    "Pairing",
    "Standard",
    "Term",
    "WeightedKL",
    "autograd_curvature",
]
