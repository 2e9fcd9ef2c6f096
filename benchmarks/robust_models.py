"""Models for benchmarks, trained once and stored in ``runs/bench``; all but one are robust.

If MNIST cannot be downloaded, set ``ATOLL_MNIST`` to its ``.npz`` file (x_train, y_train, x_test, y_test).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from atoll.runs.run import Run, open_run

FOLDER = Path("runs/bench")
TRAININGS = {
    "mnist-at": ["mnist-flat/at-base", "data.limit=5000", "trainer.epochs=10"],
    "mnist-standard": ["mnist-flat/at-base", "data.limit=5000", "trainer.epochs=10", "loss=Standard"],
    "mnist-trades": ["mnist-flat/trades-base", "data.limit=5000", "trainer.epochs=10"],
    "digits-trades": ["digits-flat/trades-trh"],
    "digits-preact": ["digits-at", "model=PreActResNet", "trainer.epochs=12", "attack.steps=5"],
}


def robust_model(name: str) -> Run:
    """Open the run of a model, and train it first if necessary."""
    folder, words = FOLDER / name, TRAININGS[name]
    if "ATOLL_MNIST" in os.environ and words[0].startswith("mnist"):
        words = [words[0], "data.class_path=Npz", f"data.path={os.environ['ATOLL_MNIST']}", *words[1:]]
    if not folder.exists() or not Run(folder).is_finished:
        command = [sys.executable, "-m", "atoll", "train", *words, "--json", "--resume", "--out", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return open_run(folder)
