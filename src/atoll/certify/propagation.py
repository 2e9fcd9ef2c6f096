r"""Propagate Lipschitz constants and bounds of rounding errors through a captured graph, for one point.

Each operation has a rule (``rules.RULES``).  A value is a function of an earlier one, its base: either a linear map,
whose norm is proven only when a nonlinear operation follows, or a selection of entries.  Therefore
``x + scale * conv(x)`` is one convolution, and sorting pairs of channels preserves norms.

The offset of a bound, :math:`\|f(0)\|`, comes from running the graph on zeros in float64.  The error of this evaluation
is at most the bound of the rounding error in the precision of the graph.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from atoll.certify.bounds import Base, Bound, Error, Precision, Selection, Shape, Value, gamma, norm
from atoll.certify.linear import Diagonal, LinearMap
from atoll.certify.norms import BUDGET
from atoll.errors import InputError
from atoll.graph import CapturedModel, bind_arguments, locate
from atoll.graph.nodes import live_nodes, operation_name

LEAST = 2.0**-500  # smallest positive Lipschitz constant, so that products of two do not underflow
BATCHES = (2, 3)  # batch sizes with which operations that move entries are tested
ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv)  # allowed arithmetic with batch sizes

Rule = Callable[["Call"], Any]


@dataclass(frozen=True)
class LayerBound:
    """The bound of a layer: its name and kind, norm, method of proof, duration of the proof in seconds, and node."""

    name: str
    kind: str
    lipschitz: float
    method: str
    seconds: float
    node: str = ""


class Refusal(Exception):
    """An operation cannot be certified; the message is the reason."""


@dataclass(frozen=True, eq=False)
class Call:
    """An operation with its arguments: values that depend on the input, constant tensors, and plain numbers."""

    propagation: Propagation
    node: fx.Node
    arguments: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def value(self, name: str) -> Value:
        """Return an argument that must depend on the input."""
        value = self.arguments[name]
        if not isinstance(value, Value):
            raise Refusal(f"expected {name} to depend on the input and the other arguments to be constant")
        return value

    def constant(self, name: str) -> Tensor | None:
        """Return an argument that must not depend on the input, in float64, or None if it is not given."""
        value = self.arguments[name]
        if isinstance(value, Value):
            raise Refusal(f"{name} depends on the input")
        return None if value is None else self.propagation.finite(value)

    @property
    def result(self) -> Tensor:
        """The result for a zero input of the network, float64, with a batch dimension of 1."""
        result: Tensor = self.run({})
        return result

    @property
    def precision(self) -> Precision:
        meta = self.node.meta["val"]
        return Precision.of((meta[0] if isinstance(meta, (tuple, list)) else meta).dtype)

    def run(self, replacements: dict[str, Tensor], batch: int = 1, *, exact: bool = True, **changes: Any) -> Any:
        """Call the operation for a zero input, or with replacements for values; in float64 if ``exact``."""

        def plain(value: Any, name: str = "") -> Any:
            if isinstance(value, Value):
                return replacements.get(name, value.zero)
            if isinstance(value, Tensor):
                value = self.propagation.for_batch(value, batch)
                return value.double() if exact and value.is_floating_point() else value
            if isinstance(value, (list, tuple)):
                return [plain(v, f"{name}.{i}") for i, v in enumerate(value)]
            if isinstance(value, fx.Node):
                return self.propagation.batch_number(value, batch)
            if exact and isinstance(value, torch.dtype) and value.is_floating_point:
                return torch.float64
            return value

        target: Any = self.node.target
        arguments = {name: plain(value, name) for name, value in (self.arguments | changes).items()}
        schema = target._schema.arguments
        positional = [arguments[a.name] for a in schema if not a.kwarg_only]
        keywords = {a.name: arguments[a.name] for a in schema if a.kwarg_only and arguments[a.name] is not None}
        return target(*positional, **keywords)

    # --- results of rules

    def anchored(self, bound: Bound, zero: Tensor | None = None) -> Value:
        """Return a value that is its own base."""
        zero = self.result if zero is None else zero
        base = Base(replace(bound, offset=norm(zero) + bound.absolute), self.node.name)
        return self.named(Value(base, Selection(), zero))

    def linear(self, value: Value, linear: LinearMap, shift: Tensor | None = None) -> Value:
        """Return the value ``linear(value) + shift``, computed as a sum of products in any order."""
        zero = self.result
        relation = self.composed(value, linear)
        if relation is None:
            value = self.propagation.anchor(value)
            relation = linear
        offset = 0.0 if shift is None else norm(shift.expand(zero.shape[1:]))
        rounding = self.rounding(value, linear.spread, linear.terms + 4, zero.numel(), offset)
        local = value.local.times(linear.spread) + rounding
        return self.named(Value(value.base, relation, zero, local))

    def operator(self, value: Value, lipschitz: float, spread: float, terms: int) -> Value:
        """Apply a linear map with a known norm that is not a ``LinearMap``."""
        bound, zero = self.propagation.bound(value), self.result
        error = bound.error.times(lipschitz) + self.rounding(value, spread, terms + 2, zero.numel())
        return self.anchored(Bound(lipschitz * bound.lipschitz, 0.0, error.relative, error.absolute), zero)

    def elementwise(
        self, value: Value, slope: float, roundings: int = 0, *, size: float = 0.0, jump: float = 0.0
    ) -> Value:
        r"""Apply a function f to every entry.

        Args:
            value: the entries.
            slope: Lipschitz constant K of f.
            roundings: r in :math:`|\hat f(t) - f(t)| \le r u (K |t| + size) + r \eta + jump`.
            size: see ``roundings``; :math:`|f(0)|` is added.
            jump: see ``roundings``.
        """
        if not isinstance(value.relation, Selection):
            value = self.propagation.anchor(value)
        zero, precision, selection = self.result, self.precision, value.relation
        assert isinstance(selection, Selection)
        self.propagation.limit(value.magnitude.times(max(1.0, slope)) + Error(0.0, size), precision)
        local = value.local.times(slope)
        if roundings or jump:
            factor, root = roundings * precision.unit, math.sqrt(value.size)
            at_zero = float(zero.abs().max()) + slope * float(value.zero.abs().max()) if zero.numel() else 0.0
            absolute = factor * (size + at_zero) + 2 * roundings * precision.tiny + jump
            local = local + value.magnitude.times(factor * slope) + Error(0.0, absolute * root)
        slopes = slope * selection.slope
        return self.named(Value(value.base, Selection(selection.index, slopes, False), zero, local))

    def exact(self, value: Value, lipschitz: float, zero: Tensor | None = None) -> Value:
        """Apply a function without rounding, such as a maximum."""
        bound = self.propagation.bound(value)
        error = bound.error.times(lipschitz)
        return self.anchored(Bound(lipschitz * bound.lipschitz, 0.0, error.relative, error.absolute), zero)

    def rounding(self, value: Value, spread: float, terms: int, outputs: int, offset: float = 0.0) -> Error:
        """Return the l2 rounding error of sums of products, and limit inputs so that no sum overflows."""
        precision = self.precision
        factor = gamma(terms, precision.unit)
        magnitude = value.magnitude.times(spread) + Error(0.0, offset)
        self.propagation.limit(magnitude, precision)
        # Products, weights and inputs may each be flushed to zero.
        lost = 2 * precision.tiny * (terms * math.sqrt(outputs) + spread * math.sqrt(value.size))
        weights = value.magnitude.times(2 * precision.tiny * math.sqrt(terms * outputs))
        return magnitude.times(factor) + weights + Error(0.0, lost)

    def composed(self, value: Value, linear: LinearMap) -> LinearMap | None:
        before = value.relation
        if isinstance(before, Selection):
            return linear if before.index is None and before.linear else None
        if isinstance(linear, Diagonal):
            return before.scaled(linear)
        return linear.after(before) if isinstance(before, Diagonal) else None

    def named(self, value: Value) -> Value:
        name = locate_module(self.node)
        return replace(value, name=name, kind=operation_kind(self.node), node=self.node.name)


class Propagation:
    """Computes bounds of the values of a captured graph.

    Args:
        model: the captured graph.
        rules: rules by name of the operation.
        budget: largest number of operations for the proof of one layer.
        on_layer: called after the proof of each layer.
    """

    def __init__(
        self,
        model: CapturedModel,
        rules: dict[str, Rule],
        *,
        budget: float = BUDGET,
        on_layer: Callable[[LayerBound], None] | None = None,
    ) -> None:
        self.model, self.rules, self.budget, self.on_layer = model, rules, budget, on_layer
        self.layers: list[LayerBound] = []
        self.largest_input = math.inf
        self._results: dict[fx.Node, Any] = {}
        self._bases: dict[int, tuple[Value, Base]] = {}  # by identity; the reference keeps the value alive
        self._anchors: dict[int, Value] = {}
        self._rows: dict[int, Tensor] = {}  # constants that depend on the batch size, by identity
        self._batch: Any = None
        self._input = Base(Bound(), "x")

    @torch.no_grad()
    def run(self, last: fx.Node | None = None) -> Value:
        """Return the value of a node, by default of the logits."""
        for node in live_nodes(self.model.graph_module.graph):
            if node.op == "output":
                break
            self._results[node] = self._visit(node)
            if node is last:
                return self._value(node)
        (logits,) = node.all_input_nodes
        return self._value(logits)

    def _value(self, node: fx.Node) -> Value:
        value = self._results[node]
        if not isinstance(value, Value):
            raise InputError("the logits do not depend on the input, so there is nothing to certify")
        return value

    def _visit(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            self._batch = node.meta["val"].shape[0]
            precision = Precision.of(node.meta["val"].dtype)
            zero = torch.zeros(1, *node.meta["val"].shape[1:], dtype=torch.float64)
            self.limit(Error(1.0), precision)
            return Value(self._input, Selection(), zero, name="x")
        if node.op == "get_attr":
            return getattr(self.model.graph_module, str(node.target)).detach().cpu()
        if node.target is operator.getitem:
            source: Any = node.args[0]
            index: Any = node.args[1]
            part = self._results[source][index]
            if part is None:
                raise self._refusal(source, "only its first result can be certified")
            try:
                self._check_rows(node)
            except Refusal as error:
                raise self._refusal(source, str(error)) from None
            base = replace(part.base, node=node.name) if part.base.node == source.name else part.base
            return replace(part, base=base, node=node.name)
        if isinstance(node.meta.get("val"), (int, torch.SymInt)):
            return node  # a batch size, which `batch_number` computes
        return self._apply(node)

    def _apply(self, node: fx.Node) -> Any:
        arguments = fx.map_arg(bind_arguments(node), self._results.__getitem__)
        call = Call(self, node, dict(arguments))
        try:
            self._check_arguments(call)
            if not any(isinstance(value, Value) for value in _flat(arguments)):
                return self._constant(call)
            self._check_rows(node)
            rule = self.rules.get(operation_kind(node))
            if rule is None:
                raise Refusal("it has no certification rule")
            return _checked(rule(call), node.meta["val"])
        except (Refusal, InputError) as error:
            raise self._refusal(node, str(error)) from None
        except Exception as error:  # shapes or values that a rule does not expect
            message = next(iter(str(error).splitlines()), type(error).__name__)
            raise self._refusal(node, f"its rule failed: {message}") from error

    def _constant(self, call: Call) -> Tensor:
        """Return a tensor that depends only on the batch size, such as zeros to append, if all its rows are equal."""
        tensors = [call.run({}, batch, exact=False) for batch in BATCHES]
        for tensor, batch in zip(tensors, BATCHES, strict=True):
            same = isinstance(tensor, Tensor) and tensor.dim() and len(tensor) == batch and (tensor == tensor[:1]).all()
            if not same or not torch.equal(tensor[:1], tensors[0][:1]):
                raise Refusal("it mixes the points of a batch")
        return self.row_constant(tensors[0][:1])

    def row_constant(self, tensor: Tensor) -> Tensor:
        """Register a constant that represents one row of a batch."""
        self._rows[id(tensor)] = tensor
        return tensor

    def for_batch(self, tensor: Tensor, batch: int) -> Tensor:
        """Expand a constant that represents one row of a batch to all rows; return other constants unchanged."""
        return tensor.expand(batch, *tensor.shape[1:]) if id(tensor) in self._rows else tensor

    def _check_arguments(self, call: Call) -> None:
        """Check that the batch size is only the first size of a tensor, and that no number is NaN."""
        if call.node.target is torch.ops.aten.view.dtype:
            raise Refusal("it reads numbers as another type without converting them")
        for name, value in call.arguments.items():
            sizes = name in ("size", "repeats") and isinstance(value, (list, tuple))
            for place, part in enumerate(value if sizes else _flat(value)):
                if isinstance(part, float) and math.isnan(part):
                    raise Refusal(f"{name} is not a number")
                size = part.meta["val"] if isinstance(part, fx.Node) else 0
                if not isinstance(size, int) and not (sizes and place == 0 and str(size) == str(self._batch)):
                    raise Refusal("it computes with the batch size")

    def _check_rows(self, node: fx.Node) -> None:
        """Check that a result starts with the batch dimension and that no other dimension depends on the batch size."""
        value = node.meta["val"]
        if isinstance(value, Tensor):  # if there are several results, those that are used are checked one by one
            batch, *shape = value.shape or (0,)
            if str(batch) != str(self._batch) or not all(isinstance(n, int) for n in shape):
                raise Refusal("it mixes the points of a batch")

    def _refusal(self, node: Any, reason: str) -> InputError:
        where = f" ({line})" if (line := locate(node)) else ""
        return InputError(f"{operation_kind(node)} cannot be certified: {reason}{where}")

    # --- helpers for rules

    def batch_number(self, node: fx.Node, batch: int) -> int:
        """Evaluate a number that depends on the batch size."""
        if node.target in ARITHMETIC:
            left, right = (self.batch_number(a, batch) if isinstance(a, fx.Node) else a for a in node.args)
            return int(node.target(left, right))
        value = node.meta["val"]
        if isinstance(value, int):
            return value
        if str(value) != str(self._batch):
            raise Refusal("it computes with the batch size")
        return batch

    def finite(self, tensor: Tensor | float) -> Tensor:
        """Convert a constant to float64, which is exact; it must be finite."""
        tensor = torch.as_tensor(tensor).detach().double()
        if not tensor.isfinite().all():
            raise Refusal("its weights are not finite")
        return tensor

    def per_point(self, constant: Tensor, shape: Shape) -> Tensor:
        """Return a constant for one point, with as many dimensions as the value that it is combined with."""
        if constant.dim() > len(shape):
            if constant.dim() > len(shape) + 1 or constant.shape[0] != 1:
                raise Refusal("it mixes the points of a batch")
            constant = constant[0]
        return constant[(None,) * (len(shape) - constant.dim())]

    def limit(self, magnitude: Error, precision: Precision) -> None:
        """Limit the norm of inputs so that numbers up to this magnitude do not overflow."""
        room = precision.largest / 4 - magnitude.absolute
        if not room > 0:
            raise Refusal("it may overflow, or its weights are not finite")
        if magnitude.relative > 0:
            self.largest_input = min(self.largest_input, room / magnitude.relative)

    def is_input(self, value: Value) -> bool:
        """Whether a value has the same entries as the input of the network, in order."""
        return value.base is self._input and self.base(value) is self._input

    def bound(self, value: Value) -> Bound:
        """Return the bound of a value as a function of the network's input; proves the norm of a linear map."""
        return self.base(value).bound

    def base(self, value: Value) -> Base:
        if id(value) not in self._bases:
            same = _is_linear(value) and isinstance(value.relation, Selection) and value.local == Error()
            base = value.base if same else self._resolved(value)
            self._bases[id(value)] = value, base
        return self._bases[id(value)][1]

    def _resolved(self, value: Value) -> Base:
        gain, before = self.gain(value), value.base.bound
        error = before.error.times(gain) + value.local
        offset = norm(value.zero) + error.absolute
        return Base(Bound(gain * before.lipschitz, offset, error.relative, error.absolute), value.node)

    def anchor(self, value: Value) -> Value:
        """Return the same value as its own base."""
        if id(value) not in self._anchors:
            self._anchors[id(value)] = replace(value, base=self.base(value), relation=Selection(), local=Error())
        return self._anchors[id(value)]

    def gain(self, value: Value) -> float:
        """Return the Lipschitz constant of a value as a function of its base."""
        relation = value.relation
        return relation.gain if isinstance(relation, Selection) else self.prove(value, relation)

    def prove(self, value: Value, relation: LinearMap) -> float:
        """Prove the norm of a linear map."""
        began = time.monotonic()
        proven = relation.norm(self.budget)
        seconds = time.monotonic() - began
        layer = LayerBound(value.name, value.kind, proven.value, proven.method, seconds, value.node)
        self.layers.append(layer)
        if self.on_layer is not None:
            self.on_layer(layer)
        return proven.value

    def common_base(self, one: Value, two: Value) -> tuple[Value, Value] | None:
        """Return two values as linear functions of the same base, or None if they are not."""
        for first, second in ((one, two), (self._shallow(one, two), two), (one, self._shallow(two, one))):
            if first.base is second.base and _is_linear(first) and _is_linear(second):
                return first, second
        return None

    def _shallow(self, value: Value, other: Value) -> Value:
        """Return a value as its own base if the other value is already a function of it."""
        known = self._bases.get(id(value))
        return self.anchor(value) if known is not None and known[1] is other.base else value


