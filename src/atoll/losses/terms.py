"""The terms of robust losses, with closed forms of their curvature in logit space.

Notation: r = log p - log q, kl = sum p r, h = p - p^2, Phi = diag(p) - p p^T (primes for q).  The tests compare every
closed form with a dense autograd Hessian.  Several differ from the published ones, which are wrong (docs/errata.md).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.losses.base import LogitCurvature, Outputs, Term, hard_labels


def variance(p: Tensor) -> Tensor:
    """Return h = p (1 - p), the diagonal of the softmax Jacobian."""
    return p * (1 - p)


class CrossEntropy(Term):
    """Cross-entropy CE(g, y) or CE(g', y); labels may be probabilities, which do not affect the curvature."""

    def __init__(self, on: Literal["clean", "adversarial"]) -> None:
        self.on = on

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        return F.cross_entropy(out.g if self.on == "clean" else out.g_adv, y, reduction="none")

    def curvature(self, out: Outputs, y: Tensor) -> LogitCurvature:
        if self.on == "clean":
            return LogitCurvature(clean=variance(out.g.softmax(1)))
        return LogitCurvature(adversarial=variance(out.g_adv.softmax(1)))


class _Pair(Term):
    """Base class of terms that compare clean and adversarial predictions; the clean one may be held constant."""

    def __init__(self, *, stop_clean_gradient: bool = False) -> None:
        self.stop_clean_gradient = stop_clean_gradient

    def with_clean_stopped(self, stopped: bool) -> Term:
        return type(self)(stop_clean_gradient=stopped)

    def clean_logits(self, out: Outputs) -> Tensor:
        return out.g.detach() if self.stop_clean_gradient else out.g


class KL(_Pair):
    """KL(p, q), the pairing term of TRADES."""

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        log_p, log_q = self.clean_logits(out).log_softmax(1), out.g_adv.log_softmax(1)
        return (log_p.exp() * (log_p - log_q)).sum(1)

    def curvature(self, out: Outputs, y: Tensor) -> LogitCurvature:
        adversarial = variance(out.g_adv.softmax(1))
        if self.stop_clean_gradient:
            return LogitCurvature(adversarial=adversarial)
        log_p = out.g.log_softmax(1)
        p, r = log_p.exp(), log_p - out.g_adv.log_softmax(1)
        kl = (p * r).sum(1, keepdim=True)
        h = variance(p)
        return LogitCurvature(clean=p * (1 - 2 * p) * (r - kl) + h, cross=-h, adversarial=adversarial)


class Pairing(_Pair):
    """||p - q||^2, the pairing term of ALP."""

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        return (self.clean_logits(out).softmax(1) - out.g_adv.softmax(1)).square().sum(1)

    def curvature(self, out: Outputs, y: Tensor) -> LogitCurvature:
        p, q = self.clean_logits(out).softmax(1), out.g_adv.softmax(1)
        adversarial = _pairing_diagonal(q, p)
        if self.stop_clean_gradient:
            return LogitCurvature(adversarial=adversarial)
        # sum_i Phi_ik Phi'_ik with Phi_ik = p_k (1[i=k] - p_i)
        overlap = p * q * (1 - p - q + (p * q).sum(1, keepdim=True))
        return LogitCurvature(clean=_pairing_diagonal(p, q), cross=-2 * overlap, adversarial=adversarial)


def _pairing_diagonal(p: Tensor, q: Tensor) -> Tensor:
    """Return 2 sum_i [Phi_ik^2 + (p_i - q_i) Phi_ik (1 - 2 p_k)], with the sums over i in closed form."""
    squares = p.square() * (1 - 2 * p + p.square().sum(1, keepdim=True))
    linear = p * ((p - q) - (p * (p - q)).sum(1, keepdim=True)) * (1 - 2 * p)
    return 2 * (squares + linear)


class Margin(Term):
    """-log(1 - max_{k != y} q_k), the margin term of MART's boosted cross-entropy."""

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        # log(1 - q_m) = log sum_{k != m} q_k, to avoid cancellation when q_m is close to 1.
        return -self._log_others(out, y).logsumexp(1)

    def curvature(self, out: Outputs, y: Tensor) -> LogitCurvature:
        # The value is logsumexp over all classes minus logsumexp over the classes other than m, so the curvature is h'
        # minus the h of the other classes.  It equals Phi'_mk (1 - 2 q_k) / (1 - q_m) + Phi'_mk^2 / (1 - q_m)^2, but
        # without quotients that overflow.
        others = self._log_others(out, y).softmax(1)
        return LogitCurvature(adversarial=variance(out.g_adv.softmax(1)) - variance(others))

    @staticmethod
    def _log_others(out: Outputs, y: Tensor) -> Tensor:
        """Return log q without the most likely wrong class m."""
        log_q = out.g_adv.log_softmax(1)
        m = log_q.scatter(1, hard_labels(y, "MART")[:, None], -torch.inf).argmax(1, keepdim=True)
        return log_q.scatter(1, m, -torch.inf)


class WeightedKL(_Pair):
    """(1 - p_y) KL(p, q), the pairing term of MART."""

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        g = self.clean_logits(out)
        log_p, log_q = g.log_softmax(1), out.g_adv.log_softmax(1)
        return _one_minus(log_p, hard_labels(y, "MART")) * (log_p.exp() * (log_p - log_q)).sum(1)

    def curvature(self, out: Outputs, y: Tensor) -> LogitCurvature:
        y = hard_labels(y, "MART")
        log_p, log_q = self.clean_logits(out).log_softmax(1), out.g_adv.log_softmax(1)
        p, q = log_p.exp(), log_q.exp()
        weight = _one_minus(log_p, y)[:, None]
        adversarial = weight * variance(q)
        if self.stop_clean_gradient:
            return LogitCurvature(adversarial=adversarial)
        r = log_p - log_q
        kl = (p * r).sum(1, keepdim=True)
        h = variance(p)
        p_y = p.gather(1, y[:, None])
        phi_y = (-p_y * p).scatter(1, y[:, None], p_y * weight)  # row y of Phi
        clean = weight * (p * (1 - 2 * p) * (r - kl) + h) - phi_y * (1 - 2 * p) * kl - 2 * phi_y * p * (r - kl)
        return LogitCurvature(clean=clean, cross=-weight * h - phi_y * (q - p), adversarial=adversarial)


def _one_minus(log_p: Tensor, y: Tensor) -> Tensor:
    """Return 1 - p_y as the sum of the other probabilities, to avoid cancellation when p_y is close to 1."""
    return log_p.scatter(1, y[:, None], -torch.inf).logsumexp(1).exp()
