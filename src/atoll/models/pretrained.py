"""Published and own weights into a model: all checks first, then all copies, so nothing is ever half loaded.

Three sources, told apart by the names in the file: Google's ``.npz`` files of ViT and hybrids, timm's state
dicts of the same in safetensors, and Atoll's own safetensors of any model.  A source is only a table of where
each of our tensors comes from; what happens then (resizing, checking, copying) is the same for all.
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
    """One tensor of ours: the names in the file, and how to make ours of what is there."""

    names: tuple[str, ...]
    make: Callable[..., Tensor] = same


Rules = dict[str, Rule]


def load_pretrained(model: nn.Module, path: str | Path) -> list[str]:
    """Copy the weights of a file into ``model``.

    Into a ViT or HybridViT, the kernel that sees the pixels is resized by cubic interpolation and summed over
    the colors for gray images, and position embeddings are resized by bicubic interpolation of their grid.
    The head is copied when the number of classes agrees, and left as it is otherwise.

    Args:
        model: any model for Atoll's own files; a ViT or HybridViT for the others.
        path: a ``.npz`` or ``.safetensors`` file.

    Returns:
        One sentence, beginning with the tensor's name, for everything that was not copied as it is.

    Raises:
        CheckpointError: naming all that is missing, unexpected or mis-shaped; the model is then unchanged.

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
    """Cubic interpolation of the last two of four dimensions; the identity if the size agrees.

    With anti-aliasing: going from 16x16 to 4x4 without would look at a few of the 256 values only.

    >>> resize(torch.ones(1, 1, 16, 16), (4, 4)).mean().round(decimals=4)
    tensor(1.)
    """
    if kernel.shape[-2:] == size:
        return kernel
    return F.interpolate(kernel.float(), size=size, mode="bicubic", antialias=True, align_corners=False)


def resize_positions(position: Tensor, grid: tuple[int, int]) -> Tensor:
    """Position embeddings ``(1, 1 + n * n, width)`` for another grid; the class token's own is kept.

    >>> resize_positions(torch.zeros(1, 1 + 14 * 14, 8), (15, 15)).shape
    torch.Size([1, 226, 8])
    """
    token, cells = position[:, :1], position[:, 1:]
    side = math.isqrt(cells.shape[1])
    resized = resize(cells.transpose(1, 2).reshape(1, -1, side, side), grid)
    return torch.cat([token, resized.flatten(2).transpose(1, 2)], dim=1)


def _read(path: Path) -> Weights:
    """The tensors of a file, which is never unpickled."""
    if path.suffix in PICKLES:
        raise CheckpointError(
            f"{path.name}: pickled weights can run code when loaded; convert the file to safetensors"
            " (safetensors.torch.save_file) where it is trusted"
        )
    if path.suffix not in (".npz", ".safetensors"):
        raise CheckpointError(f"{path.name}: expected a .safetensors or .npz file")
    try:
        if path.suffix == ".safetensors":
            tensors: Weights = load_file(path)
            return tensors
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, EOFError, TypeError, ValueError, zipfile.BadZipFile, SafetensorError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error


def _rules(model: nn.Module, source: Weights) -> Rules:
    """Where each of the model's tensors is in the file."""
    google = any(name.startswith(("Transformer/", "embedding/")) for name in source)
    timm = any(name.startswith("patch_embed.") for name in source)
    if not (google or timm):
        return {name: Rule((name,)) for name in model.state_dict()}  # Atoll's own files
    if not isinstance(model, ViT | HybridViT):
        kind = "Google's" if google else "timm's"
        raise CheckpointError(f"{kind} weights: expected a ViT or HybridViT, got {type(model).__name__}")
    rule = _google_rule if google else _timm_rule
    return {name: rule(model, name) for name in model.state_dict()}


def _without_head(source: Weights, rules: Rules, notes: list[str]) -> None:
    """Ask no head of a file that has none, or none that could be used."""
    if any(name.startswith("pre_logits") for name in source):
        # The head sits on top of this layer, which the original too leaves out for fine-tuning.
        reason = "the file's one follows a pre_logits layer, which is left out"
    elif not any(name.startswith("head") for name in source):
        reason = "the file has none"
    else:
        return
    for name in [name for name in source if name.startswith(("head", "pre_logits"))]:
        del source[name]
    for name in [name for name in rules if name.startswith("head.")]:
        del rules[name]
        notes.append(f"{name}: left at its initialization ({reason})")


def _fit_head(own: Mapping[str, Tensor], weights: Weights, notes: list[str]) -> None:
    """Leave out a head for another number of classes."""
    counts = {n: (len(weights[n]), len(own[n])) for n in weights if n.startswith("head.") and weights[n].dim()}
    if all(theirs != ours for theirs, ours in counts.values()):
        for name, (theirs, ours) in counts.items():
            del weights[name]
            notes.append(f"{name}: left at its initialization (the file has {theirs} classes, the model {ours})")