def _checked(result: Any, expected: Any) -> Any:
    """Check that the result of a rule has the shape of the result in the graph, and constants that cannot underflow."""
    pairs = zip(result, expected, strict=False) if isinstance(result, tuple) else [(result, expected)]
    for value, meta in pairs:
        if not isinstance(value, Value):
            continue
        if tuple(value.shape) != tuple(meta.shape[1:]):
            raise Refusal(f"its rule expects another shape than {tuple(meta.shape[1:])}")
        slopes = value.relation.slope if isinstance(value.relation, Selection) else value.relation.spread
        for constant in (slopes, value.base.bound.lipschitz):
            numbers = torch.as_tensor(constant, dtype=torch.float64)
            if ((numbers > 0) & (numbers < LEAST)).any():
                raise Refusal("its Lipschitz constant is too small")
    return result


def _is_linear(value: Value) -> bool:
    relation = value.relation
    return not isinstance(relation, Selection) or (relation.linear and relation.index is None)


def as_linear(value: Value) -> LinearMap:
    """Return the relation of a value that is linear in its base."""
    relation = value.relation
    return Diagonal(torch.ones((), dtype=torch.float64)) if isinstance(relation, Selection) else relation


def operation_kind(node: fx.Node) -> str:
    """Return the name of an ATen operation without its overload.

    >>> graph = fx.Graph()
    >>> operation_kind(graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("x"), 1)))
    'add'
    """
    return operation_name(node).removeprefix("aten.").partition(".")[0]


