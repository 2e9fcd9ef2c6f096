"""Trace-of-Hessian regularization (Wang et al., "Improving Robust Generalization by Direct PAC-Bayesian Bound
Minimization")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from atoll.curvature.check import check_gauss_newton
from atoll.curvature.risk import EmpiricalRisk
from atoll.data.base import to_float
from atoll.derivatives import call_with, elementary_operations
from atoll.errors import CaptureError, InputError, check_range
from atoll.graph.linearity import nonlinear_parameters
from atoll.losses.base import LogitCurvature, Loss, Outputs, hessian_blocks
from atoll.losses.robust import Standard
from atoll.models.base import Classifier, is_linear
from atoll.modules import evaluation_mode
from atoll.training.methods.base import METHODS, Method, Step

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer

_POINTS = 64  # number of points for the check of the model at setup
Ramp = Literal["constant", "linear", "multistep"]


def ramp(kind: Ramp, progress: float) -> float:
    """Return the factor on lambda at ``progress`` in [0, 1] of the run.

    >>> [ramp("multistep", p) for p in (0.0, 0.1, 0.5)], ramp("linear", 0.25)
    ([0.01, 0.1, 1.0], 0.25)
    """
    if kind == "linear":
        return progress
    if kind == "multistep":
        return 0.01 if progress < 0.1 else 0.1 if progress < 0.5 else 1.0
    return 1.0


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class TrH(Method):
    r"""Trace-of-Hessian regularization: adds the trace of the Hessian of the loss to the loss.

    The regularizer is :math:`\lambda\,\mathrm{Tr}(H) + \gamma \|\theta\|^2`.  ``top``: the trace with respect to the
    weight of a linear head, from the curvature of the loss in logit space,

    .. math:: \sum_k \|z\|^2 \frac{\partial^2 l}{\partial g_k^2} + 2 (z \cdot z') \frac{\partial^2 l}{\partial g_k
              \partial g'_k} + \|z'\|^2 \frac{\partial^2 l}{\partial {g'_k}^2},

    differentiated through z, z' and the logits, so that it affects the whole network without an additional pass.  With
    ``bias``, each of the three factors increases by 1.  ``full``: the trace over all parameters, for small networks
    whose logits are piecewise linear in each parameter (ReLU, no batch norm).  Other networks are rejected, based on
    their graph and on differences of gradients.

    By default, the clean prediction is constant in terms that compare it with the adversarial one, as in Eq. 6 and
    section 4.4 of the thesis.  For TRADES, the trace is then :math:`\|z\|^2\, \mathbf{1}^T h + \lambda_t \|z'\|^2\,
    \mathbf{1}^T h'` with :math:`h = p - p^2`, which is never negative, unlike the full trace.  This option affects only
    the trace; ``stop_clean_gradient`` of the loss affects only its value.

    Args:
        lambda_: weight of the trace.
        schedule: schedule of lambda over the run.
        layers: ``top`` or ``full``.
        bias: include the bias of the head in the trace.
        gamma: weight of the squared norm of all parameters.
        stop_clean_gradient: hold the clean prediction constant in the trace.
    """

    lambda_: float = 1e-3
    schedule: Ramp = "constant"
    layers: Literal["top", "full"] = "top"
    bias: bool = False
    gamma: float = 0.0
    stop_clean_gradient: bool = True

    def __post_init__(self) -> None:
        check_range("[0, inf)", lambda_=self.lambda_, gamma=self.gamma)

    def setup(self, trainer: Trainer) -> None:
        model = trainer.model
        if self.layers == "top" and not (isinstance(model, Classifier) and is_linear(model.head)):
            raise InputError(f"TrH: expected a Classifier with a linear head, got {type(model).__name__}")
        if self.layers == "full":
            split = trainer.data.train
            index = torch.arange(min(_POINTS, len(split)))
            _check_linear(model, to_float(split.fetch(index)), split.labels[index])

    def on_loss(self, trainer: Trainer, step: Step) -> None:
        weight = self.lambda_ * ramp(self.schedule, min(1.0, step.epoch / trainer.settings.epochs))
        if not weight:
            return
        loss = trainer.loss.with_clean_stopped(self.stop_clean_gradient)
        if self.layers == "top":
            trace = top_trace(loss.curvature(step.out, step.y), step.out, bias=self.bias)
        else:
            trace = full_trace(trainer.model, loss, step.x, step.x_adv, step.y)
        step.terms["trh"] = weight * trace

    @torch.no_grad()
    def before_step(self, trainer: Trainer, step: Step) -> None:
        if self.gamma:
            for parameter in trainer.model.parameters():
                if parameter.grad is not None:
                    scale = trainer.scaler.get_scale()  # gradients are still scaled in mixed precision
                    parameter.grad.add_(parameter, alpha=2 * self.gamma * scale)


def _check_linear(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Raise an InputError for networks whose full trace would not be exact."""
    for module in model.modules():
        changes = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        draws = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if changes or draws or isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise InputError(
                "TrH: layers=full requires logits that are a fixed function of one example, but the model contains"
                f" {type(module).__name__}"
            )
    try:
        reasons = nonlinear_parameters(model, tuple(x.shape[1:]))
    except CaptureError as error:
        raise InputError(f"TrH: layers=full requires a model that can be captured: {error}") from error
    for name in _trained(model):
        if name in reasons:
            raise InputError(
                f"TrH: layers=full requires logits that are piecewise linear in {name}, but {reasons[name]}"
            )
    _check_modes(model, x.to(next(model.parameters())))
    with evaluation_mode(model):
        check = check_gauss_newton(EmpiricalRisk(model, Standard(), x, y, nonlinear=reasons))
    if not check.passed:
        raise InputError(f"TrH: the trace with layers=full would not be exact: {check.message}")


def _check_modes(model: nn.Module, x: Tensor) -> None:
    """Raise an InputError for networks that differ in training mode from evaluation mode, in which they are checked.

    Also rejects networks whose per-example gradients are wrong in PyTorch (``vmap`` of PReLU in 2.13).
    """
    parameters, few = _trained(model), x[:4]
    with evaluation_mode(model):
        logits = model(x)
        rows = [
            torch.autograd.grad(row.sum(), list(parameters.values()), allow_unused=True, retain_graph=True)
            for row in logits[: len(few)]
        ]
    model.train()  # as in every step
    try:
        _, jacobians = _logits_and_jacobians(model, few)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"TrH: layers=full requires per-example gradients, which PyTorch cannot compute for this model: {reason}"
        ) from error
    if (model(x) - logits).norm() > 1e-3 * (1 + logits.norm()):
        raise InputError("TrH: layers=full requires the same logits in training and evaluation mode")
    for number, gradients in enumerate(rows):
        for name, gradient in zip(parameters, gradients, strict=True):
            mine = jacobians[name][number].sum(0)
            truth = torch.zeros_like(mine) if gradient is None else gradient
            if (mine - truth).norm() > 1e-3 * (1 + truth.norm()):
                raise InputError(
                    f"TrH: layers=full requires per-example gradients, which are wrong in training mode for {name}"
                )


def _logits_and_jacobians(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and their derivatives with respect to each parameter, ``(batch, classes, *parameter shape)``."""

    def logits(weights: dict[str, Tensor], point: Tensor) -> Tensor:
        return call_with(model, weights, point[None])[0]

    with elementary_operations():
        jacobian = torch.func.vmap(torch.func.jacrev(logits), in_dims=(None, 0))
        return call_with(model, {}, x), jacobian(_trained(model), x)


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def top_trace(curvature: LogitCurvature, out: Outputs, *, bias: bool = False) -> Tensor:
    """Return the trace of each example's Hessian with respect to the weight (and bias) of the linear head."""
    z, z_adv, one = out.features, out.adv_features, float(bias)
    total = torch.zeros(())
    if curvature.clean is not None and z is not None:
        total = total + curvature.clean.sum(1) * (z.square().sum(1) + one)
    if curvature.cross is not None and z is not None and z_adv is not None:
        total = total + 2 * curvature.cross.sum(1) * ((z * z_adv).sum(1) + one)
    if curvature.adversarial is not None and z_adv is not None:
        total = total + curvature.adversarial.sum(1) * (z_adv.square().sum(1) + one)
    return total


def full_trace(model: nn.Module, loss: Loss, x: Tensor, x_adv: Tensor | None, y: Tensor) -> Tensor:
    r"""Return the trace of each example's Hessian with respect to all parameters of a piecewise linear network.

    The logits of a ReLU network are piecewise linear in any single weight, so :math:`\partial^2 l / \partial w^2 =
    (\partial g / \partial w)^T \, \nabla^2_g l \; (\partial g / \partial w)`.  The trace needs only per-example
    Jacobians of the logits, which take batch x 2 classes x parameters of memory.

    >>> from atoll.losses import Standard
    >>> model = nn.Linear(1, 2).double()
    >>> x = torch.tensor([[3.0]], dtype=torch.float64)
    >>> p = model(x).softmax(1)
    >>> trace = full_trace(model, Standard(), x, None, torch.tensor([0]))
    >>> torch.allclose(trace, (3.0**2 + 1) * (p - p**2).sum(1))
    True
    """
    inputs = {"clean": x if loss.uses_clean else None, "adversarial": x_adv}
    passes = {name: _logits_and_jacobians(model, points) for name, points in inputs.items() if points is not None}
    g = {name: logits for name, (logits, _) in passes.items()}
    jacobians = {name: jacobian for name, (_, jacobian) in passes.items()}
    blocks = hessian_blocks(loss, Outputs(logits=g.get("clean"), adv_logits=g.get("adversarial")), y)
    total = torch.zeros(())
    for block, left, right, factor in (
        ("clean", "clean", "clean", 1),
        ("cross", "clean", "adversarial", 2),
        ("adversarial", "adversarial", "adversarial", 1),
    ):
        if block in blocks:
            pairs = zip(jacobians[left].values(), jacobians[right].values(), strict=True)
            products = sum(
                (torch.einsum("bkp,blp->bkl", a.flatten(2), b.flatten(2)) for a, b in pairs), torch.zeros(())
            )
            total = total + factor * (blocks[block] * products).sum((1, 2))
    return total
