"""The training loop: passes, gradients, resuming, and stopping in time."""

import json
import math

import pytest
import torch
from torch import nn

from atoll.errors import CheckpointError, InputError, TrainingError
from atoll.losses import AT, TRADES
from atoll.runs.train import train
from atoll.training.checkpoint import load_checkpoint
from atoll.training.methods import Method
from atoll.training.observers import JsonLines, Observer, read_metrics
from atoll.training.trainer import Trainer, TrainerSettings
from support import (
    ANNEALED,
    CENTROID,
    CERTIFIED,
    LOSSES,
    METHODS,
    TOGETHER,
    assert_identical,
    first_batch,
    naive_loss,
    tiny_trainer,
    weights,
)


@pytest.mark.parametrize(
    ("loss", "passes"),
    # clean and adversarial pass of the step, plus what PGD-3 needs (and the clean prediction, for the KL)
    [("standard", 1), ("at", 1 + 3), ("trades", 2 + 4), ("alp", 2 + 3), ("mart", 2 + 3)],
)
def test_a_step_makes_no_more_passes_than_it_must(loss, passes):
    trainer = tiny_trainer(loss)
    count = []
    trainer.model.body.register_forward_hook(lambda *_: count.append(1))
    trainer.train_step(first_batch(trainer))
    assert len(count) == passes


@pytest.mark.parametrize("loss", [*LOSSES, *ANNEALED])
def test_gradient_is_that_of_the_loss_written_by_hand(loss):
    """One step without momentum moves the weights by -lr times the gradient computed here independently."""
    trainer = tiny_trainer(loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    batch = first_batch(trainer)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    step = trainer.train_step(batch)
    model = tiny_trainer(loss).model  # the weights before the step
    g = model(batch.x)
    g_adv = model(step.x_adv) if step.x_adv is not None else None
    naive_loss(trainer.loss, g, g_adv if g_adv is not None else g, batch.y).mean().backward()
    for old, new, truth in zip(before, trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close((old - new) / 0.1, truth.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss", [*LOSSES, *ANNEALED, *CERTIFIED, *CENTROID])
def test_accumulated_gradients_are_those_of_the_whole_batch(loss):
    whole, parts = tiny_trainer(loss), tiny_trainer(loss, accumulate=4)
    for trainer in (whole, parts):
        trainer.train_step(first_batch(trainer))
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["at", "trades"])
@pytest.mark.parametrize("method", METHODS)
def test_accumulated_gradients_with_every_method(loss, method):
    """Also where a method looks at statistics of the batch; in float64, so that only the definition can differ."""
    gradients = []
    for accumulate in (1, 2, 4):
        trainer = tiny_trainer(loss, methods=[method], double=True, accumulate=accumulate)
        for m in trainer.methods:
            m.setup(trainer)
        step = trainer.train_step(first_batch(trainer))
        gradients.append([p.grad for p in trainer.model.parameters()] + list(step.terms.values()))
    for parts in gradients[1:]:
        for a, b in zip(gradients[0], parts, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_pass_for_statistics_changes_nothing_and_repeats_dropout():
    class Compare(Method):
        uses_batch = True

        def on_loss(self, trainer, step):
            rows = (step.index[:, None] == step.whole.index).nonzero()[:, 1]
            torch.testing.assert_close(step.whole.out.adv_logits[rows], step.out.adv_logits)
            assert not step.whole.out.adv_logits.requires_grad

    trainer = tiny_trainer("at", accumulate=2, batch_norm=True)
    trainer.model.body.append(nn.Dropout(0.5))
    trainer.methods = (Compare(),)
    trainer.train_step(first_batch(trainer))
    assert {m.num_batches_tracked.item() for m in trainer.model.modules() if isinstance(m, nn.BatchNorm2d)} == {2}


class KilledError(Exception):
    pass


class KillAt(Observer):
    """Stops the run as hard as a test can in its own process."""

    def __init__(self, step):
        self.step = step

    def progress(self, trainer):
        if trainer.step + 1 == self.step:
            raise KilledError


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=5e-4),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


# Every method alone, all of them together, and every optimizer.
RESUMED = [(("sgd"), (name,)) for name in METHODS] + [(name, ()) for name in OPTIMIZERS] + [("sgd", TOGETHER)]


@pytest.mark.parametrize(("optimizer", "methods"), RESUMED, ids=lambda v: v if isinstance(v, str) else "+".join(v))
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, methods, optimizer):
    """10 steps in 2 epochs, killed in the middle of each."""
    arguments = {
        "methods": methods,
        "optimizer": OPTIMIZERS[optimizer],
        "batch_norm": True,
        "checkpoint_minutes": 0,
        "epochs": 2,
    }
    straight = tiny_trainer("trades", folder=tmp_path / "straight", **arguments)
    straight.fit()
    for kill in (3, 7, None):
        observers = [KillAt(kill)] if kill else []
        trainer = tiny_trainer("trades", folder=tmp_path / "killed", observers=observers, **arguments)
        if kill:
            with pytest.raises(KilledError):
                trainer.fit(resume=True)
        else:
            trainer.fit(resume=True)
    assert trainer.step == 10
    assert_identical(weights(trainer.model), weights(straight.model))


def test_resuming_from_the_last_epoch_gives_the_same_bits_too(tmp_path):
    """Without a checkpoint after every step, the steps since the last one are done again."""
    straight = tiny_trainer(folder=tmp_path / "a")
    straight.fit()
    with pytest.raises(KilledError):
        tiny_trainer(folder=tmp_path / "b", observers=[KillAt(8)]).fit()
    again = tiny_trainer(folder=tmp_path / "b")
    again.fit(resume=True)
    assert_identical(weights(again.model), weights(straight.model))


def test_a_damaged_checkpoint_is_passed_over_and_nothing_changes(tmp_path):
    straight = tiny_trainer(folder=tmp_path / "a")
    straight.fit()
    with pytest.raises(KilledError):
        tiny_trainer(folder=tmp_path / "b", observers=[KillAt(12)]).fit()
    newest = sorted((tmp_path / "b" / "checkpoints").iterdir())[-1]
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-1] ^= 255
    (newest / "model.safetensors").write_bytes(content)
    again = tiny_trainer(folder=tmp_path / "b")
    again.fit(resume=True)
    assert len(again.damaged) == 1
    assert_identical(weights(again.model), weights(straight.model))


