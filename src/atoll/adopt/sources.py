"""Where foreign models come from: Python code, timm, Hugging Face folders, ``torch.export`` programs, ONNX files."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from atoll.adopt.huggingface import load_folder, timm_default
from atoll.adopt.onnx_model import read_onnx
from atoll.adopt.program import load_program
from atoll.adopt.weights import Normalization, check_file, first_line, load_state, read_state
from atoll.errors import AtollError, InputError
from atoll.files import sha256
from atoll.models.timm_adapter import create_timm, import_timm
from atoll.registry import load_file as load_python

EXPECTED = "an .onnx file, net.py:build, package.module:Class, timm:NAME, a Hugging Face folder or a .pt2 program"


@dataclass(frozen=True)
class Source:
    """A foreign model.

    Args:
        module: the model.
        kind: ``onnx``, ``export``, ``python``, ``timm`` or ``huggingface``.
        files: digests of the files that it was read from, by name.
        normalization: what the model's files say about the preprocessing of images.
    """

    module: nn.Module
    kind: str
    files: Mapping[str, str]
    normalization: Normalization | None = None


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
        return Source(load_program(path, trust), "export", _digests(path))
    if path.is_dir():
        _refuse(weights, arguments, "a Hugging Face folder contains weights and settings")
        module, normalization, files = load_folder(path)
        return Source(module, "huggingface", _digests(*files), normalization)
    if path.suffix in (".pt", ".pth", ".safetensors", ".bin", ".ckpt"):
        raise InputError(f"model: {path} contains weights but no model; use net.py:build --weights {path}")
    state = read_state(Path(weights)) if weights is not None else None
    files = [Path(weights)] if weights is not None else []
    if model.startswith("timm:"):
        module = _create_timm(model.removeprefix("timm:"), dict(arguments or {}), state)
        normalization, kind = timm_default(module), "timm"
    else:
        name, colon, member = model.rpartition(":")
        if not colon or not name or not member:
            raise InputError(f"model: expected {EXPECTED}, got {model!r}")
        module, normalization, kind = _create(_import(name, member), arguments or {}, model), None, "python"
        files += [Path(name)] if name.endswith(".py") else []
    if state is not None:
        normalization = load_state(module, state, str(weights)) or normalization
    return Source(module, kind, _digests(*files), normalization)


def _refuse(weights: object, arguments: object, reason: str) -> None:
    if weights is not None:
        raise InputError(f"weights: {reason}")
    if arguments:
        raise InputError(f"arguments: expected none, because {reason}")


def _digests(*paths: Path) -> dict[str, str]:
    try:
        return {path.name: sha256(path) for path in paths}
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}") from None


def _create_timm(name: str, arguments: dict[str, Any], state: Mapping[str, Tensor] | None) -> nn.Module:
    """Create a model of timm with as many classes as the weights have, unless the arguments say how many."""
    timm = import_timm()
    if state is not None and timm.is_model(name):
        config = timm.get_pretrained_cfg(name)
        layers = [key for key in state if f".{key}".endswith(f".{config.classifier}.weight")] if config else []
        arguments = {"num_classes": len(state[layers[-1]])} | arguments if layers else arguments
    return create_timm(name, **arguments)


def _import(name: str, member: str) -> Callable[..., Any]:
    if name.endswith(".py"):
        check_file(Path(name), "model")
    try:
        module = load_python(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except AtollError:
        raise
    except Exception as error:  # anything may happen in somebody else's code
        raise InputError(f"model: cannot import {name}: {type(error).__name__}: {first_line(error)}") from error
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
        raise InputError(f"model: {name} failed: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"model: expected an nn.Module from {name}, got {type(module).__name__}")
    return module
