"""Which points Mixup and CutMix combine, and with which weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from atoll.errors import InputError
from atoll.training.methods import CutMix, Mixup, Step

TRAINER = SimpleNamespace(seed=0, data=SimpleNamespace(num_classes=6))


def mixed(method: Mixup | CutMix, x: Tensor, y: Tensor | None = None, number: int = 0) -> tuple[Tensor, Tensor]:
    """One point of each class, as the attack sees them."""
    labels = torch.arange(len(x)) if y is None else y
    step = Step(x, labels, torch.arange(len(x)), number, 0.0)
    method.before_attack(TRAINER, step)
    return step.x, step.y


@pytest.mark.parametrize("count", [6, 5, 1])
def test_mixup_mixes_neighbors(count: int) -> None:
    """Points 0 and 1, 2 and 3, 4 and 5; a last point without a partner stays as it is."""
    points = torch.eye(6, dtype=torch.float64)[:count]
    x, y = mixed(Mixup(), points)
    weight = x[0, 0] if count > 1 else 0.5
    partners = points.clone()
    for i in range(count // 2):
        partners[2 * i], partners[2 * i + 1] = points[2 * i + 1], points[2 * i]
    torch.testing.assert_close(x, weight * points + (1 - weight) * partners)
    torch.testing.assert_close(y, x)  # the points are one-hot vectors of their classes
    assert 0 < weight < 1


def test_mixed_labels_are_mixed_again() -> None:
    x = torch.eye(6, dtype=torch.float64)[:2]
    once, labels = mixed(Mixup(), x)
    _, twice = mixed(Mixup(), x, labels, number=1)
    weight = mixed(Mixup(), x, number=1)[0][0, 0]
    torch.testing.assert_close(twice, weight * once + (1 - weight) * once.flip(0))


def test_the_weight_is_drawn_from_a_beta_distribution_once_per_step() -> None:
    """It is uniform for alpha = 1, close to 1/2 for a large alpha, and close to 0 or 1 for a small alpha."""

    def draw(alpha: float) -> Tensor:
        return torch.stack([mixed(Mixup(alpha=alpha), torch.eye(2), number=number)[0][0, 0] for number in range(200)])

    assert torch.equal(draw(1.0), draw(1.0))
    uniform, middle, ends = draw(1.0), draw(1000.0), draw(0.01)
    assert uniform.unique().numel() > 150
    assert abs(float(uniform.mean()) - 0.5) < 0.1
    assert abs(float(uniform.var()) - 1 / 12) < 0.02
    assert (middle - 0.5).abs().max() < 0.1
    assert ((ends < 0.1) | (ends > 0.9)).double().mean() > 0.8


def test_the_boxes_of_cutmix_cover_half_of_the_image_for_a_large_alpha() -> None:
    """Their center is anywhere, so that up to three quarters of a box can be outside."""
    weights = [
        float(mixed(CutMix(alpha=1e4), torch.zeros(2, 1, 64, 64), number=number)[1][0, 0]) for number in range(80)
    ]
    assert 0.45 < min(weights) < 0.55
    assert 0.75 < max(weights) <= 0.9


def test_cutmix_pastes_the_same_box_of_the_neighbor_everywhere() -> None:
    x = torch.arange(5.0)[:, None, None, None].expand(5, 2, 12, 8)
    boxes = []
    for number in range(100):
        result, y = mixed(CutMix(), x, number=number)
        inside = result != x
        for i, partner in enumerate((1, 0, 3, 2)):
            assert torch.equal(result[i], torch.where(inside[0], float(partner), float(i)))
            assert float(y[i, partner]) == pytest.approx(float(inside[0, 0].double().mean()))
        assert torch.equal(result[4], x[4])
        assert y[4].tolist() == [0, 0, 0, 0, 1, 0]
        torch.testing.assert_close(y.sum(1), torch.ones(5))
        boxes.append(inside[0, 0].double())
    share = torch.stack(boxes).mean(0)
    assert share.min() > 0  # boxes are everywhere
    torch.testing.assert_close(share, share.flip(0, 1), atol=0.2, rtol=0)


def test_cutmix_requires_images() -> None:
    with pytest.raises(InputError, match=r"CutMix: expected images, got inputs of shape \(4,\)"):
        mixed(CutMix(), torch.zeros(2, 4))
