"""Two processes compared with one: the speed of an attack, and how far results agree."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.attacks import APGD, Square
from atoll.attacks.evaluate import evaluate
from atoll.data import MemorySplit, Split
from atoll.data.base import to_float
from atoll.distributed import is_main, launch, process_group, rank
from atoll.models import SmallConvNet
from atoll.modules import PassCounts, count_passes
from atoll.runs.recipe import build_recipe
from atoll.runs.train import build_trainer
from atoll.threat import ThreatModel
from benchmarks.measure import Row

POINTS = 512
STEPS = {"accumulate=1": 100, "accumulate=2": 20}  # of digits-at


def network() -> SmallConvNet:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SmallConvNet((1, 28, 28), 10, widths=(16, 32), batch_norm=True).eval()


def noise(model: SmallConvNet) -> Split:
    """Random images with the classes that the network predicts, at different distances from its boundaries."""
    images = torch.randint(0, 256, (POINTS, 1, 28, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    with torch.no_grad():
        labels = torch.cat([model(to_float(part)).argmax(1) for part in images.split(128)])
    return MemorySplit(images, labels)


def attack(folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    model = network()
    split, threat = noise(model), ThreatModel("linf", 0.01)
    attacks = {"APGD": APGD(threat, steps=100), "Square": Square(threat, queries=500)}
    with process_group():
        evaluate(model, split, {"APGD": APGD(threat, steps=1)}, batch_size=128, check=False)  # warm-up
        began, processor = time.perf_counter(), time.process_time()
        passes = PassCounts()
        with count_passes(model, passes):
            result = evaluate(model, split, attacks, cascade=True, batch_size=128, check=False, keep=True)
        own = {
            "seconds": time.perf_counter() - began,
            "processor time": time.process_time() - processor,
            "model passes": passes.forward + passes.backward,
        }
        shared = {"adversarial": result.adversarial, "robust": result.robust.value}
        torch.save(own | (shared if is_main() else {}), folder / str(rank()))


def train(folder: Path, setting: str) -> None:
    torch.set_num_threads(1)
    steps = STEPS[setting]
    recipe = build_recipe("digits-at", f"trainer.{setting}", "trainer.validation_steps=0")
    with process_group():
        trainer = build_trainer(recipe)
        while trainer.step < steps:
            for batch in trainer._rest_of_epoch():
                if trainer.step < steps:
                    trainer.train_step(batch)
                    trainer.batch, trainer.step = trainer.batch + 1, trainer.step + 1
            trainer.epoch, trainer.batch = trainer.epoch + 1, 0
        if is_main():
            torch.save(nn.utils.parameters_to_vector(trainer.model.parameters()).detach(), folder / "0")
        del trainer


def on(processes: int, job: Any) -> list[Any]:
    """What every process of a job has saved."""
    with tempfile.TemporaryDirectory() as folder:
        launch(processes, partial(job, Path(folder)))
        return [torch.load(path, weights_only=True) for path in sorted(Path(folder).iterdir())]


def independent(_: int) -> Any:
    """The attack of one process, as one of several that run at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        attack(Path(folder), threads=1)
        return torch.load(Path(folder) / "0", weights_only=True)


def run() -> Iterator[Row]:
    (one,), (threads,), two = (
        on(1, partial(attack, threads=1)),
        on(1, partial(attack, threads=2)),
        on(2, partial(attack, threads=1)),
    )
    name = "attack: one process over the busier of two"
    notes = {"seconds": "means little on a busy machine", "processor time": "", "model passes": "counted"}
    for quantity, note in notes.items():
        ratio = one[quantity] / max(each[quantity] for each in two)
        yield Row(f"{name}, {quantity}", ratio, 1.8, at_least=True, note=note)
    yield Row(f"{name}, seconds, two threads", threads["seconds"] / max(each["seconds"] for each in two))
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:  # what two processes can gain here
        pair = list(pool.map(independent, range(2)))
    alone = 2 * one["seconds"] / max(each["seconds"] for each in pair)
    yield Row("attack: points per second of two independent processes, relative to one", alone)
    different = (one["adversarial"] != two[0]["adversarial"]).double().mean()
    yield Row("attack: different values in adversarial inputs", float(different), 0.0, note="two processes and one")
    for setting, steps in STEPS.items():
        (expected,), (weights,) = (on(processes, partial(train, setting=setting)) for processes in (1, 2))
        difference = float((weights - expected).norm() / expected.norm())
        yield Row(f"training, {setting}: difference of the weights after {steps} steps", difference)
