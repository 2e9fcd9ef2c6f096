"""Foreign models become runs that need no foreign code; wrong conventions are named with the option that fixes them."""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
from collections import Counter

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from atoll.adopt.adopt import adopt
from atoll.adopt.sources import load_source
from atoll.adopt.weights import load_state, read_state
from atoll.cli import main
from atoll.data import Digits
from atoll.errors import AtollError, CaptureError
from atoll.models.adapted import Adapted, Conventions
from atoll.runs.adopted import store_run
from atoll.runs.run import open_run
from support import fork

NET = """
from torch import nn

def build(width=32):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

not_a_model = 3
"""


@pytest.fixture(scope="module")
def net():
    """A plain PyTorch model of the digits, with at least 90 % accuracy."""
    torch.manual_seed(0)
    x, y = Digits().tensors("train", 1200)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture
def files(net, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    save_file(net.state_dict(), tmp_path / "weights.safetensors")
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in net.state_dict().items()}}, "checkpoint.pth")
    return tmp_path


@pytest.mark.parametrize("weights", ["weights.safetensors", "checkpoint.pth"])
def test_code_with_weights(files, net, capsys, weights):
    words = ["adopt", "net.py:build", "--weights", weights, "--data", "Digits", "--out", "runs/mine", "--eps", "0.1"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["findings"] == []
    assert answer["clean"]["value"] > 0.9
    (files / "net.py").unlink()  # the run needs neither code nor weights
    (files / weights).unlink()
    run = open_run("runs/mine")
    x, _ = run.data.tensors("test", 50)
    assert torch.equal(run.model()(x), net(x))
    assert main(["attack", "runs/mine", "--attacks", "PGD-5", "--points", "20"]) == 0
    assert main(["report", "runs/mine", "-o", "report.html"]) == 0
    assert main(["export", "runs/mine", "-o", "model.onnx"]) == 0
    assert main(["adopt", "model.onnx", "--data", "Digits", "--out", "runs/onnx", "--eps", "0.1"]) == 0
    torch.testing.assert_close(open_run("runs/onnx").model()(x), net(x))
    assert json.loads((files / "runs/mine/adopted.json").read_text())["files"].keys() == {"net.py", weights}
    capsys.readouterr()
    assert main(words) == 1
    assert "already exists" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", "runs/mine"]) == 1
    assert "an adopted model has no recipe" in capsys.readouterr().err


@pytest.mark.parametrize("moment", [0, 2, 4, 6, 7, 100])
def test_a_killed_adoption_can_be_repeated(net, tmp_path, moment):
    """The folder of the run is complete or does not exist, whenever the process dies."""
    out, arguments = tmp_path / "runs" / "mine", {"sections": {"data": "Digits"}, "origin": {}}
    store_run(net, Digits(), tmp_path / "whole", **arguments)
    events = Counter()

    def die(event, _):
        events[event] += 1
        if events["os.rename"] > moment:
            os._exit(9)

    def adopt_and_die():
        sys.addaudithook(die)  # called before every file is renamed, among other things
        store_run(net, Digits(), out, **arguments)

    process = fork(adopt_and_die, tmp_path / "errors")
    process.join()
    assert (process.exitcode == 0) == out.exists() == (moment == 100)
    if not out.exists():
        store_run(net, Digits(), out, **arguments)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (tmp_path / "whole").iterdir())
    x, _ = Digits().tensors("test", 10)
    assert torch.equal(open_run(out).model()(x), net(x))


def test_a_program_of_torch_export(files, net, capsys):
    torch.export.save(
        torch.export.export(net, (torch.rand(2, 1, 8, 8),), dynamic_shapes=({0: torch.export.Dim("n")},)), "net.pt2"
    )
    words = ["adopt", "net.pt2", "--data", "Digits", "--out", "runs/program"]
    assert main(words) == 1
    assert "use --trust" in capsys.readouterr().err
    assert main([*words, "--trust"]) == 0
    x, _ = Digits().tensors("test", 20)
    assert torch.equal(open_run("runs/program").model()(x), net(x))


class Wrapped(nn.Module):
    def __init__(self, net, before=lambda x: x, after=lambda z: z):
        super().__init__()
        self.net, self.before, self.after = net, before, after

    def forward(self, x):
        return self.after(self.net(self.before(x)))


ORDER = torch.randperm(10, generator=torch.Generator().manual_seed(1))
BACK = tuple(ORDER.argsort().tolist())
DEFECTS = {
    "softmax": (lambda net: Wrapped(net, after=lambda z: z.softmax(1)), "softmax", {"outputs": "probabilities"}),
    "0-255": (lambda net: Wrapped(net, before=lambda x: x / 255), "range", {"range": (0.0, 255.0)}),
    "labels": (lambda net: Wrapped(net, after=lambda z: z[:, ORDER]), "labels", {"labels": BACK}),
    "random": (lambda net: Wrapped(net, before=lambda x: x + 0.3 * torch.randn_like(x)), "randomized", None),
    "batch": (lambda net: Wrapped(net, before=lambda x: x - x.mean(0)), "batch-dependent", None),
    "constant": (lambda net: Wrapped(net, after=lambda z: z + 100 * torch.eye(10)[3]), "constant", None),
    "ReLU": (lambda net: Wrapped(net, after=torch.relu), "ReLU", None),
    "rounding": (lambda net: Wrapped(net, before=lambda x: (8 * x).round() / 8), "rounding", None),
    "training mode": (lambda net: nn.Sequential(nn.Dropout(0.2), net).train(), "training mode", None),
    "dropout": (lambda net: Wrapped(net, before=nn.functional.dropout), "dropout", None),
}  # fmt: skip
REFUSED = ("random", "dropout")  # no functions


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_named_with_the_option_that_fixes_them(net, name, tmp_path):
    build, kind, fix = DEFECTS[name]
    model = build(net)
    if name in REFUSED:
        with pytest.raises(CaptureError, match=f"{kind}: "):
            adopt(model, "Digits", out=tmp_path / "run")
        return
    findings = adopt(model, "Digits", out=tmp_path / "run").findings
    assert kind in {finding.kind for finding in findings}
    if fix is not None:
        fixed = adopt(model, "Digits", out=tmp_path / "fixed", conventions=Conventions(**fix))
        assert fixed.accuracy.value > 0.9
        assert fixed.findings == ()


