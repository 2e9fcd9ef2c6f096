"""Training with noise on the inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from atoll.errors import InputError
from atoll.rng import PointRNG
from atoll.training.methods.base import METHODS, Method, Step

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@METHODS.register()
class GaussianNoise(Method):
    r"""Inputs are trained on with noise :math:`N(0, \sigma^2 I)`, for randomized smoothing (Cohen et al., 2019).

    Noise comes after the attack, if there is one, and is the same for clean and adversarial inputs: with it they are
    outside of the bounds within which an attack has to stay.

    Args:
        sigma: standard deviation, in units of the inputs.
    """

    def __init__(self, *, sigma: float = 0.25) -> None:
        if not 0 < sigma < math.inf:
            raise InputError(f"sigma: expected a number > 0, got {sigma}")
        self.sigma = sigma

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
