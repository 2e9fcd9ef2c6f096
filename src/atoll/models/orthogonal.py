"""Orthogonal layers with explicit kernels, which preserve norms by construction, and a network of them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import LARGEST_SIZE, InputError, check_count
from atoll.models.activations import ACTIVATIONS, Activation, expect_groups
from atoll.models.base import MODELS, Classifier, choose, expect_image
from atoll.models.liresnet import UnitLinear


def cayley(weight: Tensor) -> Tensor:
    r"""Return the Cayley transform, with orthonormal columns, of a matrix of shape (..., n, p), n >= p.

    .. math:: Q = \begin{pmatrix} (I - A)(I + A)^{-1} \\ -2 V (I + A)^{-1} \end{pmatrix}, \quad A = U - U^T + V^T V

    with U the first p rows of the weight and V the others (Trockman & Kolter, 2021).  The symmetric part of I + A is at
    least I, so the inverse exists and its norm is at most 1.

    >>> q = cayley(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))
    >>> (q.mT @ q).round(decimals=5).abs()
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])
    """
    size = weight.shape[-1]
    u, v = weight[..., :size, :], weight[..., size:, :]
    identity = torch.eye(size, dtype=weight.dtype, device=weight.device)
    # `inv_ex` instead of `inv`, whose error check is not needed and would stay in exported graphs.
    inverse = torch.linalg.inv_ex(identity + u - u.mT + v.mT @ v).inverse
    return torch.cat([2 * inverse - identity, -2 * v @ inverse], -2)


def _cayley_parameter(*shape: int) -> nn.Parameter:
    """Return an initial value for ``cayley`` that spreads the columns of Q over all n coordinates."""
    *_, rows, size = shape
    weight = torch.randn(shape) * math.sqrt(2 / max(rows, 1))
    if rows > size > 0:
        for matrix in weight.view(-1, rows, size):
            nn.init.orthogonal_(matrix[size:])
    return nn.Parameter(weight)


class OrthogonalLinear(nn.Module):
    """Dense layer whose matrix has orthonormal rows or columns, whichever are fewer.

    >>> layer = OrthogonalLinear(3, 5)
    >>> torch.linalg.svdvals(layer.kernel).detach().round(decimals=5)
    tensor([1., 1., 1.])
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__()
        check_count(1, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.weight = _cayley_parameter(max(in_features, out_features), min(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    @property
    def kernel(self) -> Tensor:
        """The weight matrix, (out, in)."""
        q = cayley(self.weight)
        return q.mT if self.out_features < self.in_features else q

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kernel, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class OrthogonalConv2d(nn.Module):
    r"""Adaptive orthogonal convolution (AOC; Boissin et al., 2025) with an explicit kernel of any size and stride.

    The kernel is a block convolution of orthogonal factors.  With k' = kernel_size - stride + 1 these are k' - 1
    vertical and k' - 1 horizontal kernels of size 2, :math:`[P, I - P]` with projections :math:`P = M M^T` (BCOP;
    Li et al., 2019), followed by a stride x stride kernel on patches that do not overlap, a reshaped orthogonal matrix.

    On an infinite image, the map is an isometry if out_channels >= in_channels stride^2, otherwise its transpose is.
    The same is true for finite images with padding kernel_size - 1 in the first case, and without padding in the
    second.  With any other zero padding, the layer is 1-Lipschitz, but not orthogonal at the border.

    >>> layer = OrthogonalConv2d(2, 8, 4, stride=2, padding=1)
    >>> layer(torch.zeros(3, 2, 6, 6)).shape, layer.kernel.shape
    (torch.Size([3, 8, 3, 3]), torch.Size([8, 2, 4, 4]))
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_count(1, LARGEST_SIZE, in_channels=in_channels, out_channels=out_channels, stride=stride)
        check_count(0, LARGEST_SIZE, padding=padding)
        if kernel_size < stride:
            raise InputError(f"kernel_size: expected at least {stride} (the stride), got {kernel_size}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        channels = max(in_channels, out_channels // stride**2)  # number of channels between the factors
        patch = channels * stride**2
        self.weight = _cayley_parameter(max(patch, out_channels), min(patch, out_channels))
        self.projections = _cayley_parameter(2 * (kernel_size - stride), channels, channels // 2)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    @property
    def kernel(self) -> Tensor:
        """The kernel, (out, in, height, width)."""
        q, channels = cayley(self.weight), self.projections.shape[1]
        if self.out_channels < channels * self.stride**2:
            q = q.mT
        kernel = q.reshape(self.out_channels, self.stride, self.stride, channels)
        for number, m in enumerate(cayley(self.projections)):
            projected = kernel @ m @ m.mT
            rest = kernel - projected
            if number % 2:
                kernel = F.pad(projected, (0, 0, 0, 0, 0, 1)) + F.pad(rest, (0, 0, 0, 0, 1, 0))
            else:
                kernel = F.pad(projected, (0, 0, 0, 1)) + F.pad(rest, (0, 0, 1, 0))
        return kernel[..., : self.in_channels].permute(0, 3, 1, 2).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, self.bias, self.stride, self.padding)

    def extra_repr(self) -> str:
        sizes = f"{self.in_channels}, {self.out_channels}, {self.kernel_size}"
        return f"{sizes}, stride={self.stride}, padding={self.padding}, bias={self.bias is not None}"


@MODELS.register()
class OrthogonalNet(Classifier):
    """Network of orthogonal convolutions, an orthogonal dense layer, and a head with rows of norm 1.

    Each stage halves the image with a 4x4 convolution of stride 2, followed by ``depth`` 3x3 convolutions, and has
    twice as many channels as the previous stage.  The activation follows every layer except the head.

    Args:
        width: channels of the first stage.
        depth: number of 3x3 convolutions in each stage.
        stages: number of stages.
        features: width of the dense layer.
        activation: ``minmax``, ``groupsort`` and ``householder`` preserve gradient norms.

    >>> OrthogonalNet((1, 8, 8), 10, width=8, features=32)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        width: int = 32,
        depth: int = 1,
        stages: int = 2,
        features: int = 256,
        activation: Activation = "minmax",
        **options: Any,
    ) -> None:
        check_count(1, LARGEST_SIZE, width=width, stages=stages, features=features)
        check_count(0, LARGEST_SIZE, depth=depth)
        channels, height, side = expect_image(input_shape, type(self).__name__, at_least=2**stages)
        nonlinearity = choose(ACTIVATIONS, activation, "activation")
        expect_groups(activation, width, features)
        super().__init__(input_shape, num_classes, **options)
        layers: list[nn.Module] = []
        for stage in range(stages):
            out = width * 2**stage
            layers += [OrthogonalConv2d(channels, out, 4, stride=2, padding=1), nonlinearity(out)]
            for _ in range(depth):
                layers += [OrthogonalConv2d(out, out, 3, padding=1), nonlinearity(out)]
            channels, height, side = out, height // 2, side // 2
        layers += [nn.Flatten(), OrthogonalLinear(channels * height * side, features), nonlinearity(features)]
        self.body = nn.Sequential(*layers)
        self.head = UnitLinear(features, num_classes)
