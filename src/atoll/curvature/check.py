r"""Check curvature where it is made: second derivatives against differences of gradients, in float64, at a few points.

Along a random direction v of the weights,

.. math:: H v \approx \frac{\nabla R(\theta + h v) - \nabla R(\theta)}{h}.

The step h is so small that a ReLU net rarely changes its activation pattern; if it does, a smaller step is tried.
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
from atoll.rng import generator

POINTS = 4
CANDIDATES = 16  # points to choose from
_SMALL = 100_000  # parameters: the check of a smaller net takes no time to speak of
STEPS = (1e-6, 1e-8, 1e-9)  # in units of the weights
TOLERANCE = 1e-3
_NOISE = 100 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Check:
    """Whether second derivatives agree with differences of gradients.

    Args:
        passed: None if the check could not be made or decided.
        message: one sentence about it.
    """

    passed: bool | None
    message: str


def check_gauss_newton(risk: EmpiricalRisk, *, seed: object = 0) -> Check:
    r"""Whether every parameter's Gauss-Newton block is the Hessian's: :math:`J^T \Phi\, J v` against differences.

    One gradient per parameter, whose forward pass also gives J v, and one more backward pass.

    >>> from atoll.losses import Standard
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    >>> check_gauss_newton(EmpiricalRisk(net, Standard(), torch.rand(9, 2), torch.arange(9) % 3)).passed
    True
    >>> net[1] = torch.nn.Tanh().eval()
    >>> print(check_gauss_newton(EmpiricalRisk(net, Standard(), torch.rand(9, 2), torch.arange(9) % 3)).message)
    Gauss-Newton differs from differences of gradients at 0.weight
    """
    return _check("Gauss-Newton", _gauss_newton_cases, risk, seed, points=_points_per_parameter(risk))


def check_linearity(risk: EmpiricalRisk, *, seed: object = 0) -> Check:
    """Whether Gauss-Newton gives the traces of the Hessian: by the operations of the graph and by differences.

    >>> from atoll.losses import Standard
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)).eval()
    >>> print(check_linearity(EmpiricalRisk(net, Standard(), torch.rand(9, 2), torch.arange(9) % 3)).message)
    gelu is not piecewise linear in 0.weight (module 1, GELU)
    """
    if reasons := [risk.nonlinear[name] for name in risk.names if name in risk.nonlinear]:
        return Check(False, reasons[0])
    check = check_gauss_newton(risk, seed=seed)
    return Check(check.passed is not False, f"the net is piecewise linear in each parameter, and {check.message}")


def check_hessian(risk: EmpiricalRisk, *, seed: object = 0) -> Check:
    """Whether double backward passes give the Hessian, for all parameters at once: three gradients.

    >>> from atoll.losses import Standard
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).eval()
    >>> check_hessian(EmpiricalRisk(net, Standard(), torch.rand(9, 2), torch.arange(9) % 3)).passed
    True
    """
    return _check("the double backward pass", _hessian_cases, risk, seed, points=POINTS)


def check_gradient(risk: EmpiricalRisk, *, seed: object = 0) -> Check:
    """Whether the gradient is the derivative of the loss, and not an estimate such as straight-through.

    >>> from atoll.losses import Standard
    >>> net = torch.nn.Linear(2, 3).eval()
    >>> check_gradient(EmpiricalRisk(net, Standard(), torch.rand(9, 2), torch.arange(9) % 3)).passed
    True
    """
    return _check("the gradient", _gradient_cases, risk, seed, points=_points_per_parameter(risk))


@dataclass(frozen=True)
class _Deviation:
    """How far a derivative is from differences, how large both are, and how large rounding errors can be."""

    value: Tensor
    size: float
    noise: float

    def agrees(self, other: Tensor | float = 0.0) -> bool:
        return bool((self.value - other).norm() <= TOLERANCE * self.size + self.noise)


@dataclass(frozen=True)
class _Case:
    """The deviation of a parameter's derivative, as a function of the step."""

    name: str
    deviation: Callable[[float], _Deviation]

    def judge(self) -> tuple[bool | None, _Deviation]:
        """Whether the derivative is right, None if differences do not settle; and the deviation that decided."""
        tried: list[_Deviation] = []
        for step in STEPS:
            tried.append(self.deviation(step))
            if tried[-1].agrees():
                return True, tried[-1]
        settled = any(b.agrees(a.value) for a, b in itertools.pairwise(tried))
        return (False if settled else None), tried[-1]