def photos(root, count=20):
    """Digits of two classes as image files, in one folder per class."""
    x, y = Digits().test.fetch(torch.arange(100)), Digits().test.labels[:100]
    for label in (0, 1):
        (root / f"digit {label}").mkdir(parents=True)
        for number, image in enumerate(x[y == label][: count // 2]):
            Image.fromarray(image[0].numpy()).save(root / f"digit {label}" / f"{number}.png")
    return root


COLOR = """
from torch import nn

def build(size=8):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * (size - 2) ** 2, 2))
"""


@pytest.mark.parametrize("source", ["folder", "csv"])
def test_photos(files, capsys, source):
    """Ten photos per class are enough; all that cannot be read are listed before the model runs."""
    root = photos(files / "photos")
    (files / "color.py").write_text(COLOR)
    rows = [f"{path.relative_to(files)},{path.parent.name}" for path in sorted(root.rglob("*.png"))]
    (files / "photos.csv").write_text("\n".join(["path,label", *rows]))
    data = "photos" if source == "folder" else "photos.csv"
    words = ["adopt", "color.py:build", "--data", data, "--out", "run", "data.resize=8", "data.size=8"]
    assert main([*words, "model.size=32"]) == 1
    sentence = "it accepts images of 32 x 32 pixels; use data.size=32 data.resize=37"
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "16 training and 4 test images, all readable" in printed
    assert "so 4 of 20 images (20% of each class, chosen by file name) are the test set" in printed
    assert open_run("run").recipe["data"]["init_args"]["validation"] == 0
    assert main(["attack", "run", "--attacks", "FGSM"]) == 0
    (root / "digit 0" / "3.png").write_bytes(b"")
    (root / "digit 1" / "4.png").write_bytes((root / "digit 1" / "5.png").read_bytes()[:80])
    capsys.readouterr()
    assert main([*words[:5], "again", *words[6:]]) == 1
    error = capsys.readouterr().err
    assert "2 of 20 images cannot be read; repair or remove them and try again:" in " ".join(error.split())
    assert "digit 0/3.png: empty file" in error
    assert "digit 1/4.png: not a valid image file" in error
    assert not (files / "again").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(net, tmp_path, dtype):
    """The images stay in float32."""
    model = copy.deepcopy(net).to(dtype)
    adoption = adopt(model, "Digits", out=tmp_path / "run", threat={"norm": "linf", "eps": 0.1})
    assert adoption.findings == ()
    x, _ = Digits().tensors("test", 20)
    assert torch.equal(adoption.run.model()(x), model(x.to(dtype)).float())
    assert adoption.run.attack("PGD-3", points=20).robust.value < 0.9


class Evil:
    def __reduce__(self):
        return (exec, ("open('ran', 'w').close()",))


def test_hostile_and_wrong_files_are_refused(files):
    torch.save({"state_dict": Evil()}, "evil.pth")
    (files / "evil.pt2").write_bytes(pickle.dumps(Evil()))
    (files / "cut.safetensors").write_bytes((files / "weights.safetensors").read_bytes()[:100])
    (files / "folder").mkdir()
    cases = {
        "could execute code": lambda: read_state(files / "evil.pth"),
        "use --trust": lambda: load_source("evil.pt2"),
        "cannot read": lambda: read_state(files / "cut.safetensors"),
        "cannot read .*No such file": lambda: read_state(files / "none.pth"),
        "contains weights but no model": lambda: load_source("checkpoint.pth"),
        "expected config.json": lambda: load_source("folder"),
        "expected an .onnx file": lambda: load_source("model"),
        "has no function or class 'other'": lambda: load_source("net.py:other"),
        "has no function or class 'not_a_model'": lambda: load_source("net.py:not_a_model"),
        "unexpected keyword": lambda: load_source("net.py:build", arguments={"depth": 3}),
        "different shapes": lambda: load_source("net.py:build", arguments={"width": 8}, weights="weights.safetensors"),
        "missing: weight": lambda: load_state(nn.Linear(2, 2), {"bias": torch.zeros(2)}, "file"),
        "expected one number or one per channel": lambda: Adapted(nn.Flatten(), Conventions(mean=(0.5, 0.5)), 1),
        "expected the lowest value first": lambda: Conventions(range=(1.0, 0.0)),
        "but the data has 10 classes": lambda: adopt(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), "Digits", out="x"),
        "the model fails on images of shape": lambda: adopt(nn.Conv2d(3, 8, 3), "Digits", out="x"),
    }
    for message, call in cases.items():
        with pytest.raises(AtollError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
    assert not (files / "ran").exists()
    assert not (files / "x").exists()
