"""``atoll export`` as a user runs it."""

import json

import torch
from torch import nn

from atoll.certify import NearestCentroid
from atoll.certify.export import Exported
from atoll.cli import main
from atoll.models import MLP, CentroidNet
from atoll.runs import run as run_module
from atoll.runs.run import Run, open_run


def export(capsys, folder, file, *words):
    status = main(["export", str(folder), "-o", str(file), *words])
    printed = capsys.readouterr()
    return status, " ".join((printed.out + printed.err).split())


def test_command_and_python_write_the_same_file(gloro_run, tmp_path, capsys):
    status, out = export(capsys, gloro_run.folder, tmp_path / "command.onnx", "--eps", "1/10", "--json")
    assert status == 0
    printed = json.loads(out)
    assert (printed["eps"], printed["checked"]) == (0.1, 360)
    assert 0 < printed["abstained"] < 360
    assert (tmp_path / "command.onnx").stat().st_size == printed["bytes"]
    exported = gloro_run.export(tmp_path / "python.onnx", eps="1/10")
    assert vars(exported) == printed | {"path": str(tmp_path / "python.onnx")}
    assert (tmp_path / "python.onnx").read_bytes() == (tmp_path / "command.onnx").read_bytes()


def test_text(gloro_run, tmp_path, capsys, monkeypatch):
    exported = Exported("model.onnx", 0.5, 1234, 360, 40, 2e-15)
    monkeypatch.setattr(Run, "export", lambda self, path, **options: exported)  # it takes seconds
    status, out = export(capsys, gloro_run.folder, tmp_path / "model.onnx")
    assert status == 0
    assert "1,234 bytes" in out
    assert "on 360 test points, radii to a relative 2e-15" in out
    assert "abstains on 40 of them at eps 0.5" in out


def test_wrong_arguments_are_refused_before_any_work(gloro_run, tmp_path, capsys):
    for wrong, message in (
        (["--points", "0"], "points: expected at least 1, got 0"),
        (["--eps", "x"], "eps: expected a number or a fraction"),
        (["--out", str(tmp_path)], "out: expected a file, got the folder"),
        (["--checkpoint", "first"], "--checkpoint: expected best, last or a step"),
    ):
        status, out = export(capsys, gloro_run.folder, tmp_path / "model.onnx", *wrong)
        assert status == 1
        assert message in out
    assert not list(tmp_path.iterdir())


def softmax_net():
    """Its softmax has no certification rule."""
    model = MLP((1, 8, 8), 10)
    model.head = nn.Sequential(model.head, nn.Softmax(1))
    return model.eval()


def test_centroid_nets_are_exported_with_their_eta_layer(trained, tmp_path, capsys, monkeypatch):
    torch.manual_seed(0)
    net = CentroidNet((1, 8, 8), 10, per_class=2).eval()
    net.head.centroids.data.uniform_()
    monkeypatch.setattr(run_module, "model_from", lambda *_, **__: net)  # as if it had been trained
    abstained = []
    for eta in ("0", "0.02"):
        words = ("--eps", "0.01", "--eta", eta, "--points", "100", "--json")
        status, out = export(capsys, trained, tmp_path / "model.onnx", *words)
        assert status == 0
        abstained.append(json.loads(out)["abstained"])
    certifier = NearestCentroid.proven(net.double(), eta=0.02)
    x, _ = open_run(trained).data.tensors("test", 100)
    assert abstained[0] < abstained[1] == int((certifier(x).radius < 0.01).sum()) < 100


def test_models_that_cannot_be_exported_are_refused(trained, gloro_run, tmp_path, capsys, monkeypatch):
    status, out = export(capsys, trained, tmp_path / "model.onnx")
    assert status == 1
    assert "eps: the model was trained against linf; specify an l2 radius" in out
    status, out = export(capsys, gloro_run.folder, tmp_path / "model.onnx", "--eta", "0.1")
    assert status == 1
    assert "eta: expected a CentroidNet, got SmallConvNet" in out
    # As if it had been trained, which takes longer.
    monkeypatch.setattr(run_module, "model_from", lambda *_, **__: softmax_net())
    status, out = export(capsys, trained, tmp_path / "model.onnx", "--eps", "0.1")
    assert status == 1
    assert "_softmax" in out
    assert "no certification rule" in out
    assert not list(tmp_path.iterdir())
