"""TrH of given logits and features in closed form; dense Hessians are in tests/training/test_methods.py."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from atoll.errors import InputError
from atoll.losses import TRADES, Outputs
from atoll.training.methods import Step, TrH

draw = np.random.default_rng(0)
G, G_ADV = draw.normal(size=(2, 5, 3))
Z, Z_ADV = draw.normal(size=(2, 5, 4))


def trace(method: TrH, epoch: float) -> NDArray[np.float64] | None:
    """The term of each example for TRADES with weight 3, at an epoch of ten."""
    step = Step(torch.zeros(5, 2), torch.tensor([0, 1, 2, 0, 1]), torch.arange(5), 0, epoch)
    step.out = Outputs(*map(torch.from_numpy, (G, Z, G_ADV, Z_ADV)))
    method.on_loss(SimpleNamespace(loss=TRADES(lambda_t=3.0), settings=SimpleNamespace(epochs=10)), step)
    return step.terms["trh"].numpy() if step.terms else None


def spread(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 - sum p^2, the sum of the variances of the classes."""
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return 1 - np.square(p).sum(1)


def test_by_default_the_clean_prediction_is_constant() -> None:
    """Equation 6: (1 - |p|^2) |z|^2 + 3 (1 - |q|^2) |z'|^2, without the bias."""
    expected = spread(G) * np.square(Z).sum(1) + 3 * spread(G_ADV) * np.square(Z_ADV).sum(1)
    np.testing.assert_allclose(trace(TrH(), 0.0), 1e-3 * expected)
    expected = spread(G) * (1 + np.square(Z).sum(1)) + 3 * spread(G_ADV) * (1 + np.square(Z_ADV).sum(1))
    np.testing.assert_allclose(trace(TrH(lambda_=2.0, bias=True), 0.0), 2 * expected)


@pytest.mark.parametrize(("epoch", "factor"), [(2.5, 0.25), (10.0, 1.0), (12.0, 1.0)])
def test_lambda_grows_with_the_run(epoch: float, factor: float) -> None:
    full, part = trace(TrH(lambda_=0.1), epoch), trace(TrH(lambda_=0.1, schedule="linear"), epoch)
    assert full is not None
    np.testing.assert_allclose(part, factor * full)


@pytest.mark.parametrize("method", [TrH(schedule="linear"), TrH(lambda_=0.0)])
def test_without_weight_there_is_no_term(method: TrH) -> None:
    assert trace(method, 0.0) is None


def test_decay_of_all_parameters_by_hand() -> None:
    """The gradient of 0.5 |w|^2 is w; scaled gradients of mixed precision get it with the same scale."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0]]))
        model.bias.fill_(3.0)
    model.weight.grad = torch.tensor([[10.0, 20.0]])
    trainer = SimpleNamespace(model=model, scaler=SimpleNamespace(get_scale=lambda: 8.0))
    TrH(gamma=0.5).before_step(trainer, None)
    assert model.weight.grad.tolist() == [[18.0, 4.0]]
    assert model.bias.grad is None  # it is not trained
    TrH().before_step(trainer, None)
    assert model.weight.grad.tolist() == [[18.0, 4.0]]


@pytest.mark.parametrize("setting", ["lambda_", "gamma"])
def test_nonsense_is_refused(setting: str) -> None:
    with pytest.raises(InputError, match=f"{setting}: expected at least 0"):
        TrH(**{setting: -1.0})
