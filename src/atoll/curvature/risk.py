"""What is differentiated: the mean robust loss over fixed points, as a function of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.attacks.base import Attack, check_labels
from atoll.curvature.determinism import check_deterministic
from atoll.data.base import in_order
from atoll.distributed import all_sum, rank, world_size
from atoll.errors import InputError
from atoll.losses.base import Loss, Outputs

Vector = list[Tensor]  # one tensor per parameter


class EmpiricalRisk:
    r"""The robust loss of a model at fixed points, with its gradient and products with its Hessian:

    .. math:: R(\theta) = \frac1N \sum_n \ell\big(g_\theta(x_n), g_\theta(x'_n), y_n\big).

    Adversarial inputs are held fixed.  Points stay where they are and pass through the model ``micro_batch`` at a time,
    which bounds the memory and changes no result; under torchrun the work is shared out, and all processes get the
    sums.

    Args:
        model: any module from inputs to logits, in evaluation mode.
        loss: of the clean and adversarial logits.
        x: clean inputs.
        y: labels.
        x_adv: adversarial inputs, for losses with an attack (``EmpiricalRisk.attacked`` makes them).
        micro_batch: points in one pass.

    >>> from atoll.losses import Standard
    >>> model = nn.Linear(2, 2, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> problem = EmpiricalRisk(model, Standard(), torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    >>> round(problem.value(), 4), problem.gradient()[0].tolist()
    (0.6931, [[-0.5, 0.0], [0.5, 0.0]])
    >>> problem.product([torch.eye(2)])[0].tolist()
    [[0.25, 0.0], [-0.25, 0.0]]
    """

    def __init__(
        self, model: nn.Module, loss: Loss, x: Tensor, y: Tensor, x_adv: Tensor | None = None, *, micro_batch: int = 32
    ) -> None:
        if not len(x) or len(x) != len(y):
            raise InputError(f"expected points with one label each, got {len(x)} points and {len(y)} labels")
        if (x_adv is None) != (loss.objective is None):
            wanted = "no adversarial inputs" if loss.objective is None else "adversarial inputs"
            raise InputError(f"x_adv: {type(loss).__name__} needs {wanted}")
        if x_adv is not None and x_adv.shape != x.shape:
            raise InputError(f"x_adv: expected the shape of x, {tuple(x.shape)}, got {tuple(x_adv.shape)}")
        if micro_batch < 1:
            raise InputError(f"micro_batch: expected at least 1, got {micro_batch}")
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise InputError("model: expected at least one parameter that requires a gradient")
        self.model, self.loss, self.micro_batch = model, loss, micro_batch
        self.x, self.y, self.x_adv = x, y, x_adv
        self.names = tuple(named)
        self.parameters = list(named.values())
        check_deterministic(model, self._to_model(x[:16]))
        with torch.no_grad():
            check_labels(model(self._to_model(x[:1])), y)

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
    ) -> EmpiricalRisk:
        """The problem at the adversarial inputs that ``attack`` finds now, which maximises ``loss.objective``."""
        like = next(model.parameters())
        x_adv = torch.zeros_like(x)
        for index in shared(len(x), micro_batch):
            here = index.to(like.device)
            x_adv[index] = attack(model, x[index].to(like), y[index].to(like.device), seed=seed, index=here).to(x)
        x_adv = all_sum(x_adv.to(like.device)).to(x)
        return cls(model, loss, x, y, x_adv, micro_batch=micro_batch)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the weight matrices: more than one dimension, so neither biases nor scales of normalisation."""
        return tuple(name for name, p in zip(self.names, self.parameters, strict=True) if p.dim() > 1)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.parameters)

    def inputs(self, index: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Clean and adversarial inputs of some points, as far as the loss asks for them, and labels, on the device."""
        x = self._to_model(self.x[index]) if self.loss.uses_clean else None
        x_adv = None if self.x_adv is None else self._to_model(self.x_adv[index])
        return x, x_adv, self.y[index].to(self.device)

    def outputs(self, index: Tensor) -> tuple[Outputs, Tensor]:
        """Logits and labels of some points."""
        x, x_adv, y = self.inputs(index)
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention have no second derivative
            logits, adv_logits = (None if inputs is None else self.model(inputs) for inputs in (x, x_adv))
        return Outputs(logits=logits, adv_logits=adv_logits), y

    def losses(self, index: Tensor) -> Tensor:
        """The loss of each of some points."""
        return torch.stack(list(self.loss.values(*self.outputs(index)).values())).sum(0)

    def values(self) -> Tensor:
        """The loss of every point."""
        found = torch.zeros(len(self), dtype=torch.float64, device=self.device)
        for index in shared(len(self), self.micro_batch):
            with torch.no_grad():
                found[index] = self.losses(index).double()
        return all_sum(found).cpu()

    def value(self) -> float:
        """The mean loss."""
        return float(self.values().mean())

    @torch.enable_grad()
    def slope(self, index: Tensor, *, create_graph: bool = True) -> Vector:
        """Gradient of the summed loss of some points, to be differentiated again."""
        return derivative([self.losses(index).sum()], self.parameters, create_graph=create_graph)

    def gradient(self) -> Vector:
        """Gradient of the mean loss."""
        return self._mean(lambda index: self.slope(index, create_graph=False))

    def product(self, vector: Sequence[Tensor]) -> Vector:
        """Hessian of the mean loss times a vector."""
        return self._mean(lambda index: derivative(self.slope(index), self.parameters, vector))

    def split(self, flat: Tensor) -> Vector:
        """One long vector as one tensor per parameter."""
        parts = torch.split(flat, [p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    def _mean(self, part: Callable[[Tensor], Vector]) -> Vector:
        total = torch.zeros(self.size, dtype=self.parameters[0].dtype, device=self.device)
        for index in shared(len(self), self.micro_batch):
            total += flatten(part(index))
        return self.split(all_sum(total) / len(self))

    def _to_model(self, x: Tensor) -> Tensor:
        return x.to(self.parameters[0])


def shared(length: int, size: int) -> list[Tensor]:
    """The indices ``0 .. length-1`` in batches, of which this process takes every world-size-th."""
    return in_order(length, size)[rank() :: world_size()]


def flatten(vector: Sequence[Tensor]) -> Tensor:
    """One tensor per parameter as one long vector."""
    return torch.cat([part.reshape(-1) for part in vector])


def derivative(
    values: Sequence[Tensor],
    parameters: Sequence[Tensor],
    vectors: Sequence[Tensor] | None = None,
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> Vector:
    """Derivative of the values (times vectors), zero with respect to parameters that they do not depend on."""
    chosen = [i for i, value in enumerate(values) if value.requires_grad]
    if not chosen:
        return [torch.zeros_like(p) for p in parameters]
    return list(
        torch.autograd.grad(
            [values[i] for i in chosen],
            parameters,
            None if vectors is None else [vectors[i] for i in chosen],
            create_graph=create_graph,
            retain_graph=retain_graph,
            materialize_grads=True,
        )
    )
