"""Transfer: what it gives is what the attack gives on the surrogate, and nobody else is touched."""

import pytest
import torch
from torch import nn

from atoll.attacks import APGD, FAB, FGSM, PGD, Square
from atoll.attacks.carlini_wagner import CarliniWagner
from atoll.attacks.rays import RayS
from atoll.attacks.transfer import Transfer
from atoll.errors import InputError
from atoll.rng import PointRNG
from atoll.threat import ThreatModel

LINF = ThreatModel("linf", 0.1)

# A new attack joins every test by one line.
ATTACKS = {
    "fgsm": lambda: FGSM(LINF),
    "pgd": lambda: PGD(LINF, steps=3),
    "pgd-margin": lambda: PGD(LINF, "margin", steps=3, restarts=2),
    "apgd": lambda: APGD(LINF, steps=5),
    "fab": lambda: FAB(LINF, steps=3, targets=9),
    "square": lambda: Square(LINF, queries=10),
    "rays": lambda: RayS(LINF, queries=10),
    "carlini-wagner": lambda: CarliniWagner(ThreatModel("l2", 0.3), steps=5, binary_search_steps=2),
}


def net(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Flatten(), nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, 5)]
        return nn.Sequential(*layers)


def points():
    x = torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return x, net(0).eval()(x).argmax(1), torch.arange(100, 112)


class Untouchable(nn.Module):
    """A defender that must not be asked."""

    def forward(self, x):
        raise AssertionError("the defender was asked")


@pytest.mark.parametrize("name", ATTACKS)
def test_gives_what_the_attack_gives_on_the_surrogate(name):
    surrogate, (x, y, index) = net(0), points()
    direct = ATTACKS[name]()(surrogate, x, y, seed=7, index=index)
    transfer = Transfer(ATTACKS[name](), surrogate)
    assert torch.equal(transfer(Untouchable(), x, y, seed=7, index=index), direct)
    assert transfer.threat == ATTACKS[name]().threat
    # For callers with streams of their own: they expect a model in evaluation mode, and so does the surrogate.
    streams = [PointRNG(7, "any", index=index) for _ in range(2)]
    x_adv = transfer.search(Untouchable(), x, y, streams[0])
    assert surrogate.training
    torch.testing.assert_close(x_adv, ATTACKS[name]().search(surrogate.eval(), x, y, streams[1]), rtol=0, atol=0)


def test_from_a_model_to_itself_is_the_white_box_attack():
    model, (x, y, _) = net(0), points()
    attack = PGD(LINF, steps=10)
    assert torch.equal(Transfer(attack, model)(model, x, y), attack(model, x, y))
    broken = [(model.eval()(Transfer(attack, other)(model, x, y)).argmax(1) != y).sum() for other in (model, net(1))]
    assert broken[0] > broken[1]


@pytest.mark.parametrize("name", ATTACKS)
def test_leaves_both_models_alone(name):
    surrogate, defender, (x, y, _) = net(0).train(), net(1).train(), points()
    surrogate[2].eval()  # modes may be mixed
    surrogate[5].weight.grad = torch.ones_like(surrogate[5].weight)
    models = (surrogate, defender)
    modes = [[module.training for module in model.modules()] for model in models]
    buffers = [{key: value.clone() for key, value in model.state_dict().items()} for model in models]
    x_adv = Transfer(ATTACKS[name](), surrogate)(defender, x, y)
    assert [[module.training for module in model.modules()] for model in models] == modes
    for model, before in zip(models, buffers, strict=True):
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(surrogate[5].weight.grad, torch.ones_like(surrogate[5].weight))
    assert surrogate[1].weight.grad is None
    assert all(parameter.requires_grad for parameter in surrogate.parameters())
    assert not x_adv.requires_grad


def test_bad_input_is_refused_as_by_the_attack_itself():
    x, y, _ = points()
    attack = Transfer(PGD(LINF), net(0))
    with pytest.raises(InputError, match="expected values in"):
        attack(net(1), 255 * x, y)
    with pytest.raises(InputError, match="labels: expected classes"):
        attack(net(1), x, y + 5)
    assert attack(net(1), x[:0], y[:0]).shape == (0, 1, 4, 4)
