"""Adapter for models of PyTorch Image Models (timm)."""

from __future__ import annotations

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
        net = _create(name, pretrained, in_chans=channels, num_classes=num_classes, **(options or {}))
        self.head = _take_classifier(net, name)
        self.body = TimmBody(net)
        config = net.default_cfg
        self.normalize = Normalize(*(_per_channel(config[key], channels) for key in ("mean", "std")))
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


def import_timm() -> Any:
    """Import timm; raises an InputError if that fails.

    timm imports torchvision, which fails if its operators are not built for the installed torch, as there is no
    torchvision for a torch without CUDA.  No classifier of timm calls them, so it is enough to declare them.
    """
    try:
        try:
            import timm
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _LIBRARIES.append(library)
            for name in [name for name in sys.modules if name.partition(".")[0] in ("timm", "torchvision")]:
                del sys.modules[name]  # only half imported
            import timm
    except (ImportError, RuntimeError) as error:
        raise InputError(f"timm cannot be imported ({error}); run pip install atoll[timm]") from error
    return timm


def _create(name: str, pretrained: bool, **options: Any) -> Any:
    """Create the timm model; raises an InputError if that fails."""
    timm = import_timm()
    if not timm.is_model(name):
        close = timm.list_models(f"*{name.partition('.')[0]}*")[:5]
        hint = f"; did you mean one of {', '.join(close)}?" if close else ""
        raise InputError(f"name: timm has no model {name!r}{hint}")
    try:
        return timm.create_model(name, pretrained=pretrained, **options)
    except (RuntimeError, TypeError) as error:  # no such pretrained tag, or no such option
        raise InputError(f"{name}: {error}") from error


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
