"""Certified radii of a subject: the measurement behind ``atoll certify`` and the test of certified training."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from safetensors.torch import save

from atoll.certify.evaluate import (
    Certification,
    Check,
    attack_certified,
    attacks_on,
    certify,
    empirical,
    made_for,
    relative_cost,
)
from atoll.certify.families import certifier_for
from atoll.certify.kept import Kept
from atoll.certify.lipschitz import LayerBound
from atoll.certify.norms import BUDGET
from atoll.certify.rejection import noise, share_rejected
from atoll.certify.smoothing import Smoothed
from atoll.config import build_part, parse_yaml
from atoll.data.base import Data, Split, SubSplit, to_float
from atoll.distributed import is_main
from atoll.errors import InputError
from atoll.files import write_atomic
from atoll.measure import MEASUREMENTS, Context, Measurement, Result, Settings, execution, select
from atoll.models.base import Classifier
from atoll.plots import plot_certified
from atoll.stats import Accuracy
from atoll.subject import Subject
from atoll.threat import ThreatModel


@dataclass(frozen=True, kw_only=True)
class CertifySettings(Settings):
    """Which radii, by which proof, and which attacks on the certified points.

    Args:
        eps: l2 radii such as 0.3,36/255 (default: as trained).
        attacks: attacks for the empirical robust accuracy, such as standard, fast or APGD-CE.
        check: attack this many certified points at their radius.
        attack: attack certified points (disable with --no-attack).
        eta: parameter of the eta layer of Centroid Nets.
        reject: report the rejection rate on noise, or on a data set named as in a recipe.
        smooth: certify by randomized smoothing with noise of this standard deviation.
        samples: noise samples per point, for smoothing.
        alpha: failure probability of each certificate, for smoothing.
        precision: of the certified network (default: float64, and float32 for smoothing).
        budget: operations per layer's proof.
        batch_size: points per batch.
    """

    kind: ClassVar[str] = "certify"
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
        self.at_least(points=1, check=1, batch_size=1, samples=1)
        if self.smooth is not None and (self.reject or self.eta):
            raise InputError("smooth: cannot be combined with reject or eta")

    def resolve(self, subject: Subject) -> Self:
        eps = self.eps
        if eps is None:
            if subject.threat.norm != "l2":
                raise InputError(f"eps: the model was trained against {subject.threat.norm}; give an l2 radius")
            eps = str(subject.threat.eps)
        settings = dataclasses.replace(self, eps=eps)
        for radius in settings.radii:
            attacks_on(subject.model, self.attacks, ThreatModel("l2", radius, subject.data.bounds))
        return dataclasses.replace(
            settings, precision=self.precision or ("float64" if self.smooth is None else "float32")
        )

    @property
    def radii(self) -> list[float]:
        return [ThreatModel("l2", part).radius for part in (self.eps or "").split(",")]


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Accuracy at one radius: points that are classified correctly and certified."""

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
    """Share of a data set for which nothing is certified at a radius."""

    data: str
    eps: float
    share: Accuracy


