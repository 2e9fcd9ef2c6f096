"""Turn a model from elsewhere into a run: load, adapt, check, and store it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.adopt.checks import Finding, check_model
from atoll.adopt.preprocess import Adapted, Conventions
from atoll.adopt.sources import load_source
from atoll.config import Builder
from atoll.data.base import Data
from atoll.errors import CaptureError, RecipeError
from atoll.modules import evaluation_mode
from atoll.runs.adopted import check_empty, store_run
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
    """

    run: Run
    accuracy: Accuracy
    findings: tuple[Finding, ...]


def data_section(data: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The data section of a recipe for a name of a data set, a folder of classes, or an ``.npz`` file.

    >>> data_section("photos.npz")
    {'class_path': 'Npz', 'init_args': {'path': 'photos.npz'}}
    """
    path = Path(data)
    if path.suffix == ".npz":
        return {"class_path": "Npz", "init_args": {"path": data, **(arguments or {})}}
    if path.is_dir():
        return {"class_path": "ImageFolder", "init_args": {"root": data, **(arguments or {})}}
    return {"class_path": data, "init_args": dict(arguments or {})}


def adopt(
    model: str | nn.Module,
    data: str,
    *,
    out: Path | str,
    conventions: Conventions | None = None,
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
        data: name of a data set, folder of classes, or ``.npz`` file.
        out: folder of the run.
        conventions: how the model expects its inputs, and what it returns.
        weights: file of weights, for models from Python code and timm.
        model_arguments: arguments of the function or class that builds the model.
        data_arguments: arguments of the data set.
        threat: norm and eps for later attacks, as in a recipe.
        trust: whether to load files that can execute code.
    """
    check_empty(Path(out))
    conventions = conventions or Conventions()
    builder = Builder(trust=True)
    section = data_section(data, data_arguments)
    data_set, data_tree = builder.build(Data, section, "data")
    _, threat_tree = builder.build(ThreatModel, dict(threat or {}), "threat")
    if builder.errors:
        raise RecipeError("; ".join(builder.errors))
    threat_tree.pop("bounds", None)
    if isinstance(model, str):
        source = load_source(model, weights=weights, arguments=model_arguments, trust=trust)
        module, kind, files = source.module, source.kind, dict(source.files)
    else:
        module, kind, files = model, "module", {}
    adapted = Adapted(module, conventions, data_set.shape[0])
    with evaluation_mode(adapted), torch.no_grad():
        accuracy, findings = check_model(adapted, data_set)
    origin = {
        "model": model if isinstance(model, str) else type(model).__name__,
        "kind": kind,
        "files": files,
        "conventions": dataclasses.asdict(conventions),
        "accuracy": accuracy.to_json(),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    try:
        run = store_run(adapted, data_set, out, sections={"data": data_tree, "threat": threat_tree}, origin=origin)
    except CaptureError as error:
        raise CaptureError("; ".join([str(error), *map(str, findings)])) from error
    return Adoption(run, accuracy, tuple(findings))
