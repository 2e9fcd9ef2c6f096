"""Image files are decoded like the images of a data set."""

import pytest
import torch
from PIL import Image

from atoll.data import ClutteredCanvas, Digits, FashionMNISTSmall, FewerClasses, ImageFolder, TwoMoons
from atoll.data.images import check_readable, decode_images, find_images
from atoll.errors import DataError, InputError


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes of random photos with different sizes and modes."""
    root = tmp_path_factory.mktemp("data") / "photos"
    for number, (name, mode) in enumerate([("cat", "RGB"), ("cat", "L"), ("dog", "RGBA"), ("dog", "RGB")] * 2):
        width, height = 20 + number, 30 - number
        pixels = torch.randint(0, 256, (height, width, 4), dtype=torch.uint8).numpy()
        (root / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels, "RGBA").convert(mode).save(root / name / f"{number}.png")
    return root


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: FewerClasses(data=data, count=2, validation=0)])
def test_files_of_a_folder_are_read_as_in_training(photos, wrap):
    folder = ImageFolder(root=photos, resize=16, size=12, validation=0)
    data = wrap(folder)
    files, faults = find_images(folder._splits.test.files)
    images, unreadable = decode_images(data, files, data.shape)
    assert (faults, unreadable) == ([], [])
    assert torch.equal(images, data.test.fetch(torch.arange(len(data.test))))


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize("data", [Digits(), FashionMNISTSmall(), ClutteredCanvas(data=Digits(), size=12)], ids=repr)
def test_saved_points_are_read_back_exactly(data, mode, tmp_path):
    images = data.test.fetch(torch.arange(5))
    for number, image in enumerate(images):
        Image.fromarray(image[0].numpy()).convert(mode).save(tmp_path / f"{number}.png")
    files, _ = find_images([tmp_path])
    read, faults = decode_images(data, files, data.shape)
    assert faults == []
    assert torch.equal(read, images)


def test_images_of_another_size(tmp_path):
    Image.new("L", (16, 8), 200).save(tmp_path / "wide.png")
    with pytest.raises(DataError, match=r"wide\.png: expected 8 x 8 pixels, got 16 x 8"):
        Digits().read_image(tmp_path / "wide.png", (1, 8, 8))
    image = Digits().read_image(tmp_path / "wide.png", (1, 8, 8), fit=True)
    assert torch.equal(image, torch.full((1, 8, 8), 200, dtype=torch.uint8))
    with pytest.raises(DataError, match=r"expected 4 x 8 pixels, got 16 x 8"):  # there is no square to cut out
        Digits().read_image(tmp_path / "wide.png", (1, 8, 4), fit=True)
    with pytest.raises(InputError, match=r"inputs of shape \(2,\), not gray or RGB images"):
        TwoMoons().read_image(tmp_path / "wide.png", (2,))


def test_paths_that_are_no_images_are_listed(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("text")
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    Image.new("L", (8, 8)).save(tmp_path / ".hidden.png")
    files, faults = find_images([tmp_path, tmp_path / "empty", tmp_path / "none.png", tmp_path / "notes.txt"])
    assert [file.name for file in files] == ["a.png", "notes.txt"]
    images, unreadable = decode_images(Digits(), files, (1, 8, 8))
    assert images.shape == (1, 1, 8, 8)
    with pytest.raises(DataError) as error:
        check_readable([*faults, *unreadable], 4)
    lines = str(error.value).replace(f"{tmp_path}/", "").splitlines()
    assert lines == [
        "3 of 4 images cannot be read:",
        "  empty: expected images in this folder, got none",
        "  none.png: no such file",
        "  notes.txt: not a valid image file",
    ]
