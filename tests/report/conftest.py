"""Runs to report on: measured for real by the commands, once; tests that change something copy them."""

import json
import shutil

import pytest
from PIL import Image

from atoll.cli import main
from support import SMALL

GLORO = ["digits-gloro", "data.limit=128", "model.widths=[4,4]", "model.hidden=8", "trainer.epochs=1"]

MEASURE = "{class_path: MeasureWCI, init_args: {points: 32}}"


def estimate(value):
    return {"value": value, "standard_error": 0.01, "interval": [value - 0.02, value + 0.02]}


# What `atoll explain` keeps, as far as the page reads it.
EXPLAIN = {
    "run": "robust",
    "checkpoint": "00000001",
    "weights": "raw",
    "split": "test",
    "images": None,
    "points": 8,
    "seed": 0,
    "words": ["2 points have no boundary within the budget"],
    "boundary": {"norm": "l2", "success": 0.75, "mean_distance": 0.61, "standard_error": 0.05},
    "methods": {
        "SM": {
            "infidelity": {"value": estimate(0.028), "scaled": estimate(0.026)},
            "sanity": {"passed": True, "layers": []},
            "locality": {"precision": estimate(0.7), "recall": estimate(0.6), "f1": estimate(0.65)},
        },
        "BIG": {"infidelity": {"value": estimate(0.19)}, "sanity": {"passed": False, "layers": []}},
    },
    "distances": {"SM-BSM": estimate(2.5)},
}


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """Two finished runs: ``robust`` with everything that can be measured, ``certified`` with proofs only."""
    folder = tmp_path_factory.mktemp("report")
    robust, certified = folder / "robust", folder / "certified"
    for words in (
        [
            "train",
            *SMALL,
            "data.limit=512",
            "methods=[{class_path: MeasureWCI, init_args: {points: 32}}]",
            "--out",
            robust,
        ],
        ["attack", robust, "--attacks", "FGSM,PGD-3", "--points", "40"],
        ["curvature", robust, "--points", "32", "--top", "1", "--gap", "--density", "--landscape", "weights"],
        ["certify", robust, "--smooth", "0.25", "--samples", "100", "--points", "10", "--eps", "0.1,0.25"],
        ["train", *GLORO, "--out", certified],
        ["certify", certified, "--points", "40", "--eps", "0.1", "--check", "5", "--attacks", "PGD-2"],
    ):
        assert main([*map(str, words), "--json"]) == 0
    (robust / "explain").mkdir()
    step = json.loads((robust / "index.json").read_text())["last"]
    (robust / "explain" / "explain.json").write_text(json.dumps(EXPLAIN | {"checkpoint": f"{step:08}"}))
    Image.new("RGB", (70, 80), (200, 30, 30)).save(robust / "explain" / "attributions.png")
    return folder


@pytest.fixture
def robust(measured, tmp_path):
    """A copy of the complete run, to be changed."""
    shutil.copytree(measured / "robust", tmp_path / "robust")
    return tmp_path / "robust"
