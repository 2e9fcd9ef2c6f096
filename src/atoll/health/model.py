"""Checks of a model on labeled points: what looks wrong, and the option that would fix it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atoll.data.base import Data, Split, to_float
from atoll.errors import AtollError, InputError
from atoll.health.conventions import Alternative, alternatives, loss, sizes
from atoll.health.finding import Finding
from atoll.health.function import RANDOM, check_function, check_mode
from atoll.health.outputs import GAIN, REPAIRED, SIGNIFICANT, check_order, check_outputs, check_predictions, is_better
from atoll.models.adapted import Conventions
from atoll.modules import evaluation_mode
from atoll.stats import Accuracy

BATCH = 50
PROBE = 16  # points at which gradients, batches and randomness are checked
SCREEN = 128  # points on which alternatives are compared with each other
OTHER_SIZES = (28, 32, 64, 96, 112, 128, 160, 192, 224, 240, 256, 288, 299, 320, 384, 512)


def check_model(
    model: nn.Module,
    data: Data,
    points: Split,
    *,
    conventions: Conventions | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Accuracy, list[Finding]]:
    """Measure accuracy on labeled points and look for defects of the model.

    - ``training mode``, ``dropout``, ``randomized``, ``non-deterministic``, ``batch-dependent``: the logits of a point
      depend on something else than the point
    - ``NaN``, ``softmax``, ``ReLU``, ``saturated``, ``constant``, ``missing class``, ``chance``: the outputs
    - ``rounding``, ``zero gradients``, ``gradients``: gradient attacks do not work
    - ``range``, ``mean``, ``channels``, ``size``, ``labels``: wrong conventions of a model from elsewhere

    The model is switched to evaluation mode, and its modes and the global random numbers are restored.

    Args:
        model: maps inputs in the bounds of the data to logits, on ``device``.
        data: the data.
        points: labeled points of the data, in memory or read once.
        conventions: how a model from elsewhere was adapted; None for a model of Atoll, whose conventions are known.
        device: where to compute.
    """
    images, labels = points.fetch(torch.arange(len(points))), points.labels
    with torch.random.fork_rng(devices=[]), _explained(images):
        with evaluation_mode(model), torch.no_grad():
            _check_size(model, images, data, device)
            logits = _logits(model, images, device)
        _check_classes(logits, data)
        probe = _probe(images, logits)
        x, y = to_float(images[probe]).to(device), labels[probe].to(device)
        findings = [*check_mode(model, x)] if len(probe) else []
        changes: list[Finding] = []
        with evaluation_mode(model):
            findings += check_outputs(logits)
            findings += check_function(model, x, y, data.bounds) if len(probe) else []
            if not {finding.kind for finding in findings} & RANDOM:
                with torch.no_grad():
                    changes = _conventions(model, images, labels, logits, data, conventions, device)
    predictions = check_predictions(logits, labels, data.classes)
    findings += [*changes, *(finding for finding in predictions if not changes or finding.kind != "chance")]
    return Accuracy(int((logits.argmax(1) == labels).sum()), len(labels)), findings


@contextmanager
def _explained(images: Tensor) -> Iterator[None]:
    """Turn errors of somebody else's code into one sentence."""
    try:
        yield
    except AtollError:
        raise
    except Exception as error:
        raise InputError(f"the model fails on images of shape {_shape(images)}: {_line(error)}") from error


def _check_size(model: nn.Module, images: Tensor, data: Data, device: torch.device | str) -> None:
    """Raise an InputError if the model does not accept the images, with a size that it accepts."""
    x = to_float(images[:2]).to(device)
    try:
        model(x)
    except AtollError:
        raise
    except Exception as error:
        message = f"the model fails on images of shape {_shape(images)}: {_line(error)}"
        raise InputError(message + _other_size(model, x, data)) from error


