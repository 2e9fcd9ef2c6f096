"""Choice of a certifier, certificates of data sets, and attacks that try to break them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from atoll.attacks.apgd import APGD
from atoll.attacks.base import Attack
from atoll.attacks.carlini_wagner import CarliniWagner
from atoll.attacks.evaluate import ROBUST, Evaluation, evaluate
from atoll.attacks.fab import FAB
from atoll.attacks.suites import parse_attacks
from atoll.certify.centroids import NearestCentroid
from atoll.certify.certificate import Certificate, Certifier, Proof
from atoll.certify.gloro import GloRo, PairwiseLipschitz
from atoll.certify.lipschitz import OnLayer
from atoll.certify.norms import BUDGET
from atoll.certify.power import LipschitzEstimator
from atoll.certify.prototype_attack import PrototypeAttack, attackable
from atoll.data.base import MemorySplit, Split, batches, to_float
from atoll.distributed import all_sum, barrier, is_main, rank, world_size
from atoll.errors import InputError, UnsoundError
from atoll.files import write_atomic
from atoll.graph import CapturedModel
from atoll.measure import OnProgress
from atoll.models.base import Classifier
from atoll.models.centroid import CentroidNet
from atoll.modules import evaluation_mode
from atoll.rng import PointRNG, generator
from atoll.stats import Accuracy
from atoll.threat import Bounds, ThreatModel

BROKEN = "broken.safetensors"  # file with a point whose certificate an attack broke

AttackTable = Mapping[str, Callable[[ThreatModel], Attack]]

# Each attack runs on the points that are still robust.  All are short, because a wrong bound is usually far off.
CHECKS: AttackTable = {
    "APGD-CE": lambda threat: APGD(threat, steps=50),
    "APGD-T": lambda threat: APGD(threat, steps=20, targets=3),
    "FAB-T": lambda threat: FAB(threat, steps=20, targets=3),
    "Carlini-Wagner": lambda threat: CarliniWagner(threat, steps=30, binary_search_steps=3),
}


def certifier_for(
    model: nn.Module,
    *,
    shape: tuple[int, ...] | None = None,
    budget: float = BUDGET,
    on_layer: OnLayer | None = None,
    radii: Sequence[float] = (),
    eta: float = 0.0,
) -> Proof:
    """Build the certifier of a model: ``NearestCentroid`` for Centroid Nets, ``GloRo`` for other classifiers.

    Args:
        model: maps a batch of inputs to logits; it is captured, and the certificates are about the captured graph.
        shape: shape of one input, if the model has no ``input_shape``.
        budget: largest number of operations for the proof of a layer.
        on_layer: called after the proof of each layer.
        radii: radii of interest, for which some certifiers compute tighter bounds.
        eta: parameter of an eta layer, for Centroid Nets only.

    >>> from atoll.models import MLP
    >>> type(certifier_for(MLP((2,), 2))).__name__
    'GloRo'
    """
    if isinstance(model, CentroidNet):
        return NearestCentroid.proven(model, budget=budget, on_layer=on_layer, radii=radii, eta=eta)
    if eta:
        raise InputError(f"eta: expected a CentroidNet, got {type(model).__name__}")
    return GloRo.proven(model, shape, budget=budget, on_layer=on_layer)


def heuristic_certifier(model: Classifier, lipschitz: LipschitzEstimator) -> Certifier:
    """Build a certifier with estimated constants, as in training, which is not a proof."""
    pairs = lipschitz.converged()
    if isinstance(model, CentroidNet):
        return NearestCentroid.estimated(model, float(pairs[0, 1]) / (2 * model.head.lipschitz))
    return GloRo(model, PairwiseLipschitz.estimated(pairs))


def special_attacks(model: nn.Module) -> AttackTable:
    """Return attacks for kinds of models on which other attacks may fail.

    >>> from atoll.models import MLP, CentroidNet
    >>> [list(special_attacks(kind((2,), 2))) for kind in (MLP, CentroidNet)]
    [[], ['prototypes']]
    """
    return {"prototypes": PrototypeAttack} if attackable(model) else {}


def parse_attacks_for(model: nn.Module, names: str, threat: ThreatModel) -> dict[str, Attack]:
    """Parse a suite or a list of attacks, and add the special attacks of the model."""
    return parse_attacks(names, threat) | {name: make(threat) for name, make in special_attacks(model).items()}


@dataclass(frozen=True)
class Certification:
    """The certificates of a set of points, and their labels.

    >>> radius = torch.tensor([0.5, 0.2, 0.9]).double()
    >>> certification = Certification(torch.tensor([0, 1, 1]), radius, torch.tensor([0, 1, 0]))
    >>> certification.clean.correct, certification.verified(0.3).correct, certification.rejected(0.3).correct
    (2, 1, 1)
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
        """Return the verified robust accuracy (VRA): points that are correct and certified within eps."""
        return Accuracy(int(self.holds(eps).sum()), len(self.label))

    def rejected(self, eps: float) -> Accuracy:
        """Return the share of points that are not certified at eps, independent of their labels."""
        certified = Certificate(self.prediction, self.radius).holds(eps)
        return Accuracy(int((~certified).sum()), len(self.label))

    def holds(self, eps: float) -> Tensor:
        return self.correct & Certificate(self.prediction, self.radius).holds(eps)

    @property
    def median_radius(self) -> float:
        """Median radius of the correctly classified points; 0 if there are none."""
        radii = self.radius[self.correct]
        return float(radii.median()) if len(radii) else 0.0

    def curve(self, points: int = 101) -> tuple[Tensor, Tensor]:
        """Return radii from 0 to the largest finite one, and the verified robust accuracy at each."""
        largest = float(self._finite_radii.max()) if len(self._finite_radii) else 1.0
        radii = torch.linspace(0, largest, points, dtype=torch.float64)
        return radii, torch.tensor([self.verified(float(r)).value for r in radii], dtype=torch.float64)

    @property
    def _finite_radii(self) -> Tensor:
        return self.radius[self.correct & self.radius.isfinite()]


