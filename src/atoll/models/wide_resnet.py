"""Wide ResNet; WRN-28-10 and WRN-34-10 are the common large networks of robustness benchmarks."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from atoll.errors import InputError, check_count, check_range
from atoll.models.base import MODELS, Classifier, expect_image
from atoll.models.preact_resnet import preact_body


@MODELS.register()
class WideResNet(Classifier):
    """Wide ResNet ``WRN-depth-widen_factor`` (Zagoruyko & Komodakis, 2016), with He initialization as in the paper.

    Args:
        depth: 6 n + 4 for n blocks in each of the three stages.
        widen_factor: width of the stages in units of 16, 32 and 64 channels.
        dropout: dropout rate between the two convolutions of each block.

    >>> WideResNet((3, 32, 32), 10, depth=10, widen_factor=1).num_parameters
    77850
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        depth: int = 34,
        widen_factor: int = 10,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        channels, *_ = expect_image(input_shape, type(self).__name__, at_least=4)
        check_count(1, 1024, widen_factor=widen_factor)
        check_range("[0, 1)", dropout=dropout)
        if depth < 10 or depth % 6 != 4:
            raise InputError(f"depth: expected 6 n + 4 (10, 16, 22, 28, 34, ...), got {depth!r}")
        super().__init__(input_shape, num_classes, **options)
        stages = [((depth - 4) // 6, width * widen_factor) for width in (16, 32, 64)]
        self.body = preact_body(channels, 16, stages, dropout)
        self.head = nn.Linear(64 * widen_factor, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.out_channels * math.prod(module.kernel_size)
                nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        nn.init.zeros_(self.head.bias)
