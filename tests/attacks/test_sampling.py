"""Estimates from samples: coverage, unbiasedness, size, escalation, kills."""

import random
import re

import pytest
import torch
from torch import nn

from atoll import train
from atoll.attacks.base import Attack
from atoll.attacks.diagnostics import is_randomized
from atoll.attacks.evaluate import ROBUST, evaluate
from atoll.attacks.sampling import SMALLEST, Sampling
from atoll.attacks.suites import sampling_for, suite
from atoll.data import MemorySplit
from atoll.errors import InputError
from atoll.stats import hypergeometric_interval
from atoll.threat import ThreatModel

THREAT = ThreatModel("linf", 0.25)


class Threshold(Attack):
    """Breaks the points whose second feature is below a threshold."""

    def __init__(self, below: float) -> None:
        super().__init__(THREAT)
        self.below = below

    def search(self, model, x, y, streams):
        moved = x.clone()
        moved[:, 0] += torch.where(x[:, 1] < self.below, 0.25, 0.0)
        return moved


def classifier():
    """Class 1 if the first feature is above one half."""
    model = nn.Linear(2, 2, bias=True).double()
    model.weight.data.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    model.bias.data.copy_(torch.tensor([0.5, 0.0]))
    return model.eval()


def points(count=600):
    """A tenth is misclassified; the second feature of the others says which attacks break them."""
    x = torch.stack([torch.full((count,), 0.4), torch.linspace(0, 1, count)], 1).double()
    y = torch.zeros(count, dtype=torch.long)
    y[::10] = 1
    return MemorySplit(x, y)


def estimate(seed=0, weak=0.3, strong=0.4, count=600, **options):
    sampling = Sampling({"strong": Threshold(strong)}, **options)
    result = evaluate(
        classifier(), points(count), {"weak": Threshold(weak)}, cascade=True, sampling=sampling, seed=seed
    )
    return result, evaluate(classifier(), points(count), {"both": Threshold(max(weak, strong))}).robust.value


def test_intervals_cover_the_result_of_the_full_attack():
    """Counts of independent draws: below 177 of 200 has a probability of 1e-4 if the coverage is 95 %."""
    results = [estimate(seed)[0].estimate for seed in range(200)]
    truth = estimate()[1]
    covered = sum(result.interval[0] <= truth <= result.interval[1] for result in results)
    assert covered >= 177
    assert sum(result.value for result in results) / 200 == pytest.approx(truth, abs=0.005)
    assert len({result.value for result in results}) > 5  # the samples differ


class Masked(nn.Module):
    """A classifier whose gradients say little about its decisions."""

    def __init__(self, model, before=None, after=None):
        super().__init__()
        self.model, self.before, self.after = model, before or nn.Identity(), after or nn.Identity()

    def forward(self, x):
        return self.after(self.model(self.before(x)))


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def winners(model):
    """Keep the largest tenth of the activations of each layer (k-winners-take-all)."""

    def keep(x):
        flat = x.flatten(1)
        return torch.where(flat >= flat.quantile(0.9, dim=1, keepdim=True), flat, 0.0).view_as(x)

    for name, module in model.named_modules():
        if isinstance(module, nn.ReLU):
            model.set_submodule(name, Apply(keep))
    return model


MASKS = {
    "none": lambda model: model,
    "quantized": lambda model: Masked(model, Apply(lambda x: (x * 8).round() / 8)),
    "randomized": lambda model: Masked(model, Apply(lambda x: x + 0.1 * torch.randn_like(x))),
    "scaled": lambda model: Masked(model, after=Apply(lambda logits: 1e4 * logits)),
    "ReLU on logits": lambda model: Masked(model, after=nn.ReLU()),
    "shattered": lambda model: Masked(model, Apply(lambda x: x + 0.05 * torch.sin(400 * x))),
    "winners": winners,
}


def verdicts(model, split, threat):
    """For each point: 0 if the quick attacks of ``fast`` break it, 1 if only the full ones do, 2 if none does."""
    randomized = is_randomized(model, split.fetch(torch.arange(32)))
    quick, full = suite("fast", threat), sampling_for("fast", threat, randomized=randomized).verify
    result = evaluate(model, split, quick | full, cascade=True, check=False)
    return torch.where(result.broken_by == ROBUST, 2, (result.broken_by >= len(quick)).long())


def covered(codes, **options):
    """How many of 200 estimates contain the accuracy of points with these verdicts."""
    x = torch.stack([torch.full((len(codes),), 0.4), codes / 2], 1).double()
    split, quick = MemorySplit(x, torch.zeros(len(codes), dtype=torch.long)), {"quick": Threshold(0.25)}
    sampling, truth = Sampling({"full": Threshold(0.75)}, **options), float((codes == 2).double().mean())
    estimates = (
        evaluate(classifier(), split, quick, cascade=True, sampling=sampling, seed=seed, check=False).estimate
        for seed in range(200)
    )
    return sum(e.interval[0] <= truth <= e.interval[1] for e in estimates)


