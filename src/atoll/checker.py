r"""Check the proof files of ``atoll certify --proof`` with NumPy and SciPy alone.

A file claims that the stored network, computed in its precision, predicts one class for all inputs (within the bounds,
if there are any) at l2 distance up to r from x.  Nothing of Atoll is imported, nothing in the file is trusted or run:

1. The network is evaluated at x in float64.
2. The norm s of a linear layer A (witness) is proven by a Cholesky factor R of :math:`s^2 I - A^T A`, shifted: it
   is exact up to :math:`\gamma_{w+2} |R^T| |R|` for a band of width w (Higham, 2002, theorem 10.3), and the shift covers
   that and the rounding of :math:`A^T A`.  A layer with too wide a band is proven as part of a circulant one, closed
   from left to right (strip) or also from top to bottom (torus): a direct sum over frequencies.
3. Each value v has a Lipschitz constant L and a bound :math:`e_0 + e_1 d` of the deployed network's rounding error at
   distance d from x.  It follows from :math:`\|v\| + L d` and :math:`|fl(Av) - Av| \le \gamma_k |A| |v|`, which holds
   in any order of summation, and counts underflow.  Claims that may overflow are not proven.
4. A linear head keeps its class if each margin exceeds :math:`\|w_j - w_i\| L r` and the errors.  Centroids keep it if
   features within :math:`\rho = L r + e` are closer to an own centroid p than to c, for each other centroid c: by the
   plane between c and one p, or for several p by multipliers :math:`\lambda \ge 0` (witness), since a move
   :math:`\delta` to where c is closest has :math:`\tfrac12 \|\delta\|^2 \ge q(\lambda)`, the dual function.

Sums of products are assumed to be computed as such: no Winograd convolution, no TF32.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.linalg import LinAlgError, cholesky_banded
from scipy.sparse import bsr_array, coo_array, csr_array, kron
from scipy.special import erf

Array = np.ndarray[Any, np.dtype[Any]]

UNIT = 2.0**-53  # unit roundoff of float64
PRECISIONS = {"float32": (2.0**-24, 2.0**-126, 2.0**126), "float64": (UNIT, 2.0**-1022, 2.0**1022)}
DTYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64}
FILE_LIMIT, SIZE_LIMIT, BAND_LIMIT = 2**32, 2**26, 2**28  # bytes, numbers of one value, numbers of a band matrix
CHUNK = 64  # points that are evaluated together
PLANES = 4  # own centroids, from the nearest on, that a plane is drawn for
UP, SAFETY = 1 + 1e-11, 1 + 1e-6  # for rounding in constants, and in bounds of errors
CONSTANT, SLOPE = np.array([[1.0], [0.0], [1.0]]), np.array([[0.0], [1.0], [0.0]])  # see Value


class ProofError(ValueError):
    """A proof file is damaged, altered or malformed."""


class NotCovered(Exception):
    """The checker has no rule for an operation, or a layer is too large."""


def expect(condition: Any, message: str) -> None:
    if not condition:
        raise ProofError(message)


@dataclass(frozen=True)
class Node:
    """An operation; its arguments refer to earlier nodes ({"node": place}) or to constants ({"constant": name})."""

    name: str
    operation: str
    args: dict[str, Any]
    line: str


@dataclass(frozen=True)
class Proof:
    """The validated content of a file."""

    header: dict[str, Any]
    arrays: dict[str, Array]
    nodes: list[Node]
    output: int


def read(path: Path) -> Proof:
    """Read a file in the safetensors format, check its digest, and validate its content."""
    expect(path.stat().st_size <= FILE_LIMIT, f"expected at most {FILE_LIMIT:,} bytes")
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8:end])
    meta = table.pop("__metadata__")
    digest = meta["digest"].encode()
    actual = hashlib.sha256(raw.replace(digest, b"0" * 64, 1)).hexdigest().encode()
    expect(digest == actual, "the digest does not match: the file is damaged or was altered")
    arrays = {name: _array(name, entry, raw[end:]) for name, entry in table.items()}
    return _validate(json.loads(meta["proof"]), arrays)


def _array(name: str, entry: Any, data: bytes) -> Array:
    dtype, shape, (start, stop) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    expect(all(type(n) is int and 0 < n < 2**31 for n in shape) and len(shape) < 8, f"{name}: wrong shape {shape}")
    size = math.prod(shape) * np.dtype(dtype).itemsize
    expect(0 <= start <= stop <= len(data) and stop - start == size, f"{name}: expected {size:,} bytes of data")
    array: Array = np.frombuffer(data[start:stop], dtype).reshape(shape)
    expect(np.isfinite(array).all(), f"{name}: expected finite numbers, got NaN or infinity")
    return array


def _validate(header: dict[str, Any], arrays: dict[str, Array]) -> Proof:
    missing = {"format", "precision", "subject", "bounds", "inputs", "nodes", "output", "norms"} - header.keys()
    missing |= {"input", "class", "radius"} - arrays.keys()
    expect(not missing, f"missing: {', '.join(sorted(missing))}")
    expect(header["format"] == 1, f"format: expected 1, got {header['format']!r}")
    expect(header["precision"] in PRECISIONS, f"precision: expected float32 or float64, got {header['precision']!r}")
    x, classes, radius, bounds = arrays["input"], arrays["class"], arrays["radius"], header["bounds"]
    expect(str(x.dtype) == header["precision"], f"input: expected {header['precision']}, got {x.dtype}")
    expect(classes.shape == radius.shape == x.shape[:1], "expected a class and a radius for each input")
    expect(classes.dtype == np.int64 and classes.min() >= 0, "class: expected whole numbers, not below 0")
    expect(radius.dtype == np.float64 and radius.min() >= 0, "radius: expected numbers, not below 0")
    digests = [hashlib.sha256(row.tobytes()).hexdigest() for row in x]
    expect(header["inputs"] == digests, "inputs: the digests do not match the stored inputs")
    expect(bounds is None or -math.inf < bounds[0] < bounds[1] < math.inf, "bounds: expected null or low < high")
    for name, (norm, method) in header["norms"].items():
        expect(1e-100 <= norm <= 1e100, f"{name}: expected a norm in [1e-100, 1e100], got {norm}")
        expect(method in ("exact", "strip", "torus"), f"{name}: expected exact, strip or torus, got {method!r}")
    if "dual.point" in arrays:
        point, other, own, weight = (arrays[f"dual.{name}"] for name in ("point", "other", "own", "multiplier"))
        expect(own.shape == weight.shape and point.shape == other.shape == own.shape[:1], "dual: shapes do not match")
        expect(min(point.min(), other.min(), own.min(), weight.min()) >= 0, "dual: expected numbers, not below 0")
    nodes, places = _graph(header["nodes"], arrays)
    return Proof(header, arrays, nodes, places[header["output"]])


def _graph(entries: Any, arrays: dict[str, Array]) -> tuple[list[Node], list[int]]:
    """The nodes without copies and repetitions, and the place of each entry among them."""
    nodes: list[Node] = []
    places: list[int] = []
    known: dict[str, int] = {}

    def refer(value: Any) -> Any:
        if not isinstance(value, dict):
            return [refer(item) for item in value] if isinstance(value, list) else value
        if "constant" in value:
            expect(value["constant"] in arrays, f"the constant {value['constant']!r} is missing")
            return {"constant": value["constant"]}
        earlier = type(value["node"]) is int and 0 <= value["node"] < len(places)
        expect(earlier, f"node {len(places)} refers to {value['node']!r}, which is not an earlier node")
        return {"node": places[value["node"]]}

    for entry in entries:
        node = Node(entry["name"], entry["operation"], {k: refer(v) for k, v in entry["args"].items()}, entry["line"])
        if node.operation in ("aten.detach.default", "aten.alias.default"):
            places.append(node.args["self"]["node"])
            continue
        places.append(known.setdefault(f"{node.operation} {json.dumps(node.args, sort_keys=True)}", len(nodes)))
        if places[-1] == len(nodes):
            nodes.append(node)
    return nodes, places


@dataclass(frozen=True)
class Value:
    """A node at the inputs, its Lipschitz constant (infinite if not proven), and a bound of the rounding error.

    Bounds have three rows: at distance 0, slope in the distance, and for this program's own evaluation.
    """

    array: Array
    lipschitz: float
    error: Array  # (3, points)
    linear: Linear | None = None

    @property
    def reach(self) -> Array:
        """Bound of the norm of the computed value."""
        norm = np.linalg.norm(self.array.reshape(len(self.array), -1), axis=1)
        reach: Array = CONSTANT * norm + SLOPE * self.lipschitz + self.error
        return reach

    @property
    def value(self) -> Value:
        return self


@dataclass(frozen=True)
class Moved:
    """Entries of a value, moved: entry i, or the smaller (kind 1) or larger (kind 2) of the entries i and j."""

    base: Value
    entries: Array  # i, j and kind, (3, *shape)

    @cached_property
    def value(self) -> Value:
        """Sorted pairs and single entries, each used once, are 1-Lipschitz together."""
        flat = self.base.array.reshape(len(self.base.array), -1)
        i, j, kind = self.entries.reshape(3, -1)
        pair = np.minimum(i, j) * flat.shape[1] + np.maximum(i, j)
        low, high = np.divmod(np.unique(pair), flat.shape[1])
        used = np.concatenate([low, high[low != high]])
        if any(len(np.unique(v)) < len(v) for v in (used, 3 * pair + kind)) or ((kind > 0) != (i != j)).any():
            raise NotCovered("expected minimum, maximum and cat as in MinMax: sorted pairs, each entry used once")
        array = np.where(kind == 2, np.maximum(flat[:, i], flat[:, j]), np.minimum(flat[:, i], flat[:, j]))
        return Value(array.reshape(len(flat), *self.entries.shape[1:]), self.base.lipschitz, self.base.error)


@dataclass(frozen=True)
class Linear:
    """A layer ``kernel * base + constant``, possibly computed in several steps."""

    base: Value
    kernel: Array  # (out, in, height, width); 1 x 1 if dense
    absolute: Array  # sum of the absolute values of all parts of the kernel
    offset: float  # norm of the absolute values of all constants that are added
    terms: int  # roundings of one output
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)

    @property
    def axes(self) -> list[Axis]:
        sizes = self.base.array.shape[2:] or (1, 1)
        return [Axis(*v) for v in zip(sizes, self.kernel.shape[2:], self.stride, self.padding, strict=True)]

    @cached_property
    def spread(self) -> float:
        """Upper bound of the norm of the layer with the absolute kernel, by row and column sums or by patches."""
        a, (down, across) = self.absolute, self.stride
        columns = max(a[:, :, i::down, j::across].sum((0, 2, 3)).max() for i in range(down) for j in range(across))
        patches = math.ceil(a.shape[2] / down) * math.ceil(a.shape[3] / across)
        return min(math.sqrt(a.sum((1, 2, 3)).max() * columns), np.linalg.norm(a) * math.sqrt(patches)) * UP

    def scaled(self, factor: Array, offset: float, terms: int) -> Linear | None:
        """With a factor for each channel, before constants of norm ``offset`` are added."""
        rows = factor.reshape(len(factor), -1)
        if (rows != rows[:, :1]).any():
            return None
        column, offset = rows[:, :1, None, None], offset + float(np.abs(rows).max()) * self.offset
        kernel, absolute = self.kernel * column, self.absolute * np.abs(column)
        return replace(self, kernel=kernel, absolute=absolute, offset=offset, terms=self.terms + terms)

    def residual(self) -> Linear | None:
        """The layer plus its own input, which is one tap of its kernel."""
        kernel, absolute, (y, x) = self.kernel.copy(), self.absolute.copy(), self.padding
        if self.stride != (1, 1) or len(kernel) != kernel.shape[1]:
            return None
        for taps in (kernel, absolute):
            np.einsum("iihw->ihw", taps)[:, y, x] += 1
        return replace(self, kernel=kernel, absolute=absolute, terms=self.terms + 1)

    def has_norm(self, claim: float, method: str) -> bool:
        """Whether the norm is at most the claimed one; see the module's text for the proof."""
        # The kernel may have been merged, and is transformed, in float64.
        norm = claim - 64 * (self.kernel[0, 0].size + 8) * UNIT * self.spread
        parts = self.kernel.transpose(2, 3, 0, 1)[None]  # frequencies, height, width, out, in
        y, x = self.axes
        if method != "exact":
            parts, x = x.closed(parts, 2)
        if method == "torus":
            parts, y = y.closed(parts, 1)
        return norm > 0 and all(_is_below(part, y, x, norm, self.spread) for part in parts)


