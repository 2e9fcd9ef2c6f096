"""RAT in closed form for networks whose Taylor terms are known, and the check of these terms."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.data import MemorySplit
from atoll.errors import InputError
from atoll.losses import Outputs
from atoll.models import MLP
from atoll.training.methods import RAT, Step
from atoll.training.methods.rat import check_taylor_terms, head_row_sums

Array = NDArray[np.float64]


def two_matrices(seed: int = 0) -> nn.Sequential:
    """The logits W2 W1 x, which are linear in each matrix."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False)).double()


def trainer_of(model: nn.Module) -> Any:
    data = SimpleNamespace(train=MemorySplit(torch.zeros(8, 6, dtype=torch.uint8), torch.arange(8) % 4))
    return SimpleNamespace(model=model, data=data, seed=3, device=torch.device("cpu"), methods=())


def step_of(x: Tensor, x_adv: Tensor | None) -> Step:
    step = Step(x, torch.arange(len(x)), torch.arange(len(x)), 7, 0.0, x_adv=x_adv)
    step.terms = {"ce": torch.ones(len(x), dtype=x.dtype)}
    return step


def noise(method: RAT, trainer: Any, step: Step) -> list[Tensor]:
    """What the attack of this step adds to the weights."""
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with method.around_attack(trainer, step):
        return [p.detach() - b for p, b in zip(trainer.model.parameters(), before, strict=True)]


