"""Checkpoints in safetensors and JSON, written atomically and verified by digest, without pickle.

A checkpoint is a folder::

    00000420/
      model.safetensors      weights and buffers, for any safetensors reader
      swa.safetensors        weights and buffers of an average, if a method has one
      training.safetensors   optimizer and method states
      checkpoint.json        everything that is not a tensor, and the digests of all files

It is written to a temporary folder, synced, and renamed.  A killed process leaves at most a hidden temporary folder.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll.errors import CheckpointError, DamagedError
from atoll.files import json_digest, parse_json, read_file, sha256, sync, temporary_path, write_atomic

FORMAT = 1
_TENSOR = "$tensor"


@dataclass
class Best:
    """The checkpoint with the best selection metric."""

    score: float = -math.inf
    step: int = -1
    epoch: int = -1


@dataclass
class Checkpoint:
    """The content of a checkpoint.

    Args:
        model: state dict of the model.
        training: state of optimizer, methods and position, as nested dicts and lists of tensors, numbers and strings.
        about: plain JSON from which a reader can rebuild the model: recipe, shapes, scores.
        averages: other weights for the same model by name, from methods such as SWA.
        files: digests of the files it was read from, by name.
        digest: digest of everything that was read.
    """

    model: Mapping[str, Tensor]
    training: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    averages: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    digest: str = ""

    def weights(self, name: str = "raw") -> Mapping[str, Tensor]:
        """Return the trained weights (``raw``) or an average by name."""
        known = {"raw": self.model, **self.averages}
        if name not in known:
            raise CheckpointError(f"weights: expected {' or '.join(known)}, got {name!r}")
        return known[name]


def pack(tree: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Split a nested structure: add tensors to ``tensors``, and return the rest as JSON that refers to them.

    >>> import torch
    >>> tensors = {}
    >>> pack({"lr": 0.1, "momentum": [torch.zeros(2)]}, tensors)
    {'lr': 0.1, 'momentum': [{'$tensor': '/momentum/0'}]}
    >>> list(tensors)
    ['/momentum/0']
    """
    if isinstance(tree, Tensor):
        tensors[path] = tree
        return {_TENSOR: path}
    if isinstance(tree, Mapping):
        if any(not isinstance(k, str | int) for k in tree):
            raise TypeError(f"{path or '/'}: keys of a checkpoint must be strings or integers")
        # JSON has only string keys; mark integer keys so that they can be restored.
        return {(f"#{k}" if isinstance(k, int) else k): pack(v, tensors, f"{path}/{k}") for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [pack(v, tensors, f"{path}/{i}") for i, v in enumerate(tree)]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"{path or '/'}: cannot store a {type(tree).__name__} in a checkpoint")


def unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Restore a structure from ``pack``; tuples become lists."""
    if isinstance(tree, dict):
        if set(tree) == {_TENSOR}:
            return tensors[tree[_TENSOR]]
        return {(int(k[1:]) if k[:1] == "#" else k): unpack(v, tensors) for k, v in tree.items()}
    if isinstance(tree, list):
        return [unpack(v, tensors) for v in tree]
    return tree


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint so that ``folder`` is either complete or does not exist."""
    temporary = temporary_path(folder)
    tensors: dict[str, Tensor] = {}
    try:
        temporary.mkdir(parents=True)
        training = pack(checkpoint.training, tensors)
        digests = {}
        for name, content in (("model", checkpoint.model), ("training", tensors), *checkpoint.averages.items()):
            file = temporary / f"{name}.safetensors"
            # Copied, because safetensors does not accept tensors that share memory.
            save_file({k: v.detach().to("cpu", copy=True).contiguous() for k, v in content.items()}, file)
            sync(file)
            digests[name] = sha256(file)
        record = {"format": FORMAT, "files": digests, "about": checkpoint.about, "training": training}
        record["digest"] = json_digest(record)
        write_atomic(temporary / "checkpoint.json", json.dumps(record, indent=1).encode())
        shutil.rmtree(folder, ignore_errors=True)  # the same step, saved before an interruption
        temporary.rename(folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(
            f"cannot write the checkpoint {folder}: {reason}; earlier checkpoints are intact"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_checkpoint(folder: Path, *, with_training: bool = True) -> Checkpoint:
    """Read and verify a checkpoint; raises a CheckpointError that says what is wrong if it is damaged."""
    record = _read_record(folder)
    names = [name for name in record["files"] if with_training or name != "training"]
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in names:
        file = folder / f"{name}.safetensors"
        try:
            if sha256(file) != record["files"][name]:
                raise CheckpointError(f"{file} is damaged: the digest does not match")
            tensors[name] = load_file(file)
        except DamagedError as error:
            raise CheckpointError(str(error)) from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
    try:
        training = unpack(record["training"], tensors.pop("training")) if with_training else {}
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{folder}/checkpoint.json refers to tensors that {folder} does not have") from None
    return Checkpoint(tensors.pop("model"), training, record["about"], dict(tensors), record["files"], record["digest"])


def _read_record(folder: Path) -> dict[str, Any]:
    """Read and verify ``checkpoint.json``, including the types of its entries."""
    path = folder / "checkpoint.json"
    try:
        record = parse_json(read_file(path, inside=folder.parent))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no checkpoint.json") from None
    except DamagedError as error:
        raise CheckpointError(str(error)) from None
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    digest = record.pop("digest", None) if isinstance(record, dict) else None
    if digest is None or digest != json_digest(record):
        raise CheckpointError(f"{path} is damaged: the digest does not match")
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: expected checkpoint format {FORMAT}, got {record.get('format')!r}")
    for name in ("files", "about", "training"):
        if not isinstance(record.get(name), dict):
            raise CheckpointError(f"{path}: {name}: expected a mapping")
    if missing := {"model", "training"} - record["files"].keys():
        raise CheckpointError(f"{path}: files: expected {' and '.join(sorted(missing))}")
    for name, digest in record["files"].items():
        if not name.isidentifier() or not isinstance(digest, str):  # not a path out of the folder
            raise CheckpointError(f"{path} lists files that are not part of a checkpoint")
    return {**record, "digest": digest}


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str = "the checkpoint") -> None:
    """Copy weights into a model; raises a CheckpointError without copying anything if the architecture differs."""
    own = model.state_dict()
    missing, unexpected = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{k} {tuple(weights[k].shape)} instead of {tuple(own[k].shape)}"
        for k in sorted(own.keys() & weights.keys())
        if own[k].shape != weights[k].shape
    ]
    faults = [
        f"{what}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("different shapes", shapes))
        if names
    ]
    if faults:
        name = type(model).__name__
        raise CheckpointError(f"{source} does not fit the architecture of this {name} ({'; '.join(faults)})")
    model.load_state_dict(dict(weights))


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run."""

    folder: Path
    keep: int = 2

    def path(self, step: int) -> Path:
        return self.folder / f"{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdecimal())

    def files(self, step: int) -> dict[str, str]:
        """Return the digests of the files of a checkpoint by name; empty if they cannot be read."""
        try:
            files: dict[str, str] = _read_record(self.path(step))["files"]
        except CheckpointError:
            return {}
        return files

    def save(self, step: int, checkpoint: Checkpoint, protect: Collection[int] = ()) -> None:
        """Write a checkpoint and remove old ones, except the newest ``keep`` and protected ones (best, scheduled)."""
        save_checkpoint(self.path(step), checkpoint)
        for old in self.steps()[: -self.keep]:
            if old not in protect:
                shutil.rmtree(self.path(old), ignore_errors=True)

    def newest(self) -> tuple[Checkpoint, list[str]] | None:
        """Return the newest intact checkpoint and the faults of newer ones, or None if there are no checkpoints."""
        faults: list[str] = []
        for step in reversed(self.steps()):
            try:
                return load_checkpoint(self.path(step)), faults
            except CheckpointError as error:
                faults.append(str(error))
        if faults:
            raise CheckpointError(f"there is no intact checkpoint in {self.folder}: {'; '.join(faults)}")
        return None
