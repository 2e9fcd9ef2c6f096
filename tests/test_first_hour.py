"""New users follow the documentation from an empty folder.

The engineer with photos and the auditor with somebody else's model are played here.  The others are played by the tests
of the pages they read: the student with a network of their own by `tests/test_notebooks.py` (bring-your-own-model), the
researcher with a loss of their own by `tests/test_documents.py` (CONTRIBUTING), and the teacher by
`tests/test_documents.py` (README) and `make demo`.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from atoll.audit.speed import Speed
from atoll.cli import main
from atoll.runs.run import open_run
from test_documents import commands

GUIDES = Path(__file__).parents[1] / "docs/guides"
GUIDE = (GUIDES / "photos.md").read_text()
COLORS = {"apple": (200, 40, 40), "lemon": (220, 210, 60), "plum": (90, 40, 120)}


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Photos of three fruits, larger than the network's inputs, in the current folder."""
    draw = np.random.default_rng(0)
    for name, color in COLORS.items():
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(1, 15):
            pixels = np.clip(np.array(color) + draw.normal(0, 25, (48, 64, 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


def test_the_engineer_with_photos(photos, capsys):
    train, attack, predict, export, report, moved = commands(GUIDE)
    broken = [photos / "apple" / "broken.jpg", photos / "plum" / "empty.png"]
    broken[0].write_bytes(b"not an image")
    broken[1].write_bytes(b"")
    assert main(train) == 1  # all faults at once, before any work
    error = capsys.readouterr().err
    assert all(path.name in error for path in broken)
    assert not Path("runs/fruit").exists()
    for path in broken:
        path.unlink()

    assert main([*train, "batch_size=64"]) == 1
    assert "batch_size: expected at most the number of training points, 29, got 64" in capsys.readouterr().err
    assert not Path("runs/fruit").exists()

    assert main(train) == 0
    assert main(attack) == 0
    assert open_run("runs/fruit").results("attack")
    capsys.readouterr()
    assert main([*predict, "--json"]) == 0
    predictions = json.loads(capsys.readouterr().out)["predictions"]
    assert [Path(each["image"]).name for each in predictions] == ["1.jpg", "1.jpg"]
    assert main(export) == 0
    metadata = {entry.key: entry.value for entry in onnx.load("fruit.onnx").metadata_props}
    assert json.loads(metadata["classes"]) == [*COLORS]
    assert metadata["resize"] == "32"
    assert main(report) == 0
    assert "apple" in Path("fruit.html").read_text()

    Path("moved").mkdir()
    shutil.move(photos, "moved/photos")
    capsys.readouterr()
    assert main(moved[: moved.index("--data.root")]) == 1
    assert "--data.root" in capsys.readouterr().err
    assert main(moved) == 0
    (Path("moved/photos/plum/3.jpg")).unlink()
    assert main(["train", "--resume", "--out", "runs/fruit", "data.root=moved/photos"]) == 1
    assert "plum/3.jpg" in capsys.readouterr().err


def write_color_classifier(path: Path) -> None:
    """An ONNX file that another tool could have written: the class whose color is closest to the mean color."""
    colors = np.array([*COLORS.values()], np.float32) / 255
    nodes = [
        onnx.helper.make_node("GlobalAveragePool", ["image"], ["mean"]),
        onnx.helper.make_node("Flatten", ["mean"], ["color"]),
        onnx.helper.make_node("Gemm", ["color", "weight", "bias"], ["logits"], transB=1),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "colors",
        [onnx.helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["n", 3, 224, 224])],
        [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["n", 3])],
        [
            onnx.numpy_helper.from_array(40 * colors, "weight"),
            onnx.numpy_helper.from_array(-20 * (colors**2).sum(1), "bias"),
        ],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)


def test_the_auditor_with_a_model_of_somebody_else(photos, capsys, monkeypatch):
    """Your own model in five minutes, from start to end, on a machine that is so slow that the plan is short."""
    adopt, audit, attack, explain, report = commands((GUIDES / "adopt.md").read_text())
    slow = Speed(forward=0.2, gradient=0.3, noisy=1.0, corruptions=20.0, points=9, rows=9)
    monkeypatch.setattr("atoll.audit.engine.measure_speed", lambda subject, device: slow)
    write_color_classifier(Path("model.onnx"))
    assert main(adopt) == 0
    assert "clean accuracy on 9 test images: 100.00 %" in capsys.readouterr().out
    Path("model.onnx").unlink()  # the run needs neither the file nor what wrote it
    assert main(audit) == 0
    page = Path("runs/photos/audit/audit.html").read_text()
    assert "Evidence" in page
    assert "apple" in page
    tree = json.loads(Path("runs/photos/audit/audit.json").read_text())
    assert tree["properties"][0]["evidence"][0]["value"] == 1
    assert {step["state"] for step in tree["steps"]} <= {"done", "left out"}
    assert main([*attack, "--attacks", "PGD-5", "--points", "3"]) == 0
    assert main([*explain, "--points", "1", "--methods", "SM", "--checks", "0", "--budget", "20"]) == 0
    assert main(report) == 0
