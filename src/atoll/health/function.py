"""Checks of a model as a function of its input: mode, randomness, batches, rounding, and gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.attacks.diagnostics import NOISE, diagnose_model
from atoll.attacks.pgd import PGD
from atoll.errors import InputError
from atoll.health.finding import Finding
from atoll.modules import evaluation_mode, preserve_buffers
from atoll.threat import Bounds, ThreatModel

FLAT_STEP = 1e-5  # far less than the step between two levels of 8 bits
OFFSET = 0.3 / 255  # from the levels of 8 bits and from the middle between two, where a function may round up or down
COMPARED = 8  # points at which gradients are compared with differences, ...
DIRECTIONS = 2  # ... along this number of directions, because float64 is slow
# A gradient is wrong if it differs from the differences by more than this share, ...
WRONG = {torch.float64: 0.1, torch.float32: 0.3}
MANY = 0.1  # ... which is reported for more than this share of the points, and more than one
STEADY = 0.03  # differences over several steps may differ by this share, or the function is not smooth there
# Small steps, because large networks have many kinks.  In float32, steps must be larger than rounding errors allow.
STEPS = {torch.float64: (1e-8, 2e-8), torch.float32: (1e-3, 2e-3, 4e-3)}
RANDOM = {"randomized", "dropout"}
OPTIONS = {"softmax": "--outputs probabilities"}


def check_mode(model: nn.Module, x: Tensor) -> Iterator[Finding]:
    """Report a model that arrives in training mode, unless its logits are the same in evaluation mode."""
    if not any(module.training for module in model.modules()):
        return
    with torch.no_grad(), preserve_buffers(model):
        try:
            training = model(x)
        except Exception:  # batch norm refuses a batch of one point
            training = torch.full((1,), torch.nan)
        with evaluation_mode(model):
            logits, again = model(x), model(x)
    if _differ(logits, again):  # for another reason than its mode
        return
    if _differ(logits, training):
        message = "the model is in training mode, in which dropout and batch norm give different logits"
        yield Finding("training mode", f"{message}; Atoll uses evaluation mode, as after model.eval()")


def _differ(logits: Tensor, others: Tensor) -> bool:
    """Whether logits differ by more than rounding."""
    return not float((logits - others).abs().max()) <= NOISE * _spread(logits)


def check_function(model: nn.Module, x: Tensor, y: Tensor, bounds: Bounds | None) -> list[Finding]:
    """Check a model in evaluation mode at a few points with finite logits.

    Args:
        model: maps inputs to logits.
        x: points, as floats.
        y: their labels.
        bounds: valid range of the inputs; None if they are not images.
    """
    findings: list[Finding] = []
    try:
        findings += _diagnosis(model, x, y, bounds)
    except InputError as error:
        findings.append(Finding("gradients", str(error).removeprefix("model: ")))
    kinds = {finding.kind for finding in findings}
    if kinds & {*RANDOM, "batch-dependent"}:
        return findings  # the other checks compare passes
    if bounds is not None:
        if rounding := [*_rounding(model, x)]:
            findings = [finding for finding in findings if finding.kind != "zero gradients"] + rounding
        findings += _special_inputs(model, x, bounds)
    if "gradients" not in kinds:
        findings += _gradient_is_finite(model, x) or _gradients(model, x)
    return findings


def _diagnosis(model: nn.Module, x: Tensor, y: Tensor, bounds: Bounds | None) -> Iterator[Finding]:
    """The checks before an attack that concern the model."""
    attack = PGD(ThreatModel(bounds=bounds))
    for warning in diagnose_model(model, x, y, {"PGD": attack}):
        if warning.kind == "randomized":
            yield _randomness(model, x, warning.message.partition(":")[0])
        elif warning.kind not in ("train mode", "range", "eps", "classes"):
            yield Finding(warning.kind, warning.message, OPTIONS.get(warning.kind, ""))


class _RandomOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _randomness(model: nn.Module, x: Tensor, message: str) -> Finding:
    with _RandomOperations() as operations:
        model(x)
    names = sorted(operations.names)
    message += f" ({', '.join(names)})" if names else ""
    if any("dropout" in name or "bernoulli" in name for name in names):
        advice = "dropout is active in evaluation mode; pass training=self.training to it"
        return Finding("dropout", f"{message}: {advice}")
    return Finding("randomized", f"{message}; attack the model with the suite rand, or remove the random numbers")


@torch.no_grad()
def _rounding(model: nn.Module, x: Tensor) -> Iterator[Finding]:
    """Report a model whose logits do not change at all if all pixels change slightly, in either direction."""
    base = x + OFFSET
    logits = model(base)
    # Logits that have only a few values are saturated or constant, which is another defect.  Those of a model that
    # computes with half precision do not show tiny changes.
    varied = len(torch.unique(logits)) > len(logits)
    half = any(torch.equal(logits.to(dtype).to(logits.dtype), logits) for dtype in (torch.bfloat16, torch.float16))
    if varied and not half and all(torch.equal(model(base + step), logits) for step in (-FLAT_STEP, FLAT_STEP)):
        message = "the model rounds its inputs: tiny changes of all pixels do not change its logits"
        yield Finding("rounding", f"{message}; gradient attacks are unreliable, so rely on Square and RayS")


@torch.no_grad()
def _special_inputs(model: nn.Module, x: Tensor, bounds: Bounds) -> Iterator[Finding]:
    low, high = bounds
    for name, value in (("black", low), ("gray", (low + high) / 2), ("white", high)):
        if not model(torch.full_like(x[:1], value)).isfinite().all():
            yield Finding("NaN", f"the logits are NaN or infinite for a {name} image")
            return


def _gradient_is_finite(model: nn.Module, x: Tensor) -> list[Finding]:
    gradient = _gradient(model, x, torch.ones(1, device=x.device))
    wrong = int((~gradient.flatten(1).isfinite().all(1)).sum())
    return [Finding("NaN", f"the gradient is NaN or infinite at {wrong} of {len(x)} points")] if wrong else []


def _gradients(model: nn.Module, x: Tensor) -> list[Finding]:
    """Compare gradients with differences of the logits, which hooks and custom backward formulas do not affect."""
    model, x = _in_double(model, x[:: max(len(x) // COMPARED, 1)][:COMPARED])
    errors = _gradient_errors(model, x, STEPS[x.dtype])
    wrong = errors[errors > WRONG[x.dtype]]
    if len(wrong) <= max(MANY * len(errors), 1):
        return []
    message = f"the gradient differs from finite differences at {len(wrong)} of {len(x)} points (typically by"
    message += f" {100 * float(wrong.median()):.0f} %): is it clipped, scaled or detached? Rely on Square and RayS;"
    return [Finding("gradients", f"{message} a model stored by atoll adopt has no hooks and no custom gradients")]


@torch.no_grad()
def _in_double(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """A copy of the model in float64, in which differences are accurate; the model itself if it has no such copy."""
    x = _generic(x)
    try:
        double = copy.deepcopy(model).double()
        logits, exact = model(x.float()).double(), double(x.double())
    except Exception:  # a model may have operations that need float32, or may not be copied
        return model, x.float()
    close = exact.dtype == torch.float64 and float((logits - exact).abs().max()) <= 0.01 * _spread(exact)
    return (double, x.double()) if close else (model, x.float())


def _generic(x: Tensor) -> Tensor:
    """Points close to these, but away from bounds and equal pixels, where many networks have a kink."""
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return 0.1 + 0.75 * x.double() + 0.05 * noise.to(x.device) if x.dim() == 4 else x.double()


def _gradient_errors(model: nn.Module, x: Tensor, steps: Sequence[float]) -> Tensor:
    """The relative errors of the gradients at the points where the model is smooth.

    Directions in which differences over several steps differ are left out, because the function has a kink there, and
    those in which both the gradient and the difference are smaller than rounding errors.
    """
    draw = torch.Generator().manual_seed(0)

    def signs(*shape: int) -> Tensor:
        return (2.0 * torch.randint(0, 2, shape, generator=draw) - 1).to(x)

    with torch.no_grad():
        logits = model(x)
    weights = signs(*logits.shape)
    noise = 100 * torch.finfo(x.dtype).eps * float(logits.abs().max()) / steps[0]
    gradient = _gradient(model, x, weights)
    slopes, differences, steady = [], [], []
    for _ in range(DIRECTIONS):
        direction = signs(*x.shape)
        over_steps = torch.stack([_difference(model, x, weights, direction, step) for step in steps])
        slopes.append((gradient * direction).flatten(1).sum(1))
        differences.append(over_steps[0])
        spread, largest = over_steps.amax(0) - over_steps.amin(0), over_steps.abs().amax(0)
        steady.append((spread <= STEADY * largest) & (torch.maximum(largest, slopes[-1].abs()) > noise))
    slope, difference, is_steady = map(torch.stack, (slopes, differences, steady))
    error = ((slope - difference).square() * is_steady).sum(0).sqrt()
    size = (torch.maximum(slope.abs(), difference.abs()).square() * is_steady).sum(0).sqrt()
    return torch.where(size > 0, error / size, 0.0)[is_steady.any(0)]


def _gradient(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    """Gradient of the weighted logits of every point."""
    candidates = x.clone().requires_grad_()
    with torch.enable_grad():
        value = (weights * model(candidates)).sum()
    return torch.autograd.grad(value, candidates)[0]


@torch.no_grad()
def _difference(model: nn.Module, x: Tensor, weights: Tensor, direction: Tensor, step: float) -> Tensor:
    """Central difference of the weighted logits of every point."""
    above, below = (model(x + sign * step * direction) for sign in (1, -1))
    difference: Tensor = ((above - below) * weights).sum(1) / (2 * step)
    return difference


def _spread(logits: Tensor) -> float:
    return float(logits.max() - logits.min()) + 1e-12
