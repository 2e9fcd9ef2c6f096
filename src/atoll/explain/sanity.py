"""Whether attributions change with the model: layers are randomized one after the other, from the top down."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from atoll.errors import InputError
from atoll.explain.attributions import PointAttribution, Target, checked, checked_target
from atoll.explain.faithfulness import explain_where_possible
from atoll.modules import evaluation_mode
from atoll.rng import generator
from atoll.stats import Estimate

PASSES_BELOW = 0.5  # mean rank correlation with the attributions of the trained model when all layers are random


@dataclass(frozen=True)
class SanityCheck:
    """Rank correlations with the attributions of the trained model, while more and more of its layers are random.

    Args:
        layers: names, in the order in which they were made random: the top one first.
        correlation: ``(layers, points)``; NaN where an attribution is constant, or there was no boundary.
    """

    layers: tuple[str, ...]
    correlation: Tensor

    @property
    def means(self) -> tuple[Estimate, ...]:
        """Over the points, after each layer."""
        return tuple(Estimate.mean_of(row) for row in self.correlation)

    @property
    def passed(self) -> bool:
        """Whether the attributions have lost most of what they had in common with those of the trained model.

        False as well if no correlation is defined: nothing was shown then.
        """
        return self.means[-1].value < PASSES_BELOW


def sanity_check(
    make: Callable[[nn.Module], PointAttribution],
    model: nn.Module,
    inputs: Tensor,
    target: Target = None,
    *,
    seed: object = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> SanityCheck:
    """Compare attributions with those after all layers down to some depth were made random (Adebayo et al., 2018).

    Parameters become normal numbers of the same norm as before (thesis, 2.2.3); what is normalized by statistics of the
    data keeps these.  Layers count in the order in which the model runs them.  Compared are absolute values, by
    Spearman's rank correlation, over the features that are not zero in both attributions: what equals the baseline of
    IG is zero whatever the model is, and the black background of MNIST alone would make a correlation of 0.99.

    Args:
        make: builds the attribution for a model, such as ``Saliency``.
        model: any module from inputs to logits; it is copied, and not touched.
        inputs: ``(points, ...)``.
        target: the classes of interest; those that the trained model predicts if None.
        seed: of the random parameters.
        on_progress: called with how many layers are done, and of how many.
    """
    x = checked(inputs)
    classes = checked_target(model, x, target, len(x))
    trained = explain_where_possible(make(model), x, classes).abs()
    order = layers(model, x[:1])
    if not order:
        raise InputError("model: expected layers with parameters, got none")
    damaged = copy.deepcopy(model)
    rows = []
    for done, name in enumerate(reversed(order), 1):
        randomize(damaged.get_submodule(name), seed, name)
        rows.append(rank_correlation(trained, explain_where_possible(make(damaged), x, classes).abs()))
        if on_progress is not None:
            on_progress(done, len(order))
    return SanityCheck(tuple(reversed(order)), torch.stack(rows))


def layers(model: nn.Module, x: Tensor) -> list[str]:
    """Names of the modules that have parameters of their own, in the order in which they run.

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
    """Replace a module's own parameters by normal numbers of the same norm, in place."""
    for part, parameter in module.named_parameters(recurse=False):
        draw = generator(seed, "randomise", name, part)  # the spelling is part of the seed
        noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64).to(parameter)
        parameter.copy_(noise * (parameter.norm() / noise.norm().clamp_min(1e-30)))


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's correlation of two vectors for each point, over the features that are not zero in both.

    Equal values share their ranks; NaN where a vector is constant.

    >>> rank_correlation(torch.tensor([[1.0, 2.0, 5.0, 0.0]]), torch.tensor([[10.0, 20.0, 21.0, 0.0]]))
    tensor([1.], dtype=torch.float64)
    """
    from scipy.stats import rankdata  # half a second to import

    correlations = []
    for pair in zip(*(values.flatten(1).double().cpu().numpy() for values in (a, b)), strict=True):
        shown = (pair[0] != 0) | (pair[1] != 0)
        ranks = np.stack([rankdata(values[shown], nan_policy="propagate") for values in pair])
        centered = ranks - ranks.mean(1, keepdims=True) if shown.any() else ranks
        size = float(np.sqrt((centered**2).sum(1).prod()))
        correlations.append(float((centered[0] * centered[1]).sum()) / size if size else np.nan)
    return torch.tensor(correlations, dtype=torch.float64)
