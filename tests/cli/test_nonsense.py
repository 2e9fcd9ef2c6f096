"""Nonsense on the command line and in recipes: one sentence, nothing written, no traceback and no hang."""

import os

import pytest

from atoll.cli import main
from support import SMALL

LONG = "x" * 300
HUGE = "9" * 20
INT64 = "9,223,372,036,854,775,807"

# What is typed (a recipe goes to ``train --dry-run``), and what the sentence says.
RECIPES = {
    "optimizer with a closure": (["optimizer=LBFGS"], "optimizer: LBFGS evaluates the loss several times per step"),
    "optimizer of sparse gradients": (["optimizer=SparseAdam"], "optimizer: SparseAdam"),
    "optimizer of matrices": (["optimizer=Muon"], "optimizer: Muon only supports 2D parameters"),
    "optimizer for a GPU": (
        ["optimizer=Adadelta", "optimizer.capturable=true"],
        "optimizer: If capturable=True, params",
    ),
    "optimizer that overflows": (
        ["optimizer=ASGD", "optimizer.alpha=1000000000"],
        "optimizer: its first step overflows",
    ),
    "learning rate {}": (["optimizer.lr={}"], "optimizer.lr: expected a number or Tensor, got {}"),
    "learning rate NaN": (["optimizer.lr=.nan"], "optimizer.lr: expected a finite number, got nan"),
    "infinite learning rate": (["optimizer.lr=1e400"], "optimizer.lr: expected a finite number, got inf"),
    "negative learning rate": (["optimizer.lr=-1"], "optimizer: Invalid learning rate: -1"),
    "huge eps": (["threat.eps=1e10"], "eps: expected at most 1000000000, got 1"),
    "infinite eps": (["threat.eps=1e400"], "eps: expected a finite number"),
    "infinite eps as text": (["threat.eps='1e400'"], "eps: expected a finite number >= 0, got"),
    "eps with a huge exponent": (["threat.eps='1e999999999'"], "eps: expected a finite number >= 0"),
    "empty eps": (["threat.eps=''"], "threat.eps: expected a value, got none"),
    "huge data set": (
        ["data=TwoMoons", "data.n=9223372036854775808", "model=MLP"],
        f"data.n: expected at most {INT64}, got 9223372036854775808",
    ),
    "huge limit": (["data.limit=9223372036854775808"], f"data.limit: expected at most {INT64}, got"),
    "checkpoints NaN": (["trainer.checkpoint_minutes=.nan"], "checkpoint_minutes: expected a finite number, got nan"),
    "methods twice": (["methods=[AWP, AWP]"], "methods: expected each method once, got AWP 2 times"),
    "long warm-up": (
        ["schedule.warmup=100"],
        "schedule: warmup: expected at most the number of epochs, 3, got 100",
    ),
    "huge batch size": (["trainer.batch_size=10000000000"], "batch_size: expected at most 1,000,000,000, got"),
    "endless training": ([f"trainer.epochs={HUGE}"], f"trainer.epochs: expected at most {INT64}, got"),
    "endless attack": (["attack.steps=10000000"], "attack: steps: expected at most 1,000,000, got"),
    "huge seed": ([f"seed={HUGE}"], f"seed: expected at most {INT64}, got"),
    "epochs NaN": (["trainer.epochs=.nan"], "trainer.epochs: expected a finite number, got nan"),
    "null for a number": (["data.validation=null"], "data.validation: expected a number, got null"),
    "null character": (['data.root="a\\0b"'], "data.root: expected text without null characters"),
    "numbers as keys": (["threat={1: 2}"], "threat.1: ThreatModel has no such argument"),
    "a thousand errors": ([f"methods={[1] * 1000}"], "and 980 more"),
    "forgotten value": (["--data.root"], "data.root: expected a value, got none"),
}

