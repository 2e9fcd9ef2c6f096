"""The measurement of curvature, used by ``atoll curvature``."""

from __future__ import annotations

import ast
import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from atoll.attacks.pgd import PGD
from atoll.config import build_part
from atoll.curvature.gap import Gap, robust_gap
from atoll.curvature.ggn import diagonal
from atoll.curvature.landscape import Landscape, input_landscape, weight_landscape
from atoll.curvature.pac_bayes import PACBayesBounds, PACBayesProof, check_provable, pac_bayes, pac_bayes_proof
from atoll.curvature.risk import EmpiricalRisk
from atoll.curvature.spectrum import Density, density, top_eigenvalues
from atoll.curvature.trace import Estimator, OnProgress
from atoll.curvature.wci import WCI, Layer, LayerwiseBound, layerwise_bound, wci
from atoll.data.base import Split, SubSplit, sample_rows, to_float
from atoll.display import TextTable, cell
from atoll.distributed import is_main
from atoll.errors import InputError
from atoll.files import write_figure
from atoll.losses.base import Loss
from atoll.measure import (
    MEASUREMENTS,
    Context,
    Measurement,
    Ranges,
    Result,
    Settings,
    SplitName,
    foreign_code,
    resolve_threat,
    select,
    split_digest,
)
from atoll.registry import class_path
from atoll.stats import Estimate
from atoll.subject import Subject
from atoll.threat import Norm

INPUTS_SHOWN = 8  # number of points of an input landscape
GAP_SPLITS = ("train", "test")


@dataclass(frozen=True, kw_only=True)
class CurvatureSettings(Settings):
    """Settings of ``atoll curvature``: loss, points and quantities to compute.

    Args:
        split: which points to use: train, validation or test.
        points: number of random points of the split.
        loss: loss whose curvature is measured, such as AT, "TRADES(lambda_t=3)" or my_loss.py:Mine (default: as
            trained).
        steps: PGD steps for adversarial inputs.
        estimator: estimator of traces.
        relative_error: relative standard error of the index.
        max_probes: maximum number of probes.
        top: number of largest eigenvalues to compute.
        density: compute the density of all eigenvalues.
        gap: measure the robust generalization gap with the same attack.
        proof: number of weight samples for a PAC-Bayes proof (0 for none); requires a loss without an attack.
        landscape: compute the loss landscape over the inputs or the weights.
        norm: norm of the threat model (default: as trained).
        eps: radius, a number or a fraction like 8/255 (default: as trained).
    """

    kind: ClassVar[str] = "curvature"
    ranges: ClassVar[Ranges] = {"steps": 1, "relative_error": "(0, inf)", "max_probes": 2, "top": 0, "proof": 0}
    split: SplitName = "train"
    points: int | None = 512
    loss: str | None = None
    steps: int = 10
    estimator: Estimator = "auto"
    relative_error: float = 0.05
    max_probes: int = 1000
    top: int = 3
    density: bool = False
    gap: bool = False
    proof: int = 0
    landscape: Literal["input", "weights"] | None = None
    norm: Norm | None = None
    eps: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()

    def resolve(self, subject: Subject) -> Self:
        threat = resolve_threat(subject, self.norm, self.eps)
        loss = loss_name(resolve_loss(subject, self.loss))
        return dataclasses.replace(self, norm=threat.require_convex("norm"), eps=str(threat.eps), loss=loss)

    @property
    def threat(self) -> str:
        """The threat model as text, such as ``linf 8/255``."""
        return f"{self.norm} {self.eps}"


