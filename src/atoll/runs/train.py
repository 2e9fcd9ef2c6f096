"""Train a recipe into the folder of a run."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from atoll.attacks.measure import AttackResult
from atoll.certify.measure import CertifySettings
from atoll.data.base import to_float
from atoll.distributed import (
    barrier,
    check_same,
    fail_together,
    is_main,
    open_shared,
    process_group,
    raise_on_lost_worker,
)
from atoll.errors import AtollError, RecipeError
from atoll.files import write_record
from atoll.measure import Environment, OnProgress
from atoll.models import Classifier, load_pretrained
from atoll.progress import show_progress
from atoll.rng import key
from atoll.runs.data_record import LOCATIONS, DataRecord, locate, without_locations
from atoll.runs.recipe import Recipe, build_recipe, full_key, write_recipe
from atoll.runs.run import Run, TestRow
from atoll.threads import keep_threads, recorded_threads, settle_threads
from atoll.training.checkpoint import Checkpoints
from atoll.training.observers import JsonLines, Observer, TensorBoard
from atoll.training.progress import TrainingProgress
from atoll.training.trainer import Trainer


def build_model(recipe: Recipe) -> Classifier:
    """Build the model of a recipe, initialized with the seed of the recipe; does not change the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(recipe.seed, "weights"))
        model = recipe.model(recipe.data.shape, recipe.data.num_classes, bounds=recipe.data.bounds)  # type: ignore[call-arg]
    if recipe.pretrained is not None:
        load_pretrained(model, recipe.pretrained)
    return model


def build_trainer(recipe: Recipe, folder: Path | str | None = None, observers: Sequence[Observer] = ()) -> Trainer:
    """Build the trainer of a recipe; call ``fit`` to train."""
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
    trust: bool = False,
    observers: Sequence[Observer] = (),
    on_trainer: Callable[[Trainer], None] | None = None,
    on_progress: OnProgress | None = None,
    progress: bool = False,
) -> Run:
    """Train a recipe into a folder and test the best and the last checkpoint.

    Args:
        recipe: the name of a recipe, a file, plain data, or None to resume the run in ``out``.
        overrides: overrides such as ``key.sub=value``.
        out: folder of the run; must not contain a run unless ``resume`` is set.
        resume: resume from the newest intact checkpoint, or start if there is none.
        trust: allow a resumed run to import classes from outside Atoll; a recipe that is passed in is trusted.
        observers: further observers, such as progress bars.
        on_trainer: called with the trainer before training starts, for example to install signal handlers.
        on_progress: called during the final test with the name of the current task, the units done, and the total.
        progress: show progress bars, in terminals and notebooks.
    """
    folder = Path(out)
    with process_group(), open_shared(folder, folder):
        with fail_together():
            built, data = _prepare(recipe, overrides, folder, resume, trust)
        tree = {**built.tree, "data": without_locations(built.tree.get("data"))}
        check_same(recipe=tree, data=data.fingerprint.digests, version=_versions())
        trust = trust or recipe is not None
        writers = [JsonLines(folder / "metrics.jsonl"), TensorBoard(folder / "tensorboard")]
        bars = [TrainingProgress()] if progress else []
        trainer = build_trainer(built, folder, [*writers, *bars, *observers])
        _settle_threads(trainer, folder if resume else None)
        if on_trainer:
            on_trainer(trainer)
        with fail_together():
            if is_main():
                _start(folder, built, data)
        trainer.fit(resume=resume)
        barrier()
        run = Run(folder, trust=trust)
        bar = show_progress("test") if progress and on_progress is None else nullcontext(on_progress)
        with raise_on_lost_worker(f"resume in {folder}"), keep_threads(), bar as report:
            final_test(run, report)
        del trainer  # it has a reference to the process group
    return run


def _prepare(
    recipe: str | Path | Mapping[str, Any] | Recipe | None,
    overrides: Sequence[str],
    folder: Path,
    resume: bool,
    trust: bool,
) -> tuple[Recipe, DataRecord]:
    """Build the recipe and read the data, to report all faults before any work; writes nothing."""
    existing = os.path.lexists(folder / "recipe.yaml")
    if existing and not resume:
        raise RecipeError(f"{folder} already contains a run; resume it or choose another folder")
    if recipe is None and not existing:
        raise RecipeError(f"there is no run to resume in {folder}")
    if not existing and Checkpoints(folder / "checkpoints").steps():  # of a recipe that nobody knows
        raise RecipeError(f"{folder} has checkpoints but no recipe.yaml; restore it or choose another folder")
    if isinstance(recipe, Recipe):
        built = recipe
    elif recipe is not None:
        built = build_recipe(recipe, *overrides, trust=True)
    else:
        built = _saved_recipe(folder, overrides, trust)
    if existing and recipe is not None:
        _same_recipe(folder, built)
    known = DataRecord.load(folder) if existing else None
    data = DataRecord.of(built.data, known)
    if known is not None and (changes := known.fingerprint.difference(data.fingerprint)):
        raise RecipeError(
            f"{folder}: the data has changed since this run was started ({changes}); restore it or start a new run"
            " in another folder"
        )
    if known is not None and recipe is None and not overrides:  # paths in the recipe are relative to that folder
        data = dataclasses.replace(data, folder=known.folder)
    size, count = built.trainer.batch_size, built.data.num_own
    if size > count:
        raise RecipeError(f"batch_size: expected at most the number of training points, {count}, got {size}")
    return built, data


