"""S2O of a small batch in NumPy, one value per example."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from atoll.errors import InputError
from atoll.losses import Outputs
from atoll.training.methods import S2O, Step
from atoll.training.methods.s2o import correlation

Array = NDArray[np.float64]
draw = np.random.default_rng(0)
CLEAN, ADVERSARIAL = draw.normal(size=(2, 6, 4))
LABELS = np.array([0, 1, 2, 3, 1, 0])


def terms(method: S2O, *, attack: bool = True) -> dict[str, Array]:
    """The terms of a step whose cross-entropy is 1, 2, 3, ..."""
    x, y = torch.zeros(6, 2), torch.from_numpy(LABELS)
    step = Step(x, y, torch.arange(6), 0, 0.0, x_adv=x if attack else None)
    step.out = Outputs(logits=torch.from_numpy(CLEAN), adv_logits=torch.from_numpy(ADVERSARIAL) if attack else None)
    step.terms = {"ce": torch.arange(1.0, 7.0).double()}
    method.on_loss(SimpleNamespace(), step)
    return {name: value.numpy() for name, value in step.terms.items()}


def divergence(logits: Array, share: float) -> Array:
    """KL from the targets of each label, computed class by class."""
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    products, values = logits.T @ logits, []
    for row, y in zip(p, LABELS, strict=True):
        scores = max(abs(products[y])) - abs(products[y])  # classes that are correlated least get most
        scores[y] = 0
        target = (1 - share) * scores / scores.sum()
        target[y] = share
        values.append(sum(t * np.log(t / q) for t, q in zip(target, row, strict=True) if t > 0))
    return np.array(values)


def test_code() -> None:
    result = terms(S2O(weight=0.3, share=0.4))
    expected = 0.3 * (divergence(CLEAN, 0.4) + divergence(ADVERSARIAL, 0.4)) / 2
    np.testing.assert_allclose(result["s2o"], expected)
    np.testing.assert_allclose(result["ce"], 0.7 * np.arange(1, 7))


def test_losses_without_an_attack() -> None:
    np.testing.assert_allclose(terms(S2O(weight=0.3), attack=False)["s2o"], 0.3 * divergence(CLEAN, 0.2))


def test_text() -> None:
    """The norm of all cosines between columns of logits; the cross-entropy keeps its weight."""
    result, norms = terms(S2O(weight=0.3, reading="text")), []
    for g in (CLEAN, ADVERSARIAL):
        cosines = [a @ b / np.sqrt((a @ a) * (b @ b)) for a in g.T for b in g.T]
        norms.append(np.sqrt(np.square(cosines).sum()))
    np.testing.assert_allclose(result["s2o"], 0.3 * np.mean(norms))
    np.testing.assert_allclose(result["ce"], np.arange(1, 7))


def test_the_gradient_of_text_is_that_of_the_whole_batch() -> None:
    """Also if the batch comes in two parts, whose mean is taken and which see the whole batch as a constant."""
    g = torch.from_numpy(CLEAN).requires_grad_()
    columns = g / g.norm(dim=0)
    (truth,) = torch.autograd.grad((columns.T @ columns).norm(), g)
    (whole,) = torch.autograd.grad(correlation(g, g, 1), g)
    torch.testing.assert_close(whole, truth)
    parts = torch.stack([correlation(half, g.detach(), 2) for half in (g[:3], g[3:])])
    torch.testing.assert_close(parts, (columns.T @ columns).norm().expand(2))
    (halves,) = torch.autograd.grad(parts.mean(), g)
    torch.testing.assert_close(halves, truth)


@pytest.mark.parametrize("setting", ["weight", "share"])
@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_nonsense_is_refused(setting: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"{setting}: expected a number in \[0, 1\]"):
        S2O(**{setting: value})
