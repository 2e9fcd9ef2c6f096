"""The measurement of certified radii, used by ``atoll certify`` and by the final test of certified training."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from safetensors.torch import save
from torch import nn

from atoll.attacks.measure import AttackSettings, MeasureAttack
from atoll.certify.centroids import NearestCentroid
from atoll.certify.certificate import Proof
from atoll.certify.evaluate import (
    CertificateCheck,
    Certification,
    attack_certified,
    certifier_for,
    certify,
    coverage,
    empirical,
    noise,
    parse_attacks_for,
    relative_cost,
    special_attacks,
)
from atoll.certify.norms import BUDGET
from atoll.certify.propagation import LayerBound
from atoll.certify.prototypes import prototypes
from atoll.certify.smoothing import ResumableCertifier, Smoothed
from atoll.config import build_part, parse_yaml
from atoll.data.base import Data, Split, SubSplit, to_float
from atoll.display import TextTable
from atoll.distributed import is_main
from atoll.errors import InputError
from atoll.files import write_atomic, write_figure
from atoll.measure import MEASUREMENTS, Context, Measurement, Ranges, Result, Settings, execution, select, split_digest
from atoll.models.centroid import CentroidNet
from atoll.plots import plot_certified, plot_prototypes
from atoll.stats import Accuracy, percent, percent_interval
from atoll.subject import Subject
from atoll.threat import ThreatModel

PROTOTYPES = 6  # number of points whose prototypes are stored


@dataclass(frozen=True, kw_only=True)
class CertifySettings(Settings):
    """Settings of ``atoll certify``: radii, kind of proof, and attacks on certified points.

    Args:
        eps: l2 radii such as 0.3,36/255 (default: as trained).
        attacks: attacks for the empirical robust accuracy, such as standard, fast or APGD-CE.
        check: number of certified points to attack at their radius.
        attack: attack certified points (disable with --no-attack).
        eta: parameter of the eta layer of Centroid Nets.
        reject: report the rejection rate on noise, or on a data set named as in a recipe.
        smooth: certify by randomized smoothing with noise of this standard deviation.
        samples: number of noise samples per point, for smoothing.
        alpha: failure probability of each certificate, for smoothing.
        precision: precision of the certified network (default: float64, and float32 for smoothing).
        budget: largest number of operations for the proof of a layer.
        batch_size: number of points per batch.
    """

    kind: ClassVar[str] = "certify"
    ranges: ClassVar[Ranges] = {
        "check": 1, "batch_size": 1, "samples": 1, "eta": "[0, 1]", "smooth": "(0, inf)", "alpha": "(0, 1)",
        "budget": "[0, inf)",
    }  # fmt: skip
    eps: str | None = None
    attacks: str = "APGD-CE"
    check: int = 500
    attack: bool = True
    eta: float = 0.0
    reject: tuple[str, ...] = ()
    smooth: float | None = None
    samples: int = 100_000
    alpha: float = 0.001
    precision: Literal["float64", "float32"] | None = None
    budget: float = BUDGET
    batch_size: int = execution(256)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.smooth is not None and (self.reject or self.eta):
            raise InputError("smooth: cannot be combined with reject or eta")

    def resolve(self, subject: Subject) -> Self:
        if self.eps is None and subject.threat.norm != "l2":
            raise InputError(f"eps: the model was trained against {subject.threat.norm}; specify an l2 radius")
        eps = str(subject.threat.eps) if self.eps is None else self.eps
        settings = dataclasses.replace(self, eps=eps, **self._unused)
        for radius in settings.radii:  # report unknown names before any work is done
            parse_attacks_for(subject.model, self.attacks, ThreatModel("l2", radius, subject.data.bounds))
        return settings

    @property
    def _unused(self) -> dict[str, Any]:
        """Defaults for settings that the measurement does not use, so that equal questions have equal settings."""
        smooth = self.smooth is not None
        attack = self.attack and not smooth
        unused = [*(["budget"] if smooth else ["samples", "alpha"]), *([] if attack else ["attacks", "check"])]
        precision = self.precision or ("float32" if smooth else "float64")
        return {name: getattr(type(self), name) for name in unused} | {"attack": attack, "precision": precision}

    @property
    def radii(self) -> list[float]:
        """The radii as numbers."""
        return [ThreatModel("l2", part).radius for part in (self.eps or "").split(",")]


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Verified accuracy at one radius: the share of points that are classified correctly and certified."""

    eps: float
    accuracy: Accuracy


