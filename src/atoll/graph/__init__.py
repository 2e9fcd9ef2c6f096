"""The function that a model really computes: a captured graph of ATen operations, and a digest that identifies it."""

from atoll.graph.capture import CapturedModel, Structure, capture
from atoll.graph.digest import digest, tensors_digest
from atoll.graph.function import Digest, function_digest
from atoll.graph.nodes import bind_arguments, live_nodes, locate

__all__ = [
    "CapturedModel",
    "Digest",
    "Structure",
    "bind_arguments",
    "capture",
    "digest",
    "function_digest",
    "live_nodes",
    "locate",
    "tensors_digest",
]