@dataclass(frozen=True, kw_only=True)
class CurvatureResult(Result):
    """Curvature of the loss.

    Args:
        loss: the loss, with its arguments.
        attacked: whether the loss is measured at adversarial inputs.
        mean_loss: mean loss at the points.
        wci: Weight-Curvature Index.
        bound: upper bound of the index.
        weight_norm: norm of all weight matrices.
        root_trace: root of the sum of their traces.
        negative: number of traces that were estimated as negative and count as zero.
        unresolved: weight matrices whose trace is not clearly positive, so that their share of the index is uncertain.
        layers: one entry per weight matrix.
        trace: trace of the whole Hessian.
        estimator: estimator of the traces.
        reason: why this estimator was used.
        probes: number of random vectors per group of points.
        eigenvalues: the largest eigenvalues.
        pac_bayes: estimates of bounds, one entry per posterior.
        proofs: proven bounds, one entry per posterior.
        theorem: the terms of the WCI bound on the gap, at the layerwise variances that minimize it.
        gap: robust generalization gap.
    """

    kind: ClassVar[str] = "curvature"
    version: ClassVar[int] = 2  # 2: every number is checked, the index is bias-corrected, bounds share alpha
    settings: CurvatureSettings
    loss: str
    attacked: bool
    mean_loss: float
    wci: Estimate
    bound: float = math.nan
    weight_norm: float = math.nan
    root_trace: float = math.nan
    negative: int = 0
    unresolved: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    trace: Estimate | None = None
    estimator: str = ""
    reason: str = ""
    probes: int = 0
    eigenvalues: tuple[float, ...] = ()
    pac_bayes: tuple[PACBayesBounds, ...] = ()
    proofs: tuple[PACBayesProof, ...] = ()
    theorem: LayerwiseBound | None = None
    gap: Gap | None = None

    def table(self) -> TextTable:
        values: dict[str, object] = {
            "WCI": self.wci,
            "trace of the Hessian": self.trace,
            "largest eigenvalue": max(self.eigenvalues, default=None),
            "mean loss": self.mean_loss,
            "norm of the weights": self.weight_norm,
        }
        values |= {f"PAC-Bayes bound, {bound.posterior} posterior": bound.kl_inverse for bound in self.pac_bayes}
        values |= {} if self.gap is None else {"robust generalization gap": self.gap.error}
        where = self.settings.threat if self.attacked else "clean inputs"
        rows = [[name, cell(value)] for name, value in values.items()]
        return TextTable(f"{self._title}, {self.loss}, {where}", ["", "value"], rows)

    def landscape(self) -> Landscape | None:
        """Load the loss landscape, or return None if there is none."""
        path = self.file(f"landscape-{self.settings.landscape}.npz")
        return None if path is None else Landscape.load(path)

    def density(self) -> Density | None:
        """Load the density of eigenvalues, or return None if there is none."""
        path = self.file("density.npz")
        return None if path is None else Density.load(path)


