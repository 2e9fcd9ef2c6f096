"""Turn a model from elsewhere into a run: load, adapt, check, and store it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from atoll.adopt.onnx_model import OnnxModel, check_memory
from atoll.adopt.sources import Source, load_source
from atoll.adopt.weights import Normalization
from atoll.config import Builder
from atoll.data.base import Data
from atoll.errors import CaptureError, InputError, RecipeError
from atoll.health import Finding, check_data, check_model, scan_data
from atoll.health.measure import POINTS, draw_points
from atoll.models.adapted import Adapted, Conventions
from atoll.runs.adopted import check_empty, store_run
from atoll.runs.data_record import DataRecord
from atoll.runs.run import Run
from atoll.stats import Accuracy
from atoll.threat import ThreatModel


@dataclass(frozen=True)
class Adoption:
    """The result of ``adopt``.

    Args:
        run: the run.
        accuracy: clean accuracy on the test points that were used.
        findings: what looks wrong, and the option that would fix it.
        images: number of training and test images, all of which can be read.
        notes: how the images were divided, and what was taken from the files of the model.
    """

    run: Run
    accuracy: Accuracy
    findings: tuple[Finding, ...]
    images: Mapping[str, int]
    notes: tuple[str, ...]


def data_section(data: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The data section of a recipe for a name of a data set, a folder of classes, or a ``.csv`` or ``.npz`` file.

    >>> data_section("photos.npz")
    {'class_path': 'Npz', 'init_args': {'path': 'photos.npz', 'validation': 0}}
    """
    path = Path(data)
    unused = {"validation": 0}  # nothing is trained, and a few photos may be too few for a validation set
    for suffix, name in ((".npz", "Npz"), (".csv", "ImageCsv")):
        if path.suffix.lower() == suffix:
            return {"class_path": name, "init_args": {"path": data, **unused, **(arguments or {})}}
    if path.is_dir():
        return {"class_path": "ImageFolder", "init_args": {"root": data, **unused, **(arguments or {})}}
    return {"class_path": data, "init_args": dict(arguments or {})}


def adopt(
    model: str | nn.Module,
    data: str,
    *,
    out: Path | str,
    conventions: Conventions | Mapping[str, Any] | None = None,
    weights: Path | str | None = None,
    model_arguments: Mapping[str, Any] | None = None,
    data_arguments: Mapping[str, Any] | None = None,
    threat: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> Adoption:
    """Adopt a model from elsewhere, so that every command and the report work on it.

    The run stores the captured graph as data and the weights as safetensors.  Opening it later imports no foreign
    class and runs no foreign code.

    Args:
        model: a module, or what ``load_source`` accepts.
        data: name of a data set, folder of classes, or ``.csv`` or ``.npz`` file.
        out: folder of the run.
        conventions: how the model expects its inputs, and what it returns.  If only some are given, by name, the
            model's files determine the normalization.
        weights: file of weights, for models from Python code and timm.
        model_arguments: arguments of the function or class that builds the model.
        data_arguments: arguments of the data set.
        threat: norm and eps for later attacks, as in a recipe.
        trust: whether to load files that can execute code.
    """
    check_empty(Path(out))
    builder = Builder(trust=True)
    section = data_section(data, data_arguments)
    data_set, data_tree = builder.build(Data, section, "data")
    _, threat_tree = builder.build(ThreatModel, dict(threat or {}), "threat")
    if builder.errors:
        raise RecipeError("; ".join(builder.errors))
    threat_tree.pop("bounds", None)
    if isinstance(model, str):
        source = load_source(model, weights=weights, arguments=model_arguments, trust=trust)
        source = dataclasses.replace(source, module=source.module.eval())  # code builds it in training mode
    else:
        source = Source(model, "module", {})
    record = DataRecord.of(data_set)  # lists all images that cannot be read
    if isinstance(source.module, OnnxModel):
        check_memory(source.module, data_set.shape)
    chosen, notes = choose_conventions(conventions, source.normalization)
    adapted = Adapted(source.module, chosen, data_set.shape[0])
    points = draw_points(data_set.test, POINTS, 0)
    accuracy, findings = check_model(adapted, data_set, points, conventions=chosen)
    findings += check_data(scan_data(data_set), data_set.classes)
    origin = {
        "model": model if isinstance(model, str) else type(model).__name__,
        "kind": source.kind,
        "files": dict(source.files),
        "conventions": dataclasses.asdict(chosen),
        "notes": notes,
        "accuracy": accuracy.to_json(),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    try:
        sections = {"data": data_tree, "threat": threat_tree}
        run = store_run(adapted, data_set, out, sections=sections, origin=origin, record=record)
    except CaptureError as error:
        raise CaptureError("; ".join([str(error), *map(str, findings)])) from error
    return Adoption(run, accuracy, tuple(findings), record.fingerprint.points, (*data_set.notes, *notes))


def choose_conventions(
    given: Conventions | Mapping[str, Any] | None, normalization: Normalization | None
) -> tuple[Conventions, list[str]]:
    """Return the given conventions, with the normalization of the model's files if none is given, and notes about it.

    >>> choose_conventions({"channels": "bgr"}, Normalization((0.5,), (0.25,), "weights.pt"))[1]
    ['normalization from weights.pt: mean 0.5, std 0.25; --mean and --std replace it']
    """
    options = dataclasses.asdict(given) if isinstance(given, Conventions) else dict(given or {})
    if normalization is None:
        return Conventions(**options), []
    if options.keys() & {"mean", "std", "range"}:
        return Conventions(**options), [f"the normalization from {normalization.source} is not used: {normalization}"]
    if max(map(abs, normalization.mean)) > 2 and normalization.range == (0.0, 1.0):
        raise InputError(
            f"the normalization from {normalization.source} does not fit images in [0, 1] ({normalization}); give"
            " --range 0,255, --mean and --std"
        )
    options |= {name: getattr(normalization, name) for name in ("mean", "std", "range")}
    note = f"normalization from {normalization.source}: {normalization}; --mean and --std replace it"
    return Conventions(**options), [note]
