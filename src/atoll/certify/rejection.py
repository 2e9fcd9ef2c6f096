"""How often a certifier rejects inputs that it was not trained on."""

from __future__ import annotations

import torch

from atoll.certify.certificate import Certifier
from atoll.certify.evaluate import certify
from atoll.data.base import MemorySplit, Split
from atoll.rng import PointRNG
from atoll.stats import Accuracy


def rejected(
    certifier: Certifier, split: Split, eps: float, *, batch_size: int = 256, device: torch.device | str = "cpu"
) -> Accuracy:
    """The share of points on which the classifier abstains because nothing is certified at eps.

    >>> from atoll.certify import GloRo
    >>> from atoll.models import MLP
    >>> rejected(GloRo.proven(MLP((2,), 2)), noise((2,), 50), 1e6).correct
    50
    """
    return certify(certifier, split, batch_size=batch_size, device=device).rejected(eps)


def noise(shape: tuple[int, ...], count: int, *, seed: object = 0) -> MemorySplit:
    """Inputs with independent uniform numbers in [0, 1]; all labels are 0.

    >>> noise((1, 8, 8), 3).images.shape
    torch.Size([3, 1, 8, 8])
    """
    index = torch.arange(count)
    return MemorySplit(PointRNG(seed, "noise", index=index).uniform(*shape), torch.zeros_like(index))
