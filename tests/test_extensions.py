"""A loss, an attack, an attribution and a data set, each one file outside the package, used everywhere."""

import json

import pytest

from atoll.cli import main
from atoll.runs.run import open_run
from atoll.runs.train import train

FILES = {
    "my_data": """
import torch
from atoll.data import Data, MemorySplit, Splits

class MyData(Data):
    "Bright stripes."

    @property
    def classes(self):
        return ("top", "middle", "bottom")

    def load(self):
        labels = torch.arange(96) % 3
        images = torch.randint(0, 120, (96, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        for k in range(3):
            images[labels == k, :, 2 * k : 2 * k + 3] += 100
        whole = MemorySplit(images, labels)
        return Splits(whole.take(torch.arange(64)), whole.take(torch.arange(64, 96)))
""",
    "my_loss": """
from atoll.losses import Loss
from atoll.losses.terms import CrossEntropy

class MyLoss(Loss):
    "Cross-entropy at adversarial inputs, scaled."

    objective = "ce"
    uses_clean = False

    def __init__(self, *, scale: float = 2.0) -> None:
        super().__init__(ce=(scale, CrossEntropy("adversarial")))
""",
    "my_attack": """
from atoll.attacks.base import Attack

class MyAttack(Attack):
    "A random corner of the ball."

    def search(self, model, x, y, streams):
        return self.threat.project(x + self.threat.radius * streams.rademacher(*x.shape[1:], dtype=x.dtype), x)
""",
    "my_attribution": """
import torch
from atoll.explain.attributions import Saliency

class MyMap(Saliency):
    "Saliency without its sign."

    def explain(self, *args, **kwargs):
        return super().explain(*args, **kwargs).abs()
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files, and a run that was trained with them by command."""
    folder = tmp_path_factory.mktemp("extensions")
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    words = [
        "digits-at",
        f"data={folder}/my_data.py:MyData",
        f"loss={folder}/my_loss.py:MyLoss",
        "loss.scale=1.5",
        f"attack={folder}/my_attack.py:MyAttack",
        "model.widths=[4,4]",
        "trainer.epochs=1",
        "trainer.batch_size=16",
        "trainer.validation_steps=1",
        "trainer.test_steps=1",
    ]
    assert main(["train", *words, "--out", str(folder / "run"), "--json"]) == 0
    return folder


def test_a_run_that_names_files_opens_only_with_trust(folder, capsys):
    for words in (
        ["attack"],
        ["curvature"],
        ["explain"],
        ["predict", "x.png"],
        ["export", "-o", str(folder / "x.onnx")],
    ):
        assert main([words[0], str(folder / "run"), *words[1:]]) == 1
        assert "--trust" in capsys.readouterr().err
    for more in ([], ["--dry-run"]):
        assert main(["train", "--resume", "--out", str(folder / "run"), *more]) == 1
        assert "--trust" in capsys.readouterr().err


def test_a_run_that_names_files_is_resumed_with_trust(folder, capsys):
    assert main(["train", "--resume", "--trust", "--out", str(folder / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test"][0]["clean"]["total"] == 32
    assert train(None, out=folder / "run", resume=True, trust=True).is_finished


def test_command_and_python_use_the_files(folder, capsys):
    run = open_run(folder / "run", trust=True)
    attack, loss, method = (
        f"{folder}/{name}" for name in ("my_attack.py:MyAttack", "my_loss.py:MyLoss", "my_attribution.py:MyMap")
    )
    commands = {
        "attack": (["--attacks", attack, "--points", "8"], lambda: run.attack(attack, points=8)),
        "curvature": (
            ["--loss", loss, "--points", "8", "--top", "0"],
            lambda: run.curvature(loss=loss, points=8, top=0),
        ),
        "explain": (
            ["--methods", method, "--points", "2", "--checks", "0", "--pool", "8", "--budget", "20"],
            lambda: run.explain(methods=(method,), points=2, checks=0, pool=8, budget=20),
        ),
    }
    for verb, (flags, measured) in commands.items():
        assert main([verb, str(folder / "run"), *flags, "--trust", "--json"]) == 0, verb
        (printed,) = json.loads(capsys.readouterr().out)["results"].values()
        result = measured()
        assert printed["folder"] == str(result.folder)  # loaded, not measured again
        assert result in run.results(verb)
    assert list(run.results("explain")[-1].methods) == [method]


def test_names_of_files_stand_in_the_report(folder):
    from atoll.report import write_report

    page = write_report([folder / "run"], folder / "report.html").read_text()
    assert "MyLoss" in page
    assert "MyAttack" in page
