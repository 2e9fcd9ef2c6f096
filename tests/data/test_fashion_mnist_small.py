"""The pictures of clothes in the package: complete, labeled right, and with their license."""

from importlib.resources import files

import torch

from atoll.data import FashionMNISTSmall


def test_labels_fit_the_pictures_and_classes_are_balanced() -> None:
    data = FashionMNISTSmall(validation=0)
    x, y = data.tensors("train")
    x_test, y_test = data.tensors("test")
    assert torch.bincount(y).tolist() == [400] * 10
    assert torch.bincount(y_test).tolist() == [100] * 10
    means = torch.stack([x[y == label].flatten(1).mean(0) for label in range(10)])
    nearest = torch.cdist(x_test.flatten(1), means).argmin(1)
    # 68 % with the published files as well; labels that do not fit would give about 10 %.
    assert 0.65 < (nearest == y_test).float().mean() < 0.72


def test_the_license_is_beside_the_pictures() -> None:
    license = files("atoll.data").joinpath("fashion_mnist", "LICENSE").read_text()
    assert "Copyright (c) 2017 Zalando SE" in license
