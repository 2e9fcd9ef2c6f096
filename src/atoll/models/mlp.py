"""Multi-layer perceptron, the model of the Two Moons experiments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from atoll.errors import LARGEST_SIZE, check_count
from atoll.models.activations import ACTIVATIONS, Activation, expect_groups
from atoll.models.base import MODELS, Classifier, Initialization, choose, initialize


@MODELS.register()
class MLP(Classifier):
    """Multi-layer perceptron; the default has two hidden layers of 100 units with ReLU (TrH, section 5).

    >>> import torch
    >>> MLP((2,), 2, hidden=(8, 8))(torch.zeros(3, 2)).shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        hidden: Sequence[int] = (100, 100),
        activation: Activation = "relu",
        initialization: Initialization = "default",
        **options: Any,
    ) -> None:
        super().__init__(input_shape, num_classes, **options)
        check_count(1, LARGEST_SIZE, **{f"hidden[{i}]": width for i, width in enumerate(hidden)})
        act = choose(ACTIVATIONS, activation, "activation")
        expect_groups(activation, *hidden)
        widths = [math.prod(input_shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for wide_in, wide_out in pairwise(widths):
            layers += [nn.Linear(wide_in, wide_out), act(wide_out)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], num_classes)
        initialize(self, initialization)
