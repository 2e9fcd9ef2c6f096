"""Predictions for image files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.certify.certificate import Proof
from atoll.data.base import Data, to_float
from atoll.data.images import check_readable, decode_images, find_images
from atoll.errors import CheckpointError, check_count
from atoll.models import Classifier

BATCH_SIZE = 64


@dataclass(frozen=True)
class ClassProbability:
    """A class and its softmax probability."""

    name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What a model predicts for an image.

    Args:
        image: path of the file.
        classes: the most probable classes, the first one is the prediction.
        radius: certified l2 radius within which the prediction cannot change; None if the model is not certified.
        abstains: whether a certified model abstains, because the radius is smaller than eps.
    """

    image: str
    classes: tuple[ClassProbability, ...]
    radius: float | None = None
    abstains: bool = False


@torch.no_grad()
def predict(
    model: Classifier,
    images: Sequence[Path | str],
    data: Data,
    classes: Sequence[str],
    *,
    top: int = 3,
    certifier: Proof | None = None,
    eps: float = 0.0,
    device: torch.device | str = "cpu",
) -> list[Prediction]:
    """Predict the classes of image files, which are decoded like the images of a data set.

    Args:
        model: the classifier, in evaluation mode, on ``device``.
        images: image files, or folders of images.
        data: the data set that the model was trained on.
        classes: names of the classes.
        top: number of classes per image.
        certifier: of the model; its predictions have certified radii.
        eps: radius below which a certified prediction counts as abstained.
        device: where to compute.
    """
    check_count(1, top=top)
    files, faults = find_images(images)
    total = len(files) + len(faults)
    predictions: list[Prediction] = []
    for start in range(0, len(files), BATCH_SIZE):
        batch = files[start : start + BATCH_SIZE]
        x, unreadable = decode_images(data, batch, model.input_shape)
        faults += unreadable
        if faults:  # nothing is predicted, but all faults are reported
            continue
        x = to_float(x).to(device)
        if certifier is None:
            logits, certificate = model(x), None
        else:
            logits, certificate = certifier.model(x.to(certifier.model.dtype)), certifier(x)
        if logits.shape[1] != len(classes):
            raise CheckpointError(f"expected the names of {logits.shape[1]} classes, got {len(classes)}")
        probabilities, labels = logits.softmax(1).topk(min(top, len(classes)), dim=1)
        for row, file in enumerate(batch):
            pairs = zip(labels[row].tolist(), probabilities[row].tolist(), strict=True)
            likely = tuple(ClassProbability(classes[label], probability) for label, probability in pairs)
            if certificate is None:
                predictions.append(Prediction(str(file), likely))
            else:
                radius, holds = float(certificate.radius[row]), bool(certificate.holds(eps)[row])
                predictions.append(Prediction(str(file), likely, radius, abstains=not holds))
    check_readable(faults, total)
    return predictions
