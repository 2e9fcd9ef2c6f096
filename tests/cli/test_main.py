"""The command, as a user runs it: in a process of its own where kills, signals or limits of the process matter."""

import errno
import hashlib
import importlib
import io
import itertools
import json
import os
import platform
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

import atoll
from atoll.cli import VERBS, main, output, parse
from atoll.distributed import default_device
from atoll.errors import InputError, RecipeError
from atoll.measure import measurement
from atoll.runs.run import open_run
from atoll.training import checkpoint
from atoll.training.checkpoint import Checkpoints
from support import SMALL, fork, run_command

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


def test_published_weights_are_tested_as_they_are(trained, tmp_path, capsys):
    source = open_run(trained).checkpoint_path("last") / "model.safetensors"
    out = tmp_path / "published"
    assert main(["train", *SMALL, "trainer.epochs=0", f"pretrained={source}", "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert main(["train", "--resume", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer
    published, original = open_run(out), open_run(trained)
    assert all(torch.equal(published.checkpoint().model[k], v) for k, v in final_weights(trained).items())
    assert [row.attacked.clean for row in published.tests()] == [original.tests()[-1].attacked.clean] * 2
    assert published.index["best"] == {"raw": 0}


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
    kinds = listing.keys() - {"schema", "command", "optimizers"}
    assert all(text for kind in kinds for text in listing[kind].values())
    assert main(["ls", "losses"]) == 0
    assert "TRADES" in capsys.readouterr().out


def answer(capsys, *words):
    """What is printed for words that are answered at once."""
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help_names_all_commands_and_their_options(capsys):
    whole = answer(capsys, "--help")
    assert whole == answer(capsys, "-h") == answer(capsys, "help")
    assert "atoll train digits-at" in whole
    for verb, (usage, summary) in VERBS.items():
        assert re.search(rf"^  {verb} +{summary}$", whole, re.MULTILINE)
        text = answer(capsys, verb, "--help")
        assert text == answer(capsys, "help", verb)
        assert text.startswith(f"usage: atoll {verb} {usage}")
        assert "--json" in text
    assert max(map(len, whole.splitlines())) <= 100


@pytest.mark.parametrize("verb", VERBS)
def test_examples_of_the_help_are_valid(verb, capsys):
    for line in answer(capsys, verb, "--help").splitlines():
        if re.match(r"  (torchrun .* -m )?atoll ", line):
            words = shlex.split(line)
            parse(words[words.index("atoll") + 1 :])


def test_version(capsys):
    assert answer(capsys, "--version") == f"atoll {version('atoll')}\n"
    assert atoll.__version__ == version("atoll")
    assert "__version__" in dir(atoll)


def test_quick_answers_do_without_torch():
    """PyTorch takes seconds to import."""
    script = (
        "import sys; from contextlib import suppress; import atoll; from atoll.cli import main; atoll.__version__\n"
        "for words in (['--help'], ['--version'], ['trian'], ['trian', '--json'], ['--foo', 'train'], ['help'], []):\n"
        "    with suppress(SystemExit):\n"
        "        main(words)\n"
        "slow = ('torch', 'numpy', 'scipy', 'matplotlib', 'sklearn', 'jinja2')\n"
        "sys.exit([name for name in slow if name in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


MISTAKES = [  # what is typed, the exit code, and what the answer says
    ([], 2, "usage: atoll COMMAND [options]"),
    (["trian"], 2, "atoll: unknown command 'trian'; did you mean train?"),
    (["zzz"], 2, "atoll: unknown command 'zzz'; expected one of adopt, attack, audit"),
    (["help", "atack"], 2, "atoll: unknown command 'atack'; did you mean attack?"),
    (["--foo", "train", "digits-at"], 2, "expected a command before --foo, as in `atoll train --foo`"),
    (["train"], 1, "expected a recipe, as in `atoll train digits-at`, or a run to resume"),
    (["train", "--resume"], 1, "expected a recipe, as in `atoll train digits-at`, or a run to resume"),
    (["train", "epochs=5"], 1, "expected a recipe before epochs=5, as in `atoll train digits-at epochs=5`"),
    (["train", "digit-at"], 1, "no recipe 'digit-at'; did you mean digits-at"),
    (["train", "digits-flat/at-sawp"], 1, "digits-flat has no variant 'at-sawp'; did you mean at-awp"),
    (["train", "digits-at", "epohcs=5"], 1, "epohcs: unknown key; did you mean trainer.epochs"),
    (
        ["train", "digits-at", "trainer.epohcs=5"],
        1,
        "trainer.epohcs: TrainerSettings has no such argument; did you mean",
    ),
    (["train", "digits-at", "lsos=AT"], 1, "lsos: unknown key; did you mean loss"),
    (["train", "digits-at", "loss=TRDES"], 1, "expected a loss, got 'TRDES'; did you mean TRADES"),
    (["train", "digits-at", "--epochs", "5"], 2, "unknown option --epochs; to change the recipe, write epochs=VALUE"),
    (["train", "digits-at", "--resmue"], 2, "atoll train: unknown option --resmue; did you mean --resume?"),
    (["train", "digits-at", "five"], 1, "overrides: expected key.sub=value, got 'five'"),
    (["train", "digits-at", "--out"], 2, "atoll train: --out: expected a value"),
    (["attack"], 2, "atoll attack: missing RUN; see `atoll attack --help`"),
    (["attack", "{run}", "--data.root"], 2, "atoll attack: --data.root: expected a value"),
    (["attack", "{run}", "--chekpoint", "last"], 2, "unknown option --chekpoint; did you mean --checkpoint"),
    (["attack", "{run}", "--check", "last"], 2, "unknown option --check; did you mean --checkpoint"),
    (["attack", "{run}", "--split", "tset"], 2, "--split: got 'tset'; did you mean test?"),
    (["attack", "{run}", "--points", "ten"], 2, "--points: expected a whole number, got 'ten'"),
    (["attack", "{run}", "--checkpoint", "lats"], 1, "expected best, last or a step, got 'lats'; did you mean last?"),
    (["attack", "{run}", "--attacks", "standrad"], 1, "expected an attack, got 'standrad'; did you mean standard?"),
    (["attack", "{run}", "--attacks", "FSGM"], 1, "expected an attack, got 'FSGM'; did you mean FGSM"),
    (["attack", "{run}x"], 1, "{run}x is not a run; did you mean {run}?"),
    (["attack", "{parent}"], 1, "{parent} is not a run; choose one in it, such as {run}"),
    (
        ["certify", "{run}", "--eps", "0.1", "--reject", "Didgits"],
        1,
        "expected a data set, got 'Didgits'; did you mean",
    ),
    (["certify", "{run}", "--alpha", "low"], 2, "--alpha: expected a number, got 'low'"),
    (["curvature", "{run}", "--loss", "TRDES"], 1, "expected a loss, got 'TRDES'; did you mean TRADES"),
    (["curvature", "{run}", "--estimator", "hutchison"], 2, "did you mean hutchinson?"),
    (["explain", "{run}", "--methods", "Salency"], 1, "expected an attribution, got 'Salency'; did you mean Saliency"),
    (["study", "trh-tabel"], 1, "expected a study, got 'trh-tabel'; did you mean trh-table"),
    (["study", "--scale", "smok"], 2, "--scale: got 'smok'; did you mean smoke?"),
    (["study", "epochs=5"], 1, "expected the name of a study before epochs=5"),
    (["ls", "modles"], 1, "unknown kind 'modles'; did you mean models"),
    (["ls", "rnus"], 1, "unknown kind 'rnus'; did you mean runs"),
    (["ls", "model", "VitT"], 1, "expected a model, got 'VitT'; did you mean ViT"),
    (["ls", "recipes", "digits-at"], 1, "recipes have no parameters; see `atoll train digits-at --dry-run`"),
    (["ls", "models", "MLP", "more"], 2, "unexpected argument 'more'"),
]


@pytest.mark.parametrize(("words", "code", "sentence"), MISTAKES, ids=lambda part: str(part))
def test_mistakes_get_a_helpful_answer(words, code, sentence, trained, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"run": trained, "parent": trained.parent}
    assert main([word.format(**places) for word in words]) == code
    printed = capsys.readouterr()
    assert sentence.format(**places) in " ".join(printed.err.split())
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert not list(tmp_path.iterdir())


def test_measurements_have_names(trained):
    with pytest.raises(InputError, match="expected a measurement, got 'atack'; did you mean attack"):
        open_run(trained).results("atack")


def test_short_forms_mean_the_same_as_full_keys(capsys):
    recipes = []
    for words in (["epochs=5", "lr=0.3", "batch_size=32", "eps=8/255", "loss=TRADES", "lambda_t=2"],
                  ["trainer.epochs=5", "optimizer.lr=0.3", "trainer.batch_size=32", "threat.eps=8/255", "loss=TRADES",
                   "loss.lambda_t=2"]):  # fmt: skip
        assert main(["train", "digits-at", *words, "--dry-run"]) == 0
        recipes.append(yaml.safe_load(capsys.readouterr().out))
    assert recipes[0] == recipes[1]
    assert (recipes[0]["trainer"]["epochs"], recipes[0]["threat"]["eps"]) == (5, "8/255")


DEVICES = ("train", "attack", "certify", "curvature", "explain", "study", "predict")


@pytest.mark.parametrize("verb", DEVICES)
def test_commands_compute_on_the_device_that_is_asked_for(verb, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    words = [verb, "x", *(["a.png"] if verb == "predict" else [])]
    module, devices = importlib.import_module(f"atoll.cli.{verb}"), []
    monkeypatch.setattr(module, "run", lambda options: devices.append(default_device()))
    for more in ([], ["--device", "cuda:1"], ["--device", "cpu"]):
        assert main([*words, *more]) == 0
    assert [str(device) for device in devices] == ["cuda:0", "cuda:1", "cpu"]


def test_the_device_is_part_of_neither_results_nor_recipes(trained, capsys, tmp_path):
    run, folders = shutil.copytree(trained, tmp_path / "run"), []
    for more in ([], ["--device", "cpu"]):
        assert main(["attack", str(run), "--attacks", "FGSM", "--points", "4", "--json", *more]) == 0
        folders.append(json.loads(capsys.readouterr().out)["results"][str(run)]["folder"])
    assert folders[0] == folders[1]
    assert main(["train", *SMALL, "--dry-run", "--device", "cpu"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load((trained / "recipe.yaml").read_text())


# --- runs that cannot be written to --------------------------------------------------------------------------------

READ_ONLY = {
    "attack": ["--attacks", "FGSM"],
    "certify": ["--eps", "0.1", "--no-attack"],
    "curvature": ["--top", "0", "--max-probes", "2"],
    "explain": ["--methods", "SM", "--pool", "0", "--checks", "0"],
}
COPY = "copy the run to a folder that you can write to"


@pytest.mark.parametrize("verb", READ_ONLY)
def test_a_read_only_run_is_refused_before_any_work(verb, trained, tmp_path, capsys, monkeypatch):
    run = shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("results"))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(run) and access(path, mode))
    monkeypatch.setattr(type(measurement(verb)), "measure", lambda *_: pytest.fail("this took hours"))
    assert main([verb, str(run), "--points", "3", *READ_ONLY[verb]]) == 1
    assert f"{run} is read-only; {COPY}" in " ".join(capsys.readouterr().err.split())
    assert not (run / "results").exists()


@pytest.mark.parametrize(
    ("verb", "number"),
    [*((verb, errno.EROFS) for verb in READ_ONLY), ("attack", errno.EACCES), ("attack", errno.EPERM)],
)
def test_a_file_that_cannot_be_written_is_one_sentence(verb, number, trained, tmp_path, capsys, monkeypatch):
    """The folder looks writable, but no file in it is."""
    run, opened = shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("results")), io.open

    def refuse(file, mode="r", *arguments, **options):
        if not isinstance(file, int) and Path(file).is_relative_to(run) and set(mode) & set("wax+"):
            raise OSError(number, os.strerror(number), str(file))
        return opened(file, mode, *arguments, **options)

    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    assert main([verb, str(run), "--points", "3", *READ_ONLY[verb]]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert f"{os.strerror(number)}; {COPY}" in error
    assert f"{run}/results/{verb}" in error


def test_results_of_a_read_only_run_are_still_shown(trained, tmp_path, capsys, monkeypatch):
    run = shutil.copytree(trained, tmp_path / "run")
    words = ["attack", str(run), "--attacks", "FGSM", "--points", "5"]
    assert main(words) == 0
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert main(words) == 0
    assert "FGSM" in capsys.readouterr().out


def test_a_report_of_a_read_only_run_can_go_elsewhere(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("atoll.report.page._plotly", lambda: "")
    written = Path.replace

    def refuse(path, target):
        if target.parent == trained:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return written(path, target)

    monkeypatch.setattr(Path, "replace", refuse)
    assert main(["report", str(trained)]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert f"cannot write {trained}/report.html: Read-only file system; choose another file (-o FILE)" in error
    assert main(["report", str(trained), "-o", str(tmp_path / "report.html")]) == 0


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


@pytest.mark.parametrize("words", [pytest.param(["--dry-run"], marks=pytest.mark.slow), []])
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
        [sys.executable, "-m", "atoll", "train", "--resume", "--out", ".", *words], cwd=folder, capture_output=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert not (folder / "ran").exists()
    assert done.returncode == 1
    error = " ".join(done.stderr.split())
    assert [text for _, text in STORED.values() if text not in error] == []
    assert "Traceback" not in error


def test_files_in_the_current_folder_do_not_replace_modules(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "shared")
    for name in ("typing", "argparse", "difflib", "inspect", "json", "yaml", "torch", "rich", "safetensors"):
        (folder / f"{name}.py").write_text(BODY)
    done = subprocess.run(
        [sys.executable, "-m", "atoll", "train", "--resume", "--out", ".", "--dry-run"], cwd=folder,
        capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert not (folder / "ran").exists()
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_a_full_disk_is_one_sentence(tmp_path):
    """A limit on file size makes writes fail as a full disk does."""

    def train():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        return main(["train", *SMALL, "--out", str(tmp_path / "run")])

    process = fork(train, tmp_path / "errors")
    process.join(120)
    assert process.exitcode == 1
    error = (tmp_path / "errors").read_text()
    assert "Traceback" not in error
    assert "File too large" in error


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

    def train():
        calls, save = itertools.count(), checkpoint.save_file
        checkpoint.save_file = lambda *a: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == 5 else save(*a)
        return main(["train", *KILLED, "--out", str(tmp_path / "killed")])

    assert main(["train", *KILLED, "--out", str(tmp_path / "straight"), "--json"]) == 0
    process = fork(train, tmp_path / "errors")
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
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
    process = fork(lambda: main(["train", *SMALL, *endless, "--out", str(tmp_path / "run")]), tmp_path / "errors")
    path = tmp_path / "run" / begun
    while not path.exists() or (path.is_file() and '"kind": "epoch"' not in path.read_text()):
        assert process.is_alive()
        time.sleep(0.05)
    time.sleep(0.5)  # in the middle of the next epoch, or of the test
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    error = (tmp_path / "errors").read_text()
    last = error.strip().splitlines()[-1]
    assert last.startswith(message)
    assert last.endswith(f" Resume with: atoll train --resume --out {tmp_path / 'run'}")
    assert "Traceback" not in error


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_commands_keep_freed_memory():
    """Memory that is freed and allocated again causes few page faults, unlike in other processes."""
    script = """
        import resource, sys
        from atoll.cli import keep_freed_memory
        import torch
        if sys.argv[1] == "keep":
            keep_freed_memory()
        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            parts = [torch.ones(1 << 18) for _ in range(64)]  # 1 MB each
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        faults()
        print(faults())
    """
    keep, usual = (
        int(subprocess.check_output([sys.executable, "-c", textwrap.dedent(script), word], text=True))
        for word in ("keep", "usual")
    )
    assert keep < usual / 4
