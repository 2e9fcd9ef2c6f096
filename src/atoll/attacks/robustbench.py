"""RobustBench's ``benchmark`` and the functions around it, for existing scripts; data are never downloaded."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor, nn

from atoll.attacks.autoattack import AutoAttack
from atoll.attacks.evaluate import evaluate
from atoll.data.base import MemorySplit
from atoll.data.cifar import CIFAR10, CIFAR100
from atoll.errors import InputError, check_count
from atoll.files import write_json
from atoll.registry import suggest

Transform = Callable[[Image.Image], Tensor]


class BenchmarkDataset(Enum):
    """Data sets of RobustBench."""

    cifar_10 = "cifar10"
    cifar_100 = "cifar100"
    imagenet = "imagenet"


class BenchmarkThreat(Enum):
    """Threat models of RobustBench; the radius is the argument ``eps`` of ``benchmark``."""

    Linf = "Linf"
    L2 = "L2"
    corruptions = "corruptions"
    corruptions_3d = "corruptions_3d"


ThreatModel = BenchmarkThreat  # RobustBench's name, for scripts; ``atoll.threat.ThreatModel`` is another class


# Fields of a new file in ``model_info``, in RobustBench's order; ``benchmark`` fills in four of them.
FIELDS = (
    "link", "name", "authors", "additional_data", "number_forward_passes", "dataset", "venue", "architecture", "eps",
    "clean_acc", "reported", "corruptions_acc", "corruptions_acc_3d", "corruptions_mce", "corruptions_mce_3d",
    "autoattack_acc", "footnote",
)  # fmt: skip


def benchmark(
    model: nn.Module,
    n_examples: int = 10_000,
    dataset: str | BenchmarkDataset = BenchmarkDataset.cifar_10,
    threat_model: str | BenchmarkThreat = BenchmarkThreat.Linf,
    to_disk: bool = False,
    model_name: str | None = None,
    data_dir: str | Path = "./data",
    corruptions_data_dir: str | Path | None = None,
    device: torch.device | str | None = None,
    batch_size: int = 32,
    eps: float | str | None = None,
    log_path: str | Path | None = None,
    preprocessing: Transform | None = None,
    aa_state_path: str | Path | None = None,
) -> tuple[float, float]:
    """Measure clean accuracy and robust accuracy under ``AutoAttack`` on the first test images, and print both.

    Args:
        model: maps images in [0, 1] to logits; moved to ``device``.
        n_examples: number of test images.
        dataset: ``cifar10`` or ``cifar100``.
        threat_model: ``Linf`` or ``L2``.
        to_disk: also write the accuracies to ``model_info/DATASET/THREAT_MODEL/MODEL_NAME.json``.
        model_name: name of the model, for ``to_disk``.
        data_dir: folder of the data set, as for ``atoll.data.CIFAR10(root=...)``.
        corruptions_data_dir: without effect for ``Linf`` and ``L2``, as in RobustBench.
        device: where to compute; the CPU if None.
        batch_size: attack batch size.
        eps: radius.
        log_path: see ``AutoAttack``.
        preprocessing: converts a PIL image to a tensor; by default pixels are divided by 255.
        aa_state_path: folder for saved progress; repeat the call to resume.

    Returns:
        Clean and robust accuracy, between 0 and 1.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected one module, got {type(model).__name__}; benchmark one model at a time")
    data, threat = _member(BenchmarkDataset, "dataset", dataset), _member(BenchmarkThreat, "threat_model", threat_model)
    if threat not in (BenchmarkThreat.Linf, BenchmarkThreat.L2):
        raise InputError("threat_model: corruptions are not supported; expected Linf or L2")
    if eps is None:
        raise InputError("eps: expected a radius such as 8/255, got None")
    if to_disk and model_name is None:
        raise InputError("model_name: expected the name of the file for to_disk=True, got None")
    if model.training:
        warnings.warn("the model is in training mode; the benchmark switches it to evaluation mode", stacklevel=2)
    device = torch.device("cpu") if device is None else device
    adversary = AutoAttack(model, norm=threat.value, eps=eps, device=device, log_path=log_path)
    x, y = load_clean_dataset(data, n_examples, data_dir, preprocessing)
    model.to(adversary.device)
    clean = clean_accuracy(model, x, y, batch_size, adversary.device)
    sys.stdout.write(f"Clean accuracy: {clean:.2%}\n")
    adversary.run_standard_evaluation(x, y, bs=batch_size, state_path=aa_state_path)
    robust = adversary.evaluation.robust.value
    sys.stdout.write(f"Adversarial accuracy: {robust:.2%}\n")
    if to_disk:
        _update_json(Path("model_info", data.value, threat.value, f"{model_name}.json"), data, clean, robust, eps)
    return clean, robust


