"""Losses for standard, adversarial and certified training, and the objectives of attacks."""

from atoll.losses.annealing import AnnealedCrossEntropy, LogitAnnealing
from atoll.losses.base import LOSSES, LogitCurvature, Loss, Outputs, Term, autograd_curvature, hessian_blocks
from atoll.losses.centroid import CentroidMargin, PlaneDistance
from atoll.losses.certified import (
    EMMA,
    AbstainCrossEntropy,
    Abstention,
    DynamicMargin,
    FixedMargin,
    FixedMarginCE,
    GlobalMargin,
    GloRoCE,
    GloRoTRADES,
    LipschitzMargin,
)
from atoll.losses.objectives import OBJECTIVES, Objective
from atoll.losses.robust import ALP, AT, MART, TRADES, Standard
from atoll.losses.terms import KL, CrossEntropy, Margin, Pairing, WeightedKL

__all__ = [
    "ALP", "AT", "EMMA", "KL", "LOSSES", "MART", "OBJECTIVES", "TRADES", "AbstainCrossEntropy", "Abstention",
    "AnnealedCrossEntropy", "CentroidMargin", "CrossEntropy", "DynamicMargin", "FixedMargin", "FixedMarginCE",
    "GloRoCE", "GloRoTRADES", "GlobalMargin", "LipschitzMargin", "LogitAnnealing", "LogitCurvature", "Loss", "Margin",
    "Objective", "Outputs", "Pairing", "PlaneDistance", "Standard", "Term", "WeightedKL", "autograd_curvature",
    "hessian_blocks",
]  # fmt: skip
