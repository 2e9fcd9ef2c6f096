"""What the picture of attributions shows."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from atoll.errors import InputError
from atoll.plots import heat_map, plot_attributions

X = torch.rand(2, 3, 10, 12, generator=torch.Generator().manual_seed(0))
MAPS = {"SM": torch.randn(2, 3, 10, 12, generator=torch.Generator().manual_seed(1)), "BIG": torch.zeros(2, 10, 12)}
BOXES = torch.tensor([[3, 2, 7, 9], [-1, -1, -1, -1]])


def test_maps_are_sums_around_zero() -> None:
    figure = plot_attributions(X, MAPS)
    assert len(figure.axes) == 6
    image, sm, big = (axis.images[0].get_array() for axis in figure.axes[:3])
    assert np.allclose(image, X[0].permute(1, 2, 0))
    assert np.allclose(sm, heat_map(X[0], MAPS["SM"][0].sum(0)).permute(1, 2, 0))
    # Nothing of a map of zeros covers the image.
    assert np.allclose(big, (0.3 + 0.4 * X[0].mean(0))[:, :, None].expand(-1, -1, 3))


def test_heat_maps_are_a_blend_of_the_image_and_a_color_map() -> None:
    """Red for positive values, blue for negative ones, the stronger the less transparent: as matplotlib does it."""
    values = MAPS["SM"][0].sum(0)
    limit = np.percentile(values.abs().numpy(), 99)
    color = colormaps["bwr"](Normalize(-limit, limit)(values.numpy()))[..., :3]
    alpha = (values.abs() / limit).clamp(0, 1).numpy()[..., None]
    pale = (0.3 + 0.4 * X[0].mean(0)).numpy()[..., None]
    assert np.allclose(heat_map(X[0], values).permute(1, 2, 0), alpha * color + (1 - alpha) * pale, atol=0.01)


def test_one_pixel_does_not_wash_out_the_rest() -> None:
    values = MAPS["SM"][0].sum(0)
    spiky = values.clone()
    spiky[0, 0] = 1e6
    before, after = (heat_map(X[0], each)[:, 1:] for each in (values, spiky))
    assert (before - after).abs().max() < 0.2
    # Unless there is nothing else.
    alone = torch.zeros(10, 12)
    alone[4, 4] = -3.0
    assert heat_map(X[0], alone)[:, 4, 4].tolist() == [0.0, 0.0, 1.0]


def test_boxes_lie_around_their_pixels() -> None:
    figure = plot_attributions(X, MAPS, BOXES)
    drawn = [[patch for patch in axis.patches if isinstance(patch, Rectangle)] for axis in figure.axes]
    assert [len(patches) for patches in drawn] == [1, 1, 1, 0, 0, 0]
    assert drawn[0][0].get_bbox().extents.tolist() == [2.5, 1.5, 7.5, 9.5]


@pytest.mark.pictures
def test_names_are_not_mathematics() -> None:
    names = ["$\\frac{", "a very long name of a class that would run into the row below"]
    figure = plot_attributions(X, {"SM $_": MAPS["SM"]}, BOXES, names)
    figure.savefig(io.BytesIO(), format="png")
    assert figure.axes[0].texts[0].get_text() == "$\\frac{"
    assert figure.axes[1].get_title() == "SM $_"
    assert len(figure.axes[2].texts[0].get_text()) <= 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X[0], MAPS), r"images: expected \(N, C, H, W\), got \(3, 10, 12\)"),
        ((X, {"SM": X[:1]}), r"SM: expected attributions of \(2, 3, 10, 12\), got \(1, 3, 10, 12\)"),
        ((X, {"SM": X / 0}), "SM: expected finite attributions"),
        ((X, MAPS, BOXES[:1]), "boxes: expected int64 x1, y1, x2, y2 for each of 2 images"),
        ((X, MAPS, BOXES, ["one"]), "titles: expected one for each of 2 images, got 1"),
    ],
)
def test_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plot_attributions(*arguments)
