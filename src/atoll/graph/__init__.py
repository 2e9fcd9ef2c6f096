"""The function that a model computes, captured as a graph of ATen operations, and a digest that identifies it."""

from atoll.graph.capture import CapturedModel, capture
from atoll.graph.digest import tensors_digest
from atoll.graph.function import Digest, function_digest
from atoll.graph.match import find_input
from atoll.graph.nodes import bind_arguments, locate

__all__ = [
    "CapturedModel",
    "Digest",
    "bind_arguments",
    "capture",
    "find_input",
    "function_digest",
    "locate",
    "tensors_digest",
]
