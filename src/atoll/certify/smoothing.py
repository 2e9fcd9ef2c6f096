"""Randomized smoothing (Cohen et al., 2019): probabilistic certificates for any classifier."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.certify.certificate import Certificate, Certifier
from atoll.distributed import rank
from atoll.errors import DamagedError, InputError, check_range
from atoll.files import append_record, discard, read_records
from atoll.modules import evaluation_mode
from atoll.rng import PointRNG, content_hash

ABSTAIN = -1


@dataclass(eq=False)
class Smoothed:
    r"""The smoothed classifier :math:`g(x) = \arg\max_c P[f(x + \delta) = c]`, :math:`\delta \sim N(0, \sigma^2 I)`.

    If the probability of the top class is at least :math:`\underline p > 1/2`, g is constant within
    :math:`\sigma \Phi^{-1}(\underline p)` of x in l2 (Cohen, Rosenfeld & Kolter, 2019, theorem 1 with
    :math:`\overline{p_B} = 1 - \underline p`).  ``n0`` samples choose the class, and ``n`` others bound its
    probability.

    **The certificates are not proofs.**  The radius of a point is too large with probability at most ``alpha``: with
    the default, about one of a thousand certificates may be false.  Theorem and bound are about real numbers and do not
    cover the rounding of inputs and noise to the precision of the model.

    The noise depends on the seed, the values of the point and the index of the sample.  The certificate of a point is
    therefore independent of the batch size, the order of points and the number of processes.

    Args:
        model: maps inputs to logits; noisy inputs may be outside [0, 1].
        sigma: standard deviation of the noise; train the model with the same noise (``GaussianNoise``).
        n0: number of samples to choose the class.
        n: number of samples to bound its probability, and for ``predict``.
        alpha: probability of a false certificate (or, in ``predict``, of a wrong answer), for each point.
        batch_size: number of samples that go through the model together.
        seed: seed of the noise.

    Call the object to certify inputs.  If it abstains, the prediction is -1 and the radius 0.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))  # the plane x_0 = 0
    >>> smoothed = Smoothed(model, 1.0, n=10_000)
    >>> x = torch.tensor([[0.5, 3.0], [0.0, 0.0]])
    >>> certificate = smoothed(x)
    >>> certificate.prediction, [round(float(r), 1) for r in certificate.radius]
    (tensor([ 0, -1]), [0.5, 0.0])
    >>> smoothed.predict(x)
    tensor([ 0, -1])
    """

    model: nn.Module
    sigma: float
    _: KW_ONLY
    n0: int = 100
    n: int = 100_000
    alpha: float = 0.001
    batch_size: int = 1000
    seed: object = 0

    def __post_init__(self) -> None:
        check_range("(0, inf)", sigma=self.sigma)
        if not 0 < self.alpha < 1:
            raise InputError(f"alpha: expected a probability between 0 and 1, got {self.alpha}")
        if min(self.n0, self.n, self.batch_size) < 1:
            raise InputError(f"n0, n, batch_size: expected at least 1, got {self.n0}, {self.n}, {self.batch_size}")

    def __call__(self, x: Tensor) -> Certificate:
        """Certify inputs (CERTIFY in the paper)."""
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
        """Return the class of g (PREDICT in the paper), or -1 if the two most frequent classes are too close."""
        from scipy.stats import binomtest  # slow to import

        prediction = torch.full((len(x),), ABSTAIN, device=x.device)
        for row, point in enumerate(x):
            (first, second), classes = self.counts(point, self.n, "predict").topk(2)
            if first > 0 and binomtest(int(first), int(first + second), 0.5).pvalue <= self.alpha:
                prediction[row] = classes[0]
        return prediction

    @torch.no_grad()
    def counts(self, point: Tensor, n: int, purpose: str) -> Tensor:
        """Count how often each class is predicted in n samples of one input; logits with NaN do not count."""
        point = point.to(next(self.model.parameters(), point))
        names = (self.seed, "smoothing", purpose, content_hash(point))
        total = torch.zeros((), dtype=torch.int64, device=point.device)
        with evaluation_mode(self.model):
            for draws in torch.split(torch.arange(n, device=point.device), self.batch_size):
                noise = PointRNG(*names, index=draws).normal(*point.shape, dtype=point.dtype)
                logits = self.model(noise.mul_(self.sigma).add_(point))
                total = total + torch.bincount(logits.argmax(1)[~logits.isnan().any(1)], minlength=logits.shape[1])
        return total


class ResumableCertifier:
    """A certifier that stores every certificate when it is computed, so that an interrupted run can resume.

    Each line of a file is a record of the key of a point, its prediction and its radius.  Points of damaged lines are
    computed again.

    Args:
        certifier: computes certificates that are not stored yet.
        folder: a folder for this certifier only; every process writes its own file and reads all files.
        question: the digest of what is certified and how; certificates of another question are ignored.
    """

    def __init__(self, certifier: Certifier, folder: Path, question: str = "") -> None:
        self.certifier, self.question = certifier, question
        self.certificates: dict[int, tuple[int, float]] = {}
        for path in sorted(folder.glob("points-*.jsonl")):
            try:
                records, _ = read_records(path, question)
            except DamagedError:  # not even a file
                discard(path)
                continue
            for record in records:
                self.certificates[record["key"]] = (record["prediction"], record["radius"])
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"points-{rank()}.jsonl"

    def __call__(self, x: Tensor) -> Certificate:
        keys = [content_hash(point) for point in x]
        for key, point in zip(keys, x, strict=True):
            if key not in self.certificates:
                certificate = self.certifier(point[None])
                self.certificates[key] = (int(certificate.prediction), float(certificate.radius))
                values = zip(("key", "prediction", "radius"), (key, *self.certificates[key]), strict=True)
                append_record(self.path, dict(values), self.question)
        predictions, radii = ([self.certificates[key][part] for key in keys] for part in (0, 1))
        return Certificate(
            torch.tensor(predictions, dtype=torch.int64, device=x.device),
            torch.tensor(radii, dtype=torch.float64, device=x.device),
        )


def clopper_pearson(count: int, total: int, alpha: float) -> float:
    r"""Return a lower confidence bound of a probability from the number of successes.

    The bound is too high with probability at most alpha.  It is the alpha-quantile of Beta(count, total - count + 1)
    (Clopper & Pearson, 1934; one-sided).

    >>> round(clopper_pearson(100, 100, 0.001), 6)  # 0.001 ** (1 / 100)
    0.933254
    """
    from scipy.stats import beta  # slow to import

    return float(beta.ppf(alpha, count, total - count + 1)) if count else 0.0
