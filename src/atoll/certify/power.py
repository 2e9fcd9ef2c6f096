"""Lipschitz constants for training: power iteration, quick and differentiable, but from below and so no proof."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atoll.certify.layers import LinearMap, channel_scale, linear_map, nonlinear
from atoll.certify.lipschitz import Branch, Leaf, Node, body_of, unfold
from atoll.errors import InputError
from atoll.models.base import Classifier
from atoll.models.centroid import Centroids
from atoll.modules import evaluation_mode, preserve_buffers
from atoll.rng import generator


class LipschitzEstimator(nn.Module):
    r"""Estimates of :math:`K_{ji}`, the Lipschitz constant of logit j minus logit i, for all pairs of classes.

    :math:`K_{ji} = \|w_j - w_i\| \prod_l \sigma_l` with the rows w of a linear head and :math:`\sigma = \|A v\|` for
    every linear layer of the body; every call runs a few more power iterations on v, starting where the last call
    ended.  Only the last product has a gradient.  With ``Centroids`` as head every logit has one constant, mostly 1,
    and the difference of two of them twice that.

    The vectors are buffers of this module, not of the model: a model's file holds weights only.

    A call returns that matrix and, with the head's own norm in place of the distances, the constant of the vector of
    all logits.

    Args:
        model: a classifier with a linear head, or centroids, whose layers have Lipschitz constants.
        iterations: of power iteration at every call.

    >>> from atoll.models import MLP
    >>> model = MLP((2,), 2, hidden=())
    >>> _ = model.head.weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    >>> pairs, whole = LipschitzEstimator(model, iterations=50)()
    >>> pairs.detach(), whole.detach()
    (tensor([[0., 5.],
            [5., 0.]]), tensor(4.))
    """

    def __init__(self, model: Classifier, *, iterations: int = 5) -> None:
        super().__init__()
        self.iterations = iterations
        if linear_map(model.head) is None and not isinstance(model.head, Centroids):
            raise InputError(f"model: expected a linear head, or centroids, got {type(model.head).__name__}")
        with evaluation_mode(model):
            # As leaves, so that the model does not become a part of this module.
            self._nodes, features = unfold(body_of(model), model.input_shape)
        self._head = Leaf("head", model.head, features)
        device = next(model.parameters()).device
        self._device_type = device.type
        self._constants: dict[str, float] = {}
        for leaf in _leaves(self._nodes if isinstance(model.head, Centroids) else (*self._nodes, self._head)):
            try:
                linear = linear_map(leaf.module)
                if linear is None and channel_scale(leaf.module) is None:
                    self._constants[leaf.name] = nonlinear(leaf.module, leaf.shape).constant
            except InputError as error:
                name = f"{leaf.name} ({type(leaf.module).__name__})"
                raise InputError(f"{name} cannot be trained with a Lipschitz bound: {error}") from None
            if linear is not None:
                v = torch.randn(1, *leaf.shape, generator=generator("power iteration", leaf.name))
                self.register_buffer(_buffer(leaf), (v / v.norm()).to(device, linear.weight.dtype))

    def forward(self, update: bool = True) -> tuple[Tensor, Tensor]:
        """The constants of all pairs, and of the vector of logits; ``update`` runs power iterations first."""
        head = self._head.module
        with torch.autocast(self._device_type, enabled=False):
            body = self._product(self._nodes, update)
            if isinstance(head, Centroids):
                body, classes, one = body * head.lipschitz, len(head.centroids), head.centroids.new_ones(())
                differ = 1 - torch.eye(classes, dtype=one.dtype, device=one.device)
                return body * 2 * differ, body * math.sqrt(classes) * one
            linear = linear_map(head)
            assert linear is not None
            return body * pair_distances(linear.weight), body * self._norm(linear, self._head, update)

    @property
    def exact(self) -> bool:
        """Whether there is nothing to estimate: no linear layers, but for centroids."""
        return not any(True for _ in self.buffers())

    @torch.no_grad()
    def converged(self, calls: int = 20) -> Tensor:
        """The matrix after more iterations, with the vectors restored afterwards: for measuring, not for training."""
        with preserve_buffers(self):
            for _ in range(calls - 1):
                self()
            pairs: Tensor = self()[0]
        return pairs

    def _product(self, nodes: tuple[Node, ...], update: bool) -> Tensor | float:
        total: Tensor | float = 1.0
        for node in nodes:
            if isinstance(node, Branch):
                total = total * (1 + self._product(node.inner, update))
            elif (linear := linear_map(node.module)) is not None:
                total = total * self._norm(linear, node, update)
            elif (scale := channel_scale(node.module)) is not None:
                total = total * scale.abs().max()
            else:
                total = total * self._constants[node.name]
        return total

    def _norm(self, linear: LinearMap, leaf: Leaf, update: bool) -> Tensor:
        buffer = v = self.get_buffer(_buffer(leaf))
        if update:
            with torch.no_grad():
                for _ in range(self.iterations):
                    v = linear.transposed(linear.apply(v), leaf.shape)
                    v = v / v.norm().clamp_min(1e-30)
                buffer.copy_(v)
        # A copy, because the next update would change the buffer before the backward pass.
        norm: Tensor = linear.apply(buffer.clone()).norm()
        return norm


def pair_distances(weight: Tensor) -> Tensor:
    """The distances between all rows, with a gradient that is finite where they are zero.

    >>> pair_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    tensor([[0., 5.],
            [5., 0.]])
    """
    gram = weight @ weight.T
    square = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
    same = torch.eye(len(weight), dtype=torch.bool, device=weight.device)
    distance = square.masked_fill(same, 1).clamp_min(1e-20).sqrt()
    return distance.masked_fill(same, 0)


def _leaves(nodes: tuple[Node, ...]) -> list[Leaf]:
    leaves: list[Leaf] = []
    for node in nodes:
        leaves += _leaves(node.inner) if isinstance(node, Branch) else [node]
    return leaves


def _buffer(leaf: Leaf) -> str:
    return "v_" + leaf.name.replace(".", "_")