@dataclass(frozen=True, kw_only=True)
class CertifyResult(Result):
    """Clean, verified and empirical accuracy.

    Args:
        clean: accuracy without attack.
        verified: accuracy at each radius.
        median_radius: of the points that are classified correctly.
        curve: radii and verified accuracies.
        lipschitz: Lipschitz bound of the network, None for smoothing.
        layers: bounds of the layers and how each was proven.
        rejected: shares of other data that are rejected.
        relative_cost: time of certifying relative to predicting.
        attacked: certified points that were attacked at their radius.
        empirical: accuracy under attack at each radius.
    """

    kind: ClassVar[str] = "certify"
    settings: CertifySettings
    clean: Accuracy
    verified: tuple[Verified, ...]
    median_radius: float
    curve: dict[str, tuple[float, ...]]
    lipschitz: float | None = None
    layers: tuple[LayerBound, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    relative_cost: float | None = None
    attacked: Check | None = None
    empirical: tuple[EmpiricalAccuracy, ...] = ()

    @property
    def is_probabilistic(self) -> bool:
        """Whether the certificates hold with a probability instead of for certain."""
        return self.settings.smooth is not None

    @property
    def is_test(self) -> bool:
        """Whether this is the test at the end of training."""
        settings = self.settings
        plain = dataclasses.replace(settings, eps=None, precision=None) == CertifySettings(attack=False)
        return plain and settings.precision == "float64"


@MEASUREMENTS.register("certify")
class MeasureCertify(Measurement):
    """Provable robustness of a model."""

    settings = CertifySettings
    result = CertifyResult

    def measure(self, subject: Subject, settings: CertifySettings, context: Context) -> dict[str, Any]:
        model, split = subject.model, select(subject.data, settings.split, settings.points)
        # What is certified, and what is attacked: the model in its own precision is faster.
        certified = copy.deepcopy(model).double() if settings.precision == "float64" else model
        if settings.smooth is None:
            return _prove(subject, certified, split, settings, context)
        smoothed = Smoothed(certified, settings.smooth, n=settings.samples, alpha=settings.alpha, seed=settings.seed)
        certifier = smoothed if context.folder is None else Kept(smoothed, context.folder / "points")
        certification = certify(certifier, split, batch_size=1, device=context.device, on_progress=context.on_progress)
        _save(certification, subject, settings, context)
        return _accuracies(certification, settings.radii)


def _accuracies(certification: Certification, radii: list[float]) -> dict[str, Any]:
    radius, accuracy = certification.curve()
    known = certification.radius[certification.correct & certification.radius.isfinite()]
    return {
        "clean": certification.clean,
        "verified": tuple(Verified(eps=eps, accuracy=certification.verified(eps)) for eps in radii),
        "median_radius": float(known.median()) if len(known) else 0.0,
        "curve": {"radius": tuple(radius.tolist()), "verified": tuple(accuracy.tolist())},
    }


def _prove(
    subject: Subject, certified: Any, split: Split, settings: CertifySettings, context: Context
) -> dict[str, Any]:
    """Certificates that are proofs, and attacks that try to refute them."""
    device, progress, model = context.device, context.on_progress, subject.model
    if not isinstance(certified, Classifier):
        raise InputError(f"certify: expected a Classifier with a linear head, got {type(certified).__name__}")
    certifier = certifier_for(
        certified,
        budget=settings.budget,
        on_layer=lambda layer: progress(f"norm of {layer.name}", 0, 1),
        radii=settings.radii,
        eta=settings.eta,
    )
    # Before the work: a data set that is missing or of another shape is an error at once.
    others = {name: _other_data(name, certified.input_shape, len(split), settings, subject) for name in settings.reject}
    certification = certify(certifier, split, batch_size=settings.batch_size, device=device, on_progress=progress)
    fields = _accuracies(certification, settings.radii)
    fields |= {"lipschitz": certifier.lipschitz, "layers": tuple(certifier.layers)}
    if others:
        certifications = {f"{settings.split} points": certification}
        for name, other in others.items():
            certifications[name] = certify(
                certifier, other, batch_size=settings.batch_size, device=device, on_progress=progress
            )
        fields["rejected"] = tuple(
            Rejection(data=name, eps=eps, share=share_rejected(each, eps))
            for name, each in certifications.items()
            for eps in settings.radii
        )
    x = to_float(split.fetch(torch.arange(min(settings.batch_size, len(split))))).to(device)
    fields["relative_cost"] = relative_cost(certifier, certified, x.to(next(certified.parameters()).dtype))
    _save(certification, subject, settings, context)  # before the attacks, which take longest
    if not settings.attack:
        return fields
    fields["attacked"] = attack_certified(
        model, certifier, split, certification, bounds=subject.data.bounds, points=settings.check, seed=settings.seed,
        device=device, folder=context.folder, on_progress=progress,
    )  # fmt: skip
    names = ", ".join([settings.attacks, *made_for(model)])
    rows = []
    for eps in settings.radii:
        attacks = attacks_on(model, settings.attacks, ThreatModel("l2", eps, subject.data.bounds))
        accuracy = empirical(
            model, split, certification, attacks, eps, batch_size=settings.batch_size, seed=settings.seed,
            device=device, on_progress=progress,
        )  # fmt: skip
        rows.append(EmpiricalAccuracy(eps=eps, attacks=names, accuracy=accuracy))
    return fields | {"empirical": tuple(rows)}


def _other_data(name: str, shape: tuple[int, ...], count: int, settings: CertifySettings, subject: Subject) -> Split:
    """Inputs of another kind: ``noise``, or the first test points of a data set named as in a recipe."""
    if name == "noise":
        return noise(shape, count, seed=settings.seed)
    data: Data = build_part(Data, parse_yaml(name, "reject"), "reject", trust=True)
    if data.shape != shape:
        expected, got = ("x".join(map(str, each)) for each in (shape, data.shape))
        raise InputError(f"reject: expected inputs of {expected}, got {got} from {name}")
    return SubSplit(data.test, torch.arange(min(count, len(data.test))))


def _save(certification: Certification, subject: Subject, settings: CertifySettings, context: Context) -> None:
    """The certificates of all points, and the curve as a picture."""
    folder: Path | None = context.folder
    if folder is None or not is_main():
        return
    tensors = {name: getattr(certification, name) for name in ("prediction", "radius", "label")}
    write_atomic(folder / "certificates.safetensors", save(tensors))
    figure = plot_certified({subject.origin.run or "model": certification.curve()}, settings.radii)
    figure.savefig(folder / "curve.png", dpi=120)