@dataclass(frozen=True)
class Axis:
    """One direction of a convolution."""

    size: int
    taps: int
    stride: int
    padding: int

    @property
    def out(self) -> int:
        return (self.size + 2 * self.padding - self.taps) // self.stride + 1

    def closed(self, parts: Array, dim: int) -> tuple[Array, Axis]:
        """Close the direction to a ring, and transform it; the layer is a part of the result.

        With a stride the inputs ``stride * J + phase - padding`` are channels of J, and meet output j in the tap
        ``stride * q + phase`` if J = j + q.  On a ring of this size that has no further solutions.
        """
        count, first = -(-self.taps // self.stride), self.padding // self.stride
        ring = max((self.size - 1 + self.padding) // self.stride + 1, self.out + count - 1 - first)
        kernel = np.pad(np.moveaxis(parts, dim, -1), [*[(0, 0)] * 4, (0, count * self.stride - self.taps)])
        kernel = kernel.reshape(*kernel.shape[:4], count, self.stride)
        frequencies = ring if np.iscomplexobj(parts) else ring // 2 + 1  # the others are complex conjugates
        turns = np.outer(np.arange(frequencies), np.arange(count)) % ring
        waves = np.tensordot(np.exp(2j * math.pi / ring * turns), kernel, (1, 4))  # frequency, ..., in, phase
        waves = waves.reshape(-1, *waves.shape[2:4], waves.shape[4] * waves.shape[5])
        return np.expand_dims(waves, dim), Axis(1, 1, 1, 0)

    def shift(self, tap: int) -> csr_array:
        """Which inputs the outputs read with a tap."""
        source = self.stride * np.arange(self.out) + tap - self.padding
        target = np.flatnonzero((source >= 0) & (source < self.size))
        return csr_array((np.ones(len(target)), (target, source[target])), (self.out, self.size))


def _is_below(part: Array, y: Axis, x: Axis, norm: float, spread: float) -> bool:
    """Whether the Cholesky factor of ``norm^2 I - A^H A`` or ``norm^2 I - A A^H`` exists, shifted for rounding."""
    height, width, out, channels = part.shape
    outputs, inputs = y.out * x.out * out, y.size * x.size * channels
    order, block = min((outputs, out), (inputs, channels))
    entries = order * block * (2 * height - 1) * (2 * width - 1)
    if max(entries, outputs * part[:, :, 0].size) > BAND_LIMIT:
        raise NotCovered("the layer is too large; certify it with the bound strip or torus")
    if order == block:
        flat = part[0, 0]
        gram = coo_array(flat @ flat.conj().T if order == out else flat.conj().T @ flat)
    else:
        layer = csr_array((outputs, inputs), dtype=part.dtype)
        for i, j in np.ndindex(height, width):
            places = csr_array(kron(y.shift(i), x.shift(j)))
            blocks = np.repeat(part[i, j][None], places.nnz, 0)
            layer = layer + bsr_array((blocks, places.indices, places.indptr), (outputs, inputs))
        gram = coo_array(layer @ layer.conj().T if order == outputs else layer.conj().T @ layer)
    row, column = gram.coords
    lower = row >= column
    row, column, data = row[lower] - column[lower], column[lower], gram.data[lower]
    band = int(row.max(initial=0))
    if order * (band + 1) > BAND_LIMIT:
        raise NotCovered("the layer is too large; certify it with the bound strip or torus")
    matrix = np.zeros((band + 1, order), part.dtype)
    matrix[row, column] = -data
    terms = height * width * max(out, channels) + 8
    matrix[0] += norm**2 - 8 * UNIT * (terms * spread**2 + (band + 8) * min(order, 2 * band + 1) * norm**2)
    try:
        cholesky_banded(matrix, overwrite_ab=True, lower=True, check_finite=False)
    except LinAlgError:
        return False
    return True


@dataclass
class Evaluation:
    """Evaluates nodes at some inputs; ``proven`` has the layers whose norms were looked at so far."""

    proof: Proof
    x: Array
    proven: dict[str, bool]
    peaks: list[Array] = field(default_factory=list)  # bounds of all numbers that could overflow
    results: dict[int, Value | Moved] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unit, tiny, self.largest = PRECISIONS[self.proof.header["precision"]]
        self.unit, self.tiny = np.array([[unit], [unit], [UNIT]]), np.array([[tiny], [tiny], [2.0**-1022]])

    def gamma(self, terms: int) -> Array:
        product = terms * self.unit
        return np.where(product < 0.5, product / (1 - product), np.inf)

    def run(self, target: int) -> Value:
        """Evaluate a node and all that it depends on."""
        needed = {target}
        for place in range(target, -1, -1):
            if place in needed:
                needed.update(_references(self.proof.nodes[place].args))
        for place in sorted(needed - self.results.keys()):
            node = self.proof.nodes[place]
            try:
                rule = OPERATIONS[node.operation]
                self.results[place] = rule(self, node.name, {k: self.resolve(v) for k, v in node.args.items()})
            except KeyError:
                raise NotCovered(f"{node.operation} is not covered ({node.line})") from None
            except NotCovered as error:
                raise NotCovered(f"{node.name}: {error} ({node.line})") from None
        return self.results[target].value

    def resolve(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.resolve(item) for item in value]
        if not isinstance(value, dict):
            return value
        return self.results[value["node"]] if "node" in value else self.proof.arrays[value["constant"]].astype(float)

    def rounding(self, bound: Array, terms: int, reach: Array, weight: float, outputs: int) -> Array:
        """The error of sums with this many roundings and a bound of their absolute terms, and of underflow."""
        under = (reach + CONSTANT * (2 + weight)) * self.tiny * (terms * math.sqrt(outputs))
        result: Array = bound * self.gamma(terms) + under
        return result

    def layer(self, name: str, linear: Linear, array: Array) -> Value:
        """The value of a linear layer; without a witness it has no Lipschitz constant, but may be part of a layer."""
        base, norm = linear.base, math.inf
        bound = base.reach * linear.spread + CONSTANT * linear.offset
        self.peaks.append(bound)
        if name in self.proof.header["norms"]:
            claim, method = self.proof.header["norms"][name]
            if name not in self.proven:
                self.proven[name] = linear.has_norm(claim, method)
            norm = claim if self.proven[name] else math.inf
        error = self.rounding(bound, linear.terms, base.reach, float(linear.absolute.max()), array[0].size)
        return Value(array, norm * base.lipschitz, base.error * norm + error, linear)

    def scaled(self, name: str, value: Value, array: Array, factor: Array, offset: float, terms: int) -> Value:
        """``array = factor * value + constants``, with constants of norm ``offset``."""
        gain, linear = float(np.abs(factor).max()), value.linear and value.linear.scaled(factor, offset, terms)
        if linear and (name in self.proof.header["norms"] or math.isinf(value.lipschitz)):
            return self.layer(name, linear, array)
        bound = value.reach * gain + CONSTANT * offset
        self.peaks.append(bound)
        error = value.error * gain + self.rounding(bound, terms, value.reach, gain, array[0].size)
        return Value(array, value.lipschitz * gain, error, linear)

    def activation(self, x: Any, array: Array, slope: float = 1.0, terms: int = 0, zero: float = 0.0) -> Value:
        """An elementwise function with the largest slope ``slope`` and the value ``zero`` at 0."""
        value, count = x.value, array[0].size
        bound = value.reach * slope + CONSTANT * zero * math.sqrt(count)
        error = value.error * slope + self.rounding(bound, terms, value.reach, 1.0, count)
        return Value(array, value.lipschitz * slope, error)

    def linear(self, name: str, a: Any) -> Value:
        base, weight, bias = a["input"].value, a["weight"], 0.0 if a["bias"] is None else a["bias"]
        kernel = weight[:, :, None, None]
        layer = Linear(base, kernel, np.abs(kernel), float(np.linalg.norm(bias)), weight.shape[1] + 2)
        return self.layer(name, layer, base.array @ weight.T + bias)

    def convolution(self, name: str, a: Any) -> Value:
        base, kernel, bias = (
            a["input"].value,
            a["weight"],
            np.zeros(len(a["weight"])) if a["bias"] is None else a["bias"],
        )
        if a["transposed"] or a["groups"] != 1 or {*a["dilation"]} != {1} or kernel.ndim != 4:
            raise NotCovered("only two-dimensional convolutions without groups or dilation are covered")
        layer = Linear(base, kernel, np.abs(kernel), 0.0, kernel[0].size + 2, tuple(a["stride"]), tuple(a["padding"]))
        expect(
            all(0 <= v.padding < v.taps and v.stride > 0 < v.out for v in layer.axes),
            f"{name}: wrong padding or stride",
        )
        (y, x), (down, across) = layer.axes, layer.stride
        expect(len(kernel) * y.out * x.out <= SIZE_LIMIT, f"{name}: expected at most {SIZE_LIMIT:,} outputs")
        padded = np.pad(base.array, [(0, 0), (0, 0), (y.padding, y.padding), (x.padding, x.padding)])
        windows = sliding_window_view(padded, kernel.shape[2:], (2, 3))[:, :, ::down, ::across]
        array = np.moveaxis(np.tensordot(windows, kernel, ((1, 4, 5), (1, 2, 3))), 3, 1) + bias[:, None, None]
        return self.layer(name, replace(layer, offset=float(np.linalg.norm(bias)) * math.sqrt(y.out * x.out)), array)

    def add(self, name: str, a: Any, sign: float = 1.0) -> Value:
        left, right = a["self"], a["other"]
        if a["alpha"] != 1 or not isinstance(left, Value | Moved):
            raise NotCovered("expected a constant or a value to be added to a value")
        value = left.value
        if not isinstance(right, Value | Moved):
            constant = np.broadcast_to(right, (1, *value.array.shape[1:]))[0]
            norm = float(np.linalg.norm(constant))
            return self.scaled(name, value, value.array + sign * constant, np.ones_like(constant), norm, 2)
        other, array = right.value, value.array + sign * right.value.array
        expect(value.array.shape == other.array.shape, f"{name}: shapes do not match")
        for base, branch in ((value, other), (other, value)):
            if sign == 1 and name in self.proof.header["norms"] and branch.linear and branch.linear.base is base:
                if layer := branch.linear.residual():
                    return self.layer(name, layer, array)
        total = Value(array, value.lipschitz + other.lipschitz, value.error + other.error)
        self.peaks.append(total.reach)
        return replace(total, error=total.error + self.rounding(total.reach, 1, total.reach, 1.0, array[0].size))

    def multiply(self, name: str, a: Any, power: float = 1.0) -> Value:
        if not isinstance(a["self"], Value | Moved) or isinstance(a["other"], Value | Moved):
            raise NotCovered("expected a value times or over a constant")
        value = a["self"].value
        factor = np.broadcast_to(np.asarray(a["other"], float) ** power, (1, *value.array.shape[1:]))[0]
        return self.scaled(name, value, value.array * factor, factor, 0.0, 4)

    def batch_norm(self, name: str, a: Any) -> Value:
        value, variance = a["input"].value, a["running_var"]
        weight, bias, mean = a["weight"], a["bias"], a["running_mean"]
        columns = [
            np.broadcast_to(v.reshape(-1, *[1] * (value.array.ndim - 2)), value.array.shape[1:])
            for v in (weight / np.sqrt(variance + a["eps"]), bias, mean)
        ]
        factor, bias, mean = columns
        offset = float(np.linalg.norm(2 * np.abs(factor * mean) + np.abs(bias)))
        return self.scaled(name, value, (value.array - mean) * factor + bias, factor, offset, 10)

    def softplus(self, name: str, a: Any) -> Value:
        value, beta = a["self"].value, a["beta"]
        expect(beta > 0, f"{name}: expected beta > 0")
        if a["threshold"] < 20:
            raise NotCovered("a threshold below 20 is not covered")
        result = self.activation(value, np.logaddexp(0, beta * value.array) / beta, terms=8, zero=math.log(2) / beta)
        return replace(result, error=result.error + CONSTANT * 2.1e-9 / beta * math.sqrt(value.array[0].size))  # a jump

    def gelu(self, name: str, a: Any) -> Value:
        x = a["self"].value.array
        inner = (
            erf(x / math.sqrt(2))
            if a["approximate"] == "none"
            else np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        )
        return self.activation(a["self"], x * (1 + inner) / 2, slope=1.13, terms=16)

    def move(self, name: str, x: Any, change: Callable[[Array], Array]) -> Moved:
        """Apply a change of the layout, which must leave the first axis alone, to the places of entries."""
        moved = _moved(x)
        entries = change(moved.entries)
        expect(len(entries) == 3, f"{name}: points are mixed")
        return Moved(moved.base, entries)

    def view(self, name: str, a: Any) -> Moved:
        expect(a["size"][0] == -1 and min(a["size"][1:], default=0) > 0, f"{name}: expected sizes with the batch first")
        return self.move(name, a["self"], lambda entries: entries.reshape(3, *a["size"][1:]))

    def cat(self, name: str, a: Any) -> Moved:
        parts = [_moved(x) for x in a["tensors"]]
        if any(part.base is not parts[0].base for part in parts) or a["dim"] == 0:
            raise NotCovered("expected parts of one value")
        return Moved(parts[0].base, np.concatenate([part.entries for part in parts], a["dim"]))

    def extreme(self, name: str, a: Any, kind: int) -> Moved:
        left, right = _moved(a["self"]), _moved(a["other"])
        if left.base is not right.base or left.entries[2].any() or right.entries[2].any():
            raise NotCovered("expected entries of one value")
        return Moved(left.base, np.stack([left.entries[0], right.entries[0], np.full_like(left.entries[0], kind)]))


Rule = Callable[[Evaluation, str, Any], Value | Moved]
OPERATIONS: dict[str, Rule] = {
    "input": lambda e, name, a: Value(e.x, 1.0, np.zeros((3, len(e.x)))),
    "aten.linear.default": Evaluation.linear,
    "aten.convolution.default": Evaluation.convolution,
    "aten.add.Tensor": Evaluation.add,
    "aten.sub.Tensor": lambda e, name, a: e.add(name, a, -1.0),
    "aten.mul.Tensor": Evaluation.multiply,
    "aten.div.Tensor": lambda e, name, a: e.multiply(name, a, -1.0),
    "aten._native_batch_norm_legit_no_training.default": Evaluation.batch_norm,
    "getitem": lambda e, name, a: a["0"],
    "aten.relu.default": lambda e, name, a: e.activation(a["self"], np.maximum(a["self"].value.array, 0)),
    "aten.softplus.default": Evaluation.softplus,
    "aten.gelu.default": Evaluation.gelu,
    "aten.view.default": Evaluation.view,
    "aten.unsqueeze.default": lambda e, name, a: e.move(name, a["self"], lambda v: np.expand_dims(v, a["dim"])),
    "aten.slice.Tensor": lambda e, name, a: e.move(
        name,
        a["self"],
        lambda v: np.moveaxis(np.moveaxis(v, a["dim"], 0)[a["start"] : a["end"] : a["step"]], 0, a["dim"]),
    ),
    "aten.cat.default": Evaluation.cat,
    "aten.minimum.default": lambda e, name, a: e.extreme(name, a, 1),
    "aten.maximum.default": lambda e, name, a: e.extreme(name, a, 2),
}


def _moved(x: Any) -> Moved:
    if isinstance(x, Moved):
        return x
    index = np.arange(x.array[0].size).reshape(x.array.shape[1:])
    return Moved(x, np.stack([index, index, 0 * index]))


def _references(value: Any) -> Iterator[int]:
    if isinstance(value, dict) and "node" in value:
        yield value["node"]
    for item in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from _references(item)


@dataclass(frozen=True)
class Centroids:
    """The head of a Centroid Net: minus the distance to the nearest centroid of each class, found by products."""

    features: int
    centers: Array  # (classes, per class, features)
    deviation: float  # of the stored squared norms
    low: float = 0.0  # with a stretch: clip((z - low) * gain, 0, 1)
    gain: float = 0.0

    @staticmethod
    def match(proof: Proof) -> Centroids | None:
        def args(reference: Any, operation: str) -> Any:
            node = proof.nodes[reference["node"]]
            return node.args if node.operation == f"aten.{operation}" else {}

        try:
            norm = args(args({"node": proof.output}, "neg.default")["self"], "linalg_vector_norm.default")
            difference = args(norm["self"], "sub.Tensor")
            index = args(difference["other"], "index.Tensor")
            nearest = args(index["indices"][1], "argmin.default")
            view = args(nearest["self"], "view.default")
            scores = args(view["self"], "addmm.default")
            features = args(difference["self"], "unsqueeze.default")
            constants = (index["self"], index["indices"][0], scores["self"], scores["mat2"])
            centers, order, squares, flat = (proof.arrays[c["constant"]].astype(float) for c in constants)
        except (LookupError, TypeError):
            return None
        z, count = features["self"], len(centers)
        stretch = args(z, "clamp.default")
        actual = [norm["ord"], norm["dim"], norm["keepdim"], nearest["dim"], nearest["keepdim"], features["dim"]]
        actual += [view["size"], scores["alpha"], scores["beta"], scores["mat1"], difference["alpha"]]
        expected = [2, [2], False, 2, False, 1, [-1, *centers.shape[:2]], -2, 1, z, 1]
        if actual != expected or (order != np.arange(count)).any() or (flat.T != centers.reshape(flat.T.shape)).any():
            return None
        deviation = float(np.abs(squares - (flat**2).sum(0)).max())
        if stretch and (stretch["min"], stretch["max"]) == (0, 1):
            factor = args(stretch["self"], "mul.Tensor")
            shift = args(factor["self"], "sub.Tensor") if factor else None
            if shift and shift["alpha"] == 1 and shift["other"] >= 0 < factor["other"]:
                return Centroids(shift["self"]["node"], centers, deviation, shift["other"], factor["other"])
        return Centroids(z["node"], centers, deviation)

    def keeps(self, e: Evaluation, classes: Array, radius: Array, dual: list[Array]) -> Array:
        """Whether the class stays the same within the radius."""
        z = e.run(self.features)
        x, count, per_class = z.array, z.array.shape[1], self.centers.shape[1]
        rho = UP * z.lipschitz * radius + SAFETY * total(z.error, radius)
        flat = self.centers.reshape(-1, count)
        squares = (flat**2).sum(1)
        u, low, high, gain, off, largest = x, -np.inf, np.inf, 1.0, 0.0, math.sqrt(squares.max()) * UP
        moved, bounds = e.results[self.features], e.proof.header["bounds"]
        if self.gain:
            gain, low, high = self.gain, self.low - x, self.low + 1 / self.gain - x
            u = np.clip((x - self.low) * gain, 0, 1)
            off = 1.1 * float(e.unit.sum()) * (3 + gain * self.low) * math.sqrt(count)
        elif bounds and isinstance(moved, Moved) and not moved.entries[2].any() and moved.base.array is e.x:
            low, high = np.minimum(bounds[0] - x - 1e-12, 0), np.maximum(bounds[1] - x + 1e-12, 0)
        low, high = np.broadcast_to(low, x.shape), np.broadcast_to(high, x.shape)
        # The computed index has almost the smallest score, and the computed distance almost its distance.
        reach = (np.linalg.norm(u, axis=1) + gain * rho + off + largest) * UP
        gamma, own_gamma = e.gamma(count + 8)[[0, 2], 0]
        slack = 2 * self.deviation + 4.1 * (gamma + own_gamma) * reach**2 + 4 * largest * off
        slack = slack * SAFETY + 16 * count * float(e.tiny[0, 0]) * (1 + reach)
        e.peaks.append(CONSTANT * 4 * reach**2)
        score = squares - 2 * u @ flat.T
        mine = per_class * classes[:, None] + np.arange(per_class)
        near = np.take_along_axis(mine, np.argsort(np.take_along_axis(score, mine, 1), 1)[:, :PLANES], 1)
        keeps = np.arange(len(flat)) // per_class == classes[:, None]
        for p in near.T:
            between = np.maximum(squares + squares[p][:, None] - 2 * flat[p] @ flat.T, 0)
            between = np.sqrt(between + 8 * own_gamma * largest**2)
            margin = score - np.take_along_axis(score, p[:, None], 1) - slack[:, None]
            keeps |= margin > 2 * UP * gain * between * rho[:, None]
        for start in range(0, len(dual[0]), 4 * CHUNK):
            point, other, own, weight = (v[start : start + 4 * CHUNK] for v in dual)
            expect((own // per_class == classes[point][:, None]).all(), "dual: expected centroids of the claimed class")
            margin = score[point, other][:, None] - score[point[:, None], own] - slack[point][:, None]
            rows = np.repeat(np.arange(len(own)), own.shape[1])
            v = 2 * (csr_array((weight.ravel(), (rows, own.ravel())), (len(own), len(flat))) @ flat)
            v -= 2 * weight.sum(1)[:, None] * flat[other]
            move = np.clip(-gain * v, low[point], high[point])
            change = gain * (move - np.clip(0, low[point], high[point]))
            q = (weight * margin).sum(1) + np.minimum(move**2 / 2 + v * change, 0).sum(1)
            size = (weight * np.abs(margin)).sum(1) + (move**2 / 2 + np.abs(v * change)).sum(1)
            size += ((np.abs(move) + gain * np.abs(v)) * (2 + np.abs(x[point]))).sum(1)
            size += 4 * gain * largest * rho[point] * weight.sum(1)
            q -= 2 * own_gamma * (1 + own.shape[1]) * size
            keeps[point, other] |= q > UP * rho[point] ** 2 / 2
        result: Array = keeps.all(1)
        return result


def total(bound: Array, radius: Array) -> Array:
    """A bound of the deployed network's error at the distance of the claims, and of this program's."""
    result: Array = bound[0] + bound[1] * radius + bound[2]
    return result


def _linear_head_keeps(e: Evaluation, classes: Array, radius: Array) -> Array:
    logits = e.run(e.proof.output)
    margin = np.take_along_axis(logits.array, classes[:, None], 1) - logits.array
    linear = logits.linear or Linear(logits, np.eye(logits.array.shape[1])[:, :, None, None], np.zeros(1), 0.0, 0)
    weight, base = linear.kernel[:, :, 0, 0], linear.base
    distance = np.sqrt(((weight[classes][:, None] - weight) ** 2).sum(2))
    length = np.linalg.norm(linear.absolute.reshape(len(linear.absolute), -1), axis=1)
    lengths = length[classes][:, None] + length if logits.linear else 0 * distance
    error = distance * total(base.error, radius)[:, None]
    error += lengths * total(e.rounding(base.reach, linear.terms, base.reach, 1.0, 1), radius)[:, None]
    error += 2 * total(e.rounding(CONSTANT * linear.offset, linear.terms, 0 * base.reach, 1.0, 1), radius)[:, None]
    keeps = margin > UP * distance * base.lipschitz * radius[:, None] + SAFETY * error
    np.put_along_axis(keeps, classes[:, None], True, 1)
    result: Array = keeps.all(1)
    return result


@dataclass(frozen=True)
class Report:
    """Which claims are proven, and why others are not."""

    proof: Proof
    proven: Array
    problems: list[str]


def check(path: Path) -> Report:
    """Check all claims of a file; raises ``ProofError`` if it is damaged, altered or malformed."""
    try:
        proof = read(path)
        proven, norms, problems = np.zeros(len(proof.arrays["radius"]), bool), {}, []
        with np.errstate(all="ignore"):
            try:
                for start in range(0, len(proven), CHUNK):
                    proven[start : start + CHUNK] = _check(proof, slice(start, start + CHUNK), norms)
            except NotCovered as error:
                proven[:], problems = False, [str(error)]
        problems += [
            f"{name}: the norm {proof.header['norms'][name][0]} is not proven" for name in norms if not norms[name]
        ]
        return Report(proof, proven, problems)
    except OSError as error:
        raise ProofError(f"cannot read the file: {error.strerror}") from None
    except ProofError:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise ProofError(f"the file is malformed ({type(error).__name__}: {str(error)[:80]})") from None


def _check(proof: Proof, rows: slice, norms: dict[str, bool]) -> Array:
    x, classes, radius = (proof.arrays[name][rows] for name in ("input", "class", "radius"))
    e, head = Evaluation(proof, x.astype(float), norms), Centroids.match(proof)
    if head is None:
        keeps = _linear_head_keeps(e, classes, radius)
    else:
        dual = [
            proof.arrays.get(f"dual.{name}", np.zeros((0, 1), int)) for name in ("point", "other", "own", "multiplier")
        ]
        inside = (dual[0] >= rows.start) & (dual[0] < rows.start + len(x))
        point, other, own, weight = (v[inside.reshape(-1)] for v in dual)
        keeps = head.keeps(e, classes, radius, [point - rows.start, other, own, weight])
    for peak in e.peaks:
        keeps &= total(peak, radius) < e.largest
    return keeps