def test_metrics_have_no_gap_and_no_double_after_a_kill(tmp_path):
    def watched(folder, *more):
        return tiny_trainer(folder=folder, observers=[JsonLines(folder / "metrics.jsonl"), *more])

    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    watched(tmp_path / "a").fit()
    with pytest.raises(KilledError):
        watched(tmp_path / "b", KillAt(8)).fit()
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # the kill came in the middle of a line
    watched(tmp_path / "b").fit(resume=True)
    assert read_metrics(tmp_path / "a" / "metrics.jsonl") == read_metrics(tmp_path / "b" / "metrics.jsonl")
    watched(tmp_path / "b").fit(resume=True)  # a finished run, once more
    assert read_metrics(tmp_path / "a" / "metrics.jsonl") == read_metrics(tmp_path / "b" / "metrics.jsonl")


def test_an_epoch_is_recorded_once_even_if_the_kill_comes_between_its_record_and_its_checkpoint(tmp_path):
    class KillOnRecord(Observer):
        def record(self, record):
            if record["kind"] == "epoch" and record["epoch"] == 2:
                raise KilledError

    def watched(*more):
        observers = [JsonLines(tmp_path / "metrics.jsonl"), *more]
        return tiny_trainer(folder=tmp_path, observers=observers, checkpoint_minutes=0)  # also at the epoch's last step

    with pytest.raises(KilledError):
        watched(KillOnRecord()).fit()
    watched().fit(resume=True)
    epochs = [r["epoch"] for r in read_metrics(tmp_path / "metrics.jsonl")[0] if r["kind"] == "epoch"]
    assert epochs == [1, 2, 3]


@pytest.mark.parametrize("method", ["swa", "measure-wci"])
def test_a_run_of_no_epochs_is_evaluated_once(tmp_path, method):
    class KillOnRecord(Observer):
        def record(self, record):
            raise KilledError

    def watched(*more):
        observers = [JsonLines(tmp_path / "metrics.jsonl"), *more]
        return tiny_trainer(folder=tmp_path, methods=[method], epochs=0, observers=observers)

    with pytest.raises(KilledError):
        watched(KillOnRecord()).fit()
    initial = weights(tiny_trainer(methods=[method]).model)
    for _ in range(2):  # resumed, and once more when it is finished
        trainer = watched()
        trainer.fit(resume=True)
        assert_identical(weights(trainer.model), initial)
        index = json.loads((tmp_path / "index.json").read_text())
        assert (index["finished"], index["last"], index["best"]["raw"]) == (True, 0, 0)
        ((record,), _) = read_metrics(tmp_path / "metrics.jsonl")
        accuracy = trainer.validate(trainer.data.validation, trainer.settings.validation_steps)
        assert record["validation_robust"] == accuracy["robust"].value


