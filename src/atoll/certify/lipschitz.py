"""Proven Lipschitz constants of whole networks in l2, layer by layer, and what rounding does in a forward pass."""

from __future__ import annotations

import copy
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.certify.layers import Shape, channel_scale, linear_map, nonlinear
from atoll.certify.norms import BUDGET, SpectralNormBound
from atoll.errors import InputError
from atoll.models.base import Classifier
from atoll.models.liresnet import Residual

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


@dataclass(frozen=True)
class Leaf:
    """A layer, and the shape of its input."""

    name: str
    module: nn.Module
    shape: Shape


@dataclass(frozen=True)
class Branch:
    """``x + inner(x)``."""

    inner: tuple[Leaf | Branch, ...]


Node = Leaf | Branch


@torch.no_grad()
def unfold(module: nn.Module, shape: Shape, name: str = "") -> tuple[tuple[Node, ...], Shape]:
    """The layers of a network in their order, and the shape of its output.

    >>> nodes, shape = unfold(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten()), (1, 5, 5))
    >>> [(node.name, node.shape) for node in nodes], shape
    ([('0', (1, 5, 5)), ('1', (2, 3, 3)), ('2', (2, 3, 3))], (18,))
    """
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        layers: list[Node] = []
        for child, layer in module.named_children():
            nodes, shape = unfold(layer, shape, f"{name}.{child}" if name else child)
            layers += nodes
        return tuple(layers), shape
    if type(module) is Residual:
        nodes, _ = unfold(module.branch, shape, f"{name}.branch" if name else "branch")
        return (Branch(nodes),), shape
    with torch.random.fork_rng(devices=[]):
        out = module(next(module.parameters(), torch.zeros(())).new_zeros(2, *shape))
    return (Leaf(name, module, shape),), tuple(out.shape[1:])


def body_of(model: Classifier) -> nn.Sequential:
    """What a classifier does before its head, as layers in their order."""
    if type(model).forward is not Classifier.forward or type(model).features is not Classifier.features:
        raise InputError(f"{type(model).__name__} cannot be certified: expected normalize, body and head, in turn")
    return nn.Sequential(OrderedDict(normalize=model.normalize, body=model.body))


@dataclass(frozen=True)
class Bound:
    r"""What is known of a map f and of its computation :math:`\hat f`, in l2.

    Args:
        lipschitz: :math:`\|f(x) - f(y)\| \le L \|x - y\|`.
        offset: :math:`\|f(0)\| \le \beta`.
        relative: with ``absolute``, :math:`\|\hat f(x) - f(x)\| \le \rho \|x\| + \sigma`.
        absolute: see ``relative``.
    """

    lipschitz: float = 1.0
    offset: float = 0.0
    relative: float = 0.0
    absolute: float = 0.0

    def then(self, after: Bound) -> Bound:
        """This map, and another one after it."""
        gain = after.lipschitz + after.relative  # what happens to the error that is already there
        return Bound(
            after.lipschitz * self.lipschitz,
            after.lipschitz * self.offset + after.offset,
            gain * self.relative + after.relative * self.lipschitz,
            gain * self.absolute + after.relative * self.offset + after.absolute,
        )

    def residual(self, unit: float) -> Bound:
        """``x + f(x)``."""
        total, offset = 1 + self.lipschitz, self.offset
        relative, absolute = self.relative * (1 + unit), self.absolute * (1 + unit)
        return Bound(total, offset, relative + unit * total, absolute + unit * offset)


@dataclass(frozen=True)
class LayerBound:
    """One line of the table: a layer's name and kind, its bound, how it was proven, and the seconds that took."""

    name: str
    kind: str
    lipschitz: float
    method: str
    seconds: float


@dataclass(frozen=True)
class Lipschitz:
    """A network's bound and the layers it is made of."""

    bound: Bound
    layers: tuple[LayerBound, ...]