def certify(
    certifier: Certifier,
    split: Split,
    *,
    batch_size: int = 512,
    device: torch.device | str = "cpu",
    on_progress: OnProgress | None = None,
) -> Certification:
    """Certify all points of a split; under torchrun, each process certifies a part of them."""
    if not len(split):
        raise InputError("split: expected at least one point, got none")
    mine = torch.arange(len(split))[rank() :: world_size()]
    prediction, radius = torch.zeros(len(split), dtype=torch.long), torch.zeros(len(split), dtype=torch.float64)
    done = 0
    for batch in batches(split, torch.split(mine, batch_size), device=device):
        certificate = certifier(batch.x)
        index = batch.index.cpu()
        prediction[index], radius[index] = certificate.prediction.cpu(), certificate.radius.cpu()
        done += len(index)
        if on_progress is not None:
            on_progress("certify", done, len(mine))
    return Certification(all_sum(prediction), all_sum(radius), split.labels.clone())


def rejected(
    certifier: Certifier, split: Split, eps: float, *, batch_size: int = 256, device: torch.device | str = "cpu"
) -> Accuracy:
    """Return the share of points on which the classifier abstains because they are not certified at eps.

    >>> from atoll.models import MLP
    >>> rejected(GloRo.proven(MLP((2,), 2)), noise((2,), 50), 1e6).correct
    50
    """
    return certify(certifier, split, batch_size=batch_size, device=device).rejected(eps)


def coverage(
    certifier: NearestCentroid, split: Split, *, batch_size: int = 256, device: torch.device | str = "cpu"
) -> Accuracy:
    """Return the share of points that the eta layer of a Centroid Net accepts; torchrun distributes the points.

    >>> net = CentroidNet((1,), 2, per_class=1)
    >>> _ = net.head.centroids.data.copy_(torch.tensor([[[0.0]], [[1.0]]]))
    >>> points = MemorySplit(torch.tensor([[0.1], [0.45], [0.9]]), torch.zeros(3).long())
    >>> coverage(NearestCentroid.proven(net, eta=0.2), points).correct
    2
    """
    mine, count = torch.arange(len(split))[rank() :: world_size()], torch.zeros((), dtype=torch.long)
    for batch in batches(split, torch.split(mine, batch_size), device=device):
        count += certifier.accepts(batch.x).sum().cpu()
    return Accuracy(int(all_sum(count)), len(split))


def noise(shape: tuple[int, ...], count: int, *, seed: object = 0) -> MemorySplit:
    """Return inputs of independent uniform numbers in [0, 1]; all labels are 0.

    >>> noise((1, 8, 8), 3).images.shape
    torch.Size([3, 1, 8, 8])
    """
    index = torch.arange(count)
    return MemorySplit(PointRNG(seed, "noise", index=index).uniform(*shape), torch.zeros_like(index))


@dataclass(frozen=True)
class CertificateCheck:
    """The result of attacking certified points at their certified radius, if no prediction changed."""

    attacked: int  # number of attacked points
    certified: int  # number of certified points
    passes: int  # forward and backward passes
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
) -> CertificateCheck:
    """Attack certified points at their certified radius; raises ``UnsoundError`` if a prediction changes.

    Points of similar radius are attacked together at the smallest of their radii, so that every success is a
    contradiction.  A success counts only if the certifier itself predicts another class there, so that rounding in the
    attacked model does not matter.  The label is the certified prediction, whether it is correct or not.

    Args:
        model: the original model, for ``special_attacks``; other attacks use the captured graph of the certifier.
        certifier: the certifier.
        split: the points.
        certification: the certificates of the points.
        bounds: valid range of inputs.
        points: number of points to attack, chosen at random (default: all).
        attacks: attacks by name, built for each radius; ``special_attacks`` are added.
        batch_size: attack batch size.
        seed: seed of the attacks and of the choice of points.
        device: where to compute.
        folder: where to write ``broken.safetensors``, the first point whose certificate is false; the file is deleted
            if there is none.
        on_progress: called with the name of the task, the number of attacked points, and the total.
    """
    began = time.monotonic()
    graph = getattr(certifier, "model", model)
    targets = [(CastInputs(graph) if isinstance(graph, CapturedModel) else model, attacks)]
    targets += [(model, special)] if (special := special_attacks(model)) else []
    certified = ((certification.radius > 0) & certification.radius.isfinite()).nonzero().squeeze(1)
    sample = certified[torch.randperm(len(certified), generator=generator(seed, "certified points"))[:points]]
    sample = sample[certification.radius[sample].argsort(stable=True)]
    passes = 0
    for start in range(0, len(sample), batch_size):
        index = sample[start : start + batch_size]
        threat = ThreatModel("l2", float(certification.radius[index].min()), bounds)
        x = to_float(split.fetch(index))
        for target, table in targets:
            evaluation = evaluate(
                target,
                MemorySplit(x, certification.prediction[index]),
                {name: make(threat) for name, make in table.items()},
                cascade=True,
                batch_size=batch_size,
                seed=(seed, "check"),
                device=device,
                check=False,
                keep=True,
            )
            passes += sum(attack.forward + attack.backward for attack in evaluation.attacks)
            _confirm(evaluation, certifier, x, index, certification, folder, device)
        if on_progress is not None:
            on_progress("attack certified points", start + len(index), len(sample))
    if folder is not None and is_main():
        (folder / BROKEN).unlink(missing_ok=True)
    return CertificateCheck(len(sample), len(certified), passes, time.monotonic() - began)