@pytest.mark.parametrize("sigma", [1e-3, 0.5])
def test_exact_terms_do_not_depend_on_the_size_of_the_noise(sigma: float) -> None:
    """With noise sigma (A1, A2) and d = x - x', they are |(A2 W1 + W2 A1) d|^2 and |2 A2 A1 d|^2."""
    trainer = trainer_of(two_matrices())
    draw = torch.Generator().manual_seed(0)
    x, x_adv = torch.rand(2, 4, 6, generator=draw, dtype=torch.float64)
    method = RAT(terms="exact", reading="paper", sigma=sigma, eta=0.4, second=0.3)
    step = step_of(x, x_adv)
    a1, a2 = (value / sigma for value in noise(method, trainer, step))
    method.on_loss(trainer, step)
    w1, w2 = (p.detach() for p in trainer.model.parameters())
    first, second = ((x - x_adv) @ matrix.T for matrix in (a2 @ w1 + w2 @ a1, 2 * a2 @ a1))
    torch.testing.assert_close(step.terms["first"], 0.4 * (first**2).sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(step.terms["second"], 0.4 * 0.3 * (second**2).sum(1), rtol=1e-6, atol=0)
    assert step.terms["ce"].tolist() == [1.0] * 4  # only surrogate terms replace a part of it


def test_the_exact_first_term_of_a_linear_model_is_chi_squared() -> None:
    """All K logits change by independent normal numbers of variance |x - x'|^2, and nothing is of second order."""
    trainer = trainer_of(nn.Linear(6, 1000).double())
    x = torch.rand(1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    method = RAT(terms="exact", reading="paper", eta=1.0)
    step = step_of(x, x + 0.5)
    method.on_loss(trainer, step)
    mean, deviation = 1000 * 6 * 0.25, (2 * 1000) ** 0.5 * 6 * 0.25
    assert abs(step.terms["first"].item() - mean) < 4 * deviation
    assert step.terms["second"].item() == 0


def test_of_first_order_there_is_one_term() -> None:
    trainer = trainer_of(two_matrices())
    x = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one, two = step_of(x, x + 0.1), step_of(x, x + 0.1)
    RAT(terms="exact", reading="paper", order=1, eta=0.2).on_loss(trainer, one)
    RAT(terms="exact", reading="paper", order=2, eta=0.2).on_loss(trainer, two)
    assert list(one.terms) == ["ce", "first"]
    torch.testing.assert_close(one.terms["first"], two.terms["first"])


@pytest.mark.parametrize("reading", ["code", "paper"])
def test_surrogate_terms_of_symmetric_predictions_by_hand(reading: Any) -> None:
    """Two classes, features 1 and 3, the same prediction: the gradients are (-1, 1) / 4 and (-3, 3) / 4.

    The gradients of both classes differ by the same number, so the targets have the share of the class and the rest.
    """
    g = torch.zeros(2, 2, dtype=torch.float64)
    step = step_of(torch.zeros(2, 1), torch.zeros(2, 1))
    step.y, step.terms["ce"] = torch.tensor([0, 0]), step.terms["ce"].double()
    step.out = Outputs(g, torch.ones(2, 1).double(), g, 3 * torch.ones(2, 1).double())
    RAT(reading=reading, share=0.75, eta=0.4, second=0.3).on_loss(SimpleNamespace(), step)
    kl = 0.75 * torch.tensor(1.5).log() + 0.25 * torch.tensor(0.5).log()
    torch.testing.assert_close(step.terms["first"], (0.4 * kl).expand(2).double())
    torch.testing.assert_close(step.terms["second"], (0.4 * 0.3 * kl).expand(2).double())
    torch.testing.assert_close(step.terms["ce"], torch.full((2,), 0.6).double())


@pytest.mark.parametrize("reading", ["code", "paper"])
def test_surrogate_terms_in_numpy(reading: Any) -> None:
    """One value per example, class by class; mean gradients of the head are outer products."""
    draw, y = np.random.default_rng(0), np.array([0, 2, 1, 2])
    g, g_adv = draw.normal(size=(2, 4, 3))
    z, z_adv = draw.normal(size=(2, 4, 5))

    def row_sums(logits: Array, features: Array) -> Array:
        errors = softmax(logits) - np.eye(3)[y]
        return np.mean([np.outer(e, f).sum(1) for e, f in zip(errors, features, strict=True)], 0)

    def kl(scores: Array, logits: Array) -> Array:
        values = []
        for label, q in zip(y, softmax(logits), strict=True):
            others = [k for k in range(3) if k != label]
            total = sum(scores[k] - min(scores) for k in others)
            values.append(0.5 * np.log(0.5 / q[label]))
            for k in others:
                if share := 0.5 * (scores[k] - min(scores)) / total:
                    values[-1] += share * np.log(share / q[k])
        return np.array(values)

    clean, adversarial = row_sums(g, z), row_sums(g_adv, z_adv)
    one, two = abs(adversarial) - abs(clean), adversarial**2 - clean**2
    step = step_of(torch.zeros(4, 5), torch.zeros(4, 5))
    step.y, step.out = torch.from_numpy(y), Outputs(*map(torch.from_numpy, (g, z, g_adv, z_adv)))
    RAT(reading=reading, share=0.5, eta=0.4, second=0.3).on_loss(SimpleNamespace(), step)
    expected = 0.4 * (kl(one, g) + kl(-one, g_adv)) / 2
    np.testing.assert_allclose(step.terms["first"].numpy(), expected)
    expected = 0.4 * 0.3 * (kl(two, g) + kl(two if reading == "code" else -two, g_adv)) / 2
    np.testing.assert_allclose(step.terms["second"].numpy(), expected)


def softmax(logits: Array) -> Array:
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def test_row_sums_for_mixed_labels() -> None:
    """They are those of the gradient by autograd."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MLP((3,), 4, hidden=(5,)).double()
        x, y = torch.rand(7, 3, dtype=torch.float64), torch.rand(7, 4, dtype=torch.float64).softmax(1)
    F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(head_row_sums(model(x), model.features(x), y), model.head.weight.grad.sum(1))


def test_the_weight_and_the_noise_depend_on_order_and_reading_unless_given() -> None:
    assert (RAT(order=1).eta, RAT(order=2).eta, RAT(order=1, eta=0.0).eta) == (0.3, 0.2, 0.0)
    sigmas = [RAT(reading="code").sigma, RAT(reading="paper").sigma, RAT(reading="paper", sigma=0.0).sigma]
    assert sigmas == [1e-4, 0.01, 0.0]


def test_without_noise_the_attack_sees_the_weights() -> None:
    trainer = trainer_of(two_matrices())
    added = noise(RAT(sigma=0.0, reading="paper"), trainer, step_of(torch.zeros(4, 6), None))
    assert all(not value.any() for value in added)


def test_what_it_cannot_do_is_refused() -> None:
    linear, trainer = nn.Linear(6, 4), trainer_of(two_matrices())
    with pytest.raises(InputError, match="RAT: expected a Classifier with a linear head, got Linear"):
        RAT().setup(trainer_of(linear))
    RAT().setup(trainer_of(MLP((6,), 4, hidden=(5,))))
    RAT(terms="exact", reading="paper").setup(trainer)  # needs no head
    with pytest.raises(InputError, match="exact terms with reading=code require convolutions"):
        RAT(terms="exact").setup(trainer)
    with pytest.raises(InputError, match="RAT: expected a loss with an attack"):
        RAT().on_loss(trainer, step_of(torch.zeros(4, 6), None))
    with pytest.raises(InputError, match="sigma: expected a number > 0 for exact terms, got 0"):
        RAT(terms="exact", sigma=0.0)


class PartlyConstant(nn.Module):
    """Adds a function of a parameter w to the logits; PyTorch takes c = w for a constant."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], start: float = 0.5, scale: float = 1.0) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(6, 4), nn.Parameter(torch.full((4,), start))
        self.function, self.scale = function, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (self.layer(x).tanh() + self.function(self.shift, self.shift.detach()))


def refusal(model: nn.Module, order: int) -> str:
    x = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    try:
        check_taylor_terms(model, x, order)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("function", "refusals"),
    [
        (lambda w, c: w**3, ["", ""]),
        (lambda w, c: 2 * c, ["the first term", "the first term"]),
        (lambda w, c: 2 * w * c - c**2, ["the gradient", "the second term"]),  # w^2 without its second derivative
        (lambda w, c: 3 * w**2 * c - 3 * w * c**2 + c**3, ["", "the gradient"]),  # w^3 without its third
    ],
)
def test_wrong_derivatives_are_refused_up_to_the_order_that_matters(
    function: Callable[[Tensor, Tensor], Tensor], refusals: list[str]
) -> None:
    for order, part in enumerate(refusals, 1):
        sentence = refusal(PartlyConstant(function), order)
        wrong = f"RAT: exact terms cannot be used for this model: {part} differs from finite differences"
        assert sentence == (wrong if part else "")


def test_weights_that_begin_at_zero_are_also_checked() -> None:
    assert "the first term differs" in refusal(PartlyConstant(lambda w, c: 2 * c, start=0.0), 2)


def test_large_logits_are_no_rounding_errors() -> None:
    assert not refusal(PartlyConstant(lambda w, c: w**3, scale=1e9), 2)
    assert "the first term differs" in refusal(PartlyConstant(lambda w, c: 2 * c, scale=1e9), 2)


def test_models_without_forward_derivatives_are_refused() -> None:
    class Own(torch.autograd.Function):
        generate_vmap_rule = False

        @staticmethod
        def forward(w: Tensor) -> Tensor:
            return w.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None: ...

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    sentence = refusal(PartlyConstant(lambda w, c: Own.apply(w)), 2)
    assert sentence.startswith("RAT: exact terms cannot be used for this model: ")
    assert "differs" not in sentence
