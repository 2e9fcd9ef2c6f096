"""Initialization of centroids with training points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atoll.data.base import to_float
from atoll.errors import InputError
from atoll.models.centroid import CentroidNet
from atoll.modules import evaluation_mode
from atoll.rng import generator
from atoll.training.methods.base import METHODS, Method

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@METHODS.register()
class CentroidsFromData(Method):
    """Initializes the centroids of each class with the features of random training points of the class.

    This is a method because a model has no access to data.  List it before methods that copy weights, such as SWA.
    """

    @torch.no_grad()
    def setup(self, trainer: Trainer) -> None:
        model, split = trainer.model, trainer.data.train
        if not isinstance(model, CentroidNet):
            raise InputError(f"CentroidsFromData: expected a CentroidNet, got {type(model).__name__}")
        centroids = model.head.centroids
        for label, own in enumerate(centroids):
            rows = (split.labels == label).nonzero().squeeze(1)
            if len(rows) < len(own):
                raise InputError(
                    f"per_class: expected at most {len(rows)}, the training points of class {label}, got {len(own)}"
                )
            draw = generator(trainer.seed, "centroids", label)
            rows = rows[torch.randperm(len(rows), generator=draw)[: len(own)]]
            x = to_float(split.fetch(rows)).to(centroids.device, centroids.dtype)
            with evaluation_mode(model):
                own.copy_(model.head.stretched(model.features(x)))
