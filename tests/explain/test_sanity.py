"""The sanity check: faithful attributions notice random layers, others do not; rank correlations against scipy."""

import pytest
import scipy.stats
import torch
from torch import nn

from atoll.errors import InputError
from atoll.explain.attributions import PointAttribution, Saliency, attribution
from atoll.explain.sanity import layers, randomize, rank_correlation, sanity_check
from explain_cases import net


class Blind(PointAttribution):
    """Shows the input, whatever the model is."""

    def explain(self, x, start, target, batch_size):
        return x


# Attributions that must notice what happens to the model.
@pytest.mark.parametrize("name", ["SM", "IG", "BIG"])
def test_faithful_attributions_pass_the_sanity_check(name):
    model, x = net(16)
    options = {"budget": 60} if name == "BIG" else {}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    progress = []
    result = sanity_check(
        lambda damaged: attribution(name, damaged, **options),
        model,
        x,
        on_progress=lambda *counts: progress.append(counts),
    )
    assert result.layers[0] == "head"
    assert progress[-1] == (len(result.layers), len(result.layers))
    assert result.passed
    assert result.means[-1].value < result.means[0].value < 1
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert len(result.means) == len(result.layers)


def test_an_attribution_that_does_not_look_at_the_model_fails_it():
    model, x = net(4)
    result = sanity_check(Blind, model, x)
    assert not result.passed
    torch.testing.assert_close(result.correlation, torch.ones_like(result.correlation))


def test_layers_come_in_the_order_they_run_and_keep_their_norm():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.unused, self.first = nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 3)

        def forward(self, x):
            return self.last(self.first(x).relu())

    model = Backwards()
    assert layers(model, torch.rand(1, 2)) == ["first", "last"]
    before = {name: value.clone() for name, value in model.first.named_parameters()}
    randomize(model.first, 0, "first")
    for name, value in model.first.named_parameters():
        assert not torch.equal(value, before[name])
        torch.testing.assert_close(value.norm(), before[name].norm())
    again = nn.Linear(2, 3)
    again.load_state_dict(before)
    randomize(again, 0, "first")
    assert torch.equal(again.weight, model.first.weight)


def test_rank_correlations_are_scipys_where_something_is_shown():
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randint(0, 5, (6, 30), generator=draw).double() for _ in range(2))
    b = a + b  # with ties
    for row, ours in enumerate(rank_correlation(a, b).tolist()):
        shown = (a[row] != 0) | (b[row] != 0)
        truth = scipy.stats.spearmanr(a[row][shown].numpy(), b[row][shown].numpy()).statistic
        assert ours == pytest.approx(truth)
    undefined = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, torch.nan]])
    assert rank_correlation(undefined, torch.rand(3, 2) * torch.tensor([[0.0], [1.0], [1.0]])).isnan().all()


@pytest.mark.parametrize(("comparisons", "at"), [(1, [7]), (3, [2, 5, 7]), (7, range(1, 8)), (12, range(1, 8))])
def test_comparisons_are_evenly_spread_over_the_layers(comparisons, at):
    model = nn.Sequential(nn.Flatten(), *(layer for _ in range(6) for layer in (nn.Linear(9, 9), nn.Tanh())))
    model.append(nn.Linear(9, 3)).eval()
    x = torch.rand(2, 1, 3, 3)
    every, some = sanity_check(Saliency, model, x), sanity_check(Saliency, model, x, comparisons=comparisons)
    assert some.layers == tuple(every.layers[number - 1] for number in at)
    assert torch.equal(some.correlation, every.correlation[[number - 1 for number in at]])


def test_a_model_without_layers_is_one_sentence():
    with pytest.raises(InputError, match="model: expected layers with parameters, got none"):
        sanity_check(Saliency, nn.Flatten(), net(2)[1])
