"""The number of threads: what decides it, that it is measured without a trace, and that a resume keeps it."""

import copy
import json
import os
import shutil
import statistics
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from atoll import threads
from atoll.attacks.measure import MeasureAttack
from atoll.cli import main
from atoll.errors import InputError
from atoll.measure import measurement
from atoll.runs.run import open_run
from atoll.threads import choose_threads, measure_threads, passes_of, recorded_threads, settle_threads, threads_path
from atoll.training.trainer import Trainer
from support import SMALL, script_environment, tiny_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _pretend_threads(request, monkeypatch):
    """Only slow tests use several threads, which are slow on busy machines; others only see that the number is set."""
    if request.node.get_closest_marker("slow") is None:
        numbers = [1]
        monkeypatch.setattr(torch, "set_num_threads", numbers.append)
        monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])


@pytest.fixture
def measured(monkeypatch):
    """The measurement returns 3, and OMP_NUM_THREADS is not set."""
    calls = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "measure_threads", lambda run: calls.append(run()) or 3)
    return calls


def settle(recorded=None, device=CPU):
    settle_threads(recorded, device, tiny_model(), lambda rows: torch.rand(rows, 1, 8, 8), 4)
    return torch.get_num_threads()


def test_the_library_does_not_change_the_number(measured, trained, tmp_path):
    assert settle() == settle(recorded=5) == 1
    run = open_run(shutil.copytree(trained, tmp_path / "run"))
    assert run.attack("FGSM", points=3).environment.threads == 1
    assert not measured


