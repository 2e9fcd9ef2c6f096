"""Run ART's AutoAttack on one of our runs, in a separate environment; prints one line of JSON.

    .venv-bench/bin/python -m benchmarks.peers.art_autoattack RUN FOLDER

FOLDER contains ``points.safetensors`` with x and y.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from art.attacks.evasion import AutoAttack
from art.estimators.classification import PyTorchClassifier
from safetensors.torch import load_file

from atoll.attacks.progress import AttackCounts
from atoll.modules import count_passes
from atoll.runs.run import open_run


def main(folder: Path, points: Path) -> None:
    run = open_run(folder)
    model, tensors = run.model(), load_file(points / "points.safetensors")
    x, y = tensors["x"], tensors["y"]
    norm = {"linf": np.inf, "l2": 2, "l1": 1}[run.threat.norm]
    classifier = PyTorchClassifier(model, torch.nn.CrossEntropyLoss(), x.shape[1:], 10, clip_values=(0.0, 1.0))
    attack = AutoAttack(classifier, norm=norm, eps=run.threat.radius, eps_step=2 * run.threat.radius, batch_size=250)
    tally = AttackCounts()
    with count_passes(model, tally):
        start = time.perf_counter()
        x_adv = torch.from_numpy(attack.generate(x.numpy(), y.numpy()))
        seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        inside = run.threat.distance(x_adv, x) <= run.threat.radius * (1 + 1e-5) + 1e-7
        broken = (model(x).argmax(1) != y) | ((model(x_adv).argmax(1) != y) & inside)
    result = {"robust": 1 - broken.double().mean().item(), "seconds": seconds}
    sys.stdout.write("\n" + json.dumps(result | {"forward": tally.forward, "backward": tally.backward}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