class CastInputs(nn.Module):
    """Wraps a captured model and casts inputs to its precision."""

    def __init__(self, model: CapturedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x.to(self.model.dtype))
        return logits.to(x.dtype)


def _confirm(
    evaluation: Evaluation,
    certifier: Certifier,
    x: Tensor,
    index: Tensor,
    certification: Certification,
    folder: Path | None,
    device: torch.device | str,
) -> None:
    """Raise ``UnsoundError`` if a successful attack contradicts a certificate."""
    assert evaluation.adversarial is not None
    rows = (evaluation.broken_by >= 0).nonzero().squeeze(1)
    if not len(rows):
        return
    x_adv = evaluation.adversarial[rows]
    distance = (x_adv.double() - x[rows].double()).flatten(1).norm(dim=1)
    radius, prediction = certification.radius[index[rows]], certification.prediction[index[rows]]
    broken = (certifier(x_adv.to(device)).prediction.cpu() != prediction) & (distance <= radius)
    if not broken.any():
        return
    first = int(broken.nonzero()[0])
    row = rows[first]
    message = (
        f"a certificate is false: point {int(index[row])} has the certified radius {float(radius[first]):.6g}, but"
        f" {evaluation.attacks[int(evaluation.broken_by[row])].name} changed its class at {float(distance[first]):.6g}"
    )
    if folder is not None:
        barrier()
        if is_main():
            point = {"x": x[row], "x_adv": x_adv[first], "radius": radius[first].clone()}
            write_atomic(folder / BROKEN, save(point, metadata={"message": message}))
        message += f"; the point is saved in {folder / BROKEN}"
    raise UnsoundError(f"{message}; please report this bug")


def broken_certificates(results: Path) -> dict[Path, str]:
    """Find the certificates below a folder that an attack broke: the file of each point and a message.

    A measurement that breaks a certificate stores no result, so these files are the only record.
    """
    messages = {}
    for path in sorted(results.rglob(BROKEN)):
        try:
            with safe_open(path, "pt") as file:
                message = (file.metadata() or {}).get("message")
        except (OSError, SafetensorError):
            message = None
        messages[path] = message or "a certificate is false: an attack changed a certified prediction"
    return messages


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
    """Measure robust accuracy under l2 attacks (``parse_attacks_for``) without attacking points certified at eps."""
    safe = certification.holds(eps)
    rest = certification.correct & ~safe
    if not rest.any():
        return Accuracy(int(safe.sum()), len(split))
    # Misclassified points are not attacked; the others keep their indices and therefore their random numbers.
    wrong = torch.where(certification.prediction == 0, 1, 0)
    evaluation = evaluate(
        model,
        _RelabeledSplit(split, split.labels.where(rest, wrong)),
        attacks,
        cascade=True,
        batch_size=batch_size,
        seed=seed,
        device=device,
        check=False,
        on_progress=on_progress,
    )
    return Accuracy(int((safe | rest & (evaluation.broken_by == ROBUST)).sum()), len(split))


@dataclass(frozen=True)
class _RelabeledSplit:
    """A split with other labels."""

    split: Split
    labels: Tensor

    def __len__(self) -> int:
        return len(self.split)

    def fetch(self, index: Tensor) -> Tensor:
        return self.split.fetch(index)


def relative_cost(certifier: Certifier, model: nn.Module, x: Tensor) -> float:
    """Return the time to certify a batch divided by the time of inference: the median of up to seven runs."""
    ratios = []
    for _ in range(8):  # the first is a warm-up
        start = time.perf_counter()
        with torch.no_grad(), evaluation_mode(model):
            model(x)
        middle = time.perf_counter()
        certifier(x)
        seconds = time.perf_counter() - middle
        ratios.append(seconds / (middle - start))
        if seconds > 1 and len(ratios) > 1:
            break
    return statistics.median(ratios[1:])