@pytest.mark.parametrize(
    ("request_", "environment", "recorded", "device", "number"),
    [
        ("auto", {}, None, "cpu", 3),  # measured
        ("auto", {"OMP_NUM_THREADS": "2"}, None, "cpu", 1),  # what PyTorch made of it at its start
        ("auto", {"OMP_NUM_THREADS": "2"}, 5, "cpu", 5),
        ("auto", {}, 5, "cpu", 5),
        ("auto", {}, None, "meta", 1),
        ("auto", {"WORLD_SIZE": "2"}, None, "cpu", 1),
        ("auto", {"WORLD_SIZE": "2"}, 5, "cpu", 1),
        ("2", {}, None, "cpu", 2),
        ("2", {"OMP_NUM_THREADS": "4"}, None, "cpu", 2),
        ("2", {}, 2, "cpu", 2),
    ],
)
def test_what_decides_the_number(request_, environment, recorded, device, number, measured, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with choose_threads(request_):
        assert settle(recorded, torch.device(device)) == number
    assert torch.get_num_threads() == 1
    assert len(measured) == (number == 3)


@pytest.mark.parametrize("request_", ["0", "-1", "", "two", "1.5", "99999", "²"])
def test_nonsense_is_refused(request_):
    with pytest.raises(InputError, match="threads: expected auto or a number from 1 to 1024"), choose_threads(request_):
        pass


def test_every_kind_of_model_is_measured_once_and_from_the_number_before(monkeypatch):
    """One command can compute with several models; a small one must not decide for a large one."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "measure_threads", lambda run: calls.append(torch.get_num_threads()) or len(calls))
    torch.set_num_threads(4)
    calls, numbers = [], []
    with choose_threads("auto"):
        for width, recorded in ((1, None), (2, None), (1, None), (2, 3), (2, None)):
            settle_threads(recorded, CPU, torch.nn.Linear(2, width), lambda rows: torch.rand(rows, 2), 4)
            numbers.append(torch.get_num_threads())
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        assert settle() == 4
    assert (calls, numbers) == ([4, 4], [1, 2, 1, 3, 2])


def test_another_number_than_the_recorded_one_is_refused():
    with (
        choose_threads("2"),
        pytest.raises(InputError, match="threads: this began with 3 and must continue with 3, got 2"),
    ):
        settle(recorded=3)


@pytest.mark.parametrize(
    ("ratios", "most", "number"),
    [
        ({}, 1, 1),
        ({(1, 2): [0.55, 0.6, 0.5]}, 2, 2),
        ({(1, 2): [0.9, 0.85, 0.95]}, 2, 1),  # faster, but not by enough
        ({(1, 2): [0.5, 0.5, 1.5, 0.6, 1.2]}, 2, 1),  # fast in the median, but not in most rounds
        ({(1, 2): [0.5, 0.5, 9.0, 0.6]}, 2, 2),  # one round was disturbed
        ({(1, 2): [0.6], (2, 4): [0.6], (4, 6): [0.9]}, 6, 4),
        ({(1, 2): [0.6], (2, 3): [0.7]}, 3, 3),
    ],
)
def test_more_threads_must_clearly_pay(ratios, most, number, monkeypatch):
    monkeypatch.setattr(threads, "_compare", lambda run, fewer, more: ratios[fewer, more])
    torch.set_num_threads(most)
    assert measure_threads(lambda: None) == number
    assert torch.get_num_threads() == most


def test_rounds_alternate_between_both_numbers(monkeypatch):
    clock, calls = iter(range(10**6)), []
    monkeypatch.setattr(threads.time, "perf_counter", lambda: next(clock) * 1e-3)
    ratios = threads._compare(lambda: calls.append(torch.get_num_threads()), 1, 2)
    assert statistics.median(ratios) == pytest.approx(1)
    assert len(ratios) == threads.ROUNDS
    assert calls == [1, 1, 2, 2] * len(ratios)


def test_slow_passes_are_measured_once(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(threads.time, "perf_counter", lambda: float(next(clock)))
    assert len(threads._compare(lambda: None, 1, 2)) == 1
    sizes = []
    run = passes_of(torch.nn.Flatten(), lambda rows: sizes.append(rows) or torch.ones(rows, 2), 100)
    run()
    assert sizes == [1, 1]


def test_measuring_leaves_no_trace():
    model, state = tiny_model(batch_norm=True), torch.get_rng_state()
    model.head.eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    torch.set_num_threads(2)
    with choose_threads("auto"), pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        settle_threads(None, CPU, model, lambda rows: torch.rand(rows, 1, 8, 8), 16)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_a_model_without_gradients_keeps_the_number(monkeypatch):
    class Broken(torch.nn.Module):
        def forward(self, x):
            raise ValueError("expected images of another size")

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with choose_threads("auto"):
        settle_threads(None, CPU, Broken(), lambda rows: torch.rand(rows, 2), 4)
        assert torch.get_num_threads() == 1


# --- measurements ----------------------------------------------------------------------------------------------------


def interrupt(monkeypatch, begin):
    """The next attack is stopped after ``begin``, which is called with the folder of its result."""
    seen = []

    def stop(self, subject, settings, context):
        seen.append(torch.get_num_threads())
        begin(context.folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(MeasureAttack, "measure", stop)
    return seen


ATTACK = ["--attacks", "FGSM", "--points", "3"]


def test_an_interrupted_measurement_continues_with_its_number(trained, tmp_path, monkeypatch, measured, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    known = set(run.glob("results/attack/*"))
    with pytest.MonkeyPatch.context() as patch:
        seen = interrupt(patch, lambda folder: (folder / "progress").touch())
        assert main(["attack", str(run), *ATTACK, "--threads", "2"]) == 130
    (folder,) = set(run.glob("results/attack/*")) - known
    assert recorded_threads(threads_path(folder), threads.RECORD) == 2
    assert main(["attack", str(run), *ATTACK, "--threads", "4"]) == 1
    assert "began with 2" in " ".join(capsys.readouterr().err.split())
    assert main(["attack", str(run), *ATTACK, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"].values()
    assert (seen, result["environment"]["threads"], len(measured)) == ([2], 2, 0)
    assert not threads_path(folder).exists()
    assert main(["attack", str(run), *ATTACK, "--restart", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"].values()
    assert (result["environment"]["threads"], len(measured)) == (3, 1)
    assert torch.get_num_threads() == 1


def test_a_measurement_that_fails_at_once_leaves_nothing(trained, tmp_path, monkeypatch):
    run = shutil.copytree(trained, tmp_path / "run")
    before = set(run.rglob("*"))
    interrupt(monkeypatch, lambda folder: None)
    assert main(["attack", str(run), *ATTACK]) == 130
    assert set(run.rglob("*")) == before


def test_the_number_is_not_part_of_the_question(trained, tmp_path, capsys):
    run, folders = shutil.copytree(trained, tmp_path / "run"), []
    for number in ("1", "2"):
        assert main(["attack", str(run), *ATTACK, "--threads", number, "--json"]) == 0
        folders.append(json.loads(capsys.readouterr().out)["results"][str(run)]["folder"])
    assert folders[0] == folders[1]


@pytest.mark.parametrize("kind", ["attack", "certify", "curvature", "explain", "health"])
def test_every_measurement_asks_for_a_number(kind, trained, tmp_path, measured, monkeypatch):
    run, numbers = shutil.copytree(trained, tmp_path / "run"), []

    def stop(self, subject, settings, context):
        numbers.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr(type(measurement(kind)), "measure", stop)
    norm = ["--eps", "0.1"] if kind == "certify" else []
    assert main([kind, str(run), "--points", "3", *norm]) == 130
    assert numbers == [3]


# --- training --------------------------------------------------------------------------------------------------------


def weights(folder):
    return load_file(open_run(folder).checkpoint_path("last") / "model.safetensors")


def test_a_resumed_training_keeps_its_number(tmp_path, monkeypatch, measured, capsys):
    numbers, step = [], Trainer.train_step

    def counted(self, batch):
        numbers.append(torch.get_num_threads())
        if len(numbers) == 6:
            raise KeyboardInterrupt
        return step(self, batch)

    assert main(["train", *SMALL, "--threads", "2", "--out", str(tmp_path / "straight"), "--json"]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", counted)
        assert main(["train", *SMALL, "--threads", "2", "--out", str(tmp_path / "run"), "--json"]) == 130
        assert main(["train", "--resume", "--threads", "1", "--out", str(tmp_path / "run"), "--json"]) == 1
        assert "threads: this began with 2" in capsys.readouterr().out
        assert main(["train", "--resume", "--out", str(tmp_path / "run"), "--json"]) == 0
    assert set(numbers) == {2}
    assert not measured
    first, second = weights(tmp_path / "straight"), weights(tmp_path / "run")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["threads"] == 2


@pytest.mark.slow
def test_a_measured_training_has_the_bits_of_one_with_the_same_number(tmp_path):
    """A resumed process does not measure."""
    environment = {name: value for name, value in script_environment().items() if name != "OMP_NUM_THREADS"}

    def run(*words):
        command = [sys.executable, "-m", "atoll", "train", *SMALL, "--json", *words]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)

    run("--out", str(tmp_path / "auto"))
    number = json.loads((tmp_path / "auto" / "environment.json").read_text())["threads"]
    run("--threads", str(number), "--out", str(tmp_path / "fixed"))
    first, second = weights(tmp_path / "auto"), weights(tmp_path / "fixed")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("policy", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_idle_threads_of_the_command_sleep(policy, expected):
    code = (
        "import os, sys; from contextlib import suppress; from atoll.cli import main; sys.argv[1:] = ['--version']\n"
        "with suppress(SystemExit):\n    main()\n"
        "sys.exit(os.environ['OMP_WAIT_POLICY'] + ' torch' * ('torch' in sys.modules))"
    )
    environment = {name: value for name, value in script_environment().items() if name != "OMP_WAIT_POLICY"} | policy
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == expected
    assert os.environ.get("OMP_WAIT_POLICY") is None
