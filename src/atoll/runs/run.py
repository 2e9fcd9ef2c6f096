"""A run: a folder with a recipe, checkpoints, metrics and results.

Contents of the folder::

    recipe.yaml        the recipe with all defaults; `atoll train recipe.yaml` repeats the run
    environment.json   versions, machine, command
    metrics.jsonl      one record per line
    tensorboard/
    checkpoints/       one folder per checkpoint
    data.json          fingerprint of the data, and the folder in which the run was started
    index.json         last and best checkpoints, and whether training is finished
    results/           all results, as KIND/DIGEST/result.json
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from atoll.attacks.measure import AttackResult, AttackSettings
from atoll.certify import GloRo, NearestCentroid, certifier_for
from atoll.certify.certificate import Certificate
from atoll.certify.export import export
from atoll.certify.measure import CertifyResult, CertifySettings
from atoll.certify.norms import BUDGET
from atoll.certify.proof_file import ProofFile, write_proof
from atoll.certify.propagation import LayerBound
from atoll.config import build_part, from_plain
from atoll.curvature.measure import CurvatureResult, CurvatureSettings
from atoll.data.base import Data, to_float
from atoll.display import Displayed, TextTable
from atoll.distributed import default_device, process_group
from atoll.errors import AtollError, CheckpointError, DamagedError, InputError, RecipeError, ResultError
from atoll.explain.measure import ExplainResult, ExplainSettings
from atoll.export import Exported, Metadata, export_model
from atoll.files import check_output, read_record
from atoll.graph import Digest
from atoll.graph.classifier import StoredClassifier
from atoll.health import HealthResult, HealthSettings
from atoll.losses.base import Loss
from atoll.measure import MEASUREMENTS, OnProgress, Result, Settings, load_result, measure, select
from atoll.models import Classifier
from atoll.models.adapted import Conventions
from atoll.progress import show_progress
from atoll.registry import closest
from atoll.runs import legacy
from atoll.runs.data_record import DataRecord, locate, relocate
from atoll.runs.predict import Prediction, predict
from atoll.runs.recipe import ModelFactory, read_recipe_file
from atoll.stats import Accuracy, percent
from atoll.subject import Origin, Subject
from atoll.threat import ThreatModel
from atoll.training.checkpoint import Checkpoint, Checkpoints, load_checkpoint, load_weights
from atoll.training.observers import read_metrics

Which = Literal["best", "last"] | int

# The entries of ``index.json`` and their types.
INDEX: Mapping[str, type] = {"last": int, "best": dict, "epoch": int, "finished": bool, "selected_on": str}

FEW_POINTS = 100
"""Below this number of points, the standard error of an accuracy may exceed 5 percentage points."""


@dataclass(frozen=True)
class TestRow:
    """Test results of one checkpoint with one set of weights."""

    __test__ = False  # so that pytest does not collect this class

    checkpoint: str
    weights: str
    attacked: AttackResult
    certified: CertifyResult | None = None

    @property
    def epoch(self) -> int | None:
        return self.attacked.subject.origin.epoch

    @property
    def clean(self) -> Accuracy:
        return self.attacked.clean

    @property
    def robust(self) -> Accuracy | None:
        """Accuracy under attack; None without an attack."""
        return self.attacked.robust if self.attacked.attacks else None

    @property
    def verified(self) -> Accuracy | None:
        """Verified accuracy at the radius of training; None without certification."""
        return self.certified.verified[0].accuracy if self.certified else None

    def to_json(self) -> dict[str, Any]:
        accuracies = {"clean": self.clean, "robust": self.robust, "vra": self.verified}
        return {name: accuracy.to_json() for name, accuracy in accuracies.items() if accuracy is not None}


@dataclass(frozen=True)
class Run(Displayed):
    """The folder of a run.  ``print`` and notebooks show the test accuracy of its checkpoints.

    Opening a run from another user does not execute their code: only classes of Atoll are built, unless ``trust`` is
    set.  ``locations`` says where the data is now if it was moved, such as ``{"root": "photos"}``.
    """

    folder: Path
    trust: bool = False
    locations: Mapping[str, Path | str] = field(default_factory=dict, compare=False)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe as plain data."""
        if not os.path.lexists(self.folder / "recipe.yaml"):
            raise CheckpointError(f"{self.folder} is not a run: it has no recipe.yaml")
        try:
            tree = read_recipe_file(self.folder / "recipe.yaml", inside=self.folder)
        except RecipeError as error:
            raise CheckpointError(f"{self.folder} is not a run: {error}") from None
        if not isinstance(tree, dict):
            raise CheckpointError(f"{self.folder}/recipe.yaml: expected a mapping of sections")
        return tree

    def _section(self, name: str) -> Any:
        """Return a section of the recipe as plain data."""
        if name not in self.recipe:
            raise CheckpointError(f"{self.folder}/recipe.yaml: {name}: this section is required")
        return self.recipe[name]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of ``metrics.jsonl``; raises a DamagedError if some are damaged or missing."""
        records, faults = read_metrics(self.folder / "metrics.jsonl", self.index.get("epoch", 0))
        if faults:
            raise DamagedError(f"{self.folder}/metrics.jsonl: {'; '.join(faults)}")
        return records

    @cached_property
    def data(self) -> Data:
        record = DataRecord.load(self.folder)
        tree = self._section("data") if record is None else locate(self._section("data"), record.folder)
        data: Data = build_part(Data, relocate(tree, self.locations), "data", trust=self.trust)
        return data

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; runs store them, so the data need not be there."""
        record = DataRecord.load(self.folder)
        return record.classes if record is not None and record.classes else self.data.classes

    @property
    def threat(self) -> ThreatModel:
        """The threat model of training."""
        threat: ThreatModel = build_part(ThreatModel, self._section("threat"), "threat", trust=self.trust)
        return ThreatModel(threat.norm, threat.eps, self.data.bounds)

    @property
    def loss(self) -> Loss:
        """The training loss."""
        loss: Loss = build_part(Loss, self._section("loss"), "loss", trust=self.trust)
        return loss

    @cached_property
    def conventions(self) -> Conventions | None:
        """How an adopted model was adapted; None if Atoll trained the model."""
        path = self.folder / "adopted.json"
        if not path.exists():
            return None
        try:
            return from_plain(Conventions, read_record(path, "an adopted model", inside=self.folder)["conventions"])
        except (DamagedError, KeyError, ResultError):
            raise CheckpointError(f"{path} is damaged; adopt the model again") from None

    # --- checkpoints --------------------------------------------------------------------------------------------

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder / "checkpoints")

    @cached_property
    def _digests(self) -> dict[str, Digest]:
        """Cache of digests of the models of the run, by weights file."""
        return {}

    @property
    def index(self) -> dict[str, Any]:
        """The last and best checkpoints as plain data; empty if nothing is saved yet."""
        path = self.folder / "index.json"
        try:
            index: dict[str, Any] = read_record(path, "the checkpoints", inside=self.folder, old=True)
            if not all(isinstance(index.get(name, kind()), kind) for name, kind in INDEX.items()):
                raise DamagedError(f"{path} cannot be read: expected other types")
            if not index.keys() >= {"last", "best"} or not all(
                isinstance(step, int) for step in index["best"].values()
            ):
                raise DamagedError(f"{path} cannot be read: expected the last and the best steps")
        except FileNotFoundError:
            return {}
        except DamagedError as error:
            adopted = (self.folder / "adopted.json").exists()
            advice = "adopt the model again" if adopted else "resume the training to write it again"
            raise CheckpointError(f"{error}; {advice}") from None
        return index

    @property
    def weight_sets(self) -> list[str]:
        """Names of the available weights: ``raw`` and averages."""
        return list(self.index.get("best", ())) or ["raw"]

    @property
    def is_finished(self) -> bool:
        """Whether training is finished."""
        return bool(self.index.get("finished")) or (self.folder / "result.json").exists()

    def step(self, which: Which = "best", weights: str = "raw") -> int:
        """Return the step of a checkpoint; the last one if no best checkpoint was selected."""
        check_which(which)
        if not (steps := self._checkpoints.steps()):
            raise CheckpointError(f"{self.folder} has no checkpoints")
        if isinstance(which, int):
            if which not in steps:
                raise CheckpointError(
                    f"{self.folder} has no checkpoint at step {which}; expected one of {', '.join(map(str, steps))}"
                )
            return which
        step = self.index.get("best", {}).get(weights)
        return step if which == "best" and step in steps else steps[-1]

    def selection_warning(self, which: Which = "best", weights: str = "raw") -> str:
        """Return a warning if the best checkpoint was selected on few points and may be best by chance, or ""."""
        record, best = DataRecord.load(self.folder), self.index.get("best", {})
        if which != "best" or record is None or self.index.get("selected_on") != "validation":
            return ""
        if best.get(weights) not in self._checkpoints.steps() or not 0 < record.validation < FEW_POINTS:
            return ""
        return (
            f"the best checkpoint was selected on only {record.validation} validation points, so it may be best by"
            " chance; use the last one (--checkpoint last), or train with a larger data.validation"
        )

    def checkpoint_path(self, which: Which = "best", weights: str = "raw") -> Path:
        """Return the folder of a checkpoint."""
        return self._checkpoints.path(self.step(which, weights))

    def checkpoint(self, which: Which = "best", weights: str = "raw") -> Checkpoint:
        """Load the best checkpoint, the last one, or that of a step."""
        return load_checkpoint(self.checkpoint_path(which, weights), with_training=False)

    def model(self, which: Which = "best", weights: str = "raw") -> Classifier:
        """Load the trained model in evaluation mode; ``weights`` may be the name of an average (``swa``)."""
        path = self.checkpoint_path(which, weights)
        return model_from(load_checkpoint(path, with_training=False), str(path), weights=weights, trust=self.trust)

    # --- measurements -------------------------------------------------------------------------------------------

    def subject(self, checkpoint: Which = "best", weights: str = "raw") -> Subject:
        """Load the model of a checkpoint with everything that measurements need."""
        path = self.checkpoint_path(checkpoint, weights)
        saved = load_checkpoint(path, with_training=False)
        origin = Origin(
            run=self.folder.resolve().name,
            step=self.step(checkpoint, weights),
            epoch=saved.about.get("epoch"),
            weights=weights,
            file=saved.files.get("model" if weights == "raw" else weights, ""),
        )
        model = model_from(saved, str(path), weights=weights, trust=self.trust)
        return Subject(
            model, self.data, self.threat, self.loss, origin, self.trust, self.conventions, digests=self._digests
        )

    def measure(
        self,
        settings: Settings,
        *,
        checkpoint: Which = "best",
        weights: str = "raw",
        restart: bool = False,
        on_progress: OnProgress | None = None,
        progress: bool = False,
    ) -> Any:
        """Measure a checkpoint, or load the stored result; an interrupted measurement resumes.

        Args:
            settings: settings of the measurement, such as ``AttackSettings(attacks="PGD-20")``.
            checkpoint: best, last, or a step.
            weights: raw, or the name of an average such as swa.
            restart: discard saved progress and a finished result.
            on_progress: called with the name of the current task, the units done, and the total.
            progress: show a progress bar, in terminals and notebooks.
        """
        bar = show_progress(settings.kind) if progress and on_progress is None else nullcontext(on_progress)
        with process_group(), bar as report:
            return measure(
                self.subject(checkpoint, weights),
                settings,
                self.folder / "results",
                restart=restart,
                on_progress=report,
                open_subject=lambda path: open_run(path, trust=self.trust).subject(),
            )

    def attack(
        self,
        attacks: str = "standard",
        *,
        checkpoint: Which = "best",
        weights: str = "raw",
        progress: bool = False,
        **settings: Any,
    ) -> AttackResult:
        """Measure robust accuracy; see ``AttackSettings``, and ``measure`` for other arguments."""
        question = AttackSettings(attacks=attacks, **settings)
        result: AttackResult = self.measure(question, checkpoint=checkpoint, weights=weights, progress=progress)
        return result

    def certify(
        self, *, checkpoint: Which = "best", weights: str = "raw", progress: bool = False, **settings: Any
    ) -> CertifyResult:
        """Measure certified radii; see ``CertifySettings``, and ``measure`` for other arguments."""
        question = CertifySettings(**settings)
        result: CertifyResult = self.measure(question, checkpoint=checkpoint, weights=weights, progress=progress)
        return result

    def curvature(
        self, *, checkpoint: Which = "best", weights: str = "raw", progress: bool = False, **settings: Any
    ) -> CurvatureResult:
        """Measure traces, WCI and bounds; see ``CurvatureSettings``, and ``measure`` for other arguments."""
        question = CurvatureSettings(**settings)
        result: CurvatureResult = self.measure(question, checkpoint=checkpoint, weights=weights, progress=progress)
        return result

    def explain(
        self, *, checkpoint: Which = "best", weights: str = "raw", progress: bool = False, **settings: Any
    ) -> ExplainResult:
        """Measure attributions and their faithfulness; see ``ExplainSettings``, and ``measure`` for other arguments."""
        question = ExplainSettings(**settings)
        result: ExplainResult = self.measure(question, checkpoint=checkpoint, weights=weights, progress=progress)
        return result

    def health(
        self, *, checkpoint: Which = "best", weights: str = "raw", progress: bool = False, **settings: Any
    ) -> HealthResult:
        """Check data and model for defects; see ``HealthSettings``, and ``measure`` for other arguments."""
        question = HealthSettings(**settings)
        result: HealthResult = self.measure(question, checkpoint=checkpoint, weights=weights, progress=progress)
        return result

    def predict(
        self,
        *images: Path | str,
        top: int = 3,
        eps: str | None = None,
        checkpoint: Which = "best",
        weights: str = "raw",
    ) -> list[Prediction]:
        """Predict the classes of image files; the predictions of a certified run have certified radii.

        Files are decoded like the images of the run's data set, which itself need not be there.

        Args:
            images: image files, or folders of images.
            top: number of classes per image.
            eps: l2 radius below which a certified run abstains (default: as trained).
            checkpoint: best, last, or a step.
            weights: raw, or the name of an average such as swa.
        """
        if eps is not None and not self.is_certified:
            raise InputError("eps: this run was not trained for certification, so it has no certified radii")
        device = default_device()
        model = self.model(checkpoint, weights).to(device)
        radius = self.threat.radius if eps is None else ThreatModel("l2", eps).radius
        certifier = certifier_for(model.double(), radii=[radius]) if self.is_certified else None
        return predict(model, images, self.data, self.classes, top=top, certifier=certifier, eps=radius, device=device)

    def export(
        self,
        path: Path | str,
        *,
        certify: bool | None = None,
        eps: str | None = None,
        eta: float = 0.0,
        points: int = 1000,
        budget: float = BUDGET,
        checkpoint: Which = "best",
        weights: str = "raw",
        on_layer: Callable[[LayerBound], None] | None = None,
    ) -> Exported:
        """Write the model to an ONNX file and compare it with the original on test points.

        The file returns ``logits`` and ``label``, with certificates also ``prediction`` (-1 if it abstains) and
        ``radius``.  Its metadata name the classes and say how to prepare images.

        Args:
            path: the file.
            certify: write certificates (default: if the run was trained for them, or eps or eta is given).
            eps: l2 radius below which the file abstains (default: as trained).
            eta: parameter of an eta layer, for Centroid Nets only.
            points: number of test points for the comparison.
            budget: largest number of operations for the proof of a layer.
            checkpoint: best, last, or a step.
            weights: raw, or the name of an average such as swa.
            on_layer: called after the proof of each layer.
        """
        if points < 1:
            raise InputError(f"points: expected at least 1, got {points}")
        check_output(Path(path), "an ONNX file")
        if certify is None:
            certify = self.is_certified or eps is not None or eta != 0
        elif not certify and (eps is not None or eta):
            raise InputError("certify: eps and eta need certificates")
        subject = self.subject(checkpoint, weights)
        radius = CertifySettings(eps=eps).resolve(subject).radii[0] if certify else None
        metadata, split = Metadata.of(subject), select(subject.data, "test", points)
        x = to_float(split.fetch(torch.arange(len(split))))
        if radius is None:
            exported = export_model(subject.model, x, Path(path), metadata=metadata)
        else:
            certifier = certifier_for(subject.model.double(), budget=budget, on_layer=on_layer, eta=eta)
            exported = export(certifier, x, Path(path), eps=radius, metadata=metadata)
        return dataclasses.replace(exported, warning=self.selection_warning(checkpoint, weights))

    def write_proof(self, path: Path, result: CertifyResult) -> ProofFile:
        """Write the certificates of a result, with their witnesses, to a file that ``atoll.checker`` can verify.

        Args:
            path: the file.
            result: a result of ``certify``, stored in this run.
        """
        settings, origin = result.settings, result.subject.origin
        if result.is_probabilistic or result.folder is None or origin.step is None:
            raise InputError("proof: expected a stored result with proofs, not one of randomized smoothing")
        check_output(path, "a proof file")
        subject = self.subject(origin.step, origin.weights)
        model = copy.deepcopy(subject.model).to(getattr(torch, settings.precision or "float64"))
        certifier = certifier_for(model, budget=settings.budget, radii=settings.radii, eta=settings.eta)
        assert isinstance(certifier, GloRo | NearestCentroid)
        file = result.file("certificates.safetensors")
        if file is None:
            raise ResultError(f"{result.folder} has no certificates; measure them again with --restart")
        stored = load_file(file)
        split = select(subject.data, settings.split, settings.points)
        x = to_float(split.fetch(torch.arange(len(split))))
        return write_proof(Path(path), certifier, x, Certificate(stored["prediction"], stored["radius"]))

    def results(self, kind: str | None = None) -> list[Result]:
        """Return all results of this run, oldest first; ``stale`` says why a result is out of date."""
        if kind is not None:
            MEASUREMENTS.resolve(kind, trust=False)  # a wrong name must not look like a run without results
        return [result for result in self.read_results()[0] if kind in (None, result.kind)]

    def read_results(self) -> tuple[list[Result], list[str]]:
        """Return all results, and the reasons why some cannot be read."""
        results, errors = [], []
        for folder in sorted((self.folder / "results").glob("*/*")):
            if not os.path.lexists(folder / "result.json"):  # not finished
                continue
            try:
                results.append(load_result(folder))
            except ResultError as error:
                errors.append(str(error))
        older, more = legacy.read_results(self.folder)
        results = [
            dataclasses.replace(result, stale=self._stale(result.subject.origin)) for result in [*older, *results]
        ]
        results.sort(key=lambda result: result.environment.date if result.environment else "")
        return results, [*errors, *more]

    def _stale(self, origin: Origin) -> str:
        """Return why a result of this origin does not describe current weights of the run, or ""."""
        if origin.step is None:
            return ""
        if origin.step not in self._files:
            return f"measured at step {origin.step}, whose checkpoint was deleted"
        file = self._files[origin.step].get("model" if origin.weights == "raw" else origin.weights)
        if file is None:
            return f"measured at step {origin.step}, whose checkpoint is damaged"
        changed = origin.file not in ("", file)
        return f"measured with other weights than those now saved at step {origin.step}" if changed else ""

    @cached_property
    def _files(self) -> dict[int, dict[str, str]]:
        """Digests of the weights of every checkpoint."""
        return {step: self._checkpoints.files(step) for step in self._checkpoints.steps()}

    def checkpoint_name(self, origin: Origin) -> str:
        """Return ``best``, ``last``, both, or the step of the checkpoint that a result describes."""
        names = [which for which in ("best", "last") if origin.step == self.step(which, origin.weights)]
        return " and ".join(names) or f"step {origin.step}"

    # --- the test at the end of training ------------------------------------------------------------------------

    @property
    def test_settings(self) -> AttackSettings:
        """Settings of the final test of the training."""
        trainer = self.recipe.get("trainer", {})
        steps = trainer.get("test_steps", 20) if isinstance(trainer, Mapping) else trainer
        if not isinstance(steps, int):  # it becomes part of a name, and names can refer to code
            raise CheckpointError(f"{self.folder}/recipe.yaml: trainer.test_steps: expected an integer, got {steps!r}")
        return AttackSettings(attacks=f"PGD-{steps}" if steps else "none")

    @property
    def is_certified(self) -> bool:
        """Whether the run trains certified radii."""
        return self.loss.certifies

    def tests(self) -> list[TestRow]:
        """Return the stored test results of the best and the last checkpoint."""
        settings = dataclasses.replace(self.test_settings, norm=self.threat.norm, eps=str(self.threat.eps))
        proof = CertifySettings(attack=False, eps=str(self.threat.eps), precision="float64")
        results = [result for result in self.results() if not result.stale]
        rows = []
        for weights in self.weight_sets:
            for which in ("best", "last"):
                here = [
                    r for r in results
                    if (r.subject.origin.step, r.subject.origin.weights) == (self.step(which, weights), weights)
                ]  # fmt: skip
                attacked = [r for r in here if isinstance(r, AttackResult) and r.settings == settings]
                certified = [r for r in here if isinstance(r, CertifyResult) and r.settings == proof]
                if attacked:
                    rows.append(TestRow(which, weights, attacked[-1], certified[-1] if certified else None))
        return rows

    def table(self) -> TextTable:
        """Test accuracy of the best and the last checkpoint."""
        parts = [_class_name(self.recipe.get(part)) for part in ("model", "data", "loss")]
        title = f"{self.folder.name}: {parts[0]} on {parts[1]}, trained with {parts[2]}"
        notes = [] if self.is_finished else ["training is not finished"]
        try:
            tests, attack = self.tests(), self.test_settings.attacks
        except AtollError as error:  # its data or classes cannot be opened
            return TextTable(title, [], [], [*notes, str(error)])
        certified = any(row.certified for row in tests)
        rows = []
        for row in tests:
            name = row.checkpoint if row.weights == "raw" else f"{row.checkpoint} {row.weights}"
            numbers = [row.clean, row.robust, *([row.verified] if certified else [])]
            texts = ["-" if number is None else percent(number) for number in numbers]
            rows.append([name, "-" if row.epoch is None else str(row.epoch), *texts])
        columns = ["checkpoint", "epoch", "clean", f"robust ({attack})", *(["verified"] if certified else [])]
        if self.index.get("selected_on") == "test":
            notes.append("best was selected on the test set")
        warning = self.selection_warning()
        return TextTable(f"{title}; test accuracy in %", columns, rows, [*notes, *([warning] if warning else [])])