@pytest.fixture(scope="module", params=["fashion-robust", "fashion-standard"])
def run(request, tmp_path_factory):
    return train(request.param, "trainer.epochs=4", out=tmp_path_factory.mktemp("run"))


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_intervals_cover_the_result_of_standard_on_any_model(run, mask):
    """The verdicts are those of real attacks; only the draws repeat."""
    x, y = run.data.tensors("test", 250)
    codes = verdicts(MASKS[mask](run.model("last")).eval(), MemorySplit(x, y), ThreatModel("linf", 0.1))
    assert min(covered(codes, budget=budget) for budget in (0.1, 0.05)) >= 177
    assert covered(codes, width=5.0) >= 177


@pytest.mark.parametrize("strong", [0.0, 0.31, 0.6, 2.0])
def test_the_upper_bound_is_what_was_broken(strong):
    result, truth = estimate(strong=strong)
    sample = result.estimate
    assert result.robust == sample.at_most
    assert sample.interval[0] <= sample.value <= sample.interval[1]
    assert sample.interval[0] <= truth <= result.robust.value
    assert result.attacks[1].attacked == sample.sampled == SMALLEST
    assert result.attacks[0].attacked == 540


@pytest.mark.parametrize(("options", "size"), [({"budget": 1.0}, 367), ({"budget": 0.5}, 178), ({"budget": 0.01}, 10)])
def test_the_budget_decides_the_size(options, size):
    sample = estimate(**options)[0].estimate
    assert sample.remaining == 378
    assert sample.sampled == size


@pytest.mark.parametrize("remaining", [0, 1, 49, 50, 99, 100, 101])
def test_no_more_points_than_remain_and_at_least_a_hundred(remaining):
    assert Sampling({}).size(10_000, remaining) == min(remaining, 100)
    assert Sampling({}, width=0.01).pilot(remaining) == min(remaining, 50)
    assert Sampling({}, width=100.0).size(10_000, remaining, remaining) == 0
    assert Sampling({}).pilot(remaining) == 0


@pytest.mark.parametrize(("strong", "width"), [(0.3, 2.0), (0.3, 8.0), (0.5, 8.0), (2.0, 1.0)])
def test_the_width_decides_the_size(strong, width):
    sample = estimate(strong=strong, width=width)[0].estimate
    low, high = sample.interval
    assert sample.pilot == 50
    assert 100 * (high - low) <= 1.5 * width
    assert sample.sampled + sample.pilot < 378 or width < 2
    expected = (sample.pilot_rejected + 0.5) / 51
    fewest, most = hypergeometric_interval(round(expected * (sample.sampled - 1)), sample.sampled - 1, 328)
    assert sample.sampled == 1 or 100 * (most - fewest) > width * 600  # a smaller sample would have been too wide


def test_points_that_the_sample_breaks_beyond_chance_are_a_warning():
    assert estimate(strong=0.302)[0].warnings == ()
    assert estimate(strong=0.31, count=60, budget=0.05)[0].warnings == ()  # one of few points is no pattern
    (warning,) = estimate(strong=0.6)[0].warnings
    assert warning.kind == "quick attacks miss points"
    assert "use --escalate" in warning.message
    assert re.search(r"broke 4\d of 100 sampled points .* \(p < 1e-16 if", warning.message)


def test_escalation_checks_all_points():
    result, truth = estimate(strong=0.6, escalate=True)
    assert result.robust.value == result.estimate.value == truth
    assert result.estimate.interval == (truth, truth)
    assert result.attacks[1].attacked == 378
    assert "all points were checked" in result.warnings[0].message
    calm, _ = estimate(strong=0.302, escalate=True)
    assert calm.attacks[1].attacked == SMALLEST


@pytest.mark.parametrize("count", [20, 1])
def test_few_points_are_all_checked(count):
    result, truth = estimate(count=count)
    assert result.estimate.value == truth
    assert result.estimate.interval == (truth, truth)


class Killed(Exception):
    pass


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupted_estimate_resumes(tmp_path, seed):
    model, split, draw = classifier(), points(), random.Random(seed)
    attacks = {"weak": Threshold(0.3)}
    sampling = Sampling({"strong": Threshold(0.45), "stronger": Threshold(0.6)}, width=4.0, escalate=True)
    whole = evaluate(model, split, attacks, cascade=True, sampling=sampling, batch_size=16, seed=seed)
    left = [0]

    def fuse(module, inputs, output):
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    handle = model.register_forward_hook(fuse)
    kills = 0
    while True:
        left[0] = draw.randrange(60, 100)
        try:
            result = evaluate(
                model, split, attacks, cascade=True, sampling=sampling, batch_size=16, seed=seed, folder=tmp_path,
                save_every=0.0,
            )  # fmt: skip
            break
        except Killed:
            kills += 1
            assert kills < 100
    handle.remove()
    assert kills
    assert result.estimate == whole.estimate
    assert torch.equal(result.broken_by, whole.broken_by)
    assert [a.attacked for a in result.attacks] == [a.attacked for a in whole.attacks]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Sampling({}, budget=0), "budget: expected a number in"),
        (lambda: Sampling({}, width=float("nan")), "width: expected a finite number"),
        (lambda: estimate(width=-1.0), "width: expected a number in"),
        (
            lambda: evaluate(classifier(), points(), {"a": Threshold(0.1)}, sampling=Sampling({})),
            "expected a cascade",
        ),
        (
            lambda: evaluate(
                classifier(), points(), {"a": Threshold(0.1)}, cascade=True, sampling=Sampling({"a": Threshold(0.2)})
            ),
            "expected other names",
        ),
    ],
)
def test_nonsense_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()
