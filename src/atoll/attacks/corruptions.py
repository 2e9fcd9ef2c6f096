"""Accuracy under common corruptions, with saved progress."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from atoll.attacks.examples import choose_examples
from atoll.config import fields_to_plain
from atoll.corruptions import COMMON, SEVERITIES, corrupt
from atoll.data.base import Split, to_float
from atoll.display import Displayed, TextTable
from atoll.distributed import all_sum, is_main, rank, world_size
from atoll.errors import DamagedError
from atoll.files import json_digest, read_tensors, write_atomic, write_tensors
from atoll.graph import tensors_digest
from atoll.measure import OnProgress, split_digest
from atoll.modules import evaluation_mode
from atoll.stats import Accuracy, Estimate, percent

NAMES = tuple(name for group in COMMON.values() for name in group)
FROST = "frost: a generated texture, not the photographs of ImageNet-C"
STRIP = "corrupted.safetensors"  # one image, and the same under each corruption
STRIP_SEVERITY = 3
_RECORD = "corruptions"
FORMAT = "2"  # version of the progress file


def title_of(name: str) -> str:
    """The name of a corruption in tables and pictures, which says that our frost is not the original."""
    return "frost (generated)" if name == "frost" else name


@dataclass(frozen=True)
class CorruptionAccuracy:
    """Accuracy under one corruption, at severities 1 to 5."""

    name: str
    severities: tuple[Accuracy, ...]

    @property
    def mean(self) -> float:
        """Mean over the severities."""
        return (
            sum(accuracy.value for accuracy in self.severities) / len(self.severities) if self.severities else math.nan
        )


@dataclass(frozen=True)
class Corruptions(Displayed):
    """Accuracy under the common corruptions of ImageNet-C.

    The intervals of the means cover the choice of points: each point contributes its share of correct predictions.
    There is no mCE, which divides by the errors of AlexNet on the same images; those are not known for other data.

    Args:
        accuracies: one entry per corruption, in the order of the paper.
        severities: mean over the corruptions, at severities 1 to 5.
        mean: mean over corruptions and severities.
    """

    accuracies: tuple[CorruptionAccuracy, ...]
    severities: tuple[Estimate, ...]
    mean: Estimate

    @staticmethod
    def from_correct(correct: Tensor) -> Corruptions:
        """Summarize which points were classified correctly, ``(corruptions, severities, points)``.

        >>> correct = torch.zeros(15, 5, 4, dtype=torch.bool)
        >>> correct[:, 0, :3] = True
        >>> print(Corruptions.from_correct(correct).mean)  # 3 of 4 points at 1 of 5 severities
        0.150 ± 0.050
        """
        accuracies = tuple(
            CorruptionAccuracy(name, tuple(Accuracy(int(points.sum()), len(points)) for points in rows))
            for name, rows in zip(NAMES, correct, strict=True)
        )
        shares = correct.double().mean(0)  # of the corruptions, for each severity and point
        return Corruptions(accuracies, tuple(map(Estimate.mean_of, shares)), Estimate.mean_of(shares.mean(0)))

    def table(self) -> TextTable:
        rows = []
        for each in self.accuracies:
            rows.append([title_of(each.name), *map(percent, each.severities), f"{100 * each.mean:.2f}"])
        rows.append(["mean", *(f"{100 * each.value:.2f}" for each in (*self.severities, self.mean))])
        title = "Accuracy in % under common corruptions, by severity"
        return TextTable(title, ["corruption", *map(str, SEVERITIES), "mean"], rows, [self.note, FROST])

    @property
    def note(self) -> str:
        """The mean over everything in one line."""
        value, interval = self.mean_percent
        return f"mean accuracy under common corruptions: {value} % (95 %: {interval})"

    @property
    def mean_percent(self) -> list[str]:
        """The mean over everything and its 95 % interval in percent, as ``percent_interval`` of an accuracy."""
        low, high = self.mean.interval
        return [f"{100 * self.mean.value:.2f}", f"{100 * low:.1f}-{100 * high:.1f}"]

    def to_json(self) -> dict[str, object]:
        return fields_to_plain(self)


def evaluate_corruptions(
    model: nn.Module,
    split: Split,
    *,
    batch_size: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
    on_progress: OnProgress | None = None,
) -> Corruptions:
    """Measure the accuracy under all corruptions and severities; torchrun distributes the points over processes.

    The images of a point depend on its index and the seed, not on the batch size or the number of processes.

    Args:
        model: maps inputs to logits; switched to evaluation mode.
        split: the points, images in [0, 1].
        batch_size: number of points at a time.
        seed: seed of the random streams.
        device: where to run the model; images are corrupted on the CPU.
        folder: where to store the progress after each corruption and severity, to resume an interrupted evaluation of
            the same model, points and seed.  Damaged progress is computed again.
        on_progress: called with the name of the corruption, the number of finished points, and the total.

    >>> from atoll.data import MemorySplit
    >>> split = MemorySplit(torch.full((2, 1, 8, 8), 200, dtype=torch.uint8), torch.tensor([1, 0]))
    >>> constant = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    >>> constant[1].weight.data, constant[1].bias.data = torch.zeros(2, 64), torch.tensor([0.0, 1.0])
    >>> evaluate_corruptions(constant, split, batch_size=2).mean.value
    0.5
    """
    index = torch.arange(len(split))[rank() :: world_size()]
    path = None if folder is None else folder / f"corruptions-{rank()}-of-{world_size()}.safetensors"
    correct = torch.zeros(len(NAMES), len(SEVERITIES), len(split), dtype=torch.uint8)
    finished = torch.zeros(len(NAMES), len(SEVERITIES), dtype=torch.uint8)
    if path is not None:
        config = json_digest([FORMAT, repr(model), tensors_digest(model.state_dict()), split_digest(split), repr(seed)])
        correct, finished = _load(path, config, correct, finished)
    total = finished.numel() * len(index)
    with torch.no_grad(), evaluation_mode(model):
        for kind, level in (finished == 0).nonzero().tolist():
            name, done = NAMES[kind], int(finished.sum()) * len(index)
            for part in torch.split(index, batch_size):
                x = corrupt(to_float(split.fetch(part)), name, SEVERITIES[level], seed=seed, index=part)
                correct[kind, level, part] = torch.eq(model(x.to(device)).argmax(1).cpu(), split.labels[part]).byte()
                done += len(part)
                if on_progress is not None:
                    on_progress(name, done, total)
            finished[kind, level] = 1
            if path is not None:
                write_tensors(path, _RECORD, {"correct": correct, "finished": finished}, {"config": config})
    return Corruptions.from_correct(all_sum(correct.int()).bool())


def _load(path: Path, config: str, correct: Tensor, finished: Tensor) -> tuple[Tensor, Tensor]:
    """The saved progress, or the given one if there is none, if it is damaged or if it is of another evaluation."""
    try:
        saved, about = read_tensors(path, _RECORD)
        fits = saved["correct"].shape == correct.shape and saved["finished"].shape == finished.shape
        return (saved["correct"], saved["finished"]) if fits and about["config"] == config else (correct, finished)
    except (FileNotFoundError, DamagedError, KeyError, TypeError):
        return correct, finished


def save_strip(split: Split, folder: Path, *, seed: int) -> None:
    """Store the first image of the split without corruption and under each one at severity 3, to look at."""
    if is_main():
        index = choose_examples(split.labels, 1)
        x = to_float(split.fetch(index))
        images = [corrupt(x, name, STRIP_SEVERITY, seed=seed, index=index) for name in NAMES]
        write_atomic(folder / STRIP, save({"x": torch.cat([x, *images])}))
