"""What certificates are worth on a set of points, and attacks that try to break them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from atoll.attacks.apgd import APGD
from atoll.attacks.base import Attack
from atoll.attacks.carlini_wagner import CarliniWagner
from atoll.attacks.evaluate import ROBUST, Evaluation, evaluate
from atoll.attacks.fab import FAB
from atoll.attacks.suites import parse_attacks
from atoll.certify.certificate import Certifier
from atoll.certify.prototype_attack import PrototypeAttack, attackable
from atoll.data.base import MemorySplit, Split, batches, to_float
from atoll.distributed import all_sum, barrier, is_main, rank, world_size
from atoll.errors import InputError, UnsoundError
from atoll.files import write_atomic
from atoll.modules import evaluation_mode
from atoll.rng import generator
from atoll.stats import Accuracy
from atoll.threat import Bounds, ThreatModel

OnProgress = Callable[[str, float, int], None]
AttackTable = Mapping[str, Callable[[ThreatModel], Attack]]

# Each goes for what the ones before it left standing; all are short, since a wrong bound is mostly wrong by a lot.
CHECKS: AttackTable = {
    "APGD-CE": lambda threat: APGD(threat, steps=50),
    "APGD-T": lambda threat: APGD(threat, steps=20, targets=3),
    "FAB-T": lambda threat: FAB(threat, steps=20, targets=3),
    "Carlini-Wagner": lambda threat: CarliniWagner(threat, steps=30, binary_search_steps=3),
}


def made_for(model: nn.Module) -> AttackTable:
    """Attacks that know this kind of model, for those that others may be blind to.

    >>> from atoll.models import MLP, CentroidNet
    >>> [list(made_for(kind((2,), 2))) for kind in (MLP, CentroidNet)]
    [[], ['prototypes']]
    """
    return {"prototypes": PrototypeAttack} if attackable(model) else {}


def attacks_on(model: nn.Module, words: str, threat: ThreatModel) -> dict[str, Attack]:
    """A suite or names, as commands take them, and what is made for the model."""
    return parse_attacks(words, threat) | {name: make(threat) for name, make in made_for(model).items()}


@dataclass(frozen=True)
class Certification:
    """The certificates of a set of points, and their labels.

    >>> found = Certification(torch.tensor([0, 1, 1]), torch.tensor([0.5, 0.2, 0.9]).double(), torch.tensor([0, 1, 0]))
    >>> found.clean, found.verified(0.3)
    (66.67 % ± 28.87, 33.33 % ± 28.87)
    """

    prediction: Tensor
    radius: Tensor
    label: Tensor

    @property
    def correct(self) -> Tensor:
        return self.prediction == self.label

    @property
    def clean(self) -> Accuracy:
        return Accuracy(int(self.correct.sum()), len(self.label))

    def verified(self, eps: float) -> Accuracy:
        """Verified robust accuracy (VRA): correct, and proven not to change within eps."""
        return Accuracy(int(self.holds(eps).sum()), len(self.label))

    def holds(self, eps: float) -> Tensor:
        return self.correct & (self.radius > 0) & (self.radius >= eps)

    def curve(self, points: int = 101) -> tuple[Tensor, Tensor]:
        """Radii from 0 to the largest (finite) one, and the verified robust accuracy at each."""
        known = self.radius[self.correct & self.radius.isfinite()]
        radii = torch.linspace(0, float(known.max()) if len(known) else 1.0, points, dtype=torch.float64)
        return radii, torch.tensor([self.verified(float(r)).value for r in radii], dtype=torch.float64)

    def to_json(self, eps: Sequence[float]) -> dict[str, Any]:
        radii, accuracy = self.curve()
        known = self.radius[self.correct & self.radius.isfinite()]
        return {
            "clean": self.clean.to_json(),
            "verified": [{"eps": e, **self.verified(e).to_json()} for e in eps],
            "median_radius": float(known.median()) if len(known) else 0.0,
            "curve": {"radius": radii.tolist(), "verified": accuracy.tolist()},
        }


def certify(
    certifier: Certifier,
    split: Split,
    *,
    batch_size: int = 512,
    device: torch.device | str = "cpu",
    on_progress: OnProgress | None = None,
) -> Certification:
    """The certificates of all points; under torchrun the points are shared out."""
    if not len(split):
        raise InputError("split: expected at least one point, got none")
    mine = torch.arange(len(split))[rank() :: world_size()]
    prediction, radius = torch.zeros(len(split), dtype=torch.long), torch.zeros(len(split), dtype=torch.float64)
    done = 0
    for batch in batches(split, torch.split(mine, batch_size), device=device):
        found = certifier(batch.x)
        index = batch.index.cpu()
        prediction[index], radius[index] = found.prediction.cpu(), found.radius.cpu()
        done += len(index)
        if on_progress is not None:
            on_progress("certify", done, len(mine))
    return Certification(all_sum(prediction), all_sum(radius), split.labels.clone())


@dataclass(frozen=True)
class Check:
    """Certified points that were attacked at their certified radius, and none fell."""

    attacked: int
    certified: int
    passes: int
    seconds: float


def attack_certified(
    model: nn.Module,
    certifier: Certifier,
    split: Split,
    certification: Certification,
    *,
    bounds: Bounds | None,
    points: int | None = None,
    attacks: AttackTable = CHECKS,
    batch_size: int = 64,
    seed: object = 0,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
    on_progress: OnProgress | None = None,
) -> Check:
    """Attack certified points where their certificate ends; raises ``UnsoundError`` if one falls.

    Points of about the same radius are attacked together, at the smallest radius among them, so that every success is
    a contradiction.  It counts if the certifier itself predicts another class there, so rounding in the attacked model
    does not.  The label is the certified prediction, right or wrong.

    Args:
        model: what is attacked; the certified model, or a copy of it in lower precision.
        certifier: whose certificates these are.
        split: the points.
        certification: of those points.
        bounds: of the inputs.
        points: so many at random; all if None.
        attacks: made for each radius; those of ``made_for`` are added.
        batch_size: points attacked together.
        seed: of attacks and choice of points.
        folder: where a point that falls is kept.
    """
    began, attacks = time.monotonic(), {**attacks, **made_for(model)}
    certified = ((certification.radius > 0) & certification.radius.isfinite()).nonzero().squeeze(1)
    chosen = certified[torch.randperm(len(certified), generator=generator(seed, "certified points"))[:points]]
    passes = 0
    for done, index in _groups(chosen, certification.radius, batch_size):
        threat = ThreatModel("l2", float(certification.radius[index].min()), bounds)
        x = to_float(split.fetch(index))
        group = MemorySplit(x, certification.prediction[index])
        made = {name: make(threat) for name, make in attacks.items()}
        found = evaluate(
            model,
            group,
            made,
            cascade=True,
            batch_size=batch_size,
            seed=(seed, "check"),
            device=device,
            check=False,
            keep=True,
        )
        passes += sum(attack.forward + attack.backward for attack in found.attacks)
        _confirm(found, certifier, x, index, certification, list(attacks), folder, device)
        if on_progress is not None:
            on_progress("attack certified points", done, len(chosen))
    return Check(len(chosen), len(certified), passes, time.monotonic() - began)


def _groups(chosen: Tensor, radius: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Points in order of their radius, a few at a time, and how many have come so far."""
    done = 0
    for index in torch.split(chosen[radius[chosen].argsort(stable=True)], size):
        done += len(index)
        if len(index):
            yield done, index