def clean_accuracy(
    model: nn.Module, x: Tensor, y: Tensor, batch_size: int = 100, device: torch.device | str | None = None
) -> float:
    """Return the accuracy without attack, in evaluation mode.

    Args:
        model: maps inputs to logits.
        x: inputs.
        y: labels.
        batch_size: number of inputs per pass.
        device: where to compute; the device of the inputs if None.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.eye(2))
    >>> clean_accuracy(model, torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
    0.5
    """
    split = MemorySplit(x.detach().cpu(), y.detach().cpu().long())
    device = x.device if device is None else device
    return evaluate(model, split, {}, batch_size=batch_size, device=device, check=False).clean.value


def load_cifar10(
    n_examples: int | None = None, data_dir: str | Path = "./data", transforms_test: Transform | None = None
) -> tuple[Tensor, Tensor]:
    """Return the first test images of CIFAR-10 (all if None) and their labels."""
    return load_clean_dataset(BenchmarkDataset.cifar_10, n_examples, data_dir, transforms_test)


def load_cifar100(
    n_examples: int | None = None, data_dir: str | Path = "./data", transforms_test: Transform | None = None
) -> tuple[Tensor, Tensor]:
    """Return the first test images of CIFAR-100 (all if None) and their labels."""
    return load_clean_dataset(BenchmarkDataset.cifar_100, n_examples, data_dir, transforms_test)


def load_clean_dataset(
    dataset: str | BenchmarkDataset, n_examples: int | None, data_dir: str | Path, prepr: Transform | None = None
) -> tuple[Tensor, Tensor]:
    """Return the first test images of a data set and their labels, from local files.

    Args:
        dataset: ``cifar10`` or ``cifar100``.
        n_examples: number of images; all if None.
        data_dir: folder of the files.
        prepr: converts a PIL image to a tensor; by default pixels are divided by 255.
    """
    kind = _member(BenchmarkDataset, "dataset", dataset)
    if kind is BenchmarkDataset.imagenet:
        raise InputError("dataset: imagenet is not supported; load the images and use AutoAttack")
    if prepr is not None and not callable(prepr):
        raise InputError(f"preprocessing: expected a function of a PIL image, got {prepr!r}")
    check_count(1, n_examples=n_examples)
    data = {BenchmarkDataset.cifar_10: CIFAR10, BenchmarkDataset.cifar_100: CIFAR100}[kind](
        root=data_dir, download=False
    )
    if prepr is None:
        return data.tensors("test", n_examples)
    split = data.split("test")
    index = torch.arange(len(split))[:n_examples]
    images = split.fetch(index).permute(0, 2, 3, 1).numpy()
    return torch.stack([prepr(Image.fromarray(image)) for image in images]), split.labels[index]


T = TypeVar("T", bound=Enum)


def _member(kind: type[T], name: str, value: object) -> T:
    """Return the member of an enumeration with a value, which may also be a member of RobustBench's enumeration."""
    text = getattr(value, "value", value)
    values = [member.value for member in kind]
    if text not in values:
        raise InputError(f"{name}: got {text!r}{suggest(str(text), values)}")
    return kind(text)


def _update_json(path: Path, data: BenchmarkDataset, clean: float, robust: float, eps: float | str) -> None:
    """Write a file in the format of RobustBench's ``model_info``, and keep what an existing one says otherwise."""
    present: dict[str, Any] = json.loads(path.read_text()) if path.exists() else dict.fromkeys(FIELDS)
    accuracies = {"clean_acc": str(round(100 * clean, 2)), "autoattack_acc": str(round(100 * robust, 2))}
    write_json(path, {**present, "dataset": data.value, "eps": eps, **accuracies})
