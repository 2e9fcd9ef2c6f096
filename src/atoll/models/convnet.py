"""Plain convolutional networks: two from the certification literature, and one for tiny images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from atoll.errors import LARGEST_SIZE, check_count
from atoll.models.activations import ACTIVATIONS, Activation, expect_groups
from atoll.models.base import MODELS, Classifier, Initialization, choose, expect_image, initialize

Layer = tuple[int, int, int]  # channels, kernel size, stride


class PlainConvNet(Classifier):
    """Base class of networks with convolutions (padding 1), dense layers and a linear head.

    An activation follows each layer except the head.  Subclasses only define the sizes of the layers.
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
        # With fewer than four pixels, two 4x4 convolutions with stride 2 would leave an empty map.
        channels, height, width = expect_image(input_shape, type(self).__name__, at_least=4)
        super().__init__(input_shape, num_classes, **options)
        act = choose(ACTIVATIONS, activation, "activation")
        expect_groups(activation, *(out for out, _, _ in self.convolutions), *self.dense)
        layers: list[nn.Module] = []
        for out, kernel, stride in self.convolutions:
            check_count(1, LARGEST_SIZE, channels=out)
            layers.append(nn.Conv2d(channels, out, kernel, stride, padding=1, bias=not self.batch_norm))
            layers += [nn.BatchNorm2d(out), act(out)] if self.batch_norm else [act(out)]
            channels = out
            height, width = ((side + 2 - kernel) // stride + 1 for side in (height, width))
        layers.append(nn.Flatten())
        features = channels * height * width
        for out in self.dense:
            check_count(1, LARGEST_SIZE, dense=out)
            layers += [nn.Linear(features, out), act(out)]
            features = out
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(features, num_classes)
        initialize(self, initialization)


@MODELS.register()
class ConvNet4C3F(PlainConvNet):
    """ConvNet with four convolutions and three dense layers, the larger MNIST network of Wong et al. (2018).

    >>> ConvNet4C3F((1, 28, 28), 10).num_parameters
    1974762
    """

    convolutions = ((32, 3, 1), (32, 4, 2), (64, 3, 1), (64, 4, 2))
    dense = (512, 512)


@MODELS.register()
class ConvNet6C2F(PlainConvNet):
    """ConvNet with six convolutions and two dense layers, for CIFAR-10 and Tiny-ImageNet (Leino et al., 2021).

    >>> ConvNet6C2F((3, 32, 32), 10).num_parameters
    2250378
    """

    convolutions = ((32, 3, 1), (32, 3, 1), (32, 4, 2), (64, 3, 1), (64, 3, 1), (64, 4, 2))
    dense = (512,)


@MODELS.register()
class SmallConvNet(PlainConvNet):
    """Small ConvNet with 3x3 convolutions of stride 2 and one hidden layer, which trains in minutes on a CPU.

    Args:
        widths: channels of the convolutions, each of which halves the image.
        hidden: width of the hidden dense layer, which is the number of features.
        batch_norm: whether to apply batch normalization after every convolution.

    Further options are ``activation`` (after every layer except the head) and ``initialization`` (default or
    orthogonal).

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
        # Set these first, because the base class builds the layers.
        self.convolutions, self.dense, self.batch_norm = [(width, 3, 2) for width in widths], [hidden], batch_norm
        super().__init__(input_shape, num_classes, **options)