def test_same_seed_same_run_and_other_seed_other_run():
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(runs))  # whatever the global generator is at
        trainer = tiny_trainer(epochs=1)
        trainer.seed = seed
        state = torch.get_rng_state()
        trainer.fit()
        assert torch.equal(torch.get_rng_state(), state)
        runs.append(weights(trainer.model))
    assert_identical(runs[0], runs[1])
    assert any(not torch.equal(runs[0][k], runs[2][k]) for k in runs[0])


def test_divergence_stops_with_a_diagnosis_and_keeps_the_last_good_checkpoint(tmp_path):
    trainer = tiny_trainer(
        folder=tmp_path, optimizer=lambda p: torch.optim.SGD(p, lr=1e25), epochs=3, checkpoint_minutes=0
    )
    with pytest.raises(
        TrainingError, match=r"diverged at step \d+ .*learning rate 1e\+25.*not finite|.*is (nan|inf)"
    ) as info:
        trainer.fit()
    assert "last good checkpoint" in str(info.value)
    newest, faults = trainer.checkpoints.newest()
    assert not faults
    assert all(value.isfinite().all() for value in newest.model.values())


def test_a_nan_in_one_term_names_it():
    class Poison(Method):
        def on_loss(self, trainer, step):
            step.terms["poison"] = step.terms["ce"] * math.nan

    trainer = tiny_trainer()
    trainer.methods = (Poison(),)
    before = weights(trainer.model)
    with pytest.raises(TrainingError, match="the loss term poison is nan"):
        trainer.train_step(first_batch(trainer))
    assert_identical(weights(trainer.model), before)


class PoisonGradient(Method):
    """At one step, a term that is finite with a gradient that is not; records all that must not move."""

    def __init__(self, step):
        self.step, self.before = step, None

    def on_loss(self, trainer, step):
        ce = step.terms["ce"]
        step.terms["poison"] = (ce - ce.detach()) if step.number != self.step else (ce - ce.detach()).sqrt()

    def before_step(self, trainer, step):
        if step.number == self.step:
            self.before = all_state(trainer)


def all_state(trainer):
    states = [(p, trainer.optimizer.state.get(p, {})) for p in trainer.model.parameters()]
    state = {f"{n}.{k}": v.clone() for n, (_, s) in enumerate(states) for k, v in s.items() if torch.is_tensor(v)}
    averages = {f"{n}.{k}": v.clone() for n, a in trainer.averages.items() for k, v in a.items()}
    return weights(trainer.model) | state | averages


POISONED = [(name, (), {}) for name in OPTIMIZERS] + [
    ("sgd", TOGETHER, {}),
    ("sgd", ("lookahead", "swa", "awp"), {"clip_norm": 1.0}),
    ("adamw", ("swa", "sam"), {"accumulate": 2}),
]


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(("optimizer", "methods", "settings"), POISONED)
def test_a_gradient_that_is_not_finite_moves_nothing(tmp_path, optimizer, methods, settings, at):
    arguments = {"methods": methods, "optimizer": OPTIMIZERS[optimizer], "batch_norm": True, "checkpoint_minutes": 0}
    trainer = tiny_trainer("trades", folder=tmp_path, epochs=2, **arguments, **settings)
    trainer.methods += (poison := PoisonGradient(at),)
    with pytest.raises(TrainingError, match=rf"diverged at step {at} .* the gradient of body.0.weight is not finite"):
        trainer.fit()
    assert_identical(all_state(trainer), poison.before)
    newest, faults = trainer.checkpoints.newest()
    assert not faults
    assert newest.about["step"] == at
    tensors = [*newest.model.values(), *(v for a in trainer.averages for v in newest.weights(a).values())]
    assert all(tensor.isfinite().all() for tensor in tensors)


@pytest.mark.parametrize(("value", "message"), [(math.nan, "finite numbers"), (1.5, r"values in \[0, 1\], got \[0")])
def test_invalid_inputs_move_nothing(value, message):
    trainer = tiny_trainer("trades")
    batch, before = first_batch(trainer), weights(trainer.model)
    batch.x[3, 0, 1, 2] = value
    with pytest.raises(InputError, match=f"inputs: expected {message}"):
        trainer.train_step(batch)
    assert_identical(weights(trainer.model), before)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_of_one_gradient_is_enough(value):
    class Set(Method):
        def before_step(self, trainer, step):
            trainer.model.head.weight.grad[1, 2] = value

    trainer = tiny_trainer(clip_norm=1.0)
    trainer.methods, before = (Set(),), weights(trainer.model)
    with pytest.raises(TrainingError, match=r"the gradient of head\.weight is not finite"):
        trainer.train_step(first_batch(trainer))
    assert_identical(weights(trainer.model), before)
    value = 3e38  # large is not infinite
    trainer.train_step(first_batch(trainer))


