"""Where foreign models come from: Python code, timm, Hugging Face folders, ``torch.export`` programs, ONNX files."""

from __future__ import annotations

import importlib
import json
import pickle
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from atoll.adopt.onnx_model import read_onnx
from atoll.errors import InputError
from atoll.files import sha256
from atoll.models.timm_adapter import import_timm
from atoll.registry import load_file as load_python
from atoll.training.checkpoint import load_weights

PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "0.", "1.")  # of wrappers: DataParallel, compile, RobustBench
INNER = ("state_dict", "model_state_dict", "model", "net", "ema", "last")  # entries of checkpoints with the weights
EXPECTED = "an .onnx file, net.py:build, package.module:Class, timm:NAME, a Hugging Face folder or a .pt2 program"


@dataclass(frozen=True)
class Source:
    """A foreign model.

    Args:
        module: the model.
        kind: ``onnx``, ``export``, ``python``, ``timm`` or ``huggingface``.
        files: digests of the files that it was read from, by name.
    """

    module: nn.Module
    kind: str
    files: Mapping[str, str]


def load_source(
    model: str, *, weights: Path | str | None = None, arguments: Mapping[str, Any] | None = None, trust: bool = False
) -> Source:
    """Load a foreign model.

    Args:
        model: an ONNX file, ``net.py:build``, ``package.module:Class``, ``timm:NAME``, a Hugging Face folder, or a
            program saved by ``torch.export.save`` (``.pt2``).
        weights: state dict for code and timm, as safetensors or from ``torch.save``.
        arguments: arguments of the function or class.
        trust: whether to load ``.pt2`` files, which can execute code.
    """
    path = Path(model)
    if path.suffix == ".onnx":
        _refuse(weights, arguments, "an ONNX file contains its weights")
        return Source(read_onnx(path), "onnx", _digests(path))
    if path.suffix == ".pt2":
        _refuse(weights, arguments, "a .pt2 program contains its weights")
        return Source(_load_program(path, trust), "export", _digests(path))
    if path.is_dir():
        return _load_folder(path)
    if path.suffix in (".pt", ".pth", ".safetensors", ".bin", ".ckpt"):
        raise InputError(f"model: {path} contains weights but no model; use net.py:build --weights {path}")
    name, colon, member = model.rpartition(":")
    if not colon or not name or not member:
        raise InputError(f"model: expected {EXPECTED}, got {model!r}")
    files = _digests(Path(weights)) if weights is not None else {}
    if name == "timm":
        module = _create(import_timm().create_model, {"model_name": member, **(arguments or {})}, model)
        kind = "timm"
    else:
        module, kind = _create(_import(name, member), arguments or {}, model), "python"
        if name.endswith(".py"):
            files |= _digests(Path(name))
    if weights is not None:
        load_state(module, read_state(Path(weights)), str(weights))
    return Source(module, kind, files)


def _refuse(weights: object, arguments: object, reason: str) -> None:
    if weights is not None:
        raise InputError(f"weights: {reason}")
    if arguments:
        raise InputError(f"arguments: expected none, because {reason}")


def _digests(path: Path) -> dict[str, str]:
    try:
        return {path.name: sha256(path)}
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def _import(name: str, member: str) -> Callable[..., Any]:
    try:
        module = load_python(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"model: cannot import {name}: {error}") from None
    function: Callable[..., Any] | None = getattr(module, member, None)
    if not callable(function):
        raise InputError(f"model: {name} has no function or class {member!r}")
    return function


