"""Adapter for models of PyTorch Image Models (timm)."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import InputError
from atoll.models.base import MODELS, Classifier, Normalize, expect_image
from atoll.threat import Bounds


class TimmBody(nn.Module):
    """A timm model up to its penultimate features, without its classifier."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.net.forward_head(self.net.forward_features(x), pre_logits=True)  # type: ignore[operator]
        return z.flatten(1)


@MODELS.register()
class Timm(Classifier):
    """A model of PyTorch Image Models (timm; Wightman, 2019), including its normalization.

    There is no ``input_range``, because the model defines its mean and standard deviation.  Images that do not have
    three channels use the averages.

    Args:
        name: name of the timm model, such as ``resnet18`` or ``vit_small_patch16_224.augreg_in21k``.
        pretrained: whether to load pretrained weights, which are downloaded if necessary.
        options: further arguments of ``timm.create_model``, such as ``img_size`` or ``drop_path_rate``.

    In a recipe: ``model: {class_path: Timm, init_args: {name: resnet18}}``.
    """

    head: nn.Linear

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        name: str,
        pretrained: bool = False,
        options: dict[str, Any] | None = None,
        bounds: Bounds | None = (0.0, 1.0),
    ) -> None:
        channels, *_ = expect_image(input_shape, type(self).__name__)
        super().__init__(input_shape, num_classes, bounds=bounds)
        net = create_timm(name, pretrained=pretrained, in_chans=channels, num_classes=num_classes, **(options or {}))
        self.head = _take_classifier(net, name)
        self.body = TimmBody(net)
        self.normalize = Normalize(*timm_normalization(net, channels))
        self._probe(name)

    def _probe(self, name: str) -> None:
        """Raise an InputError if the model does not fit the images, or its features do not fit its classifier."""
        head, mode = self.head, self.training
        try:
            with torch.no_grad():
                shape = self.eval().features(torch.zeros(1, *self.input_shape, device=head.weight.device)).shape
        except (AssertionError, RuntimeError, ValueError) as error:
            raise InputError(
                f"{name}: does not accept images of shape {self.input_shape}: {str(error).splitlines()[0]}"
                " (for models with a fixed image size, set options: {img_size: ...})"
            ) from error
        finally:
            self.train(mode)
        if shape[1] != head.in_features:
            raise InputError(f"{name}: has {shape[1]} features, but its classifier expects {head.in_features}")


_LIBRARIES: list[Any] = []  # an operator exists as long as the library that defined it


def import_torchvision() -> None:
    """Import torchvision, if it is installed, so that libraries that import it work.

    torchvision fails if its operators are not built for the installed torch, as there is no torchvision for a torch
    without CUDA.  No classifier of timm or transformers calls them, so it is enough to declare them.
    """
    with contextlib.suppress(ImportError):
        try:
            import torchvision
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _LIBRARIES.append(library)
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]  # only half imported
            import torchvision  # noqa: F401


def import_timm() -> Any:
    """Import timm; raises an InputError if that fails."""
    try:
        import_torchvision()
        import timm
    except (ImportError, RuntimeError) as error:
        raise InputError(f"timm cannot be imported ({error}); run pip install atoll[timm]") from error
    return timm


OWN_FILES = ("cache_dir", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")  # arguments that name files


def create_timm(name: str, **options: Any) -> nn.Module:
    """Create a model of timm from its own list; raises an InputError if that fails.

    Names of other places, such as ``hf-hub:`` and ``local-dir:``, and options that name files are refused.
    """
    timm = import_timm()
    if ":" in name or "/" in name:
        raise InputError(f"name: {name!r} is not a name of timm's own models; to load a folder, use atoll adopt FOLDER")
    if not timm.is_model(name):
        close = timm.list_models(f"*{name.partition('.')[0]}*")[:5]
        hint = f"; did you mean one of {', '.join(close)}?" if close else ""
        raise InputError(f"name: timm has no model {name!r}{hint}")
    if refused := [option for option in OWN_FILES if options.get(option) is not None]:
        raise InputError(f"{name}: the option {refused[0]} is not supported; load weights from a file instead")
    try:
        net: nn.Module = timm.create_model(name, **options)
    except Exception as error:  # no such pretrained tag, no such option, or options that do not fit
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"{name}: {line}") from error
    return net


def timm_normalization(net: Any, channels: int) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of a model of timm; the averages if the number of channels differs."""
    config = net.default_cfg
    mean, std = (_per_channel(config[key], channels) for key in ("mean", "std"))
    return mean, std


def _take_classifier(net: Any, name: str) -> nn.Linear:
    """Remove the classifier from the model and return it, so that its parameters are saved only once."""
    classifier = net.get_classifier()
    if not isinstance(classifier, nn.Linear):
        raise InputError(f"{name}: expected a single nn.Linear as classifier, got {type(classifier).__name__}")
    place = next(path for path, module in net.named_modules() if module is classifier)
    net.set_submodule(place, nn.Identity())
    return classifier


def _per_channel(values: tuple[float, ...], channels: int) -> list[float]:
    return list(values) if len(values) == channels else [sum(values) / len(values)] * channels