def test_loss_scaling_ends_a_run_whose_gradients_stay_infinite():
    class Overflow(Method):
        def before_step(self, trainer, step):
            trainer.model.head.weight.grad[0, 0] = math.inf

    trainer = tiny_trainer(epochs=20)
    trainer.scaler = torch.amp.GradScaler("cpu")
    trainer.methods, before = (Overflow(),), weights(trainer.model)
    with pytest.raises(TrainingError, match=r"diverged at step 16 .* the gradient of head\.weight is not finite"):
        trainer.fit()
    assert trainer.scaler.get_scale() == 1
    assert_identical(weights(trainer.model), before)


def test_statistics_that_are_not_finite_are_not_saved(tmp_path):
    trainer = tiny_trainer(folder=tmp_path, batch_norm=True)
    norm = next(m for m in trainer.model.modules() if isinstance(m, nn.BatchNorm2d))
    norm.running_var.fill_(math.inf)
    with pytest.raises(TrainingError, match=r"the statistic body\.\d+\.running_var is not finite"):
        trainer._save()


def test_a_request_to_stop_saves_first(tmp_path):
    class Ask(Observer):
        def progress(self, trainer):
            trainer.stop_requested = trainer.step == 6

    trainer = tiny_trainer(folder=tmp_path, observers=[Ask()])
    with pytest.raises(TrainingError, match="Interrupted at step 7"):
        trainer.fit()
    assert trainer.checkpoints.steps()[-1] == 7


def test_a_request_to_stop_in_the_last_validation_is_not_lost(tmp_path):
    trainer = tiny_trainer(folder=tmp_path, epochs=1)
    validate = trainer.validate

    def ask(*arguments):
        trainer.stop()
        return validate(*arguments)

    trainer.validate = ask
    with pytest.raises(KeyboardInterrupt, match="Interrupted during the final test"):
        trainer.fit()
    trainer = tiny_trainer(folder=tmp_path, epochs=1)
    trainer.fit(resume=True)
    assert trainer.step == 5


def test_methods_act_at_their_places_in_order():
    calls = []

    class Spy(Method):
        def __init__(self, name):
            self.name = name

        def __getattribute__(self, attribute):
            if attribute in (
                "before_attack",
                "around_attack",
                "around_step",
                "on_loss",
                "after_step",
                "after_epoch",
            ):
                calls.append(f"{object.__getattribute__(self, 'name')}.{attribute}")
            return object.__getattribute__(self, attribute)

    trainer = tiny_trainer(epochs=1, batch_size=80)
    trainer.methods = (Spy("a"), Spy("b"))
    trainer.fit()
    places = ["before_attack", "around_attack", "around_step", "on_loss", "after_step", "after_epoch"]
    assert calls == [f"{name}.{place}" for place in places for name in ("a", "b")]


def test_contexts_are_left_in_reverse_even_when_the_step_fails():
    from contextlib import contextmanager

    events = []

    class Around(Method):
        def __init__(self, name):
            self.name = name

        @contextmanager
        def around_step(self, trainer, step):
            events.append(f"enter {self.name}")
            try:
                yield
            finally:
                events.append(f"leave {self.name}")

        def on_loss(self, trainer, step):
            raise KilledError

    trainer = tiny_trainer()
    trainer.methods = (Around("a"), Around("b"))
    with pytest.raises(KilledError):
        trainer.train_step(first_batch(trainer))
    assert events == ["enter a", "enter b", "leave b", "leave a"]


