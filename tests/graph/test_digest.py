"""A digest belongs to one function: equal for a rebuilt net, different for any other graph or weight."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from atoll.errors import InputError
from atoll.graph import Digest, capture, function_digest, tensors_digest
from graph.graph_cases import ODD_NETS, Apply, Cancel, random_net, seeded

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def convnet(
    *, stride: int = 1, eps: float = 1e-5, slope: float = 0.01, padding: int = 0, pool: type[nn.Module] = nn.AvgPool2d
) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=stride, padding=padding), nn.BatchNorm2d(2, eps=eps), nn.LeakyReLU(slope),
        pool(2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


SHAPE = (1, 8, 8)


def digest_of(net: nn.Module, shape: tuple[int, ...] = SHAPE) -> str:
    return capture(net, shape).digest


def flip_bit(tensor: torch.Tensor, index: int = 0) -> None:
    """Flip the lowest bit of one number."""
    tensor.data.view(-1).view(torch.int32)[index] ^= 1


# --- tensors


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_digest_covers_dtype_shape_and_values(dtype):
    x = torch.arange(12).remainder(2).view(3, 4).to(dtype)
    base = tensors_digest(x)
    assert tensors_digest(x.t().contiguous().t()) == base
    assert tensors_digest(torch.cat([x, x])[::2][:0]) != tensors_digest(x[:, :0])
    assert tensors_digest(x.clone().requires_grad_() if dtype.is_floating_point else x.clone()) == base
    changed = x.clone()
    changed[1, 1] = 0
    others = [x.view(4, 3), x.flatten(), x.t(), changed, x[:2], *(x.to(d) for d in DTYPES if d != dtype)]
    assert len({base, *map(tensors_digest, others)}) == len(others) + 1


def test_tensors_digest_separates_arguments_and_names():
    a, b = torch.zeros(2), torch.ones(2)
    digests = [
        tensors_digest(a, b), tensors_digest(b, a), tensors_digest(torch.cat([a, b])), tensors_digest(),
        tensors_digest({"a": a, "b": b}), tensors_digest({"a": b, "b": a}), tensors_digest({"a": a}, {"b": b}),
        tensors_digest({}), tensors_digest(torch.tensor(0.0)), tensors_digest(torch.tensor(-0.0)),
    ]  # fmt: skip
    assert len(set(digests)) == len(digests)
    assert tensors_digest({"b": b, "a": a}) == tensors_digest({"a": a, "b": b})


@given(st.lists(st.integers(0, 3), max_size=3), st.permutations(range(3)))
def test_tensors_digest_does_not_see_strides(sizes, order):
    x = torch.arange(float(torch.Size([*sizes, 1]).numel())).view(*sizes, *[1] * (3 - len(sizes)))
    back = sorted(range(3), key=order.__getitem__)
    strided = x.permute(order).contiguous().permute(back)
    assert tensors_digest(strided) == tensors_digest(x)


def test_tensors_digest_reads_conjugates_and_sparse_tensors():
    x = torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert tensors_digest(x.conj()) == tensors_digest(x.conj().resolve_conj()) != tensors_digest(x)
    assert tensors_digest(torch.eye(3).to_sparse()) == tensors_digest(torch.eye(3))


# --- graphs


def test_any_hyper_parameter_matters():
    variants = [
        {}, {"stride": 2}, {"eps": 1e-4}, {"slope": 0.02}, {"padding": 1}, {"pool": nn.MaxPool2d},
    ]  # fmt: skip
    digests = [digest_of(seeded(lambda options=options: convnet(**options))) for options in variants]
    assert len(set(digests)) == len(variants)
    assert digest_of(seeded(convnet)) == digests[0]
    assert digest_of(seeded(convnet), (1, 10, 10)) != digests[0]


def test_names_modes_and_unused_weights_do_not_matter():
    class Renamed(nn.Module):
        def __init__(self, net: nn.Sequential) -> None:
            super().__init__()
            self.unused = nn.Linear(9, 9)
            self.head = net[6]  # registered in another order
            self.norm, self.conv, self.rest = net[1], net[0], net[2:6]

        def forward(self, features):
            return self.head(self.rest(self.norm(self.conv(features)).clone()))

    net = seeded(convnet)
    value = digest_of(net)
    assert digest_of(Renamed(net)) == value
    assert digest_of(copy.deepcopy(net).eval().requires_grad_(False)) == value
    with torch.inference_mode():
        assert digest_of(net) == value


def test_code_around_modules_matters():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    value = digest_of(net, (4,))
    handle = net[0].register_forward_hook(lambda module, inputs, output: output + 1)
    assert digest_of(net, (4,)) != value
    handle.remove()
    assert digest_of(net, (4,)) == value
    net[1].forward = torch.tanh
    assert digest_of(net, (4,)) != value
    del net[1].forward
    parametrize.register_parametrization(net[0], "weight", Cancel())
    assert digest_of(net, (4,)) != value


@pytest.mark.parametrize("build", ODD_NETS, ids=lambda build: build.__name__)
@pytest.mark.slow
def test_odd_nets_are_the_same_when_rebuilt(build):
    assert digest_of(seeded(build), (4,)) == digest_of(seeded(build), (4,))


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 60))])
def test_random_nets_every_bit_counts_and_rebuilding_does_not(seed):
    value = digest_of(random_net(seed), (2, 6, 6))
    assert digest_of(random_net(seed), (2, 6, 6)) == value
    net = random_net(seed)
    tensors = dict([*net.named_parameters(), *net.named_buffers()])
    name = random.Random(seed).choice(sorted(n for n, t in tensors.items() if t.is_floating_point()))
    flip_bit(tensors[name], index=tensors[name].numel() - 1)
    assert digest_of(net, (2, 6, 6)) != value


def test_another_process_computes_the_same_digest():
    code = (
        "from graph.graph_cases import random_net\n"
        "from atoll.graph import function_digest\n"
        "print(function_digest(random_net(3), (2, 6, 6)).value)"
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == digest_of(random_net(3), (2, 6, 6))
    assert output.stderr == ""


CHANGES = {
    "hook": lambda net: net[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,)),
    "override": lambda net: setattr(net[2], "forward", torch.tanh),
    "setting": lambda net: setattr(net[2], "negative_slope", 0.5),
    "class": lambda net: net.__setitem__(2, nn.Sigmoid()),
    "parametrization": lambda net: parametrize.register_parametrization(net[6], "weight", Cancel()),
    "shared weights": lambda net: setattr(net[1], "bias", net[1].weight),
}


def test_any_change_of_the_function_matters():
    values = {"none": digest_of(seeded(convnet))}
    for name, change in CHANGES.items():
        net = seeded(convnet)
        change(net)
        values[name] = digest_of(net)
    assert len(set(values.values())) == len(values)


def test_counters_that_evaluation_does_not_read_do_not_matter():
    net = seeded(convnet)
    value = digest_of(net)
    net[1].num_batches_tracked += 1
    assert digest_of(net) == value


def test_tensors_in_closures_matter():
    offsets = torch.zeros(4)
    net = Apply(lambda net, x: net.linear(x + offsets))
    value = digest_of(net, (4,))
    offsets += 1
    assert digest_of(net, (4,)) != value


# --- any model


class Noisy(nn.Module):
    def __init__(self, scale: float = 0.1) -> None:
        super().__init__()
        self.scale = scale
        self.linear = nn.Linear(4, 3)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.linear(x) + self.scale * torch.randn(3)


class Branching(Noisy):
    """Refused early, so its digest is fast."""

    def forward(self, x):
        return self.linear(x) * (self.scale if x.sum() > 0 else -self.scale)


def test_function_digest_of_the_graph():
    net = seeded(lambda: nn.Linear(4, 3))
    assert function_digest(net, (4,)) == Digest(digest_of(net, (4,)), "graph", torch.__version__, "")


def test_function_digest_falls_back_to_code_and_weights():
    noisy = function_digest(seeded(Noisy), (4,))
    assert noisy.method == "code"
    assert "aten.randn.default draws random numbers (test_digest.py" in noisy.reason
    base = function_digest(seeded(Branching), (4,))
    assert function_digest(seeded(Branching), (4,)) == base != noisy
    other_class = type("Other", (Branching,), {})
    variants = [seeded(Branching, 1), seeded(lambda: Branching(0.2)), seeded(other_class)]
    for change in ("weight", "buffer", "hook", "override"):
        other = seeded(Branching)
        if change == "weight":
            flip_bit(other.linear.weight, 5)
        elif change == "buffer":
            flip_bit(other.hidden)
        elif change == "hook":
            other.linear.register_forward_hook(lambda module, inputs, output: 2 * output)
        else:
            other.linear.forward = lambda x: x[:, :3]
        variants.append(other)
    values = {function_digest(v, (4,)).value for v in variants}
    assert len(values | {base.value}) == len(variants) + 1


def test_code_digest_sees_closures_and_lambdas_of_one_line():
    def scaled(scale):
        return seeded(lambda: Apply(lambda net, x: scale * net.linear(x) * float(x.sum())))

    first, second = (lambda net, x: float(x.sum()) + x), (lambda net, x: float(x.sum()) - x)
    nets = [scaled(1.0), scaled(2.0), seeded(lambda: Apply(first)), seeded(lambda: Apply(second))]
    digests = [function_digest(net, (4,)) for net in nets]
    assert {d.method for d in digests} == {"code"}
    assert len({d.value for d in digests}) == 4
    assert function_digest(scaled(1.0), (4,)) == digests[0]


class Hostile(nn.Module):
    """Everything that can go wrong when a model is described."""

    def __init__(self) -> None:
        super().__init__()
        self.myself = [self]
        self.cycle: list[object] = []
        self.cycle.append(self.cycle)
        self.mixed = {1, "a", (2, None)}
        self.empty = torch.empty(3, device="meta")
        self.generator = torch.Generator()
        self.lazy = nn.LazyLinear(3)
        self.text = "\ud800"
        self.register_buffer("nowhere", torch.empty(2, device="meta"))

    def __repr__(self) -> str:
        raise RuntimeError("no name")

    def named_parameters(self, *args, **kwargs):
        raise RuntimeError("no parameters")


def test_function_digest_never_raises_for_a_model():
    digests = [function_digest(Hostile(), (4,)) for _ in range(2)]
    assert digests[0].method == "code"
    assert digests[0].reason
    assert digests[0] == digests[1]
    with pytest.raises(InputError, match=r"module: expected an nn\.Module, got function"):
        function_digest(lambda x: x, (4,))
