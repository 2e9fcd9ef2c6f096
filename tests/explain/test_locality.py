"""Locality on maps made by hand, against loops over pixels, and what holds for any map."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from atoll.data import ClutteredCanvas, Data, Digits, batches, boxes_of, shuffled
from atoll.errors import InputError
from atoll.explain.attributions import attribution
from atoll.explain.locality import Locality, locality, usable
from atoll.models import SmallConvNet

NAN = math.nan
LEFT, WHOLE, CORNER = (0, 0, 0, 1), (0, 0, 1, 1), (1, 1, 1, 1)

# 2x2 map, box, rho: precision, recall, F1
MAPS = {
    "all on the object": ([[3, 0], [1, 0]], LEFT, 0.0, (1, 1, 1)),
    "all beside it": ([[0, 3], [0, 1]], LEFT, 0.0, (0, NAN, 0)),
    "half, half": ([[1, 1], [1, 1]], LEFT, 0.0, (0.5, 1, 2 / 3)),
    "against the class on the object": ([[1, 1], [-3, 0]], LEFT, 0.0, (0.5, 0.25, 1 / 3)),
    "against the class beside it": ([[2, -5], [2, -5]], LEFT, 0.0, (1, 1, 1)),
    "only against, on the object": ([[-1, 0], [-1, 0]], LEFT, 0.0, (NAN, 0, 0)),
    "only against, beside it": ([[0, -1], [0, -1]], LEFT, 0.0, (NAN, NAN, NAN)),
    "zeros": ([[0, 0], [0, 0]], LEFT, 0.0, (NAN, NAN, NAN)),
    "box of the whole image": ([[1, 2], [-3, 0]], WHOLE, 0.0, (1, 0.5, 2 / 3)),
    "box of one pixel": ([[1, 2], [-3, 5]], CORNER, 0.0, (5 / 8, 1, 10 / 13)),
    "rho drops the small ones": ([[3, 1], [1, 2]], LEFT, 2.0, (3 / 5, 3 / 4, 2 / 3)),
    "rho drops all": ([[3, 1], [1, 2]], LEFT, 4.0, (NAN, 0, 0)),
}


def values(result: Locality) -> list[float]:
    return [v.item() for v in (result.precision, result.recall, result.f1)]


@pytest.mark.parametrize("name", MAPS)
def test_by_hand(name: str) -> None:
    attribution, box, rho, expected = MAPS[name]
    result = locality(torch.tensor([attribution], dtype=torch.float32), torch.tensor([box]), rho=rho)
    assert values(result) == pytest.approx(expected, nan_ok=True)


boxes = st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 5), st.integers(0, 4)).map(
    lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3]))
)
seeds = st.integers(0, 2**31)


def random_map(seed: int, channels: int = 2) -> Tensor:
    """5 rows and 6 columns with some exact zeros."""
    drawn = torch.randn(1, channels, 5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn * (drawn.abs() > 0.5)


@given(seeds, boxes, st.sampled_from([0.0, 0.3, 1.0]))
def test_against_a_loop_over_pixels(seed: int, box: tuple[int, ...], rho: float) -> None:
    attribution = random_map(seed)
    x1, y1, x2, y2 = box
    both = total = marked = 0.0
    for y in range(5):
        for x in range(6):
            a = sum(attribution[0, c, y, x].item() for c in range(2))
            counts = a if a > 0 and a >= rho else 0.0
            total += counts
            if x1 <= x <= x2 and y1 <= y <= y2:
                both, marked = both + counts, marked + abs(a)
    assume(total > 0 and marked > 0)
    precision, recall = both / total, both / marked
    f1 = 2 * precision * recall / (precision + recall) if both else 0.0
    result = values(locality(attribution, torch.tensor([box]), rho=rho))
    assert result == pytest.approx([precision, recall, f1])


@given(seeds, boxes)
def test_what_holds_for_any_map(seed: int, box: tuple[int, ...]) -> None:
    attribution, at = random_map(seed), torch.tensor([box])
    result = locality(attribution, at)
    precision, recall, f1 = values(result)
    for value in (precision, recall, f1):
        assert math.isnan(value) or 0 <= value <= 1 + 1e-12
    if not (math.isnan(precision) or math.isnan(recall)):
        assert min(precision, recall) - 1e-12 <= f1 <= max(precision, recall) + 1e-12
    assert values(locality(7 * attribution, at)) == pytest.approx([precision, recall, f1], nan_ok=True)
    assert values(locality(attribution.sum(1), at)) == pytest.approx([precision, recall, f1], nan_ok=True)
    whole = locality(attribution, torch.tensor([(0, 0, 5, 4)]))
    assert whole.precision.isnan().all() or whole.precision.item() == pytest.approx(1)
    # On the object everything speaks for the class or against it.
    flipped = locality(-attribution, at)
    if not math.isnan(recall):
        assert recall + flipped.recall.item() == pytest.approx(1)


def test_points_do_not_meet() -> None:
    maps = torch.cat([random_map(seed) for seed in range(4)])
    at = torch.tensor([[0, 0, 2, 2], [1, 1, 1, 1], [0, 0, 5, 4], [3, 2, 5, 4]])
    together = locality(maps, at)
    for row in range(4):
        alone = locality(maps[row : row + 1], at[row : row + 1])
        assert values(alone) == [v[row].item() for v in (together.precision, together.recall, together.f1)]


def test_means_leave_out_and_count() -> None:
    f1 = torch.tensor([0.2, 0.4, NAN, 0.9], dtype=torch.float64)
    result = Locality(f1, torch.full((4,), NAN), f1)
    assert result.undefined == {"precision": 1, "recall": 4, "f1": 1}
    assert result.means["f1"].value == pytest.approx(0.5)
    defined = [0.2, 0.4, 0.9]
    error = math.sqrt(sum((v - 0.5) ** 2 for v in defined) / 2 / 3)
    assert result.means["f1"].standard_error == pytest.approx(error)
    assert math.isnan(result.means["recall"].value)


@given(seeds)
def test_baselines(seed: int) -> None:
    """A constant map has the box's share as precision: what a map must beat to say anything."""
    generator = torch.Generator().manual_seed(seed)
    box = torch.tensor([[0, 0, int(torch.randint(6, (), generator=generator)), 3]])
    result = locality(torch.ones(1, 5, 6), box)
    assert values(result)[:2] == pytest.approx([(box[0, 2] + 1).item() * 4 / 30, 1])


