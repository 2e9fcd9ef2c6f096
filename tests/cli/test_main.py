"""The command, as a user runs it: in a process of its own where kills, signals or limits of the process matter."""

import hashlib
import importlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

import atoll
from atoll.cli import VERBS, main, output
from atoll.errors import RecipeError
from atoll.runs.run import open_run
from atoll.training.checkpoint import Checkpoints
from support import SMALL, run_command

SOURCES = str(Path(atoll.__file__).parents[1])


def final_weights(folder):
    checkpoints = Checkpoints(folder / "checkpoints")
    return load_file(checkpoints.path(checkpoints.steps()[-1]) / "model.safetensors")


def test_a_run_folder_holds_everything(trained):
    names = {p.name for p in trained.iterdir()}
    assert {
        "recipe.yaml",
        "environment.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "index.json",
        "results",
    } <= names
    assert list((trained / "tensorboard").iterdir())
    kinds = {json.loads(line)["kind"] for line in (trained / "metrics.jsonl").read_text().splitlines()}
    assert kinds == {"epoch"}


def test_the_saved_recipe_runs_again_to_the_same_bits(trained, tmp_path):
    assert main(["train", str(trained / "recipe.yaml"), "--out", str(tmp_path / "again"), "--json"]) == 0
    first, again = final_weights(trained), final_weights(tmp_path / "again")
    assert all(torch.equal(first[k], again[k]) for k in first)


