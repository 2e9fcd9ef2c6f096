"""Random small networks for attacks on certificates: directed acyclic graphs of many operations, with odd weights.

A network is a program: every step applies an operation to results of earlier steps.  Operations come from tables, so
that a new operation is one more row.  Nothing here knows how networks are certified.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.models import CentroidNet, Centroids, MinMax

Shape = tuple[int, ...]
Operation = Callable[..., Tensor]
Maker = Callable[[random.Random, Shape], Operation | None]  # None if there is no such operation for this shape

SHAPES: list[Shape] = [
    (1,), (2,), (5,), (8,), (2, 4), (3, 5), (4, 6), (1, 4, 4), (2, 3, 5), (2, 4, 4), (4, 2, 2), (1, 6, 6), (3, 4, 4),
    (1, 2, 3, 4), (2, 2, 2, 2),
]  # fmt: skip
LARGEST = 200  # numbers in any result


class Constant(nn.Module):
    """``function(x, *tensors)`` with tensors that change with the module's precision."""

    def __init__(self, function: Operation, *tensors: Tensor) -> None:
        super().__init__()
        self.function = function
        for index, tensor in enumerate(tensors):
            self.register_buffer(f"constant_{index}", tensor)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.buffers())


@dataclass(frozen=True)
class Step:
    name: str
    operation: Operation
    sources: tuple[int, ...]  # results of earlier steps; 0 is the input


