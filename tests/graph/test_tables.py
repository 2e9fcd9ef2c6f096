"""The tables of operations: certification rules, ONNX forms, and what is linear."""

import pytest
import torch

from atoll.certify.rules import RULES
from atoll.export.forms import FORMS
from atoll.graph.capture import _WHOLE, _decompositions
from atoll.graph.linearity import LINEAR_OPERATIONS

KEPT_WHOLE = {name.partition(".")[0] for name in _WHOLE}
DECOMPOSITIONS = _decompositions()


def stays(name: str) -> bool:
    """Whether a captured graph can contain an operation: some overload of it is not taken apart."""
    if name in KEPT_WHOLE:
        return True
    packet = getattr(torch.ops.aten, name)
    for overload in packet.overloads():
        operation = getattr(packet, overload)
        try:
            composite = torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd")
        except RuntimeError:  # an overload for Python numbers only
            continue
        # Tracing never records a composite operation that returns a view.
        view = composite and any(argument.alias_info for argument in operation._schema.arguments)
        if "out" not in overload and operation not in DECOMPOSITIONS and not view:
            return True
    return False


@pytest.mark.parametrize("table", [RULES, FORMS, LINEAR_OPERATIONS], ids=["rules", "forms", "linearity"])
def test_a_table_lists_only_operations_that_graphs_contain(table):
    assert [name for name in table if not stays(name)] == []


@pytest.mark.parametrize("name", ["reshape", "stack", "relu6", "clamp_min", "prelu"])
def test_operations_that_are_taken_apart_are_recognized(name):
    assert not stays(name)
