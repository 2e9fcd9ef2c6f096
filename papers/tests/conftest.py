"""Fixtures of the papers' tests."""

from __future__ import annotations

import pytest
import torch

from atoll.runs.run import Run
from atoll.runs.train import train
from atoll_papers.studies.measure import TINY_DIGITS

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A small run of AT, tested with PGD-2."""
    overrides = (*TINY_DIGITS, "trainer.test_steps=2", "trainer.epochs=2")
    return train("digits-flat/at-base", *overrides, out=tmp_path_factory.mktemp("runs") / "tiny")
