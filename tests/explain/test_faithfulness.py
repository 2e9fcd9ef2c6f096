"""Faithfulness against closed forms and Captum; bounds of Lipschitz constants against dense singular values."""

import captum.metrics
import pytest
import torch
from torch import nn

from atoll.errors import InputError
from atoll.explain import BoundaryIntegratedGradients, IntegratedGradients, Saliency, attribution, boundary_search
from atoll.explain.faithfulness import (
    attribution_lipschitz,
    completeness_gap,
    distance,
    explain_where_possible,
    infidelities,
    infidelity,
)
from atoll.modules import PassCounts, count_passes
from atoll.rng import PointRNG, content_hash
from explain_cases import linear, net


def test_infidelity_of_a_linear_model_is_known():
    model, x = linear(), net(8)[1]
    w = model[1].weight.detach()[2].view(1, 1, 8, 8).expand_as(x)
    a = w + 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = infidelity(model, x, a, 2, sigma=0.3, samples=2000)
    size, along = a.flatten(1).norm(dim=1), (a * w).flatten(1).sum(1)
    truth = 0.09 * (a - w).flatten(1).square().sum(1)
    least = 0.09 * (w.flatten(1).square().sum(1) - along**2 / size**2)
    assert ((result.value - truth) / result.standard_error).abs().max() < 4
    assert ((result.scaled - least) / result.scaled_standard_error).abs().max() < 4
    torch.testing.assert_close(result.scale, along / size**2, rtol=0.1, atol=0)
    assert (result.scaled <= result.value * 1.001).all()
    exact = infidelity(model, x, w, 2)
    assert exact.value.max() < 1e-20


def test_infidelity_is_captums_for_the_same_noise():
    model, x = net(3)
    a = Saliency(model).attribute(x, 1)
    samples, seen = 6, {}

    def perturb(inputs):
        noise = []
        for point in inputs:
            name = content_hash(point)
            index = torch.tensor([name]) + seen.setdefault(name, 0)
            seen[name] += 1
            noise.append(0.2 * PointRNG(0, "infidelity", index=index).normal(1, 8, 8, dtype=x.dtype)[0])
        noise = torch.stack(noise)
        return -noise, inputs + noise  # theirs is subtracted

    theirs = captum.metrics.infidelity(model, perturb, x, a, target=1, n_perturb_samples=samples)
    ours = infidelity(model, x, a, 1, sigma=0.2, samples=samples, batch_size=4)
    torch.testing.assert_close(ours.value, theirs.double(), rtol=1e-6, atol=1e-12)


def test_several_attributions_share_the_passes_of_one():
    model, x = net(3)
    maps = [x, 2 * x, Saliency(model).attribute(x, 1)]
    alone, counts, one_count = (
        [infidelity(model, x, values, 1, samples=7) for values in maps],
        PassCounts(),
        PassCounts(),
    )
    with count_passes(model, one_count):
        infidelity(model, x, maps[0], 1, samples=7)
    with count_passes(model, counts):
        together = infidelities(model, x, maps, 1, samples=7)
    for one, same in zip(alone, together, strict=True):
        assert all(torch.equal(values, vars(same)[name]) for name, values in vars(one).items())
    assert counts == one_count


def test_noise_is_the_points_own():
    model, x = net(4)
    a = Saliency(model).attribute(x)
    state = torch.get_rng_state()
    whole = infidelity(model, x, a, samples=7)
    parts = [infidelity(model, x[i : i + 1], a[i : i + 1], samples=7, batch_size=3).value for i in range(4)]
    torch.testing.assert_close(torch.cat(parts), whole.value)
    assert torch.equal(state, torch.get_rng_state())


def test_the_gap_of_complete_attributions_is_their_convergence_delta():
    model, x = net(4)
    maps, delta = IntegratedGradients(model).attribute(x, return_convergence_delta=True)
    torch.testing.assert_close(completeness_gap(model, x, maps, torch.zeros_like(x)), delta)
    boundary = boundary_search(model, x, budget=60)
    maps, delta = BoundaryIntegratedGradients(model).attribute(x, return_convergence_delta=True, boundary=boundary)
    torch.testing.assert_close(completeness_gap(model, x, maps, boundary.x_outside), delta)


def test_distances_and_attributions_without_a_boundary():
    a, b = torch.rand(3, 1, 4, 4), torch.rand(3, 1, 4, 4)
    torch.testing.assert_close(distance(a, b), (a - b).flatten(1).norm(dim=1))
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    model[1].weight.data.zero_()
    target = torch.zeros(3, dtype=torch.int64)
    assert explain_where_possible(attribution("BIG", model), a, target).isnan().all()
    assert not explain_where_possible(attribution("SM", model), a, target).any()


def test_nonsense_is_one_sentence():
    model, x = net(2)
    a = torch.zeros_like(x)
    for call, sentence in (
        (lambda: infidelity(model, x, a[:1]), r"attributions: expected the shape \(2, 1, 8, 8\), got \(1, 1, 8, 8\)"),
        (lambda: infidelity(model, x, a, sigma=0), "sigma, samples, batch_size: expected a number > 0"),
        (lambda: distance(a, a[:1]), "attributions: expected the shape"),
    ):
        with pytest.raises(InputError, match=sentence):
            call()


class Quadratic(nn.Module):
    """f_0 = x' H x / 2 and f_1 = 0: the saliency map is H x, and its Lipschitz constant the norm of H."""

    def __init__(self, size=5):
        super().__init__()
        h = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.h = nn.Parameter(h + h.T)

    def forward(self, x):
        return torch.stack([(x @ self.h * x).sum(1) / 2, 0 * x.sum(1)], 1)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_lipschitz_estimates_are_below_the_truth_and_close(norm):
    model = Quadratic()
    x = torch.rand(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    h = model.h.detach()
    truth = float(torch.linalg.matrix_norm(h, 2) if norm == "l2" else h.abs().sum(1).max())
    result = attribution_lipschitz(Saliency(model), x, 0, eps=0.2, norm=norm, bounds=None, starts=3, steps=60)
    assert result.value.max() <= truth * (1 + 1e-9)
    assert result.value.min() >= 0.8 * truth
    change = (result.at - x) @ h
    p = 2 if norm == "l2" else torch.inf
    torch.testing.assert_close(result.value, change.norm(p, dim=1) / (result.at - x).norm(p, dim=1))
    assert (result.at - x).norm(p, dim=1).max() <= 0.2 * (1 + 1e-9)


def test_lipschitz_estimates_of_linear_models_are_zero_and_points_do_not_notice_each_other():
    model, x = linear(), net(3)[1]
    assert attribution_lipschitz(Saliency(model), x, eps=0.1, starts=1, steps=2).value.max() < 1e-9
    model, x = net(3)
    whole = attribution_lipschitz(Saliency(model), x, eps=0.1, starts=2, steps=3)
    alone = attribution_lipschitz(Saliency(model), x[1:2], eps=0.1, starts=2, steps=3)
    torch.testing.assert_close(alone.value, whole.value[1:2])
    assert whole.value.max() > 0
    assert whole.at.min() >= 0


def test_nonsense_for_lipschitz_estimates_is_one_sentence():
    model, x = net(2)
    with pytest.raises(InputError, match="eps, starts, steps: expected eps > 0"):
        attribution_lipschitz(Saliency(model), x, eps=0)
