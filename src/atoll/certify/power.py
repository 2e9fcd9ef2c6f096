"""Lipschitz constants for training, by power iteration: fast and differentiable, but lower bounds and not proofs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from atoll.certify.bounds import TracedConstant, Value
from atoll.certify.linear import Dense, Diagonal, LinearMap
from atoll.certify.propagation import Propagation
from atoll.certify.rules import RULES
from atoll.errors import InputError
from atoll.graph import find_input
from atoll.graph.capture import LiveGraph, capture, live_graph
from atoll.models.base import Classifier
from atoll.models.centroid import CentroidNet, Centroids
from atoll.modules import evaluation_mode, preserve_buffers
from atoll.rng import generator


class LipschitzEstimator(nn.Module):
    r"""Estimates the Lipschitz constants :math:`K_{ji}` of logit j minus logit i, for all pairs of classes.

    The formula is the same as in the proof (``lipschitz``), such as
    :math:`K_{ji} = \|w_j - w_i\| \prod_l \sigma_l` with the rows w of a linear head, for the current weights.  For each
    linear part A of the graph, :math:`\sigma = \|A v\|`.  Every call runs a few power iterations on v, starting where
    the last call ended.  Only the last product has a gradient.  With ``Centroids`` as head, all logits have the same
    constant, usually 1, and differences twice that.

    The vectors are buffers of this module, not of the model, so that the model's file contains only weights.

    A call returns the matrix K and the constant of the vector of all logits, in which the norm of the head replaces the
    distances of its rows.

    Args:
        model: a classifier whose operations have a certification rule.
        iterations: number of power iterations per call.

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
        with evaluation_mode(model):
            live = live_graph(model, model.input_shape)
            plan = _Plan.of(live, model)
        parameter = next(model.parameters())
        self._device_type, self._dtype, self._device = parameter.device.type, parameter.dtype, parameter.device
        self._plan, self._classes = plan, model.num_classes
        self._weights = _Weights(live, model, [part.source for part in plan.parts.values()])
        for name, part in plan.parts.items():
            if not part.diagonal:
                v = torch.randn(1, *part.shape, generator=generator("power iteration", name))
                self.register_buffer(_buffer(name), (v / v.norm()).to(parameter.device, parameter.dtype))

    def forward(self, update: bool = True) -> tuple[Tensor, Tensor]:
        """Return the constants of all pairs and of the vector of logits; ``update`` runs power iterations first."""
        plan = self._plan
        with torch.autocast(self._device_type, enabled=False):
            weights = self._weights()
            norms = {name: self._norm(name, weights, update) for name in plan.parts}
            if isinstance(plan.body, TracedConstant):
                body = plan.body.evaluate(norms).to(self._device, self._dtype)
            else:
                body = torch.full((), float(plan.body), dtype=self._dtype, device=self._device)
            if plan.head is None:  # all logits have the same constant
                differ = 1 - torch.eye(self._classes, dtype=self._dtype, device=self._device)
                scale = 1.0 if plan.centroids is None else plan.centroids.lipschitz  # changes if thresholds are learned
                return body * scale * plan.pair_factor * differ, body * scale * plan.vector_factor
            return body * pair_distances(plan.parts[plan.head].matrix(weights)), body * norms[plan.head]

    @property
    def exact(self) -> bool:
        """Whether nothing is estimated, because there are no linear layers except centroids."""
        return not self._plan.parts

    def products(self) -> dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]]:
        """Return the product with :math:`A^T A` and the input shape for every linear part A of the graph."""
        weights = {node: weight.detach() for node, weight in self._weights().items()}

        def product(part: _Part) -> Callable[[Tensor], Tensor]:
            return lambda v: part.gram(v, weights, part.source(torch.zeros_like(v[:1]), weights))

        return {name: (product(part), part.shape) for name, part in self._plan.parts.items()}

    @torch.no_grad()
    def converged(self, calls: int = 20) -> Tensor:
        """Return the matrix after more iterations, for measurements; the vectors are restored afterwards."""
        with preserve_buffers(self):
            for _ in range(calls - 1):
                self()
            pairs: Tensor = self()[0]
        return pairs

    def _norm(self, name: str, weights: dict[fx.Node, Tensor], update: bool) -> Tensor:
        part = self._plan.parts[name]
        if part.diagonal:
            ones = torch.ones(1, *part.shape, dtype=self._dtype, device=self._device)
            return part(ones, weights).abs().max()
        buffer = self.get_buffer(_buffer(name))
        if update:
            buffer.copy_(part.iterate(buffer, weights, self.iterations))
        # A copy, because the next update would change the buffer before the backward pass.
        norm: Tensor = part(buffer.clone(), weights).norm()
        return norm


