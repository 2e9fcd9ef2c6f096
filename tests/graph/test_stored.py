"""A stored graph is the same function with the same weights; damaged and hostile data are refused in one sentence."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from atoll.errors import CheckpointError
from atoll.graph import capture
from atoll.graph.stored import StoredGraph, store_graph
from graph.graph_cases import ODD_NETS, images, seeded
from models.cases import MODELS

QUICK = {"small-bn-gelu", "vit-dropout", "centroid-encoder"}


def stored(net, shape, dtype=None):
    data, tensors = store_graph(net, shape, dtype)
    copy = StoredGraph(json.loads(json.dumps(data, allow_nan=False)))
    copy.load_state_dict(tensors)
    return copy.eval()


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c.name in QUICK else pytest.mark.slow) for c in MODELS]
)
def test_every_model_family_is_stored_bit_by_bit(case):
    net = case.build().eval()
    copy = stored(net, case.input_shape)
    x = case.images(4).requires_grad_()
    z = x.detach().clone().requires_grad_()
    logits, expected = copy(x), net(z)
    assert torch.equal(logits, expected)
    assert torch.equal(*(torch.autograd.grad(out.square().sum(), to)[0] for out, to in ((logits, x), (expected, z))))
    assert capture(copy, case.input_shape).digest == capture(net, case.input_shape).digest
    names = dict(net.named_parameters())
    assert dict(copy.named_parameters()).keys() <= names.keys()
    gradients = torch.autograd.grad(copy(x).sum(), [*copy.parameters()])
    wanted = torch.autograd.grad(net(x).sum(), [names[name] for name, _ in copy.named_parameters()])
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


class Odd(nn.Module):
    """A position table, infinity, a constant, a shared layer and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again = self.first
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x):
        z = self.again(torch.relu(self.first(x))) + self.shift + torch.tensor([1.0, 2.0, 3.0, 4.0])
        z = torch.where(z > 0, z, float("-inf")).clamp(min=-5.0)
        return self.second(z + torch.arange(4, device=x.device, dtype=x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constants_shared_tensors_and_infinity(dtype):
    net = seeded(Odd).to(dtype).eval()
    other = stored(net, (4,))
    x = images((4,), 5).to(dtype)
    assert torch.equal(other(x), net(x))
    assert sum(p.numel() for p in other.parameters()) == 40  # the shared layer counts once
    other = copy.deepcopy(other)
    state = {name: 2 * value for name, value in other.state_dict().items()}
    other.load_state_dict(state)
    assert not torch.equal(other(x), net(x))
    assert torch.equal(torch.func.functional_call(other, stored(net, (4,)).state_dict(), x), net(x))


def test_an_inner_node_has_only_the_tensors_it_needs():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    data, tensors = store_graph(net, (4,))
    inner = StoredGraph(data, output=2)
    assert [*inner.state_dict()] == ["0.weight", "0.bias"]
    inner.load_state_dict({name: tensors[name] for name in inner.state_dict()})
    x = images((4,), 5)
    assert torch.equal(inner(x), net[:2](x))


@pytest.mark.parametrize(
    "build",
    [pytest.param(b, marks=() if b.__name__ in ("cayley", "autocast") else pytest.mark.slow) for b in ODD_NETS],
    ids=lambda build: build.__name__,
)
def test_odd_nets(build):
    net = seeded(build).eval()
    x = images((4,), 5)
    assert torch.equal(stored(net, (4,))(x), net(x))


DATA, _ = store_graph(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (4,))
RELU = DATA["nodes"][2]


def change(**values):
    return {**DATA, **values}


def node(**values):
    return change(nodes=[*DATA["nodes"][:2], {**RELU, **values}])


HOSTILE = {
    "nothing": {},
    "format": change(format=2),
    "no nodes": change(nodes=[]),
    "nodes of another type": change(nodes={"a": 1}),
    "no input": change(nodes=DATA["nodes"][1:]),
    "python": node(operation="os.system", args=["true"]),
    "builtin": node(operation="eval", args=["1"]),
    "another namespace": node(operation="prims.relu.default"),
    "file": node(operation="aten.from_file.default", args=["/etc/passwd", False, 10]),
    "in place": node(operation="aten.relu_.default"),
    "random": node(operation="aten.rand.default", args=[[2]]),
    "packet": node(operation="aten.relu"),
    "dunder": node(operation="aten.__class__.__init__"),
    "later node": node(args=[{"node": 7}]),
    "negative node": node(args=[{"node": -1}]),
    "unknown tensor": node(args=[{"tensor": "x"}]),
    "unknown argument": node(args=[{"code": "1"}]),
    "argument name": node(kwargs={"a=1);import os;(": 1}),
    "device": node(kwargs={"device": "cuda"}),
    "deep": node(args=[[[[[[[[[[[1]]]]]]]]]]]),
    "output": change(output=99),
    "output of another type": change(output="0"),
    "tensor name": change(tensors={'a";import os;"': {"kind": "buffer", "shape": [1], "dtype": "torch.float32"}}),
    "attribute": change(
        tensors={**DATA["tensors"], "0.weight": {**DATA["tensors"]["0.weight"], "dtype": "torch.quint8"}}
    ),
    "huge": change(tensors={**DATA["tensors"], "0.weight": {**DATA["tensors"]["0.weight"], "shape": [2**40, 2**20]}}),
    "negative size": change(tensors={**DATA["tensors"], "0.weight": {**DATA["tensors"]["0.weight"], "shape": [-1]}}),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_data_are_refused(data):
    with pytest.raises(CheckpointError, match="stored") as error:
        StoredGraph(data)
    assert "\n" not in str(error.value)
