"""Proof files written by hand, without the code that they test."""

import hashlib
import json

import numpy as np

CODES = {"float32": "F32", "float64": "F64", "int64": "I64"}


def encode(header, arrays):
    """A safetensors file whose digest is right."""
    table, data = {"__metadata__": {"proof": json.dumps(header), "digest": "0" * 64}}, b""
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        offsets = [len(data), len(data) + array.nbytes]
        table[name] = {"dtype": CODES[str(array.dtype)], "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(table).encode()
    return with_digest(len(text).to_bytes(8, "little") + text + data)


def with_digest(raw):
    return raw.replace(b"0" * 64, hashlib.sha256(raw).hexdigest().encode(), 1)


class Graph:
    """Operations and constants of a network."""

    def __init__(self, precision="float64"):
        self.nodes = [{"name": "x", "operation": "input", "args": {}, "line": ""}]
        self.arrays, self.norms, self.precision = {}, {}, precision

    def constant(self, value, dtype=None):
        name = f"constant_{len(self.arrays)}"
        self.arrays[name] = np.asarray(value, dtype or self.precision)
        return {"constant": name}

    def call(self, operation, /, norm=None, method="exact", **args):
        name = f"node_{len(self.nodes)}"
        self.nodes.append({"name": name, "operation": f"aten.{operation}", "args": args, "line": "net.py, line 1"})
        if norm is not None:
            self.norms[name] = [norm, method]
        return {"node": len(self.nodes) - 1}

    @property
    def last(self):
        return {"node": len(self.nodes) - 1}

    def linear(self, weight, bias=None, **options):
        bias = None if bias is None else self.constant(bias)
        return self.call("linear.default", input=self.last, weight=self.constant(weight), bias=bias, **options)

    def convolution(self, weight, stride=(1, 1), padding=(0, 0), bias=None, source=None, **options):
        bias = None if bias is None else self.constant(bias)
        return self.call(
            "convolution.default", input=source or self.last, weight=self.constant(weight), bias=bias,
            stride=list(stride), padding=list(padding), dilation=[1, 1], transposed=False, output_padding=[0, 0],
            groups=1, **options,
        )  # fmt: skip

    def relu(self):
        return self.call("relu.default", self=self.last)

    def view(self, *shape):
        return self.call("view.default", self=self.last, size=[-1, *shape])

    def minmax(self, *shape):
        """As MinMax is captured."""
        x, end = self.last, 2**63 - 1
        first = self.call("slice.Tensor", self=x, dim=1, start=0, end=end, step=2)
        second = self.call("slice.Tensor", self=x, dim=1, start=1, end=end, step=2)
        low = self.call("minimum.default", self=first, other=second)
        high = self.call("maximum.default", self=first, other=second)
        if len(shape) == 1:
            low, high = (self.call("unsqueeze.default", self=v, dim=2) for v in (low, high))
        self.call("cat.default", tensors=[low, high], dim=2)
        self.view(shape[0] // 2, 2, *shape[1:])
        return self.view(*shape)

    def centroids(self, centers, stretch=None):
        """The head of a Centroid Net."""
        z, (classes, per_class, features) = self.last, centers.shape
        flat = np.asarray(centers, self.precision).reshape(-1, features)
        u = []
        for _ in range(2):  # it is computed twice, once without gradients
            v = self.call("detach.default", self=z) if not u else z
            if stretch is not None:
                v = self.call("sub.Tensor", self=v, other=stretch, alpha=1)
                v = self.call("mul.Tensor", self=v, other=1 / (1 - 2 * stretch))
                v = self.call("clamp.default", self=v, min=0, max=1)
            u.append(v)
        squares, transposed = self.constant((flat**2).sum(1)), self.constant(flat.T)
        scores = self.call("addmm.default", self=squares, mat1=u[0], mat2=transposed, beta=1, alpha=-2)
        view = self.call("view.default", self=scores, size=[-1, classes, per_class])
        nearest = self.call("argmin.default", self=view, dim=2, keepdim=False)
        order = self.constant(np.arange(classes), "int64")
        center = self.call("index.Tensor", self=self.constant(centers), indices=[order, nearest])
        wide = self.call("unsqueeze.default", self=u[1], dim=1)
        move = self.call("sub.Tensor", self=wide, other=center, alpha=1)
        norm = self.call("linalg_vector_norm.default", self=move, ord=2, dim=[2], keepdim=False, dtype=None)
        return self.call("neg.default", self=norm)

    def parts(self, x, classes, radius, *, bounds=None, **more):
        """Header and arrays of a file with claims."""
        x = np.ascontiguousarray(np.asarray(x, self.precision))
        header = {
            "format": 1, "precision": self.precision, "subject": "f" * 64, "bounds": bounds, "nodes": self.nodes,
            "inputs": [hashlib.sha256(row.tobytes()).hexdigest() for row in x], "output": len(self.nodes) - 1,
            "norms": self.norms,
        }  # fmt: skip
        claims = {"input": x, "class": np.asarray(classes, "int64"), "radius": np.asarray(radius, "float64")}
        return header, {**self.arrays, **claims, **more}

    def write(self, path, x, classes, radius, **options):
        path.write_bytes(encode(*self.parts(x, classes, radius, **options)))
        return path


def convolution_matrix(weight, size, stride, padding):
    """A convolution as a dense matrix, entry by entry."""
    out, channels, height, width = weight.shape
    rows, columns = (
        (n + 2 * p - k) // s + 1 for n, p, k, s in zip(size, padding, (height, width), stride, strict=True)
    )
    matrix = np.zeros((out, rows, columns, channels, *size))
    for o, r, c, i, a, b in np.ndindex(out, rows, columns, channels, height, width):
        y, x = stride[0] * r + a - padding[0], stride[1] * c + b - padding[1]
        if 0 <= y < size[0] and 0 <= x < size[1]:
            matrix[o, r, c, i, y, x] += weight[o, i, a, b]
    return matrix.reshape(out * rows * columns, -1)