@dataclass(frozen=True)
class _Part:
    """A linear part of the graph, from one value to another, with the current weights."""

    source: _Subgraph
    shape: tuple[int, ...]  # shape of its input
    diagonal: bool

    def __call__(self, u: Tensor, weights: dict[fx.Node, Tensor]) -> Tensor:
        """Apply the linear map without its bias."""
        y = self.source(torch.cat([u, torch.zeros_like(u[:1])]), weights)
        return y[:-1] - y[-1:]

    def iterate(self, v: Tensor, weights: dict[fx.Node, Tensor], steps: int) -> Tensor:
        weights = {node: weight.detach() for node, weight in weights.items()}
        with torch.no_grad():
            shift = self.source(torch.zeros_like(v), weights)
        for _ in range(steps):
            v = self.gram(v, weights, shift)
            v = v / v.norm().clamp_min(1e-30)
        return v

    def gram(self, v: Tensor, weights: dict[fx.Node, Tensor], shift: Tensor) -> Tensor:
        """Return :math:`A^T A v`, given the value at zero."""
        with torch.enable_grad():
            v = v.detach().requires_grad_()
            y = self.source(v, weights)
            (product,) = torch.autograd.grad(y, v, y.detach() - shift)
        return product

    def matrix(self, weights: dict[fx.Node, Tensor]) -> Tensor:
        """Return the matrix (outputs, inputs) of a map to vectors."""
        weight = next(iter(weights.values()))
        basis = torch.eye(math.prod(self.shape), dtype=weight.dtype, device=weight.device)
        return self(basis.view(-1, *self.shape), weights).T


@dataclass(frozen=True)
class _Plan:
    """The formula of the constants of a model, and its linear parts by name."""

    body: float
    parts: dict[str, _Part]
    head: str | None = None  # the linear part that maps features to logits, if there is one
    pair_factor: float = 1.0  # otherwise, the factor for a difference of logits
    vector_factor: float = 1.0  # and the factor for the vector of logits
    centroids: Centroids | None = None  # a head whose constant is an additional factor

    @staticmethod
    def of(live: LiveGraph, model: Classifier) -> _Plan:
        tracer = _Tracer(live)
        try:
            if isinstance(model, CentroidNet) and type(model.head) is Centroids:
                head = model.head
                tail = capture(head, (head.centroids.shape[2],), dtype=head.centroids.dtype)
                value = tracer.run(find_input(live.model, tail))
                return _Plan(
                    tracer.bound(value).lipschitz, tracer.parts, None, 2.0, model.num_classes**0.5, centroids=head
                )
            logits = tracer.run()
            if isinstance(logits.relation, Dense) and len(logits.shape) == 1:
                name = tracer.add(logits, logits.relation)
                return _Plan(logits.base.bound.lipschitz, tracer.parts, name)
            return _Plan(tracer.bound(logits).lipschitz, tracer.parts, None, math.sqrt(2))
        except InputError as error:
            raise InputError(f"model: cannot be trained with a Lipschitz bound: {error}") from None


