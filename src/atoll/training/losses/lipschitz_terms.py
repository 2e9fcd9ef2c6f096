"""The terms of losses that train certified radii, made of logits f and of eps K (see ``Outputs.reach``)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.certify.gloro import abstain_logit
from atoll.training.losses.base import Outputs, Term, hard_labels


class AbstainCrossEntropy(Term):
    """Cross-entropy over [f, f_abstain], the abstain logit as one more class that is never right."""

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        logits = torch.cat([out.g, abstain_logit(out.g, out.eps_k)[:, None]], 1)
        return F.cross_entropy(logits, hard_labels(y, "GloRo"), reduction="none")


class Abstention(Term):
    """KL([softmax f, 0], softmax [f, f_abstain]) = -log(1 - q_abstain), q the softmax over [f, f_abstain]."""

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        # 1 - q_abstain = sum exp f / (sum exp f + exp f_abstain), without the difference.
        return F.softplus(abstain_logit(out.g, out.eps_k) - out.g.logsumexp(1))


class FixedMargin(Term):
    """Cross-entropy after every wrong logit i has gained eps K_yi on the right one, y."""

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        return F.cross_entropy(out.g + out.eps_k[hard_labels(y, "FixedMargin")], y, reduction="none")


class DynamicMargin(Term):
    """The same with e_i K_yi, e_i = clip((f_y - f_i) / K_yi, 0, eps) without gradient: what is certified already."""

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        reach = out.eps_k[hard_labels(y, "EMMA")]
        with torch.no_grad():
            margin = out.g.gather(1, y[:, None]) - out.g
            share = (margin / reach.clamp_min(torch.finfo(reach.dtype).tiny)).clamp(0, 1)  # e_i / eps
        return F.cross_entropy(out.g + share * reach, y, reduction="none")


class GlobalMargin(Term):
    """The same with sqrt(2) eps K, K the Lipschitz constant of the vector of logits."""

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        wrong = 1 - F.one_hot(hard_labels(y, "LipschitzMargin"), out.g.shape[1])
        return F.cross_entropy(out.g + math.sqrt(2) * out.eps_k_all * wrong, y, reduction="none")
