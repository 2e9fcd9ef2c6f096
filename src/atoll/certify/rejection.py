"""How much a certifier rejects of what it was never trained on."""

from __future__ import annotations

import torch

from atoll.certify.certificate import Certificate, Certifier
from atoll.certify.evaluate import Certification, certify
from atoll.data.base import MemorySplit, Split
from atoll.rng import PointRNG
from atoll.stats import Accuracy


def rejected(
    certifier: Certifier, split: Split, eps: float, *, batch_size: int = 256, device: torch.device | str = "cpu"
) -> Accuracy:
    """The share of points on which the classifier abstains, because it cannot promise its answer within eps.

    >>> from atoll.certify import GloRo
    >>> from atoll.models import MLP
    >>> rejected(GloRo.proven(MLP((2,), 2)), noise((2,), 50), 1e6).correct
    50
    """
    return share_rejected(certify(certifier, split, batch_size=batch_size, device=device), eps)


def share_rejected(found: Certification, eps: float) -> Accuracy:
    """The same, of points whose certificates are known.

    >>> share_rejected(Certification(torch.tensor([0, 1]), torch.tensor([0.5, 0.2]), torch.tensor([0, 0])), 0.3)
    50.00 % ± 35.36
    """
    held = Certificate(found.prediction, found.radius).holds(eps)
    return Accuracy(int((~held).sum()), len(held))


def noise(shape: tuple[int, ...], count: int, *, seed: object = 0) -> MemorySplit:
    """Inputs with independent uniform numbers in [0, 1]; their labels mean nothing.

    >>> noise((1, 8, 8), 3).images.shape
    torch.Size([3, 1, 8, 8])
    """
    index = torch.arange(count)
    return MemorySplit(PointRNG(seed, "noise", index=index).uniform(*shape), torch.zeros_like(index))
