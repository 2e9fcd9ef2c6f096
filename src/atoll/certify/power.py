"""Lipschitz constants for training: power iteration, quick and differentiable, but from below and so no proof."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.attacks.base import evaluation_mode
from atoll.certify.layers import LinearMap, channel_scale, linear_map, nonlinear
from atoll.certify.lipschitz import Branch, Leaf, Node, unfold
from atoll.errors import InputError
from atoll.models.base import Classifier
from atoll.streams import generator


class LipschitzEstimate(nn.Module):
    r"""Estimates of :math:`K_{ji}`, the Lipschitz constant of logit j minus logit i, for all pairs of classes.

    :math:`K_{ji} = \|w_j - w_i\| \prod_l \sigma_l` with the rows w of a linear head and :math:`\sigma = \|A v\|` for
    every linear layer of the body; v moves a few power iterations further at every call, starting where the last one
    ended.  Only the last product has a gradient.

    The vectors are buffers of this module, not of the model: a model's file holds weights only.

    Args:
        model: a classifier with a linear head whose layers have Lipschitz constants.
        iterations: of power iteration at every call.

    >>> from atoll.models import MLP
    >>> model = MLP((2,), 2, hidden=())
    >>> _ = model.head.weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    >>> LipschitzEstimate(model)().detach()
    tensor([[0., 5.],
            [5., 0.]])
    """

    def __init__(self, model: Classifier, *, iterations: int = 5) -> None:
        super().__init__()
        self.iterations = iterations
        self._head = (model.head,)  # in tuples, so that the model is not a part of this module
        if linear_map(model.head) is None:
            raise InputError(f"model: expected a linear head, got {type(model.head).__name__}")
        with evaluation_mode(model):
            self._nodes, _ = unfold(nn.Sequential(model.normalize, model.body), model.input_shape)
        device = next(model.parameters()).device
        for leaf in _leaves(self._nodes):
            try:
                known = linear_map(leaf.module)
                if known is None and channel_scale(leaf.module) is None and nonlinear(leaf.module, leaf.shape) is None:
                    raise InputError("no Lipschitz constant is known for this kind of layer")
            except InputError as error:
                name = f"{leaf.name} ({type(leaf.module).__name__})"
                raise InputError(f"{name} cannot be trained with a Lipschitz bound: {error}") from None
            if known is not None:
                v = torch.randn(1, *leaf.shape, generator=generator("power iteration", leaf.name))
                self.register_buffer(_buffer(leaf), (v / v.norm()).to(device, known.weight.dtype))

    def forward(self, move: bool = True) -> Tensor:
        """The matrix of constants; the vectors stay where they are without ``move``."""
        with torch.autocast(next(self.buffers(), torch.zeros(())).device.type, enabled=False):
            head = linear_map(self._head[0])
            assert head is not None
            return self._product(self._nodes, move) * pair_distances(head.weight)

    def _product(self, nodes: tuple[Node, ...], move: bool) -> Tensor:
        total = torch.ones(())
        for node in nodes:
            factor = 1 + self._product(node.inner, move) if isinstance(node, Branch) else self._layer(node, move)
            total = total.to(factor) * factor
        return total

    def _layer(self, leaf: Leaf, move: bool) -> Tensor:
        linear, scale = linear_map(leaf.module), channel_scale(leaf.module)
        if linear is not None:
            v = self.get_buffer(_buffer(leaf))
            if move:
                v.copy_(self._moved(linear, v, leaf))
            # A copy, because the buffer moves on before everybody has gone backward through it.
            norm: Tensor = linear.apply(v.clone()).norm()
            return norm
        if scale is not None:
            return scale.abs().max()
        known = nonlinear(leaf.module, leaf.shape)
        assert known is not None
        return torch.tensor(known.constant)

    @torch.no_grad()
    def _moved(self, linear: LinearMap, v: Tensor, leaf: Leaf) -> Tensor:
        for _ in range(self.iterations):
            v = linear.transposed(linear.apply(v), leaf.shape)
            v = v / v.norm().clamp_min(1e-30)
        return v


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
    found: list[Leaf] = []
    for node in nodes:
        found += _leaves(node.inner) if isinstance(node, Branch) else [node]
    return found


def _buffer(leaf: Leaf) -> str:
    return "v_" + leaf.name.replace(".", "_")
