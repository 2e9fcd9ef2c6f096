"""Cost of certificates, and tightness of the proven norms.

4C3F is trained for three epochs on part of MNIST if ATOLL_MNIST names a file like Keras' mnist.npz; otherwise it has
its initial weights.  LiResNet always has its initial weights.  True norms come from dense singular values and ARPACK.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import nn

from atoll.certify.gloro import GloRo
from atoll.certify.power import LipschitzEstimator
from atoll.certify.smoothing import Smoothed
from atoll.data import Npz, batches, shuffled
from atoll.losses import GloRoTRADES
from atoll.models import Classifier, ConvNet4C3F, LiResNet
from atoll.threat import ThreatModel
from atoll.training.methods import EpsRamp
from atoll.training.trainer import Trainer, TrainerSettings
from atoll_papers.cost import ratio, seconds
from benchmarks.measure import Row

POINTS = 4096  # training images from MNIST
BATCH = 256


@functools.cache
def convnet() -> tuple[Classifier, str]:
    """4C3F and a description of its training."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ConvNet4C3F((1, 28, 28), 10, activation="minmax", initialization="orthogonal")
    path = os.environ.get("ATOLL_MNIST")
    if path is None:
        return model.eval(), "initial weights"
    trainer = Trainer(
        model,
        Npz(path=path, limit=POINTS, validation=0.0),
        GloRoTRADES(lambda_t=1.5),
        ThreatModel("l2", 1.58),
        methods=[EpsRamp(shape="logarithmic", start=0.01, end=1.1)],
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-3),
        settings=TrainerSettings(epochs=3, batch_size=BATCH, test_steps=0, validation_steps=0),
        device="cpu",
    )
    for epoch in range(trainer.settings.epochs):
        for number, batch in enumerate(batches(trainer.data.train, shuffled(POINTS, BATCH, epoch))):
            trainer.epoch, trainer.batch = epoch, number  # for the ramp of eps
            trainer.train_step(batch)
    return model.eval(), f"{trainer.settings.epochs} epochs of {POINTS:,} MNIST images"


@functools.cache
def liresnet() -> Classifier:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LiResNet((3, 32, 32), 10, depth=18, width=256).eval()


def true_norms(model: Classifier) -> dict[str, float]:
    """Norms of the linear parts of a model, computed by ARPACK in float32, accurate to about four digits."""
    return {name: true_norm(product, shape) for name, (product, shape) in LipschitzEstimator(model).products().items()}


def true_norm(product: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> float:
    """The root of the largest eigenvalue of a product A^T A."""
    size = math.prod(shape)
    if size <= 2:
        return math.sqrt(float(torch.linalg.matrix_norm(product(torch.eye(size).view(size, *shape)).flatten(1), 2)))

    def apply(v: NDArray[np.float32]) -> NDArray[np.float32]:
        image: NDArray[np.float32] = (
            product(torch.from_numpy(np.array(v, np.float32)).view(1, *shape)).flatten().numpy()
        )
        return image

    operator = LinearOperator((size, size), matvec=apply, dtype=np.float32)
    start = torch.randn(size, generator=torch.Generator().manual_seed(0)).numpy()
    (square,) = eigsh(operator, 1, v0=start, ncv=min(size, 40), tol=1e-4, return_eigenvectors=False)
    return math.sqrt(float(square))


def looseness(model: Classifier, certifier: GloRo) -> float:
    """Product of the proven norms divided by the product of the true norms."""
    norms = true_norms(model)
    return math.prod(layer.lipschitz / norms[layer.name] for layer in certifier.layers)


def costs(model: nn.Module, certifier: GloRo) -> tuple[float, float]:
    """Time of certifying / predicting with the captured graph, and of the captured graph / the module."""
    x = torch.rand(BATCH, 1, 28, 28)

    @torch.no_grad()
    def predict() -> None:
        certifier.model(x)

    @torch.no_grad()
    def plain() -> None:
        model(x)

    return ratio(lambda: certifier(x), predict, rounds=15), ratio(predict, plain, rounds=15)


def against_smoothing(model: nn.Module, certifier: GloRo, images: int = 2) -> Row:
    """Time per point of smoothing with the usual 100,000 samples, relative to certifying."""
    x = torch.rand(BATCH, 1, 28, 28)
    smoothed = Smoothed(model, 0.5)
    ours = min(seconds(lambda: certifier(x)) for _ in range(15)) / BATCH
    theirs = seconds(lambda: smoothed(x[:images])) / images
    note = f"{theirs:.1f} s and {1000 * ours:.2f} ms per image; {smoothed.n:,} samples"
    return Row("4C3F, randomized smoothing / certifying, time", theirs / ours, 10_000, at_least=True, note=note)


def run() -> Iterator[Row]:
    model, seen = convnet()
    start = time.perf_counter()
    certifier = GloRo.proven(model)
    note = f"{time.perf_counter() - start:.1f} s; {seen}"
    yield Row("4C3F, product of proven norms / true norms", looseness(model, certifier), 1.003, note=note)
    certifying, captured = costs(model, certifier)
    yield Row("4C3F, certifying / predicting with the captured graph, time", certifying, 1.02, note=f"batch {BATCH}")
    yield Row("4C3F, captured graph / module, time", captured, 1.05, note=f"batch {BATCH}")
    yield against_smoothing(model, certifier)
    large = liresnet()
    start, cpu = time.perf_counter(), time.process_time()
    certifier = GloRo.proven(large)
    taken, cpu = time.perf_counter() - start, time.process_time() - cpu
    note = f"{taken:.0f} s, CPU time {cpu:.0f} s"
    yield Row("LiResNet L18W256, time of all proofs / one minute", taken / 60, 1.0, note=note)
    yield Row("LiResNet L18W256, product of proven norms / true norms", looseness(large, certifier), 1.10)