def _translate(source: Weights, rules: Rules, faults: list[str]) -> Weights:
    """The file's tensors under our names and in our layout."""
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
            except (IndexError, RuntimeError):  # permuting or joining what has other dimensions than expected
                shapes = [f"{part} {tuple(tensor.shape)}" for part, tensor in zip(rule.names, parts, strict=True)]
                faults.append(f"mis-shaped: {', '.join(shapes)}")
    return weights


def _fit_kernel(target: torch.Size, weights: Weights, name: str, notes: list[str]) -> None:
    """Sum over colors for gray images, and resize."""
    kernel = weights.get(name)
    if kernel is None or kernel.dim() != 4:
        return  # missing or mis-shaped, and reported as such
    if target[1] == 1 and kernel.shape[1] == 3:
        kernel = kernel.sum(dim=1, keepdim=True)  # what three equal channels would give
        notes.append(f"{name}: summed over the color channels")
    if kernel.shape[2:] != target[2:]:
        notes.append(f"{name}: resized from {_by(kernel.shape[2:])} to {_by(target[2:])}")
        kernel = resize(kernel, (target[2], target[3]))
    weights[name] = kernel


def _fit_position(target: torch.Size, weights: Weights, grid: tuple[int, ...], notes: list[str]) -> None:
    """Resize from a square grid to the model's."""
    position = weights.get(POSITION)
    if position is None or position.dim() != 3 or len(position) != 1 or position.shape == target:
        return
    side = math.isqrt(max(0, position.shape[1] - 1))
    if side == 0 or side**2 != position.shape[1] - 1:
        return  # not a class token and a square, and reported as mis-shaped
    weights[POSITION] = resize_positions(position, (grid[0], grid[1]))
    notes.append(f"{POSITION}: grid resized from {_by((side, side))} to {_by(grid)}")


def _check(own: Mapping[str, Tensor], weights: Weights, faults: list[str]) -> None:
    """Note what cannot be copied."""
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            faults.append(f"mis-shaped: {name}, expected {tuple(own[name].shape)}, got {tuple(tensor.shape)}")
        elif not tensor.isfinite().all():
            faults.append(f"not finite: {name}")


def _by(sides: Iterable[int]) -> str:
    return "x".join(map(str, sides))


# --- where each tensor is in Google's .npz files and timm's state dicts

_ATTENTION = "MultiHeadDotProductAttention_1"

# Layers and single tensors in timm's files, and in Google's.
_NAMES = {
    "body.cls": ("cls_token", "cls"),
    "body.position": ("pos_embed", "Transformer/posembed_input/pos_embedding"),
    "body.patch": ("patch_embed.proj", "embedding"),
    "body.norm": ("norm", "Transformer/encoder_norm"),
    "head": ("head", "head"),
    "body.stem.root": ("patch_embed.backbone.stem.conv", "conv_root"),
    "body.stem.norm": ("patch_embed.backbone.stem.norm", "gn_root"),
}
# Within a block.  Google numbers by position: the norms are its layers 0 and 2, attention is 1, the MLP 3.
_BLOCK_NAMES = {
    "norm1": ("norm1", "LayerNorm_0"),
    "attention.qkv": ("attn.qkv", _ATTENTION),
    "attention.out": ("attn.proj", f"{_ATTENTION}/out"),
    "norm2": ("norm2", "LayerNorm_2"),
    "fc1": ("mlp.fc1", "MlpBlock_3/Dense_0"),
    "fc2": ("mlp.fc2", "MlpBlock_3/Dense_1"),
}


def _names(layer: str) -> tuple[str, str]:
    """The name of one of our layers in timm's files, and in Google's."""
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
    """timm's state dicts differ from ours in the names only."""
    layer, _, ending = name.rpartition(".")
    return Rule((_names(name)[0] if name in _NAMES else f"{_names(layer)[0]}.{ending}",))


def _google_rule(model: nn.Module, name: str) -> Rule:
    """Google's ``.npz`` files are from Flax: inputs come before outputs in a kernel; heads are a dimension."""
    if name in _NAMES:
        return Rule((_names(name)[1],))
    layer, _, ending = name.rpartition(".")
    theirs, module = _names(layer)[1], model.get_submodule(layer)
    if layer.endswith("attention.qkv"):
        part, stack = ("kernel", _stack_kernels) if ending == "weight" else ("bias", _stack_biases)
        return Rule(tuple(f"{theirs}/{each}/{part}" for each in ("query", "key", "value")), stack)
    if isinstance(module, nn.LayerNorm | nn.GroupNorm):
        scale = "scale" if ending == "weight" else "bias"
        # Those of a group norm were once (1, 1, 1, channels).
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
