"""Proof files: certificates of inputs, with everything an independent checker needs to verify them.

A file has the safetensors format.  Its arrays are the constants of the captured graph, the inputs, their classes and
radii, and the multipliers of Centroid Nets.  Its header contains the graph as a list of operations, and the norms of
the layers.  ``atoll.checker`` reads it using only NumPy and SciPy.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, fx

from atoll.certify.centroids import NearestCentroid, _Neighborhood
from atoll.certify.certificate import Certificate
from atoll.certify.gloro import GloRo
from atoll.certify.polyhedra import Dual, ascend
from atoll.errors import InputError
from atoll.files import check_output, write_atomic
from atoll.graph.capture import CapturedModel
from atoll.graph.nodes import bind_arguments, locate, operation_name

FORMAT = 1
BLANK = "0" * 64  # placeholder for the digest while it is computed
CUT = 1e-6  # radii are reduced by this share, which exceeds the rounding error of the checker
SMALLEST_NORM = 1e-100
POINTS, PAIRS = 64, 256  # batch sizes: points, and pairs of a point and a centroid
_DTYPES = (torch.float32, torch.float64, torch.int64)


@dataclass(frozen=True)
class ProofFile:
    """A written proof file: its path, the number of claims, the number of points, and its size in bytes."""

    path: str
    claims: int
    points: int
    bytes: int


def write_proof(path: Path, certifier: GloRo | NearestCentroid, x: Tensor, certificate: Certificate) -> ProofFile:
    """Write certificates with the witnesses that ``atoll.checker`` needs to verify them.

    Points with radius 0 are omitted, because there is no claim about them.  Radii are reduced by a share of ``CUT``.

    Args:
        path: the file.
        certifier: a certifier with proven constants.
        x: the inputs.
        certificate: the certificates of the inputs.

    >>> import tempfile
    >>> from atoll.checker import check
    >>> from atoll.models import MLP
    >>> certifier, x = GloRo.proven(MLP((2,), 2, hidden=(4,)).double()), torch.rand(5, 2).double()
    >>> path = Path(tempfile.mkdtemp(), "proof.safetensors")
    >>> write_proof(path, certifier, x, certifier(x)).claims, check(path).proven.tolist()
    (5, [True, True, True, True, True])
    """
    model = certifier.model
    if not isinstance(model, CapturedModel):
        raise InputError("proof: expected a certifier with proven constants, got one with estimates")
    stretch = certifier.head.stretch if isinstance(certifier, NearestCentroid) else None
    if stretch is not None and stretch.thresholds is not None:
        raise InputError("proof: the checker does not support learned thresholds of stretched inputs")
    rows = (certificate.radius > 0).nonzero().squeeze(1)
    if not len(rows):
        raise InputError("proof: expected at least one certified point, got none")
    points, x = len(x), x[rows].to(model.dtype).contiguous()
    prediction, radius = certificate.prediction[rows], certificate.radius[rows].double() * (1 - CUT)
    entries, output, constants = graph_entries(model)
    arrays = {**constants, "input": x, "class": prediction, "radius": radius}
    bounds = None
    if isinstance(certifier, NearestCentroid):
        bounds = certifier.box
        arrays |= multipliers(certifier, x, prediction, radius)
    header = {
        "format": FORMAT,
        "precision": str(model.dtype).removeprefix("torch."),
        "subject": model.digest,
        "bounds": bounds,
        "inputs": [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in x],
        "nodes": entries,
        "output": output,
        "norms": {layer.node: [max(layer.lipschitz, SMALLEST_NORM), layer.method] for layer in certifier.layers},
    }
    content = encode(header, arrays)
    check_output(Path(path), "a proof file")
    write_atomic(Path(path), content)
    return ProofFile(str(path), len(rows), points, len(content))


@torch.no_grad()
def multipliers(certifier: NearestCentroid, x: Tensor, prediction: Tensor, radius: Tensor) -> dict[str, Tensor]:
    """Return multipliers for pairs of points and centroids that no single plane separates, in the order of points."""
    parts: dict[str, list[Tensor]] = {"point": [], "other": [], "own": [], "multiplier": []}
    encoder, c = certifier.encoder, certifier.centroids
    for start in range(0, len(x), POINTS):
        inputs, top = x[start : start + POINTS], prediction[start : start + POINTS]
        size = torch.linalg.vector_norm(inputs.flatten(1), dim=1, dtype=torch.float64)
        error = 2 * (encoder.relative * size + encoder.absolute)
        goal = radius[start : start + POINTS] * (encoder.lipschitz + encoder.relative) * (1 + CUT / 2) + error
        near = _Neighborhood.of(certifier._run(inputs)[0].double(), top, certifier)
        pairs = (certifier._planes(near) < goal[:, None]).nonzero()
        for point, other in (part.unbind(1) for part in torch.split(pairs, PAIRS) if len(part)):
            own = near.own[point]
            squares = near.squares[point]
            margin = squares.gather(1, other[:, None]) - squares.gather(1, own) - near.slack[point, None]
            low, high = near.low[point, None], near.high[point, None]
            problem = Dual(c[own], c[other][:, None], margin[:, None], low, high, certifier.head.gain.double())
            _, weights = ascend(problem, goal[point, None])
            for name, part in {"point": point + start, "other": other, "own": own, "multiplier": weights[:, 0]}.items():
                parts[name].append(part)
    return {f"dual.{name}": torch.cat(tensors) for name, tensors in parts.items() if tensors}


def graph_entries(model: CapturedModel) -> tuple[list[dict[str, Any]], int, dict[str, Tensor]]:
    """Return the operations of a captured graph as plain data, the index of the output, and the constants.

    >>> from atoll.graph import capture
    >>> entries, output, constants = graph_entries(capture(torch.nn.Linear(2, 3), (2,)))
    >>> [entry["operation"] for entry in entries], output, list(constants)
    (['input', 'aten.linear.default'], 1, ['constant_0', 'constant_1'])
    """
    entries: list[dict[str, Any]] = []
    places: dict[fx.Node, int] = {}
    constants: dict[str, Tensor] = {}
    output = 0
    for node in model.graph_module.graph.nodes:
        if node.op == "output":
            output = places[node.all_input_nodes[0]]
        elif node.op == "get_attr":
            constants[node.target] = _checked(node.target, model.graph_module.get_buffer(node.target))
        elif not _is_batch_size(node):
            operation = "input" if node.op == "placeholder" else operation_name(node)
            args = {} if node.op == "placeholder" else bind_arguments(node)
            plain = {name: _plain(value, places) for name, value in args.items()}
            places[node] = len(entries)
            entries.append({"name": node.name, "operation": operation, "args": plain, "line": locate(node)})
    return entries, output, constants


def _is_batch_size(node: fx.Node) -> bool:
    return bool(node.target is torch.ops.aten.sym_size.int and node.args[1] == 0)


def _checked(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in _DTYPES:
        raise InputError(f"proof: expected constants in float32, float64 or int64, got {tensor.dtype} ({name})")
    return tensor.detach().cpu().contiguous()


def _plain(value: Any, places: dict[fx.Node, int]) -> Any:
    """Convert an argument to JSON; the batch size becomes -1."""
    if isinstance(value, fx.Node):
        if _is_batch_size(value):
            return -1
        return {"constant": value.target} if value.op == "get_attr" else {"node": places[value]}
    if isinstance(value, list | tuple):
        return [_plain(item, places) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"proof: expected finite arguments of operations, got {value}")
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def encode(header: dict[str, Any], arrays: dict[str, Tensor]) -> bytes:
    """Return the content of a file, including a digest of everything else.

    >>> len(encode({}, {"radius": torch.zeros(1)})) > 64
    True
    """
    text = json.dumps(header, allow_nan=False)
    raw = save(arrays, metadata={"proof": text, "digest": BLANK})
    before, _, after = raw.partition(BLANK.encode())
    return before + hashlib.sha256(raw).hexdigest().encode() + after
