"""The loss as a function of the weights: value, gradient, products; what is refused; one process or two."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from atoll.attacks import PGD
from atoll.curvature import (
    EmpiricalRisk,
    HessianProducts,
    density,
    hessian,
    input_landscape,
    pac_bayes,
    robust_gap,
    top_eigenvalues,
    traces,
    weight_landscape,
)
from atoll.curvature.ggn import diagonal
from atoll.curvature.risk import flatten
from atoll.errors import InputError
from atoll.losses import AT, Standard
from atoll.models import ViT
from atoll.threat import ThreatModel
from curvature import two_processes
from curvature.cases import CASES, Fused, make_risk, mean_loss, truth, weights
from support import script_environment


@pytest.mark.parametrize(("model", "loss"), CASES)
def test_value_gradient_product_and_hessian_are_those_of_autograd(model, loss):
    p = make_risk(model, loss, micro_batch=3)
    function, at = mean_loss(p), weights(p).requires_grad_()
    v = torch.randn(p.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    value = function(at)
    (gradient,) = torch.autograd.grad(value, at)
    matrix = truth(model, loss)
    assert p.value() == pytest.approx(value.item(), rel=1e-10)
    torch.testing.assert_close(flatten(p.gradient()), gradient, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(flatten(HessianProducts(p)(p.split(v))), matrix @ v, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(hessian(p), matrix, rtol=1e-8, atol=1e-9)


def test_nothing_is_left_changed_and_no_gradient_mode_is_no_obstacle():
    p = make_risk("conv-bn")
    before = {name: value.clone() for name, value in p.model.state_dict().items()}
    with torch.no_grad():
        inside = flatten(HessianProducts(p)(p.parameters))
    torch.testing.assert_close(inside, flatten(HessianProducts(p)(p.parameters)))
    assert inside.abs().max() > 0
    assert all(w.grad is None for w in p.parameters)
    assert all(torch.equal(value, before[name]) for name, value in p.model.state_dict().items())


class Counting(nn.Module):
    """Changes all kinds of buffers in every pass, in place and not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.replaced = self.replaced + 1
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0).to(self.mean))
        return self.head(self.layer(x).tanh())


MEASUREMENTS = {
    "value and gradient": lambda risk: (risk.value(), risk.gradient()),
    "Gauss-Newton": lambda risk: (traces(risk, "gauss_newton", max_probes=2), diagonal(risk)),
    "Hutchinson": lambda risk: traces(risk, "hutchinson", max_probes=2),
    "exact": lambda risk: (traces(risk, "exact"), hessian(risk, [0, 3])),
    "eigenvalues": lambda risk: (top_eigenvalues(risk, 1), density(risk, vectors=1, steps=2)),
    "bounds": lambda risk: pac_bayes(risk, 1.0, pairs=2),
    "landscapes": lambda risk: (
        weight_landscape(risk, steps=3),
        input_landscape(risk.model, risk.x, risk.y, radius=0.1, steps=3),
    ),
    "gap": lambda risk: robust_gap(risk.model, (risk.x, risk.y), (risk.x, risk.y), PGD(ThreatModel("linf", 0.1))),
}


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_buffers_that_passes_change_are_restored(name):
    model, x, y = Counting().eval(), torch.rand(6, 3), torch.arange(6) % 3
    before, places = {n: t.clone() for n, t in model.state_dict().items()}, dict(model.named_buffers())
    risk = EmpiricalRisk.attacked(model, AT(), x, y, PGD(ThreatModel("linf", 0.1), steps=2))
    MEASUREMENTS[name](risk)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(buffer is places[n] for n, buffer in model.named_buffers())


def test_attacked_holds_the_inputs_of_the_attack():
    given = make_risk("conv-bn", points=7)
    attack = PGD(ThreatModel("linf", 0.1), steps=2)
    direct = attack(given.model, given.x, given.y, seed=5)
    for micro_batch in (2, 7):
        made = EmpiricalRisk.attacked(given.model, AT(), given.x, given.y, attack, seed=5, micro_batch=micro_batch)
        torch.testing.assert_close(made.x_adv, direct, rtol=1e-12, atol=1e-12)


def test_a_pass_has_at_most_32_points():
    p, rows = make_risk("mlp", points=40), []
    p.model.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    p.value()
    assert rows == [32, 8]
    attack = PGD(ThreatModel("linf", 0.1), steps=1)
    assert EmpiricalRisk.attacked(p.model, p.loss, p.x, p.y, attack).micro_batch == 32
    assert max(rows) == 32


