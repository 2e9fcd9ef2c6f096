"""Precisions: processors that crash, hang or refuse, and training in bf16 on a CPU."""

from __future__ import annotations

import pytest
import torch

from atoll import precision
from atoll.errors import InputError
from atoll.precision import PrecisionCheck, check_precision, probe
from support import tiny_trainer


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "the process was stopped by SIGILL"),
        ("import time; time.sleep(60)", "no answer within 2 s"),
        ("raise RuntimeError('not implemented')", "RuntimeError: not implemented"),
        ("print(1.5)", None),
    ],
)
def test_precisions_that_crash_or_hang_do_not_work(code, result, monkeypatch):
    monkeypatch.setattr(precision, "PROBE", code)
    monkeypatch.setattr(precision, "LONGEST", 2.0)
    expected = PrecisionCheck("bf16", False, reason=result) if result else PrecisionCheck("bf16", True, speed=1.5)
    assert probe("cpu", "bf16") == expected


@pytest.mark.slow
def test_the_real_probe_runs():
    result = probe("cpu", "bf16")
    assert result.works == (result.speed is not None) == (result.reason == "")


@pytest.fixture
def processor(monkeypatch):
    """Sets whether bf16 works on this processor."""

    def choose(**result):
        monkeypatch.setattr(precision, "probe", lambda *args: PrecisionCheck("bf16", **result))
        precision._probe_once.cache_clear()

    yield choose
    precision._probe_once.cache_clear()


def test_training_refuses_a_precision_that_would_end_the_process(processor):
    processor(works=False, reason="the process was stopped by SIGILL")
    with pytest.raises(InputError, match=r"^precision: bf16 does not work on this processor \(the process was stopped"):
        tiny_trainer(precision="bf16")


def test_a_processor_is_tried_once_and_only_for_bf16(processor, monkeypatch):
    tried = []
    processor(works=True)
    monkeypatch.setattr(precision, "probe", lambda *args: tried.append(args[:2]) or PrecisionCheck("bf16", True))
    for device, name in (("cpu", "float32"), ("cuda", "bf16"), ("cuda", "fp16"), ("cpu", "bf16"), ("cpu", "bf16")):
        check_precision(device, name)
    assert tried == [("cpu", "bf16")]


@pytest.mark.slow
def test_training_in_bf16_on_a_cpu():
    """Weights stay in float32 and are close to full precision; without bf16, training refuses."""
    if not probe("cpu", "bf16").works:
        with pytest.raises(InputError, match="bf16 does not work on this processor"):
            tiny_trainer(precision="bf16")
        return
    weights = {}
    for name in ("float32", "bf16"):
        trainer = tiny_trainer(precision=name)
        trainer.fit()
        weights[name] = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    difference = torch.linalg.vector_norm(weights["bf16"] - weights["float32"])
    assert weights["bf16"].dtype == torch.float32
    assert 0 < float(difference / torch.linalg.vector_norm(weights["float32"])) < 0.1
