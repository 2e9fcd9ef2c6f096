"""Checks before and after an evaluation, for reasons not to trust its robust accuracy.

Problems that make the numbers meaningless are errors and stop the evaluation: inputs outside the bounds, outputs that
are not logits, or no gradient for attacks that need one.  All others are warnings that say what was observed and what
to do about it.  The report shows them next to the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.attacks.base import Attack, check_labels
from atoll.errors import InputError
from atoll.losses.objectives import margin
from atoll.modules import evaluation_mode

NOISE = 1e-3  # passes that differ by more than this share of the range of the logits are treated as different
MANY = 0.1  # warn if the gradient vanishes at more than this share of the points
MASKED = 0.002  # share of points that a black-box attack may break after the white-box ones without a warning ...
CHANCE = 2  # ... or at least this number of points
NO_GRADIENT = (
    "model: expected logits with a gradient with respect to the inputs, got none (does the model detach or round?); use"
    " Square or RayS, which need no gradients"
)


@dataclass(frozen=True)
class EvaluationWarning:
    """A warning about the model, the inputs or the results that affects how to read the numbers."""

    kind: str
    message: str


def diagnose_model(model: nn.Module, x: Tensor, y: Tensor, attacks: Mapping[str, Attack]) -> list[EvaluationWarning]:
    """Check a model on a few points before the evaluation starts.

    >>> from atoll.attacks import PGD, ThreatModel
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Softmax(1)).eval()
    >>> attacks = {"PGD": PGD(ThreatModel())}
    >>> [warning.kind for warning in diagnose_model(model, torch.rand(5, 1, 2, 2), torch.zeros(5).long(), attacks)]
    ['softmax']
    """
    warnings = []
    if any(module.training for module in model.modules()):
        message = "the model was in training mode; it was switched to evaluation mode"
        warnings.append(EvaluationWarning("train mode", message))
    with evaluation_mode(model):
        with torch.no_grad():
            logits = model(x)
            again = model(x)
            alone = torch.cat([model(row) for row in x[:4, None]])
        check_labels(logits, y)
        if not logits.isfinite().all():
            raise InputError("model: expected finite logits, got NaN or infinity")
        randomized = [*_randomized(logits, again)]
        warnings += [*randomized, *_softmax(logits), *_range(x, attacks), *_classes(logits.shape[1], attacks)]
        if not randomized:
            warnings += _batch_dependence(logits[:4], alone)
        warnings += _gradients(model, x, y, attacks)
    return warnings


def _softmax(logits: Tensor) -> Iterator[EvaluationWarning]:
    if logits.min() >= 0 and (logits.sum(1) - 1).abs().max() < 1e-4:
        message = "the outputs are probabilities (they sum to 1); remove the final softmax and return logits"
        yield EvaluationWarning("softmax", f"{message}, because gradients vanish in the softmax")


@torch.no_grad()
def is_randomized(model: nn.Module, x: Tensor) -> bool:
    """Whether two passes over the same inputs differ by more than rounding.

    >>> is_randomized(nn.Linear(2, 2), torch.rand(3, 2))
    False
    """
    with evaluation_mode(model):
        logits, again = model(x), model(x)
    gap = float((logits - again).abs().max())
    return gap > NOISE * _spread(logits) or not torch.equal(logits.argmax(1), again.argmax(1))


def _randomized(logits: Tensor, again: Tensor) -> Iterator[EvaluationWarning]:
    gap = float((logits - again).abs().max())
    message = f"two passes over the same inputs differ by up to {gap:.2g}: the model is"
    if gap > NOISE * _spread(logits) or not torch.equal(logits.argmax(1), again.argmax(1)):
        message += " randomized; use the suite `rand`, which averages over passes"
        yield EvaluationWarning("randomized", message)
    elif gap > 0:
        message += " not deterministic; results are not exactly reproducible"
        yield EvaluationWarning("non-deterministic", message)


def _batch_dependence(together: Tensor, alone: Tensor) -> Iterator[EvaluationWarning]:
    gap = float((together - alone).abs().max())
    if gap > NOISE * _spread(together):
        message = f"the logits of a point change by up to {gap:.2g} when it is in a batch with others;"
        yield EvaluationWarning("batch-dependent", f"{message} check for layers that use batch statistics")


def _range(x: Tensor, attacks: Mapping[str, Attack]) -> Iterator[EvaluationWarning]:
    for threat in dict.fromkeys(attack.threat for attack in attacks.values()):
        threat.check(x)
        if threat.bounds is None:
            continue
        width = threat.bounds[1] - threat.bounds[0]
        if float(x.max() - x.min()) <= width / 100 and len(x) > 1:
            message = f"all inputs are in [{float(x.min()):.3g}, {float(x.max()):.3g}], a small part of the bounds"
            yield EvaluationWarning("range", f"{message} {threat.bounds}; were they divided by 255 twice?")
        if threat.norm == "linf" and threat.radius >= width / 2:
            message = f"eps {threat.eps} can turn every pixel gray, so no point is robust; did you mean 8/255?"
            yield EvaluationWarning("eps", message)


def _classes(classes: int, attacks: Mapping[str, Attack]) -> Iterator[EvaluationWarning]:
    targets = max((getattr(attack, "targets", 0) for attack in attacks.values()), default=0)
    if targets >= classes:
        message = f"with {classes} classes, attacks try {classes - 1} targets per point instead of {targets}"
        yield EvaluationWarning("classes", message)


def check_gradient(logits: Tensor) -> None:
    """Raise an InputError if logits that were computed with gradients enabled do not depend on the inputs."""
    if not logits.requires_grad:
        raise InputError(NO_GRADIENT)


def _gradients(model: nn.Module, x: Tensor, y: Tensor, attacks: Mapping[str, Attack]) -> Iterator[EvaluationWarning]:
    """Warn if many points have zero gradient of the margin (quantized model) or of cross-entropy only (saturated)."""
    if not any(attack.needs_gradients for attack in attacks.values()):
        return
    candidates = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        logits = model(candidates)
        check_gradient(logits)
        objectives = [margin(logits, y).sum(), F.cross_entropy(logits, y, reduction="sum")]
        gradients = [
            torch.autograd.grad(value, candidates, retain_graph=True, allow_unused=True)[0] for value in objectives
        ]
    if any(gradient is None for gradient in gradients):  # the logits depend on the weights, but not on the inputs
        raise InputError(NO_GRADIENT)
    flat, saturated = ((g.flatten(1).abs().amax(1) == 0).double().mean().item() for g in gradients)
    if flat > MANY:
        message = f"the gradient is zero at {100 * flat:.0f} % of the points (is the model quantized?), so gradient"
        yield EvaluationWarning("zero gradients", f"{message} attacks fail there; rely on Square and RayS")
    elif saturated > MANY:
        message = f"the gradient of cross-entropy is zero at {100 * saturated:.0f} % of the points (saturated softmax);"
        yield EvaluationWarning("saturated", f"{message} trust only attacks on margins (DLR)")


def diagnose_results(
    attacks: Mapping[str, Attack], broken: Sequence[int], claimed: Sequence[int], confirmed: Sequence[int], total: int
) -> Iterator[EvaluationWarning]:
    """Check the results of an evaluation.

    Args:
        attacks: the attacks in the order they ran, each on the points that were still robust.
        broken: number of points that each attack broke and no earlier attack did.
        claimed: number of successes that each attack claimed.
        confirmed: number of claimed successes that a plain forward pass confirmed.
        total: number of points evaluated.
    """
    few = max(CHANCE, MASKED * total)
    white_box = False
    for (name, attack), count in zip(attacks.items(), broken, strict=True):
        if white_box and not attack.needs_gradients and count > few:
            message = f"{name}, which uses no gradients, broke {count} points that the white-box attacks did not break;"
            yield EvaluationWarning("gradient masking", f"{message} the true robust accuracy is probably even lower")
        white_box = white_box or attack.needs_gradients
    # One-shot attacks claim every point, so this concerns only attacks that check their own successes.
    for name, claims, confirmations in zip(attacks, claimed, confirmed, strict=True):
        if (failures := claims - confirmations) > few:
            message = f"{failures} of {claims} successes of {name} failed in a second pass and do not count;"
            yield EvaluationWarning("unconfirmed", f"{message} is the model randomized or sensitive to rounding?")


def _spread(logits: Tensor) -> float:
    return float(logits.max() - logits.min()) + 1e-12
