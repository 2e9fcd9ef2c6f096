"""A classifier from a stored graph, whatever framework it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from atoll.errors import CheckpointError, InputError
from atoll.graph.stored import StoredGraph
from atoll.models.base import Classifier
from atoll.threat import Bounds


class StoredClassifier(Classifier):
    """A model from elsewhere, rebuilt from its stored graph (see ``atoll adopt``).

    If the graph ends with a linear layer, this layer is the head.  Otherwise the features are the logits.

    Args:
        graph: from ``atoll.graph.stored.store_graph``.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        graph: Mapping[str, Any] | None = None,
        bounds: Bounds | None = (0.0, 1.0),
    ) -> None:
        super().__init__(input_shape, num_classes, bounds=bounds)
        if graph is None:
            raise InputError("graph: an adopted model has no recipe to train it with; it exists only in its own run")
        try:
            last = _last_layer(graph)
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise CheckpointError(f"the stored graph is damaged: {type(error).__name__}: {error}") from None
        if last is None:
            self.body, self.head = StoredGraph(graph), nn.Identity()
        else:
            source, names = last
            rows, columns = graph["tensors"][names["weight"]]["shape"]
            self.body = StoredGraph(graph, output=source)
            self.head = nn.Linear(columns, rows, bias="bias" in names)


def _last_layer(graph: Mapping[str, Any]) -> tuple[int, dict[str, str]] | None:
    """The input of a final linear layer and the names of its tensors, if no other operation uses them."""
    node = graph["nodes"][graph["output"]]
    match node:
        case {"operation": "aten.linear.default", "args": [{"node": source}, *tensors]}:
            paths = [entry["tensor"] for entry in tensors if isinstance(entry, dict) and "tensor" in entry]
        case _:
            return None
    about = [graph["tensors"][path] for path in paths]
    others = str([entry.get("args") for entry in graph["nodes"] if entry is not node])
    fits = len(paths) == len(tensors) and all(entry["kind"] == "parameter" for entry in about)
    if not fits or any(repr({"tensor": path}) in others for path in paths):
        return None
    return source, dict(zip(("weight", "bias"), paths, strict=False))


def classifier_state(graph: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a ``StoredClassifier``."""
    last = _last_layer(graph)
    names = {} if last is None else {path: f"head.{name}" for name, path in last[1].items()}
    return {names.get(path, f"body.{path}"): tensor for path, tensor in tensors.items()}
