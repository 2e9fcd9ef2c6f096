"""rho-importance against closed forms and quadrature; alignment."""

import numpy as np
import pytest
import torch
from torch import nn

from atoll.errors import InputError
from atoll.explain.importance import alignment, cosine, rho_importance
from explain_cases import linear, net


def scaled(result, truth):
    return (result.value - truth) / result.standard_error


def test_linear_logits_have_closed_forms():
    model, x = linear(), net(4)[1]
    w, f = model[1].weight.detach()[1].view(1, 1, 8, 8), model(x)[:, 1].detach().view(-1, 1, 1, 1)
    exact = rho_importance(model, x, 1, neighborhood="pointwise", output="logit")
    torch.testing.assert_close(exact.value, x * f)
    assert not exact.standard_error.any()
    truths = {"local": x * f + 0.2**2 * w, "global": f / 2 + w * (1 / 3 - x / 2)}
    for neighborhood, truth in truths.items():
        result = rho_importance(
            model, x, 1, neighborhood=neighborhood, sigma=0.2, output="logit", samples=200
        )  # fmt: skip
        z = scaled(result, truth)
        # The errors are what they say: 256 features, each with noise of its own.
        assert z.abs().max() < 5
        assert 0.8 < float(z.std()) < 1.25
        assert (result.uncertain(0.1) == ((result.value - 0.1).abs() < 2 * result.standard_error)).all()


def test_probabilities_by_quadrature():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.tensor([[0.2, 0.7, 0.4]], dtype=torch.float64)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    truth = torch.zeros_like(x)
    for j in range(3):
        for node, weight in zip(nodes, weights / weights.sum(), strict=True):
            moved = x.clone()
            moved[0, j] += 0.3 * node
            truth[0, j] += weight * moved[0, j] * model(moved).softmax(1)[0, 2].detach()
    result = rho_importance(model, x, 2, sigma=0.3, samples=4000)
    assert scaled(result, truth).abs().max() < 4
    assert (result.standard_error < 0.01).all()


def test_noise_is_the_points_own():
    model, x = net(3)
    state = torch.get_rng_state()
    whole = rho_importance(model, x, samples=5)
    parts = [rho_importance(model, x[i : i + 1], samples=5, batch_size=7).value for i in range(3)]
    torch.testing.assert_close(torch.cat(parts), whole.value)
    assert not torch.equal(rho_importance(model, x, samples=5, seed=1).value, whole.value)
    assert torch.equal(state, torch.get_rng_state())


def test_alignment_is_one_with_itself_and_falls_with_what_is_missed():
    model, x = net(5)
    result = rho_importance(model, x, samples=10)
    rho = float(result.value.median())
    mine = result.important(rho)
    assert alignment(x, mine, mine).mean.value == pytest.approx(1)
    assert alignment(x, mine, mine).aligned(0.999)
    none = alignment(x, mine, ~mine)
    assert none.mean.value == 0
    assert not none.aligned(0.1)
    half = mine & (torch.arange(8) % 2 == 0)
    assert 0 < alignment(x, half, mine).mean.value < 1
    zero = torch.zeros(1, 4)
    assert cosine(zero, zero).tolist() == [1.0]
    assert cosine(zero, zero + 1).tolist() == [0.0]
    other = alignment(x, half, mine, similarity=lambda a, b: (a == b).flatten(1).double().mean(1))
    assert 0 < other.mean.value < 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"neighborhood": "far"}, "neighborhood: expected pointwise, local or global, got 'far'"),
        ({"output": "loss"}, "output: expected probability or logit, got 'loss'"),
        ({"samples": 1}, "samples, batch_size: expected at least 2 and 1, got 1, 1024"),
        ({"sigma": 0.0}, "sigma: expected a number > 0, got 0.0"),
        ({"target": 7}, r"labels: expected classes in \[0, 3\], got \[7, 7\]"),
    ],
)
def test_nonsense_is_one_sentence(options, sentence):
    with pytest.raises(InputError, match=sentence):
        rho_importance(linear(), net(2)[1], **options)


def test_masks_have_the_inputs_shape():
    x = torch.rand(2, 3)
    with pytest.raises(InputError, match=r"important: expected a mask of shape \(2, 3\), got torch.float32 \(2, 3\)"):
        alignment(x, x, x > 0)
