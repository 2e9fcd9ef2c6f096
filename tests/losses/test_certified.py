"""Losses with Lipschitz constants against the formulas of the papers, and their way through the trainer."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.certify.power import LipschitzEstimator
from atoll.errors import InputError, TrainingError
from atoll.losses import EMMA, Abstention, GloRoCE, GloRoTRADES, Outputs
from atoll.models import MLP, ViT
from atoll.runs.train import train
from atoll.threat import ThreatModel
from atoll.training.methods import EpsRamp
from atoll.training.trainer import Trainer
from support import CERTIFIED, TinyData, assert_identical, first_batch, naive_certified, tiny_trainer, weights

shapes = st.tuples(st.integers(1, 4), st.integers(2, 6), st.floats(0.1, 5.0), st.integers(0, 10**6))


def outputs(batch, classes, scale, seed):
    draw = torch.Generator().manual_seed(seed)
    g = scale * torch.randn(batch, classes, generator=draw, dtype=torch.float64)
    w = torch.randn(classes, 3, generator=draw, dtype=torch.float64)
    y = torch.randint(classes, (batch,), generator=draw)
    return Outputs(logits=g, certified_margin=torch.cdist(w, w), certified_margin_all=torch.linalg.matrix_norm(w, 2)), y


@pytest.mark.parametrize("name", CERTIFIED)
@settings(max_examples=25)
@given(shape=shapes)
def test_value_is_the_formula_of_the_paper(name, shape):
    out, y = outputs(*shape)
    value = sum(CERTIFIED[name]().values(out, y).values())
    torch.testing.assert_close(value, naive_certified(CERTIFIED[name](), out, y), rtol=1e-9, atol=1e-9)


@settings(max_examples=50)
@given(shape=shapes)
def test_the_second_term_of_trades_is_the_kl_to_the_padded_softmax(shape):
    """Definition 20 compares vectors of different length; with a zero for the abstain class it is -log(1 - q)."""
    out, y = outputs(*shape)
    f = out.logits
    abstain = torch.stack(
        [
            max(f[b, i] + out.certified_margin[f[b].argmax(), i] for i in range(f.shape[1]) if i != f[b].argmax())
            for b in range(len(f))
        ]
    )
    q = torch.cat([f, abstain[:, None]], 1).softmax(1)
    p = torch.cat([f.softmax(1), torch.zeros(len(f), 1)], 1)
    kl = torch.where(p > 0, p * (p / q).log(), 0.0).sum(1)
    torch.testing.assert_close(Abstention().value(out, y), kl, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(kl, -torch.log1p(-q[:, -1]), rtol=1e-8, atol=1e-10)


def test_emma_has_no_gradient_through_its_radii():
    """With it, the term of a class that is certified in part would be f_y, and its logit would drop out."""
    out, y = outputs(3, 4, 0.5, 0)
    out.logits.requires_grad_()
    out.certified_margin = out.certified_margin.detach().requires_grad_()
    sum(EMMA().values(out, y).values()).sum().backward()
    assert (out.logits.grad.abs() > 0).all()
    with torch.no_grad():
        f_y = out.logits.gather(1, y[:, None])
        share = ((f_y - out.logits) / out.certified_margin[y].clamp_min(1e-300)).clamp(0, 1)
    again = out.logits.detach().requires_grad_()
    torch.nn.functional.cross_entropy(again + share * out.certified_margin[y].detach(), y, reduction="sum").backward()
    torch.testing.assert_close(out.logits.grad, again.grad)


@pytest.mark.parametrize("name", CERTIFIED)
def test_extreme_logits_stay_finite(name):
    g = torch.tensor([[90.0, -90.0, 0.0], [-90.0, 90.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    margin = (50 * (1 - torch.eye(3))).requires_grad_()
    out = Outputs(logits=g, certified_margin=margin, certified_margin_all=margin.max())
    sum(CERTIFIED[name]().values(out, torch.tensor([0, 0, 2])).values()).sum().backward()
    assert g.grad.isfinite().all()
    assert margin.grad.isfinite().all()


@pytest.mark.parametrize("name", CERTIFIED)
def test_constants_belong_to_the_training_pass_and_labels_are_classes(name):
    out, y = outputs(2, 3, 1.0, 0)
    with pytest.raises(InputError, match="requires Lipschitz constants"):
        CERTIFIED[name]().values(Outputs(logits=out.logits), y)
    if name != "gloro-trades":  # its cross-entropy takes mixed labels, and the other term none
        with pytest.raises(InputError, match="mixed labels"):
            CERTIFIED[name]().values(out, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("loss", CERTIFIED)
def test_gradient_is_that_of_the_loss_written_by_hand(loss):
    """Through the constants, too; power iteration itself is tested in tests/certify/test_power.py."""
    trainer = tiny_trainer(loss, methods=("eps-ramp",), double=True, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    batch = first_batch(trainer)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train_step(batch)
    model = tiny_trainer(loss, double=True).model
    pairs, whole = LipschitzEstimator(model, iterations=5)()
    eps = 0.1 * trainer.threat.radius  # where the ramp starts
    out = Outputs(logits=model(batch.x), certified_margin=eps * pairs, certified_margin_all=eps * whole)
    naive_certified(trainer.loss, out, batch.y).mean().backward()
    for old, new, truth in zip(before, trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close((old - new) / 0.1, truth.grad, rtol=1e-6, atol=1e-9)


def test_vectors_of_power_iteration_survive_an_interruption(tmp_path):
    overrides = ("data.limit=128", "model.widths=[4,4]", "model.hidden=8", "trainer.epochs=2", "trainer.test_steps=0")
    run = train("digits-gloro", *overrides, out=tmp_path / "straight")
    with pytest.raises(TrainingError, match="Interrupted at step 3"):
        train("digits-gloro", *overrides, out=tmp_path / "stopped", on_trainer=lambda t: stop_after(t, 3))
    again = train("digits-gloro", *overrides, out=tmp_path / "stopped", resume=True)
    assert_identical(weights(again.model("last")), weights(run.model("last")))


def stop_after(trainer, steps):
    """End a run in the middle of an epoch, as a signal would."""
    step = trainer.train_step

    def counted(batch):
        result = step(batch)
        trainer.stop_requested = trainer.step + 1 >= steps
        return result

    trainer.train_step = counted


def test_ramps():
    linear, logarithmic = EpsRamp(), EpsRamp(shape="logarithmic", start=0.01, end=1.1)
    for t in (0, 10, 49.5, 50, 80):
        assert linear.factor(t, 100) == pytest.approx(min(2 * t / 100, 1) * 1.9 + 0.1)
    assert logarithmic.factor(0, 300) == pytest.approx(0.01)
    assert logarithmic.factor(75, 300) == pytest.approx(math.sqrt(0.01 * 1.1))
    assert 1.58 * logarithmic.factor(150, 300) == pytest.approx(1.738)
    with pytest.raises(InputError, match="expected a number > 0"):
        EpsRamp(start=0)
    with pytest.raises(InputError, match="EpsRamp: expected a loss that uses Lipschitz constants, got AT"):
        tiny_trainer("at", methods=("eps-ramp",)).fit()


def test_what_does_not_go_together_is_refused():
    data = TinyData(validation=1 / 6)
    with pytest.raises(InputError, match=r"threat\.norm: expected l2 for GloRoCE, got linf"):
        Trainer(MLP((1, 8, 8), 3), data, GloRoCE(), ThreatModel("linf", 0.1))
    with pytest.raises(InputError, match="cannot be trained with a Lipschitz bound"):
        Trainer(ViT((1, 8, 8), 3, patch_size=4, width=8, depth=1, heads=2), data, EMMA(), ThreatModel("l2", 0.1))
    with pytest.raises(InputError, match="expected a Classifier"):
        Trainer(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)), data, EMMA(), ThreatModel("l2", 0.1))
    with pytest.raises(InputError, match="lambda_t: expected at least 0"):
        GloRoTRADES(lambda_t=-1)