def _check(
    what: str, cases: Callable[[DoubleRisk, object], Iterator[_Case]], risk: EmpiricalRisk, seed: object, points: int
) -> Check:
    try:
        double = DoubleRisk(risk, _informative(risk, points))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return Check(None, f"{what} could not be checked: {_first_line(error)}")
    try:
        verdicts = {case.name: case.judge() for case in cases(double, seed)}
    except (RuntimeError, NotImplementedError) as error:
        return Check(False, f"{what} fails: {_first_line(error)}")
    if wrong := [name for name, (verdict, _) in verdicts.items() if verdict is False]:
        return Check(False, f"{what} differs from differences{_OF[what]} at {wrong[0]}")
    if unsettled := [name for name, (verdict, _) in verdicts.items() if verdict is None]:
        return Check(None, f"{what} could not be checked: differences{_OF[what]} do not settle at {unsettled[0]}")
    deviations = [deviation for _, deviation in verdicts.values()]
    negligible = TOLERANCE * max(deviation.size for deviation in deviations)  # too small to matter in a sum
    if negligible and any(d.noise > 0.1 * max(d.size, negligible) for d in deviations):
        return Check(None, f"{what} could not be checked: derivatives are not larger than rounding errors")
    return Check(True, f"{what} agrees with differences{_OF[what]}")


_OF = {"Gauss-Newton": " of gradients", "the double backward pass": " of gradients", "the gradient": " of the loss"}


