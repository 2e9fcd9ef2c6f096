"""The margin of Centroid Nets against its formula; tests/training/test_centroids.py compares it with certificates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import InputError
from atoll.losses import CentroidMargin, Outputs
from atoll.models.centroid import Centroids
from atoll.models.stretch import stretch_distance
from support import naive_margin

EPS = 0.3


def points(classes: int, per_class: int, seed: int, stretch: float = 0.0) -> tuple[Centroids, Outputs, torch.Tensor]:
    """Centroids in three dimensions, five features with labels, and the outputs that the loss sees."""
    draw = torch.Generator().manual_seed(seed)
    head = Centroids(3, classes, per_class, stretch).double()
    head.centroids.data = torch.rand(classes, per_class, 3, generator=draw, dtype=torch.float64)
    z, y = torch.rand(5, 3, generator=draw, dtype=torch.float64), torch.arange(5) % classes
    # eps times the Lipschitz constant of a difference of two logits
    margin = 2 * head.lipschitz * EPS * (1 - torch.eye(classes, dtype=torch.float64))
    return head, Outputs(features=z, head=head, certified_margin=margin), y


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    per_class=st.integers(1, 6),
    classes=st.integers(2, 4),
    own=st.integers(1, 5),
    others=st.integers(1, 9),
)
def test_value_is_the_formula(seed: int, per_class: int, classes: int, own: int, others: int) -> None:
    head, out, y = points(classes, per_class, seed)
    loss = CentroidMargin(target=0.9, tau=0.5, own=own, others=others)
    value = loss.values(out, y)["margin"]
    torch.testing.assert_close(value, naive_margin(loss, out.features, head.centroids, y, EPS))


def test_defaults() -> None:
    term = CentroidMargin().terms["margin"][1]
    assert (term.target, term.tau, term.own, term.others) == (1.1, 0.2, 4, 12)
    head, out, y = points(4, 20, 0)  # more centroids than the term considers
    value = CentroidMargin().values(out, y)["margin"]
    torch.testing.assert_close(value, naive_margin(CentroidMargin(), out.features, head.centroids, y, EPS))


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_stretched_inputs(seed: int) -> None:
    """With one centroid per class and two classes, there is a single plane."""
    head, out, y = points(2, 1, seed, stretch=0.1)
    p, c = head.centroids[y, 0], head.centroids[1 - y, 0]
    distance = stretch_distance(out.features, p, c, head.stretch)
    expected = 0.2 * (1 + ((1.1 - distance / EPS) / 0.2).exp()).log()
    torch.testing.assert_close(CentroidMargin().values(out, y)["margin"], expected)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_planes_are_chosen_for_stretched_inputs(seed: int) -> None:
    head, out, y = points(3, 4, seed, stretch=0.2)
    term = CentroidMargin(own=2, others=3).terms["margin"][1]
    own, other = term.choose(head.stretched(out.features), head.centroids, y)
    loss, flat = CentroidMargin(own=2, others=3), head.centroids.flatten(0, 1)
    # The chosen pair has the distance that the naive search over all pairs finds for the stretched input.
    u, p, c = head.stretched(out.features), flat[own], flat[other]
    distance = ((u - c).square().sum(1) - (u - p).square().sum(1)) / (2 * (p - c).norm(dim=1))
    expected = naive_margin(loss, u, head.centroids, y, EPS)
    torch.testing.assert_close(0.2 * (1 + ((1.1 - distance / EPS) / 0.2).exp()).log(), expected)
    value = loss.values(out, y)["margin"]
    distance = stretch_distance(out.features, p, c, head.stretch)
    torch.testing.assert_close(value, 0.2 * (1 + ((1.1 - distance / EPS) / 0.2).exp()).log())


@pytest.mark.parametrize("own", [1, 4])
def test_equal_centroids_of_two_classes_do_not_break_training(own: int) -> None:
    """The same image may be in the data with two labels; nothing is certified in its favor."""
    head, out, y = points(3, 4, 0)
    head.centroids.data[1] = head.centroids.data[0]
    value = CentroidMargin(own=own).values(out, y)["margin"]
    value.sum().backward()
    assert head.centroids.grad is not None
    assert head.centroids.grad.isfinite().all()
    assert (value[y < 2] >= 1.1).all()


@pytest.mark.parametrize("setting", ["target", "tau", "own", "others"])
def test_settings_are_positive(setting: str) -> None:
    with pytest.raises(InputError, match=f"{setting}: expected a number > 0, got 0"):
        CentroidMargin(**{setting: 0})
