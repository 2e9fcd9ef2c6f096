"""Checks of the logits of a model on labeled points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from atoll.data.fingerprint import first_few
from atoll.health.finding import Finding
from atoll.stats import Accuracy

GAIN = 0.03  # an alternative is suggested if it raises accuracy by more than this ...
REPAIRED = 0.25  # ... and removes this share of the errors, because weak models may prefer more contrast, ...
SIGNIFICANT = 1e-4  # ... and the paired test has a p-value below this
GUESSING = 0.01  # accuracy with a higher p-value may be the result of guessing
CLEARLY = 0.25  # part of the way from guessing to 100 %: reported only if the accuracy is certainly below
NEVER = 1e-3  # probability below which it is not chance that a class is never predicted
STRONG = 0.9  # accuracy of a model that should recognize every class
CONSTANT = 0.01  # ... or that all points of other classes are classified as the same class
ZEROS = 0.01  # share of logits that are exactly 0 behind a ReLU
NAMES = 5  # names listed in a message


def check_outputs(logits: Tensor) -> list[Finding]:
    """Look for defects that show in the logits alone: NaN, and a ReLU behind them."""
    return [*_not_finite(logits), *_rectified(logits)]


def _not_finite(logits: Tensor) -> Iterator[Finding]:
    wrong = int((~logits.isfinite().all(1)).sum())
    if wrong:
        yield Finding("NaN", f"the logits of {wrong} of {len(logits)} points are NaN or infinite")


def _rectified(logits: Tensor) -> Iterator[Finding]:
    # Rows of zeros are what a network without biases returns for a black image.  Probabilities are at most 1.
    rows = logits[(logits != 0).any(1)]
    if not len(rows) or rows.min() < 0 or rows.max() <= 1:
        return
    zeros = rows == 0
    if float(zeros.double().mean()) > ZEROS and int(zeros.any(0).sum()) > 1:
        message = (
            f"{100 * float(zeros.double().mean()):.0f} % of the logits are exactly 0 and none is negative, as after"
        )
        yield Finding("ReLU", f"{message} a ReLU; gradients vanish there, so return the values before it")


def check_predictions(logits: Tensor, labels: Tensor, classes: Sequence[str]) -> Iterator[Finding]:
    """Look for classes that are never predicted, and accuracy at chance.

    Args:
        logits: one row per point.
        labels: the labels.
        classes: names of the classes.
    """
    predictions = logits.argmax(1)
    label = int(predictions[0])
    others = int((labels != label).sum())
    if (predictions == label).all():
        if 0.5**others < CONSTANT:
            yield Finding("constant", f"the model predicts {classes[label]} for all {len(labels)} points")
        return
    yield from _missing_class(logits, labels, classes)
    yield from _chance(predictions, labels)


def _missing_class(logits: Tensor, labels: Tensor, classes: Sequence[str]) -> Iterator[Finding]:
    predictions = logits.argmax(1)
    counts, predicted = (each.bincount(minlength=len(classes)) for each in (labels, predictions))
    # If a class is recognized half as often as the average class, can it be chance that it is never predicted?
    accuracy = float((predictions == labels).double().mean())
    missing = (predicted == 0) & ((1 - accuracy / 2) ** counts.double() < NEVER / len(classes))
    # A weak model may always prefer a similar class, but then the right one is often second.
    if float((predictions == labels)[~missing[labels]].double().mean()) < STRONG:
        second = logits.topk(2).indices[:, 1]
        missing &= labels[second == labels].bincount(minlength=len(classes)) == 0
    names = [classes[label] for label in missing.nonzero().flatten().tolist()]
    if names:
        points = f"{int(counts[missing].sum())} of {len(labels)} points"
        whom = names[0] if len(names) == 1 else f"{len(names)} of {len(classes)} classes ({first_few(names, NAMES)})"
        yield Finding("missing class", f"the model never predicts {whom}, the class of {points}")


def order_of(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The output of each class, if the outputs are in the order that gives the highest accuracy."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    counts = torch.zeros(classes, classes)
    # Points for the present order decide between equal ones, for example of classes without points.
    counts += 1e-3 * torch.eye(classes)
    counts.index_put_((labels, logits.argmax(1)), torch.ones(len(labels)), accumulate=True)
    return torch.from_numpy(linear_sum_assignment(-counts.numpy())[1])


def check_order(logits: Tensor, labels: Tensor, outputs: Sequence[int] | None, classes: int) -> Iterator[Finding]:
    """Look for an order of the outputs, fitted on every other point, that raises the accuracy on the rest.

    Args:
        logits: one row per point.
        labels: the labels.
        outputs: for each class, the number of the model's output; None if no option changes it.
        classes: number of classes.
    """
    order = order_of(logits[::2], labels[::2], classes)
    predictions, labels = logits[1::2].argmax(1), labels[1::2]
    other = order.argsort()[predictions]  # the classes with the outputs in this order
    if is_better(other, predictions, labels):
        before, after = (100 * float((each == labels).double().mean()) for each in (predictions, other))
        message = f"accuracy is {before:.1f} %, but {after:.1f} % with the outputs in another order"
        option = "" if outputs is None else f"--labels {','.join(str(outputs[output]) for output in order.tolist())}"
        yield Finding("labels", message, option)


def is_better(other: Tensor, predictions: Tensor, labels: Tensor, repaired: float = REPAIRED) -> bool:
    """Whether other predictions are correct more often than chance explains (paired sign test).

    They must also be better than guessing: if most labels are the same, predicting always this class is no repair.

    Args:
        other: predictions of the alternative.
        predictions: predictions without it.
        labels: the labels.
        repaired: share of the errors that the alternative must remove.
    """
    from scipy.stats import binomtest  # slow to import

    now, then = predictions == labels, other == labels
    gained, lost = int((then & ~now).sum()), int((now & ~then).sum())
    if gained - lost <= max(GAIN * len(labels), repaired * int((~now).sum())):
        return False
    p_value = binomtest(gained, gained + lost, 0.5, alternative="greater").pvalue
    return bool(p_value < SIGNIFICANT and p_value_of_guessing(other, labels) < SIGNIFICANT)


def p_value_of_guessing(predictions: Tensor, labels: Tensor) -> float:
    """Probability of at least this accuracy if predictions are as frequent, but independent of the labels."""
    from scipy.stats import binomtest  # slow to import

    correct, chance = int((predictions == labels).sum()), _chance_agreement(predictions, labels)
    return float(binomtest(correct, len(labels), chance, alternative="greater").pvalue)


def _chance_agreement(predictions: Tensor, labels: Tensor) -> float:
    """Share of equal entries if both are shuffled, as in Cohen's kappa."""
    classes = int(max(predictions.max(), labels.max())) + 1
    shares = [each.bincount(minlength=classes).double() / len(labels) for each in (predictions, labels)]
    return min(float((shares[0] * shares[1]).sum()), 1.0)


def _chance(predictions: Tensor, labels: Tensor) -> Iterator[Finding]:
    """Report an accuracy that is not better than guessing, if there are enough points to tell."""
    accuracy = Accuracy(int((predictions == labels).sum()), len(labels))
    chance = _chance_agreement(predictions, labels)
    if accuracy.interval[1] > chance + CLEARLY * (1 - chance) or (labels == labels[0]).all():
        return
    if p_value_of_guessing(predictions, labels) > GUESSING:
        yield Finding("chance", f"accuracy is {100 * accuracy.value:.1f} %, not better than guessing")
