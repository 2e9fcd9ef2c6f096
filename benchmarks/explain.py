"""Boundary search against the pipeline of the thesis, built from Foolbox; what boundary attributions add to it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import foolbox
import torch
from torch import Tensor, nn

from atoll.attacks.progress import AttackCounts
from atoll.data.base import sample
from atoll.explain import BoundaryIntegratedGradients, boundary_search
from atoll.modules import count_passes
from atoll.threat import number
from atoll_papers.cost import ratio
from atoll_papers.pgd_cw_search import LEARNING_RATE, RADII, STEPS
from benchmarks.measure import Row
from benchmarks.robust_models import robust_model

MODELS = ("mnist-at", "mnist-standard")
POINTS = 100
POOL = 1000  # training examples that our search starts from; their predictions count as calls
IMAGES, BATCH = 1000, 250  # of BIG


@dataclass(frozen=True)
class Searched:
    """What a search found: distances (infinite where nothing was), and its model calls."""

    distance: Tensor
    calls: int
    seconds: float


def ours(model: nn.Module, x: Tensor, pool: Tensor) -> Searched:
    tally, began = AttackCounts(), time.monotonic()
    with count_passes(model, tally):
        found = boundary_search(model, x, pool=pool)
    return Searched(found.distance, tally.forward + tally.backward, time.monotonic() - began)


def theirs(model: nn.Module, x: Tensor) -> Searched:
    """Thesis, B.1: PGD at growing eps until a point falls, CW on all points, the closer of both.

    Where the thesis is silent (CW's nine constants, its first one, the random starts) Foolbox's defaults stand.
    """
    tally, began = AttackCounts(), time.monotonic()
    with count_passes(model, tally), torch.enable_grad():
        wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
        y = wrapped(x).argmax(1)
        best = torch.full((len(x),), math.inf)
        for radius in RADII:
            eps = number(radius)
            standing = best.isinf().nonzero().squeeze(1)
            if not len(standing):
                break
            attack = foolbox.attacks.L2PGD(steps=STEPS, abs_stepsize=2 * eps / STEPS)
            criterion = foolbox.criteria.Misclassification(y[standing])
            found = attack.run(wrapped, x[standing], criterion, epsilon=eps)
            fallen = wrapped(found).argmax(1) != y[standing]
            best[standing[fallen]] = (found - x[standing]).flatten(1).norm(dim=1)[fallen].detach()
        cw = foolbox.attacks.L2CarliniWagnerAttack(steps=STEPS, stepsize=LEARNING_RATE)
        found = cw.run(wrapped, x, foolbox.criteria.Misclassification(y))
        # Foolbox leaves black images where it has found nothing.
        fallen = (wrapped(found).argmax(1) != y) & found.flatten(1).any(1)
        best = torch.where(fallen, (found - x).flatten(1).norm(dim=1), math.inf).detach().minimum(best)
    return Searched(best, tally.forward + tally.backward, time.monotonic() - began)


def search_rows() -> Iterator[Row]:
    for name in MODELS:
        run = robust_model(name)
        model, (x, _) = run.model(), sample(run.data.test, POINTS, "explain")
        pool, _ = sample(run.data.train, POOL, "pool")
        with torch.random.fork_rng():
            torch.manual_seed(0)  # Foolbox draws from the global generator
            b = theirs(model, x)
        a = ours(model, x, pool)
        both = b.distance.isfinite()
        success = [float(found.distance.isfinite().double().mean()) for found in (a, b)]
        note = f"theirs {success[1]:.3f}; {len(x)} points"
        yield Row(f"boundary search, success, {name}", success[0], 1.0, at_least=True, note=note)
        means = [float(found.distance[both].mean()) for found in (a, b)]
        note = f"{means[0]:.4f} against {means[1]:.4f} where they succeed; ours on all points {a.distance.mean():.4f}"
        yield Row(f"boundary search, mean l2 distance / thesis's, {name}", means[0] / means[1], 1.0, note=note)
        note = (
            f"{a.calls / len(x):.0f} against {b.calls / len(x):.0f} a point, ours with those for the examples;"
            f" {a.seconds:.0f} s against {b.seconds:.0f} s"
        )
        yield Row(f"boundary search, model calls / thesis's, {name}", a.calls / b.calls, 0.2, note=note)


def attribution_row() -> Row:
    run = robust_model("mnist-at")
    model, (x, _) = run.model(), run.data.tensors("test", IMAGES)
    began = time.monotonic()
    boundary = boundary_search(model, x, batch_size=BATCH)
    searched = time.monotonic() - began
    target = boundary.prediction
    method = BoundaryIntegratedGradients(model)

    def attribute() -> None:
        method.attribute(x, target, boundary=boundary, internal_batch_size=BATCH)

    def bare() -> None:
        for part, classes in zip(x.split(BATCH), target.split(BATCH), strict=True):
            for _ in range(method.steps):
                inputs = part.detach().requires_grad_()
                torch.autograd.grad(model(inputs).gather(1, classes[:, None]).sum(), inputs)

    found = ratio(attribute, bare, rounds=5)
    began = time.monotonic()
    attribute()
    seconds = time.monotonic() - began
    note = f"{IMAGES} images: {seconds:.1f} s after {searched:.1f} s of boundary search"
    return Row(f"BIG, time / its {method.steps} bare gradients, mnist-at", found, 1.1, note=note)


def run() -> Iterator[Row]:
    yield from search_rows()
    yield attribution_row()
