"""A run: a folder with its recipe, checkpoints, metrics and results.

In it::

    recipe.yaml        resolved: every default filled in; `atoll train recipe.yaml` runs it again
    environment.json   versions, machine, command
    metrics.jsonl      one record per line
    tensorboard/
    checkpoints/       one folder each; index.json says which is last and which is best
    result.json        test results of best and last
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from atoll.data.base import Data
from atoll.distributed import barrier, is_main, process_group, world_size
from atoll.errors import AtollError, CheckpointError, RecipeError
from atoll.files import write_atomic, write_json
from atoll.models import Classifier, load_pretrained
from atoll.recipe import ModelFactory, Recipe, build_part, build_recipe
from atoll.streams import key
from atoll.threat import ThreatModel
from atoll.training.checkpoint import Checkpoint, Checkpoints, load_checkpoint, load_weights
from atoll.training.observers import JsonLines, Observer, TensorBoard, read_records
from atoll.training.trainer import Trainer

Which = Literal["best", "last"] | int


def build_model(recipe: Recipe) -> Classifier:
    """The recipe's model, initialised from the recipe's seed; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(recipe.seed, "weights"))
        model = recipe.model(recipe.data.shape, recipe.data.num_classes, bounds=recipe.data.bounds)  # type: ignore[call-arg]
    if recipe.pretrained is not None:
        load_pretrained(model, recipe.pretrained)
    return model


def build_trainer(recipe: Recipe, folder: Path | str | None = None, observers: Sequence[Observer] = ()) -> Trainer:
    """The recipe as a trainer, ready to ``fit``."""
    return Trainer(
        build_model(recipe),
        recipe.data,
        recipe.loss,
        recipe.threat,
        attack=recipe.attack,
        methods=recipe.methods,
        optimizer=recipe.optimizer,
        schedule=recipe.schedule,
        settings=recipe.trainer,
        seed=recipe.seed,
        folder=folder,
        observers=observers,
        about={
            "recipe": recipe.tree,
            "input_shape": list(recipe.data.shape),
            "num_classes": recipe.data.num_classes,
            "bounds": list(recipe.data.bounds) if recipe.data.bounds else None,
        },
    )


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe | None,
    *overrides: str,
    out: Path | str,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    on_trainer: Callable[[Trainer], None] | None = None,
) -> Run:
    """Train a recipe into a folder.

    Args:
        recipe: a shipped name, a file, plain data, or None to resume what is in ``out``.
        overrides: ``key.sub=value``.
        out: the run's folder; must not hold a run already unless ``resume``.
        resume: go on from the newest intact checkpoint, or start if there is none.
        observers: who else watches (progress bars).
        on_trainer: called with the trainer before it starts (signal handlers).
    """
    folder = Path(out)
    with process_group():
        existing = (folder / "recipe.yaml").exists()
        barrier()  # nobody writes before everybody has looked
        if existing and not resume:
            raise RecipeError(f"{folder} already holds a run; resume it or choose another folder")
        if recipe is None and not existing:
            raise RecipeError(f"there is no run to resume in {folder}")
        chosen = recipe if isinstance(recipe, Recipe) else build_recipe(recipe or folder / "recipe.yaml", *overrides)
        if existing and recipe is not None:
            _same_recipe(folder, chosen)
        kept = [JsonLines(folder / "metrics.jsonl"), TensorBoard(folder / "tensorboard")]
        trainer = build_trainer(chosen, folder, [*kept, *observers])
        if on_trainer:
            on_trainer(trainer)
        if is_main():
            try:
                write_json(folder / "environment.json", environment())
                # Last, because its presence means that there is a run here.
                write_atomic(folder / "recipe.yaml", yaml.safe_dump(dict(chosen.tree), sort_keys=False).encode())
            except OSError as error:
                raise AtollError(f"cannot write to {folder}: {error.strerror}") from None
        trainer.fit(resume=resume)
        barrier()
        del trainer  # it refers to the process group
    return Run(folder)


