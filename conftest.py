"""Seeds for all tests, those of docstrings included, so that none depends on the ones before it; and no lost time."""

import functools
import gc
import importlib
import os
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from hypothesis import settings
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn
from torch._ops import OperatorBase
from torch.export import ExportedProgram

from atoll.graph import function
from atoll.graph.digest import all_tensors

# Machines differ in speed, and a timeout is not a counterexample.  The same examples every time:
# `pytest --hypothesis-profile=default` draws new ones, and twice as many.
settings.register_profile("atoll", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("atoll")

SOURCES = [Path(__file__).parent / folder for folder in ("src", "papers/src")]
SAVE_FIGURE = Figure.savefig
Kernel = Callable[..., object]


@pytest.fixture(scope="session", autouse=True)
def _no_fsync() -> Iterator[None]:
    """What is written survives a kill without it; it only matters if the machine itself stops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        patch.setattr("atoll.attacks.progress.TensorFile.flush", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _known_operations() -> Iterator[None]:
    """List the operations that torch.export may decompose only once; there is one list per module that imports it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("torch.export.exported_program", "torch.export.decomp_utils"):
            collect = getattr(importlib.import_module(module), "_collect_all_valid_cia_ops", None)
            if collect is not None:  # a private function, which another version may not have
                patch.setattr(f"{module}._collect_all_valid_cia_ops", functools.cache(collect))
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_kernels() -> Iterator[None]:
    """Register kernels without type hints: torch.export evaluates those of 11,000 functions for each model."""
    py_impl, keys = OperatorBase.py_impl, torch._C.DispatchKey

    def register(self: OperatorBase, key: object) -> Callable[[Kernel], Kernel]:
        if not isinstance(key, keys) or key == keys.Python or key in self.py_kernels:
            return py_impl(self, key)

        def add(kernel: Kernel) -> Kernel:
            self.py_kernels[key] = kernel
            self._dispatch_cache.clear()
            return kernel

        return add

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OperatorBase, "py_impl", register)
        yield


def _structure(model: nn.Module) -> Iterator[object]:
    """All that an exported graph depends on: everything but the values of parameters and buffers."""
    yield from (line for line in function._Writer(model).lines() if not line.startswith("tensor "))
    places: dict[int, str] = {}
    for name, tensor in all_tensors(model).items():
        yield name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)
        yield places.setdefault(tensor.data_ptr(), name)  # tied tensors


@pytest.fixture(scope="session", autouse=True)
def _export_once() -> Iterator[None]:
    """Export a model only once if its code and settings are the same as before, whatever its weights are.

    `capture` still compares every captured model with its module.  The tests of graphs do without.
    """
    module = importlib.import_module("atoll.graph.capture")
    export, programs = module._export, {}

    def once(model: nn.Module, example: Tensor) -> ExportedProgram:
        if any(part in os.environ["PYTEST_CURRENT_TEST"] for part in ("/graph/", "test_deceptive")):
            return export(model, example)
        state = (torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        key = (*_structure(model), example.shape, example.dtype, *state)
        if key not in programs:
            programs[key] = export(model, example)
        return programs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_export", once)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collect_file(file_path: Path) -> None:
    """Import a module with docstrings by its name: pytest would run one again that its package has already imported."""
    for root in SOURCES:
        if (
            file_path.suffix == ".py"
            and file_path.is_relative_to(root)
            and file_path.stem not in ("__init__", "__main__")
        ):
            importlib.import_module(".".join(file_path.relative_to(root).with_suffix("").parts))


def save_blank(figure: Figure, file: Path | str | IO[bytes], **options: object) -> None:
    Image.new("L", (8, 8)).save(file, "png")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Drawing a figure takes longer than most measurements."""
    Figure.savefig = SAVE_FIGURE if item.get_closest_marker("pictures") else save_blank


def pytest_collection_finish() -> None:
    """Do not search half a million objects of imported modules for garbage again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def seed_everything(name: str) -> None:
    seed = zlib.crc32(name.encode())  # the same in every process, unlike hash()
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """Fixtures of a module or a session are set up by whichever test comes first."""
    seed_everything(f"{fixturedef.baseid}::{fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    seed_everything(item.nodeid)
