"""Optimality of the minimal-norm attacks: the area between their curve of accuracy against eps and the best one.

The networks are the MNIST ConvNets of Wong, Rice and Kolter (2020).  ``ATOLL_FAST_ADVERSARIAL`` is the folder of their
checkpoints (``MNIST/models`` of github.com/locuslab/fast_adversarial), and ``ATOLL_MNIST`` is the ``.npz`` file of
MNIST (x_train, y_train, x_test, y_test).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.attacks import APGD, FAB, FMN, PDPGD, Attack, CarliniWagner, SigmaZero
from atoll.attacks.curve import ANY_DISTANCE
from atoll.attacks.evaluate import evaluate
from atoll.attacks.suites import minimal
from atoll.data import Npz
from atoll.data.base import SubSplit
from atoll.rng import PointRNG
from atoll.threat import AttackNorm, ThreatModel
from benchmarks.measure import Row

NETS = ("pgd_madry", "fgsm")
POINTS = range(5000, 5100)  # test images; FMN and PDPGD were tuned on these networks, but on the first test images
FARTHEST: dict[AttackNorm, float] = {"linf": 1.0, "l2": 8.0, "l1": 64.0}  # first eps of the binary search
ROUNDS = 10  # of the binary search


class BisectedAPGD(Attack):
    """APGD-CE with a binary search over eps: the reference without a minimal-norm attack."""

    def search(self, model: nn.Module, x: Tensor, y: Tensor, streams: PointRNG) -> Tensor:
        low, high, best = torch.zeros(len(x)), torch.full((len(x),), FARTHEST[self.threat.norm]), x.clone()
        for _ in range(ROUNDS):
            eps = (low + high) / 2
            for radius in eps.unique().tolist():  # points with the same history have the same eps
                rows = (eps == radius).nonzero().squeeze(1)
                threat = ThreatModel(self.threat.norm, radius, self.threat.bounds)
                x_adv = APGD(threat).search(model, x[rows], y[rows], streams[rows])
                with torch.no_grad():
                    broken = model(x_adv).argmax(1) != y[rows]
                best[rows[broken]] = x_adv[broken]
                high[rows[broken]] = threat.distance(x_adv, x[rows])[broken].clamp_max(radius)
                low[rows[~broken]] = radius
        return best


def attacks(norm: AttackNorm) -> dict[str, Attack]:
    """All attacks of a norm that find small perturbations, those of the curve first."""
    threat = ThreatModel(norm, ANY_DISTANCE)
    if norm == "l0":
        long = {f"SigmaZero, {steps} steps": SigmaZero(threat, steps=steps, minimum_norm=True) for steps in (100, 5000)}
        return {**minimal(threat), **long}
    others: dict[str, Attack] = {
        "FMN, 1000 steps": FMN(threat, steps=1000, minimum_norm=True),
        "FAB": FAB(threat, minimum_norm=True),
        "APGD-CE, binary search": BisectedAPGD(threat),
    }
    if norm == "l2":
        others["Carlini-Wagner"] = CarliniWagner(threat, binary_search_steps=5, minimum_norm=True)
    if norm == "l1":
        others["PDPGD, 2000 steps"] = PDPGD(threat, steps=2000, minimum_norm=True)
    return {**minimal(threat), **others}


def load(name: str) -> nn.Module:
    convolutions = [nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*convolutions, nn.Linear(1568, 100), nn.ReLU(), nn.Linear(100, 10))
    path = Path(os.environ["ATOLL_FAST_ADVERSARIAL"], f"{name}.pth")
    model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    return model.eval()


def optimality(distance: Tensor, best: Tensor) -> float:
    """Local optimality of AttackBench (Cinà et al., 2024): 1 if the curve is the best one, 0 if nothing is broken.

    Up to the eps at which the best curve reaches 0, the area under a curve is the mean of the clipped distances.

    >>> optimality(torch.tensor([0.2, 0.4]), torch.tensor([0.1, 0.4]))
    0.667
    """
    end = best.max()
    return round(float((end - distance.clamp_max(end)).mean() / (end - best).mean()), 3)


def run() -> Iterator[Row]:
    test = Npz(path=os.environ["ATOLL_MNIST"]).split("test")
    for name in NETS:
        model, split = load(name), SubSplit(test, torch.tensor(POINTS))
        for norm in ("linf", "l2", "l1", "l0"):
            result = evaluate(model, split, attacks(norm), check=False)  # type: ignore[arg-type]
            correct = result.distance.amax(1) > 0
            distances = dict(zip(attacks(norm), result.distance[correct].double().T, strict=True))  # type: ignore[arg-type]
            best = torch.stack(list(distances.values())).amin(0)
            own = list(minimal(ThreatModel(norm, 0)))  # type: ignore[arg-type]
            if len(own) > 1:
                together = torch.stack([distances[each] for each in own]).amin(0)
                note = f"median {float(together.median()):.4g}"
                yield Row(f"{name}, {norm}: --curve", optimality(together, best), 0.95, at_least=True, note=note)
            for attack, distance in zip(result.attacks, distances.values(), strict=True):
                passes = (attack.forward + attack.backward) // attack.attacked
                note = f"median {float(distance.median()):.4g}, {passes:,} passes per point, {attack.seconds:.0f} s"
                yield Row(f"{name}, {norm}: {attack.name}", optimality(distance, best), note=note)
