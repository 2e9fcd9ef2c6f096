"""AutoAttack: `fast` compared with `standard`, and `standard` compared with another implementation (ART)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from atoll.attacks.evaluate import Evaluation, evaluate
from atoll.attacks.suites import sampling_for, suite
from atoll.data import MemorySplit
from atoll.data.base import Split, SubSplit
from atoll.threat import ThreatModel
from benchmarks.measure import Row
from benchmarks.peers import run_peer
from benchmarks.robust_models import robust_model

# Number of test points.  A point that stays correct costs `standard` 8,838 passes, and ART even more.
POINTS = {"mnist-at": 500, "mnist-trades": 500, "digits-trades": 360, "digits-preact": 24}
AGAINST = {"mnist-at": 100, "digits-preact": 16}
MASKED = 100


class Masked(nn.Module):
    """A robust network behind a staircase function, which blocks all gradients."""

    def __init__(self, inner: nn.Module, levels: int = 16) -> None:
        super().__init__()
        self.inner = inner
        self.levels = levels

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner((x * self.levels).round() / self.levels)
        return logits


def calls(evaluation: Evaluation) -> int:
    """Forward and backward passes of all attacks, counted per row."""
    return sum(attack.forward + attack.backward for attack in evaluation.attacks)


def compare(model: nn.Module, split: Split, threat: ThreatModel) -> tuple[Evaluation, Evaluation]:
    sampling = sampling_for("fast", threat)
    fast = evaluate(model, split, suite("fast", threat), cascade=True, sampling=sampling)
    return fast, evaluate(model, split, suite("standard", threat), cascade=True)


def fast_rows() -> Iterator[Row]:
    for name, count in [*POINTS.items(), ("masked mnist-at", MASKED)]:
        run = robust_model(name.removeprefix("masked "))
        model: nn.Module = run.model()
        if name.startswith("masked"):
            model = Masked(model).eval()
        split = SubSplit(run.data.test, torch.arange(min(count, len(run.data.test))))
        fast, standard = compare(model, split, run.threat)
        assert fast.estimate is not None
        gap = 100 * abs(fast.estimate.value - standard.robust.value)
        low, high = fast.estimate.interval
        kinds = ", ".join(warning.kind for warning in fast.warnings)
        note = f"at most {100 * fast.robust.value:.2f} %, estimate {fast.estimate}; standard {standard.robust}"
        note += f", {len(split)} points; warnings: {kinds}" if kinds else f", {len(split)} points"
        yield Row(f"fast, estimate away from standard, percentage points, {name}", gap, 100 * (high - low), note=note)
        quick = sum(a.forward + a.backward for a in fast.attacks if a.name.startswith("quick"))
        seconds = [sum(attack.seconds for attack in e.attacks) for e in (fast, standard)]
        times = f"{calls(fast):,} / {calls(standard):,}; {seconds[0]:.0f} s / {seconds[1]:.0f} s"
        yield Row(f"fast, model passes / standard, {name}", calls(fast) / calls(standard), None, note=times)
        yield Row(f"quick attacks of fast, model passes / standard, {name}", quick / calls(standard), 0.03)


def peer_rows() -> Iterator[Row]:
    for name, count in AGAINST.items():
        run = robust_model(name)
        model, (x, y) = run.model(), run.data.tensors("test", count)
        ours = evaluate(model, MemorySplit(x, y), suite("standard", run.threat), cascade=True)
        with tempfile.TemporaryDirectory() as folder:
            save_file({"x": x, "y": y}, Path(folder) / "points.safetensors")
            theirs = run_peer("art_autoattack", run.folder, folder)
        seconds = sum(attack.seconds for attack in ours.attacks)
        passes = f"{calls(ours):,} and {theirs['forward'] + theirs['backward']:,} passes"
        note = f"{100 * ours.robust.value:.2f} % and {100 * theirs['robust']:.2f} %, {count} points; {passes}"
        gap = 100 * (ours.robust.value - theirs["robust"])
        yield Row(f"standard, percentage points above ART, {name}", gap, 0.0, note=note)
        times = f"{seconds:.0f} s and {theirs['seconds']:.0f} s"
        yield Row(f"standard, time / ART, {name}", seconds / theirs["seconds"], 0.5, note=times)


def run() -> Iterator[Row]:
    yield from fast_rows()
    yield from peer_rows()
