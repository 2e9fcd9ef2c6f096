r"""Check the proof files of ``atoll certify --proof`` using only NumPy and SciPy.

A file claims that the stored network, computed in its precision, predicts one class for all inputs (within the bounds,
if there are any) at l2 distance up to r from x.  The checker imports nothing from Atoll and trusts nothing in the file.
It evaluates the network at x in float64.  It proves the norm s of a linear layer A (a witness) with a Cholesky factor
R of :math:`s^2 I - A^T A`, shifted for rounding: :math:`R^T R` is exact up to :math:`\gamma_{w+2} |R^T| |R|` for a band
of width w (Higham, 2002, theorem 10.3).  The rounding error of the network at distance d from x follows from the size
:math:`\|v\| + L d` of its values and :math:`|fl(Av) - Av| \le \gamma_k |A| |v|` for any order of summation (not for
Winograd or TF32).  A linear head keeps its class if the margins exceed :math:`\|w_j - w_i\| L r` plus the errors.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.linalg import get_lapack_funcs
from scipy.sparse import bsr_array, coo_array, csr_array, kron

Array = np.ndarray[Any, np.dtype[Any]]
UNIT = 2.0**-53  # unit roundoff of float64
PRECISIONS = {"float32": (2.0**-24, 2.0**-126, 2.0**126), "float64": (UNIT, 2.0**-1022, 2.0**1022)}
DTYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64}
DUAL = ("point", "other", "own", "multiplier")  # a point, another centroid, own centroids and their multipliers
FILE_LIMIT, LIMIT = 2**32, 2**27  # largest file in bytes, largest number of elements of a value or matrix
CHUNK, PLANES = 64, 4  # points to evaluate together, nearest own centroids to use for separating planes
UP, SAFETY = 1 + 1e-11, 1 + 1e-6  # factors that cover rounding in constants and in error bounds
CONSTANT, SLOPE = np.array([[1.0], [0.0], [1.0]]), np.array([[0.0], [1.0], [0.0]])  # see _Value


class ProofError(Exception):
    """A proof file is damaged, altered or malformed."""


class NotCovered(Exception):
    """The checker has no rule for an operation, or a layer is too large."""


def expect(condition: Any, message: str) -> None:
    if not condition:
        raise ProofError(message)


class Checked(NamedTuple):
    """The validated content of a file, and the proven claims."""

    header: dict[str, Any]
    arrays: dict[str, Array]
    nodes: list[dict[str, Any]]  # arguments refer to earlier nodes, {"node": index}, or {"constant": name}
    output: int
    proven: Array  # whether each claim is proven
    problems: list[str]  # reasons why claims are not proven


def read(path: Path) -> Checked:
    """Read a safetensors file, check its digest, and validate its content."""
    expect(path.stat().st_size <= FILE_LIMIT and path.is_file(), f"expected a file of at most {FILE_LIMIT:,} bytes")
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8:end])
    digest = (meta := table.pop("__metadata__"))["digest"].encode()
    actual = hashlib.sha256(raw.replace(digest, b"0" * 64, 1)).hexdigest().encode()
    expect(digest == actual, "the digest does not match: the file is damaged or was altered")
    arrays = {}
    for name, entry in table.items():
        dtype, shape, (start, stop) = np.dtype(DTYPES[entry["dtype"]]), entry["shape"], entry["data_offsets"]
        size = math.prod(shape) * dtype.itemsize
        expect(all(type(n) is int and 0 < n < 2**31 for n in shape) and len(shape) < 8, f"{name}: wrong shape {shape}")
        expect(0 <= start <= stop <= len(raw) - end and stop - start == size, f"{name}: expected {size:,} bytes")
        arrays[name] = np.frombuffer(raw[end + start : end + stop], dtype).reshape(shape)
        expect(np.isfinite(arrays[name]).all(), f"{name}: expected finite numbers, got NaN or infinity")
    return _validate(json.loads(meta["proof"]), arrays)


def _validate(header: dict[str, Any], arrays: dict[str, Array]) -> Checked:
    missing = {"format", "precision", "subject", "bounds", "inputs", "nodes", "output", "norms"} - header.keys()
    missing |= {"input", "class", "radius"} - arrays.keys()
    expect(not missing, f"missing: {', '.join(sorted(missing))}")
    expect(header["format"] == 1, f"format: expected 1, got {header['format']!r}")
    expect(header["precision"] in PRECISIONS, f"precision: expected float32 or float64, got {header['precision']!r}")
    x, classes, radius, bounds = arrays["input"], arrays["class"], arrays["radius"], header["bounds"]
    expect(str(x.dtype) == header["precision"], f"input: expected {header['precision']}, got {x.dtype}")
    expect(classes.shape == radius.shape == x.shape[:1], "expected a class and a radius for each input")
    expect(classes.dtype == np.int64 and radius.dtype == np.float64, "expected classes in int64, radii in float64")
    expect(min(classes.min(), radius.min()) >= 0, "expected non-negative classes and radii")
    digests = [hashlib.sha256(row.tobytes()).hexdigest() for row in x]
    expect(header["inputs"] == digests, "inputs: the digests do not match the stored inputs")
    expect(bounds is None or -math.inf < bounds[0] < bounds[1] < math.inf, "bounds: expected null or low < high")
    for name, (norm, method) in header["norms"].items():
        valid = 1e-100 <= norm <= 1e100 and method in ("exact", "strip", "torus")
        expect(valid, f"{name}: expected a norm in [1e-100, 1e100] and a method, got {norm} and {method!r}")
    if "dual.point" in arrays:
        expect(arrays["dual.multiplier"].min() >= 0, "dual: expected non-negative multipliers")
    nodes: list[dict[str, Any]] = []
    places: list[int] = []  # index in ``nodes`` of each entry; nodes contain no copies and no duplicates
    known: dict[str, int] = {}

    def refer(value: Any) -> Any:
        if not isinstance(value, dict):
            return [refer(item) for item in value] if isinstance(value, list) else value
        if "constant" in value:
            expect(value["constant"] in arrays, f"the constant {value['constant']!r} is missing")
            return {"constant": value["constant"]}
        expect(type(value["node"]) is int and 0 <= value["node"] < len(places), f"node {len(places)} refers ahead")
        return {"node": places[value["node"]]}

    for entry in header["nodes"]:
        args = {name: refer(value) for name, value in entry["args"].items()}
        place = known.setdefault(f"{entry['operation']} {json.dumps(args, sort_keys=True)}", len(nodes))
        places.append(args["self"]["node"] if entry["operation"] == "aten.detach.default" else place)
        if places[-1] == len(nodes):
            nodes.append({**entry, "args": args})
    expect(len({node["name"] for node in nodes}) == len(nodes), "expected nodes with different names")
    return Checked(header, arrays, nodes, places[header["output"]], np.zeros(len(x), bool), [])


@dataclass(frozen=True)
class _Value:
    """The value of a node, its Lipschitz constant (infinite if not proven), and a bound of the rounding error."""

    array: Array
    lipschitz: float
    error: Array  # (3, points): at distance 0, slope with the distance, and error of the checker itself
    linear: _Linear | None = None
    scale: float = 1.0  # a factor of all entries that is included in the witness of a following layer

    @property
    def reach(self) -> Array:
        norm = np.linalg.norm(self.array.reshape(len(self.array), -1), axis=1)
        return np.asarray(CONSTANT * norm + SLOPE * self.lipschitz + self.error)


class Moved:
    """Rearranged entries of a value: entry i, or the smaller (kind 1) or larger (kind 2) of the entries i and j."""

    def __init__(self, base: _Value, entries: Array | None = None) -> None:
        index = np.arange(base.array[0].size).reshape(base.array.shape[1:])
        self.base, self.is_moved = base, entries is not None
        self.entries = np.stack([index, index, 0 * index]) if entries is None else entries  # i, j and kind

    @cached_property
    def value(self) -> _Value:
        """The rearranged value; sorted pairs and single entries, each used once, are jointly 1-Lipschitz."""
        if not self.is_moved:
            return self.base
        flat = self.base.array.reshape(len(self.base.array), -1)
        i, j, kind = self.entries.reshape(3, -1)
        pair = np.minimum(i, j) * flat.shape[1] + np.maximum(i, j)
        low, high = np.divmod(np.unique(pair), flat.shape[1])
        used = np.concatenate([low, high[low != high]])
        repeated = any(len(np.unique(v)) < len(v) for v in (used, 3 * pair + kind))
        if repeated or ((kind > 0) != (i != j)).any() or kind.max() > 2:
            raise NotCovered("expected minimum, maximum and cat as in MinMax: sorted pairs, each entry used once")
        array = np.where(kind == 2, np.maximum(flat[:, i], flat[:, j]), np.minimum(flat[:, i], flat[:, j]))
        return _Value(array.reshape(len(flat), *self.entries.shape[1:]), self.base.lipschitz, self.base.error)


class Axis(NamedTuple):
    """One axis of a convolution."""

    size: int = 1
    taps: int = 1
    stride: int = 1
    padding: int = 0

    @property
    def out(self) -> int:
        return (self.size + 2 * self.padding - self.taps) // self.stride + 1

    def shift(self, tap: int) -> csr_array:
        """Return the matrix of the inputs that outputs read with a tap."""
        source = self.stride * np.arange(self.out) + tap - self.padding
        target = np.flatnonzero((source >= 0) & (source < self.size))
        return csr_array((np.ones(len(target)), (target, source[target])), (self.out, self.size))

    def closed(self, parts: Array, dim: int) -> Array:
        """Close the axis to a ring that contains the layer, which is a direct sum over frequencies."""
        # Inputs stride * J + phase - padding are channels of J, and the tap stride * q + phase connects them to output
        # j if J = j + q.  On a ring of this size, there are no further solutions.
        count, first = -(-self.taps // self.stride), self.padding // self.stride
        ring = max((self.size - 1 + self.padding) // self.stride + 1, self.out + count - 1 - first)
        if ring * self.stride * parts.size > LIMIT:
            raise NotCovered("a layer is too large")
        kernel = np.pad(np.moveaxis(parts, dim, -1), [*[(0, 0)] * 4, (0, count * self.stride - self.taps)])
        frequency = np.arange(ring if np.iscomplexobj(parts) else ring // 2 + 1)  # others are complex conjugates
        waves = np.exp(2j * math.pi / ring * (np.outer(frequency, np.arange(count)) % ring))
        waves = np.tensordot(waves, kernel.reshape(*kernel.shape[:4], count, self.stride), (1, 4))
        return np.expand_dims(waves.reshape(-1, *waves.shape[2:4], waves.shape[4] * waves.shape[5]), dim)


@dataclass(frozen=True)
class _Linear:
    """A layer ``kernel * base + constant``, possibly computed in several steps."""

    base: _Value
    kernel: Array  # (out, in, height, width); 1 x 1 if dense
    axes: list[Axis]
    spread: float  # bound of the norm of the layer with the absolute values of its kernel
    offset: float  # norm of the absolute values of all added constants
    terms: int  # number of roundings of one output

    def has_norm(self, claim: float, method: str) -> bool:
        """Whether the norm is at most the claim; covers rounding in merging and transforming the kernel here."""
        norm = claim - 64 * (self.kernel[0, 0].size + 8) * UNIT * self.spread
        parts, (y, x) = self.kernel.transpose(2, 3, 0, 1)[None], self.axes  # frequencies, height, width, out, in
        if method != "exact":
            parts, x = x.closed(parts, 2), Axis()
        if method == "torus":
            parts, y = y.closed(parts, 1), Axis()
        return 0 < norm < 1e120 and all(_is_below(part, y, x, norm, self.spread) for part in parts)


def _is_below(part: Array, y: Axis, x: Axis, norm: float, spread: float) -> bool:
    """Whether the Cholesky factor of ``norm^2 I - A^H A`` or ``norm^2 I - A A^H`` exists, shifted for rounding."""
    height, width, out, channels = part.shape
    outputs, inputs = y.out * x.out * out, y.size * x.size * channels
    order, block = min((outputs, out), (inputs, channels))
    band = block * (min(height, y.size) * x.size + min(width, x.size))  # an upper bound
    if max(order * min(order, band), outputs * part[:, :, 0].size) > LIMIT:
        raise NotCovered("a layer is too large to prove its exact norm; certify it with the method strip or torus")
    layer: Any = part[0, 0] if y == x == Axis() else csr_array((outputs, inputs), dtype=part.dtype)
    for i, j in np.ndindex(height, width) if y != Axis() or x != Axis() else ():
        places = csr_array(kron(y.shift(i), x.shift(j)))
        blocks = np.repeat(part[i, j][None], places.nnz, 0)
        layer = layer + bsr_array((blocks, places.indices, places.indptr), (outputs, inputs))
    gram = coo_array(layer @ layer.conj().T if order == outputs else layer.conj().T @ layer)
    row, column = gram.coords
    lower, band = row >= column, int((row - column).max(initial=0))
    matrix = np.zeros((band + 1, order), part.dtype)
    matrix[(row - column)[lower], column[lower]] = -gram.data[lower]
    size = (height * width * max(out, channels) + 8) * spread**2 + (band + 8) * min(order, 2 * band + 1) * norm**2
    matrix[0] += norm**2 - 8 * UNIT * size
    factorize = get_lapack_funcs("pbtrf", (matrix,))  # as in cholesky_banded
    return bool(factorize(matrix, lower=True, overwrite_ab=True)[1] == 0)


class _Evaluation:
    """Evaluates nodes for a chunk of inputs; ``proven`` says which of the layers so far have a proven norm."""

    def __init__(self, proof: Checked, start: int, proven: dict[str, bool]) -> None:
        self.proof, self.start, self.proven, self.norms = proof, start, proven, proof.header["norms"]
        arrays = (proof.arrays[name][start : start + CHUNK] for name in ("input", "class", "radius"))
        self.x, self.classes, self.radius = (v.astype(v.dtype if v.dtype == np.int64 else float) for v in arrays)
        self.results: dict[int, Moved] = {}
        unit, tiny, self.largest = PRECISIONS[proof.header["precision"]]
        self.unit, self.tiny = np.array([[unit], [unit], [UNIT]]), np.array([[tiny], [tiny], [2.0**-1022]])
        self.peaks: list[Array] = []  # bounds of all numbers that may overflow

    def total(self, bound: Array) -> Array:
        return np.asarray(bound[0] + bound[1] * self.radius + bound[2])  # at the radius, plus that of the checker

    def gamma(self, terms: int) -> Array:
        return np.where((product := terms * self.unit) < 0.5, product / (1 - product), np.inf)

    def rounding(self, bound: Array, terms: int, reach: Array, weight: float, outputs: int) -> Array:
        """Return the error of sums, given the number of roundings and a bound of absolute terms, plus underflow."""
        self.peaks.append(bound)
        under = (reach + CONSTANT * (2 + weight)) * self.tiny * (terms * math.sqrt(outputs))
        return np.asarray(bound * self.gamma(terms) + under)

    def run(self, target: int) -> Moved:
        """Evaluate a node and the nodes it depends on."""

        def resolve(value: Any) -> Any:
            if not isinstance(value, dict):
                return [resolve(item) for item in value] if isinstance(value, list) else value
            return self.run(value["node"]) if "node" in value else self.proof.arrays[value["constant"]].astype(float)

        node = self.proof.nodes[target]
        if node["operation"] not in OPERATIONS:
            raise NotCovered(f"{node['operation']} is not supported ({node['line']})")
        if target not in self.results:
            args = {name: resolve(value) for name, value in node["args"].items()}
            result = OPERATIONS[node["operation"]](self, node["name"], args)
            self.results[target] = result if isinstance(result, Moved) else Moved(result)
        return self.results[target]

    def layer(self, name: str, linear: _Linear, array: Array) -> _Value:
        """Return the value of a linear layer; without a witness it has no constant, but may be part of a layer."""
        base, (norm, method) = linear.base, self.norms.get(name, (math.inf, ""))
        if name in self.norms and name not in self.proven:
            self.proven[name] = linear.has_norm(norm / base.scale, method)
        norm = norm / base.scale if self.proven.get(name) else math.inf
        bound, weight = base.reach * linear.spread + CONSTANT * linear.offset, float(np.abs(linear.kernel).max())
        error = self.rounding(bound, linear.terms, base.reach, weight, array[0].size)
        return _Value(array, norm * base.lipschitz, base.error * norm + error, linear)

    def scaled(self, name: str, value: _Value, array: Array, factor: Array, offset: float, terms: int) -> _Value:
        """Return ``array = factor * value + constants``, with constants of norm ``offset``."""
        gain, rows = float(np.abs(factor).max()), factor.reshape(len(factor), -1)
        linear, bound = value.linear if (rows == rows[:, :1]).all() else None, value.reach * gain + CONSTANT * offset
        if linear:
            kernel, offset = linear.kernel * rows[:, :1, None, None], gain * linear.offset + offset
            linear = replace(linear, kernel=kernel, offset=offset, terms=linear.terms + terms)
            linear = replace(linear, spread=gain * linear.spread)
            if name in self.norms or math.isinf(value.lipschitz):
                return self.layer(name, linear, array)
        error = value.error * gain + self.rounding(bound, terms, value.reach, gain, array[0].size)
        scale = value.scale * gain if (np.abs(factor) == gain).all() else 1.0
        return _Value(array, value.lipschitz * gain, error, linear, scale or 1.0)

    def convolution(self, name: str, a: Any) -> _Value:
        base = a["input"].value
        if a.get("transposed") or a.get("groups", 1) != 1 or {1, *a.get("dilation", ())} != {1}:
            raise NotCovered(f"{name}: transposed, grouped and dilated convolutions are not supported")
        image, kernel = (v[:, :, None, None] if base.array.ndim == 2 else v for v in (base.array, a["weight"]))
        geometry = (image.shape[2:], kernel.shape[2:], a.get("stride", (1, 1)), a.get("padding", (0, 0)))
        y, x = (Axis(*side) for side in zip(*geometry, strict=True))
        valid = all(0 <= v.padding < v.taps and v.stride > 0 and v.out > 0 for v in (y, x))
        expect(valid and len(kernel) * y.out * x.out <= LIMIT, f"{name}: invalid padding or stride, or too large")
        padded = np.pad(image, [(0, 0), (0, 0), (y.padding, y.padding), (x.padding, x.padding)])
        windows = sliding_window_view(padded, kernel.shape[2:], (2, 3))[:, :, :: y.stride, :: x.stride]
        bias = np.zeros(len(kernel)) if a["bias"] is None else a["bias"]
        array = np.moveaxis(np.tensordot(windows, kernel, ((1, 4, 5), (1, 2, 3))), 3, 1) + bias[:, None, None]
        patches = math.ceil(y.taps / y.stride) * math.ceil(x.taps / x.stride)
        spread, offset = np.linalg.norm(kernel) * math.sqrt(patches), np.linalg.norm(bias) * math.sqrt(y.out * x.out)
        layer = _Linear(base, kernel, [y, x], float(spread) * UP, float(offset), kernel[0].size + 2)
        return self.layer(name, layer, array.reshape(array.shape[: base.array.ndim]))

    def add(self, name: str, a: Any, sign: float = 1.0) -> _Value:
        value, other, sign = a["self"].value, a["other"], sign * a["alpha"]
        if not isinstance(other, Moved):
            constant = np.broadcast_to(other, (1, *value.array.shape[1:]))[0]
            offset = abs(sign) * float(np.linalg.norm(constant))
            return self.scaled(name, value, value.array + sign * constant, np.ones_like(constant), offset, 3)
        other = other.value
        expect(value.array.shape == other.array.shape, f"{name}: shapes do not match")
        array = value.array + sign * other.array
        for base, linear in ((value, other.linear), (other, value.linear)):
            fits = linear and linear.base is base and sign == 1 and name in self.norms
            if linear and fits and all(axis.stride == 1 for axis in linear.axes):
                kernel = linear.kernel.copy()  # the identity adds one to a tap
                np.einsum("iihw->ihw", kernel)[:, linear.axes[0].padding, linear.axes[1].padding] += 1
                linear = replace(linear, kernel=kernel, spread=linear.spread + 1, terms=linear.terms + 1)
                return self.layer(name, linear, array)
        bound, error = value.reach + abs(sign) * other.reach, value.error + abs(sign) * other.error
        error = error + self.rounding(bound, 2, bound, 1.0, array[0].size)
        return _Value(array, value.lipschitz + abs(sign) * other.lipschitz, error)

    def multiply(self, name: str, a: Any, power: float = 1.0) -> _Value:
        value = a["self"].value
        factor = np.broadcast_to(np.asarray(a["other"], float) ** power, (1, *value.array.shape[1:]))[0]
        return self.scaled(name, value, value.array * factor, factor, 0.0, 4)

    def move(self, name: str, a: Any, change: Callable[[list[Array]], Any]) -> Moved:
        """Rearrange entries; the first axis, which is the batch, must not change."""
        parts = a.get("tensors") or [a[key] for key in ("self", "other") if key in a]
        if a.get("dim", 1) < 1 or a.get("size", [-1])[0] != -1 or any(part.base is not parts[0].base for part in parts):
            raise NotCovered(f"{name}: expected parts of one value, and the batch as the first axis")
        return Moved(parts[0].base, np.asarray(change([part.entries for part in parts])))


OPERATIONS: dict[str, Callable[[_Evaluation, str, Any], _Value | Moved]] = {
    "input": lambda e, n, a: _Value(e.x, 1.0, np.zeros((3, len(e.x)))),
    "aten.linear.default": _Evaluation.convolution,
    "aten.convolution.default": _Evaluation.convolution,
    "aten.add.Tensor": _Evaluation.add,
    "aten.sub.Tensor": lambda e, n, a: e.add(n, a, -1.0),
    "aten.mul.Tensor": _Evaluation.multiply,
    "aten.div.Tensor": lambda e, n, a: e.multiply(n, a, -1.0),
    "aten.relu.default": lambda e, n, a: _Value(np.maximum((v := a["self"].value).array, 0), v.lipschitz, v.error),
    "aten.view.default": lambda e, n, a: e.move(n, a, lambda v: v[0].reshape(3, *a["size"][1:])),
    "aten.unsqueeze.default": lambda e, n, a: e.move(n, a, lambda v: np.expand_dims(v[0], a["dim"])),
    "aten.slice.Tensor": lambda e, n, a: e.move(
        n, a, lambda v: v[0][(slice(None),) * a["dim"] + (slice(a["start"], a["end"], a["step"]),)]
    ),
    "aten.cat.default": lambda e, n, a: e.move(n, a, lambda v: np.concatenate(v, a["dim"])),
    "aten.minimum.default": lambda e, n, a: e.move(n, a, lambda v: [v[0][0], v[1][0], 1 + 3 * (v[0][2] + v[1][2])]),
    "aten.maximum.default": lambda e, n, a: e.move(n, a, lambda v: [v[0][0], v[1][0], 2 + 3 * (v[0][2] + v[1][2])]),
}

# The head of a Centroid Net as operations with arguments; names with a question mark match anything.
SCORES = ("addmm.default", {"self": "?squares", "mat1": "?u", "mat2": "?flat", "alpha": -2, "beta": 1})
NEAREST = ("argmin.default", {"self": ("view.default", {"self": SCORES, "size": "?size"}), "dim": 2, "keepdim": False})
CENTER = ("index.Tensor", {"self": "?centers", "indices": ["?classes", NEAREST]})
MOVE = ("sub.Tensor", {"self": ("unsqueeze.default", {"self": "?u", "dim": 1}), "other": CENTER, "alpha": 1})
DISTANCE = ("linalg_vector_norm.default", {"self": MOVE, "ord": 2, "dim": [2], "keepdim": False, "dtype": None})
HEAD = ("neg.default", {"self": DISTANCE})
SLOPED = ("mul.Tensor", {"self": ("sub.Tensor", {"self": "?z", "other": "?low", "alpha": 1}), "other": "?gain"})
STRETCH = ("clamp.default", {"self": SLOPED, "min": 0, "max": 1})


def matches(pattern: Any, value: Any, proof: Checked, names: dict[str, Any]) -> bool:
    """Whether an argument matches a pattern; adds the values of the pattern's names to ``names``."""
    if isinstance(pattern, tuple):
        node = proof.nodes[value["node"]] if isinstance(value, dict) and "node" in value else {"operation": ""}
        same = node["operation"] == f"aten.{pattern[0]}"
        return same and all(matches(part, node["args"][key], proof, names) for key, part in pattern[1].items())
    if isinstance(pattern, list):
        return all(matches(*pair, proof, names) for pair in zip(pattern, value, strict=True))
    return bool(names.setdefault(pattern, value) == value if str(pattern).startswith("?") else pattern == value)