def _other_size(model: nn.Module, x: Tensor, data: Data) -> str:
    """A sentence about images that the model accepts."""
    if x.dim() != 4:
        return ""
    for channels in dict.fromkeys((x.shape[1], 1, 3)):
        for height, width in dict.fromkeys([tuple(x.shape[2:]), *((size, size) for size in OTHER_SIZES)]):
            try:
                model(x.new_zeros(2, channels, height, width))
            except Exception:
                continue
            if channels != x.shape[1]:
                return f"; it accepts images of {_pixels(height, width)} with {channels} channel{'s' * (channels > 1)}"
            resize = f"; use data.size={width} data.resize={round(width * 8 / 7)}" if data.resize is not None else ""
            return f"; it accepts images of {_pixels(height, width)}{resize}"
    return ""


def _pixels(height: int, width: int) -> str:
    return f"{width} x {height} pixels"


def _logits(model: nn.Module, images: Tensor, device: torch.device | str) -> Tensor:
    """The logits of all images, on the CPU."""
    return torch.cat([model(to_float(part).to(device)).cpu() for part in torch.split(images, BATCH)])


def _check_classes(logits: Tensor, data: Data) -> None:
    if logits.dim() != 2:
        raise InputError(f"model: expected logits of shape (batch, classes), got {tuple(logits.shape)}")
    outputs, classes = logits.shape[1], data.num_classes
    if outputs != classes:
        advice = "use --labels to choose the outputs of the classes" if outputs > classes else "leave out the others"
        raise InputError(f"the model has {outputs} outputs, but the data has {classes} classes; {advice}")


def _probe(images: Tensor, logits: Tensor) -> Tensor:
    """Some points with finite logits; images with the same color everywhere may have no gradient."""
    usable = logits.isfinite().all(1)
    if images.dim() == 4:
        channels = images.flatten(2)
        usable &= (channels.amax(2) > channels.amin(2)).any(1)
    rows = usable.nonzero().flatten()
    return rows[torch.arange(min(PROBE, len(rows))) * len(rows) // max(min(PROBE, len(rows)), 1)]


def _conventions(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    logits: Tensor,
    data: Data,
    conventions: Conventions | None,
    device: torch.device | str,
) -> list[Finding]:
    """The change of the inputs that raises accuracy most, else of the outputs, if that cannot be by chance."""
    predictions = logits.argmax(1)
    errors = int((predictions != labels).sum())
    if errors < GAIN * len(labels) or 0.5**errors > SIGNIFICANT:  # even without errors, not significantly better
        return []
    if conventions is not None and images.dim() == 4:
        best = _best(_alternatives(model, conventions, images, data, device), images, labels, device)
        other = _logits(best.model, images, device).argmax(1)
        # Even a model that gets BGR instead of RGB recognizes most images, and no model that gets RGB prefers BGR.
        if is_better(other, predictions, labels, 0.0 if best.kind == "channels" else REPAIRED):
            before, after = (100 * float((each == labels).double().mean()) for each in (predictions, other))
            return [Finding(best.kind, f"accuracy is {before:.1f} %, but {after:.1f} % {best.condition}", best.option)]
    outputs = None
    if conventions is not None:
        outputs = range(data.num_classes) if conventions.labels is None else conventions.labels
    return [*check_order(logits, labels, outputs, data.num_classes)]


def _alternatives(
    model: nn.Module, conventions: Conventions, images: Tensor, data: Data, device: torch.device | str
) -> Iterator[Alternative]:
    yield from alternatives(model, conventions, to_float(images[:SCREEN]).to(device))
    if data.resize is not None and images.shape[2] == images.shape[3]:
        x = to_float(images[:1]).to(device)
        for other in sizes(model, data.resize, images.shape[3]):
            try:
                other.model(x)
            except Exception:  # many models accept only one size
                continue
            yield other


def _best(candidates: Iterator[Alternative], images: Tensor, labels: Tensor, device: torch.device | str) -> Alternative:
    """The alternative with the highest accuracy on some points, or the smallest cross-entropy of several."""
    some = torch.arange(min(SCREEN, len(labels))) * len(labels) // min(SCREEN, len(labels))

    def rank(candidate: Alternative) -> tuple[int, float]:
        logits = _logits(candidate.model, images[some], device)
        return int((logits.argmax(1) == labels[some]).sum()), -loss(logits, labels[some])

    return max(candidates, key=rank)


def _shape(images: Tensor) -> str:
    return str(tuple(images.shape[1:]))


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
