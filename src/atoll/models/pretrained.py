"""Load published weights, or weights saved by Atoll, into a model.

There are three kinds of files, recognized by the names of their tensors: Google's ``.npz`` files of ViT and hybrids,
timm's state dicts of the same models in safetensors, and Atoll's safetensors of any model.  Each kind has a table that
says where to find our tensors; resizing, checking and copying is the same for all.  All checks run before the first
copy, so a model is never partially loaded.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import CheckpointError
from atoll.models.hybrid import HybridViT
from atoll.models.vit import ViT

PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
POSITION = "body.position"

Weights = dict[str, Tensor]


def same(tensor: Tensor) -> Tensor:
    return tensor


class Rule(NamedTuple):
    """Where to find one of our tensors: the names in the file, and how to convert them."""

    names: tuple[str, ...]
    make: Callable[..., Tensor] = same


Rules = dict[str, Rule]


def load_pretrained(model: nn.Module, path: str | Path) -> list[str]:
    """Copy the weights of a file into ``model``.

    For a ViT or HybridViT, the first kernel is resized by bicubic interpolation and summed over the color channels for
    grayscale images, and position embeddings are resized by bicubic interpolation of their grid.  The head is copied if
    the number of classes is the same, and not changed otherwise.

    Args:
        model: any model for files saved by Atoll; a ViT or HybridViT for other files.
        path: a ``.npz`` or ``.safetensors`` file.

    Returns:
        One sentence, starting with the name of the tensor, for each tensor that was not copied unchanged.

    Raises:
        CheckpointError: tensors are missing, unexpected or have the wrong shape; the model is not changed.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> tiny = {"patch_size": 4, "width": 8, "depth": 1, "heads": 2}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file(ViT((3, 16, 16), 10, **tiny).state_dict(), f"{folder}/vit.safetensors")
    ...     load_pretrained(ViT((3, 8, 8), 10, **tiny), f"{folder}/vit.safetensors")
    ['body.position: grid resized from 4x4 to 2x2']
    """
    path = Path(path)
    source = _read(path)
    rules = _rules(model, source)
    own = model.state_dict()
    notes: list[str] = []
    faults: list[str] = []
    _without_head(source, rules, notes)
    weights = _translate(source, rules, faults)
    _fit_head(own, weights, notes)
    if isinstance(model, ViT | HybridViT):
        pixels = "body.patch.weight" if isinstance(model, ViT) else "body.stem.root.weight"
        _fit_kernel(own[pixels].shape, weights, pixels, notes)
        _fit_position(own[POSITION].shape, weights, model.body.grid, notes)
    _check(own, weights, faults)
    if faults:
        raise CheckpointError(f"{path.name} does not fit this {type(model).__name__}: {'; '.join(faults)}")
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)  # the state dict shares its memory with the model
    return notes


def resize(kernel: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize the last two of four dimensions by bicubic interpolation; does nothing if the size is the same.

    Uses antialiasing; without it, going from 16x16 to 4x4 would ignore most of the 256 values.

    >>> resize(torch.ones(1, 1, 16, 16), (4, 4)).mean().round(decimals=4)
    tensor(1.)
    """
    if kernel.shape[-2:] == size:
        return kernel
    return F.interpolate(kernel.float(), size=size, mode="bicubic", antialias=True, align_corners=False)


