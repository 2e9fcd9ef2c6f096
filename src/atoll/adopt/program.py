"""Programs saved by ``torch.export.save``, which can execute code when they are loaded."""

from __future__ import annotations

import types
from pathlib import Path

import torch
from torch import fx, nn

from atoll.adopt.weights import check_file, first_line
from atoll.errors import InputError
from atoll.graph.nodes import bind_arguments, draws_random_numbers


def load_program(path: Path, trust: bool) -> nn.Module:
    """Load a program as a module for any batch size."""
    check_file(path, "model")
    if not trust:
        raise InputError(f"model: loading {path} can execute code from the file; use --trust if you trust it")
    try:
        module = torch.export.load(path).module()
        shapes = [tuple(node.meta["val"].shape) for node in module.graph.find_nodes(op="placeholder")]
    except Exception as error:  # the loader's own errors have no common type
        raise InputError(f"model: {path} is not a program of torch.export: {first_line(error)}") from None
    if len(shapes) != 1 or not shapes[0]:
        raise InputError(f"model: expected a program with one input, but {path} has {len(shapes)}")
    for node in module.graph.nodes:
        if draws_random_numbers(node) or bind_arguments(node).get("training") is True:
            raise InputError(f"model: {path} was exported in training mode; call eval() before torch.export.export")
    _free_program(module)
    if isinstance(shapes[0][0], int) and not _accepts_batches(module, shapes[0]):
        raise InputError(
            f"model: {path} has a fixed batch size of {shapes[0][0]}; pass"
            " dynamic_shapes=({0: torch.export.Dim.DYNAMIC},) to torch.export.export"
        )
    return module


def _free_program(module: fx.GraphModule) -> None:
    """Accept batch sizes outside the range of the export, and calls of ``train`` and ``eval``, which have no effect."""
    module.validate_inputs = False  # type: ignore[assignment]
    for node in module.graph.find_nodes(op="call_module", target="_guards_fn"):
        module.graph.erase_node(node)
    module.recompile()
    for part in module.modules():
        part.training = False
    for name in ("train", "eval"):
        setattr(module, name, types.MethodType(lambda self, mode=True: self, module))


@torch.no_grad()
def _accepts_batches(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether two batches have the same outputs alone and together."""
    generator = torch.Generator().manual_seed(0)
    try:
        parts = torch.rand(2, *map(int, shape), generator=generator).unbind()
        return torch.allclose(module(torch.cat(parts)), torch.cat([module(part) for part in parts]), 1e-3, 1e-3)
    except Exception:  # shapes that do not fit
        return False
