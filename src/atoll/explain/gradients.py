"""What all attributions share: checks, evaluation mode, and means of gradients in batches of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from captum.attr import GradientAttribution
from torch import Tensor, nn

from atoll.attacks.base import check_labels
from atoll.attacks.evaluate import automatic_batch_size
from atoll.errors import InputError
from atoll.explain.boundary import BoundaryPoints
from atoll.modules import evaluation_mode
from atoll.registry import Registry

Target = int | Sequence[int] | Tensor | None


def logit(model: nn.Module, x: Tensor, target: Tensor, batch_size: int) -> Tensor:
    """The logit of each point's target."""
    with torch.no_grad():
        parts = zip(torch.split(x, batch_size), torch.split(target, batch_size), strict=True)
        return torch.cat([model(part).gather(1, classes[:, None]).squeeze(1) for part, classes in parts])


def mean_gradient(
    model: nn.Module,
    target: Tensor,
    place: Callable[[Tensor, Tensor], Tensor],
    weights: Tensor,
    like: Tensor,
    batch_size: int,
) -> Tensor:
    r"""The weighted mean of a logit's gradients at several places for each point.

    .. math:: \sum_k w_k \nabla f_y(\mathrm{place}_k)

    Args:
        model: f, in evaluation mode.
        target: y, one for each point.
        place: given numbers of points and numbers k, the inputs to take gradients at.
        weights: w.
        like: of the shape of the inputs.
        batch_size: places that go through the model together, which bounds the memory.
    """
    total, number = torch.zeros_like(like), torch.arange(len(target) * len(weights), device=like.device)
    for chunk in torch.split(number, batch_size):
        point, k = chunk // len(weights), chunk % len(weights)
        inputs = place(point, k).detach().requires_grad_()
        with torch.enable_grad():
            value = model(inputs).gather(1, target[point, None])
            (weighted,) = torch.autograd.grad(value, inputs, weights[k, None].to(value))
        total.index_add_(0, point, weighted)
    return total


ATTRIBUTIONS = Registry("attribution", "attributions", "atoll.explain.gradients.PointAttribution", "atoll.explain")


class PointAttribution(GradientAttribution):  # type: ignore[misc]
    """Base of all attributions; a subclass implements ``explain``, and ``start`` if its paths start somewhere.

    Captum's interface: ``attribute(inputs, target=...)`` gives a tensor of the inputs' shape.  The model may be any
    ``nn.Module`` from inputs to logits; it is used in evaluation mode, and modes, buffers and gradients are left as
    they were.  What comes out for a point depends on the point and the seed, not on the batch (up to rounding).

    Args:
        model: the classifier.
    """

    registry: ClassVar[Registry] = ATTRIBUTIONS

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = model

    def attribute(
        self,
        inputs: Tensor,
        target: Target = None,
        *,
        return_convergence_delta: bool = False,
        internal_batch_size: int | None = None,
        boundary: BoundaryPoints | None = None,
    ) -> Any:
        """Attributions of the logits of some classes.

        Args:
            inputs: ``(points, ...)``.
            target: the class of interest, one for all or one for each; the predicted ones if None.
            return_convergence_delta: return a pair: the attributions, and for each point their sum minus the
                difference of the logits at the input and at the start of its path.  Only for attributions with paths.
            internal_batch_size: rows that go through the model together; if None, as many as fit comfortably into
                memory.
            boundary: what ``boundary_search`` has found for these inputs, for attributions that need it: so several
                can share it.
        """
        x = checked(inputs)
        if return_convergence_delta and not self.has_convergence_delta():
            raise InputError(f"return_convergence_delta: {type(self).__name__} is not meant to be complete")
        if internal_batch_size is not None and internal_batch_size < 1:
            raise InputError(f"internal_batch_size: expected at least 1, got {internal_batch_size}")
        with evaluation_mode(self.model):
            batch_size = internal_batch_size or automatic_batch_size(self.model, x)
            classes = checked_target(self.model, x, target, batch_size)
            start = self.start(x, batch_size, boundary)
            found = self.explain(x, start, classes, batch_size)
            if not return_convergence_delta:
                return found
            end, begin = (logit(self.model, point, classes, batch_size) for point in (x, start))
        return found, found.flatten(1).sum(1) - (end - begin)

    def start(self, x: Tensor, batch_size: int, boundary: BoundaryPoints | None) -> Tensor:
        """Where the paths to the inputs start: at themselves if there are none."""
        return x

    def explain(self, x: Tensor, start: Tensor, target: Tensor, batch_size: int) -> Tensor:
        """The attribution itself, on a model in evaluation mode and valid inputs."""
        raise NotImplementedError


def checked(inputs: Tensor) -> Tensor:
    """Inputs that make sense, without their history."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.dim() < 2 or not len(inputs):
        got = f"{tuple(inputs.shape)} {inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise InputError(f"inputs: expected a tensor of floats, (points, ...), got {got}")
    if not inputs.isfinite().all():
        raise InputError("inputs: expected finite numbers, got NaN or infinity")
    return inputs.detach()


def checked_target(model: nn.Module, x: Tensor, target: Target, batch_size: int) -> Tensor:
    """One class for each input; the predicted one if none is given."""

    with torch.no_grad():
        if target is None:
            logits = torch.cat([model(part) for part in torch.split(x, batch_size)])
            check_labels(logits, logits.new_zeros(len(logits), dtype=torch.int64))
            return logits.argmax(1)
        first = model(x[:1])
    classes = torch.as_tensor(target, device=x.device)
    classes = classes.expand(len(x)) if classes.dim() == 0 else classes
    if classes.shape != (len(x),) or classes.dtype != torch.int64:
        raise InputError(f"target: expected a class, or one for each of {len(x)} inputs, got {target!r}")
    check_labels(first, classes)
    return classes
