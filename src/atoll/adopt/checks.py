"""Checks of a foreign model on the data: what looks wrong, and the option that would fix it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.adopt.preprocess import Adapted, Channels, Conventions
from atoll.attacks.diagnostics import diagnose_model
from atoll.attacks.pgd import PGD
from atoll.data.base import Data, to_float
from atoll.errors import InputError
from atoll.stats import Accuracy
from atoll.threat import ThreatModel

POINTS = 500
BATCH = 50
PROBE = 16
GAIN = 0.03  # a convention is suggested if it raises accuracy by more than this ...
SIGNIFICANT = 1e-4  # ... and the paired test has a p-value below this
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@dataclass(frozen=True)
class Finding:
    """Something that looks wrong.

    Args:
        kind: short name, such as ``range``.
        message: what was observed.
        option: the option that would fix it, "" if there is none.
    """

    kind: str
    message: str
    option: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" + (f"; use {self.option}" if self.option else "")


def check_model(model: Adapted, data: Data, points: int = POINTS) -> tuple[Accuracy, list[Finding]]:
    """Measure clean accuracy on test points and look for wrong conventions.

    Args:
        model: the adapted model, in evaluation mode.
        data: the data.
        points: number of test points, spread over the test set because files are often sorted by class.
    """
    split = data.split("test")
    index = torch.arange(min(points, len(split))) * len(split) // min(points, len(split))
    x, y = to_float(split.fetch(index)), split.labels[index]
    logits = _logits(model, x)
    outputs = logits.shape[1]
    if outputs != data.num_classes:
        raise InputError(
            f"the model has {outputs} outputs, but the data has {data.num_classes} classes; use --labels to choose the"
            " outputs of the classes"
        )
    correct = logits.argmax(1) == y
    accuracy = Accuracy(int(correct.sum()), len(y))
    findings = [*_outputs(logits, data), *_diagnosis(model, x, y), *_conventions(model, x, y, correct)]
    if not any(finding.option for finding in findings):
        findings += _labels(logits, y, data)
    findings += _chance(accuracy, data.num_classes)
    return accuracy, findings


def _logits(model: Adapted, x: Tensor) -> Tensor:
    try:
        return torch.cat([model(part) for part in torch.split(x, BATCH)])
    except InputError:
        raise
    except Exception as error:  # anything may happen in somebody else's code
        shape = ", ".join(map(str, x.shape[1:]))
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"the model fails on images of shape ({shape}): {line}; if it expects another size, set data.size and"
            " data.resize"
        ) from error


def _outputs(logits: Tensor, data: Data) -> Iterator[Finding]:
    wrong = int((~logits.isfinite().all(1)).sum())
    if wrong:
        yield Finding("NaN", f"the logits of {wrong} of {len(logits)} test points are NaN or infinite")
    predictions = logits.argmax(1).bincount(minlength=data.num_classes)
    if predictions.max() == len(logits) and len(logits) > 1:
        name = data.classes[int(predictions.argmax())]
        yield Finding("constant", f"the model predicts {name} for all {len(logits)} test points")
    if logits.min() >= 0 and ((logits == 0).float().mean() > 0.3) and not _sums_to_one(logits):
        share = float((logits == 0).float().mean())
        yield Finding(
            "ReLU", f"{100 * share:.0f} % of the logits are exactly 0, as after a ReLU; gradients vanish there"
        )


def _sums_to_one(logits: Tensor) -> bool:
    return bool(logits.min() >= 0 and (logits.sum(1) - 1).abs().max() < 1e-3)


OPTIONS = {"softmax": "--outputs probabilities"}


def _diagnosis(model: Adapted, x: Tensor, y: Tensor) -> Iterator[Finding]:
    """The checks before an attack."""
    attack = {"PGD": PGD(ThreatModel())}
    try:
        with torch.enable_grad():
            warnings = diagnose_model(model, x[:PROBE], y[:PROBE], attack)
    except InputError as error:
        yield Finding("model", str(error))
        return
    for warning in warnings:
        yield Finding(warning.kind, warning.message, OPTIONS.get(warning.kind, ""))


def _alternatives(conventions: Conventions, channels: int) -> Iterator[tuple[str, str, Conventions]]:
    """Other conventions that people use, with what is wrong and the option."""
    plain = dataclasses.replace(conventions, range=(0.0, 1.0), mean=(0.0,), std=(1.0,))
    yield "range", "--range 0,255", dataclasses.replace(plain, range=(0.0, 255.0))
    yield "range", "--range=-1,1", dataclasses.replace(plain, range=(-1.0, 1.0))
    yield "mean", "--range 0,1 --mean 0 --std 1", plain
    if channels == 3:
        for mean, std in (IMAGENET, CIFAR):
            option = f"--range 0,1 --mean {','.join(map(str, mean))} --std {','.join(map(str, std))}"
            yield "mean", option, dataclasses.replace(plain, mean=mean, std=std)
        other: Channels = "rgb" if conventions.channels == "bgr" else "bgr"
        yield "channels", f"--channels {other}", dataclasses.replace(conventions, channels=other)


def _conventions(model: Adapted, x: Tensor, y: Tensor, correct: Tensor) -> Iterator[Finding]:
    """The convention that raises accuracy most, if that cannot be by chance."""
    results = []
    for kind, option, conventions in _alternatives(model.conventions, x.shape[1]):
        if conventions != model.conventions:
            other = _logits(Adapted(model.model, conventions, x.shape[1]).eval(), x).argmax(1) == y
            results.append((float(other.float().mean()), kind, option, other))
    value, kind, option, other = max(results, key=lambda entry: entry[0])
    if _better(other, correct):
        before = float(correct.float().mean())
        message = f"accuracy is {100 * before:.1f} %, but {100 * value:.1f} % with another convention"
        yield Finding(kind, message, option)


def _labels(logits: Tensor, y: Tensor, data: Data) -> Iterator[Finding]:
    """A permutation of the classes, fitted on every other point, that raises accuracy on the rest."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    classes, predictions = data.num_classes, logits.argmax(1)
    counts = torch.zeros(classes, classes)
    counts.index_put_((y[::2], predictions[::2]), torch.ones(len(y[::2])), accumulate=True)
    _, outputs = linear_sum_assignment(-counts.numpy())
    output_of = torch.from_numpy(outputs)  # of each class
    other, correct = output_of[y[1::2]] == predictions[1::2], y[1::2] == predictions[1::2]
    if _better(other, correct):
        before, after = (100 * float(each.float().mean()) for each in (correct, other))
        message = f"accuracy is {before:.1f} %, but {after:.1f} % with the outputs in another order"
        yield Finding("labels", message, f"--labels {','.join(map(str, output_of.tolist()))}")


def _better(other: Tensor, correct: Tensor) -> bool:
    """Whether an alternative is right more often than chance explains (paired sign test)."""
    from scipy.stats import binomtest  # slow to import

    gained, lost = int((other & ~correct).sum()), int((correct & ~other).sum())
    if gained - lost <= GAIN * len(correct):
        return False
    return bool(binomtest(gained, gained + lost, 0.5, alternative="greater").pvalue < SIGNIFICANT)


def _chance(accuracy: Accuracy, classes: int) -> Iterator[Finding]:
    from scipy.stats import binomtest  # slow to import

    if binomtest(accuracy.correct, accuracy.total, 1 / classes, alternative="greater").pvalue > 0.01:
        yield Finding("chance", f"accuracy is {100 * accuracy.value:.1f} %, not better than guessing")
