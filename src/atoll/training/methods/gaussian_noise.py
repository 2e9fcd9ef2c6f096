"""Training with Gaussian noise on the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.errors import check_range
from atoll.rng import PointRNG
from atoll.training.methods.base import METHODS, Method, Step

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class GaussianNoise(Method):
    r"""Adds Gaussian noise to the inputs, for randomized smoothing (Cohen et al., 2019).

    The noise is added after the attack, because noisy inputs may leave the bounds that attacks require.  Clean and
    adversarial inputs get the same noise.

    Args:
        sigma: standard deviation, in input units.
    """

    sigma: float = 0.25

    def __post_init__(self) -> None:
        check_range("(0, inf)", sigma=self.sigma)

    @contextmanager
    def around_step(self, trainer: Trainer, step: Step) -> Iterator[None]:
        streams = PointRNG(trainer.seed, "GaussianNoise", step.number, index=step.index)
        noise = self.sigma * streams.normal(*step.x.shape[1:], dtype=step.x.dtype)
        before = step.x, step.x_adv
        step.x = step.x + noise
        step.x_adv = None if step.x_adv is None else step.x_adv + noise
        try:
            yield
        finally:
            step.x, step.x_adv = before
