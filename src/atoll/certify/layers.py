"""What is known about single layers: which are linear, and which have a Lipschitz constant of their own (in l2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from atoll.certify.norms import BUDGET, Pair, SpectralNormBound, conv_norm, dense_norm
from atoll.distributed import SyncBatchNorm
from atoll.errors import InputError
from atoll.models.activations import MinMax
from atoll.models.base import Normalize
from atoll.models.liresnet import ChannelScale, LinearResidual, UnitLinear

Shape = tuple[int, ...]
Result = TypeVar("Result")


@dataclass(frozen=True)
class ByKind(Generic[Result]):
    """A function of a layer that depends on the layer's class, None for classes that are not in the table.

    Unlike ``functools.singledispatch`` it knows a subclass only if that has not changed ``forward``: a convolution that
    normalizes its weights first is no longer the convolution a bound was proven for.

    >>> width = ByKind[int]({nn.Linear: lambda layer: layer.in_features})
    >>> width(nn.Linear(3, 2)), width(UnitLinear(3, 2)), width(nn.ReLU())
    (3, None, None)
    """

    table: dict[type[nn.Module], Callable[..., Result]]

    def __call__(self, module: nn.Module, *arguments: Any) -> Result | None:
        for kind in type(module).__mro__:
            if kind in self.table:
                return self.table[kind](module, *arguments) if type(module).forward is kind.forward else None
        return None


# An upper bound of the largest slope of GELU, 1.12890..., and of its approximation by tanh.
GELU_SLOPE = 1.13
# Where PyTorch's softplus goes over to the identity (beta x = 20) it jumps by log(1 + exp(-20)) / beta.
SOFTPLUS_JUMP = 2.1e-9


@dataclass(frozen=True)
class LinearMap:
    """A dense layer or a convolution without its bias; a linear residual is a convolution computed in two parts."""

    weight: Tensor
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    residual: bool = False

    @property
    def dense(self) -> bool:
        return self.weight.dim() == 2

    def apply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if self.dense else F.conv2d(x, self.weight, None, self.stride, self.padding)

    def transposed(self, y: Tensor, shape: Shape) -> Tensor:
        """The adjoint, back to inputs of a shape."""
        if self.dense:
            return y @ self.weight
        back: Tensor = conv2d_input([len(y), *shape], self.weight, y, self.stride, self.padding)  # type: ignore[no-untyped-call]
        return back

    def norm(self, shape: Shape, budget: float = BUDGET) -> SpectralNormBound:
        """A proven upper bound."""
        if self.dense:
            return dense_norm(self.weight)
        return conv_norm(self.weight, (shape[1], shape[2]), self.stride, self.padding, budget=budget)

    @property
    def terms(self) -> int:
        """Products that are added up for one output."""
        return self.weight[0].numel()

    @property
    def spread(self) -> float:
        r"""An upper bound a of the norm of the map with all weights replaced by their absolute values.

        By Cauchy and Schwarz output o is at most :math:`\|w_o\| \|x_{patch}\|`, and a pixel is part of at most
        :math:`\lceil k/s \rceil` patches in each direction.  The parts of a residual may cancel: x counts by itself,
        and once more because the kernel without the identity may be larger by it.
        """
        sides = zip(self.weight.shape[2:], self.stride, strict=False)
        patches = math.sqrt(math.prod(math.ceil(k / s) for k, s in sides))
        return float(self.weight.double().norm()) * patches + (2 if self.residual else 0)


def _convolution(module: nn.Conv2d) -> LinearMap:
    if module.groups != 1 or module.dilation != (1, 1) or module.padding_mode != "zeros":
        raise InputError("expected a convolution with zero padding, without groups or dilation")
    if isinstance(module.padding, str):
        raise InputError(f"expected padding as numbers, got {module.padding!r}")
    return LinearMap(module.weight, _pair(module.stride), _pair(module.padding))


# The linear part of a layer that is affine; gradients flow to the layer's parameters.
linear_map = ByKind[LinearMap](
    {
        nn.Linear: lambda layer: LinearMap(layer.weight),
        UnitLinear: lambda layer: LinearMap(layer.unit_weight),
        nn.Conv2d: _convolution,
        LinearResidual: lambda layer: LinearMap(layer.kernel, (1, 1), (1, 1), residual=True),
    }
)


def _batch_norm(module: nn.BatchNorm1d | nn.BatchNorm2d) -> Tensor:
    if module.running_var is None:
        raise InputError("expected running statistics: without them every point depends on its batch")
    scale = (module.running_var + module.eps).rsqrt()
    return scale * module.weight if module.affine else scale


# The factors of a layer that multiplies each channel.
channel_scale = ByKind[Tensor](
    {
        ChannelScale: lambda layer: layer.weight,
        Normalize: lambda layer: 1 / layer.std,
        **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm, SyncBatchNorm), _batch_norm),
    }
)


@dataclass(frozen=True)
class Nonlinear:
    """A layer's Lipschitz constant; roundings, relative to its output; how far it is off whatever the precision."""

    constant: float
    roundings: int = 0
    jump: float = 0.0  # for each number of the output


def _softplus(module: nn.Softplus, shape: Shape) -> Nonlinear:
    if module.threshold < 20:
        raise InputError(f"expected a threshold of at least 20, got {module.threshold}: softplus jumps there")
    return Nonlinear(1.0, roundings=8, jump=SOFTPLUS_JUMP / module.beta)


def _average_pool(module: nn.AvgPool2d, shape: Shape) -> Nonlinear:
    kernel, stride, padding = (_pair(v) for v in (module.kernel_size, module.stride, module.padding))
    if module.ceil_mode or module.divisor_override or (any(padding) and not module.count_include_pad):
        raise InputError("expected average pooling that divides by the size of its window everywhere")
    window = torch.full((1, 1, *kernel), 1 / math.prod(kernel), dtype=torch.float64)
    # All weights are positive, so the norm is also that of their absolute values.
    return Nonlinear(conv_norm(window, (shape[1], shape[2]), stride, padding).value, math.prod(kernel) + 1)


def _global_average(module: nn.AdaptiveAvgPool2d, shape: Shape) -> Nonlinear:
    if _pair(module.output_size) != (1, 1):
        raise InputError(f"expected an average over the whole map, got output size {module.output_size}")
    return Nonlinear((1 + 1e-15) / math.sqrt(shape[1] * shape[2]), shape[1] * shape[2] + 1)


def _pair(value: object) -> Pair:
    return (value[0], value[1]) if isinstance(value, tuple | list) else (value, value)  # type: ignore[return-value]


_NONLINEAR = ByKind[Nonlinear](
    {
        **dict.fromkeys((nn.Identity, nn.Flatten, nn.Dropout, nn.ReLU, MinMax), lambda layer, shape: Nonlinear(1.0)),
        nn.GELU: lambda layer, shape: Nonlinear(GELU_SLOPE, roundings=16),
        nn.Softplus: _softplus,
        nn.AvgPool2d: _average_pool,
        nn.AdaptiveAvgPool2d: _global_average,
    }
)


def nonlinear(module: nn.Module, shape: Shape) -> Nonlinear:
    """The Lipschitz constant of a layer without parameters, given the shape of its input."""
    layer = _NONLINEAR(module, shape)
    if layer is None:
        raise InputError("no Lipschitz constant is known for this kind of layer")
    return layer