class _Tracer(Propagation):
    """Collects the linear parts instead of proving their norms."""

    def __init__(self, live: LiveGraph) -> None:
        super().__init__(live.model, RULES)
        self.live = live
        self.parts: dict[str, _Part] = {}

    def prove(self, value: Value, relation: LinearMap) -> float:
        return TracedConstant(relation.spread, self.add(value, relation))

    def add(self, value: Value, relation: LinearMap) -> str:
        name, count = value.name, 1
        while name in self.parts:
            count += 1
            name = f"{value.name}.{count}"
        start, end = self.live.sources[value.base.node], self.live.sources[value.node]
        shape = tuple(start.meta["val"].shape[1:])
        self.parts[name] = _Part(_Subgraph(self.live, start, end), shape, isinstance(relation, Diagonal))
        return name


class _Subgraph:
    """The operations from one node to another, as a function of the value of the first node and of weights."""

    def __init__(self, live: LiveGraph, start: fx.Node, end: fx.Node) -> None:
        self.graph = fx.Graph()
        self.inputs: list[fx.Node] = []  # weights
        self._live = live
        self._copies: dict[fx.Node, fx.Node] = {start: self.graph.placeholder("u")}
        self._u = self._copies[start]
        self.graph.output(self._copy(end))
        self.run: Callable[..., Tensor] = fx.GraphModule(nn.Module(), self.graph).forward

    def __call__(self, u: Tensor, weights: dict[fx.Node, Tensor]) -> Tensor:
        return self.run(u, *(weights[node] for node in self.inputs))

    def _copy(self, node: fx.Node) -> fx.Node:
        if node in self._copies:
            return self._copies[node]
        if isinstance(node.meta.get("val"), torch.SymInt) and not any(
            isinstance(n.meta.get("val"), torch.SymInt) for n in node.all_input_nodes
        ):
            copy = self.graph.call_function(torch.ops.aten.sym_size.int, (self._u, 0))
        elif node in self._live.weight_nodes:
            self.inputs.append(node)
            with self.graph.inserting_after(self._last_placeholder()):
                copy = self.graph.placeholder(f"w{len(self.inputs)}")
        else:
            for source in node.all_input_nodes:
                self._copy(source)
            copy = self.graph.node_copy(node, self._copies.__getitem__)
        self._copies[node] = copy
        return copy

    def _last_placeholder(self) -> fx.Node:
        placeholders: list[fx.Node] = [node for node in self.graph.nodes if node.op == "placeholder"]
        return placeholders[-1]


class _Weights:
    """Computes the weights that subgraphs need from the current tensors of the model."""

    def __init__(self, live: LiveGraph, model: nn.Module, subgraphs: list[_Subgraph]) -> None:
        self.nodes = list(dict.fromkeys(node for part in subgraphs for node in part.inputs))
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        self._tensors: list[Callable[[], Tensor]] = []
        for node in live.graph.nodes:
            if node.op == "placeholder":
                if node.name in live.tensors or node.name in live.constants:
                    copies[node] = graph.placeholder(node.name)
                    self._tensors.append(self._reader(live, model, node.name))
            elif node.op == "call_function" and node in live.weight_nodes:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in self.nodes))
        graph.eliminate_dead_code()
        self.run: Callable[..., tuple[Tensor, ...]] = fx.GraphModule(nn.Module(), graph).forward

    def __call__(self) -> dict[fx.Node, Tensor]:
        return dict(zip(self.nodes, self.run(*(read() for read in self._tensors)), strict=True))

    @staticmethod
    def _reader(live: LiveGraph, model: nn.Module, name: str) -> Callable[[], Tensor]:
        if name in live.constants:
            return lambda: live.constants[name]
        path, _, attribute = live.tensors[name].rpartition(".")
        owner: Any = model.get_submodule(path)
        return lambda: getattr(owner, attribute)


def pair_distances(weight: Tensor) -> Tensor:
    """Return the distances between all rows, with finite gradients at distance zero.

    >>> pair_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    tensor([[0., 5.],
            [5., 0.]])
    """
    gram = weight @ weight.T
    square = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
    same = torch.eye(len(weight), dtype=torch.bool, device=weight.device)
    distance = square.masked_fill(same, 1).clamp_min(1e-20).sqrt()
    return distance.masked_fill(same, 0)


def _buffer(name: str) -> str:
    return "v_" + name.replace(".", "_")