# What is typed in place of {run}, a finished run, and {tmp}, a folder with a pipe, a file and a file that is not UTF-8.
COMMANDS = {
    "train: no threat": (["train", "{tmp}/plain.yaml", "--dry-run"], ""),
    "train: not UTF-8": (["train", "{tmp}/latin.yaml"], "latin.yaml cannot be read: not a text file in UTF-8"),
    "train: a pipe as recipe": (["train", "{tmp}/pipe.yaml"], "pipe.yaml cannot be read: not a regular file"),
    "train: long recipe": (["train", f"{LONG}.yaml", "--out", "{tmp}/new"], "File name too long"),
    "train: long name": (["train", LONG, "--out", "{tmp}/new"], "File name too long"),
    "train: empty out": (["train", *SMALL, "--out", ""], "--out: expected a path, got ''"),
    "train: NUL in out": (["train", *SMALL, "--out", "a\0b"], "--out: expected a path"),
    "train: long out": (["train", *SMALL, "--out", f"{{tmp}}/{LONG}"], "File name too long"),
    "train: out is a file": (["train", *SMALL, "--out", "{tmp}/file"], "file is a file, expected a folder"),
    "train: out in a file": (["train", *SMALL, "--out", "{tmp}/file/run"], "file is a file, expected a folder"),
    "train: a pipe as data": (
        ["train", *SMALL, "data=Npz", "data.path={tmp}/pipe.npz", "--out", "{tmp}/new"],
        "pipe.npz: no such file",
    ),
    "train: a pipe as weights": (
        ["train", *SMALL, "pretrained={tmp}/pipe.npz", "--out", "{tmp}/new"],
        "pipe.npz: not a file",
    ),
    "train: negative width": (
        ["train", *SMALL[:2], *SMALL[3:], "model=MLP", "model.hidden=[-1]", "--out", "{tmp}/new"],
        "hidden[0]: expected at least 1, got -1",
    ),
    "train: wide layers": (
        ["train", *SMALL, "model.widths=[1000000000]", "--out", "{tmp}/new"],
        "channels: expected at most 65,536, got 1000000000",
    ),
    "attack: huge batch": (["attack", "{run}", "--batch-size", HUGE], "batch_size: expected at most 1,000,000,000"),
    "attack: huge points": (["attack", "{run}", "--points", HUGE], "points: expected at most 1,000,000,000"),
    "attack: huge seed": (["attack", "{run}", "--seed", HUGE], "seed: expected at most"),
    "attack: infinite eps": (["attack", "{run}", "--eps", "1e400"], "eps: expected a finite number >= 0, got '1e400'"),
    "attack: huge eps": (
        ["attack", "{run}", "--eps", "1e10"],
        "eps: expected at most 1 for inputs in [0, 1], got '1e10'",
    ),
    "attack: gray levels": (["attack", "{run}", "--eps", "8"], "eps: expected at most 1 for inputs in [0, 1], got '8'"),
    "attack: empty eps": (["attack", "{run}", "--eps", ""], "eps: expected a value, got an empty string"),
    "attack: PGD-": (["attack", "{run}", "--attacks", "PGD-"], "attacks: expected an attack, got 'PGD-'"),
    "attack: empty run": (["attack", ""], "RUN: expected a path, got ''"),
    "attack: long run": (["attack", f"{{tmp}}/{LONG}"], "File name too long"),
    "attack: budget": (
        ["attack", "{run}", "--attacks", "fast", "--budget", "-1"],
        "budget: expected a number in (0, 1]",
    ),
    "attack: budget NaN": (["attack", "{run}", "--attacks", "fast", "--budget", "nan"], "--budget: expected a number"),
    "audit: budget": (["audit", "{run}", "--budget", "-1"], "budget: expected a duration"),
    "audit: budget NaN": (["audit", "{run}", "--budget", "nan"], "budget: expected a duration"),
    "audit: huge budget": (["audit", "{run}", "--budget", f"{HUGE}h"], "budget: expected at most 8,760 hours"),
    "audit: limit NaN": (["audit", "{run}", "--fail-under", "clean=nan"], "--fail-under: expected limits in percent"),
    "audit: unknown limit": (["audit", "{run}", "--fail-under", "x=1"], "--fail-under: got 'x'; expected one of"),
    "predict: a pipe": (["predict", "{run}", "{tmp}/pipe.npz"], "pipe.npz: not a file"),
    "check: a pipe": (["check", "{tmp}/pipe.npz"], "pipe.npz"),
    "check: long": (["check", f"{{tmp}}/{LONG}"], "File name too long"),
    "report: empty out": (["report", "{run}", "-o", ""], "-o/--out: expected a path, got ''"),
    "report: long out": (["report", "{run}", "-o", f"{{tmp}}/{LONG}"], "File name too long"),
    "export: long out": (["export", "{run}", "-o", f"{{tmp}}/{LONG}.onnx"], "File name too long"),
    "attack: no value": (["attack", "{run}", "--weights=--"], "--weights: expected a value, got '--'"),
    "export: long number": (
        ["export", "{run}", "-o", "x", f"--weights={'9' * 5000}"],
        "weights: expected raw, got '999",
    ),
    "health: bytes": (["health", "\udcff"], "\\udcff is not a run"),
    "ls: long": (["ls", "runs", LONG], ""),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("pipe.npz", "pipe.yaml"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "file").touch()
    (tmp_path / "latin.yaml").write_bytes(b"data: D\xe9gits\n")
    (tmp_path / "plain.yaml").write_text("data: Digits\nmodel: MLP\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def contents(*folders):
    """All files and folders, and when the files were last written."""
    paths = (path for folder in folders for path in folder.rglob("*"))
    return {path: path.stat().st_mtime_ns if path.is_file() else 0 for path in paths}


def refuse(words, sentence, capsys, *folders):
    """Run a command that must fail with a sentence and change nothing; an empty sentence means that it may succeed."""
    before = contents(*folders)
    code = main(words)
    error = " ".join(capsys.readouterr().err.split())
    assert code in ((1, 2) if sentence else (0, 1))
    assert sentence in error
    assert "Traceback" not in error
    assert contents(*folders) == before


def test_a_surrogate_for_other_inputs_is_refused(folder, trained, capsys):
    moons = folder / "moons"
    assert main(["train", SMALL[0], "data=TwoMoons", "model=MLP", "epochs=0", "--out", str(moons)]) == 0
    for run, surrogate, sentence in (
        (moons, trained, f"surrogate: expected inputs of 2 in 2 classes, got 1x8x8 in 10 classes from {trained}"),
        (trained, moons, f"surrogate: expected inputs of 1x8x8 in 10 classes, got 2 in 2 classes from {moons}"),
    ):
        refuse(["attack", str(run), "--points", "2", "--surrogate", str(surrogate)], sentence, capsys, folder, trained)


@pytest.mark.parametrize("case", RECIPES)
def test_nonsense_in_recipes_is_refused(case, folder, capsys):
    words, sentence = RECIPES[case]
    refuse(["train", *SMALL, *words, "--dry-run"], sentence, capsys, folder)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", COMMANDS)
def test_nonsense_on_the_command_line_is_refused(case, folder, trained, capsys):
    words, sentence = COMMANDS[case]
    refuse([word.format(run=trained, tmp=folder) for word in words], sentence, capsys, folder, trained)
