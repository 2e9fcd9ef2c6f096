"""A small trained net with batch norm, whose predictions on its test images differ."""

import copy
from functools import cache

import torch

from support import TinyData, tiny_trainer


@cache
def _trained():
    trainer = tiny_trainer("standard", batch_norm=True, double=True, epochs=6)
    trainer.fit()
    return trainer.model.eval()


def net(count=9):
    """A copy of the model (float64), and some of its test images of 1x8x8."""
    data = TinyData()
    data.double = True
    x, _ = data.tensors("test", count)
    model = copy.deepcopy(_trained())
    assert len(model(x).argmax(1).unique()) == min(count, 3)
    return model, x


def smooth(seed=0):
    """An untrained net without kinks, float64, for the same images."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Softplus(), torch.nn.Linear(32, 4)]
        return torch.nn.Sequential(*layers).double()


def linear():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4)).double()
