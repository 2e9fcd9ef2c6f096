"""Where each tensor of a ViT or HybridViT is found in Google's ``.npz`` files and timm's state dicts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atoll.models.hybrid import HybridViT
from atoll.models.vit import ViT


def same(tensor: Tensor) -> Tensor:
    return tensor


class Rule(NamedTuple):
    """One tensor of ours: the names in the file, and how to make ours of what is there."""

    names: tuple[str, ...]
    make: Callable[..., Tensor] = same


Rules = dict[str, Rule]


def own_rules(model: nn.Module) -> Rules:
    """Atoll's own files: everything has the same name."""
    return {name: Rule((name,)) for name in model.state_dict()}


def timm_rules(model: ViT | HybridViT) -> Rules:
    """timm's state dicts, which differ from ours in the names only."""
    theirs = {
        "body.cls": "cls_token",
        "body.position": "pos_embed",
        "body.patch": "patch_embed.proj",
        "body.norm": "norm",
        "head": "head",
        "body.stem.root": "patch_embed.backbone.stem.conv",
        "body.stem.norm": "patch_embed.backbone.stem.norm",
    }
    within_block = {
        "attention.qkv": "attn.qkv",
        "attention.out": "attn.proj",
        "fc1": "mlp.fc1",
        "fc2": "mlp.fc2",
    }
    for layer, block, part in _encoder_layers(model):
        theirs[layer] = f"blocks.{block}.{within_block.get(part, part)}"
    for layer, stage, block, kind, number in _stem_layers(model):
        part = f"{kind}{number}" if number else f"downsample.{kind}"
        theirs[layer] = f"patch_embed.backbone.stages.{stage}.blocks.{block}.{part}"
    rules: Rules = {}
    for name in model.state_dict():
        layer, _, ending = name.rpartition(".")
        rules[name] = Rule((theirs[name] if name in theirs else f"{theirs[layer]}.{ending}",))
    return rules


def google_rules(model: ViT | HybridViT) -> Rules:
    """Google's ``.npz`` files, from Flax: inputs come before outputs in a kernel; heads are a dimension."""
    rules: Rules = {
        "body.cls": Rule(("cls",)),
        "body.position": Rule(("Transformer/posembed_input/pos_embedding",)),
        "body.patch.weight": Rule(("embedding/kernel",), _conv),
        "body.patch.bias": Rule(("embedding/bias",)),
        "body.norm.weight": Rule(("Transformer/encoder_norm/scale",)),
        "body.norm.bias": Rule(("Transformer/encoder_norm/bias",)),
        "head.weight": Rule(("head/kernel",), _dense),
        "head.bias": Rule(("head/bias",)),
    }
    attention = "MultiHeadDotProductAttention_1"
    # Numbered by position in the block: the norms are its layers 0 and 2, attention is 1, the MLP 3.
    layers: dict[str, tuple[str, str, Callable[..., Tensor]]] = {
        "norm1": ("LayerNorm_0", "scale", same),
        "attention.out": (f"{attention}/out", "kernel", _join_heads),
        "norm2": ("LayerNorm_2", "scale", same),
        "fc1": ("MlpBlock_3/Dense_0", "kernel", _dense),
        "fc2": ("MlpBlock_3/Dense_1", "kernel", _dense),
    }
    for layer, block, part in _encoder_layers(model):
        prefix = f"Transformer/encoderblock_{block}"
        if part == "attention.qkv":
            three = [f"{prefix}/{attention}/{name}" for name in ("query", "key", "value")]
            rules[f"{layer}.weight"] = Rule(tuple(f"{name}/kernel" for name in three), _stack_kernels)
            rules[f"{layer}.bias"] = Rule(tuple(f"{name}/bias" for name in three), _stack_biases)
        else:
            theirs, weight, make = layers[part]
            rules[f"{layer}.weight"] = Rule((f"{prefix}/{theirs}/{weight}",), make)
            rules[f"{layer}.bias"] = Rule((f"{prefix}/{theirs}/bias",))
    stem = {
        layer: f"block{stage + 1}/unit{block + 1}/{{}}{number or '_proj'}"
        for layer, stage, block, _, number in _stem_layers(model)
    }
    if isinstance(model, HybridViT):
        stem |= {"body.stem.root": "{}_root", "body.stem.norm": "{}_root"}
    for name in model.state_dict():
        layer, _, ending = name.rpartition(".")
        if layer in stem and f"{layer}.bias" in model.state_dict():
            scale = {"weight": "scale", "bias": "bias"}[ending]
            rules[name] = Rule((f"{stem[layer].format('gn')}/{scale}",), torch.flatten)  # once (1, 1, 1, channels)
        elif layer in stem:
            rules[name] = Rule((f"{stem[layer].format('conv')}/kernel",), _conv)
    return rules


def _encoder_layers(model: ViT | HybridViT) -> Iterator[tuple[str, int, str]]:
    """Each layer of the transformer, with its block's number and its name there."""
    parts = ("norm1", "attention.qkv", "attention.out", "norm2", "fc1", "fc2")
    for block in range(len(model.body.blocks)):
        for part in parts:
            yield f"body.blocks.{block}.{part}", block, part


def _stem_layers(model: ViT | HybridViT) -> Iterator[tuple[str, int, int, str, str]]:
    """Each layer of the bottlenecks, with stage, block, kind (conv, norm) and number ("": shortcut)."""
    for name in dict.fromkeys(name.rpartition(".")[0] for name in model.state_dict()):
        if match := re.fullmatch(r"body\.stem\.stages\.(\d+)\.(\d+)\.(?:(conv|norm)(\d)|shortcut\.(\d))", name):
            stage, block, kind, number, of_shortcut = match.groups()
            yield name, int(stage), int(block), kind or ("conv", "norm")[int(of_shortcut)], number or ""


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