def lipschitz(
    network: nn.Module,
    shape: Shape,
    *,
    budget: float = BUDGET,
    dtype: torch.dtype | None = None,
    on_layer: Callable[[LayerBound], None] | None = None,
) -> Lipschitz:
    """A proven Lipschitz constant in evaluation mode: the product over the layers, 1 + K for a residual branch.

    Args:
        network: made of ``nn.Sequential``, ``Residual`` and layers that have a bound.
        shape: of one input.
        budget: operations that the proof of one layer may take; more makes bounds of large convolutions tighter.
        dtype: in which the network computes, for the error of rounding; its own if not given.
        on_layer: called after each layer's proof.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> _ = net[0].weight.data.copy_(torch.diag(torch.tensor([3.0, 4.0])))
    >>> round(lipschitz(net, (2,)).bound.lipschitz, 2)
    4.0
    """
    dtype = dtype or next(network.parameters(), torch.zeros(())).dtype
    if dtype not in UNIT_ROUNDOFF:
        raise InputError(f"model: expected float32 or float64 weights, got {dtype}")
    # In float64 the layers are what their float32 weights say, without the rounding of a merged kernel.
    exact = copy.deepcopy(network).double().cpu().eval()
    nodes, _ = unfold(exact, shape)
    layers: list[LayerBound] = []
    unit = UNIT_ROUNDOFF[dtype]

    def follow(nodes: Sequence[Node]) -> Bound:
        bound = Bound()
        for node in nodes:
            if isinstance(node, Branch):
                after = follow(node.inner).residual(unit)
            else:
                after, layer = _layer(node, unit, budget)
                layers.append(layer)
                if on_layer is not None:
                    on_layer(layer)
            bound = bound.then(after)
        return bound

    return Lipschitz(follow(nodes), tuple(layers))


def lipschitz_of_body(
    model: Classifier, *, budget: float = BUDGET, on_layer: Callable[[LayerBound], None] | None = None
) -> Lipschitz:
    """That of what a classifier does before its head, in the precision that the classifier computes in."""
    parameter = next(model.parameters())
    full = parameter.device.type == "cpu" and torch.get_float32_matmul_precision() == "highest"
    if parameter.dtype == torch.float32 and not full:
        # TF32, bfloat16 inside and Winograd's algorithm round more than the sums of products that are counted here.
        raise InputError(
            "model: certificates in float32 are for CPUs with float32_matmul_precision highest;"
            " run the network in float64 (model.double())"
        )
    return lipschitz(body_of(model), model.input_shape, budget=budget, dtype=parameter.dtype, on_layer=on_layer)


@torch.no_grad()
def _layer(leaf: Leaf, unit: float, budget: float) -> tuple[Bound, LayerBound]:
    began = time.monotonic()
    module, kind = leaf.module, type(leaf.module).__name__
    zero = module(torch.zeros(1, *leaf.shape, dtype=torch.float64))
    offset = float(zero.norm()) * (1 + 1e-12)
    try:
        linear, scale = linear_map(module), channel_scale(module)
        if linear is not None:
            # Two more roundings for the bias, two for the factors of a linear residual.
            norm, rounding = linear.norm(leaf.shape, budget), gamma(linear.terms + 4, unit)
            relative, absolute = rounding * linear.spread, rounding * offset
        elif scale is not None:
            # Mean, variance, factor and shift, in whatever order; shift and mean may be large and cancel.
            norm, rounding = SpectralNormBound(float(scale.abs().max()) * (1 + 1e-15), "exact"), gamma(8, unit)
            shifts = offset + 2 * _mean(module) * norm.value * math.sqrt(zero.numel())
            relative, absolute = rounding * norm.value, rounding * shifts
        else:
            other = nonlinear(module, leaf.shape)
            norm, rounding = SpectralNormBound(other.constant, "known"), gamma(other.roundings, unit)
            relative, absolute = rounding * norm.value, rounding * offset + other.jump * math.sqrt(zero.numel())
    except InputError as error:
        raise InputError(f"{leaf.name or 'network'} ({kind}) cannot be certified: {error}") from None
    layer = LayerBound(leaf.name, kind, norm.value, norm.method, time.monotonic() - began)
    return Bound(norm.value, offset, relative, absolute), layer


def _mean(module: nn.Module) -> float:
    """The largest number that a layer with factors subtracts from a channel."""
    mean: Tensor | None = getattr(module, "mean", getattr(module, "running_mean", None))
    return 0.0 if mean is None else float(mean.abs().max())


def gamma(terms: int, unit: float) -> float:
    """The relative error of a sum of products, in any order (Higham, 2002, section 3.1)."""
    if terms * unit >= 1:
        raise InputError(f"{terms:,} terms are too many to add up in this precision")
    return terms * unit / (1 - terms * unit)
