"""Compute PyHessian's trace of one of our PreAct ResNets, in a separate environment; prints one line of JSON.

    .venv-bench/bin/python -m benchmarks.peers.pyhessian_trace FOLDER WIDTH BATCH VECTORS

FOLDER contains ``model.safetensors`` and ``points.safetensors`` with x and y.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import torch
from pyhessian import hessian
from safetensors.torch import load_file

from atoll.models import PreActResNet


def main(folder: Path, width: int, batch: int, vectors: int) -> None:
    points = load_file(folder / "points.safetensors")
    x, y = points["x"], points["y"]
    model = PreActResNet(tuple(x.shape[1:]), 10, width=width)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    torch.manual_seed(0)
    batches = list(zip(x.split(batch), y.split(batch), strict=True))
    known = hessian(model, torch.nn.CrossEntropyLoss(), dataloader=batches, cuda=False)
    start = time.perf_counter()
    traces = known.trace(maxIter=vectors, tol=-math.inf)  # runs all iterations; at 0, a negative trace would stop it
    seconds = time.perf_counter() - start
    sys.stdout.write("\n" + json.dumps({"seconds": seconds, "traces": traces}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