def _start(folder: Path, recipe: Recipe, data: DataRecord) -> None:
    """Write the files that a run begins with."""
    try:
        write_record(folder / "environment.json", "an environment", environment())
        data.save(folder)
        # Last, because the presence of this file marks the folder as a run.
        write_recipe(folder / "recipe.yaml", recipe.tree)
    except OSError as error:
        raise AtollError(f"cannot write to {folder}: {error.strerror}; choose another folder") from None


def _settle_threads(trainer: Trainer, folder: Path | None) -> None:
    """Choose the number of threads if a command asked for it; a run that resumes has recorded it."""
    data, rows = trainer.data.train, trainer.settings.batch_size
    recorded = None if folder is None else recorded_threads(folder / "environment.json", "an environment")

    def inputs(count: int) -> torch.Tensor:
        return to_float(data.fetch(torch.arange(count))).to(trainer.device)

    settle_threads(recorded, trainer.device, trainer.model, inputs, min(rows, len(data)))


def final_test(run: Run, on_progress: OnProgress | None = None) -> list[TestRow]:
    """Measure the test accuracy of the best and the last checkpoint, for the raw weights and every average.

    Uses the measurements of ``atoll attack`` and ``atoll certify`` and stores the results with the run.
    """
    rows = []
    for weights in run.weight_sets:
        for checkpoint in ("best", "last"):
            options: dict[str, Any] = {"checkpoint": checkpoint, "weights": weights, "on_progress": on_progress}
            attacked: AttackResult = run.measure(run.test_settings, **options)
            certified = run.measure(CertifySettings(attack=False), **options) if run.is_certified else None
            rows.append(TestRow(checkpoint, weights, attacked, certified))
    return rows


def _saved_recipe(folder: Path, overrides: Sequence[str], trust: bool) -> Recipe:
    """Build the recipe of a run to resume; overrides may only change the location of its data."""
    saved, record = Run(folder).recipe, DataRecord.load(folder)
    for override in overrides:
        section, _, argument = full_key(saved, override.partition("=")[0], trust=trust).partition(".")
        if section != "data" or argument.rpartition(".")[2] not in LOCATIONS:
            raise RecipeError(
                f"a resumed run keeps its recipe, except for the location of its data; remove {override!r}"
            )
    located = saved if record is None else {**saved, "data": locate(saved.get("data"), record.folder)}
    recipe = build_recipe(located, *overrides, trust=trust)
    if overrides:
        return recipe
    return dataclasses.replace(recipe, tree={**recipe.tree, "data": saved["data"]})  # keep paths as the user wrote them


def _same_recipe(folder: Path, recipe: Recipe) -> None:
    saved = Run(folder).recipe
    # Locations may differ, because the fingerprint tells whether the data is the same.
    trees = ({**tree, "data": without_locations(tree.get("data"))} for tree in (saved, recipe.tree))
    saved, current = (_without_modules(json.loads(json.dumps(tree))) for tree in trees)
    if saved != current:
        changed = sorted(k for k in saved.keys() | current.keys() if saved.get(k) != current.get(k))
        raise RecipeError(
            f"{folder} was started with another recipe ({', '.join(changed)} differ); resume it without a recipe"
        )


def _without_modules(tree: Any) -> Any:
    """Remove module names from class paths, because classes may move between versions."""
    if isinstance(tree, dict):
        return {k: v.rpartition(".")[2] if k == "class_path" else _without_modules(v) for k, v in tree.items()}
    return [_without_modules(part) for part in tree] if isinstance(tree, list) else tree


def _versions() -> list[str]:
    current = Environment.current()
    return [current.atoll, current.torch]


def environment() -> dict[str, Any]:
    """Return the software and hardware of a run, to explain differences between runs."""
    names = ("atoll", "torch", "python", "machine", "threads", "processes")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {**{name: getattr(Environment.current(), name) for name in names}, "gpus": gpus, "command": sys.argv}
