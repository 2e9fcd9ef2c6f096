"""Methods that act on the training loop; any of them combines with any loss and with each other."""

from atoll.training.methods.base import Method, Step
from atoll.training.methods.early_stopping import EarlyStopping
from atoll.training.methods.lookahead import Lookahead
from atoll.training.methods.mixing import CutMix, Mixup

__all__ = ["CutMix", "EarlyStopping", "Lookahead", "Method", "Mixup", "Step"]
