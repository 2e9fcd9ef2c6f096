"""Randomized smoothing against a linear model, whose radii are known, and against other ways to count."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, norm
from torch import nn

from atoll.certify.certificate import Certificate
from atoll.certify.smoothing import ResumableCertifier, Smoothed, clopper_pearson
from atoll.errors import InputError
from atoll.models import MLP

SIGMA = 0.5


def plane(dimensions=3):
    """A linear model of two classes, and the distance of points to the plane between them."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Linear(dimensions, 2).double()
    model.weight.data = torch.randn(2, dimensions, generator=draw, dtype=torch.float64)
    model.bias.data = torch.tensor([0.1, -0.2], dtype=torch.float64)
    x = torch.rand(300, dimensions, generator=draw, dtype=torch.float64) * 2 - 1
    f, w = model(x).detach(), model.weight.detach()
    return model, x, (f[:, 0] - f[:, 1]).abs() / (w[0] - w[1]).norm(), f.argmax(1)


@given(total=st.integers(1, 5000), share=st.floats(0, 1), alpha=st.floats(1e-6, 0.5))
def test_clopper_pearson_is_the_exact_interval(total, share, alpha):
    count = round(share * total)
    truth = binomtest(count, total, alternative="greater").proportion_ci(1 - alpha, method="exact").low
    assert clopper_pearson(count, total, alpha) == pytest.approx(truth, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("p", [0.5, 0.7, 0.99])
@pytest.mark.parametrize("alpha", [0.3, 0.01])
def test_clopper_pearson_is_too_high_in_a_share_alpha_of_cases_at_most(p, alpha):
    """Over all outcomes, each with its probability, rather than over a sample of them."""
    total = 1000
    missed = sum(binom.pmf(count, total, p) for count in range(total + 1) if clopper_pearson(count, total, alpha) > p)
    assert 0 < missed <= alpha


def test_radii_of_a_linear_model_are_too_large_as_seldom_as_promised():
    model, x, distance, top = plane()
    alpha = 0.1
    certificate = Smoothed(model, SIGMA, n0=20, n=300, alpha=alpha)(x)
    certified = certificate.prediction >= 0
    assert (certificate.radius[~certified] == 0).all()
    # Certified for the wrong side of the plane counts as false whatever the radius.
    false = certified & ((certificate.radius > distance) | (certificate.prediction != top))
    assert 0 < int(false.sum()) <= binom.ppf(0.999, len(x), alpha)  # it is a probable bound, and a tight one


def test_many_draws_come_close_to_the_truth():
    model, x, distance, top = plane()
    rows = (distance > 0.1).nonzero().squeeze(1)[:12]
    certificate = Smoothed(model, SIGMA, n=100_000, batch_size=20_000)(x[rows])
    assert torch.equal(certificate.prediction, top[rows])
    assert (certificate.radius <= distance[rows]).all()
    assert (certificate.radius > distance[rows] - 0.02).all()


def test_the_probabilities_are_those_of_gaussian_noise():
    model, x, distance, top = plane()
    n = 40_000
    for row in range(5):
        count = int(Smoothed(model, SIGMA).counts(x[row], n, "test")[top[row]])
        p = norm.cdf(float(distance[row]) / SIGMA)
        assert abs(count / n - p) < 4.5 * math.sqrt(p * (1 - p) / n)


def test_predict_abstains_exactly_where_it_cannot_tell():
    model, x, distance, top = plane()
    smoothed = Smoothed(model, SIGMA, n=200, alpha=0.01)
    prediction = smoothed.predict(x)
    assert (prediction == -1).any()
    assert (prediction[distance > 0.5] == top[distance > 0.5]).all()
    answered = prediction >= 0
    assert int((prediction != top)[answered].sum()) <= binom.ppf(0.999, len(x), 0.01)
    for row in range(20):
        counts = smoothed.counts(x[row], 200, "predict")
        sure = binomtest(int(counts.max()), 200).pvalue <= 0.01  # two classes: the two most frequent are all
        assert (int(prediction[row]) >= 0) == sure


@pytest.mark.parametrize("batch_size", [1, 7, 500])
def test_batches_do_not_matter(batch_size):
    """Neither those of the draws, nor those of the points, nor their order."""
    model, x, *_ = plane()
    x = x[:5]
    whole = Smoothed(model, SIGMA, n0=30, n=150)(x)
    other = Smoothed(model, SIGMA, n0=30, n=150, batch_size=batch_size)
    assert torch.equal(other(x).radius, whole.radius)
    for row in (3, 0):
        alone = other(x[row : row + 1])
        assert torch.equal(alone.radius, whole.radius[row : row + 1])
        assert torch.equal(alone.prediction, whole.prediction[row : row + 1])
    assert not torch.equal(Smoothed(model, SIGMA, n0=30, n=150, seed=1)(x).radius, whole.radius)


def test_logits_with_nan_are_no_votes():
    model, x = nn.Linear(4, 3), torch.rand(2, 4)
    model.weight.data.fill_(math.nan)
    smoothed = Smoothed(model, 1.0, n0=5, n=20)
    assert smoothed.counts(x[0], 20, "predict").tolist() == [0, 0, 0]
    assert smoothed.predict(x).tolist() == [-1, -1]
    assert smoothed(x).radius.tolist() == [0, 0]


def test_the_two_stages_draw_different_noise():
    model, x, *_ = plane()
    smoothed = Smoothed(model, 5.0)
    counts = {tuple(smoothed.counts(x[0], 1000, name).tolist()) for name in ("choose", "estimate", "predict")}
    assert len(counts) == 3


def test_the_model_is_left_as_it_was():
    model = MLP((4,), 3).train()
    Smoothed(model, 1.0, n0=5, n=5)(torch.rand(2, 4))
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def damaged_radius(content):
    """Another radius in the last line."""
    lines = content.decode().splitlines()
    return "\n".join([*lines[:-1], json.dumps({**json.loads(lines[-1]), "radius": 9.0}), ""]).encode()


# What can happen to the file after its last certificate.
DAMAGE = {
    "cut": lambda content: content[:-4],
    "radius": damaged_radius,
    "bytes": lambda content: content[:-3] + b"\xff\xfe\n",
    "other-json": lambda content: content.splitlines()[0] + b"\n{}\n7\nnull\n[]\n[1, 2, 3, 4]",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_stored_certificates_are_computed_again_only_if_they_are_damaged(tmp_path, damage):
    calls = []

    def certifier(x):
        calls.extend(x.flatten().tolist())
        return Certificate(torch.full((len(x),), 3), x[:, 0].double() / 3)

    x = torch.tensor([[0.1], [0.2], [0.3]])
    first = ResumableCertifier(certifier, tmp_path)(x[:2])
    (path,) = tmp_path.iterdir()
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    again = ResumableCertifier(certifier, tmp_path)(x)
    assert calls == x[[0, 1, 1, 2], 0].tolist()
    assert torch.equal(again.radius[:2], first.radius)
    assert torch.equal(ResumableCertifier(certifier, tmp_path)(x).radius, x[:, 0].double() / 3)
    assert len(calls) == 4


def test_stored_certificates_of_another_question_are_ignored(tmp_path):
    def certifier(radius):
        return lambda x: Certificate(torch.zeros(len(x), dtype=torch.int64), torch.full((len(x),), radius))

    x = torch.rand(3, 2)
    assert ResumableCertifier(certifier(1.0), tmp_path, "one")(x).radius.tolist() == [1, 1, 1]
    assert ResumableCertifier(certifier(2.0), tmp_path, "one")(x).radius.tolist() == [1, 1, 1]
    assert ResumableCertifier(certifier(2.0), tmp_path, "another")(x).radius.tolist() == [2, 2, 2]


def test_a_folder_in_the_place_of_stored_certificates_is_removed(tmp_path):
    folder = tmp_path / "results" / "points"
    (folder / "points-0.jsonl").mkdir(parents=True)
    certifier = ResumableCertifier(lambda x: Certificate(torch.tensor([1]), torch.tensor([2.0])), folder)
    assert certifier(torch.rand(1, 2)).radius.tolist() == [2]
    assert (folder / "points-0.jsonl").is_file()


def test_the_folder_of_stored_certificates_is_made(tmp_path):
    folder = tmp_path / "results" / "points"
    ResumableCertifier(lambda x: Certificate(torch.tensor([1]), torch.tensor([2.0])), folder)(torch.rand(1, 2))
    assert [path.name for path in folder.iterdir()] == ["points-0.jsonl"]


@pytest.mark.parametrize("wrong", [{"sigma": 0.0}, {"alpha": 1.0}, {"n": 0}, {"n0": 0}, {"batch_size": 0}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(InputError, match="expected"):
        Smoothed(nn.Linear(2, 2), **{"sigma": 1.0} | wrong)
