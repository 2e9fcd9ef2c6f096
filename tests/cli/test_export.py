"""``atoll export`` as a user runs it."""

import json

import onnx
import torch
from torch import nn

from atoll.certify import NearestCentroid
from atoll.cli import main
from atoll.export import Exported
from atoll.export.model import run_file
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
    assert (printed.pop("schema"), printed.pop("command")) == (1, "export")
    assert (printed["eps"], printed["checked"]) == (0.1, 360)
    assert 0 < printed["abstained"] < 360
    assert (tmp_path / "command.onnx").stat().st_size == printed["bytes"]
    exported = gloro_run.export(tmp_path / "python.onnx", eps="1/10")
    assert list(exported.outputs) == printed["outputs"] == ["logits", "label", "prediction", "radius"]
    assert vars(exported) == printed | {"path": str(tmp_path / "python.onnx"), "outputs": exported.outputs}
    assert (tmp_path / "python.onnx").read_bytes() == (tmp_path / "command.onnx").read_bytes()


def test_any_run_can_be_exported(trained, tmp_path, capsys):
    """A net without certificates: the file has logits, labels, class names and preprocessing."""
    status, out = export(capsys, trained, tmp_path / "net.onnx", "--points", "50")
    assert status == 0
    assert "outputs logits, label agrees with the model on 50 test points, logits to" in out
    run = open_run(trained)
    x, _ = run.data.tensors("test", 200)
    logits, label = run_file((tmp_path / "net.onnx").read_bytes(), x, "logits", "label")
    with torch.no_grad():
        truth = run.model()(x)
    torch.testing.assert_close(logits, truth, rtol=1e-4, atol=1e-4)
    assert torch.equal(label, truth.argmax(1))
    stored = {entry.key: entry.value for entry in onnx.load(tmp_path / "net.onnx").metadata_props}
    subject = run.subject()
    assert json.loads(stored["classes"]) == list(run.data.classes)
    assert (stored["image_size"], stored["resize"], stored["channels"]) == ("[8, 8]", "8", "L")
    assert stored["function_digest"] == subject.digest.value  # as in results
    assert (stored["run"], stored["checkpoint"]) == (trained.name, f"step {run.step('best')}")
    assert "eps" not in stored


def test_certificates_can_be_left_out(gloro_run, tmp_path, capsys):
    status, out = export(capsys, gloro_run.folder, tmp_path / "net.onnx", "--no-certify", "--points", "20", "--json")
    assert status == 0
    printed = json.loads(out)
    assert (printed["outputs"], printed["eps"]) == (["logits", "label"], None)
    status, out = export(capsys, gloro_run.folder, tmp_path / "net.onnx", "--no-certify", "--eps", "0.1")
    assert status == 1
    assert "certify: eps and eta need certificates" in out


def test_a_checkpoint_selected_on_few_points_is_a_warning(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_module, "FEW_POINTS", 10_000)
    status, out = export(capsys, trained, tmp_path / "net.onnx", "--points", "5")
    assert status == 0
    assert "the best checkpoint was selected on only" in out
    exported = open_run(trained).export(tmp_path / "net.onnx", points=5)
    assert exported.warning in out
    assert exported.warning in str(exported)
    _, out = export(capsys, trained, tmp_path / "net.onnx", "--points", "5", "--checkpoint", "last")
    assert "selected on only" not in out


def test_text(gloro_run, tmp_path, capsys, monkeypatch):
    exported = Exported("model.onnx", 1234, ("prediction", "radius"), 360, 2e-15, 0.5, 40)
    monkeypatch.setattr(Run, "export", lambda self, path, **options: exported)  # it takes seconds
    status, out = export(capsys, gloro_run.folder, tmp_path / "model.onnx")
    assert status == 0
    assert "1,234 bytes; input x, outputs prediction, radius" in out
    assert "on 360 test points, radii to a relative 2e-15" in out
    assert "abstains (prediction -1) on 40 of them at eps 0.5" in out


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
    status, out = export(capsys, trained, tmp_path / "model.onnx", "--certify")
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
