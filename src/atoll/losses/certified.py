"""Losses that use Lipschitz constants to train certified radii (GloRo, EMMA and related losses)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.errors import check_range
from atoll.losses.base import LOSSES, Loss, Outputs, Term, hard_labels, require_margin
from atoll.losses.terms import CrossEntropy


def abstain_logit(logits: Tensor, certified_margin: Tensor) -> Tensor:
    r"""Return the largest :math:`f_i + \epsilon K_{ji}` of a class i other than the top class j; the margin is eps K.

    >>> abstain_logit(torch.tensor([[3.0, 1.0, 0.0]]), torch.full((3, 3), 0.5))
    tensor([1.5000])
    """
    top = logits.argmax(1)
    threat = (logits + certified_margin[top]).scatter(1, top[:, None], -torch.inf)
    return threat.amax(1)


class AbstainCrossEntropy(Term):
    """Cross-entropy over [f, f_abstain], where abstaining is an additional class that is never correct."""

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        logits = torch.cat([out.g, abstain_logit(out.g, require_margin(out.certified_margin))[:, None]], 1)
        return F.cross_entropy(logits, hard_labels(y, "GloRo"), reduction="none")


class Abstention(Term):
    """KL([softmax f, 0], softmax [f, f_abstain]) = -log(1 - q_abstain), q the softmax over [f, f_abstain]."""

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        # 1 - q_abstain = sum exp f / (sum exp f + exp f_abstain), which needs no subtraction.
        return F.softplus(abstain_logit(out.g, require_margin(out.certified_margin)) - out.g.logsumexp(1))


class FixedMargin(Term):
    """Cross-entropy after adding eps K_yi to every wrong logit i."""

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        margin = require_margin(out.certified_margin)[hard_labels(y, "FixedMargin")]
        return F.cross_entropy(out.g + margin, y, reduction="none")


class DynamicMargin(Term):
    """Cross-entropy after adding e_i K_yi to every wrong logit i.

    The radius e_i = clip((f_y - f_i) / K_yi, 0, eps) is the part of eps that is already certified; it has no gradient.
    """

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        margin = require_margin(out.certified_margin)[hard_labels(y, "EMMA")]
        with torch.no_grad():
            lead = out.g.gather(1, y[:, None]) - out.g
            share = (lead / margin.clamp_min(torch.finfo(margin.dtype).tiny)).clamp(0, 1)  # e_i / eps
        return F.cross_entropy(out.g + share * margin, y, reduction="none")


class GlobalMargin(Term):
    """Cross-entropy after adding sqrt(2) eps K to every wrong logit, with K the Lipschitz constant of all logits."""

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        wrong = 1 - F.one_hot(hard_labels(y, "LipschitzMargin"), out.g.shape[1])
        return F.cross_entropy(
            out.g + math.sqrt(2) * require_margin(out.certified_margin_all) * wrong, y, reduction="none"
        )


class _MarginLoss(Loss):
    """Base class of losses with a single term, a cross-entropy with certified margins."""

    uses_lipschitz = True
    term: ClassVar[type[Term]]

    def __init__(self) -> None:
        super().__init__(ce=(1.0, self.term()))


@LOSSES.register()
class GloRoCE(_MarginLoss):
    """GloRo loss (Leino et al., 2021): CE([f, f_abstain], y), with abstaining as an additional class.

    >>> list(GloRoCE().terms)
    ['ce']
    """

    term = AbstainCrossEntropy


@LOSSES.register()
class GloRoTRADES(Loss):
    """TRADES for GloRo Nets: CE(f, y) - lambda_t log(1 - q_abstain).

    The second term is the KL divergence between the softmax without and with the abstain logit.

    Args:
        lambda_t: weight of the second term.

    >>> list(GloRoTRADES(lambda_t=1.5).terms)
    ['ce', 'abstain']
    """

    uses_lipschitz = True

    def __init__(self, *, lambda_t: float = 1.0) -> None:
        check_range("[0, inf)", lambda_t=lambda_t)
        super().__init__(ce=(1.0, CrossEntropy("clean")), abstain=(lambda_t, Abstention()))


@LOSSES.register()
class EMMA(_MarginLoss):
    """EMMA (Hu et al., 2023): cross-entropy with dynamic margins, -log exp(f_y) / sum_i exp(f_i + e_i K_yi).

    The margins e_i = clip((f_y - f_i) / K_yi, 0, eps), with e_y = 0, have no gradient.  The loss pushes all competing
    classes away, not only the closest one, and a margin never exceeds the radius that is already certified.

    >>> list(EMMA().terms)
    ['ce']
    """

    term = DynamicMargin


@LOSSES.register()
class FixedMarginCE(_MarginLoss):
    """Cross-entropy with fixed margins: -log exp(f_y) / sum_i exp(f_i + eps K_yi), with K_yy = 0.

    >>> list(FixedMarginCE().terms)
    ['ce']
    """

    term = FixedMargin


@LOSSES.register()
class LipschitzMargin(_MarginLoss):
    """Cross-entropy with sqrt(2) eps K added to every wrong logit, K being the Lipschitz constant of the logit vector.

    >>> list(LipschitzMargin().terms)
    ['ce']
    """

    term = GlobalMargin
