"""Small models with points for which the result of an attack is known or follows from brute force."""

import textwrap

import torch
from torch import nn

from atoll.attacks import APGD, FAB, PGD, Square
from atoll.data import MemorySplit
from atoll.losses.objectives import margin
from atoll.threat import ThreatModel

THREAT = ThreatModel("linf", 0.03)

# What changes in a script that was written for the original packages.
IMPORTS = {
    "from autoattack import": "from atoll.attacks import",
    "from robustbench import": "from atoll.attacks.robustbench import",
    "from robustbench.eval import": "from atoll.attacks.robustbench import",
    "from robustbench.utils import": "from atoll.attacks.robustbench import",
    "from robustbench.data import": "from atoll.attacks.robustbench import",
    "from robustbench.model_zoo.enums import": "from atoll.attacks.robustbench import",
}


def run_script(script, **names):
    """Run a script with other imports, and return its variables."""
    script = textwrap.dedent(script)
    assert any(line in script for line in IMPORTS)
    for theirs, ours in IMPORTS.items():
        script = script.replace(theirs, ours)
    variables = {"torch": torch, "nn": nn, **names}
    exec(compile(script, "script", "exec"), variables)
    return variables


def quick():
    """The attacks of AutoAttack, short."""
    return {
        "PGD": PGD(THREAT, steps=2),
        "APGD-CE": APGD(THREAT, steps=4),
        "APGD-T": APGD(THREAT, steps=6, targets=9),
        "FAB-T": FAB(THREAT, steps=4, targets=9),
        "Square": Square(THREAT, queries=40),
    }


def template_model(scale=4.0):
    """Classifies TinyData by the brightness of the rows that its classes differ in."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    weight = torch.zeros(3, 8, 8)
    for k in range(3):
        weight[k, 2 * k : 2 * k + 3] = scale / 24
    model[1].weight.data, model[1].bias.data = weight.flatten(1), torch.zeros(3)
    return model.eval()


def linear(norm):
    """A linear model of two classes, points with the labels it gives them, and their distances to the boundary."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Linear(6, 2)
    model.weight.data, model.bias.data = torch.randn(2, 6, generator=draw), torch.randn(2, generator=draw)
    x = torch.randn(200, 6, generator=draw)
    y = model(x).argmax(1)
    difference = (model.weight[1] - model.weight[0]).detach()
    dual = {"linf": difference.abs().sum(), "l2": difference.norm(), "l1": difference.abs().max()}[norm]
    return model, x, y, -margin(model(x), y).detach() / dual


def plane(count=60, dtype=torch.float32):
    """A small net with a crooked boundary, and points of the unit square with the labels it gives them."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 4)).to(dtype).eval()
        model[0].weight.data *= 5
        model[0].bias.data = -model[0].weight.data.sum(1) / 2 + 0.3 * torch.randn(12).to(dtype)
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    return model, x, model(x).argmax(1)


def in_batches(points):
    """A ``next_batch`` that returns the points in order, and None at the end."""
    position = [0]

    def next_batch(count):
        start = position[0]
        position[0] += count
        return points[slice(start, start + count)] if start < len(points) else None

    return next_batch


def images(count=40, classes=5):
    """A small net on images of 1x6x6 in float64, and points most of which it classifies correctly."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, classes)).double().eval()
        x = torch.rand(count, 1, 6, 6, dtype=torch.float64)
    y = model(x).argmax(1)
    y[::10] = (y[::10] + 1) % classes
    return model, MemorySplit(x, y)