def _class_name(part: Any) -> str:
    """The class that a section of a recipe names."""
    path = part.get("class_path") if isinstance(part, Mapping) else part
    return re.split(r"[.:]", str(path))[-1]


def model_from(checkpoint: Checkpoint, source: str, *, weights: str = "raw", trust: bool = False) -> Classifier:
    """Rebuild the model of a checkpoint and load its weights."""
    about = checkpoint.about
    if "recipe" not in about:
        raise CheckpointError(f"{source} does not contain a recipe; build the model yourself and use load_weights")
    _check_about(about, source)
    tree = about["recipe"]["model"]
    if "pretrained" in tree["init_args"]:  # the weights are in the checkpoint, so do not download any
        tree = {**tree, "init_args": tree["init_args"] | {"pretrained": False}}
    factory: ModelFactory
    if "graph" in about:  # an adopted model
        factory = partial(StoredClassifier, graph=about["graph"])
    else:
        factory = build_part(ModelFactory, tree, "model", trust=trust)
    with torch.random.fork_rng(devices=[]):
        bounds = tuple(about["bounds"]) if about["bounds"] else None
        try:
            model = factory(tuple(about["input_shape"]), about["num_classes"], bounds=bounds)  # type: ignore[call-arg]
        except (AtollError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise CheckpointError(f"{source} does not describe a model: {error}") from None
    load_weights(model, checkpoint.weights(weights), source)
    return model.eval()


def _check_about(about: Mapping[str, Any], source: str) -> None:
    """Raise a CheckpointError if a checkpoint does not describe a model."""

    def expect(condition: bool, name: str, what: str) -> None:
        if not condition:
            raise CheckpointError(f"{source}/checkpoint.json: {name}: expected {what}")

    model = about["recipe"].get("model") if isinstance(about["recipe"], Mapping) else None
    expect(isinstance(model, Mapping) and isinstance(model.get("init_args"), Mapping), "model", "a class and arguments")
    shape, bounds = about.get("input_shape"), about.get("bounds")
    expect(isinstance(shape, list) and all(_is_count(size) for size in shape), "input_shape", "a list of sizes")
    expect(_is_count(about.get("num_classes")), "num_classes", "a number of classes")
    numbers = isinstance(bounds, list) and len(bounds) == 2 and all(isinstance(end, int | float) for end in bounds)
    expect(numbers or bounds is None, "bounds", "two numbers or null")
    for name in ("step", "epoch"):
        expect(about.get(name) is None or isinstance(about[name], int), name, "an integer")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_which(which: object, name: str = "checkpoint") -> None:
    """Refuse what does not name a checkpoint.

    >>> check_which("bset")
    Traceback (most recent call last):
    atoll.errors.InputError: checkpoint: expected best, last or a step, got 'bset'; did you mean best?
    """
    if isinstance(which, int) or which in ("best", "last"):
        return
    close = closest(str(which), ("best", "last"))
    more = f"; did you mean {close[0]}?" if close else ""
    raise InputError(f"{name}: expected best, last or a step, got {which!r}{more}")


def _runs_in(folder: Path) -> list[str]:
    """Names of the runs that are directly in a folder."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if (entry / "recipe.yaml").is_file())
    except OSError:
        return []


def open_run(path: Path | str, *, trust: bool = False, data: Mapping[str, Path | str] | None = None) -> Run:
    """Open the run in a folder; raises a CheckpointError if it is not a run.

    Args:
        path: the folder.
        trust: whether to import classes from outside Atoll that the run refers to.
        data: where the data is now if it was moved, such as ``{"root": "photos"}``.
    """
    folder = Path(path)
    if not folder.is_dir():
        close = closest(folder.name, _runs_in(folder.parent))
        names = " or ".join(str(folder.with_name(name)) for name in close)
        raise CheckpointError(
            f"{folder} is not a run; {f'did you mean {names}?' if names else 'expected a folder with a recipe.yaml'}"
        )
    if not (folder / "recipe.yaml").exists() and (inside := _runs_in(folder)):
        raise CheckpointError(f"{folder} is not a run; choose one in it, such as {folder / inside[0]}")
    run = Run(folder, trust, data or {})
    _ = run.recipe
    return run
