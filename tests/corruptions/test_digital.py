"""Digital corruptions against closed forms, SciPy and Pillow."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from atoll.corruptions import corrupt
from atoll.corruptions.digital import affine_matrix, sample


def test_contrast_keeps_the_mean_of_each_channel():
    x = torch.zeros(1, 3, 8, 8)
    x[:, 0, :4], x[:, 1, :2], x[:, 2] = 1, 200 / 255, 0.2
    result = (255 * corrupt(x, "contrast", 5)).round()
    assert result[0, 0, 0, 0] == int(127.5 + 0.15 * 127.5)
    assert result[0, 0, 7, 0] == int(127.5 - 0.15 * 127.5)
    assert result[0, 1, 0, 0] == int(50 + 0.15 * 150)
    assert result[0, 1, 7, 0] == int(50 - 0.15 * 50)
    assert result[0, 2].unique().tolist() == [51]


def test_the_affine_map_moves_corners_back():
    height, width = 32, 40
    displacements = 3 * torch.randn(5, 3, 2, dtype=torch.float64)
    center, half = torch.tensor([20.0, 16.0]), 10
    corners = (center + half * torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])).double()
    matrix = affine_matrix(height, width, displacements)
    places = torch.cat([corners + displacements, torch.ones(5, 3, 1, dtype=torch.float64)], 2)
    assert torch.allclose(places @ matrix.mT, corners.expand(5, 3, 2))
    still = affine_matrix(height, width, torch.zeros(1, 3, 2, dtype=torch.float64))
    assert torch.allclose(still, torch.eye(2, 3, dtype=torch.float64))


@pytest.mark.parametrize(("centers", "mode"), [(True, "mirror"), (False, "reflect")])
def test_sampling_against_scipy(centers, mode):
    x = torch.rand(2, 3, 9, 12, dtype=torch.float64)
    right, down = (20 * torch.rand(2, 9, 12, dtype=torch.float64) - 5 for _ in range(2))
    result = sample(x, right, down, centers=centers)
    for image in range(2):
        places = np.stack([down[image].numpy(), right[image].numpy()])
        for channel in range(3):
            expected = ndimage.map_coordinates(x[image, channel].numpy(), places, order=1, mode=mode)
            assert np.allclose(result[image, channel].numpy(), expected)


def test_elastic_transforms_move_and_mix_nothing_new():
    x = torch.full((2, 3, 32, 32), 77 / 255)
    assert torch.equal(corrupt(x, "elastic_transform", 3), x)
    ramp = (torch.arange(32.0).expand(1, 1, 32, 32) * 8).div(255)
    for severity in range(1, 6):
        moved = (corrupt(ramp, "elastic_transform", severity) - ramp).abs() * 255 / 8  # in pixels
        assert 0.2 < moved[..., 8:24, 8:24].max() < 8


def test_pixels_are_means_of_blocks():
    x = torch.randint(0, 256, (1, 3, 64, 64)) / 255
    result = 255 * corrupt(x, "pixelate", 5)  # half of 64
    blocks = torch.nn.functional.avg_pool2d(255 * x, 2).repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert (result - blocks).abs().max() < 1.01  # Pillow rounds along each axis
    assert (result - blocks).abs().mean() < 0.5


@pytest.mark.parametrize(("side", "quality"), [(32, 40), (64, 25), (128, 7)])
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_at_the_quality_of_the_table(side, quality, channels):
    x = torch.randint(0, 256, (1, channels, side, side), dtype=torch.uint8)
    pixels, file = x[0].permute(1, 2, 0).squeeze(2).numpy(), io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "jpeg", quality=quality)
    expected = np.asarray(Image.open(file)).reshape(side, side, channels).transpose(2, 0, 1)
    assert ((255 * corrupt(x / 255, "jpeg_compression", 5)[0]).round().numpy() == expected).all()
