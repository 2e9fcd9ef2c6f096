"""Is this robust accuracy one can trust?  What is known to spoil an evaluation, looked for before and after.

Faults that make numbers meaningless are errors and stop the evaluation (inputs outside the bounds, outputs that are not
logits of classes, no gradient at all for attacks that need one).  The others are findings: what was seen, and what to
do about it; they stand in the report beside the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.attacks.base import Attack, check_labels
from atoll.errors import InputError
from atoll.losses.objectives import margin
from atoll.modules import evaluation_mode

NOISE = 1e-3  # two passes that differ by more than this share of the logits' spread are not the same function
MANY = 0.1  # share of points whose gradient may vanish before it is a finding
MASKED = 0.002  # share of points that a blind attack may break after the white-box ones ...
CHANCE = 2  # ... and how many in any case


@dataclass(frozen=True)
class EvaluationWarning:
    """Something about the model, the inputs or the result that a reader of the numbers must know."""

    kind: str
    message: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def diagnose_model(model: nn.Module, x: Tensor, y: Tensor, attacks: Mapping[str, Attack]) -> list[EvaluationWarning]:
    """Look at a model through a few points before anything is spent on it.

    >>> from atoll.attacks import PGD, ThreatModel
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Softmax(1)).eval()
    >>> attacks = {"PGD": PGD(ThreatModel())}
    >>> [finding.kind for finding in diagnose_model(model, torch.rand(5, 1, 2, 2), torch.zeros(5).long(), attacks)]
    ['softmax']
    """
    found = []
    if any(module.training for module in model.modules()):
        found.append(
            EvaluationWarning("train mode", "the model came in training mode; it is evaluated in evaluation mode")
        )
    with evaluation_mode(model):
        with torch.no_grad():
            logits = model(x)
            again = model(x)
            alone = torch.cat([model(row) for row in x[:4, None]])
        check_labels(logits, y)
        if not logits.isfinite().all():
            raise InputError("model: expected finite logits, got NaN or infinity")
        randomised = _randomised(logits, again)
        found += [*randomised, *_softmax(logits), *_range(x, attacks), *_classes(logits.shape[1], attacks)]
        if not randomised:
            found += _company(logits[:4], alone)
        found += _gradients(model, x, y, attacks)
    return found


def _softmax(logits: Tensor) -> list[EvaluationWarning]:
    if logits.min() >= 0 and (logits.sum(1) - 1).abs().max() < 1e-4:
        message = "the outputs are probabilities (they sum to 1); give the logits, without the softmax at the end"
        return [EvaluationWarning("softmax", f"{message}, because gradients vanish in it")]
    return []


def _randomised(logits: Tensor, again: Tensor) -> list[EvaluationWarning]:
    gap = float((logits - again).abs().max())
    if gap > NOISE * _spread(logits) or not torch.equal(logits.argmax(1), again.argmax(1)):
        message = f"two passes over the same inputs differ by up to {gap:.2g}: the model is randomised;"
        return [EvaluationWarning("randomised", f"{message} use the version `rand`, which averages over passes")]
    if gap > 0:
        message = f"two passes over the same inputs differ by up to {gap:.2g}: the model is not deterministic;"
        return [EvaluationWarning("non-deterministic", f"{message} an evaluation of it cannot be repeated bit for bit")]
    return []


def _company(together: Tensor, alone: Tensor) -> list[EvaluationWarning]:
    gap = float((together - alone).abs().max())
    if gap <= NOISE * _spread(together):
        return []
    message = f"a point alone and in a batch gets logits that differ by up to {gap:.2g}:"
    return [EvaluationWarning("batch-dependent", f"{message} is a layer using the statistics of the batch?")]


def _range(x: Tensor, attacks: Mapping[str, Attack]) -> list[EvaluationWarning]:
    found = []
    for threat in {attack.threat for attack in attacks.values()}:
        threat.check(x)
        if threat.bounds is None:
            continue
        width = threat.bounds[1] - threat.bounds[0]
        if float(x.max() - x.min()) <= width / 100 and len(x) > 1:
            seen = f"all inputs lie in [{float(x.min()):.3g}, {float(x.max()):.3g}]"
            found.append(EvaluationWarning("range", f"{seen} of the bounds {threat.bounds}; were they divided twice?"))
        if threat.norm == "linf" and threat.radius >= width / 2:
            message = f"eps {threat.eps} lets every pixel become grey, so nothing can stand; was 8/255 meant for 8?"
            found.append(EvaluationWarning("eps", message))
    return found


def _classes(classes: int, attacks: Mapping[str, Attack]) -> list[EvaluationWarning]:
    wanted = max((getattr(attack, "targets", 0) for attack in attacks.values()), default=0)
    if wanted < classes:
        return []
    return [
        EvaluationWarning("classes", f"with {classes} classes, {classes - 1} of {wanted} targets are tried per point")
    ]


def _gradients(model: nn.Module, x: Tensor, y: Tensor, attacks: Mapping[str, Attack]) -> list[EvaluationWarning]:
    """Points where no way up is to be seen: zero gradient of the margin (quantised), or of CE alone (saturated)."""
    if not any(attack.needs_gradients for attack in attacks.values()):
        return []
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
        message = f"the gradient is zero at {100 * flat:.0f} % of the points (quantised inside?):"
        return [EvaluationWarning("zero gradients", f"{message} gradient attacks cannot see; rely on Square and RayS")]
    if saturated > MANY:
        message = f"the gradient of cross-entropy is zero at {100 * saturated:.0f} % of the points (saturated):"
        return [EvaluationWarning("zero gradients", f"{message} trust the attacks on margins (DLR) only")]
    return []


def diagnose_results(
    attacks: Mapping[str, Attack], broken: Sequence[int], claimed: Sequence[int], confirmed: Sequence[int], total: int
) -> list[EvaluationWarning]:
    """What the results themselves give away.

    Args:
        attacks: in the order they ran, each on what the ones before it left standing.
        broken: points each attack broke, that no attack before it had.
        claimed: successes each attack claimed.
        confirmed: how many of them a plain forward pass confirmed.
        total: points evaluated.
    """
    found = []
    seeing = False
    for (name, attack), count in zip(attacks.items(), broken, strict=True):
        if seeing and not attack.needs_gradients and count > max(CHANCE, MASKED * total):
            message = f"{name}, which sees no gradients, broke {count} points that the white-box attacks had not:"
            found.append(
                EvaluationWarning("gradient masking", f"{message} the true robust accuracy is probably lower still")
            )
        seeing = seeing or attack.needs_gradients
    # An attack in one go claims every point; only attacks that watch their own successes can be wrong about them.
    for name, claims, holds in zip(attacks, claimed, confirmed, strict=True):
        if claims - holds > max(CHANCE, MASKED * total):
            message = f"{claims - holds} of {claims} successes of {name} were gone in a second pass, and do not count:"
            found.append(
                EvaluationWarning("unconfirmed", f"{message} is the model randomised, or is it a matter of rounding?")
            )
    return found


def _spread(logits: Tensor) -> float:
    return float(logits.max() - logits.min()) + 1e-12
