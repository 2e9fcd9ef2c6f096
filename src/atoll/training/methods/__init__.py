"""Training methods, which can be combined with each other and with any loss."""

from atoll.training.methods.awp import AWP, AWPT
from atoll.training.methods.base import Method, Step
from atoll.training.methods.centroids import CentroidsFromData
from atoll.training.methods.early_stopping import EarlyStopping
from atoll.training.methods.eps_ramp import EpsRamp
from atoll.training.methods.gaussian_noise import GaussianNoise
from atoll.training.methods.lookahead import Lookahead
from atoll.training.methods.mixing import CutMix, Mixup
from atoll.training.methods.rat import RAT
from atoll.training.methods.s2o import S2O
from atoll.training.methods.sam import SAM
from atoll.training.methods.swa import SWA
from atoll.training.methods.trh import TrH
from atoll.training.methods.wci import MeasureWCI, WCISchedule

__all__ = [
    "AWP", "AWPT", "RAT", "S2O", "SAM", "SWA", "CentroidsFromData", "CutMix", "EarlyStopping", "EpsRamp",
    "GaussianNoise", "Lookahead", "MeasureWCI", "Method", "Mixup", "Step", "TrH", "WCISchedule",
]  # fmt: skip
