"""New users follow the documentation from an empty folder.

The engineer with photos is played here.  The others are played by the tests of the pages they read: the student with
a network of their own by `tests/test_notebooks.py` (bring-your-own-model), the researcher with a loss of their own by
`tests/test_documents.py` (CONTRIBUTING), and the teacher by `tests/test_documents.py` (README) and `make demo`.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from atoll.cli import main
from atoll.runs.run import open_run
from test_documents import commands

GUIDE = (Path(__file__).parents[1] / "docs/guides/photos.md").read_text()
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