def _same_recipe(folder: Path, recipe: Recipe) -> None:
    saved = yaml.safe_load((folder / "recipe.yaml").read_text())
    if saved != json.loads(json.dumps(recipe.tree)):
        changed = sorted(k for k in saved.keys() | recipe.tree.keys() if saved.get(k) != recipe.tree.get(k))
        raise RecipeError(
            f"{folder} was started with another recipe ({', '.join(changed)} differ); resume it without one"
        )


def environment() -> dict[str, Any]:
    """What a run ran on; enough to explain a difference."""
    return {
        "atoll": version("atoll"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "processes": world_size(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "command": sys.argv,
    }


@dataclass(frozen=True)
class Run:
    """A run's folder, opened for reading.

    Opening somebody else's run executes nothing of theirs: only classes of Atoll are built, unless ``trust``.
    """

    folder: Path
    trust: bool = False

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe as plain data."""
        try:
            tree = yaml.safe_load((self.folder / "recipe.yaml").read_text())
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise CheckpointError(f"{self.folder} does not hold a run: {error}") from None
        if not isinstance(tree, dict):
            raise CheckpointError(f"{self.folder}/recipe.yaml: expected a mapping of sections")
        return tree

    @property
    def result(self) -> dict[str, Any] | None:
        """Test results, or None while the run is not finished."""
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_records(self.folder / "metrics.jsonl")

    def checkpoint(self, which: Which = "best", weights: str = "raw") -> Checkpoint:
        """The checkpoint of the best epoch, the last, or a given step."""
        return load_checkpoint(self.checkpoint_path(which, weights), with_training=False)

    def checkpoint_path(self, which: Which = "best", weights: str = "raw") -> Path:
        """Where that checkpoint is; the last one stands in for the best if none was chosen."""
        checkpoints = Checkpoints(self.folder / "checkpoints")
        if not (steps := checkpoints.steps()):
            raise CheckpointError(f"{self.folder} holds no checkpoint")
        if isinstance(which, int):
            if which not in steps:
                raise CheckpointError(f"{self.folder} has no checkpoint of step {which}; it has {steps}")
            return checkpoints.path(which)
        try:
            best = json.loads((self.folder / "index.json").read_text())["best"][weights]
        except (OSError, ValueError, KeyError, TypeError):
            best = -1
        return checkpoints.path(best if which == "best" and best in steps else steps[-1])

    def model(self, which: Which = "best", weights: str = "raw") -> Classifier:
        """The trained model, in evaluation mode; ``weights`` may name an average (``swa``)."""
        path = self.checkpoint_path(which, weights)
        return model_from(load_checkpoint(path, with_training=False), str(path), weights=weights, trust=self.trust)

    @cached_property
    def data(self) -> Data:
        data: Data = build_part(Data, self.recipe["data"], "data", trust=self.trust)
        return data

    @property
    def threat(self) -> ThreatModel:
        """What the run was trained against."""
        threat: ThreatModel = build_part(ThreatModel, self.recipe["threat"], "threat", trust=self.trust)
        return ThreatModel(threat.norm, threat.eps, self.data.bounds)


def model_from(checkpoint: Checkpoint, source: str, *, weights: str = "raw", trust: bool = False) -> Classifier:
    """Rebuild the model a checkpoint describes and load its weights."""
    about = checkpoint.about
    if "recipe" not in about:
        raise CheckpointError(f"{source} does not say which model it belongs to; build it and use load_weights")
    tree = about["recipe"]["model"]
    if "pretrained" in tree["init_args"]:  # the weights are in the checkpoint; nothing is to be downloaded
        tree = {**tree, "init_args": tree["init_args"] | {"pretrained": False}}
    factory: ModelFactory = build_part(ModelFactory, tree, "model", trust=trust)
    with torch.random.fork_rng(devices=[]):
        bounds = tuple(about["bounds"]) if about["bounds"] else None
        model = factory(tuple(about["input_shape"]), about["num_classes"], bounds=bounds)  # type: ignore[call-arg]
    load_weights(model, checkpoint.weights(weights), source)
    return model.eval()


def open_run(path: Path | str, *, trust: bool = False) -> Run:
    """The run at a folder, with a sentence instead of a traceback if there is none."""
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"there is no run at {folder}")
    run = Run(folder, trust)
    _ = run.recipe
    return run