def _confirm(
    found: Evaluation,
    certifier: Certifier,
    x: Tensor,
    index: Tensor,
    certification: Certification,
    names: list[str],
    folder: Path | None,
    device: torch.device | str,
) -> None:
    assert found.adversarial is not None
    fallen = (found.broken_by >= 0).nonzero().squeeze(1)
    if not len(fallen):
        return
    x_adv = found.adversarial[fallen]
    distance = (x_adv.double() - x[fallen].double()).flatten(1).norm(dim=1)
    radius, prediction = certification.radius[index[fallen]], certification.prediction[index[fallen]]
    broken = (certifier(x_adv.to(device)).prediction.cpu() != prediction) & (distance <= radius)
    if not broken.any():
        return
    first = int(broken.nonzero()[0])
    kept = ""
    if folder is not None:
        barrier()
        if is_main():
            point = {"x": x[fallen[first]], "x_adv": x_adv[first], "radius": radius[first].clone()}
            write_atomic(folder / "broken.safetensors", save(point))
        kept = f"; it is kept in {folder / 'broken.safetensors'}"
    raise UnsoundError(
        f"a certificate is false: point {int(index[fallen[first]])} was certified to {float(radius[first]):.6g}, and"
        f" {names[int(found.broken_by[fallen[first]])]} changed its class at {float(distance[first]):.6g}{kept};"
        " please report this"
    )


def empirical(
    model: nn.Module,
    split: Split,
    certification: Certification,
    attacks: Mapping[str, Attack],
    eps: float,
    *,
    batch_size: int | None = None,
    seed: object = 0,
    device: torch.device | str = "cpu",
    on_progress: OnProgress | None = None,
) -> Accuracy:
    """Robust accuracy under attacks in l2, such as ``attacks_on``; points that are certified at that eps need none."""
    safe = certification.holds(eps)
    rest = certification.correct & ~safe
    if not rest.any():
        return Accuracy(int(safe.sum()), len(split))
    # A point with a wrong label is not attacked, and the others keep their place, and with it their random streams.
    wrong = torch.where(certification.prediction == 0, 1, 0)
    found = evaluate(
        model,
        _Relabelled(split, split.labels.where(rest, wrong)),
        attacks,
        cascade=True,
        batch_size=batch_size,
        seed=seed,
        device=device,
        check=False,
        on_progress=on_progress,
    )
    return Accuracy(int((safe | rest & (found.broken_by == ROBUST)).sum()), len(split))


@dataclass(frozen=True)
class _Relabelled:
    """A split with other labels."""

    whole: Split
    labels: Tensor

    def __len__(self) -> int:
        return len(self.whole)

    def fetch(self, index: Tensor) -> Tensor:
        return self.whole.fetch(index)


def relative_cost(certifier: Certifier, model: nn.Module, x: Tensor, rounds: int = 7) -> float:
    """Time of certifying a batch over plain inference: the median of runs side by side, of one if they are long."""

    @torch.no_grad()
    def plain() -> None:
        with evaluation_mode(model):
            model(x)

    ratios = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        plain()
        middle = time.perf_counter()
        certifier(x)
        ratios.append((time.perf_counter() - middle) / (middle - start))
        if time.perf_counter() - middle > 1 and len(ratios) > 1:
            break
    return statistics.median(ratios[1:]) if rounds else math.nan