def _points_per_parameter(risk: EmpiricalRisk) -> int:
    """Points of a check that takes a gradient per parameter: fewer for large nets, a fraction of the measurement."""
    return POINTS if risk.size <= _SMALL else max(1, min(POINTS, len(risk) // (8 * len(risk.names))))


def _informative(risk: EmpiricalRisk, count: int) -> Tensor:
    """The points with the largest second derivatives in logit space: at a saturated point everything agrees."""
    size = min(CANDIDATES, len(risk))
    index = torch.arange(size) * (len(risk) // size)
    with torch.no_grad():
        out, y = risk.outputs(index)
    sizes = logit_hessian(risk.loss, out, y).flatten(1).norm(dim=1).nan_to_num(0, 0, 0)
    return index[sizes.argsort(descending=True)[:count].cpu()]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class DoubleRisk:
    """The summed loss of some points as a function of weights in float64; the model itself stays as it is.

    A clean prediction that the loss holds constant moves here, because differences cannot hold it.
    """

    def __init__(self, risk: EmpiricalRisk, index: Tensor) -> None:
        self.risk, self.value = risk, risk.loss.with_clean_stopped(False)
        self.x = risk.x[index].to(risk.device).double() if risk.loss.uses_clean else None
        self.x_adv = None if risk.x_adv is None else risk.x_adv[index].to(risk.device).double()
        self.y = risk.y[index].to(risk.device)
        self.frozen = {name: _double(t) for name, t in [*risk.model.named_parameters(), *risk.model.named_buffers()]}
        self.weights = [p.detach().double().requires_grad_() for p in risk.parameters]
        with _StaysDouble():  # type: ignore[no-untyped-call]
            self.loss, self.gradient, self.logits = self.at(self.weights)
        self.scale = float(torch.stack([g.norm() for g in self.gradient]).norm())

    def outputs(self, weights: Sequence[Tensor]) -> Outputs:
        tensors = {**self.frozen, **dict(zip(self.risk.names, weights, strict=True))}
        logits, adv_logits = (
            None if x is None else call_with(self.risk.model, tensors, x) for x in (self.x, self.x_adv)
        )
        return Outputs(logits=logits, adv_logits=adv_logits)

    def at(self, weights: Sequence[Tensor]) -> tuple[Tensor, Vector, Tensor]:
        """Loss, gradient and logits at some weights."""
        with torch.enable_grad():
            out = self.outputs(weights)
            total = torch.stack(list(self.value.values(out, self.y).values())).sum()
            gradient = derivative([total], weights)
        return total.detach(), gradient, all_logits(out).detach()

    def moved(self, direction: Sequence[Tensor | None], step: float) -> tuple[Tensor, Vector, Tensor]:
        """The same at weights that were moved; None leaves a parameter where it is."""
        pairs = zip(self.weights, direction, strict=True)
        return self.at([w if v is None else (w + step * v).detach().requires_grad_() for w, v in pairs])

    def direction(self, seed: object) -> Vector:
        """Random signs, as large as the weights of their parameter."""
        draw = generator(seed, "check", device=self.risk.device)
        signs = [torch.empty_like(w).bernoulli_(0.5, generator=draw).mul_(2).sub_(1) for w in self.weights]
        return [
            s.detach() * w.detach().square().mean().sqrt().clamp_min(1e-3)
            for s, w in zip(signs, self.weights, strict=True)
        ]

    def noise(self, step: float, size: float = 1.0) -> float:
        """Rounding errors of a difference of gradients, or of losses along a direction of some size."""
        return _NOISE * (self.scale + float(self.loss.abs())) * size / step


class _StaysDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses models that cast float64 to a lower precision inside: differences would be rounding errors."""

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


def _dtypes(tree: Any) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor.detach()


def _gauss_newton_cases(double: DoubleRisk, seed: object) -> Iterator[_Case]:
    risk = double.risk
    with torch.enable_grad():
        out = double.outputs(double.weights)
    base, phi = all_logits(out), logit_hessian(double.value, out, double.y)
    for k, (name, v) in enumerate(zip(risk.names, double.direction(seed), strict=True)):

        def deviation(step: float, k: int = k, v: Tensor = v) -> _Deviation:
            _, gradient, logits = double.moved(_only(double, k, v), step)
            slope = (logits - double.logits) / step
            u = torch.einsum("nij,nj->ni", phi, slope)
            (product,) = derivative([base], [double.weights[k]], [u], retain_graph=True)
            hessian = (gradient[k] - double.gradient[k]) / step
            # If J is not the derivative of the logits (straight-through), the gradient is wrong in the same way.
            along = ((product * v).sum() - (u * slope).sum()) / v.norm()
            size = float(torch.maximum(product.norm(), hessian.norm()).maximum((u * slope).sum().abs() / v.norm()))
            return _Deviation(torch.cat([(product - hessian).flatten(), along[None]]), size, double.noise(step))

        yield _Case(name, deviation)
    yield from _gradient_cases(double, seed, together=True)


def _hessian_cases(double: DoubleRisk, seed: object) -> Iterator[_Case]:
    v = double.direction(seed)
    with torch.enable_grad(), elementary_operations():
        out = double.outputs(double.weights)
        total = torch.stack(list(double.value.values(out, double.y).values())).sum()
        product = derivative(derivative([total], double.weights, create_graph=True), double.weights, v)
    gradient_after = functools.cache(lambda step: double.moved(v, step)[1])  # the same for all parameters

    for k, name in enumerate(double.risk.names):

        def deviation(step: float, k: int = k) -> _Deviation:
            difference = (gradient_after(step)[k] - double.gradient[k]) / step
            size = float(torch.maximum(product[k].norm(), difference.norm()))
            return _Deviation(product[k] - difference, size, double.noise(step))

        yield _Case(name, deviation)
    yield from _gradient_cases(double, seed, together=True)


def _gradient_cases(double: DoubleRisk, seed: object, together: bool = False) -> Iterator[_Case]:
    """The derivative of the loss along a direction of each parameter, or of all of them together."""
    v = double.direction(seed)
    moves = [("all parameters", v, list(range(len(v))))] if together else [
        (name, _only(double, k, v[k]), [k]) for k, name in enumerate(double.risk.names)
    ]  # fmt: skip
    for name, move, rows in moves:

        def deviation(step: float, move: Sequence[Tensor | None] = move, rows: list[int] = rows) -> _Deviation:
            step *= 100  # losses are less steep than gradients
            difference = (double.moved(move, step)[0] - double.loss) / step
            claimed = torch.stack([(double.gradient[k] * v[k]).sum() for k in rows]).sum()
            length = float(torch.stack([v[k].norm() for k in rows]).norm())
            size = float(torch.maximum(claimed.abs(), difference.abs()))
            return _Deviation((claimed - difference)[None] / length, size / length, double.noise(step))

        yield _Case(name, deviation)


def _only(double: DoubleRisk, k: int, v: Tensor) -> list[Tensor | None]:
    """A direction of one parameter."""
    return [v if i == k else None for i in range(len(double.weights))]
