"""Methods that act on the training loop; any of them combines with any loss and with each other."""

from atoll.training.methods.averaging import SWA, Lookahead
from atoll.training.methods.base import Method, Step
from atoll.training.methods.certified import CentroidsFromData, EpsRamp
from atoll.training.methods.early_stopping import EarlyStopping
from atoll.training.methods.inputs import CutMix, GaussianNoise, Mixup
from atoll.training.methods.perturbation import AWP, AWPT, SAM
from atoll.training.methods.rat import RAT
from atoll.training.methods.s2o import S2O
from atoll.training.methods.trh import TrH
from atoll.training.methods.wci import MeasureWCI, WCISchedule

__all__ = [
    "AWP", "AWPT", "RAT", "S2O", "SAM", "SWA", "CentroidsFromData", "CutMix", "EarlyStopping", "EpsRamp",
    "GaussianNoise", "Lookahead", "MeasureWCI", "Method", "Mixup", "Step", "TrH", "WCISchedule",
]  # fmt: skip
