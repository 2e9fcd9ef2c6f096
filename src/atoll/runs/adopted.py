"""Runs of models that Atoll did not train: the captured graph as data, and weights as safetensors."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.data.base import Data
from atoll.errors import AtollError, RecipeError
from atoll.files import remove_stale, sync, temporary_path, write_record
from atoll.graph.classifier import StoredClassifier, classifier_state
from atoll.graph.stored import store_graph
from atoll.runs.data_record import DataRecord
from atoll.runs.recipe import DEFAULTS, write_recipe
from atoll.runs.run import Run
from atoll.runs.train import environment
from atoll.training.checkpoint import Checkpoint, Checkpoints


def check_empty(folder: Path) -> None:
    """Raise a RecipeError if a run would overwrite something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"{folder} already exists; choose another folder")


def store_run(
    module: nn.Module,
    data: Data,
    out: Path | str,
    *,
    sections: Mapping[str, Any],
    origin: Mapping[str, Any],
    record: DataRecord | None = None,
) -> Run:
    """Write a model from elsewhere as a run, so that every command works on it.

    Args:
        module: maps images in [0, 1] to logits.
        data: the data set.
        out: folder of the run, which must not exist or be empty.
        sections: sections of the recipe: at least ``data``, and ``threat`` if it is not the default.
        origin: where the model comes from: plain data, stored in ``adopted.json``.
        record: of the data, if it was already read.
    """
    folder = Path(out)
    check_empty(folder)
    graph, tensors = store_graph(module, data.shape, torch.float32)  # the type of the images, not of the weights
    tree = {
        **DEFAULTS,
        "model": {"class_path": f"{StoredClassifier.__module__}.{StoredClassifier.__name__}", "init_args": {}},
        **sections,
    }
    about = {
        "recipe": tree,
        "input_shape": list(data.shape),
        "num_classes": data.num_classes,
        "bounds": list(data.bounds) if data.bounds else None,
        "graph": graph,
    }
    record = record or DataRecord.of(data)
    place = folder.resolve()
    temporary = temporary_path(place)  # a kill must not leave half of a run
    try:
        remove_stale(place.parent.glob(f".{glob.escape(place.name)}.*.tmp"))
        temporary.mkdir(parents=True)
        Checkpoints(temporary / "checkpoints").save(0, Checkpoint(classifier_state(graph, tensors), about=about))
        write_record(temporary / "index.json", "the checkpoints", {"finished": True, "last": 0, "best": {"raw": 0}})
        write_record(temporary / "environment.json", "an environment", environment())
        write_record(temporary / "adopted.json", "an adopted model", origin)
        record.save(temporary)
        write_recipe(temporary / "recipe.yaml", tree)
        temporary.rename(place)
        sync(place.parent)
    except OSError as error:
        raise AtollError(f"cannot write to {folder}: {error.strerror}; choose another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Run(folder)
