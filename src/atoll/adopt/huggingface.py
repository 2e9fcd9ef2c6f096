"""Hugging Face folders: config.json and model.safetensors of timm or transformers.

No code from a folder is executed.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from atoll.adopt.weights import Normalization, check_file, first_line, load_state, read_state
from atoll.errors import InputError
from atoll.models.timm_adapter import create_timm, import_torchvision, timm_normalization

MAX_BYTES = 2**24  # of a configuration
MAX_SIZE = 1000  # layers
FOREIGN = (
    "auto_map",
    "backbone",
    "quantization_config",
    "use_timm_backbone",
)  # would load code or files from elsewhere
PREPROCESSOR = "preprocessor_config.json"


class Logits(nn.Module):
    """A model of transformers that returns its logits instead of a record."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=x).logits
        return logits


def load_folder(path: Path) -> tuple[nn.Module, Normalization | None, list[Path]]:
    """Load a model from a folder, and return it with its normalization and the files that were read."""
    config, weights = path / "config.json", path / "model.safetensors"
    if not config.is_file() or not weights.is_file():
        raise InputError(f"model: expected config.json and model.safetensors in {path}")
    tree = _read_json(config)
    if isinstance(tree.get("architecture"), str):
        module, normalization = _load_timm(tree, config, weights)
        return module, normalization, [config, weights]
    preprocessor = path / PREPROCESSOR
    normalization = _preprocessing(_read_json(preprocessor), preprocessor) if preprocessor.exists() else None
    module = _load_transformers(tree, path)
    return module, normalization, [config, weights, *([preprocessor] if preprocessor.exists() else [])]


def _read_json(path: Path) -> Mapping[str, Any]:
    check_file(path, "model")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"model: {path} is larger than {MAX_BYTES:,} bytes")
        tree = json.loads(path.read_text())
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"model: cannot read {path}: {first_line(error)}") from None
    if not isinstance(tree, dict):
        raise InputError(f"model: expected a mapping in {path}, got {type(tree).__name__}")
    return tree


def _load_timm(tree: Mapping[str, Any], config: Path, weights: Path) -> tuple[nn.Module, Normalization | None]:
    arguments, about = tree.get("model_args") or {}, tree.get("pretrained_cfg") or {}
    if not isinstance(arguments, dict) or not isinstance(about, dict):
        raise InputError(f"model: expected mappings as model_args and pretrained_cfg in {config}")
    if arguments.get("pretrained"):
        raise InputError(f"model: {config} asks for weights from elsewhere (pretrained)")
    if tree.get("num_classes"):
        arguments = {"num_classes": tree["num_classes"], **arguments}
    _check_sizes(arguments, config)
    module = create_timm(tree["architecture"], **arguments)
    wrapper = load_state(module, read_state(weights), str(weights))
    return module, wrapper or _stated(about.get("mean"), about.get("std"), config) or timm_default(module)


def timm_default(module: Any) -> Normalization:
    """The normalization of a model of timm with its published weights."""
    channels = next(p.shape[1] for p in module.parameters() if p.dim() == 4)
    mean, std = timm_normalization(module, channels)
    return Normalization(tuple(mean), tuple(std), "timm's configuration of the model")


def _load_transformers(tree: Mapping[str, Any], path: Path) -> nn.Module:
    if foreign := [name for name in FOREIGN if tree.get(name)]:
        raise InputError(f"model: {path / 'config.json'} refers to code or files from elsewhere ({foreign[0]})")
    _check_sizes(tree, path / "config.json")
    try:
        import_torchvision()
        from transformers import AutoModelForImageClassification
    except ImportError:
        raise InputError(f"model: {path} needs the package transformers; pip install transformers") from None
    try:
        with _silence():
            model, about = AutoModelForImageClassification.from_pretrained(
                path, local_files_only=True, use_safetensors=True, trust_remote_code=False, output_loading_info=True
            )
    except Exception as error:  # of a library with many kinds of errors
        reason = "its weights do not fit config.json" if "mismatched" in str(error) else first_line(error)
        raise InputError(f"model: cannot load {path}: {reason}") from None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if about.get(kind):
            name = min(map(str, about[kind]))
            raise InputError(
                f"model: the weights in {path} do not fit its config.json ({kind.replace('_', ' ')}: {name})"
            )
    return Logits(model.float())


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Silence the messages and progress bars of transformers."""
    from transformers.utils import logging as messages

    level, shows_bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity(messages.CRITICAL)
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if shows_bars:
            messages.enable_progress_bar()


def _preprocessing(tree: Mapping[str, Any], path: Path) -> Normalization | None:
    """The normalization of a preprocessor of transformers."""
    mean, std = tree.get("image_mean"), tree.get("image_std")
    if not tree.get("do_normalize", mean is not None):
        mean, std = 0.0, 1.0
    factor = tree.get("rescale_factor", 1 / 255) if tree.get("do_rescale", True) else 1
    if not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise InputError(f"model: expected a positive number as rescale_factor in {path}")
    highest = round(255 * factor, 6)  # 1/255 has rounding errors
    return _stated(mean, std, path, (-1.0, highest - 1) if tree.get("rescale_offset") else (0.0, highest))


def _stated(mean: Any, std: Any, path: Path, limits: tuple[float, float] = (0.0, 1.0)) -> Normalization | None:
    """The normalization in a configuration, if there is one."""
    if mean is None and std is None:
        return None
    values = [[part] if isinstance(part, int | float) else part for part in (mean, std)]
    if not all(isinstance(part, list) and all(isinstance(n, int | float) for n in part) for part in values):
        raise InputError(f"model: expected numbers as mean and std in {path}")
    return Normalization(tuple(map(float, values[0])), tuple(map(float, values[1])), path.name, limits)


def _check_sizes(values: Mapping[str, Any], path: Path) -> None:
    """Refuse numbers of layers that would take forever to build."""
    for name, value in values.items():
        largest = max(
            (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, int)), default=0
        )
        if largest > MAX_SIZE and (name.endswith("layers") or "depth" in name):
            raise InputError(f"model: {name} is {largest:,} in {path}, more than {MAX_SIZE:,}")