@dataclass(frozen=True, kw_only=True)
class EmpiricalAccuracy:
    """Accuracy under attacks at one radius."""

    eps: float
    attacks: str
    accuracy: Accuracy


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """Share of a data set that is not certified at a radius."""

    data: str
    eps: float
    share: Accuracy


@dataclass(frozen=True, kw_only=True)
class CentroidGuarantees:
    r"""Guarantees of a Centroid Net with an eta layer for all inputs (thesis, Theorems 8 and 9, corrected).

    Args:
        separation: :math:`d_{\min}`, the smallest distance between centroids of different classes.
        global_radius: :math:`\eta\,d_{\min} / K`; inputs this close are never accepted in different classes.
        local_radius: :math:`\eta\,d_{\min} / (2K)`; within it, the class of an accepted input does not change.
        coverage: share of the points that the eta layer accepts.
        prototypes: distances of the features of prototypes (Definition 23) from the centroid, for the first points.
    """

    separation: float
    global_radius: float
    local_radius: float
    coverage: Accuracy
    prototypes: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CertifyResult(Result):
    """Clean, verified and empirical accuracy.

    Args:
        clean: accuracy without attack.
        verified: verified accuracy at each radius.
        median_radius: median radius of the correctly classified points.
        curve: radii and verified accuracies.
        function: digest of the captured graph; the certificates hold only for this graph.
        lipschitz: Lipschitz bound of the network, None for smoothing.
        layers: bounds of the layers and the method of each proof.
        rejected: rejection rates on other data.
        relative_cost: time of certification divided by time of prediction.
        check: the attack on certified points at their radius.
        empirical: accuracy under attack at each radius.
        centroids: guarantees of a Centroid Net for all inputs, None for other models.
    """

    kind: ClassVar[str] = "certify"
    version: ClassVar[int] = 2  # 2: corrects rules that could give false certificates
    settings: CertifySettings
    clean: Accuracy
    verified: tuple[Verified, ...]
    median_radius: float
    curve: dict[str, tuple[float, ...]]
    function: str = ""
    lipschitz: float | None = None
    layers: tuple[LayerBound, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    relative_cost: float | None = None
    check: CertificateCheck | None = None
    empirical: tuple[EmpiricalAccuracy, ...] = ()
    centroids: CentroidGuarantees | None = None

    @property
    def is_probabilistic(self) -> bool:
        """Whether the certificates hold only with a probability."""
        return self.settings.smooth is not None

    def table(self) -> TextTable:
        kind = "verified, probabilistic" if self.is_probabilistic else "verified"
        rows = [["clean", "-", *percent_interval(self.clean)]]
        rows += [[kind, f"{row.eps:.4g}", *percent_interval(row.accuracy)] for row in self.verified]
        rows += [[row.attacks, f"{row.eps:.4g}", *percent_interval(row.accuracy)] for row in self.empirical]
        rows += [[f"{kind} to attacked", f"{eps:.4g}", *ends] for eps, *ends in self._brackets()]
        title = f"{self._title}, l2, {self.settings.precision}"
        notes = [f"median certified radius {self.median_radius:.4g}"]
        return TextTable(title, ["", "eps", "accuracy %", "95 %"], rows, notes)

    def _brackets(self) -> Iterator[tuple[float, str, str]]:
        """Radii with verified and attacked accuracy, between which the true one is, and the outer ends of both."""
        attacked = {row.eps: row.accuracy for row in self.empirical}
        for row in self.verified:
            if (upper := attacked.get(row.eps)) is not None:
                low, high = row.accuracy.interval[0], upper.interval[1]
                yield row.eps, f"{percent(row.accuracy)}-{percent(upper)}", f"{100 * low:.1f}-{100 * high:.1f}"


@MEASUREMENTS.register("certify", own_name=False)
class MeasureCertify(Measurement):
    """Verified accuracy of a model.

    If an attack breaks a certificate, the measurement raises an ``UnsoundError`` and stores only the point, not a
    result (``evaluate.broken_certificates`` lists these points).
    """

    settings = CertifySettings
    result = CertifyResult

    def depends_on(self, subject: Subject, settings: CertifySettings, context: Context) -> tuple[str, ...]:
        """Return the digests of the data to reject and of the code of attacks from outside Atoll."""
        digests = [split_digest(other) for other in _rejection_data(subject, settings).values()]
        if settings.attack:
            attacks = AttackSettings(attacks=settings.attacks, norm="l2", eps=str(settings.radii[0]))
            digests += MeasureAttack().depends_on(subject, attacks, context)
        return tuple(digests)

    def measure(self, subject: Subject, settings: CertifySettings, context: Context) -> dict[str, Any]:
        # Attacks use the model in its own precision, which is faster.
        dtype, model = getattr(torch, settings.precision or "float64"), subject.model
        certified = model if subject.precision == dtype else copy.deepcopy(model).to(dtype)
        split = self.inputs(subject, settings)
        if settings.smooth is None:
            return _prove(subject, certified, split, settings, context)
        smoothed = Smoothed(certified, settings.smooth, n=settings.samples, alpha=settings.alpha, seed=settings.seed)
        certifier: Smoothed | ResumableCertifier = smoothed
        if context.folder is not None:
            certifier = ResumableCertifier(smoothed, context.folder / "points", context.folder.name)
        certification = certify(certifier, split, batch_size=1, device=context.device, on_progress=context.on_progress)
        return _accuracies(certification, subject, settings, context)


def _accuracies(
    certification: Certification, subject: Subject, settings: CertifySettings, context: Context
) -> dict[str, Any]:
    """Return the fields that follow from the certificates; save the certificates and a plot of the curve."""
    radius, accuracy = curve = certification.curve()
    if context.folder is not None and is_main():
        write_atomic(context.folder / "certificates.safetensors", save(vars(certification)))
        figure = plot_certified({subject.origin.run or "model": curve}, settings.radii)
        write_figure(context.folder / "curve.png", figure)
    return {
        "clean": certification.clean,
        "verified": tuple(Verified(eps=eps, accuracy=certification.verified(eps)) for eps in settings.radii),
        "median_radius": certification.median_radius,
        "curve": {"radius": tuple(radius.tolist()), "verified": tuple(accuracy.tolist())},
    }


def _prove(
    subject: Subject, certified: nn.Module, split: Split, settings: CertifySettings, context: Context
) -> dict[str, Any]:
    """Certify with proofs, and attack the certified points."""
    certifier = certifier_for(
        certified,
        shape=tuple(subject.data.shape),
        budget=settings.budget,
        on_layer=lambda layer: context.on_progress(f"norm of {layer.name}", 0, 1),
        radii=settings.radii,
        eta=settings.eta,
    )
    splits = {f"{settings.split} points": split, **_rejection_data(subject, settings)}
    certifications = {
        name: certify(
            certifier, each, batch_size=settings.batch_size, device=context.device, on_progress=context.on_progress
        )
        for name, each in splits.items()
    }
    certification = next(iter(certifications.values()))
    fields = _accuracies(certification, subject, settings, context)  # before the attacks, which take longest
    x = to_float(split.fetch(torch.arange(min(settings.batch_size, len(split))))).to(context.device)
    fields |= {
        "function": certifier.model.digest,
        "lipschitz": certifier.lipschitz,
        "layers": certifier.layers,
        "rejected": tuple(
            Rejection(data=name, eps=eps, share=each.rejected(eps))
            for name, each in certifications.items()
            for eps in settings.radii
            if settings.reject
        ),
        "relative_cost": relative_cost(certifier, certifier.model, x.to(certifier.model.dtype)),
    }
    if isinstance(certifier, NearestCentroid):
        fields["centroids"] = _guarantees(certifier, certified, split, settings, context)
    return fields | _attack(subject, certifier, split, certification, settings, context) if settings.attack else fields


def _guarantees(
    certifier: NearestCentroid, model: nn.Module, split: Split, settings: CertifySettings, context: Context
) -> CentroidGuarantees:
    """Return the guarantees for all valid inputs; save the prototypes of the first points, with a plot for images."""
    first = torch.arange(min(PROTOTYPES, len(split)))
    x = to_float(split.fetch(first)).to(context.device, certifier.head.centroids.dtype)
    assert isinstance(model, CentroidNet)
    result = prototypes(model, x)
    if context.folder is not None and is_main():
        tensors = {"x": x, "prototype": result.inputs, "centroid": result.centroid, "distance": result.distance}
        write_atomic(context.folder / "prototypes.safetensors", save({k: v.contiguous() for k, v in tensors.items()}))
        if x.dim() == 4:
            figure = plot_prototypes(x, result.inputs, x[:, None][:, :0])
            write_figure(context.folder / "prototypes.png", figure)
    return CentroidGuarantees(
        separation=certifier.separation,
        global_radius=certifier.global_radius,
        local_radius=certifier.local_radius,
        coverage=coverage(certifier, split, batch_size=settings.batch_size, device=context.device),
        prototypes=tuple(result.distance.tolist()),
    )


def _attack(
    subject: Subject,
    certifier: Proof,
    split: Split,
    certification: Certification,
    settings: CertifySettings,
    context: Context,
) -> dict[str, Any]:
    """Attack certified points at their radius, and measure robust accuracy at the radii of the settings."""
    model, bounds, seed = subject.model, subject.data.bounds, settings.seed
    device, progress = context.device, context.on_progress
    check = attack_certified(
        model, certifier, split, certification, bounds=bounds, points=settings.check, seed=seed, device=device,
        folder=context.folder, on_progress=progress,
    )  # fmt: skip
    names, rows = ", ".join([settings.attacks, *special_attacks(model)]), []
    for eps in settings.radii:
        attacks = parse_attacks_for(model, settings.attacks, ThreatModel("l2", eps, bounds))
        accuracy = empirical(
            model, split, certification, attacks, eps, batch_size=settings.batch_size, seed=seed, device=device,
            on_progress=progress,
        )  # fmt: skip
        rows.append(EmpiricalAccuracy(eps=eps, attacks=names, accuracy=accuracy))
    return {"check": check, "empirical": tuple(rows)}


def _rejection_data(subject: Subject, settings: CertifySettings) -> dict[str, Split]:
    """Return other inputs by name: ``noise``, or the first test points of a data set named as in a recipe."""
    shape, count = subject.data.shape, len(select(subject.data, settings.split, settings.points))
    splits: dict[str, Split] = {}
    for name in settings.reject:
        if name == "noise":
            splits[name] = noise(shape, count, seed=settings.seed)
            continue
        data: Data = build_part(Data, parse_yaml(name, "reject"), "reject", trust=True)
        if data.shape != shape:
            expected, got = ("x".join(map(str, each)) for each in (shape, data.shape))
            raise InputError(f"reject: expected inputs of {expected}, got {got} from {name}")
        splits[name] = SubSplit(data.test, torch.arange(min(count, len(data.test))))
    return splits
