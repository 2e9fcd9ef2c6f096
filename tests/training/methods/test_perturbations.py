"""AWP, AWPT and SAM on gradients that are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.errors import InputError
from atoll.losses import AT
from atoll.training.methods import AWP, AWPT, SAM, Method


def trainer_with(weight: list[float], bias: float, gradient: list[float], slope: float, epoch: int = 0) -> Any:
    """A trainer of one linear neuron, whose loss has the same gradient everywhere."""
    model = nn.Linear(len(weight), 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weight]))
        model.bias.fill_(bias)

    def forward_backward(step: object, *, plain: bool = False) -> None:
        assert plain, "terms of other methods do not belong to the perturbation"
        model.weight.grad, model.bias.grad = torch.tensor([gradient]), torch.tensor([slope])

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return SimpleNamespace(model=model, optimizer=optimizer, epoch=epoch, loss=AT(), forward_backward=forward_backward)


def perturbed(method: Method, trainer: Any) -> tuple[list[float], float]:
    """Weight and bias during the step, in which all gradients start at zero and after which all is as before."""
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with method.around_step(trainer, None):
        assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())
        weight, bias = trainer.model.weight[0].tolist(), trainer.model.bias.item()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    return weight, bias


def test_sam_by_hand() -> None:
    """The gradient (3, 0, 4) has norm 5, and a perturbation of norm 0.5 is a tenth of it."""
    weight, bias = perturbed(SAM(rho=0.5), trainer_with([1.0, 2.0], 3.0, [3.0, 0.0], 4.0))
    assert weight == pytest.approx([1.3, 2.0])
    assert bias == pytest.approx(3.4)


def test_sam_leaves_parameters_without_a_gradient_alone() -> None:
    trainer = trainer_with([1.0, 2.0], 3.0, [3.0, 4.0], 0.0)
    gradients = trainer.forward_backward

    def frozen(step: object, *, plain: bool = False) -> None:
        gradients(step, plain=plain)
        trainer.model.bias.grad = None

    trainer.forward_backward = frozen
    weight, bias = perturbed(SAM(rho=0.5), trainer)
    assert weight == pytest.approx([1.3, 2.4])
    assert bias == 3.0


def test_awp_by_hand() -> None:
    """A matrix of norm 10 moves by 1 in the direction (0.6, 0.8); the bias does not move."""
    weight, bias = perturbed(AWP(gamma=0.1), trainer_with([6.0, 8.0], 3.0, [3.0, 4.0], 4.0))
    assert weight == pytest.approx([6.6, 8.8])
    assert bias == 3.0


@pytest.mark.parametrize("method", [SAM(rho=0.5), AWP(gamma=0.1)])
def test_without_a_gradient_nothing_moves(method: Method) -> None:
    assert perturbed(method, trainer_with([6.0, 8.0], 3.0, [0.0, 0.0], 0.0)) == ([6.0, 8.0], 3.0)


def test_awp_begins_after_its_warm_up() -> None:
    method, moved = AWP(gamma=0.1, warmup=2), []
    for epoch in range(4):
        trainer = trainer_with([6.0, 8.0], 3.0, [3.0, 4.0], 4.0, epoch)
        with method.around_step(trainer, None):
            moved.append(trainer.model.weight[0].tolist() != [6.0, 8.0])
    assert moved == [False, False, True, True]


def test_awp_of_size_zero_costs_no_pass() -> None:
    trainer = trainer_with([6.0, 8.0], 3.0, [3.0, 4.0], 4.0)
    trainer.forward_backward = None
    assert perturbed(AWP(gamma=0.0), trainer) == ([6.0, 8.0], 3.0)


def test_awpt_needs_a_head() -> None:
    with pytest.raises(InputError, match="AWPT: expected a Classifier with a head, got Linear"):
        AWPT().parameters(nn.Linear(2, 2))


@pytest.mark.parametrize("length", [1e-30, 5.0])
def test_awp_moves_by_its_share_of_the_norm_whatever_the_gradient_is(length: float) -> None:
    weight, gradient = torch.tensor([[3.0, 4.0]]).double(), torch.tensor([[0.0, -length]]).double()
    torch.testing.assert_close(AWP(gamma=0.1).move(weight, gradient), torch.tensor([[0.0, -0.5]]).double())
