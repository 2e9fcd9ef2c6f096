"""Settings for all tests."""

import os
import shutil

import pytest
import torch
from playwright.sync_api import sync_playwright

from atoll.attacks import APGD, FAB, Square
from atoll.attacks.suites import SUITES
from atoll.cli import main
from atoll.runs.train import train
from support import SMALL

# Tests run side by side (pytest-xdist), and the nets are tiny: more threads only get in each other's way.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


BROWSER = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    # WebGL in software, for machines without a GPU.
    "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
]  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a finished run, for tests that only look at it or add to it."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    assert main(["train", *SMALL, "--out", str(folder), "--json"]) == 0
    return folder


@pytest.fixture(scope="session")
def gloro_run(tmp_path_factory):
    """A run that was trained to certify its predictions, for tests that only look at it or add to it."""
    words = ("model.widths=[8,16]", "model.hidden=32", "trainer.epochs=12", "trainer.test_steps=0")
    return train("digits-gloro", *words, out=tmp_path_factory.mktemp("runs") / "gloro")


@pytest.fixture
def short(monkeypatch):
    """``standard`` with a few iterations."""
    plan = {
        "APGD-CE": lambda threat: APGD(threat, steps=3),
        "FAB-T": lambda threat: FAB(threat, steps=3, targets=9),
        "Square": lambda threat: Square(threat, queries=20),
    }
    monkeypatch.setitem(SUITES, "standard", lambda threat: {name: build(threat) for name, build in plan.items()})


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "these tests need Chromium: `make browser` installs it"
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=BROWSER)
        yield opened
        opened.close()