def resize_positions(position: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resize position embeddings ``(1, 1 + n * n, width)`` to another grid; that of the class token does not change.

    >>> resize_positions(torch.zeros(1, 1 + 14 * 14, 8), (15, 15)).shape
    torch.Size([1, 226, 8])
    """
    token, cells = position[:, :1], position[:, 1:]
    side = math.isqrt(cells.shape[1])
    resized = resize(cells.transpose(1, 2).reshape(1, -1, side, side), grid)
    return torch.cat([token, resized.flatten(2).transpose(1, 2)], dim=1)


def _read(path: Path) -> Weights:
    """Read the tensors of a file without unpickling anything."""
    if path.suffix in PICKLES:
        raise CheckpointError(
            f"{path.name}: pickled weights can run code when loaded; if you trust the file, convert it to safetensors"
            " (safetensors.torch.save_file)"
        )
    if path.suffix not in (".npz", ".safetensors"):
        raise CheckpointError(f"{path.name}: expected a .safetensors or .npz file")
    if not path.is_file():  # reading a pipe would never end
        raise CheckpointError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    try:
        if path.suffix == ".safetensors":
            tensors: Weights = load_file(path)
            return tensors
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (OSError, EOFError, TypeError, ValueError, zipfile.BadZipFile, SafetensorError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error


def _rules(model: nn.Module, source: Weights) -> Rules:
    """Return where to find each tensor of the model in the file."""
    google = any(name.startswith(("Transformer/", "embedding/")) for name in source)
    timm = any(name.startswith("patch_embed.") for name in source)
    if not (google or timm):
        return {name: Rule((name,)) for name in model.state_dict()}  # saved by Atoll
    if not isinstance(model, ViT | HybridViT):
        kind = "Google's" if google else "timm's"
        raise CheckpointError(f"{kind} weights: expected a ViT or HybridViT, got {type(model).__name__}")
    rule = _google_rule if google else _timm_rule
    return {name: rule(model, name) for name in model.state_dict()}


def _without_head(source: Weights, rules: Rules, notes: list[str]) -> None:
    """Skip the head if the file has none, or none that fits the features."""
    if any(name.startswith("pre_logits") for name in source):
        # The head follows this layer, which the original code also removes for fine-tuning.
        reason = "the head in the file follows a pre_logits layer, which is not used"
    elif not any(name.startswith("head") for name in source):
        reason = "the file has none"
    else:
        return
    for name in [name for name in source if name.startswith(("head", "pre_logits"))]:
        del source[name]
    for name in [name for name in rules if name.startswith("head.")]:
        del rules[name]
        notes.append(f"{name}: not loaded ({reason})")


def _fit_head(own: Mapping[str, Tensor], weights: Weights, notes: list[str]) -> None:
    """Skip a head with another number of classes."""
    counts = {n: (len(weights[n]), len(own[n])) for n in weights if n.startswith("head.") and weights[n].dim()}
    if all(theirs != ours for theirs, ours in counts.values()):
        for name, (theirs, ours) in counts.items():
            del weights[name]
            notes.append(f"{name}: not loaded (the file has {theirs} classes, the model {ours})")


def _translate(source: Weights, rules: Rules, faults: list[str]) -> Weights:
    """Return the tensors of the file with our names and layout."""
    expected = {name for rule in rules.values() for name in rule.names}
    if missing := sorted(expected - source.keys()):
        faults.append(f"missing: {', '.join(missing)}")
    if unexpected := sorted(source.keys() - expected):
        faults.append(f"unexpected: {', '.join(unexpected)}")
    weights: Weights = {}
    for name, rule in rules.items():
        parts = [source[part] for part in rule.names if part in source]
        if len(parts) == len(rule.names):
            try:
                weights[name] = rule.make(*parts)
            except (IndexError, RuntimeError):  # permuting or joining tensors with unexpected dimensions
                shapes = [f"{part} {tuple(tensor.shape)}" for part, tensor in zip(rule.names, parts, strict=True)]
                faults.append(f"wrong shape: {', '.join(shapes)}")
    return weights


def _fit_kernel(target: torch.Size, weights: Weights, name: str, notes: list[str]) -> None:
    """Sum the kernel over color channels for grayscale images, and resize it."""
    kernel = weights.get(name)
    if kernel is None or kernel.dim() != 4:
        return  # missing or of the wrong shape, which is reported elsewhere
    if target[1] == 1 and kernel.shape[1] == 3:
        kernel = kernel.sum(dim=1, keepdim=True)  # equivalent to three equal channels
        notes.append(f"{name}: summed over the color channels")
    if kernel.shape[2:] != target[2:]:
        notes.append(f"{name}: resized from {_by(kernel.shape[2:])} to {_by(target[2:])}")
        kernel = resize(kernel, (target[2], target[3]))
    weights[name] = kernel


def _fit_position(target: torch.Size, weights: Weights, grid: tuple[int, ...], notes: list[str]) -> None:
    """Resize position embeddings from a square grid to the grid of the model."""
    position = weights.get(POSITION)
    if position is None or position.dim() != 3 or len(position) != 1 or position.shape == target:
        return
    side = math.isqrt(max(0, position.shape[1] - 1))
    if side == 0 or side**2 != position.shape[1] - 1:
        return  # not a class token and a square grid, which is reported elsewhere
    weights[POSITION] = resize_positions(position, (grid[0], grid[1]))
    notes.append(f"{POSITION}: grid resized from {_by((side, side))} to {_by(grid)}")


def _check(own: Mapping[str, Tensor], weights: Weights, faults: list[str]) -> None:
    """Add faults for tensors that cannot be copied."""
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            faults.append(f"wrong shape: {name}, expected {tuple(own[name].shape)}, got {tuple(tensor.shape)}")
        elif not tensor.isfinite().all():
            faults.append(f"not finite: {name}")


def _by(sides: Iterable[int]) -> str:
    return "x".join(map(str, sides))


# --- names of tensors in Google's .npz files and timm's state dicts

_ATTENTION = "MultiHeadDotProductAttention_1"

# Layers and single tensors in timm's and in Google's files.
_NAMES = {
    "body.cls": ("cls_token", "cls"),
    "body.position": ("pos_embed", "Transformer/posembed_input/pos_embedding"),
    "body.patch": ("patch_embed.proj", "embedding"),
    "body.norm": ("norm", "Transformer/encoder_norm"),
    "head": ("head", "head"),
    "body.stem.root": ("patch_embed.backbone.stem.conv", "conv_root"),
    "body.stem.norm": ("patch_embed.backbone.stem.norm", "gn_root"),
}
# Layers of a block.  Google numbers them by position: 0 and 2 are the norms, 1 is attention, 3 is the MLP.
_BLOCK_NAMES = {
    "norm1": ("norm1", "LayerNorm_0"),
    "attention.qkv": ("attn.qkv", _ATTENTION),
    "attention.out": ("attn.proj", f"{_ATTENTION}/out"),
    "norm2": ("norm2", "LayerNorm_2"),
    "fc1": ("mlp.fc1", "MlpBlock_3/Dense_0"),
    "fc2": ("mlp.fc2", "MlpBlock_3/Dense_1"),
}


def _names(layer: str) -> tuple[str, str]:
    """Return the name of one of our layers in timm's and in Google's files."""
    if match := re.fullmatch(r"body\.blocks\.(\d+)\.(.+)", layer):
        timm, google = _BLOCK_NAMES[match[2]]
        return f"blocks.{match[1]}.{timm}", f"Transformer/encoderblock_{match[1]}/{google}"
    if match := re.fullmatch(r"body\.stem\.stages\.(\d+)\.(\d+)\.(?:(conv|norm)(\d)|shortcut\.(\d))", layer):
        stage, block, kind, number, of_shortcut = match.groups()
        kind = kind or ("conv", "norm")[int(of_shortcut)]
        timm = f"blocks.{block}.{kind}{number}" if number else f"blocks.{block}.downsample.{kind}"
        google = f"unit{int(block) + 1}/{'conv' if kind == 'conv' else 'gn'}{number or '_proj'}"
        return f"patch_embed.backbone.stages.{stage}.{timm}", f"block{int(stage) + 1}/{google}"
    return _NAMES[layer]


def _timm_rule(model: nn.Module, name: str) -> Rule:
    """Return the rule for timm's state dicts, which differ from ours only in names."""
    layer, _, ending = name.rpartition(".")
    return Rule((_names(name)[0] if name in _NAMES else f"{_names(layer)[0]}.{ending}",))


def _google_rule(model: nn.Module, name: str) -> Rule:
    """Return the rule for Google's ``.npz`` files from Flax: kernels have inputs first, heads are a dimension."""
    if name in _NAMES:
        return Rule((_names(name)[1],))
    layer, _, ending = name.rpartition(".")
    theirs, module = _names(layer)[1], model.get_submodule(layer)
    if layer.endswith("attention.qkv"):
        part, stack = ("kernel", _stack_kernels) if ending == "weight" else ("bias", _stack_biases)
        return Rule(tuple(f"{theirs}/{each}/{part}" for each in ("query", "key", "value")), stack)
    if isinstance(module, nn.LayerNorm | nn.GroupNorm):
        scale = "scale" if ending == "weight" else "bias"
        # Some files have group norm parameters of shape (1, 1, 1, channels).
        return Rule((f"{theirs}/{scale}",), torch.flatten if isinstance(module, nn.GroupNorm) else same)
    if ending == "bias":
        return Rule((f"{theirs}/bias",))
    make = _join_heads if layer.endswith("attention.out") else _conv if isinstance(module, nn.Conv2d) else _dense
    return Rule((f"{theirs}/kernel",), make)


def _dense(kernel: Tensor) -> Tensor:
    return kernel.permute(1, 0)


def _conv(kernel: Tensor) -> Tensor:
    return kernel.permute(3, 2, 0, 1)  # height, width, in, out -> out, in, height, width


def _join_heads(kernel: Tensor) -> Tensor:
    return kernel.flatten(0, 1).permute(1, 0)  # heads, head width, out -> out, in


def _stack_kernels(*kernels: Tensor) -> Tensor:
    return torch.cat([kernel.flatten(1).permute(1, 0) for kernel in kernels])  # in, heads, head width -> out, in


def _stack_biases(*biases: Tensor) -> Tensor:
    return torch.cat([bias.flatten() for bias in biases])
