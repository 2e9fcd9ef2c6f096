"""The forward passes of a training step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atoll.certify.power import LipschitzEstimator
from atoll.losses.base import Outputs
from atoll.models.base import Classifier
from atoll.models.centroid import CentroidNet


class ForwardPasses(nn.Module):
    """The clean and the adversarial pass of one step as one module, for DistributedDataParallel.

    The two passes are separate batches, so batch norm never mixes clean and adversarial statistics.  This module also
    computes Lipschitz constants, because their gradients belong to the same step.
    """

    def __init__(self, model: nn.Module, lipschitz: LipschitzEstimator | None = None) -> None:
        super().__init__()
        self.model = model
        self.lipschitz = lipschitz

    def forward(self, x: Tensor | None, x_adv: Tensor | None, eps: float = 0.0, update: bool = True) -> Outputs:
        features, logits = self._pass(x)
        adv_features, adv_logits = self._pass(x_adv)
        out = Outputs(logits, features, adv_logits, adv_features)
        if self.lipschitz is not None:
            pairs, whole = self.lipschitz(update)
            out.certified_margin, out.certified_margin_all = eps * pairs, eps * whole
        if isinstance(self.model, CentroidNet):
            out.head = self.model.head
        return out

    def _pass(self, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if x is None:
            return None, None
        model = self.model
        features = model.features(x) if isinstance(model, Classifier) else None
        logits = model.head(features) if isinstance(model, Classifier) else model(x)
        # Losses are computed in full precision even if the passes are not.
        return features, logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


@torch.no_grad()
def cat_outputs(parts: Sequence[Outputs]) -> Outputs:
    """Concatenate the outputs of the accumulated parts of a step, without gradients."""
    columns = zip(*((p.logits, p.features, p.adv_logits, p.adv_features) for p in parts), strict=True)
    logits, features, adv_logits, adv_features = (None if c[0] is None else torch.cat(c) for c in columns)
    return Outputs(logits, features, adv_logits, adv_features)