def test_resuming_a_finished_run_changes_nothing(trained, capsys):
    before = final_weights(trained)
    assert main(["train", "--resume", "--out", str(trained), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test"][-1]["epoch"] == 3
    assert all(torch.equal(before[k], v) for k, v in final_weights(trained).items())


def test_ls_names_everything(capsys):
    assert main(["ls", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert "digits-at" in listing["recipes"]
    assert {"PGD", "FGSM"} <= listing["attacks"].keys()
    assert {"ViT", "PreActResNet", "MLP"} <= listing["models"].keys()
    assert all(text for kind, found in listing.items() if kind != "optimizers" for text in found.values())
    assert main(["ls", "losses"]) == 0
    assert "TRADES" in capsys.readouterr().out


def test_help_reads_well(capsys):
    done = run_command("--help", check=True)
    assert "atoll train digits-at" in done.stdout
    for verb in VERBS:
        assert verb in done.stdout
        with pytest.raises(SystemExit) as left:
            main([verb, "--help"])
        assert left.value.code == 0
        assert "--json" in capsys.readouterr().out


def test_dry_run_prints_the_resolved_recipe(capsys):
    assert main(["train", *SMALL, "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["epochs"] == 3


def test_open_run_gives_model_data_and_threat(trained):
    run = open_run(trained)
    assert run.threat.eps == 0.15
    assert run.model("last")(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    assert run.data.num_classes == 10


# --- bad input: one sentence, a non-zero exit, no traceback, nothing overwritten -----------------------------------


def npz(folder, **changes):
    draw = np.random.default_rng(0)
    arrays = {
        "x_train": draw.integers(0, 256, (64, 8, 8), dtype=np.uint8),
        "y_train": np.arange(64, dtype=np.uint8) % 3,
        "x_test": draw.integers(0, 256, (16, 8, 8), dtype=np.uint8),
        "y_test": np.arange(16, dtype=np.uint8) % 3,
    }
    np.savez(folder / "data.npz", **arrays | changes)
    return f"data={{class_path: Npz, init_args: {{path: {folder / 'data.npz'}}}}}"


def bad(name, tmp_path, trained):
    """The command line of each case, and what its sentence must say."""
    out = ["--out", str(tmp_path / "out")]
    nan = np.full((64, 8, 8), np.nan, dtype=np.float32)
    cases = {
        "unknown key": (["train", *SMALL, "trainer.epoch=3", *out], "did you mean epochs"),
        "unknown recipe": (["train", "digits-xx", *out], "no recipe 'digits-xx'"),
        "missing file": (["train", str(tmp_path / "none.yaml"), *out], "cannot read the recipe"),
        "missing data": (
            ["train", *SMALL, "data=MNIST", "data.download=false", f"data.root={tmp_path}", *out],
            "ubyte.gz is missing",
        ),
        "eps < 0": (
            ["train", *SMALL, "threat.eps=-0.1", *out],
            "eps: expected a finite number >= 0, got -0.1",
        ),
        "existing run": (["train", *SMALL, "--out", str(trained)], "already contains a run"),
        "nothing to resume": (["train", "--resume", *out], "there is no run to resume"),
        "other recipe": (
            ["train", *SMALL, "seed=9", "--resume", "--out", str(trained)],
            "another recipe (seed differ)",
        ),
        "no recipe": (["train"], "expected a recipe"),
        "attack nothing": (["attack", str(tmp_path / "none")], "is not a run; expected a folder with a recipe.yaml"),
        "attack eps": (["attack", str(trained), "--eps", "much"], "expected a number or a fraction"),
        "attack checkpoint": (["attack", str(trained), "--checkpoint", "77"], "has no checkpoint at step 77"),
    }
    if name == "labels":
        return ["train", *SMALL, npz(tmp_path, y_train=np.full(64, 200)), *out], "label"
    if name == "NaN images":
        return ["train", *SMALL, npz(tmp_path, x_train=nan), *out], "NaN"
    if name == "images out of bounds":
        return ["train", *SMALL, npz(tmp_path, x_train=np.full((64, 8, 8), 7.0, np.float32)), *out], "7"
    return cases[name]


BAD = [
    "unknown key", "unknown recipe", "missing file", "missing data", "eps < 0", "existing run", "nothing to resume",
    "other recipe", "no recipe", "attack nothing", "attack eps", "attack checkpoint", "labels", "NaN images",
    "images out of bounds",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name, tmp_path, trained, capsys):
    command, sentence = bad(name, tmp_path, trained)
    before = {p: p.stat().st_mtime_ns for p in trained.rglob("*")}
    assert main(command) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert sentence in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()
    assert before == {p: p.stat().st_mtime_ns for p in trained.rglob("*")}


def test_debug_shows_the_traceback():
    with pytest.raises(RecipeError):
        main(["train", "digits-xx", "--debug"])


def test_a_checkpoint_of_another_architecture_is_refused(trained, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    tree = yaml.safe_load((copy / "recipe.yaml").read_text())
    tree["model"]["init_args"]["widths"] = [4, 8]
    (copy / "recipe.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", "--resume", "--out", str(copy)]) == 1
    error = capsys.readouterr().err
    assert "does not fit the architecture" in " ".join(error.split())
    assert "Traceback" not in error


def test_a_hostile_run_executes_nothing(trained, tmp_path, monkeypatch, capsys):
    """Somebody else's run names a class of a module that would run code when imported."""
    copy, marker = tmp_path / "copy", tmp_path / "ran"
    shutil.copytree(trained, copy)
    (tmp_path / "hostile.py").write_text(f"open({str(marker)!r}, 'w')\n")
    for file in (copy / "checkpoints").glob("*/checkpoint.json"):
        record = json.loads(file.read_text())
        record["about"]["recipe"]["model"]["class_path"] = "hostile.Model"
        record.pop("digest")
        record["digest"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        file.write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # where `python -m atoll` looks as well
    assert main(["attack", str(copy)]) == 1
    assert "pass --trust if you trust its author" in " ".join(capsys.readouterr().err.split())
    assert not marker.exists()
    importlib.import_module("hostile")  # it could have been
    assert marker.exists()


BODY = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Net: pass\n"
METADATA = "Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n"
ENTRY_POINT = {
    "planted-1.0.dist-info/METADATA": METADATA,
    "planted-1.0.dist-info/entry_points.txt": "[atoll.models]\nNet = my_model:Net\n",
}
STORED = {  # sections of a shared run's recipe, and what the refusal says about each
    "model": (
        {"class_path": "CentroidNet", "init_args": {"encoder": "my_model.Net"}},
        "model.encoder.class_path: my_mod",
    ),
    "loss": ("my_model.py:Net", "my_model.py:Net runs code from outside Atoll; pass --trust"),
    "attack": ("my_model.Net", "attack.class_path: my_model.Net runs code from outside Atoll; pass --trust"),
    "optimizer": ({"class_path": "SGD", "init_args": {"lr": "my_model.Net"}}, "optimizer.lr: expected"),
}


@pytest.mark.parametrize(
    "words", [["train", "--resume", "--out", ".", "--dry-run"], ["train", "--resume", "--out", "."]]
)
def test_a_shared_run_cannot_run_its_files(words, trained, tmp_path):
    """In a run's folder with planted files, where `python -m` and PYTHONPATH make them importable."""
    folder = tmp_path / "shared"
    shutil.copytree(trained, folder)
    tree = yaml.safe_load((folder / "recipe.yaml").read_text()) | {name: part for name, (part, _) in STORED.items()}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    for file, content in (ENTRY_POINT | dict.fromkeys(["my_model.py", "yaml.py", "rich.py", "timm.py"], BODY)).items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(content)
    path = os.pathsep.join([SOURCES, "", str(folder)])
    done = subprocess.run(
        [sys.executable, "-m", "atoll", *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert not (folder / "ran").exists()
    assert done.returncode == 1
    error = " ".join(done.stderr.split())
    assert [text for _, text in STORED.values() if text not in error] == []
    assert "Traceback" not in error


def test_a_full_disk_is_one_sentence(tmp_path):
    """A limit on file size makes writes fail as a full disk does."""
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000));"
        "from atoll.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "train", *SMALL, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr


# --- killed at any moment -------------------------------------------------------------------------------------------


def train_with_kills(folder, moments, words):
    """Start, kill -9 after a while, resume, ... and let the last one finish."""
    for seconds in [*moments, None]:
        process = subprocess.Popen(
            [sys.executable, "-m", "atoll", "train", *words, "--resume", "--out", str(folder)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            _, error = process.communicate(timeout=seconds)
            assert process.returncode == 0, error
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()


KILLED = [*SMALL, "trainer.checkpoint_minutes=0.0005", "methods=[Lookahead]"]


def check_same_end(straight, killed):
    first, second = final_weights(straight), final_weights(killed)
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert [row.to_json() for row in open_run(straight).tests()] == [row.to_json() for row in open_run(killed).tests()]


def test_killed_and_resumed_ends_with_the_same_bits(tmp_path):
    """SIGKILL while the third checkpoint is written."""
    script = (
        "import itertools, os, signal, sys; from atoll.cli import main; from atoll.training import checkpoint;"
        "calls, save = itertools.count(), checkpoint.save_file;"
        "checkpoint.save_file = lambda *a: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == 5 else save(*a);"
        "main(sys.argv[1:])"
    )
    assert main(["train", *KILLED, "--out", str(tmp_path / "straight"), "--json"]) == 0
    command = [sys.executable, "-c", script, "train", *KILLED, "--out", str(tmp_path / "killed")]
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == -signal.SIGKILL
    assert len(Checkpoints(tmp_path / "killed" / "checkpoints").steps()) == 2
    assert main(["train", "--resume", "--out", str(tmp_path / "killed"), "--json"]) == 0
    check_same_end(tmp_path / "straight", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
def test_killed_again_and_again(tmp_path, seed):
    words = [*KILLED, "trainer.epochs=8"]
    start = time.monotonic()
    run_command("train", *words, "--out", str(tmp_path / "straight"), check=True)
    whole = time.monotonic() - start
    draw = random.Random(seed)
    train_with_kills(tmp_path / "killed", [draw.uniform(0.2, 1.0) * whole for _ in range(8)], words)
    check_same_end(tmp_path / "straight", tmp_path / "killed")


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_wide_tables_go_on_below_and_break_no_number(monkeypatch, width):
    printed = io.StringIO()
    monkeypatch.setattr(output, "console", Console(file=printed, width=width))
    cells = [f"{10 + i}.25 ± 0.{i}1" for i in range(8)]
    output.print_table("wide", ["", *(f"number {i} of the table" for i in range(8))], [["trades-awpt", *cells]] * 2)
    text = printed.getvalue()
    assert all(text.count(cell) == 2 for cell in cells)
    assert text.count("wide") == 1
    assert max(map(len, text.splitlines())) <= width
    assert text.count("trades-awpt") == 2 * text.count("┏━━━")


@pytest.mark.parametrize(
    ("endless", "begun", "message"),
    [
        (["trainer.epochs=1000"], "metrics.jsonl", "Interrupted at step"),
        pytest.param(  # tests/training/test_trainer.py stops at this place in its own process
            *(
                ["trainer.epochs=1", "trainer.test_steps=900000"],
                "results/attack",
                "Interrupted during the final test.",
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ctrl_c_saves_and_says_how_to_resume(tmp_path, endless, begun, message):
    process = subprocess.Popen(
        [sys.executable, "-m", "atoll", "train", *SMALL, *endless, "--out", str(tmp_path / "run")],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    path = tmp_path / "run" / begun
    while not path.exists() or (path.is_file() and '"kind": "epoch"' not in path.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)  # in the middle of the next epoch, or of the test
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    last = error.strip().splitlines()[-1]
    assert last.startswith(message)
    assert last.endswith(f" Resume with: atoll train --resume --out {tmp_path / 'run'}")
    assert "Traceback" not in error
