"""The PGD family: known worst cases, brute force, and what an attack must leave alone."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.attacks import FGSM, OBJECTIVES, PGD
from atoll.errors import InputError
from atoll.threat import ThreatModel

NORMS = ["linf", "l2", "l1"]

# A new attack joins the tests of invariants by one line.
ATTACKS = {
    "fgsm": FGSM,
    "pgd": lambda t: PGD(t, steps=5),
    "pgd-kl": lambda t: PGD(t, "kl", steps=3),
    "pgd-margin": lambda t: PGD(t, "margin", steps=3),
    "pgd-dlr": lambda t: PGD(t, "dlr", steps=3, restarts=2),
    "pgd-clean": lambda t: PGD(t, steps=2, start="clean", step_size="2/255"),
    "pgd-targeted": lambda t: PGD(t, steps=3, targeted=True),
}


def linear(size: int, classes: int, seed: int = 0) -> nn.Module:
    draw = torch.Generator().manual_seed(seed)
    model = nn.Linear(size, classes)
    model.weight.data = torch.randn(classes, size, generator=draw)
    model.bias.data = torch.randn(classes, generator=draw)
    return model


def net(size: int = 4, classes: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(size, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, classes)
        )


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("objective", ["ce", "margin", "dlr"])
def test_reaches_the_worst_case_of_a_linear_model(norm, objective):
    """For two classes and no bounds the worst margin is the clean one plus eps times the dual norm."""
    model, eps = linear(6, 2), 0.3
    x, y = torch.randn(20, 6, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 2
    # Plain PGD keeps its step size, so the step has to be small for l2 to settle.
    attack = PGD(ThreatModel(norm, eps, None), objective, steps=60, step_size=eps / 10)
    x_adv = attack(model, x, y)
    difference = model.weight[1] - model.weight[0]
    dual = {"linf": difference.abs().sum(), "l2": difference.norm(), "l1": difference.abs().max()}[norm]
    worst = OBJECTIVES["margin"](model(x), y, None) + eps * dual
    torch.testing.assert_close(OBJECTIVES["margin"](model(x_adv), y, None), worst, rtol=2e-3, atol=2e-3)


def test_finds_what_brute_force_finds_in_the_plane():
    """On a small net with 2-D inputs, against a fine grid over the ball."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
        model[0].weight.data *= 5
        model[0].bias.data = -model[0].weight.data.sum(1) / 2 + 0.3 * torch.randn(12)  # kinks inside the square
    x = torch.rand(40, 2, generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)
    eps = 0.15
    grid = torch.tensor(list(itertools.product(torch.linspace(-eps, eps, 81).tolist(), repeat=2)))
    for norm in NORMS:
        threat = ThreatModel(norm, eps)
        offsets = grid[threat.distance(grid, torch.zeros_like(grid)) <= eps]
        candidates = (x[:, None] + offsets).clamp(0, 1)
        broken = (model(candidates).argmax(2) != y[:, None]).any(1)
        attack = PGD(threat, "margin", steps=40, restarts=5)
        result = model(attack(model, x, y)).argmax(1) != y
        assert 5 < int(broken.sum()) < 40
        assert int((result & broken).sum()) >= int(broken.sum()) - 1  # PGD is a heuristic
        assert int((result & ~broken).sum()) <= 1  # between two points of the grid at most


@pytest.mark.parametrize("name", ATTACKS)
@settings(deadline=None, max_examples=25)
@given(
    norm=st.sampled_from(NORMS),
    eps=st.one_of(st.just(0.0), st.floats(1e-3, 2.0)),
    constant=st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0])),
    seed=st.integers(0, 1000),
)
def test_outputs_lie_in_ball_and_bounds(name, norm, eps, constant, seed):
    model, threat = net().eval(), ThreatModel(norm, eps)
    x = torch.rand(5, 4, generator=torch.Generator().manual_seed(seed))
    if constant is not None:
        x = torch.full_like(x, constant)
    x_adv = ATTACKS[name](threat)(model, x, torch.arange(5) % 3, seed=seed)
    assert x_adv.shape == x.shape
    assert (threat.distance(x_adv.double(), x.double()) <= eps * (1 + 1e-5) + 1e-7).all()
    assert x_adv.min() >= 0
    assert x_adv.max() <= 1


@pytest.mark.parametrize("name", ATTACKS)
def test_leaves_mode_buffers_gradients_and_inputs_alone(name):
    model = net().train()
    model[0].eval()  # modes may be mixed
    model[4].weight.grad = torch.ones_like(model[4].weight)
    x, y = torch.rand(6, 4), torch.arange(6) % 3
    modes = [m.training for m in model.modules()]
    buffers = {k: v.clone() for k, v in model.state_dict().items()}
    rng, before = torch.get_rng_state(), x.clone()
    with torch.no_grad():
        x_adv = ATTACKS[name](ThreatModel())(model, x, y)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, buffers[k]) for k, v in model.state_dict().items())
    assert torch.equal(model[4].weight.grad, torch.ones_like(model[4].weight))
    assert model[0].weight.grad is None
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert not x.requires_grad
    assert not x_adv.requires_grad


def test_restores_modes_when_the_model_fails():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("out of memory")

    model = Fails().train()
    with pytest.raises(RuntimeError):
        PGD(ThreatModel())(model, torch.rand(2, 3), torch.zeros(2, dtype=torch.long))
    assert model.training