class RandomNet(nn.Module):
    """Follows a program; the result of the last step are the logits.

    Attributes:
        shape: of one input.
        dtype: of inputs and weights.
        steps: the program.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, steps: Sequence[Step]) -> None:
        super().__init__()
        self.shape, self.dtype, self.steps = shape, dtype, tuple(steps)
        self.layers = nn.ModuleList(s.operation for s in steps if isinstance(s.operation, nn.Module))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step in self.steps:
            values.append(step.operation(*(values[source] for source in step.sources)))
        return values[-1]

    def __repr__(self) -> str:
        program = "; ".join(f"{i} = {s.name}{s.sources}" for i, s in enumerate(self.steps, 1))
        return f"RandomNet({self.shape}, {self.dtype}: {program})"


# --- layers with weights


def _sides(draw: random.Random, low: int, high: int, rank: int) -> tuple[int, ...]:
    return tuple(draw.randint(low, high) for _ in range(rank))


def convolution(draw: random.Random, shape: Shape) -> Operation | None:
    rank = len(shape) - 1
    if rank not in (1, 2, 3):
        return None
    groups = draw.choice([g for g in (1, 1, 2, 3) if shape[0] % g == 0])
    options: dict[str, Any] = {
        "stride": _sides(draw, 1, 2, rank), "dilation": _sides(draw, 1, 2, rank), "groups": groups,
        "bias": draw.random() < 0.7, "padding": draw.choice([_sides(draw, 0, 2, rank), _sides(draw, 0, 1, rank)]),
        "padding_mode": draw.choice(["zeros", "zeros", "zeros", "circular", "reflect", "replicate"]),
    }  # fmt: skip
    if draw.random() < 0.2:
        options |= {"padding": "same", "stride": 1}
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    return kind(shape[0], groups * draw.randint(1, 3), _sides(draw, 1, 3, rank), **options)


def transposed_convolution(draw: random.Random, shape: Shape) -> Operation | None:
    rank = len(shape) - 1
    if rank not in (1, 2):
        return None
    groups = draw.choice([g for g in (1, 1, 2, 3) if shape[0] % g == 0])
    stride = _sides(draw, 1, 3, rank)
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d)[rank - 1]
    return kind(
        shape[0], groups * draw.randint(1, 2), _sides(draw, 1, 3, rank), stride=stride, groups=groups,
        padding=_sides(draw, 0, 1, rank), output_padding=tuple(draw.randint(0, s - 1) for s in stride),
        dilation=_sides(draw, 1, 2, rank),
    )  # fmt: skip


def batch_norm(draw: random.Random, shape: Shape) -> Operation | None:
    if len(shape) > 4:
        return None
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 1]
    return kind(shape[0], affine=draw.random() < 0.7, eps=draw.choice([1e-5, 1e-3]))


def matrix(draw: random.Random, shape: Shape) -> Operation | None:
    """Products with a constant matrix, in different notations."""
    n, width = shape[-1], draw.randint(1, 5)
    weight = torch.randn(n, width) / math.sqrt(n)
    forms: list[Operation] = [
        torch.matmul,
        lambda x, w: torch.einsum("...i,ij->...j", x, w),
        lambda x, w: F.linear(x, w.T),
        lambda x, w: (w.T @ x.unsqueeze(-1)).squeeze(-1),
    ]
    if len(shape) == 1:
        forms += [torch.mm, lambda x, w: torch.addmm(w[0], x, w, beta=0.5, alpha=2.0)]
    if len(shape) == 2:
        left = torch.randn(width, shape[0])
        return Constant(draw.choice(forms), weight) if draw.random() < 0.5 else Constant(lambda x, w: w @ x, left)
    return Constant(draw.choice(forms), weight)


LAYERS: dict[str, Maker] = {
    "linear": lambda draw, shape: nn.Linear(shape[-1], draw.randint(1, 6), bias=draw.random() < 0.7),
    "convolution": convolution,
    "transposed convolution": transposed_convolution,
    "batch norm": batch_norm,
    "matrix": matrix,
}

# --- activations


class Householder(nn.Module):
    """x where v x > 0, its reflection elsewhere (Singla et al., 2022): continuous, though made of a comparison."""

    def __init__(self) -> None:
        super().__init__()
        angle = torch.rand(()) * math.pi
        self.register_buffer("v", torch.stack([angle.sin(), -angle.cos()]))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        s, c = self.v[0], self.v[1]
        side = s * a + c * b
        return torch.cat([torch.where(side > 0, a, a - 2 * s * side), torch.where(side > 0, b, b - 2 * c * side)], 1)


def plain(*functions: Operation) -> Maker:
    """Operations that need nothing to know of a shape."""
    return lambda draw, shape: draw.choice(functions)


def group_sort(draw: random.Random, shape: Shape) -> Operation | None:
    size = draw.choice([2, 3, 4])
    if shape[0] % size:
        return None
    return lambda x: x.unflatten(1, (-1, size)).sort(2).values.flatten(1, 2)


def prelu(draw: random.Random, shape: Shape) -> Operation | None:
    return nn.PReLU(draw.choice([1, shape[0]]), init=draw.choice([0.25, -0.5, 2.0, 0.0]))


def softplus(draw: random.Random, shape: Shape) -> Operation | None:
    return nn.Softplus(draw.choice([1.0, 0.5, 3.0, 100.0]), draw.choice([20, 30, 50]))


def clamps(draw: random.Random, shape: Shape) -> Operation | None:
    limits = torch.randn(shape)
    return draw.choice(
        [
            lambda x: x.clamp(-0.5, 1.0), lambda x: x.clamp_min(0.1), lambda x: x.clamp_max(0.7), F.hardtanh,
            nn.Hardtanh(-2.0, 0.5), F.relu6, Constant(torch.maximum, limits), Constant(torch.minimum, limits),
            Constant(lambda x, c: x.clamp(c, c + 1), limits),
        ]
    )  # fmt: skip


def reduction(draw: random.Random, shape: Shape) -> Operation | None:
    dim, keep = draw.randint(1, len(shape)), len(shape) == 1 or draw.random() < 0.5
    return draw.choice(
        [
            lambda x: x.sum(dim, keepdim=keep),
            lambda x: x.mean(dim, keepdim=keep),
            lambda x: x.amax(dim, keepdim=keep),
            lambda x: x.amin(dim, keepdim=keep),
            lambda x: x.max(dim, keepdim=keep).values,
            lambda x: x.min(dim, keepdim=keep).values,
            lambda x: x.logsumexp(dim, keepdim=keep),
            lambda x: torch.linalg.vector_norm(x, dim=dim, keepdim=keep),
            lambda x: x.norm(dim=dim, keepdim=keep),
            lambda x: x.abs().sum(dim, keepdim=keep),
            lambda x: x.median(dim, keepdim=keep).values,
            lambda x: x.flatten(1).mean(1, keepdim=True),
            lambda x: x.flatten(1).sum(1, keepdim=True),
        ]
    )


def order(draw: random.Random, shape: Shape) -> Operation | None:
    dim = draw.randint(1, len(shape))
    k = draw.randint(1, shape[dim - 1])
    return draw.choice(
        [
            lambda x: x.sort(dim).values, lambda x: x.sort(dim, descending=True).values,
            lambda x: x.topk(k, dim).values, lambda x: x.cummax(dim).values, lambda x: x.kthvalue(k, dim).values,
        ]
    )  # fmt: skip


ACTIVATIONS: dict[str, Maker] = {
    "relu": plain(F.relu, nn.ReLU(), torch.relu),
    "leaky relu": lambda draw, shape: nn.LeakyReLU(draw.choice([0.01, 0.2, -0.5, 1.0, 3.0, 0.0])),
    "prelu": prelu,
    "elu": lambda draw, shape: nn.ELU(draw.choice([1.0, 0.5, 2.0])),
    "celu": lambda draw, shape: nn.CELU(draw.choice([1.0, 0.5, 2.0])),
    "selu": plain(F.selu),
    "gelu": plain(F.gelu, nn.GELU("tanh")),
    "silu": plain(F.silu, lambda x: x * x.sigmoid()),
    "mish": plain(F.mish),
    "tanh": plain(torch.tanh, lambda x: 2 * torch.sigmoid(2 * x) - 1),
    "sigmoid": plain(torch.sigmoid, F.logsigmoid, lambda x: 1 - x.sigmoid()),
    "softplus": softplus,
    "softsign": plain(F.softsign),
    "hard": plain(F.hardsigmoid, F.hardswish),
    "shrink": plain(F.softshrink, F.tanhshrink),
    "clamps": clamps,
    "abs": plain(torch.abs, lambda x: (x - 0.3).abs(), lambda x: -x.abs()),
    "trigonometric": plain(torch.sin, torch.cos, torch.atan, torch.erf, torch.asinh),
    "threshold": lambda draw, shape: nn.Threshold(*draw.choice([(0.0, 0.0), (0.5, 0.5), (-1.0, -1.0)])),
    "softmax": lambda draw, shape: draw.choice([nn.Softmax(1), nn.LogSoftmax(1), nn.Softmax(-1), nn.Softmin(1)]),
    "minmax": lambda draw, shape: None if shape[0] % 2 else MinMax(),
    "group sort": group_sort,
    "householder": lambda draw, shape: None if shape[0] % 2 else Householder(),
    "maxout": lambda draw, shape: None if shape[0] % 2 else lambda x: x.unflatten(1, (-1, 2)).amax(2),
    "rrelu": plain(nn.RReLU()),
    "dropout": plain(nn.Dropout(0.5)),
    "reduction": reduction,
    "order": order,
}

# --- linear operations without weights, and pooling


def arithmetic(draw: random.Random, shape: Shape) -> Operation | None:
    """With constants: a number, one for each channel, or one for each input."""
    number = draw.choice([0.5, -2.0, 3.0, 1e-3, 0.0, 100.0])
    tensor = torch.randn(draw.choice([shape, (shape[0], *[1] * (len(shape) - 1)), (1,)]))
    return draw.choice(
        [
            lambda x: x * number,
            lambda x: number * x,
            lambda x: x / (number or 4.0),
            lambda x: x + number,
            lambda x: number - x,
            lambda x: torch.rsub(x, number, alpha=2),
            torch.neg,
            lambda x: x - 0.5,
            lambda x: torch.add(x, x, alpha=number),
            lambda x: torch.sub(x, 1.5, alpha=2),
            Constant(torch.mul, tensor),
            Constant(torch.add, tensor),
            Constant(torch.sub, tensor),
            Constant(lambda x, c: c - x, tensor),
            Constant(lambda x, c: x / (c.abs() + 0.1), tensor),
            Constant(lambda x, c: torch.lerp(x, c, 0.3), tensor),
            Constant(lambda x, c: torch.add(c, x, alpha=3), tensor),
            Constant(lambda x, c: x.masked_fill(c > 0, 0.3), tensor),
            Constant(lambda x, c: torch.where(c > 0, x, -x), tensor),
            Constant(lambda x, c: torch.where(c > 0, x, c), tensor),
            Constant(lambda x, c: torch.addcmul(c, x, c), tensor),
        ]
    )


def pooling(draw: random.Random, shape: Shape) -> Operation | None:
    rank = len(shape) - 1
    if rank not in (1, 2):
        return None
    kernel, stride, ceil = _sides(draw, 1, 3, rank), _sides(draw, 1, 3, rank), draw.random() < 0.3
    padding, dilation = tuple(draw.randint(0, k // 2) for k in kernel), _sides(draw, 1, 2, rank)
    average = {"stride": stride, "padding": padding, "ceil_mode": ceil, "count_include_pad": draw.random() < 0.5}
    target = _sides(draw, 1, 3, rank)
    if rank == 1:
        kinds: list[Operation] = [
            nn.AvgPool1d(kernel, **average),
            nn.MaxPool1d(kernel[0], stride[0], padding[0], dilation[0], ceil_mode=ceil),
            nn.AdaptiveAvgPool1d(target[0]),
            nn.AdaptiveMaxPool1d(target[0]),
        ]
    else:
        kinds = [
            nn.AvgPool2d(kernel, **average, divisor_override=draw.choice([None, None, 1, 7])),
            nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil),
            nn.AdaptiveAvgPool2d(target),
            nn.AdaptiveMaxPool2d(target),
            nn.LPPool2d(2, kernel[0], stride[0]),
        ]
    return draw.choice(kinds)


def padding(draw: random.Random, shape: Shape) -> Operation | None:
    rank = draw.randint(1, min(2, len(shape)))
    if rank == len(shape):
        rank -= 1
    sides = [draw.randint(-1, 2) for _ in range(2 * max(rank, 1))]
    value = draw.choice([0.0, 0.0, 1.5])
    if rank == 0 or draw.random() < 0.4:
        return lambda x: F.pad(x, sides, value=value)
    widths = [abs(side) for side in sides]
    mode = draw.choice(["reflect", "replicate", "circular"])
    if len(shape) - 1 != rank or (mode != "replicate" and max(widths) >= min(shape[-rank:])):
        return None
    return lambda x: F.pad(x, widths, mode=mode)


def structure(draw: random.Random, shape: Shape) -> Operation | None:
    """Reordering, selecting and repeating numbers."""
    rank = len(shape)
    dim = draw.randint(1, rank)
    n = shape[dim - 1]
    other = draw.randint(1, rank)
    start, step = draw.randint(0, n - 1), draw.randint(1, 2)
    index = torch.randint(n, (draw.randint(1, 6),))
    axes = list(range(1, rank + 1))
    draw.shuffle(axes)
    size = draw.randint(1, n)
    return draw.choice(
        [
            lambda x: x.flip(dim), lambda x: x.roll(start, dim), lambda x: x.transpose(dim, other),
            lambda x: x.permute(0, *axes), lambda x: x.narrow(dim, start, n - start), lambda x: x.flatten(1),
            lambda x: x.unsqueeze(dim), lambda x: x.split(size, dim)[-1], lambda x: x.chunk(2, dim)[0],
            lambda x: torch.cat([x, x], dim), lambda x: torch.stack([x, x.flip(dim)], dim), lambda x: x.cumsum(dim),
            lambda x: x.unsqueeze(dim).expand(*x.shape[:dim], 3, *x.shape[dim:]), lambda x: x.unfold(dim, size, step),
            lambda x: torch.cat([x.select(dim, start).unsqueeze(dim), x], dim), lambda x: x.repeat_interleave(2, dim),
            lambda x: x.repeat(1, *[2 if axis == dim else 1 for axis in range(1, rank + 1)]),
            lambda x: x.movedim(dim, 1).clone()[:, start::step], lambda x: x.movedim(dim, 1)[:, : -start or None],
            lambda x: torch.stack(x.unbind(dim)[::-1], dim), lambda x: x.reshape(len(x), -1, 2) if x[0].numel() % 2 == 0
            else x.reshape(len(x), -1), lambda x: x.diff(dim=dim), torch.Tensor.contiguous,
            Constant(lambda x, i: x.index_select(dim, i), index), Constant(lambda x, i: x.movedim(dim, 1)[:, i], index),
            lambda x: x.tril() if rank > 1 else x, lambda x: x.triu(1) if rank > 1 else x,
            lambda x: x.diagonal(dim1=-2, dim2=-1) if rank > 2 else x, lambda x: x.squeeze(dim) if rank > 1 else x,
            lambda x: x.rot90(1, (-2, -1)) if rank > 1 else x,
        ]
    )  # fmt: skip


def pixels(draw: random.Random, shape: Shape) -> Operation | None:
    if len(shape) != 3:
        return None
    kernel, size = _sides(draw, 1, 2, 2), _sides(draw, 1, 6, 2)
    kinds: list[Operation] = [
        nn.Unfold(kernel, dilation=_sides(draw, 1, 2, 2), padding=_sides(draw, 0, 1, 2), stride=_sides(draw, 1, 2, 2)),
        nn.Upsample(size),
        nn.Upsample(size, mode="bilinear"),
        nn.Upsample(size, mode="bilinear", align_corners=True),
        nn.Upsample(size, mode="bicubic"),
        nn.Upsample(scale_factor=1.7, mode="bilinear"),
        nn.Upsample(scale_factor=2.0),
    ]
    if shape[0] % 4 == 0:
        kinds += [nn.PixelShuffle(2)] * 3 + [nn.ChannelShuffle(2)]
    if shape[1] % 2 == shape[2] % 2 == 0:
        kinds += [nn.PixelUnshuffle(2)] * 3
    return draw.choice(kinds)


LINEAR: dict[str, Maker] = {
    "arithmetic": arithmetic,
    "pooling": pooling,
    "padding": padding,
    "structure": structure,
    "pixels": pixels,
}

COMMON = {"structure": 5, "arithmetic": 3, "reduction": 3, "order": 2, "clamps": 2}  # tables with many operations

# --- operations of two results

TWO: dict[str, Operation] = {
    "add": torch.add,
    "sub": torch.sub,
    "scaled add": lambda a, b: torch.add(a, b, alpha=-0.5),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "cat": lambda a, b: torch.cat([a, b], 1),
    "stack": lambda a, b: torch.stack([a, b], 1),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
}

# --- operations without a certificate: discontinuous, of unbounded slope, or a mixture of points

REFUSED: dict[str, Operation] = {
    "round": torch.round,
    "sign": torch.sign,
    "square": torch.square,
    "product": lambda x: x * x.flip(1),
    "quotient": lambda x: x / (1 + x.abs().sum(1, keepdim=True)),
    "sqrt": lambda x: x.abs().sqrt(),
    "exp": torch.exp,
    "step": lambda x: torch.where(x > 0.2, x, -x),
    "hardshrink": F.hardshrink,
    "remainder": lambda x: x % 1,
    "batch mean": lambda x: x - x.mean(0),
    "batch flip": lambda x: x.flip(0),
    "batch roll": lambda x: x.roll(1, 0),
    "batch reshape": lambda x: x.flatten(0, 1).cumsum(0).view(x.shape),
    "argmax": lambda x: F.one_hot(x.argmax(1), x.shape[1]).to(x.dtype),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
}

# --- weights

_STYLES: dict[str, Callable[[Tensor, random.Random], Tensor]] = {
    "plain": lambda w, draw: w,
    "scaled": lambda w, draw: w * 10.0 ** draw.uniform(-30, 30),
    "large": lambda w, draw: w * 10.0 ** draw.uniform(2, 12),
    "small": lambda w, draw: w * 10.0 ** draw.uniform(-12, -2),
    "subnormal": lambda w, draw: torch.sign(w) * torch.finfo(w.dtype).smallest_normal * draw.uniform(0, 1),
    "zero": lambda w, draw: torch.zeros_like(w),
    "one-hot": lambda w, draw: F.one_hot(w.flatten(1).argmax(1), w[0].numel()).view_as(w).to(w.dtype),
    "signs": lambda w, draw: torch.sign(w),
    "equal rows": lambda w, draw: w[:1].expand_as(w).clone(),
    "mixed": lambda w, draw: w * 10.0 ** (8 * torch.rand_like(w) - 4),
}


@torch.no_grad()
def _fill(draw: random.Random, module: nn.Module, style: str) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            fan_in = parameter[0].numel()
            parameter.copy_(_STYLES[style](torch.randn_like(parameter) / math.sqrt(fan_in), draw))
        elif name.endswith("bias"):
            scale = 10.0 ** draw.uniform(0, 20) if style != "plain" and draw.random() < 0.3 else 0.3
            parameter.copy_(torch.randn_like(parameter) * scale)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        module.running_mean.normal_()
        module.running_var.uniform_(0.1, 2.0)
        if module.affine:
            module.weight.normal_()
        if style != "plain":
            module.running_var.mul_(10.0 ** draw.uniform(-6, 6))


# --- programs


class _Builder:
    """Adds steps to a program and follows it on an example, for the shapes."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.dtype = torch.float64 if self.draw.random() < 0.3 else torch.float32
        self.is_plain = self.draw.random() < 0.6
        self.shape = self.draw.choice(SHAPES)
        self.values = [torch.rand(2, *self.shape, dtype=self.dtype)]
        self.steps: list[Step] = []

    def add(self, name: str, operation: Operation | None, *sources: int) -> bool:
        """Add a step unless the operation does not fit the shape."""
        if operation is None:
            return False
        if isinstance(operation, nn.Module):
            operation = operation.to(self.dtype).eval()
            if not any(step.operation is operation for step in self.steps):
                _fill(self.draw, operation, "plain" if self.is_plain else self.draw.choice([*_STYLES]))
        try:
            with torch.no_grad():
                value = operation(*(self.values[source] for source in sources))
        except (RuntimeError, ValueError, IndexError):
            return False
        if not 0 < value[0].numel() <= LARGEST or value.dtype != self.dtype or len(value) != 2 or value.dim() < 2:
            return False
        self.values.append(value)
        self.steps.append(Step(name, operation, sources))
        return True

    def grow(self) -> None:
        """One more random step."""
        while True:
            last = len(self.steps)
            source = last if self.draw.random() < 0.75 else self.draw.randint(0, last)
            kind = self.draw.choices(
                ["layer", "activation", "linear", "two", "shared", "refused"], [6, 6, 6, 4, 2, 0.3]
            )[0]
            if kind == "two":
                name, operation = self.draw.choice([*TWO.items()])
                if self.add(name, operation, source, self.partner(source)):
                    return
            elif kind == "shared" and self.steps:
                step = self.draw.choice(self.steps)
                if len(step.sources) == 1 and self.add(f"shared {step.name}", step.operation, source):
                    return
            elif kind == "refused":
                name, operation = self.draw.choice([*REFUSED.items()])
                if self.add(name, operation, source):
                    return
            elif kind in ("layer", "activation", "linear"):
                table = {"layer": LAYERS, "activation": ACTIVATIONS, "linear": LINEAR}[kind]
                (name,) = self.draw.choices([*table], [COMMON.get(name, 1) for name in table])
                if self.add(name, table[name](self.draw, tuple(self.values[source].shape[1:])), source):
                    return

    def partner(self, source: int) -> int:
        """Another result of the same shape, or any result in hope of broadcasting."""
        shape = self.values[source].shape
        same = [i for i, value in enumerate(self.values) if value.shape == shape and i != source]
        return self.draw.choice(same if same and self.draw.random() < 0.8 else range(len(self.values)))

    def join(self) -> None:
        """Put all results that no step uses next to each other, so that every step matters."""
        used = {source for step in self.steps for source in step.sources}
        ends = [i for i in range(1, len(self.values)) if i not in used]
        if len(ends) > 1:
            self.add("join", lambda *values: torch.cat([value.flatten(1) for value in values], 1), *ends)

    def finish(self) -> None:
        """End with logits: a linear head, perhaps with an activation after it, or what is there."""
        self.join()
        if self.values[-1].dim() > 2:
            self.add("flatten", nn.Flatten(), len(self.steps))
        width = self.values[-1].shape[1]
        if not 2 <= width <= 6 or self.draw.random() < 0.7:
            head = nn.Linear(width, self.draw.choice([2, 2, 3, 4, 1] if self.draw.random() < 0.3 else [2, 3, 5]))
            assert self.add("head", head, len(self.steps))
            if self.draw.random() < 0.2:
                name = self.draw.choice([*ACTIVATIONS])
                operation = ACTIVATIONS[name](self.draw, tuple(self.values[-1].shape[1:]))
                if name != "reduction":
                    self.add(name, operation, len(self.steps))


