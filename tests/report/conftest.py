"""Runs to report on, measured once for all tests; tests that change something copy them."""

import shutil

import pytest

from atoll.runs.train import train
from support import SMALL

GLORO = ["digits-gloro", "data.limit=128", "model.widths=[4,4]", "model.hidden=8", "trainer.epochs=1"]
METHODS = "methods=[{class_path: MeasureWCI, init_args: {points: 16}}, {class_path: SWA, init_args: {alpha: 0.5}}]"
CURVATURE = {"points": 16, "top": 1, "steps": 2, "relative_error": 0.5}


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """``robust`` with every measurement, ``certified`` with proofs, ``standard`` with the attacks of ``robust``."""
    folder = tmp_path_factory.mktemp("report")
    robust = train(SMALL[0], *SMALL[1:], METHODS, out=folder / "robust")
    robust.attack("FGSM,PGD-3", points=40, corruptions=True)
    robust.curvature(gap=True, density=True, landscape="weights", **CURVATURE)
    robust.certify(smooth=0.25, samples=100, points=10, eps="0.1,0.25")
    robust.explain(points=4, methods=("SM", "BIG"), checks=2, pool=20, budget=20)
    standard = train("digits-standard", *SMALL[1:3], *SMALL[4:], out=folder / "standard")
    standard.attack("FGSM,PGD-3", points=40)
    standard.curvature(**CURVATURE)
    certified = train(GLORO[0], *GLORO[1:], out=folder / "certified")
    certified.certify(points=40, eps="0.1", check=5, attacks="PGD-2")
    return folder


@pytest.fixture
def robust(measured, tmp_path):
    """A copy of the complete run, to be changed."""
    shutil.copytree(measured / "robust", tmp_path / "robust")
    return tmp_path / "robust"


@pytest.fixture
def plotly():
    """For tests of the page as it is; plotly.js is most of it and takes most of the time."""


@pytest.fixture(autouse=True)
def _quick(request, monkeypatch):
    if "plotly" not in request.fixturenames and "browser" not in request.fixturenames:
        monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "0")
