r"""Checks of curvature: second derivatives are compared with differences of gradients, in float64.

Along a random direction v of the weights,

.. math:: H v \approx \frac{\nabla R(\theta + h v) - \nabla R(\theta)}{h}.

The step h is so small that the activation pattern of a ReLU network rarely changes; if it does, a smaller step is
tried.  The losses of the points are added with random signs, so that neither errors nor gradients cancel.  Gradients in
the precision of the model must also agree with those in float64.

Checks of all parameters together use ``BATCH`` points, or one in ``SHARE`` if that is more; for small networks,
``SMALL_BATCH``.  The probability to miss an error that affects a share s of the points is :math:`(1 - s)^m` for m
points.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atoll.curvature.ggn import all_logits, logit_hessian
from atoll.curvature.risk import EmpiricalRisk, Vector, derivative
from atoll.derivatives import call_with, elementary_operations
from atoll.losses.base import Outputs
from atoll.modules import preserve_buffers
from atoll.rng import generator

POINTS = 4  # number of points for checks with a gradient per parameter
CANDIDATES = 16  # number of points from which they are chosen
BATCH, SHARE, SMALL_BATCH = 16, 32, 128
_SMALL = 100_000  # number of parameters up to which a network is small and its check takes hardly any time
STEPS = (1e-6, 1e-8, 1e-9)  # step sizes in units of the weights
TOLERANCE = 1e-3
_NOISE = 100 * torch.finfo(torch.float64).eps
_ROUNDING = 1e4


@dataclass(frozen=True)
class Check:
    """The result of a check: whether derivatives agree with finite differences.

    Args:
        passed: the result; None if the check could not be made or decided.
        message: one sentence about the result.
    """

    passed: bool | None
    message: str


def check_gauss_newton(risk: EmpiricalRisk, *, seed: object = 0) -> Check:
    r"""Check that the Gauss-Newton block of every parameter equals that of the Hessian.

    Compares :math:`J^T \Phi\, J v` with differences of gradients.  Costs one gradient per parameter, whose forward pass
    also gives J v, and one more backward pass.  A separate check at more points, for all parameters together, verifies
    that J is the derivative of the logits.

    >>> from atoll.losses import Standard
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    >>> check_gauss_newton(EmpiricalRisk(net, Standard(), torch.rand(9, 2), torch.arange(9) % 3)).passed
    True
    >>> net[1] = torch.nn.Tanh().eval()
    >>> print(check_gauss_newton(EmpiricalRisk(net, Standard(), torch.rand(9, 2), torch.arange(9) % 3)).message)
    Gauss-Newton differs from differences of gradients for 0.weight
    """
    parts = [(_gauss_newton_cases, _few(risk)), *((_joint_cases, index) for index in _batches(risk))]
    return _check("Gauss-Newton", parts, risk, seed)


def check_linearity(risk: EmpiricalRisk, *, seed: object = 0) -> Check:
    """Check that Gauss-Newton gives the traces of the Hessian, by the operations of the graph and by differences.

    >>> from atoll.losses import Standard
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)).eval()
    >>> print(check_linearity(EmpiricalRisk(net, Standard(), torch.rand(9, 2), torch.arange(9) % 3)).message)
    gelu is not piecewise linear in 0.weight (module 1, GELU)
    """
    if reasons := [risk.nonlinear[name] for name in risk.names if name in risk.nonlinear]:
        return Check(False, reasons[0])
    check = check_gauss_newton(risk, seed=seed)
    return Check(check.passed is not False, f"the model is piecewise linear in each parameter, and {check.message}")


def check_hessian(risk: EmpiricalRisk, *, seed: object = 0) -> Check:
    """Check that double backward passes give the Hessian, for all parameters at once; costs three gradients.

    >>> from atoll.losses import Standard
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).eval()
    >>> check_hessian(EmpiricalRisk(net, Standard(), torch.rand(9, 2), torch.arange(9) % 3)).passed
    True
    """
    return _check("the double backward pass", [(_hessian_cases, index) for index in _batches(risk)], risk, seed)


def check_gradient(risk: EmpiricalRisk, *, seed: object = 0) -> Check:
    """Check that the gradient is the derivative of the loss, and not an estimate such as straight-through.

    >>> from atoll.losses import Standard
    >>> net = torch.nn.Linear(2, 3).eval()
    >>> check_gradient(EmpiricalRisk(net, Standard(), torch.rand(9, 2), torch.arange(9) % 3)).passed
    True
    """
    parts = [(_gradient_cases, _few(risk)), *((_joint_cases, index) for index in _batches(risk))]
    return _check("the gradient", parts, risk, seed, own_precision=False)


@dataclass(frozen=True)
class Deviation:
    """The difference of a derivative and finite differences, their size, and the size of rounding errors."""

    value: Tensor
    size: float
    noise: float

    def agrees(self, other: Tensor | float = 0.0) -> bool:
        return bool((self.value - other).norm() <= TOLERANCE * self.size + self.noise)


@dataclass(frozen=True)
class Case:
    """The deviation of the derivative for one parameter, or jointly for all, as a function of the step."""

    name: str
    deviation: Callable[[float], Deviation]
    joint: bool = False

    def judge(self) -> tuple[bool | None, Deviation]:
        """Return whether the derivative is correct (None if differences do not converge), and the last deviation."""
        deviations: list[Deviation] = []
        for step in STEPS:
            deviations.append(self.deviation(step))
            if deviations[-1].agrees():
                return True, deviations[-1]
        converged = any(b.agrees(a.value) for a, b in itertools.pairwise(deviations))
        return (False if converged else None), deviations[-1]


_Cases = Callable[["DoubleRisk", object], Iterator[Case]]


def _check(
    what: str, parts: Sequence[tuple[_Cases, Tensor]], risk: EmpiricalRisk, seed: object, *, own_precision: bool = True
) -> Check:
    doubt = ""
    with preserve_buffers(risk.model):
        for cases, index in parts:
            try:
                double = DoubleRisk(risk, index, seed=seed)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                return Check(None, f"{what} could not be checked: {first_line(error)}")
            if own_precision and (fault := double.lost_digits()):
                return Check(False, f"{what} is inaccurate: {fault}")
            try:
                verdicts = [(case, *case.judge()) for case in cases(double, seed)]
            except (RuntimeError, NotImplementedError) as error:
                return Check(False, f"{what} fails: {first_line(error)}")
            if wrong := [case.name for case, verdict, _ in verdicts if verdict is False]:
                return Check(False, f"{what} differs from differences{_OF[what]} for {wrong[0]}")
            if undecided := [case.name for case, verdict, _ in verdicts if verdict is None]:
                doubt = doubt or f"differences{_OF[what]} do not converge for {undecided[0]}"
            elif _below_noise([(case.joint, deviation) for case, _, deviation in verdicts]):
                doubt = doubt or "derivatives are not larger than rounding errors"
    if doubt:
        return Check(None, f"{what} could not be checked: {doubt}")
    return Check(True, f"{what} agrees with differences{_OF[what]}")


def _below_noise(deviations: Sequence[tuple[bool, Deviation]]) -> bool:
    """Whether a relevant derivative is not larger than rounding errors, so that agreement means nothing.

    The derivative for a parameter is not relevant if it is small compared with those for other parameters.
    """
    own = [deviation for joint, deviation in deviations if not joint]
    least = TOLERANCE * max((deviation.size for deviation in own), default=0.0)
    if own and not least:  # a flat loss
        return False
    sizes = [(d, d.size if joint else max(d.size, least)) for joint, d in deviations]
    return any(d.noise > 0.1 * size for d, size in sizes)


_OF = {"Gauss-Newton": " of gradients", "the double backward pass": " of gradients", "the gradient": " of the loss"}


def _few(risk: EmpiricalRisk) -> Tensor:
    """Return points for checks with a gradient per parameter, fewer for large networks."""
    count = POINTS if risk.size <= _SMALL else max(1, min(POINTS, len(risk) // (SHARE * len(risk.names))))
    return _informative(risk, CANDIDATES)[:count]


def _batches(risk: EmpiricalRisk) -> Sequence[Tensor]:
    """Return points for checks of all parameters together, in batches."""
    count = SMALL_BATCH if risk.size <= _SMALL else max(BATCH, len(risk) // SHARE)
    return torch.split(_informative(risk, count), risk.micro_batch)


def _informative(risk: EmpiricalRisk, count: int) -> Tensor:
    """Return points from the whole data set, those with the largest second derivatives in logit space first.

    Saturated points are omitted, because they do not contribute to the curvature and would pass any check.
    """
    size = min(count, len(risk))
    index = torch.arange(size) * len(risk) // size
    sizes = []
    with preserve_buffers(risk.model), torch.no_grad():
        for part in torch.split(index, risk.micro_batch):
            out, y = risk.outputs(part)
            sizes.append(logit_hessian(risk.loss, out, y).flatten(1).norm(dim=1).nan_to_num(0, 0, 0).cpu())
    order = torch.cat(sizes).sort(descending=True)
    return index[order.indices[order.values >= TOLERANCE * order.values[0]]]


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class DoubleRisk:
    """The summed loss of some points as a function of weights in float64; the model itself does not change.

    A clean prediction that the loss holds constant is not constant here, because differences cannot hold it constant.

    Args:
        risk: the loss as a function of the weights.
        index: indices of the points.
        seed: seed of random signs for the losses in the sum, and of directions; None for a plain sum.
    """

    def __init__(self, risk: EmpiricalRisk, index: Tensor, *, seed: object = None) -> None:
        self.risk, self.index, self.value = risk, index, risk.loss.with_clean_stopped(False)
        ones = torch.ones(len(index), dtype=torch.float64, device=risk.device)
        self.signs = ones if seed is None else _random_signs(ones, generator(seed, "signs", device=risk.device))
        self.x = risk.x[index].to(risk.device).double() if risk.loss.uses_clean else None
        self.x_adv = None if risk.x_adv is None else risk.x_adv[index].to(risk.device).double()
        self.y = risk.y[index].to(risk.device)
        self.frozen = {name: _double(t) for name, t in [*risk.model.named_parameters(), *risk.model.named_buffers()]}
        self.weights = [p.detach().double().requires_grad_() for p in risk.parameters]
        with _StaysDouble():  # type: ignore[no-untyped-call]
            self.losses, self.gradient, self.logits = self.at(self.weights)
        self.slope = self._logit_slope()
        # A difference of probabilities and labels has absolute rounding errors, which matter at saturated points.
        self.scale = float(torch.stack([g.norm() for g in self.gradient]).norm()) * (1 + 0.01 / self.slope)

    def outputs(self, weights: Sequence[Tensor]) -> Outputs:
        tensors = {**self.frozen, **dict(zip(self.risk.names, weights, strict=True))}
        logits, adv_logits = (
            None if x is None else call_with(self.risk.model, tensors, x) for x in (self.x, self.x_adv)
        )
        return Outputs(logits=logits, adv_logits=adv_logits)

    def values(self, out: Outputs) -> Tensor:
        """Return the loss of each point, with its sign."""
        losses = torch.stack(list(self.value.values(out, self.y).values())).sum(0)
        return losses * self.signs.to(losses.dtype)

    def at(self, weights: Sequence[Tensor]) -> tuple[Tensor, Vector, Tensor]:
        """Return signed losses, the gradient of their sum, and logits at the given weights."""
        with torch.enable_grad():
            out = self.outputs(weights)
            losses = self.values(out)
            gradient = derivative([losses.sum()], weights)
        return losses.detach(), gradient, all_logits(out).detach()

    def moved(self, direction: Sequence[Tensor | None], step: float) -> tuple[Tensor, Vector, Tensor]:
        """Return the same as ``at`` for weights moved along a direction; None does not move a parameter."""
        return self.at(self._moved(direction, step))

    @torch.no_grad()
    def losses_moved(self, direction: Sequence[Tensor | None], step: float) -> Tensor:
        """Return signed losses at weights moved along a direction."""
        return self.values(self.outputs(self._moved(direction, step)))

    def _moved(self, direction: Sequence[Tensor | None], step: float) -> Vector:
        pairs = zip(self.weights, direction, strict=True)
        return [w if v is None else (w + step * v).detach().requires_grad_() for w, v in pairs]

    def direction(self, seed: object) -> Vector:
        """Return a direction of random signs, scaled to the size of the weights of each parameter."""
        draw = generator(seed, "check", device=self.risk.device)
        sizes = [w.detach().square().mean().sqrt().clamp_min(1e-3) for w in self.weights]
        return [_random_signs(w.detach(), draw) * size for w, size in zip(self.weights, sizes, strict=True)]

    def noise(self, step: float) -> float:
        """Return the size of rounding errors of a difference of gradients, or of losses along a unit direction."""
        return _NOISE * (self.scale + float(self.losses.abs().sum())) / step

    def _logit_slope(self) -> float:
        """Return the size of the derivatives of the losses with respect to the logits."""
        given = [x is not None for x in (self.x, self.x_adv)]
        leaves = [part.detach().requires_grad_() for part in self.logits.chunk(sum(given), 1)]
        clean, adversarial = leaves[0] if given[0] else None, leaves[-1] if given[1] else None
        with torch.enable_grad():
            losses = self.values(Outputs(logits=clean, adv_logits=adversarial))
        slopes = derivative([losses.sum()], leaves)
        return max(float(torch.cat(slopes, 1).square().mean().sqrt()), 1e-30)

    def lost_digits(self) -> str:
        """Return where the gradient in the model's precision is less accurate than rounding explains, or "".

        The allowed error is ``_ROUNDING`` rounding errors of the gradient with respect to the weights, and 100 of that
        with respect to the logits, which is a difference of probabilities and labels.
        """
        dtype = self.risk.parameters[0].dtype
        if dtype == torch.float64:
            return ""
        with torch.enable_grad():
            out, _ = self.risk.outputs(self.index)
            gradient = derivative([self.values(out).sum()], self.risk.parameters)
        allowed = torch.finfo(dtype).eps * (_ROUNDING + 100 / self.slope)
        sizes = [float(g.norm()) for g in self.gradient]
        for name, own, double, size in zip(self.risk.names, gradient, self.gradient, sizes, strict=True):
            error = float((own.double() - double).norm()) / max(size, 0.01 * max(sizes), 1e-30)
            if error > allowed:
                kind = str(dtype).removeprefix("torch.")
                return f"the error of the gradient for {name} is {100 * error:.2g} % in {kind}"
        return ""


class _StaysDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises a TypeError if a model casts float64 to a lower precision, because differences would only be rounding."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.float64 in _dtypes((args, kwargs)) and _dtypes(result) & {
            torch.float32,
            torch.float16,
            torch.bfloat16,
        }:
            raise TypeError("the model does not compute in float64")
        return result


def _random_signs(like: Tensor, draw: torch.Generator) -> Tensor:
    return torch.empty_like(like).bernoulli_(0.5, generator=draw).mul_(2).sub_(1)


def _dtypes(tree: Any) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor.detach()


def _gauss_newton_cases(double: DoubleRisk, seed: object) -> Iterator[Case]:
    risk = double.risk
    with torch.enable_grad():
        out = double.outputs(double.weights)
    base, phi = all_logits(out), logit_hessian(double.value, out, double.y) * double.signs[:, None, None]
    for k, (name, v) in enumerate(zip(risk.names, double.direction(seed), strict=True)):

        def deviation(step: float, k: int = k, v: Tensor = v) -> Deviation:
            _, gradient, logits = double.moved(_only(double, k, v), step)
            slope = (logits - double.logits) / step
            u = torch.einsum("nij,nj->ni", phi, slope)
            (product,) = derivative([base], [double.weights[k]], [u], retain_graph=True)
            hessian = (gradient[k] - double.gradient[k]) / step
            # If J is not the derivative of the logits (straight-through), the gradient has the same error.
            along = ((product * v).sum() - (u * slope).sum()) / v.norm()
            size = float(torch.maximum(product.norm(), hessian.norm()).maximum((u * slope).sum().abs() / v.norm()))
            return Deviation(torch.cat([(product - hessian).flatten(), along[None]]), size, double.noise(step))

        yield Case(name, deviation)
    yield from _joint_cases(double, seed)


def _hessian_cases(double: DoubleRisk, seed: object) -> Iterator[Case]:
    v = double.direction(seed)
    with torch.enable_grad(), elementary_operations():
        out = double.outputs(double.weights)
        product = derivative(
            derivative([double.values(out).sum()], double.weights, create_graph=True), double.weights, v
        )
    gradient_after = functools.cache(lambda step: double.moved(v, step)[1])  # the same for all parameters

    for k, name in enumerate(double.risk.names):

        def deviation(step: float, k: int = k) -> Deviation:
            difference = (gradient_after(step)[k] - double.gradient[k]) / step
            size = float(torch.maximum(product[k].norm(), difference.norm()))
            return Deviation(product[k] - difference, size, double.noise(step))

        yield Case(name, deviation)
    yield from _joint_cases(double, seed)


def _gradient_cases(double: DoubleRisk, seed: object) -> Iterator[Case]:
    """Check the derivative of the loss along a direction of each parameter."""
    for k, (name, v) in enumerate(zip(double.risk.names, double.direction(seed), strict=True)):
        yield Case(name, functools.partial(_slope_deviation, double, _only(double, k, v)))


def _joint_cases(double: DoubleRisk, seed: object) -> Iterator[Case]:
    """Check the derivative of the loss along a direction of all parameters together."""
    yield Case("all parameters", functools.partial(_slope_deviation, double, double.direction(seed)), joint=True)


def _slope_deviation(double: DoubleRisk, direction: Sequence[Tensor | None], step: float) -> Deviation:
    step *= 100  # losses are less steep than gradients
    difference = (double.losses_moved(direction, step) - double.losses).sum() / step
    moving = [(g, v) for g, v in zip(double.gradient, direction, strict=True) if v is not None]
    claimed = torch.stack([(g * v).sum() for g, v in moving]).sum()
    length = float(torch.stack([v.norm() for _, v in moving]).norm())
    size = float(torch.maximum(claimed.abs(), difference.abs()))
    return Deviation((claimed - difference)[None] / length, size / length, double.noise(step))


def _only(double: DoubleRisk, k: int, v: Tensor) -> list[Tensor | None]:
    """Return a direction that moves only one parameter."""
    return [v if i == k else None for i in range(len(double.weights))]