def random_net(seed: int) -> RandomNet:
    """The network of a seed.

    >>> random_net(0)
    RandomNet((4, 6), torch.float32: 1 = flatten(0,); 2 = head(1,))
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        builder = _Builder(seed)
        for _ in range(builder.draw.choice([0, 1, 2, 2, 3, 3, 4, 5, 6, 8])):
            builder.grow()
        builder.finish()
    net = RandomNet(builder.shape, builder.dtype, builder.steps).eval()
    if not any(True for _ in net.parameters()):  # float64 is for parameters
        net.float().dtype = torch.float32
    return net


def random_centroid_net(seed: int) -> CentroidNet:
    """Random centroids, some of them equal or far from the origin, with a random encoder or without one."""
    draw = random.Random(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoder = random_net(seed) if draw.random() < 0.5 else None
        shape = encoder.shape if encoder else draw.choice(SHAPES)
        bounds = (0.0, 1.0) if encoder is None and draw.random() < 0.7 else None
        stretch = draw.choice([0.0, 0.1, 0.3]) if bounds else 0.0
        net = CentroidNet(shape, draw.randint(2, 4), per_class=draw.randint(1, 4), bounds=bounds, stretch=stretch)
        dtype = encoder.dtype if encoder else draw.choice([torch.float32, torch.float64])
        if encoder is not None:
            net.body = encoder
            features = encoder(torch.zeros(2, *shape, dtype=dtype)).shape[1]
            net.head = Centroids(features, net.num_classes, net.head.centroids.shape[1])
        _move_centroids(draw, net.head.centroids.data)
    return net.to(dtype).eval()


def _move_centroids(draw: random.Random, centroids: Tensor) -> None:
    style = draw.choice(["uniform", "normal", "grid", "far", "equal", "huge"])
    if style == "uniform":
        centroids.uniform_()
    elif style == "grid":
        centroids.uniform_().round_()
    elif style == "far":
        centroids.add_(10.0 ** draw.uniform(1, 7))
    elif style == "equal":
        centroids[1, 0] = centroids[0, 0]
    elif style == "huge":
        centroids.mul_(10.0 ** draw.uniform(-20, 18))
