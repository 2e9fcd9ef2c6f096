"""The Weight-Curvature Index: definition, invariance, error, bound."""

import math

import pytest
import torch
from torch import nn

from atoll.curvature import EmpiricalRisk, Estimate, Traces, wci
from atoll.curvature.wci import wci_from
from atoll.errors import InputError
from atoll.losses import Standard
from curvature.cases import CASES, block_traces, make_risk, truth


@pytest.mark.parametrize(("model", "loss"), CASES)
def test_it_is_the_sum_over_weight_matrices(model, loss):
    p = make_risk(model, loss)
    traces = dict(zip(p.names, block_traces(p, truth(model, loss)).tolist(), strict=True))
    matrices = {name: w for name, w in p.model.named_parameters() if w.dim() > 1}
    terms = {name: float(w.detach().norm()) * math.sqrt(max(traces[name], 0)) for name, w in matrices.items()}
    result = wci(p, "exact")
    assert result.index.value == pytest.approx(sum(terms.values()), rel=1e-8)
    assert result.index.standard_error == 0
    assert {layer.name: layer.term for layer in result.layers} == pytest.approx(terms, rel=1e-8)
    assert sum(layer.share for layer in result.layers) == pytest.approx(1)
    assert result.negative == sum(traces[name] < 0 for name in matrices)
    assert result.bound >= result.index.value
    squares = sum(float(w.detach().square().sum()) for w in matrices.values())
    assert result.bound == pytest.approx(math.sqrt(squares * sum(max(traces[name], 0) for name in matrices)))


@pytest.mark.parametrize("c", [0.01, 7.0])
def test_rescaling_layers_of_a_relu_net_changes_nothing(c):
    p = make_risk("mlp")
    before = wci(p, "exact")
    with torch.no_grad():
        p.model.body[1].weight *= c
        p.model.body[1].bias *= c
        p.model.body[3].weight /= c
    after = wci(p, "exact")
    assert [x.term for x in after.layers] == pytest.approx([x.term for x in before.layers], rel=1e-9)
    assert after.layers[0].norm == pytest.approx(c * before.layers[0].norm)


def test_its_error_is_the_one_it_states():
    p = make_risk("mlp")
    exact = wci(p, "exact").index.value
    runs = [wci(p, group=4, relative_error=0.1, seed=seed).index for seed in range(60)]
    values = torch.tensor([run.value for run in runs])
    stated = torch.tensor([run.standard_error for run in runs]).square().mean().sqrt()
    assert 0.75 < float(stated / values.std()) < 1.33
    assert abs(float(values.mean()) - exact) < 4 * float(values.std()) / math.sqrt(60) + 0.01 * exact  # concavity
    assert sum(low <= exact <= high for low, high in (run.interval for run in runs)) >= 52
    assert max(run.relative_error for run in runs) <= 0.1


def test_linearization_and_clipping():
    covariance = torch.tensor([[0.04, 0.01, 0.0], [0.01, 0.09, 0.0], [0.0, 0.0, 0.25]])
    result = wci_from(
        {"a": 2.0, "b": 1.0, "c": 3.0},
        Traces(("a", "b", "c"), torch.tensor([4.0, 9.0, -0.1]), covariance, "hutchinson"),
    )
    assert result.index.value == pytest.approx(2 * 2 + 1 * 3)
    assert result.negative == 1
    slopes = (2 / (2 * 2), 1 / (2 * 3), 3 / (2 * math.sqrt(0.5)))  # the last trace is within its error of zero
    variance = 0.04 * slopes[0] ** 2 + 0.09 * slopes[1] ** 2 + 2 * 0.01 * slopes[0] * slopes[1] + 0.25 * slopes[2] ** 2
    assert result.index.standard_error == pytest.approx(math.sqrt(variance), rel=1e-6)
    assert result.layers[2].trace == Estimate(float(torch.tensor(-0.1)), 0.5, skewed=True)
    flat = wci_from({"a": 2.0}, Traces(("a",), torch.zeros(1), torch.zeros(1, 1), "exact"))
    assert (flat.index.value, flat.index.standard_error, flat.layers[0].share) == (0, 0, 0)


def test_a_net_without_matrices_has_no_index():
    net = nn.BatchNorm1d(2).eval()
    with pytest.raises(InputError, match="weight matrix"):
        wci(EmpiricalRisk(net, Standard(), torch.rand(4, 2), torch.arange(4) % 2))
