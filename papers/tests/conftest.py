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
    """A small run of AT that has learned something, tested with PGD-2."""
    longer = ("data.limit=300", "model.hidden=[32]", "trainer.epochs=15", "trainer.evaluate_every=15")
    overrides = (*TINY_DIGITS, *longer, "trainer.test_steps=2")
    return train("digits-flat/at-base", *overrides, out=tmp_path_factory.mktemp("runs") / "tiny")
