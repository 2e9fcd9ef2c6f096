"""Named cases of damage, hostile runs and full disks, as commands: the exit code, the sentence, and what stays."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from multiprocessing import get_context

import pytest
import torch

from atoll.attacks.progress import TensorFile
from atoll.cli import main
from atoll.files import open_for_writing, temporary_path
from store_cases import outside_files


@pytest.fixture
def run(runs, tmp_path):
    """A copy of a finished run, with a secret file beside it."""
    shutil.copytree(runs["finished"], tmp_path / "run")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("password: [hunter2")
    return tmp_path / "run"


def link(name):
    """Replace a folder of the run by a link out of it, or add this link."""

    def happen(run):
        if (run / name).is_dir():
            shutil.move(run / name, run.parent / "outside" / "moved")
        else:
            (run.parent / "outside" / "moved").mkdir()
        (run / name).symlink_to(run.parent / "outside" / "moved")

    return happen


def write(name, content):
    return lambda run: (run / name).write_bytes(content)


def half(run):
    content = (run / "recipe.yaml").read_bytes()
    (run / "recipe.yaml").write_bytes(content[: len(content) // 2])


def link_recipe(run):
    (run / "recipe.yaml").unlink()
    (run / "recipe.yaml").symlink_to(run.parent / "outside" / "secret")


def folder(run):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()


def pipe(run):
    os.mkfifo(run.parent / "outside" / "pipe")


def nothing(run):
    pass


RESUME = ["train", "--resume", "--out", "RUN"]
ATTACK = ["attack", "RUN", "--attacks", "FGSM", "--points", "4"]
# What happens to a run, the command, and its sentence.
CASES = {
    "report over the recipe": (nothing, ["report", "RUN", "-o", "RUN/recipe.yaml"], "would be lost"),
    "report over the index": (nothing, ["report", "RUN", "-o", "RUN/index.json"], "would be lost"),
    "report on a device": (nothing, ["report", "RUN", "-o", "/dev/null"], "expected a regular file"),
    "report on a pipe": (pipe, ["report", "RUN", "-o", "RUN/../outside/pipe"], "expected a regular file"),
    "export over the recipe": (nothing, ["export", "RUN", "-o", "RUN/recipe.yaml"], "would be lost"),
    "export on a device": (nothing, ["export", "RUN", "-o", "/dev/null"], "expected a regular file"),
    "export on a pipe": (pipe, ["export", "RUN", "-o", "RUN/../outside/pipe"], "expected a regular file"),
    "half a recipe, resume": (half, RESUME, "was damaged or edited"),
    "half a recipe, dry run": (half, [*RESUME, "--dry-run"], "was damaged or edited"),
    "half a recipe, attack": (half, ATTACK, "was damaged or edited"),
    "half a recipe, report": (half, ["report", "RUN"], "was damaged or edited"),
    "recipe as a link, resume": (link_recipe, RESUME, "leads out of"),
    "recipe as a link, dry run": (link_recipe, [*RESUME, "--dry-run"], "outside the run folder"),
    "recipe as a link, report": (link_recipe, ["report", "RUN"], "outside the run folder"),
    "deep index": (write("index.json", b"[" * 100_000), ATTACK, "nested too deeply; resume the training"),
    "deep recipe": (write("recipe.yaml", b"[" * 100_000), ATTACK, "nested too deeply"),
    "index of another kind": (write("index.json", b"{}"), ATTACK, "expected the last and the best steps"),
    "index without text": (write("index.json", b"\xff\xfe"), ATTACK, "can't decode"),
    "data of another kind": (write("data.json", b"[]"), RESUME, "is damaged; delete it"),
    "metrics as a folder": (folder, RESUME, "metrics.jsonl cannot be read: not a regular file"),
    **{f"{name} as a link, resume": (link(name), RESUME, "leads out of") for name in ("checkpoints", "tensorboard")},
    **{f"{name} as a link, attack": (link(name), ATTACK, "leads out of") for name in ("results", "results/attack")},
    **{f"{name} as a link, resume": (link(name), RESUME, "leads out of") for name in ("evaluations", "explain")},
    "curvature as a link, audit": (link("audit"), ["audit", "RUN", "--only", "health"], "leads out of"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_and_nothing_lost(run, capsys, name):
    happen, words, sentence = CASES[name]
    happen(run)
    before = outside_files(run.parent)
    kept = {path: path.read_bytes() for path in (run / "recipe.yaml", run / "index.json") if path.is_file()}
    assert main([word.replace("RUN", str(run)) for word in words]) == 1
    error = capsys.readouterr().err
    assert sentence in " ".join(error.split())
    assert error.count("\n") <= 2
    assert "hunter2" not in error
    assert "Traceback" not in error
    assert outside_files(run.parent) == before
    assert {path: path.read_bytes() for path in kept} == kept


def test_metrics_that_are_no_records_are_named_in_the_report(run, capsys):
    with (run / "metrics.jsonl").open("a") as file:
        file.write("[1, 2]\n\xff\n7\n")
    assert main(["report", str(run), "-o", str(run / "report.html")]) == 0
    assert "3 unreadable lines are left out" in (run / "report.html").read_text()
    assert main(["report", str(run), "-o", str(run / "report.html")]) == 0  # over the page of before


def test_a_second_writer_is_refused(run, capsys):
    with open_for_writing(run, run):
        assert main(["train", "--resume", "--out", str(run)]) == 1
    assert "is in use by another process; wait until it has finished" in " ".join(capsys.readouterr().err.split())
    assert main(["train", "--resume", "--out", str(run), "--json"]) == 0


def test_temporary_files_of_a_killed_training_are_removed(run, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    monkeypatch.setattr(os, "getpid", lambda: process.pid)
    temporary = [temporary_path(path) for path in (run / "checkpoints" / "00000099", run / "index.json")]
    monkeypatch.undo()
    temporary[0].mkdir()
    temporary[1].write_text("{")
    assert main(["train", "--resume", "--out", str(run), "--json"]) == 0
    assert not [path for path in run.rglob(".*") if path.suffix == ".tmp"]


def _fill(path):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    try:
        TensorFile({"x": ((100_000,), torch.float32)}, path)["x"].fill_(1.0)
    except OSError:
        os._exit(3)


def test_a_full_disk_is_an_error_and_not_a_signal(tmp_path):
    """A limit on file size makes writes fail as a full disk does."""
    process = get_context("fork").Process(target=_fill, args=(tmp_path / "inputs.safetensors",))
    process.start()
    process.join(60)
    assert process.exitcode == 3
    assert not list(tmp_path.iterdir())
