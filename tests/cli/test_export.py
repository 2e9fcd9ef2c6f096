"""``atoll export`` as a user runs it."""

import json

from atoll.certify.export import Exported
from atoll.cli import main
from atoll.models import MLP
from atoll.runs import run as run_module
from atoll.runs.run import Run


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


class SoftmaxNet(MLP):
    """Its softmax has no certification rule."""

    def forward(self, x):
        return super().forward(x).softmax(1)


def test_models_that_cannot_be_exported_are_refused(trained, gloro_run, tmp_path, capsys, monkeypatch):
    status, out = export(capsys, trained, tmp_path / "model.onnx")
    assert status == 1
    assert "eps: the model was trained against linf; give an l2 radius" in out
    status, out = export(capsys, gloro_run.folder, tmp_path / "model.onnx", "--eta", "0.1")
    assert status == 1
    assert "eta: expected a CentroidNet, got SmallConvNet" in out
    # As if it had been trained, which takes longer.
    monkeypatch.setattr(run_module, "model_from", lambda *_, **__: SoftmaxNet((1, 8, 8), 10).eval())
    status, out = export(capsys, trained, tmp_path / "model.onnx", "--eps", "0.1")
    assert status == 1
    assert "_softmax" in out
    assert "no certification rule" in out
    assert not list(tmp_path.iterdir())
