"""Soft targets and divergences by hand; S2O and RAT have their own tests."""

from __future__ import annotations

import math

import pytest
import torch

from atoll.training.methods.targets import divergence, rows_for, target_matrix


def test_targets_are_proportional_to_the_scores() -> None:
    """Each row: 0.4 for its own class, and 0.6 divided among the others; the diagonal does not count."""
    scores = torch.tensor([[7.0, 1.0, 2.0], [3.0, 7.0, 0.0], [0.5, 0.5, 7.0]])
    expected = torch.tensor([[0.4, 0.2, 0.4], [0.6, 0.4, 0.0], [0.3, 0.3, 0.4]])
    torch.testing.assert_close(target_matrix(scores, 0.4), expected)


def test_targets_without_any_score_are_uniform() -> None:
    """Only a row of zeros is divided evenly; a row of tiny scores is not."""
    scores = torch.tensor([[9.0, 0.0, 0.0, 0.0], [0.0, 9.0, 1e-30, 0.0], [0.0, 0.0, 9.0, 0.0], [0.0, 0.0, 0.0, 9.0]])
    targets = target_matrix(scores, 0.25)
    torch.testing.assert_close(targets[[0, 2, 3]], torch.full((3, 4), 0.25))
    torch.testing.assert_close(targets[1], torch.tensor([0.0, 0.25, 0.75, 0.0]))
    torch.testing.assert_close(target_matrix(torch.zeros(3, 3), 0.4), torch.eye(3) * 0.1 + 0.3)


def test_mixed_labels_mix_targets() -> None:
    matrix = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
    assert rows_for(matrix, torch.tensor([1, 0])).tolist() == [[0.25, 0.75], [0.5, 0.5]]
    assert rows_for(matrix, torch.tensor([[0.0, 1.0], [0.5, 0.5]])).tolist() == [[0.25, 0.75], [0.375, 0.625]]


def test_divergence_is_kl_with_zeros_allowed() -> None:
    logits = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log() + 3  # the same probabilities
    values = divergence(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), logits)
    assert values.tolist() == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(2 / 3), math.log(2)])
