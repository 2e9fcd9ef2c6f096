"""``atoll curvature`` as a user runs it."""

import json
import shutil

import pytest

from atoll.cli import main
from atoll.runs.recipe import write_recipe
from atoll.runs.run import open_run
from subject_cases import stored_files
from support import SMALL

QUICK = ["--points", "16", "--top", "0", "--max-probes", "2", "--steps", "2"]
MY_LOSS = """
from atoll.losses import CrossEntropy, Loss

class Mine(Loss):
    objective = "ce"
    uses_clean = False

    def __init__(self, weight: float = 1.0):
        super().__init__(ce=(weight, CrossEntropy("adversarial")))
"""


@pytest.fixture
def copies(trained, tmp_path):
    """Two copies of a run."""
    for name in ("a", "b"):
        shutil.copytree(trained, tmp_path / name / "small", ignore=shutil.ignore_patterns("results"))
    return tmp_path / "a" / "small", tmp_path / "b" / "small"


@pytest.mark.pictures
def test_prints_a_table_and_stores_numbers_and_pictures(copies, capsys):
    run, _ = copies
    flags = ["curvature", str(run), *QUICK, "--top", "1", "--landscape", "input", "--gap"]
    assert main(flags) == 0
    table = capsys.readouterr().out
    for part in ("head.weight", "WCI", "largest eigenvalues", "PAC-Bayes", "not a proof", "robust gap", "AT()"):
        assert part in table
    assert main([*flags, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["results"][str(run)]
    (result,) = open_run(run).results("curvature")
    assert printed == json.loads(json.dumps(result.to_json())) | {"folder": str(result.folder)}
    assert result.wci.value <= result.bound * (1 + 1e-9)
    assert result.estimator == "gauss_newton"
    assert result.landscape().loss.shape == (21, 21)


def test_the_command_does_what_python_does(copies, capsys):
    run, other = copies
    assert main(["curvature", str(run), *QUICK, "--loss", "TRADES(lambda_t=2)", "--landscape", "input"]) == 0
    open_run(other).curvature(points=16, top=0, max_probes=2, steps=2, loss="TRADES(lambda_t=2)", landscape="input")
    files = stored_files(run / "results")
    assert files == stored_files(other / "results")
    assert sum(name.endswith((".png", ".npz")) for name in files) == 3


def test_results_of_two_losses_stay_apart(copies):
    run, _ = copies
    assert main(["curvature", str(run), *QUICK, "--landscape", "weights"]) == 0
    assert main(["curvature", str(run), *QUICK, "--loss", "Standard"]) == 0
    attacked, clean = open_run(run).results("curvature")
    assert (attacked.loss, clean.loss) == ("AT()", "Standard()")
    assert attacked.landscape() is not None
    assert clean.landscape() is None
    assert attacked.wci != clean.wci


def test_different_losses_in_one_table_get_a_warning(copies, capsys):
    run, other = copies
    write_recipe(other / "recipe.yaml", {**open_run(other).recipe, "loss": "Standard"})
    assert main(["curvature", str(run), str(other), *QUICK]) == 0
    assert "different losses" in capsys.readouterr().out
    assert main(["curvature", str(run), str(other), *QUICK, "--loss", "AT"]) == 0
    assert "different losses" not in capsys.readouterr().out


def test_a_loss_from_a_file_in_command_and_recipe(tmp_path, capsys):
    path = tmp_path / "my_loss.py"
    path.write_text(MY_LOSS)
    run = tmp_path / "mine"
    recipe = [*SMALL, f"loss.class_path={path}:Mine", "trainer.epochs=1", "trainer.test_steps=0"]
    assert main(["train", *recipe, "--out", str(run), "--json"]) == 0
    assert main(["curvature", str(run), *QUICK]) == 1
    assert "--trust" in capsys.readouterr().err
    assert main(["curvature", str(run), *QUICK, "--trust"]) == 0
    assert main(["curvature", str(run), *QUICK, "--trust", "--loss", f"{path}:Mine"]) == 0
    (mine,) = open_run(run, trust=True).results("curvature")
    assert mine.loss == f"{path}:Mine()"
    at = open_run(run, trust=True).curvature(points=16, top=0, max_probes=2, steps=2, loss="AT")
    assert mine.wci.value == pytest.approx(at.wci.value)  # the same loss under another name
    capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--points", "0"], "points: expected at least 1"),
        (["--loss", "Magic"], "expected a loss, got 'Magic'; expected one of ALP, AT"),
        (["--checkpoint", "worst"], "--checkpoint: expected best, last or a step"),
        (["--max-probes", "1"], "max_probes: expected at least 2"),
    ],
)
def test_nonsense_is_one_sentence(trained, capsys, flags, sentence):
    assert main(["curvature", str(trained), *flags]) == 1
    assert sentence in " ".join(capsys.readouterr().err.split())