def test_lookahead_against_its_definition():
    """Slow weights move half-way to where plain SGD got in k steps, and SGD goes on from there."""
    trainer, plain = tiny_trainer(methods=["lookahead"]), tiny_trainer()
    for method in trainer.methods:
        method.setup(trainer)
    start = [p.detach().clone() for p in plain.model.parameters()]
    for t in (trainer, plain):
        for number in range(2):
            t.step = number
            t.train_step(first_batch(t))
    for slow, fast, mine in zip(start, plain.model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(mine, slow + 0.5 * (fast - slow))


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_mixing_changes_points_and_labels_before_the_attack(name):
    trainer = tiny_trainer("at", methods=[name])
    batch = first_batch(trainer)
    step = trainer.train_step(batch)
    assert step.y.shape == (16, 3)
    torch.testing.assert_close(step.y.sum(1), torch.ones(16))
    # What the label says is what the image shows: undo the mixture of each pair.
    own = step.y.gather(1, batch.y[:, None])[:, 0]
    pair = batch.y != batch.y.view(-1, 2).flip(1).flatten()
    weight = own[pair][0]
    torch.testing.assert_close(own[pair], weight.expand(int(pair.sum())))
    assert 0 < float(weight) < 1
    if name == "mixup":
        partner = batch.x.view(8, 2, *batch.x.shape[1:]).flip(1).flatten(0, 1)
        torch.testing.assert_close(step.x, weight * batch.x + (1 - weight) * partner)
    assert (step.x_adv - step.x).abs().max() <= 0.1 + 1e-6


def test_early_stopping_ends_the_run():
    from atoll.training.methods import EarlyStopping

    trainer = tiny_trainer(epochs=50)
    trainer.methods = (EarlyStopping(patience=2, min_gain=1.0),)
    trainer.fit()
    assert trainer.epoch == 3


def test_the_best_checkpoint_is_selected_on_validation_points(tmp_path):
    trainer = tiny_trainer(folder=tmp_path, epochs=4)
    trainer.fit()
    index = json.loads((tmp_path / "index.json").read_text())
    assert (index["selected_on"], index["finished"], index["last"]) == ("validation", True, trainer.step)
    best = load_checkpoint(tmp_path / "checkpoints" / f"{index['best']['raw']:08d}")
    assert best.about["epoch"] == trainer.best["raw"].epoch
    assert best.training["position"]["epoch"] == trainer.best["raw"].epoch


def test_selecting_on_the_test_set_is_recorded(tmp_path):
    tiny_trainer(folder=tmp_path, epochs=1, select_on="test").fit()
    assert json.loads((tmp_path / "index.json").read_text())["selected_on"] == "test"


def test_any_module_can_be_trained():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    tiny = tiny_trainer()
    trainer = Trainer(
        model,
        tiny.data,
        TRADES(),
        tiny.threat,
        settings=TrainerSettings(epochs=6, batch_size=16),
        device="cpu",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    trainer.fit()
    assert trainer.validate(trainer.data.test, steps=0)["clean"].value > 0.8


@pytest.mark.slow
def test_robust_training_is_far_more_robust_than_standard_training(tmp_path):
    robust = {}
    for recipe in ("digits-standard", "digits-at"):
        robust[recipe] = train(recipe, out=tmp_path / recipe).tests()[-1].robust.value
    assert robust["digits-at"] > robust["digits-standard"] + 0.3


def test_extra_methods_in_a_checkpoint_are_noticed(tmp_path):
    with pytest.raises(KilledError):
        tiny_trainer(folder=tmp_path, observers=[KillAt(8)]).fit()
    with pytest.raises(CheckpointError, match="has the state of 0 methods, but the recipe has 1"):
        tiny_trainer(folder=tmp_path, methods=["lookahead"]).fit(resume=True)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"epochs": -1}, "epochs: expected at least 0, got -1"),
        ({"batch_size": 1000}, "batch_size: expected 1 to 80"),
        (
            {"batch_size": 15, "accumulate": 2},
            "batch_size: expected a multiple of 1 processes x 2 accumulated parts",
        ),
        ({"precision": "fp16"}, "precision: fp16 requires a GPU; use bf16 or float32 on the CPU"),
        ({"clip_norm": -1.0}, "clip_norm: expected a number > 0"),
    ],
)
def test_nonsense_is_refused(settings, sentence):
    with pytest.raises(InputError, match=sentence):
        tiny_trainer(**settings).fit()


def test_clipping_bounds_the_gradient():
    trainer = tiny_trainer(clip_norm=1e-3)
    trainer.train_step(first_batch(trainer))
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    assert float(norm) == pytest.approx(1e-3, rel=1e-4)


def test_batch_norm_sees_clean_and_adversarial_batches_apart_and_never_the_attack():
    trainer = tiny_trainer("trades", batch_norm=True)
    trainer.train_step(first_batch(trainer))
    counts = [m.num_batches_tracked.item() for m in trainer.model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert counts
    assert set(counts) == {2}


def test_losses_without_an_attack_are_selected_by_clean_accuracy():
    assert tiny_trainer("standard").selection_metric == "validation_clean"
    assert tiny_trainer("at").selection_metric == "validation_robust"
    assert AT.uses_clean is False
