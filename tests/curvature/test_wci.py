"""The Weight-Curvature Index: definition, invariance, error, bound."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from atoll.curvature import EmpiricalRisk, Traces, wci
from atoll.curvature.wci import layerwise_bound, wci_from
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


def test_linearization_bias_and_clipping():
    """Two groups of three vectors for two clear traces and one that is within its error of zero."""
    means = torch.tensor([[1.0, 4.0, -0.2], [3.0, 5.0, 0.1]], dtype=torch.float64)
    spread = torch.tensor([[0.1, 0.2, 0.9], [-0.3, 0.1, 0.3]], dtype=torch.float64)
    samples = torch.stack([means - spread, means, means + spread], 1)
    result = wci_from({"a": 2.0, "b": 1.0, "c": 3.0}, Traces(("a", "b", "c"), samples, "hutchinson"))
    # The variance of a group's mean over three vectors that differ by d is d^2 / 3.
    errors = (spread.square().sum(0) / 3).sqrt().tolist()
    assert [layer.trace.standard_error for layer in result.layers] == pytest.approx(errors)
    roots = [math.sqrt(4) + errors[0] ** 2 / (8 * 8), math.sqrt(9) + errors[1] ** 2 / (8 * 27)]
    assert result.index.value == pytest.approx(2 * roots[0] + roots[1])
    assert (result.negative, result.unresolved) == (1, ("c",))
    along = spread @ torch.tensor([2 / (2 * 2), 1 / (2 * 3), 0.0], dtype=torch.float64)
    linear = math.sqrt(float(along.square().sum()) / 3)
    assert result.index.standard_error == pytest.approx(linear + 3 * math.sqrt(2 * errors[2]) / 2)
    first, second = (along.square() / 3).tolist()
    assert result.index.freedom == pytest.approx((first + second) ** 2 / (first**2 / 2 + second**2 / 2))
    flat = wci_from({"a": 2.0}, Traces(("a",), torch.zeros(1, 1, 1), "exact", exact=True))
    assert (flat.index.value, flat.index.standard_error, flat.layers[0].share) == (0, 0, 0)
    assert flat.unresolved == ()


@pytest.mark.parametrize(("errors", "unresolved"), [(2.9, ("a",)), (3.1, ())])
def test_a_trace_is_resolved_beyond_three_standard_errors(errors, unresolved):
    spread = math.sqrt(3)  # three vectors that differ by this number have a mean with a standard error of 1
    samples = torch.tensor([[[errors - spread], [errors], [errors + spread]]], dtype=torch.float64)
    result = wci_from({"a": 2.0}, Traces(("a",), samples, "hutchinson"))
    assert result.layers[0].trace.standard_error == pytest.approx(1)
    assert result.unresolved == unresolved


def test_a_net_without_matrices_has_no_index():
    net = nn.BatchNorm1d(2).eval()
    with pytest.raises(InputError, match="weight matrix"):
        wci(EmpiricalRisk(net, Standard(), torch.rand(4, 2), torch.arange(4) % 2))


@pytest.mark.parametrize("seed", range(20))
def test_the_layerwise_variances_minimize_the_bound(seed):
    """Theorem 2.5, against a general minimizer over variances and temperature."""
    generator = np.random.default_rng(seed)
    size = int(generator.integers(1, 6))
    norms, values = generator.uniform(0.1, 5, size), generator.uniform(0.01, 50, size)
    samples = torch.tensor(values)[None, None]
    index = wci_from(
        {str(k): float(norm) for k, norm in enumerate(norms)},
        Traces(tuple(map(str, range(size))), samples, "exact", exact=True),
    )
    n, clip = int(generator.integers(50, 5000)), 2.0
    bound = layerwise_bound(index, n=n, clip=clip)
    assert bound.divergence + bound.variability == pytest.approx(index.index.value / math.sqrt(bound.lambda_))

    def objective(logs):
        variances, lambda_ = np.exp(logs[:-1]), np.exp(logs[-1])
        terms = norms**2 / (2 * lambda_ * variances) + values * variances / 2
        return terms.sum() + lambda_ * clip**2 / (8 * n) + math.log(20) / lambda_

    total = bound.divergence + bound.variability + bound.constant
    best = minimize(objective, np.append(np.zeros(size), math.log(n)), method="Nelder-Mead",
                    options={"maxiter": 20000, "maxfev": 20000, "xatol": 1e-8, "fatol": 1e-10}).fun  # fmt: skip
    assert best * (1 - 1e-6) <= total <= best * 1.01  # lambda is from a grid