@pytest.mark.parametrize("name", ATTACKS)
def test_a_point_is_attacked_the_same_in_any_company(name):
    model, attack = net().double().eval(), ATTACKS[name](ThreatModel("linf", 0.1))
    x = torch.rand(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y, index = torch.arange(12) % 3, torch.arange(100, 112)
    whole = attack(model, x, y, seed=7, index=index)
    for part in (torch.tensor([3]), torch.tensor([11, 0, 5]), torch.arange(7)):
        some = attack(model, x[part], y[part], seed=7, index=index[part])
        torch.testing.assert_close(some, whole[part], rtol=1e-9, atol=1e-9)


def test_restarts_never_hurt_and_targets_are_reached():
    model = net().eval()
    x = torch.rand(40, 4, generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)
    threat = ThreatModel("linf", 0.3)
    one = PGD(threat, "margin", steps=3)(model, x, y)
    many = PGD(threat, "margin", steps=3, restarts=6)(model, x, y)
    broken = [int((model(adv).argmax(1) != y).sum()) for adv in (one, many)]
    assert broken[1] >= broken[0] > 0
    target = (y + 1) % 3
    reached = PGD(ThreatModel("linf", 1.0), steps=40, targeted=True, restarts=3)(model, x, target)
    before = F.cross_entropy(model(x), target)
    assert F.cross_entropy(model(reached), target) < before


def test_step_sizes():
    """2.5 eps over the number of steps (Madry et al., 2018), and 2/255 and 15/255 of the papers' tables."""
    linf, l2, l1 = ThreatModel("linf", "8/255"), ThreatModel("l2", "128/255"), ThreatModel("l1", 12.0)
    for step_size, sizes in ((None, (2 / 255, 32 / 255, 3.0)), ("published", (2 / 255, 15 / 255, 3.0))):
        steps = [PGD(threat, steps=10, step_size=step_size).step_size for threat in (linf, l2, l1)]
        assert steps == pytest.approx(sizes)
    assert PGD(linf, step_size="1/4").step_size == 0.25
    assert FGSM(l1).step_size == 12.0


def test_a_tie_between_classes_is_no_success():
    """Half of the ball is a tie, the other half is misclassified; no gradient says so, but five restarts see it."""

    class Step(nn.Module):
        def forward(self, x):
            return torch.stack([0 * x.sum(1), (x.sum(1) > 0.5).float()], 1)

    x, y = torch.full((100, 1), 0.5), torch.zeros(100, dtype=torch.long)
    share = [
        (Step()(PGD(ThreatModel("linf", 0.1), steps=1, restarts=restarts)(Step(), x, y)).argmax(1) != y).double().mean()
        for restarts in (1, 6)
    ]
    assert 0.3 < share[0] < 0.7
    assert share[1] > 0.95


def test_counts_its_passes():
    calls = {"forward": 0}
    model = net().eval()
    model.register_forward_hook(lambda *_: calls.__setitem__("forward", calls["forward"] + 1))
    x, y = torch.rand(2, 4), torch.zeros(2, dtype=torch.long)
    for attack, expected in (
        (PGD(ThreatModel(), steps=10), 10),
        (PGD(ThreatModel(), "kl", steps=10), 11),
        (PGD(ThreatModel(), steps=10, restarts=2), 22),
        (FGSM(ThreatModel()), 1),
    ):
        calls["forward"] = 0
        attack(model, x, y)
        assert calls["forward"] == expected


def test_zero_gradients_do_not_move_points_out_of_the_ball():
    class Flat(nn.Module):
        def forward(self, x):
            return torch.zeros(len(x), 3) + 0 * x.sum()

    for norm in NORMS:
        threat = ThreatModel(norm, 0.1)
        x = torch.rand(3, 5)
        x_adv = PGD(threat, steps=3)(Flat(), x, torch.zeros(3, dtype=torch.long))
        assert x_adv.isfinite().all()


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        (torch.full((2, 4), float("nan")), torch.zeros(2, dtype=torch.long), "NaN"),
        (torch.full((2, 4), 255.0), torch.zeros(2, dtype=torch.long), "expected values in"),
        (torch.rand(2, 4), torch.tensor([0, 3]), r"labels: expected classes in \[0, 2\], got \[0, 3\]"),
        (torch.rand(2, 4), torch.tensor([-1, 0]), "labels: expected classes"),
        (torch.rand(2, 4), torch.tensor([0]), "labels: expected one per input, got 2 inputs and 1 labels"),
    ],
)
def test_bad_input_is_one_sentence(x, y, sentence):
    with pytest.raises(InputError, match=sentence):
        PGD(ThreatModel(), steps=2)(net(), x, y)


def test_bad_arguments_are_one_sentence():
    threat = ThreatModel()
    for build, sentence in (
        (lambda: PGD(threat, "mse"), "objective: expected one of ce, kl, margin, pm, dlr, got 'mse'"),
        (lambda: PGD(threat, steps=0), "steps: expected at least 1"),
        (lambda: PGD(threat, "kl", targeted=True), "not supported with the kl objective"),
        (lambda: PGD(threat, step_size="x"), "step_size: expected a number or a fraction"),
    ):
        with pytest.raises(InputError, match=sentence):
            build()


def test_an_empty_batch_is_fine():
    out = PGD(ThreatModel())(net(), torch.rand(0, 4), torch.zeros(0, dtype=torch.long))
    assert out.shape == (0, 4)


def test_dlr_against_its_formula_and_two_classes():
    g = torch.tensor([[5.0, 3.0, 1.0, 0.0], [1.0, 4.0, 2.0, 0.0]])
    y = torch.tensor([0, 2])
    expected = torch.tensor([-(5.0 - 3) / (5 - 1), -(2.0 - 4) / (4 - 1)])
    torch.testing.assert_close(OBJECTIVES["dlr"](g, y, None), expected)
    two = torch.tensor([[2.0, 1.0]])
    torch.testing.assert_close(OBJECTIVES["dlr"](two, torch.tensor([0]), None), torch.tensor([-1.0]))