def test_a_move_without_a_part_for_every_parameter_is_an_error():
    p = make_risk("mlp")
    before = weights(p).clone()
    with pytest.raises(ValueError, match="shorter"):
        p.values_at((1.0, p.split(torch.ones_like(before))[:-1]))
    assert torch.equal(weights(p), before)


def test_fused_attention_is_differentiated_twice():
    x = torch.rand(4, 2)
    p = EmpiricalRisk(Fused().eval(), Standard(), x, torch.arange(4) % 3)
    assert flatten(HessianProducts(p)(p.parameters)).isfinite().all()


def test_frozen_parameters_do_not_count():
    p = make_risk("mlp")
    p.model.head.requires_grad_(False)
    assert [n for n in EmpiricalRisk(p.model, p.loss, p.x, p.y, p.x_adv).names if n.startswith("head")] == []
    p.model.requires_grad_(False)
    with pytest.raises(InputError, match="at least one parameter"):
        EmpiricalRisk(p.model, p.loss, p.x, p.y, p.x_adv)


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


def test_training_mode_is_refused_by_name():
    net = ViT((1, 4, 4), 3, patch_size=2, width=4, depth=1, heads=2, mlp_ratio=1, dropout=0.1).eval()
    x, y = torch.rand(4, 1, 4, 4), torch.arange(4) % 3
    EmpiricalRisk(net, Standard(), x, y)  # dropout that is switched off is none
    net.body.dropout.train()
    with pytest.raises(InputError, match=r"body\.dropout \(Dropout\) is in training mode"):
        EmpiricalRisk(net, Standard(), x, y)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Noisy(), r"the output of 1 \(Noisy\) for a point is random"),
        (nn.BatchNorm1d(4, track_running_stats=False), r"1 \(BatchNorm1d\) for a point depends on the rest"),
    ],
)
def test_a_net_that_is_no_function_of_the_point_is_refused_by_name(layer, message):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 4), layer, nn.ReLU(), nn.Linear(4, 3)).eval()
    with pytest.raises(InputError, match=message):
        EmpiricalRisk(net, Standard(), torch.rand(20, 2), torch.arange(20) % 3)


def test_bad_points_are_refused():
    p = make_risk("mlp")
    for arguments, message in (
        ((p.x[:0], p.y[:0], p.x_adv), "labels: expected one per point"),
        ((p.x, p.y[:3], p.x_adv), "labels: expected one per point"),
        ((p.x, p.y, None), "AT requires adversarial inputs"),
        ((p.x, p.y, p.x_adv[:2]), "expected the shape of x"),
        ((p.x, p.y + 3, p.x_adv), "expected classes in"),
    ):
        with pytest.raises(InputError, match=message):
            EmpiricalRisk(p.model, AT(), *arguments)
    with pytest.raises(InputError, match="Standard does not use adversarial"):
        EmpiricalRisk(p.model, Standard(), p.x, p.y, p.x_adv)
    p.model.head.bias.data[0] = torch.nan
    with pytest.raises(InputError, match="finite logits"):
        EmpiricalRisk(p.model, AT(), p.x, p.y, p.x_adv)
    p.model.head.bias.data[0] = 0
    with pytest.raises(InputError, match="micro_batch"):
        EmpiricalRisk(p.model, AT(), p.x, p.y, p.x_adv, micro_batch=0)


def test_a_parameter_without_influence_has_zeros_in_the_dense_hessian():
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double().eval()
    used = EmpiricalRisk(net, Standard(), torch.rand(4, 2).double(), torch.arange(4) % 2, nonlinear={})
    matrix = hessian(used)
    net.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    risk = EmpiricalRisk(net, Standard(), used.x, used.y, nonlinear={})
    start = 2 * (risk.names[0] == "unused")  # parameters of the module itself come first
    padded = nn.functional.pad(matrix, (start, 2 - start, start, 2 - start))
    torch.testing.assert_close(hessian(risk), padded)


def test_a_large_net_has_no_dense_hessian():
    net = nn.Linear(200, 101).eval()
    with pytest.raises(InputError, match=r"at most 20,000 parameters for a dense Hessian, got 20,301"):
        hessian(EmpiricalRisk(net, Standard(), torch.rand(2, 200), torch.tensor([0, 1])))


@pytest.mark.slow  # tests/training/test_distributed.py sums gradients over two processes
def test_two_processes_give_what_one_gives(tmp_path):
    one, path = two_processes.measure(), tmp_path / "two.safetensors"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, two_processes.__file__, str(path)]
    done = subprocess.run(command, env=script_environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    two = load_file(path)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
