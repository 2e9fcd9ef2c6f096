"""Randomized smoothing (Cohen et al., 2019): certificates for any classifier, by sampling, and so only probable."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atoll.certify.certificate import Certificate
from atoll.errors import InputError
from atoll.modules import evaluation_mode
from atoll.rng import PointRNG, content_hash

ABSTAIN = -1


class Smoothed:
    r"""The classifier :math:`g(x) = \arg\max_c P[f(x + \delta) = c]`, :math:`\delta \sim N(0, \sigma^2 I)`.

    If the top class has a probability of at least :math:`\underline p > 1/2`, g is constant within
    :math:`\sigma \Phi^{-1}(\underline p)` of x in l2 (Cohen, Rosenfeld & Kolter, 2019, theorem 1 with
    :math:`\overline{p_B} = 1 - \underline p`).  ``n0`` draws choose the class, ``n`` others bound its probability.

    **This is no proof.**  The radius of a point is too large with a probability of at most ``alpha``: of a thousand
    certificates with the default, about one may be false.  And theorem and bound are about real numbers: that inputs
    and noise are rounded to the model's precision is not counted.

    The noise depends on the seed, the point's own numbers and the number of the draw, so the certificate is a function
    of the point: no batch size, order or number of processes changes it.

    Args:
        model: any module from inputs to logits; noise takes the inputs out of [0, 1].
        sigma: standard deviation of the noise; the model should have been trained with it (``GaussianNoise``).
        n0: draws that choose the class.
        n: draws that bound its probability, and of ``predict``.
        alpha: probability of a false certificate (or, in ``predict``, of a wrong answer), for each point.
        batch_size: draws that go through the model together.
        seed: of the noise.

    A call certifies: prediction -1 and radius 0 where it abstains.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))  # the plane x_0 = 0
    >>> smoothed = Smoothed(model, 1.0, n=10_000)
    >>> x = torch.tensor([[0.5, 3.0], [0.0, 0.0]])
    >>> found = smoothed(x)
    >>> found.prediction, [round(float(r), 1) for r in found.radius]
    (tensor([ 0, -1]), [0.5, 0.0])
    >>> smoothed.predict(x)
    tensor([ 0, -1])
    """

    def __init__(
        self,
        model: nn.Module,
        sigma: float,
        *,
        n0: int = 100,
        n: int = 100_000,
        alpha: float = 0.001,
        batch_size: int = 1000,
        seed: object = 0,
    ) -> None:
        if not 0 < sigma < math.inf:
            raise InputError(f"sigma: expected a number > 0, got {sigma}")
        if not 0 < alpha < 1:
            raise InputError(f"alpha: expected a probability between 0 and 1, got {alpha}")
        if min(n0, n, batch_size) < 1:
            raise InputError(f"n0, n, batch_size: expected at least 1, got {n0}, {n}, {batch_size}")
        self.model = model
        self.sigma = sigma
        self.n0 = n0
        self.n = n
        self.alpha = alpha
        self.batch_size = batch_size
        self.seed = seed

    def __call__(self, x: Tensor) -> Certificate:
        """Cohen's CERTIFY."""
        prediction = torch.full((len(x),), ABSTAIN, device=x.device)
        radius = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        for row, point in enumerate(x):
            top = int(self.counts(point, self.n0, "choose").argmax())
            p = clopper_pearson(int(self.counts(point, self.n, "estimate")[top]), self.n, self.alpha)
            if p > 0.5:
                prediction[row] = top
                radius[row] = self.sigma * torch.special.ndtri(torch.tensor(p, dtype=torch.float64))
        return Certificate(prediction, radius)

    def predict(self, x: Tensor) -> Tensor:
        """Cohen's PREDICT: the class of g, or -1 if the two most frequent classes are too close to tell."""
        from scipy.stats import binomtest  # half a second to import

        found = torch.full((len(x),), ABSTAIN, device=x.device)
        for row, point in enumerate(x):
            (first, second), classes = self.counts(point, self.n, "predict").topk(2)
            if binomtest(int(first), int(first + second), 0.5).pvalue <= self.alpha:
                found[row] = classes[0]
        return found

    @torch.no_grad()
    def counts(self, point: Tensor, n: int, purpose: str) -> Tensor:
        """How often each class was predicted in n draws, for one input."""
        like = next(self.model.parameters(), point)
        point = point.to(like)
        names = (self.seed, "smoothing", purpose, content_hash(point))
        total = torch.zeros((), dtype=torch.int64, device=point.device)
        with evaluation_mode(self.model):
            for draws in torch.split(torch.arange(n, device=point.device), self.batch_size):
                noise = PointRNG(*names, index=draws).normal(*point.shape, dtype=point.dtype)
                logits = self.model(noise.mul_(self.sigma).add_(point))
                total = total + torch.bincount(logits.argmax(1), minlength=logits.shape[1])
        return total


def clopper_pearson(count: int, total: int, alpha: float) -> float:
    r"""A lower bound of a probability, given how often it came true; too high with a probability of at most alpha.

    The alpha-quantile of Beta(count, total - count + 1) (Clopper & Pearson, 1934; one-sided).

    >>> round(clopper_pearson(100, 100, 0.001), 6)  # 0.001 ** (1 / 100)
    0.933254
    """
    from scipy.stats import beta  # half a second to import

    return float(beta.ppf(alpha, count, total - count + 1)) if count else 0.0
