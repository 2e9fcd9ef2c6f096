"""The mean robust loss over fixed points, as a function of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from atoll.attacks.base import Attack, check_labels, check_logits
from atoll.data.base import in_order
from atoll.derivatives import elementary_operations
from atoll.distributed import all_sum, rank, world_size
from atoll.errors import CaptureError, InputError, check_count
from atoll.graph.linearity import nonlinear_parameters
from atoll.losses.base import Loss, Outputs
from atoll.modules import preserve_buffers, preserve_parameters

Vector = list[Tensor]  # one tensor per parameter

_TOLERANCE = 1e-4  # relative to the largest output; rounding differs less between batch sizes, dropout far more


class EmpiricalRisk:
    r"""The robust loss of a model at fixed points, with its gradient:

    .. math:: R(\theta) = \frac1N \sum_n \ell\big(g_\theta(x_n), g_\theta(x'_n), y_n\big).

    Adversarial inputs are fixed.  Points pass through the model ``micro_batch`` at a time, which limits memory and does
    not change results.  Under torchrun the processes share the work, and all of them get the sums.

    Args:
        model: maps inputs to logits, in evaluation mode.
        loss: loss of the clean and adversarial logits.
        x: clean inputs.
        y: labels.
        x_adv: adversarial inputs, for losses with an attack (see ``EmpiricalRisk.attacked``).
        micro_batch: number of points in one pass.
        nonlinear: the result of ``nonlinear_parameters`` for the model, if it is already known.

    >>> from atoll.losses import Standard
    >>> model = nn.Linear(2, 2, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> risk = EmpiricalRisk(model, Standard(), torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    >>> round(risk.value(), 4), risk.gradient()[0].tolist()
    (0.6931, [[-0.5, 0.0], [0.5, 0.0]])
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        x: Tensor,
        y: Tensor,
        x_adv: Tensor | None = None,
        *,
        micro_batch: int = 32,
        nonlinear: Mapping[str, str] | None = None,
    ) -> None:
        if not len(x) or len(x) != len(y):
            raise InputError(f"labels: expected one per point and at least one point, got {len(y)} for {len(x)} points")
        if (x_adv is None) != (loss.objective is None):
            verb = "does not use" if loss.objective is None else "requires"
            raise InputError(f"x_adv: {type(loss).__name__} {verb} adversarial inputs")
        if x_adv is not None and x_adv.shape != x.shape:
            raise InputError(f"x_adv: expected the shape of x, {tuple(x.shape)}, got {tuple(x_adv.shape)}")
        check_count(1, micro_batch=micro_batch)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise InputError("model: expected at least one parameter that requires a gradient")
        for name, p in named.items():
            if p._backward_hooks:
                raise InputError(
                    f"model: {name} has a hook that may change its gradient; remove it to measure curvature"
                )
            if p.dtype not in (torch.float32, torch.float64):
                kind = str(p.dtype).removeprefix("torch.")
                raise InputError(f"model: expected float32 or float64 parameters, but {name} is {kind}")
            if any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
                raise InputError(f"model: expected parameters with their own memory, but {name} is an expanded tensor")
        self.model, self.loss, self.micro_batch = model, loss, micro_batch
        self.x, self.y, self.x_adv = x, y, x_adv
        self.names = tuple(named)
        self.parameters = list(named.values())
        if nonlinear is not None:
            self.nonlinear = nonlinear
        with preserve_buffers(model), torch.no_grad():
            check_deterministic(model, self._to_model(x[:16]))
            check_labels(model(self._to_model(x[:1])), y)
            count = min(len(x), 2)
            for name, value in loss.values(*self.outputs(torch.arange(count))).items():
                if value.shape != (count,):
                    raise InputError(f"loss: expected one value per point from term {name}, got {tuple(value.shape)}")

    @classmethod
    def attacked(
        cls,
        model: nn.Module,
        loss: Loss,
        x: Tensor,
        y: Tensor,
        attack: Attack,
        *,
        seed: object = 0,
        micro_batch: int = 32,
        nonlinear: Mapping[str, str] | None = None,
    ) -> EmpiricalRisk:
        """Build the risk at adversarial inputs of ``attack``, which should maximize ``loss.objective``."""
        like = next(model.parameters())
        x_adv = torch.zeros_like(x)
        with preserve_buffers(model):
            for index in shared(len(x), micro_batch):
                here, labels = index.to(like.device), y[index].to(like.device)
                x_adv[index] = attack(model, x[index].to(like), labels, seed=seed, index=here).to(x)
        x_adv = all_sum(x_adv.to(like.device)).to(x)
        return cls(model, loss, x, y, x_adv, micro_batch=micro_batch, nonlinear=nonlinear)

    def __len__(self) -> int:
        return len(self.y)

    @cached_property
    def nonlinear(self) -> Mapping[str, str]:
        """Parameters in which the logits may not be piecewise linear, with reasons; all if capturing fails."""
        try:
            return nonlinear_parameters(self.model, tuple(self.x.shape[1:]))
        except CaptureError as error:
            return dict.fromkeys(self.names, str(error))

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the weight matrices, parameters with more than one dimension (not biases or normalization)."""
        return tuple(name for name, p in zip(self.names, self.parameters, strict=True) if p.dim() > 1)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.parameters)

    def outputs(self, index: Tensor) -> tuple[Outputs, Tensor]:
        """Return the clean and adversarial logits of some points that the loss needs, and their labels."""
        both = (self.x if self.loss.uses_clean else None, self.x_adv)
        logits, adv_logits = (None if x is None else self.model(self._to_model(x[index])) for x in both)
        return Outputs(logits=logits, adv_logits=adv_logits), self.y[index].to(self.device)

    def losses(self, index: Tensor) -> Tensor:
        """Return the loss of each of the given points."""
        return torch.stack(list(self.loss.values(*self.outputs(index)).values())).sum(0)

    def values(self) -> Tensor:
        """Return the loss of every point."""
        values = torch.zeros(len(self), dtype=torch.float64, device=self.device)
        with preserve_buffers(self.model), torch.no_grad():
            for index in shared(len(self), self.micro_batch):
                values[index] = self.losses(index).double()
        return all_sum(values).cpu()

    def values_at(self, *moves: tuple[float, Sequence[Tensor]]) -> Tensor:
        """Return the loss of every point at weights moved by multiples of vectors; the weights are restored exactly."""
        with preserve_parameters(self.parameters):
            with torch.no_grad():
                for factor, vector in moves:
                    for parameter, part in zip(self.parameters, vector, strict=True):
                        parameter.add_(factor * part)
            return self.values()

    def value(self) -> float:
        """Return the mean loss."""
        return float(self.values().mean())

    @torch.enable_grad()
    def gradient_graph(self, index: Tensor, *, create_graph: bool = True) -> Vector:
        """Return the gradient of the summed loss of some points, which can be differentiated again."""
        with elementary_operations() if create_graph else nullcontext():
            return derivative([self.losses(index).sum()], self.parameters, create_graph=create_graph)

    def gradient(self) -> Vector:
        """Return the gradient of the mean loss."""
        return self._mean(lambda index: self.gradient_graph(index, create_graph=False))

    def split(self, flat: Tensor) -> Vector:
        """Split a flat vector into one tensor per parameter."""
        parts = torch.split(flat, [p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    def _mean(self, part: Callable[[Tensor], Vector]) -> Vector:
        total = torch.zeros(self.size, dtype=self.parameters[0].dtype, device=self.device)
        with preserve_buffers(self.model):
            for index in shared(len(self), self.micro_batch):
                total += flatten(part(index))
        return self.split(all_sum(total) / len(self))

    def _to_model(self, x: Tensor) -> Tensor:
        return x.to(self.parameters[0])


def shared(length: int, size: int) -> list[Tensor]:
    """Return this process's share of the indices ``0 .. length-1``, in batches."""
    return in_order(length, size)[rank() :: world_size()]


def flatten(vector: Sequence[Tensor]) -> Tensor:
    """Concatenate one tensor per parameter to a flat vector."""
    return torch.cat([part.reshape(-1) for part in vector])


def derivative(
    values: Sequence[Tensor],
    parameters: Sequence[Tensor],
    vectors: Sequence[Tensor] | None = None,
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> Vector:
    """Return the derivative of the values (times vectors), zero for parameters that they do not depend on."""
    rows = [i for i, value in enumerate(values) if value.requires_grad]
    if not rows:
        return [torch.zeros_like(p) for p in parameters]
    gradients = torch.autograd.grad(
        [values[i] for i in rows],
        parameters,
        None if vectors is None else [vectors[i] for i in rows],
        create_graph=create_graph,
        retain_graph=retain_graph,
        materialize_grads=True,
    )
    if any(gradient.layout != torch.strided for gradient in gradients):
        raise InputError("model: expected dense gradients, got sparse ones (such as from Embedding(sparse=True))")
    return list(gradients)


def check_deterministic(model: nn.Module, x: Tensor) -> None:
    """Raise an InputError if a model is in training mode, random, or mixes the points of a batch.

    >>> check_deterministic(nn.Linear(2, 2).eval(), torch.zeros(3, 2))
    >>> check_deterministic(nn.BatchNorm1d(2, track_running_stats=False).eval(), torch.eye(2))
    Traceback (most recent call last):
    atoll.errors.InputError: model: the output of BatchNorm1d for a point depends on the rest of the batch
    """
    for name, module in model.named_modules():
        if module.training:
            raise InputError(f"model: expected evaluation mode, but {_title(name, module)} is in training mode")
    with torch.no_grad():
        first = model(x)
        check_logits(first)
        if not first.isfinite().all():
            raise InputError("model: expected finite logits, got NaN or infinity")
        half = (len(x) + 1) // 2
        others = torch.cat([x[:half], x[:1].expand_as(x[half:])])
        for inputs, same, fault in ((x, len(x), "is random"), (others, half, "depends on the rest of the batch")):
            if not _close(first, model(inputs), same):
                raise InputError(f"model: the output of {_culprit(model, x, inputs, same)} for a point {fault}")


def _culprit(model: nn.Module, x: Tensor, inputs: Tensor, same: int) -> str:
    """Return the first module whose outputs for the first points differ in two more passes."""
    for (name, module, before), (_, _, after) in zip(_outputs(model, x), _outputs(model, inputs), strict=True):
        if not _close(before, after, same):
            return _title(name, module)
    return _title("", model)


def _outputs(model: nn.Module, x: Tensor) -> list[tuple[str, nn.Module, Tensor]]:
    """Return the outputs of all modules in the order in which they finish; the first that differs is at fault."""
    outputs: list[tuple[str, nn.Module, Tensor]] = []

    def record(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.numel() and output.dim():
            outputs.append((name, module, output.clone()))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(record, name)).remove)
        model(x)
    return outputs


def _close(a: Tensor, b: Tensor, rows: int) -> bool:
    return bool((a - b)[:rows].abs().max() <= _TOLERANCE * a.abs().max())


def _title(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__
