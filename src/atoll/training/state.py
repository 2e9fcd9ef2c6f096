"""State of a training run besides the weights: the best checkpoint, and sums over an epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from atoll.distributed import all_sum


@dataclass
class Best:
    """The checkpoint with the best selection metric."""

    score: float = -math.inf
    step: int = -1
    epoch: int = -1


@dataclass
class RunningMeans:
    """Sums over an epoch, on the device: reading them after every step would stall a GPU."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().double().sum()
        self.values[name] = self.values[name] + value if name in self.values else value

    def means(self) -> dict[str, float]:
        """Per example, over all processes."""
        return RunningMeans({name: all_sum(value.clone()) for name, value in self.values.items()}).local_means()

    def local_means(self) -> dict[str, float]:
        """Per example, over this process."""
        totals = {name: float(value) for name, value in self.values.items()}
        count = totals.pop("count", 0.0)
        return {name: total / count for name, total in totals.items()} if count else {}
