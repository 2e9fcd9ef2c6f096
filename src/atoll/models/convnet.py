"""Plain convolutional nets: the small ones of the certification literature, and one for tiny images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from atoll.errors import check_range
from atoll.models.activations import ACTIVATIONS, Activation, expect_groups
from atoll.models.base import MODELS, Classifier, Initialization, choose, expect_image, initialize

Layer = tuple[int, int, int]  # channels, kernel size, stride


class PlainConvNet(Classifier):
    """Convolutions with padding 1, then dense layers, each followed by the activation; a linear head.

    The base of the nets below, which only say which layers they have.
    """

    convolutions: Sequence[Layer] = ()
    dense: Sequence[int] = ()
    batch_norm = False

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        activation: Activation = "relu",
        initialization: Initialization = "default",
        **options: Any,
    ) -> None:
        # Two halvings with 4x4 kernels need four pixels; fewer would leave an empty map.
        channels, height, width = expect_image(input_shape, type(self).__name__, at_least=4)
        super().__init__(input_shape, num_classes, **options)
        act = choose(ACTIVATIONS, activation, "activation")
        expect_groups(activation, *(out for out, _, _ in self.convolutions), *self.dense)
        layers: list[nn.Module] = []
        for out, kernel, stride in self.convolutions:
            check_range("[1, inf)", channels=out)
            layers.append(nn.Conv2d(channels, out, kernel, stride, padding=1, bias=not self.batch_norm))
            layers += [nn.BatchNorm2d(out), act(out)] if self.batch_norm else [act(out)]
            channels = out
            height, width = ((side + 2 - kernel) // stride + 1 for side in (height, width))
        layers.append(nn.Flatten())
        features = channels * height * width
        for out in self.dense:
            check_range("[1, inf)", dense=out)
            layers += [nn.Linear(features, out), act(out)]
            features = out
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(features, num_classes)
        initialize(self, initialization)


@MODELS.register()
class ConvNet4C3F(PlainConvNet):
    """Four convolutions and three dense layers, the larger MNIST net of Wong et al. (2018).

    >>> ConvNet4C3F((1, 28, 28), 10).num_parameters
    1974762
    """

    convolutions = ((32, 3, 1), (32, 4, 2), (64, 3, 1), (64, 4, 2))
    dense = (512, 512)


@MODELS.register()
class ConvNet6C2F(PlainConvNet):
    """Six convolutions and two dense layers, for CIFAR-10 and Tiny-ImageNet (Leino et al., 2021).

    >>> ConvNet6C2F((3, 32, 32), 10).num_parameters
    2250378
    """

    convolutions = ((32, 3, 1), (32, 3, 1), (32, 4, 2), (64, 3, 1), (64, 3, 1), (64, 4, 2))
    dense = (512,)


@MODELS.register()
class SmallConvNet(PlainConvNet):
    """Stride-2 3x3 convolutions and one dense layer: trains in minutes on a CPU for 8x8 digits or MNIST.

    Args:
        widths: channels of the convolutions, each of which halves the image.
        hidden: width of the dense layer, and so the number of features.
        batch_norm: normalize after every convolution.

    ``activation`` (after every layer but the head) and ``initialization`` (default or orthogonal) are further options.

    >>> import torch
    >>> SmallConvNet((1, 8, 8), 10, widths=(4, 8))(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        widths: Sequence[int] = (16, 32),
        hidden: int = 64,
        batch_norm: bool = False,
        **options: Any,
    ) -> None:
        # Set first: the base class builds the layers.
        self.convolutions, self.dense, self.batch_norm = [(width, 3, 2) for width in widths], [hidden], batch_norm
        super().__init__(input_shape, num_classes, **options)
