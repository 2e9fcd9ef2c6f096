"""Boundary search compared with the pipeline of the thesis, built with Foolbox; overhead of boundary attributions."""

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
POOL = 1000  # training examples where our search starts; their predictions count as calls
IMAGES, BATCH = 1000, 250  # for BIG


@dataclass(frozen=True)
class Searched:
    """Result of a search: distances (infinite if it failed), model calls and seconds."""

    distance: Tensor
    calls: int
    seconds: float


def ours(model: nn.Module, x: Tensor, pool: Tensor) -> Searched:
    tally, began = AttackCounts(), time.monotonic()
    with count_passes(model, tally):
        boundary = boundary_search(model, x, pool=pool)
    return Searched(boundary.distance, tally.forward + tally.backward, time.monotonic() - began)


def theirs(model: nn.Module, x: Tensor) -> Searched:
    """The search of the thesis (B.1): PGD at growing eps until it succeeds, then CW on all points; the closer counts.

    If the thesis does not give a value (number and start of CW's constants, random starts), Foolbox's default is used.
    """
    tally, began = AttackCounts(), time.monotonic()
    with count_passes(model, tally), torch.enable_grad():
        wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
        y = wrapped(x).argmax(1)
        best = torch.full((len(x),), math.inf)
        for radius in RADII:
            eps = number(radius)
            remaining = best.isinf().nonzero().squeeze(1)
            if not len(remaining):
                break
            attack = foolbox.attacks.L2PGD(steps=STEPS, abs_stepsize=2 * eps / STEPS)
            criterion = foolbox.criteria.Misclassification(y[remaining])
            x_adv = attack.run(wrapped, x[remaining], criterion, epsilon=eps)
            success = wrapped(x_adv).argmax(1) != y[remaining]
            best[remaining[success]] = (x_adv - x[remaining]).flatten(1).norm(dim=1)[success].detach()
        cw = foolbox.attacks.L2CarliniWagnerAttack(steps=STEPS, stepsize=LEARNING_RATE)
        x_adv = cw.run(wrapped, x, foolbox.criteria.Misclassification(y))
        # Foolbox returns black images if it fails.
        success = (wrapped(x_adv).argmax(1) != y) & x_adv.flatten(1).any(1)
        best = torch.where(success, (x_adv - x).flatten(1).norm(dim=1), math.inf).detach().minimum(best)
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
        success = [float(searched.distance.isfinite().double().mean()) for searched in (a, b)]
        note = f"thesis {success[1]:.3f}; {len(x)} points"
        yield Row(f"boundary search, success, {name}", success[0], 1.0, at_least=True, note=note)
        means = [float(searched.distance[both].mean()) for searched in (a, b)]
        note = (
            f"{means[0]:.4f} and {means[1]:.4f} where the thesis succeeds; Atoll on all points: {a.distance.mean():.4f}"
        )
        yield Row(f"boundary search, mean l2 distance / thesis, {name}", means[0] / means[1], 1.0, note=note)
        note = (
            f"{a.calls / len(x):.0f} (including the pool) and {b.calls / len(x):.0f} per point;"
            f" {a.seconds:.0f} s and {b.seconds:.0f} s"
        )
        yield Row(f"boundary search, model calls / thesis, {name}", a.calls / b.calls, 0.2, note=note)


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

    overhead = ratio(attribute, bare, rounds=5)
    began = time.monotonic()
    attribute()
    seconds = time.monotonic() - began
    note = f"{IMAGES} images: {seconds:.1f} s after {searched:.1f} s of boundary search"
    return Row(f"BIG, time / its {method.steps} gradients alone, mnist-at", overhead, 1.1, note=note)


def run() -> Iterator[Row]:
    yield from search_rows()
    yield attribution_row()