def trained(data: Data) -> SmallConvNet:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SmallConvNet(data.shape, 10, batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for epoch in range(4):
        for batch in batches(data.train, shuffled(len(data.train), 64, epoch)):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            optimizer.step()
    return model.eval()


def test_misalignment_can_be_made_and_measured() -> None:
    """A net that can go by the background does, fails where it misleads, and does not look at the object."""
    canvas = {"data": Digits(), "size": 14, "clutter": 2}
    hinted = ClutteredCanvas(**canvas, spurious=1.0, spurious_test=0.0)
    plain = ClutteredCanvas(**canvas, spurious=0.0, spurious_test=1.0)
    result, hits = {}, {}
    for name, data in (("hinted", hinted), ("plain", plain)):
        model = trained(data)
        for background, test in (("misleads", hinted), ("helps", plain)):
            x, y = test.tensors("test")
            right = model(x).argmax(1) == y
            hits[name, background] = right.double().mean().item()
            at = boxes_of(test.test)[right]  # type: ignore[index]
            maps = attribution("SM", model).attribute(x[right], y[right])
            result[name, background] = locality(maps, at).means["precision"].value
    assert hits["hinted", "helps"] > 0.9
    assert hits["hinted", "misleads"] < 0.2 < hits["plain", "misleads"]
    sides = (boxes_of(plain.test)[:, 2:] - boxes_of(plain.test)[:, :2] + 1).double()  # type: ignore[index]
    chance = (sides.prod(1) / 14**2).mean().item()
    for background in ("helps", "misleads"):
        assert result["hinted", background] < chance + 0.02 < chance + 0.06 < result["plain", background]


def test_usable() -> None:
    at = torch.tensor([[0, 0, 9, 7], [0, 0, 9, 8], [0, 0, 0, 0], [-1] * 4])  # 80 %, 90 %, 1 %, none
    assert usable(at, (3, 10, 10)).tolist() == [True, False, True, False]
    assert usable(at, (10, 10), most=1.0).tolist() == [True, True, True, False]


GOOD = torch.zeros(2, 1, 4, 4)
BOX = torch.tensor([[0, 0, 1, 1]] * 2)


@pytest.mark.parametrize(
    ("attributions", "at", "rho", "message"),
    [
        (GOOD[0, 0], BOX, 0.0, r"attributions: expected floats of shape .*, got torch.float32 \(4, 4\)"),
        (GOOD.long(), BOX, 0.0, "attributions: expected floats"),
        (GOOD / 0, BOX, 0.0, "attributions: expected finite numbers"),
        (GOOD, BOX, -1.0, "rho: expected a finite number >= 0, got -1"),
        (GOOD, BOX, NAN, "rho: expected"),
        (GOOD, BOX[:1], 0.0, r"boxes: expected int64 x1, y1, x2, y2 for each of 2 images, got torch.int64 \(1, 4\)"),
        (GOOD, BOX.float(), 0.0, "boxes: expected int64"),
        (GOOD, BOX + 3, 0.0, r"boxes: expected 0 <= x1 <= x2 < 4 .* got \[3, 3, 4, 4\] for image 0"),
        (GOOD, BOX.flip(1), 0.0, r"got \[1, 1, 0, 0\] for image 0"),
        (GOOD, torch.full((2, 4), -1), 0.0, "boxes: 2 of 2 images have no bounding box"),
    ],
)
def test_refused(attributions: Tensor, at: Tensor, rho: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        locality(attributions, at, rho=rho)


def test_usable_refuses() -> None:
    with pytest.raises(InputError, match=r"most: expected a share in \(0, 1\], got 0"):
        usable(BOX, (4, 4), most=0)
    with pytest.raises(InputError, match="boxes: expected 0 <= x1"):
        usable(BOX + 3, (4, 4))
