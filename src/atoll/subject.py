"""The subject of a measurement: a model with its weights, data and threat model, identified by a digest."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from atoll.data.base import Data
from atoll.graph import Digest, function_digest
from atoll.losses.base import Loss
from atoll.models.adapted import Conventions
from atoll.threat import ThreatModel


@dataclass(frozen=True)
class Origin:
    """The origin of a model.

    Args:
        run: folder of its run, empty if it has none.
        step: training step of the checkpoint.
        epoch: epoch of the checkpoint.
        weights: ``raw``, or the name of an average such as ``swa``.
        file: digest of the weights file.
    """

    run: str = ""
    step: int | None = None
    epoch: int | None = None
    weights: str = "raw"
    file: str = ""


@dataclass(frozen=True)
class SubjectRecord:
    """The part of a subject that is stored with a result.

    Args:
        digest: identifies the function: graph, weights, buffers and precision.
        method: ``graph`` if the model could be captured, ``code`` if code and weights were digested instead.
        torch: PyTorch version that captured the graph.
        model: class of the model.
        origin: where the model comes from.
    """

    digest: str
    method: str = "graph"
    torch: str = ""
    model: str = ""
    origin: Origin = field(default_factory=Origin)


@dataclass(eq=False)
class Subject:
    """A model in evaluation mode with everything its measurements need.

    Args:
        model: maps inputs in the bounds of the data to logits.
        data: the data set.
        threat: the threat model of training.
        loss: the training loss, if known.
        origin: where the model comes from.
        trust: whether measurements may import classes from outside Atoll.
        conventions: how a model from elsewhere was adapted; None for models of Atoll.
        digests: cache of digests by weights file, shared by the subjects of a run because capturing takes a second.
    """

    model: nn.Module
    data: Data
    threat: ThreatModel
    loss: Loss | None = None
    origin: Origin = field(default_factory=Origin)
    trust: bool = False
    conventions: Conventions | None = None
    digests: dict[str, Digest] = field(default_factory=dict, repr=False)

    @property
    def precision(self) -> torch.dtype:
        """Data type of the weights."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)

    @cached_property
    def digest(self) -> Digest:
        """Digest of the function, computed on first use."""
        key = f"{self.origin.file} {self.precision}"
        digest = self.digests.get(key) or function_digest(self.model, self.data.shape, self.precision)
        if self.origin.file:
            self.digests[key] = digest
        return digest

    @cached_property
    def record(self) -> SubjectRecord:
        """The record of this subject that results store."""
        digest = self.digest
        return SubjectRecord(digest.value, digest.method, digest.torch, type(self.model).__name__, self.origin)
