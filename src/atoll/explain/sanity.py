"""Sanity check: whether attributions change when the layers of the model are randomized, from the top down."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from atoll.errors import InputError, check_count
from atoll.explain.attributions import PointAttribution, Target, check_inputs, resolve_target
from atoll.explain.faithfulness import explain_where_possible
from atoll.modules import evaluation_mode
from atoll.rng import generator
from atoll.stats import Estimate

PASSES_BELOW = 0.5  # largest mean rank correlation with the trained model when all layers are random


@dataclass(frozen=True)
class SanityCheck:
    """Rank correlations with the attributions of the trained model as more and more layers are randomized.

    Args:
        layers: name of the last layer that was randomized before each comparison, top layer first.
        correlation: ``(layers, points)``; NaN if an attribution is constant or there is no boundary point.
    """

    layers: tuple[str, ...]
    correlation: Tensor

    @property
    def means(self) -> tuple[Estimate, ...]:
        """Means over the points, for each comparison."""
        return tuple(Estimate.mean_of(row) for row in self.correlation)

    @property
    def passed(self) -> bool:
        """Whether attributions are mostly unrelated to those of the trained model once all layers are random.

        Also False if no correlation is defined, because this shows nothing.
        """
        return self.means[-1].value < PASSES_BELOW


def sanity_check(
    make: Callable[[nn.Module], PointAttribution],
    model: nn.Module,
    inputs: Tensor,
    target: Target = None,
    *,
    comparisons: int | None = None,
    seed: object = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> SanityCheck:
    """Compare attributions before and after randomizing all layers down to each depth (Adebayo et al., 2018).

    Parameters are replaced with normal random numbers of the same norm (thesis, 2.2.3); running statistics of
    normalization layers do not change.  Layers are ordered as the model runs them.  The check compares absolute values
    with Spearman's rank correlation, over the features that are not zero in both attributions: features that equal the
    baseline of IG are zero for every model, and the black background of MNIST alone would cause a correlation of 0.99.

    Args:
        make: builds the attribution for a model, such as ``Saliency``.
        model: maps inputs to logits; it is copied and does not change.
        inputs: ``(points, ...)``.
        target: the classes to explain; the predictions of the trained model if None.
        comparisons: largest number of comparisons, evenly spread over the layers (default: after every layer).
        seed: seed of the random parameters.
        on_progress: called with the number of randomized layers and the total.
    """
    x = check_inputs(inputs)
    classes = resolve_target(model, x, target, len(x))
    trained = explain_where_possible(make(model), x, classes).abs()
    order = layers(model, x[:1])
    if not order:
        raise InputError("model: expected layers with parameters, got none")
    randomized = copy.deepcopy(model)
    check_count(1, comparisons=comparisons)
    count = min(comparisons or len(order), len(order))
    compared = {round(len(order) * k / count) for k in range(1, count + 1)}
    names, rows = [], []
    for done, name in enumerate(reversed(order), 1):
        randomize(randomized.get_submodule(name), seed, name)
        if done in compared:
            names.append(name)
            rows.append(rank_correlation(trained, explain_where_possible(make(randomized), x, classes).abs()))
        if on_progress is not None:
            on_progress(done, len(order))
    return SanityCheck(tuple(names), torch.stack(rows))


def layers(model: nn.Module, x: Tensor) -> list[str]:
    """Return the names of the modules that have their own parameters, in the order in which they run.

    >>> layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.rand(1, 2))
    ['0', '2']
    """
    order: dict[str, None] = {}
    with ExitStack() as hooks, evaluation_mode(model), torch.no_grad():
        for name, module in model.named_modules():
            if list(module.parameters(recurse=False)):
                hook = module.register_forward_pre_hook(lambda *_, name=name: order.setdefault(name))
                hooks.callback(hook.remove)
        model(x)
    return list(order)


@torch.no_grad()
def randomize(module: nn.Module, seed: object, name: str) -> None:
    """Replace the parameters of a module itself with normal random numbers of the same norm, in place."""
    for part, parameter in module.named_parameters(recurse=False):
        draw = generator(seed, "randomise", name, part)  # the spelling is part of the seed
        noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64).to(parameter)
        parameter.copy_(noise * (parameter.norm() / noise.norm().clamp_min(1e-30)))


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Return Spearman's rank correlation of two vectors for each point, over the features that are not zero in both.

    Ties share their ranks.  The result is NaN if a vector is constant.

    >>> rank_correlation(torch.tensor([[1.0, 2.0, 5.0, 0.0]]), torch.tensor([[10.0, 20.0, 21.0, 0.0]]))
    tensor([1.], dtype=torch.float64)
    """
    from scipy.stats import rankdata  # slow to import

    correlations = []
    for pair in zip(*(values.flatten(1).double().cpu().numpy() for values in (a, b)), strict=True):
        nonzero = (pair[0] != 0) | (pair[1] != 0)
        ranks = np.stack([rankdata(values[nonzero], nan_policy="propagate") for values in pair])
        centered = ranks - ranks.mean(1, keepdims=True) if nonzero.any() else ranks
        size = float(np.sqrt((centered**2).sum(1).prod()))
        correlations.append(float((centered[0] * centered[1]).sum()) / size if size else np.nan)
    return torch.tensor(correlations, dtype=torch.float64)