class _Centroids:
    r"""The head of a Centroid Net: the negative distance to the nearest centroid of each class, selected by products.

    The class does not change if, for each other centroid c, features within :math:`\rho = L r + e` are closer to an own
    centroid p than to c.  The proof is the plane between c and one p, or multipliers :math:`\lambda \ge 0` of several p
    (witness): a move :math:`\delta` to the region of c has :math:`\tfrac12 \|\delta\|^2 \ge q(\lambda)`, the dual.
    """

    def __init__(self, proof: Checked, names: dict[str, Any]) -> None:
        keys = ("?centers", "?flat", "?squares", "?classes")
        centers, flat, squares, classes = (proof.arrays[names[key]["constant"]].astype(float) for key in keys)
        self.per_class, self.flat, self.squares = centers.shape[1], flat.T.copy(), (flat**2).sum(0)
        same = np.array_equal(centers.reshape(self.flat.shape), flat.T) and names["?size"] == [-1, *centers.shape[:2]]
        if not same or not np.array_equal(classes, np.arange(len(centers))):
            raise NotCovered("the head computes distances to other centroids than it selects")
        self.deviation = float(np.abs(squares - self.squares).max())
        self.is_stretched = matches(STRETCH, names["?u"], proof, names) and names["?low"] >= 0 < names["?gain"]
        self.features: int = names["?z" if self.is_stretched else "?u"]["node"]
        self.low, self.gain = [names[key] if self.is_stretched else v for key, v in (("?low", 0.0), ("?gain", 1.0))]

    def keeps(self, e: _Evaluation) -> Array:
        """Whether the class does not change within the radius."""
        source, bounds, classes = e.run(self.features), e.proof.header["bounds"], e.classes
        flat, squares, gain, largest = self.flat, self.squares, self.gain, math.sqrt(self.squares.max()) * UP
        x, count = source.value.array, source.value.array.shape[1]
        rho = UP * source.value.lipschitz * e.radius + SAFETY * e.total(source.value.error)
        u, low, high, off = x, np.full_like(x, -np.inf), np.full_like(x, np.inf), 0.0
        if self.is_stretched:  # moves below ``low`` and above ``high`` have no further effect
            u, low, high = np.clip((x - self.low) * gain, 0, 1), self.low - x, self.low + 1 / gain - x
            off = 1.1 * float(e.unit.sum()) * (3 + gain * self.low) * math.sqrt(count)
        elif bounds and source.base.array is e.x and not source.entries[2].any():
            low, high = np.minimum(bounds[0] - x - 1e-12, 0), np.maximum(bounds[1] - x + 1e-12, 0)
        # The selected centroid has almost the smallest score, and its computed distance is almost exact.
        reach = (np.linalg.norm(u, axis=1) + gain * rho + off + largest) * UP
        gamma, own_gamma = e.gamma(count + 8)[[0, 2], 0]
        slack = 2 * self.deviation + 4.1 * (gamma + own_gamma) * reach**2 + 4 * largest * off
        slack = slack * SAFETY + 16 * count * float(e.tiny[0, 0]) * (1 + reach)
        e.peaks.append(CONSTANT * 4 * reach**2)
        score = squares - 2 * u @ flat.T
        mine = self.per_class * classes[:, None] + np.arange(self.per_class)
        near = np.take_along_axis(mine, np.argsort(np.take_along_axis(score, mine, 1), 1)[:, :PLANES], 1)
        keeps = np.arange(len(flat)) // self.per_class == classes[:, None]
        for p in near.T:
            between = np.maximum(squares + squares[p][:, None] - 2 * flat[p] @ flat.T, 0)
            margin = score - np.take_along_axis(score, p[:, None], 1) - slack[:, None]
            keeps |= margin > 2 * UP * gain * np.sqrt(between + 8 * own_gamma * largest**2) * rho[:, None]
        dual = [e.proof.arrays.get(f"dual.{name}", np.zeros((0, 1), int)) for name in DUAL]
        here = np.flatnonzero((dual[0] >= e.start) & (dual[0] < e.start + len(x)))
        for part in np.split(here, range(4 * CHUNK, len(here), 4 * CHUNK)) if len(here) else ():
            point, other, own, weight = (v[part] for v in dual)
            point = point - e.start
            expect((own // self.per_class == classes[point][:, None]).all(), "dual: expected centroids of the class")
            margin = score[point, other][:, None] - score[point[:, None], own] - slack[point][:, None]
            v = 2 * (weight[:, None] @ flat[own])[:, 0] - 2 * weight.sum(1)[:, None] * flat[other]
            move = np.clip(-gain * v, low[point], high[point])
            change = gain * (move - np.clip(0, low[point], high[point]))
            q = (weight * margin).sum(1) + np.minimum(move**2 / 2 + v * change, 0).sum(1)
            size = (weight * np.abs(margin)).sum(1) + (move**2 / 2 + np.abs(v * change)).sum(1)
            size += ((np.abs(move) + gain * np.abs(v)) * (2 + np.abs(x[point]))).sum(1)
            size += 4 * gain * largest * rho[point] * weight.sum(1)
            keeps[point, other] |= q - 2 * e.gamma(count + own.shape[1] + 16)[2, 0] * size > UP * rho[point] ** 2 / 2
        return np.asarray(keeps.all(1))


def _linear_head_keeps(e: _Evaluation) -> Array:
    logits, classes = e.run(e.proof.output).value, e.classes[:, None]
    linear = logits.linear or _Linear(logits, np.eye(logits.array.shape[1])[:, :, None, None], [], 0.0, 0.0, 0)
    base, weight = linear.base, linear.kernel.reshape(logits.array.shape[1], -1)
    margin = np.take_along_axis(logits.array, classes, 1) - logits.array
    distance = np.sqrt(((weight[classes] - weight) ** 2).sum(2))
    bound = 2 * (base.reach * linear.spread + CONSTANT * linear.offset)
    error = e.total(e.rounding(bound, linear.terms, base.reach, linear.spread, 4))[:, None]
    error = error + distance * e.total(base.error)[:, None]
    keeps = margin > UP * distance * base.lipschitz * e.radius[:, None] + SAFETY * error
    np.put_along_axis(keeps, classes, True, 1)
    return np.asarray(keeps.all(1))


def check(path: Path) -> Checked:
    """Check all claims of a file; raises ``ProofError`` if it is damaged, altered or malformed."""
    norms, names = dict[str, bool](), dict[str, Any]()
    try:
        proof = read(path)
        try:
            head = _Centroids(proof, names) if matches(HEAD, {"node": proof.output}, proof, names) else None
            for start in range(0, len(proof.proven), CHUNK):
                with np.errstate(all="ignore"):
                    e = _Evaluation(proof, start, norms)
                    keeps = head.keeps(e) if head else _linear_head_keeps(e)
                    proof.proven[start : start + CHUNK] = keeps & (e.total(np.stack(e.peaks).max(0)) < e.largest)
        except NotCovered as error:
            proof.problems.append(str(error))
        proof.problems.extend(f"the norm of {name} is not proven" for name, holds in norms.items() if not holds)
        return proof
    except OSError as error:
        raise ProofError(f"cannot read the file: {error.strerror}") from None
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise ProofError(f"the file is malformed ({type(error).__name__}: {str(error)[:80]})") from None
