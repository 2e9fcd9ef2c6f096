"""Weights of foreign models: files, names with prefixes of wrappers, and the normalization that a checkpoint brings."""

from __future__ import annotations

import math
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from atoll.errors import CheckpointError, InputError
from atoll.training.checkpoint import load_weights

PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "0.", "1.")  # of wrappers: DataParallel, compile, RobustBench
INNER = ("state_dict", "model_state_dict", "model", "net", "ema", "last")  # entries of checkpoints with the weights
MEANS, DEVIATIONS = ("mean", "mu"), ("std", "sigma")  # names of buffers of wrappers that normalize
DEPTH = 4  # of wrappers


@dataclass(frozen=True)
class Normalization:
    """The normalization that comes with a foreign model.

    Args:
        mean: per channel.
        std: per channel.
        source: where it is stated.
        range: lowest and highest value of an image before normalization.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str
    range: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if not self.mean or not self.std or not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise InputError(f"{self.source}: expected finite means and positive standard deviations, got {self}")

    def __str__(self) -> str:
        scale = "" if self.range == (0.0, 1.0) else f"range {_numbers(self.range)}, "
        return f"{scale}mean {_numbers(self.mean)}, std {_numbers(self.std)}"


def _numbers(values: Iterable[float]) -> str:
    return ",".join(f"{value:.6g}" for value in values)


def check_file(path: Path, what: str) -> None:
    """Raise an InputError if a path is not a file, such as a folder or a pipe, which would block."""
    if not path.exists():
        raise InputError(f"{what}: cannot read {path}: No such file or directory")
    if not path.is_file():
        raise InputError(f"{what}: cannot read {path}: it is not a file")


def read_state(path: Path) -> dict[str, Tensor]:
    """Read a state dict without executing code: safetensors, or a file of ``torch.save`` that contains only tensors."""
    check_file(path, "weights")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        _check_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the protocol of the pickle
            content = torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"weights: cannot read {path}: {error.strerror}") from None
    except Exception as error:  # a damaged file may raise anything
        code = isinstance(error, pickle.UnpicklingError) and "truncated" not in str(error)
        reason = "it contains objects other than tensors, which could execute code" if code else first_line(error)
        raise InputError(f"weights: cannot read {path}: {reason}; save the state dict as safetensors") from None
    for _ in range(3):
        if isinstance(content, Mapping) and not _is_state(content):
            inner = next((content[name] for name in INNER if isinstance(content.get(name), Mapping)), None)
            content = inner if inner is not None else content
    if not isinstance(content, Mapping) or not _is_state(content):
        raise InputError(f"weights: expected a state dict in {path}")
    return dict(content)


def _check_archive(path: Path) -> None:
    """Refuse what ``torch.save`` does not write, such as compressed archives, which could expand without limit."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise InputError(f"weights: cannot read {path}: it is compressed; save the state dict as safetensors")
    else:
        with path.open("rb") as file:
            if file.read(1) != b"\x80":  # the first byte of every pickle since protocol 2
                raise InputError(f"weights: cannot read {path}: it is damaged, or not a file of torch.save")


def _is_state(content: Mapping[Any, Any]) -> bool:
    return bool(content) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items())


def load_state(module: nn.Module, state: Mapping[str, Tensor], source: str) -> Normalization | None:
    """Load a state dict into a model, and return the normalization of its wrapper, if there is one.

    Prefixes of wrappers such as ``module.`` are removed.

    >>> model = nn.Linear(2, 1)
    >>> state = {"1.weight": torch.ones(1, 2), "1.bias": torch.zeros(1)}
    >>> str(load_state(model, {**state, "0.mean": torch.tensor([0.5]), "0.std": torch.tensor([0.25])}, "weights.pt"))
    'mean 0.5, std 0.25'
    >>> model.weight.tolist()
    [[1.0, 1.0]]
    """
    own = module.state_dict()
    weights, others = min(_candidates(state), key=lambda parts: len(own.keys() ^ parts[0].keys()))
    others = others | {name: weights[name] for name in weights.keys() - own.keys()}
    weights = {name: tensor for name, tensor in weights.items() if name in own}
    normalization = _normalization(others, source)
    if normalization is None:
        weights |= others  # to be named as unexpected
    for name in own.keys() & weights.keys():
        if own[name].is_floating_point() and not weights[name].is_floating_point():
            raise CheckpointError(f"{source}: {name} has the type {weights[name].dtype}; quantized weights do not fit")
    counters = {name: value for name, value in own.items() if name.endswith("num_batches_tracked")}
    load_weights(module, counters | weights, source)  # older files have no counters, and evaluation does not use them
    return normalization


def _candidates(
    state: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None, depth: int = DEPTH
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The tensors below every chain of prefixes, without the prefixes, and all other tensors."""
    yield dict(state), dict(others or {})
    for prefix in PREFIXES if depth else ():
        inner = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        if inner:
            rest = {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}
            yield from _candidates(inner, {**(others or {}), **rest}, depth - 1)


def _normalization(tensors: Mapping[str, Tensor], source: str) -> Normalization | None:
    """Read mean and standard deviation if there is nothing else."""
    values = {name.rpartition(".")[2].strip("_"): tensor.flatten().tolist() for name, tensor in tensors.items()}
    mean, std = (next((values[name] for name in names if name in values), None) for names in (MEANS, DEVIATIONS))
    if len(tensors) != 2 or not mean or not std or max(len(mean), len(std)) > 4:
        return None
    return Normalization(tuple(mean), tuple(std), source)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without a period, or the name of its type.

    >>> first_line(ValueError("too large.\\nTry again."))
    'too large'
    """
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
