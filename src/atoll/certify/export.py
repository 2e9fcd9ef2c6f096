"""Certified classifiers as ONNX files that give every input a class, or abstain, and a certified radius."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import torch
from torch import Tensor, fx

from atoll.certify.bounds import UNIT_ROUNDOFF, gamma
from atoll.certify.centroids import OWN, NearestCentroid
from atoll.certify.certificate import VANISHING, Certificate, Proof
from atoll.certify.gloro import GloRo
from atoll.errors import InputError, UnsoundError
from atoll.export.metadata import Metadata
from atoll.export.model import ROWS, Exported, OnnxClassifier, expect_onnx, run_file
from atoll.export.writer import OnnxValue
from atoll.files import check_output, write_atomic
from atoll.graph import CapturedModel, capture, find_input

# Differences that radii of the file and of the certifier may have: relative, and in parts of the largest radius.
TOLERANCES = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-4, 1e-4)}
OUTPUTS = ("logits", "label", "prediction", "radius")
_DOWN = 1 - 1e-12  # as in `NearestCentroid`


def export(certifier: Proof, x: Tensor, path: Path, *, eps: float, metadata: Metadata | None = None) -> Exported:
    """Write a certifier to an ONNX file, after comparing the file with the certifier.

    The file has an input ``x``, float32 of any batch size, and outputs ``logits``, ``label``, ``prediction`` (the
    label, or -1 if the radius is below eps) and ``radius`` (float64, l2).  It computes in the precision of the
    certified model.

    Args:
        certifier: a `GloRo` or `NearestCentroid` with proven constants.
        x: inputs to compare on.
        path: of the file.
        eps: radius that a prediction has to be proven for.
        metadata: names of the classes and the like.

    Raises:
        InputError: an operation has no ONNX form.
        UnsoundError: the file does not agree with the certifier; nothing is written.
    """
    if not 0 <= eps < math.inf:
        raise InputError(f"eps: expected a finite number >= 0, got {eps}")
    if not len(x):
        raise InputError("x: expected at least one point to compare on, got none")
    content = to_onnx(certifier, eps, metadata)
    abstained, difference = compare(content, with_single_planes(certifier), x.float(), eps)
    check_output(path, "an ONNX file")
    write_atomic(path, content)
    return Exported(str(path), len(content), OUTPUTS, len(x), difference, eps, abstained)


def to_onnx(certifier: Proof, eps: float, metadata: Metadata | None = None) -> bytes:
    """A certifier as an ONNX file: the captured graph, operation by operation, then the radius.

    >>> from atoll.models import MLP
    >>> content = to_onnx(GloRo.proven(MLP((2,), 2, hidden=()).double()), eps=0.1)
    >>> prediction, radius = run(content, torch.rand(3, 2))
    >>> prediction.dtype, radius.dtype
    (torch.int64, torch.float64)
    """
    if not isinstance(certifier, GloRo | NearestCentroid) or not isinstance(certifier.model, CapturedModel):
        raise InputError(
            f"{type(certifier).__name__} cannot be exported: expected GloRo.proven or NearestCentroid.proven"
        )
    expect_onnx()
    model = certifier.model
    written = OnnxClassifier.write(model, exact=True)
    logits = written.logits.to(torch.float64)
    features = math.prod(model.shape)
    size = written.x.to(torch.float64).reshape(-1, features).norm([1]) + math.sqrt(features) * VANISHING
    if isinstance(certifier, GloRo):
        largest = certifier.largest_input
        radius = _gloro_radius(certifier, logits, size)
    else:
        largest = certifier._largest_size()
        z = written.value(_features(certifier)).to(torch.float64)
        radius = _centroid_radius(certifier, logits, size, z)
    room = largest - size
    radius = radius.minimum(room).where((room > 0) & _all(logits.abs() < math.inf), 0.0)
    prediction = logits.argmax(1).where((radius > 0) & (radius >= eps), -1)
    outputs = {"prediction": prediction.of_shape((-1,)), "radius": radius.of_shape((-1,))}
    return written.to_bytes(metadata or Metadata(), {"norm": "l2", "eps": repr(eps)}, **outputs)


def _all(condition: OnnxValue) -> OnnxValue:
    """Whether a condition holds for all elements of a row."""
    return condition.to(torch.int64).amin([1]).to(torch.bool)


def _gloro_radius(certifier: GloRo, logits: OnnxValue, size: OnnxValue) -> OnnxValue:
    """See `gloro.radius`; inputs without a finite radius may have any."""
    top, constants = logits.argmax(1), certifier.constants
    k, a, b = (
        logits.lift(matrix).index_select(0, top)
        for matrix in (constants.lipschitz, constants.relative, constants.absolute)
    )
    best = logits.gather(1, top.unsqueeze(1))
    margin = best - logits - 2 * (a * size.unsqueeze(1) + b)
    ratio = margin / (k + a)
    ratio = ratio.where((margin > 0) & (ratio > 0), 0.0)
    own = top.unsqueeze(1).eq(torch.arange(len(constants.lipschitz)))
    return ratio.lift(math.inf).where(own, ratio).amin([1])


# --- Centroid Nets


def with_single_planes(certifier: Proof) -> Proof:
    """The certifier of the radii that a file has: those of a Centroid Net come from single planes."""
    if isinstance(certifier, NearestCentroid):
        certifier = copy.copy(certifier)
        certifier.radii = []
    return certifier


def _features(certifier: NearestCentroid) -> fx.Node:
    """The node of the graph that the head starts from."""
    assert isinstance(certifier.model, CapturedModel)
    head = certifier.head
    node = find_input(certifier.model, capture(head, (head.centroids.shape[2],), dtype=head.centroids.dtype))
    assert node is not None  # otherwise there is no certifier
    return node


def _centroid_radius(certifier: NearestCentroid, logits: OnnxValue, size: OnnxValue, z: OnnxValue) -> OnnxValue:
    """See `NearestCentroid`; without ``radii``."""
    encoder, factor = certifier.encoder, (1 - certifier.eta.eta) / (1 + certifier.eta.eta)
    distance = _plane_distance(certifier, logits.argmax(1, keepdim=True), z)
    error = 2 * (encoder.relative * size + encoder.absolute)
    radius = ((distance - error) / (encoder.lipschitz + encoder.relative)).maximum(0.0) * _DOWN
    first, second = (logits.topk(2, 1)[0].slice(1, i, i + 1).squeeze([1]) for i in (0, 1))
    return radius.where(first >= second * factor, 0.0)


def _plane_distance(certifier: NearestCentroid, top: OnnxValue, z: OnnxValue) -> OnnxValue:
    """See `NearestCentroid._planes`: the distance to the nearest region of another class."""
    c, head, unit = certifier.centroids, certifier.head, UNIT_ROUNDOFF[torch.float64]
    u = z
    if head.stretch is not None:
        low, gain = torch.as_tensor(head.stretch.ends[0], dtype=torch.float64), head.gain.double()
        u = ((z - low) * gain).clamp(0.0, 1.0)
    squares = (u * u).sum([1], keepdim=True) - 2 * (u @ c.T) + c.square().sum(1)
    mine = top.eq(torch.arange(len(c)) // head.centroids.shape[1])
    nearest, own = squares.where(mine, math.inf).topk(min(OWN, head.centroids.shape[1]), 1, largest=False)
    c = c * head.gain.double()  # no move changes a feature by more than its gain
    norms = c.square().sum(1)
    between = z.lift(norms).index_select(0, own).unsqueeze(2) - 2 * (z.lift(c).index_select(0, own) @ c.T) + norms
    between = (between.maximum(0.0) + 8 * gamma(c.shape[1] + 8, unit) * float(norms.max())).sqrt()
    slack = _slack(certifier, u.norm([1]))
    margin = squares.unsqueeze(1) - nearest.unsqueeze(2) - slack.reshape(-1, 1, 1)
    distance = (margin / (2 * between)).amax([1])
    return distance.lift(math.inf).where(mine, distance).amin([1])


def _slack(certifier: NearestCentroid, size: OnnxValue) -> OnnxValue:
    """What rounding may have added to a difference of two squared distances, for stretched features of a norm."""
    features, precision, unit = certifier.centroids.shape[1], certifier.precision, UNIT_ROUNDOFF[torch.float64]
    largest, up, root = float(certifier.centroids.norm(dim=1).max()), 1 + 1e-12, math.sqrt(features)
    farthest = 2 * size + largest
    if certifier.box is not None:
        farthest = farthest.maximum(max(map(abs, certifier.box)) * root)
    rounding = 5 * (gamma(features + 16, precision.unit) + gamma(features + 16, unit)) * up
    absolute = 32 * (features + 16) * precision.tiny
    if (stretch := certifier.head.stretch) is not None:
        absolute += 16 * largest * (precision.unit + unit) * stretch.lipschitz * root * up
    return (farthest + largest) * (farthest + largest) * rounding + absolute


# --- comparison


def compare(content: bytes, certifier: Proof, x: Tensor, eps: float) -> tuple[int, float]:
    """How many points the file abstains on, and its largest difference; an error if the two do not agree."""
    prediction, radii = run(content, x)
    parts = [certifier(rows) for rows in torch.split(x, ROWS)]
    original = Certificate(torch.cat([p.prediction for p in parts]), torch.cat([p.radius for p in parts]))
    answer, truth = original.answer(eps).cpu(), original.radius.cpu()
    relative, absolute = TOLERANCES[_precision(certifier)]
    positive = truth.isfinite() & (truth > 0)
    # Radii come out of a difference of logits, so tiny ones are less accurate relative to themselves.
    absolute *= max(truth[positive].tolist(), default=0.0)
    close = (truth - eps).abs() <= relative * eps + absolute  # a certificate at eps that rounding decides
    same = (prediction == answer) | (close & ((prediction < 0) | (answer < 0)))
    if not (same.all() and torch.allclose(radii, truth, rtol=relative, atol=absolute)):
        raise UnsoundError(f"the exported file does not agree with the model on {len(x)} points; it was not written")
    differences = (radii - truth)[positive].abs() / truth[positive]
    return int((prediction < 0).sum()), max(differences.tolist(), default=0.0)


def _precision(certifier: Proof) -> torch.dtype:
    model = certifier.model if isinstance(certifier, GloRo | NearestCentroid) else None
    return model.dtype if isinstance(model, CapturedModel) else torch.float64


def run(content: bytes, x: Tensor) -> tuple[Tensor, Tensor]:
    """What ONNX Runtime makes of a file: prediction and radius."""
    prediction, radius = run_file(content, x, "prediction", "radius")
    return prediction, radius
