"""Sums of an epoch, as checkpoints store them."""

import torch

from atoll.training.observers import RunningMeans


def test_sums_of_all_processes_are_restored():
    means = RunningMeans()
    for values in ([1.0, 2.0], [4.0]):
        means.add("count", torch.ones(len(values)))
        means.add("loss", torch.tensor(values))
    state = means.state_dict()
    assert {name: value.tolist() for name, value in state.items()} == {"count": [3.0], "loss": [7.0]}
    # One number per process; version 0.1 stored that of the first process alone.
    two = {"count": torch.tensor([2.0, 1.0]), "loss": torch.tensor([3.0, 4.0])}
    for saved in (state, two, {name: value.sum() for name, value in two.items()}):
        restored = RunningMeans()
        restored.load_state_dict(saved, torch.device("cpu"))
        assert restored.means() == means.means() == {"loss": 7 / 3}