def locate_module(node: fx.Node) -> str:
    """Return the path of the module that a node comes from, or the name of the node."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return next((path for path, _ in reversed(stack) if path), node.name)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in _flat(part)]
    return [value]


def joined(propagation: Propagation, values: Sequence[Value]) -> tuple[Base, list[Value]] | None:
    """Return values as selections of one base, or None if they are not.

    The minimum and the maximum of the same pairs count as selections of the pairs.
    """
    parts = [value if isinstance(value.relation, Selection) else propagation.anchor(value) for value in values]
    bases = {id(part.base): part.base for part in parts}
    if len(bases) == 2:
        parts = _sorted_pairs(parts, list(bases.values())) or parts
        bases = {id(part.base): part.base for part in parts}
    if len(bases) != 1:
        return None
    return parts[0].base, parts


def _sorted_pairs(parts: list[Value], bases: list[Base]) -> list[Value] | None:
    r"""Return the minimum and maximum of a and b as selections of a and b, or None.

    Because :math:`\Delta\min^2 + \Delta\max^2 \le \Delta a^2 + \Delta b^2`, the minimum counts as a change of a and the
    maximum as a change of b, if both contain the same pairs.
    """
    first, second = bases[0].order, bases[1].order
    if first is None or second is None or first[1] is not second[1] or first[2] is not second[2]:
        return None
    if first[0] == second[0]:
        return None
    lists = [[entries(part).flatten() for part in parts if part.base is base] for base in bases]
    smaller, larger = (torch.cat(part).sort().values for part in lists)
    if not torch.equal(smaller, larger):
        return None
    slope = max(float(torch.as_tensor(selection_of(part).slope).max()) for part in parts)
    return [_as_argument(part, slope) for part in parts]


def _as_argument(part: Value, slope: float) -> Value:
    """Treat an entry of a minimum as one of the first argument, and an entry of a maximum as one of the second.

    The slope is the larger one for both, because it is not known from which argument an entry comes.
    """
    assert part.base.order is not None
    kind, a, b = part.base.order
    source, place = a if kind == "minimum" else b, entries(part).long()
    nothing = torch.zeros(1, dtype=torch.float64)
    slopes = torch.as_tensor(selection_of(source).slope, dtype=torch.float64).expand(source.shape).flatten()
    index = torch.cat([nothing, entries(source).flatten()])[place]
    selection = Selection(index, slope * torch.cat([nothing, slopes])[place], False)
    # Both arguments are repeated equally often; see `_sorted_pairs`.
    local = part.local + source.local.times(slope * math.sqrt(most_repeats(place, source.size)))
    return replace(part, base=source.base, relation=selection, local=local)


def most_repeats(index: Tensor, count: int) -> int:
    """Return how often the entry that occurs most often occurs in an index of entries from 1 to a count."""
    return int(torch.bincount(index.long().flatten(), minlength=count + 1)[1:].max())


def selection_of(value: Value) -> Selection:
    assert isinstance(value.relation, Selection)
    return value.relation


def entries(value: Value) -> Tensor:
    """Return the explicit index of a selection."""
    index = selection_of(value).index
    return numbered(value) if index is None else index


def numbered(value: Value) -> Tensor:
    """Return the numbers of the entries of a value, starting at 1."""
    return torch.arange(1, value.size + 1, dtype=torch.float64).view(value.shape)