def _create(function: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> nn.Module:
    if isinstance(function, nn.Module):
        return function
    try:
        module = function(**arguments)
    except Exception as error:  # anything may happen in somebody else's code
        raise InputError(f"model: {name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"model: expected an nn.Module from {name}, got {type(module).__name__}")
    return module


def _load_program(path: Path, trust: bool) -> nn.Module:
    if not trust:
        raise InputError(f"model: loading {path} can execute code from the file; use --trust if you trust it")
    try:
        module = torch.export.load(path).module()
    except Exception as error:  # the loader's own errors have no common type
        raise InputError(f"model: {path} is not a program of torch.export: {_line(error)}") from None
    for name in ("train", "eval"):  # a program has only the mode in which it was exported, and refuses these calls
        setattr(module, name, types.MethodType(lambda self, mode=True: self, module))
    return module


class _Logits(nn.Module):
    """A Hugging Face model that returns its logits instead of a record."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=x).logits
        return logits


def _load_folder(path: Path) -> Source:
    """Load a model from a Hugging Face folder: config.json and model.safetensors."""
    config, weights = path / "config.json", path / "model.safetensors"
    if not config.is_file() or not weights.is_file():
        raise InputError(f"model: expected config.json and model.safetensors in {path}")
    try:
        tree = json.loads(config.read_text())
        architecture, inner = tree.get("architecture"), tree.get("model_args") or {}
        classes = tree.get("num_classes")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"model: cannot read {config}: {_line(error)}") from None
    files = _digests(config) | _digests(weights)
    if isinstance(architecture, str):  # a model of timm
        arguments = {"model_name": architecture, **inner} | ({"num_classes": classes} if classes else {})
        module = _create(import_timm().create_model, arguments, architecture)
        load_state(module, read_state(weights), str(weights))
        return Source(module, "huggingface", files)
    try:
        from transformers import AutoModelForImageClassification  # type: ignore[import-not-found]
    except ImportError:
        raise InputError(f"model: {path} needs the package transformers; pip install transformers") from None
    try:
        model = AutoModelForImageClassification.from_pretrained(path, local_files_only=True, use_safetensors=True)
    except Exception as error:
        raise InputError(f"model: cannot load {path}: {_line(error)}") from None
    return Source(_Logits(model), "huggingface", files)


def read_state(path: Path) -> dict[str, Tensor]:
    """Read a state dict without executing code: safetensors, or a file of ``torch.save`` that contains only tensors."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"weights: cannot read {path}: {error.strerror}") from None
    except (SafetensorError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        code = "Unsupported" in str(error) or "weights_only" in str(error) or "WeightsUnpickler" in str(error)
        reason = "it contains objects other than tensors, which could execute code" if code else _line(error)
        raise InputError(f"weights: cannot read {path}: {reason}; save the state dict as safetensors") from None
    for _ in range(3):
        if isinstance(content, Mapping) and not _is_state(content):
            inner = next((content[name] for name in INNER if isinstance(content.get(name), Mapping)), None)
            content = inner if inner is not None else content
    if not isinstance(content, Mapping) or not _is_state(content):
        raise InputError(f"weights: expected a state dict in {path}")
    return dict(content)


def _is_state(content: Mapping[Any, Any]) -> bool:
    values = list(content.values())
    return bool(values) and all(isinstance(value, Tensor) for value in values)


def load_state(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load a state dict into a model; prefixes of wrappers such as ``module.`` are added or removed.

    >>> model = nn.Linear(2, 1)
    >>> load_state(model, {"module.weight": torch.ones(1, 2), "module.bias": torch.zeros(1)}, "weights.pt")
    >>> model.weight.tolist()
    [[1.0, 1.0]]
    """
    own = module.state_dict()
    best = min(_candidates(state), key=lambda names: len(own.keys() ^ names.keys()))
    counters = {name: value for name, value in own.items() if name.endswith("num_batches_tracked")}
    load_weights(module, counters | best, source)  # older files have no counters, and evaluation does not use them


def _candidates(state: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The state dict with prefixes of wrappers removed, one after the other."""
    current = dict(state)
    candidates = [current]
    while prefix := next((p for p in PREFIXES if all(name.startswith(p) for name in current)), None):
        current = {name.removeprefix(prefix): tensor for name, tensor in current.items()}
        candidates.append(current)
    # RobustBench stores the normalization of a wrapped model next to its weights.
    inner = {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}
    return [*candidates, inner] if inner else candidates


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
