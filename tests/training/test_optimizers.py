"""Fused optimizers: which ones there are, that they compute the textbook updates, and that old runs go on without."""

import numpy as np
import pytest
import torch

import atoll.training.trainer
from atoll.training.optimizers import fuse, resume_optimizer
from support import assert_identical, tiny_trainer, weights


def parameter(dtype=torch.float32):
    return torch.tensor([1.0, -2.0, 3.0], dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    ("build", "fused"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), True),
        (lambda p: torch.optim.Adam(p), True),
        (lambda p: torch.optim.AdamW(p), True),
        (lambda p: torch.optim.Adagrad(p), True),
        (lambda p: torch.optim.Adam(p, fused=True), True),
        (lambda p: torch.optim.Adam(p, fused=False), False),
        (lambda p: torch.optim.Adam(p, foreach=True), None),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), None),
        (lambda p: torch.optim.NAdam(p), None),
    ],
)
def test_which_optimizers_are_fused(build, fused):
    optimizer = build([parameter()])
    result = fuse(optimizer)
    assert type(result) is type(optimizer)
    assert result.param_groups[0].get("fused") is fused
    assert result is optimizer or fused


class Halved(torch.optim.SGD):
    """Has an update of its own."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p /= 2


def test_optimizers_of_others_and_other_numbers_stay_as_they_are():
    own = Halved([parameter()], lr=0.1)
    assert fuse(own) is own
    complex_numbers = torch.optim.SGD([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], lr=0.1)
    assert fuse(complex_numbers) is complex_numbers
    elsewhere = torch.optim.SGD([torch.zeros(2, device="meta", requires_grad=True)], lr=0.1)
    assert fuse(elsewhere) is elsewhere


def test_groups_have_the_same_options():
    a, b = parameter(), parameter()
    groups = [{"params": [a], "lr": 0.5, "weight_decay": 0.1}, {"params": [b], "amsgrad": True}]
    before = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))
    after = fuse(before)
    for old, new in zip(before.param_groups, after.param_groups, strict=True):
        assert new == {**old, "fused": True}
    assert after.defaults == {**before.defaults, "fused": True}


def adam(w, gradients, *, decay=0.0, decoupled=0.0, lr=0.1, betas=(0.9, 0.999), eps=1e-8):
    """Kingma & Ba (2015), algorithm 1; decoupled weight decay of Loshchilov & Hutter (2019)."""
    m = v = np.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        g = g + decay * w
        w = w - lr * decoupled * w
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
        w = w - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return w


def sgd(w, gradients, *, decay=0.0, lr=0.1, momentum=0.0):
    buffer = np.zeros_like(w)
    for g in gradients:
        buffer = momentum * buffer + g + decay * w
        w = w - lr * buffer
    return w


UPDATES = {
    "adam": (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.2), lambda w, g: adam(w, g, decay=0.2)),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2), lambda w, g: adam(w, g, decoupled=0.2)),
    "sgd": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2),
        lambda w, g: sgd(w, g, decay=0.2, momentum=0.9),
    ),
}


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("scaled", [False, True])
def test_updates_are_those_of_the_textbook(name, scaled):
    """With loss scaling the fused kernel divides by the scale, and leaves out steps with infinite gradients."""
    build, truth = UPDATES[name]
    p = parameter(torch.float64)
    start, draw = p.detach().numpy().copy(), torch.Generator().manual_seed(0)
    gradients = torch.randn(6, 3, generator=draw, dtype=torch.float64)
    optimizer = fuse(build([p]))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    for number, gradient in enumerate(gradients):
        optimizer.zero_grad()
        scaler.scale((p * gradient).sum()).backward()
        if scaled and number == 3:
            p.grad[1] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (4 if scaled else 1)
    done = [g for number, g in enumerate(gradients.numpy()) if not (scaled and number == 3)]
    np.testing.assert_allclose(p.detach().numpy(), truth(start, done), rtol=1e-10)


class StopError(Exception):
    pass


def run(folder, *, resume=False, stop=None):
    trainer = tiny_trainer(
        "standard",
        folder=folder,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        checkpoint_minutes=0,
        epochs=2,
        validation_steps=0,
    )
    step = trainer.train_step

    def train_step(batch):
        if trainer.step == stop:
            raise StopError
        return step(batch)

    trainer.train_step = train_step
    if stop is None:
        trainer.fit(resume=resume)
    else:
        with pytest.raises(StopError):
            trainer.fit(resume=resume)
    return trainer


def test_runs_of_older_versions_go_on_without_fused_updates(tmp_path, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(atoll.training.trainer, "fuse", lambda optimizer: optimizer)
        straight = run(tmp_path / "straight")
        run(tmp_path / "stopped", stop=4)
    resumed = run(tmp_path / "stopped", resume=True)
    assert resumed.optimizer.param_groups[0]["fused"] is None
    assert not getattr(resumed.optimizer, "_step_supports_amp_scaling", False)  # the scaler leaves no scale to it
    assert resumed.step == straight.step
    assert_identical(weights(resumed.model), weights(straight.model))


def test_new_runs_go_on_with_fused_updates(tmp_path):
    straight = run(tmp_path / "straight")
    run(tmp_path / "stopped", stop=4)
    resumed = run(tmp_path / "stopped", resume=True)
    assert resumed.optimizer.param_groups[0]["fused"] is True
    assert_identical(weights(resumed.model), weights(straight.model))


@pytest.mark.parametrize("build", [build for build, _ in UPDATES.values()])
def test_the_state_of_both_implementations_has_the_same_entries(build):
    states = []
    for prepare in (fuse, lambda optimizer: optimizer):
        p = parameter()
        optimizer = prepare(build([p]))
        p.square().sum().backward()
        optimizer.step()
        states.append(optimizer.state_dict())
    fused, plain = states
    assert fused["state"][0].keys() == plain["state"][0].keys()
    assert {k: (v.dtype, v.shape) for k, v in fused["state"][0].items()} == {
        k: (v.dtype, v.shape) for k, v in plain["state"][0].items()
    }
    for state in states:  # each is loaded by either
        for prepare in (fuse, lambda optimizer: optimizer):
            optimizer = resume_optimizer(prepare(build([parameter()])), state)
            assert optimizer.state_dict()["param_groups"] == state["param_groups"]
