"""Base classes of losses and terms: blocks of Hessians, sums of curvatures, flags of subclasses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.errors import InputError
from atoll.losses import MART, CrossEntropy, Loss, Outputs, Term, WeightedKL
from atoll.losses.base import LogitCurvature, hessian_blocks
from atoll.models.centroid import Centroids


def logits() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    g, g_adv = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64)
    return g, g_adv, torch.tensor([0, 3, 1])


@pytest.mark.parametrize("term", [WeightedKL(), MART(lambda_m=2.0)])
def test_blocks_are_those_of_the_dense_hessian(term: Term | Loss) -> None:
    """The mixed block has rows for the clean logits and columns for the adversarial ones; it is not symmetric."""
    g, g_adv, y = logits()
    blocks = hessian_blocks(term, Outputs(logits=g, adv_logits=g_adv), y)
    for i in range(len(y)):

        def value(both: Tensor, i: int = i) -> Tensor:
            out = Outputs(logits=both[None, 0], adv_logits=both[None, 1])
            if isinstance(term, Term):
                return term.value(out, y[i : i + 1]).sum()
            return torch.stack(list(term.values(out, y[i : i + 1]).values())).sum()

        dense = torch.autograd.functional.hessian(value, torch.stack([g[i], g_adv[i]]))
        for name, block in {"clean": dense[0, :, 0], "cross": dense[0, :, 1], "adversarial": dense[1, :, 1]}.items():
            torch.testing.assert_close(blocks[name][i], block)
    assert (blocks["cross"] - blocks["cross"].mT).abs().max() > 1e-3


def test_curvatures_add_up() -> None:
    one, two = torch.ones(1, 2), torch.full((1, 2), 2.0)
    total = LogitCurvature(clean=one) + 3 * LogitCurvature(clean=two, adversarial=one)
    assert total.clean is not None
    assert total.adversarial is not None
    assert (total.clean.tolist(), total.cross, total.adversarial.tolist()) == ([[7.0, 7.0]], None, [[3.0, 3.0]])


class Spread(Term):
    """Depends on the prediction that there is."""

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        given = out.logits if out.logits is not None else out.g_adv
        return given.softmax(1).square().sum(1)


@pytest.mark.parametrize("which", ["logits", "adv_logits"])
def test_a_term_of_a_single_prediction_is_never_stopped(which: str) -> None:
    g, _, y = logits()
    outputs = Outputs(**{which: g.requires_grad_()})
    stopped = Spread().with_clean_stopped(True)
    torch.testing.assert_close(stopped.value(outputs, y), Spread().value(outputs, y))
    (gradient,) = torch.autograd.grad(stopped.value(outputs, y).sum(), g)
    assert gradient.abs().max() > 0


def test_losses_with_lipschitz_constants_certify() -> None:
    class Neither(Loss):
        pass

    class Uses(Loss):
        uses_lipschitz = True

    class Certifies(Loss):
        certifies = True

    class Derived(Uses):
        pass

    flags = [(loss.certifies, loss.uses_lipschitz) for loss in (Neither, Uses, Certifies, Derived)]
    assert flags == [(False, False), (True, True), (True, False), (True, True)]


def test_values_are_weighted() -> None:
    g, _, y = logits()
    loss = Loss(a=(2.0, CrossEntropy("clean")), b=(0.5, CrossEntropy("clean")))
    values, plain = loss.values(Outputs(logits=g), y), CrossEntropy("clean").value(Outputs(logits=g), y)
    torch.testing.assert_close(values["a"], 2 * plain)
    torch.testing.assert_close(values["b"], plain / 2)


def test_a_missing_pass_is_named() -> None:
    with pytest.raises(AssertionError, match="needs a clean pass: set uses_clean"):
        _ = Outputs(adv_logits=torch.zeros(1, 2)).g
    with pytest.raises(AssertionError, match="needs an adversarial pass: set an objective"):
        _ = Outputs(logits=torch.zeros(1, 2)).g_adv
    for out in (Outputs(features=torch.zeros(1, 2)), Outputs(head=Centroids(2, 2, 1))):
        with pytest.raises(InputError, match="requires a CentroidNet model and a plain training pass"):
            _ = out.latent


def test_a_loss_shows_the_arguments_that_differ_from_its_defaults() -> None:
    assert repr(MART(lambda_m=6.0, stop_clean_gradient=True)) == "MART(stop_clean_gradient=True)"
