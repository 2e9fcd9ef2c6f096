"""Reasons not to trust a robust accuracy, checked before and after an evaluation.

Faults that make the numbers meaningless are errors and stop the evaluation: inputs outside the bounds, outputs that are
not logits of classes, no gradient at all for attacks that need one.  The others are warnings that say what was observed
and what to do about it.  The report shows them beside the numbers.
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

NOISE = 1e-3  # two passes that differ by more than this share of the logits' spread are not the same function
MANY = 0.1  # share of points whose gradient may vanish before a warning
MASKED = 0.002  # share of points that a blind attack may break after the white-box ones ...
CHANCE = 2  # ... and how many in any case


@dataclass(frozen=True)
class EvaluationWarning:
    """Something about the model, the inputs or the result that a reader of the numbers must know."""

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
        message = "the model was in training mode; it is evaluated in evaluation mode"
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
        message = "the outputs are probabilities (they sum to 1); give the logits, without the softmax at the end"
        yield EvaluationWarning("softmax", f"{message}, because gradients vanish in it")


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
        message += " randomized; use the version `rand`, which averages over passes"
        yield EvaluationWarning("randomized", message)
    elif gap > 0:
        message += " not deterministic; an evaluation of it cannot be repeated bit for bit"
        yield EvaluationWarning("non-deterministic", message)


def _batch_dependence(together: Tensor, alone: Tensor) -> Iterator[EvaluationWarning]:
    gap = float((together - alone).abs().max())
    if gap > NOISE * _spread(together):
        message = f"a point alone and in a batch gets logits that differ by up to {gap:.2g}:"
        yield EvaluationWarning("batch-dependent", f"{message} is a layer using the statistics of the batch?")


def _range(x: Tensor, attacks: Mapping[str, Attack]) -> Iterator[EvaluationWarning]:
    for threat in dict.fromkeys(attack.threat for attack in attacks.values()):
        threat.check(x)
        if threat.bounds is None:
            continue
        width = threat.bounds[1] - threat.bounds[0]
        if float(x.max() - x.min()) <= width / 100 and len(x) > 1:
            seen = f"all inputs lie in [{float(x.min()):.3g}, {float(x.max()):.3g}]"
            yield EvaluationWarning("range", f"{seen} of the bounds {threat.bounds}; were they divided twice?")
        if threat.norm == "linf" and threat.radius >= width / 2:
            message = f"eps {threat.eps} allows every pixel to become gray, so no point is robust; did you mean 8/255?"
            yield EvaluationWarning("eps", message)


def _classes(classes: int, attacks: Mapping[str, Attack]) -> Iterator[EvaluationWarning]:
    wanted = max((getattr(attack, "targets", 0) for attack in attacks.values()), default=0)
    if wanted >= classes:
        message = f"with {classes} classes, {classes - 1} of {wanted} targets are tried per point"
        yield EvaluationWarning("classes", message)


def _gradients(model: nn.Module, x: Tensor, y: Tensor, attacks: Mapping[str, Attack]) -> Iterator[EvaluationWarning]:
    """Share of points with zero gradient: of the margin (quantized model), or of CE alone (saturated)."""
    if not any(attack.needs_gradients for attack in attacks.values()):
        return
    candidates = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        logits = model(candidates)
        if not logits.requires_grad:
            raise InputError(
                "model: expected a gradient of the logits by the inputs, got none (detached or rounded inside?);"
                " attack it with Square or RayS, which need none"
            )
        objectives = [margin(logits, y).sum(), F.cross_entropy(logits, y, reduction="sum")]
        gradients = [torch.autograd.grad(value, candidates, retain_graph=True)[0] for value in objectives]
    flat, saturated = ((g.flatten(1).abs().amax(1) == 0).double().mean().item() for g in gradients)
    if flat > MANY:
        message = f"the gradient is zero at {100 * flat:.0f} % of the points (quantized inside?):"
        yield EvaluationWarning("zero gradients", f"{message} gradient attacks are blind; rely on Square and RayS")
    elif saturated > MANY:
        message = f"the gradient of cross-entropy is zero at {100 * saturated:.0f} % of the points (saturated):"
        yield EvaluationWarning("zero gradients", f"{message} trust the attacks on margins (DLR) only")


def diagnose_results(
    attacks: Mapping[str, Attack], broken: Sequence[int], claimed: Sequence[int], confirmed: Sequence[int], total: int
) -> Iterator[EvaluationWarning]:
    """Warnings that follow from the results.

    Args:
        attacks: in the order they ran, each on the points that were still robust.
        broken: points each attack broke, that no attack before it had.
        claimed: successes each attack claimed.
        confirmed: how many of them a plain forward pass confirmed.
        total: points evaluated.
    """
    few = max(CHANCE, MASKED * total)
    white_box = False
    for (name, attack), count in zip(attacks.items(), broken, strict=True):
        if white_box and not attack.needs_gradients and count > few:
            message = f"{name}, which uses no gradients, broke {count} points that the white-box attacks did not break:"
            yield EvaluationWarning("gradient masking", f"{message} the true robust accuracy is probably lower still")
        white_box = white_box or attack.needs_gradients
    # One-shot attacks claim every point; only attacks that check their own successes can be wrong about them.
    for name, claims, holds in zip(attacks, claimed, confirmed, strict=True):
        if claims - holds > few:
            message = f"{claims - holds} of {claims} successes of {name} failed in a second pass and do not count:"
            yield EvaluationWarning("unconfirmed", f"{message} is the model randomized, or is it a matter of rounding?")


def _spread(logits: Tensor) -> float:
    return float(logits.max() - logits.min()) + 1e-12