@MEASUREMENTS.register("curvature", own_name=False)
class MeasureCurvature(Measurement):
    """Curvature of the loss of a model, layer by layer."""

    settings = CurvatureSettings
    result = CurvatureResult

    def inputs(self, subject: Subject, settings: CurvatureSettings) -> Split:
        return _points(subject, settings.split, settings)

    def depends_on(self, subject: Subject, settings: CurvatureSettings, context: Context) -> tuple[str, ...]:
        """Return digests of the code of a loss from outside Atoll, and of the points of the gap."""
        code = foreign_code([type(resolve_loss(subject, settings.loss))])
        gap = [split_digest(_points(subject, split, settings)) for split in GAP_SPLITS] if settings.gap else []
        return (*code, *gap)

    def measure(self, subject: Subject, settings: CurvatureSettings, context: Context) -> dict[str, Any]:
        stage = partial(_begin, context)
        threat = resolve_threat(subject, settings.norm, settings.eps)
        loss = resolve_loss(subject, settings.loss)
        model = subject.model
        if settings.proof:
            check_provable(model, loss)  # before any work
        attack = PGD(threat, loss.objective or "ce", steps=settings.steps)
        x, y = _tensors(_points(subject, settings.split, settings))
        stage("attack")
        if loss.objective is None:
            risk = EmpiricalRisk(model, loss, x, y)
        else:
            risk = EmpiricalRisk.attacked(model, loss, x, y, attack, seed=settings.seed)
        index = wci(
            risk,
            settings.estimator,
            relative_error=settings.relative_error,
            max_probes=settings.max_probes,
            seed=settings.seed,
            on_progress=stage("traces"),
        )
        fields: dict[str, Any] = {
            "loss": loss_name(loss),
            "attacked": loss.objective is not None,
            "mean_loss": risk.value(),
            "wci": index.index,
            **{name: getattr(index, name) for name in ("bound", "weight_norm", "root_trace", "negative", "unresolved")},
            "layers": tuple(index.layers),
            "trace": index.traces.total,
            **{name: getattr(index.traces, name) for name in ("estimator", "reason", "probes")},
        }
        if settings.top:
            stage("eigenvalues")
            values = top_eigenvalues(risk, settings.top, tolerance=0.01, seed=settings.seed)
            fields["eigenvalues"] = tuple(values.tolist())
        stage("bounds")
        # If Gauss-Newton is valid for the traces, it is also valid for the diagonal.
        is_ggn = index.traces.estimator.endswith("gauss_newton")
        curvature = diagonal(risk, seed=settings.seed) if is_ggn else None
        trace = index.traces.total.value
        fields["pac_bayes"] = tuple(pac_bayes(risk, trace, curvature, seed=settings.seed))
        fields["theorem"] = layerwise_bound(index, n=len(risk), clip=fields["pac_bayes"][0].clip)
        if settings.proof:
            proofs = pac_bayes_proof(risk, trace, curvature, draws=settings.proof, seed=settings.seed)
            fields["proofs"] = tuple(proofs)
        if settings.gap:
            stage("gap")
            train, test = (_tensors(_points(subject, split, settings)) for split in GAP_SPLITS)
            fields["gap"] = robust_gap(model, train, test, attack, seed=settings.seed)
        self._pictures(risk, index, settings, threat.radius, context)
        return fields

    @staticmethod
    def _pictures(
        risk: EmpiricalRisk, index: WCI, settings: CurvatureSettings, radius: float, context: Context
    ) -> None:
        """Save figures and their data."""
        stage = partial(_begin, context)
        pictures: dict[str, WCI | Density | Landscape] = {"layers": index}
        if settings.density:
            stage("density")
            pictures["density"] = density(risk, seed=settings.seed)
        if settings.landscape == "weights":
            pictures["landscape-weights"] = weight_landscape(risk, seed=settings.seed, on_progress=stage("landscape"))
        elif settings.landscape == "input":
            pictures["landscape-input"] = input_landscape(
                risk.model,
                risk.x[:INPUTS_SHOWN],
                risk.y[:INPUTS_SHOWN],
                radius=2 * radius,
                seed=settings.seed,
                on_progress=stage("landscape"),
            )
        if context.folder is None or not is_main():
            return
        context.folder.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            write_figure(context.folder / f"{name}.png", picture.plot())
            if not isinstance(picture, WCI):
                picture.save(context.folder / f"{name}.npz")


def _begin(context: Context, stage: str) -> OnProgress:
    """Report the next stage of the measurement and return a callback for its progress."""
    context.on_progress(stage, 0, 1)
    return partial(context.on_progress, stage)


def loss_name(loss: Loss) -> str:
    """Return the call that creates a loss; ``resolve_loss`` parses it.

    >>> from atoll.losses import TRADES
    >>> loss_name(TRADES(lambda_t=3))
    'TRADES(lambda_t=3)'
    """
    path = class_path(type(loss))
    return repr(loss) if path.startswith("atoll.") else f"{path}({repr(loss).partition('(')[2]}"


def resolve_loss(subject: Subject, name: str | None) -> Loss:
    """Return the loss of the settings, or the training loss of the subject."""
    if name is None:
        if subject.loss is None:
            raise InputError("loss: the training loss of the model is not known; specify a loss")
        return subject.loss
    if subject.loss is not None and name == loss_name(subject.loss):
        return subject.loss
    path, arguments = _parse_call(name)
    loss: Loss = build_part(Loss, {"class_path": path, "init_args": arguments}, "loss", trust=True)
    return loss


def _parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``TRADES(lambda_t=3)`` into name and literal arguments, without executing anything."""
    name, parenthesis, rest = text.partition("(")
    try:
        call = ast.parse(f"f({rest}" if parenthesis else "f()", mode="eval").body
        if isinstance(call, ast.Call) and not call.args:
            return name, {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    except (SyntaxError, ValueError):
        pass
    raise InputError(f"loss: expected a name or a call such as TRADES(lambda_t=3), got {text!r}")


def _points(subject: Subject, split: str, settings: CurvatureSettings) -> Split:
    """Return random points of a split."""
    points = select(subject.data, split, None)
    return SubSplit(points, sample_rows(points, settings.points or len(points), "curvature", split, settings.seed))


def _tensors(split: Split) -> tuple[Tensor, Tensor]:
    return to_float(split.fetch(torch.arange(len(split)))), split.labels
