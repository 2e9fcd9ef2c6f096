"""The captured graph is the function that runs; what is no function is refused in one sentence."""

from __future__ import annotations

import copy
import logging
import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from atoll.errors import CaptureError, InputError
from atoll.graph import CapturedModel, bind_arguments, capture, locate
from atoll.models.timm_adapter import import_timm
from graph.graph_cases import ODD_NETS, Apply, Attention, images, random_net, seeded
from models.cases import MODELS
from models.timm_support import HAS_TIMM

# Capture takes seconds for deep nets; these cover every kind of layer.
QUICK = {"mlp", "6c2f-softplus", "small-minmax", "centroid-encoder", "wrn-10-1", "vit-dropout"}


def assert_same_function(model: CapturedModel, net: nn.Module, shape: tuple[int, ...]) -> None:
    net.eval()
    for batch in (1, 2, 5):
        x = images(shape, batch, seed=batch)
        with torch.no_grad():
            assert torch.equal(model(x), net(x))
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        logits, expected = model(ours), net(theirs)
        assert torch.equal(logits, expected)
        (gradient,) = torch.autograd.grad(logits.square().sum(), ours)
        (reference,) = torch.autograd.grad(expected.square().sum(), theirs)
        torch.testing.assert_close(gradient, reference)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c.name in QUICK else pytest.mark.slow) for c in MODELS]
)
def test_captures_every_model_family_bit_by_bit(case):
    net = case.build()
    for buffer in net.buffers():  # running statistics that matter
        if buffer.is_floating_point():
            buffer.add_(0.1)
    model = capture(net, case.input_shape)
    assert net.training
    assert model.exact
    assert_same_function(model, net, case.input_shape)


class Caching(nn.Module):
    """Stores a tensor in a dictionary during its first pass, as some transformers of timm do."""

    def __init__(self):
        super().__init__()
        self.table, self.cache, self.order = nn.Parameter(torch.arange(6.0)), {}, []

    def forward(self, x):
        if "bias" not in self.cache:
            self.cache["bias"] = self.table[[3, 1, 2, 0]]
            self.order.append("bias")
        return x + self.cache["bias"]


def test_caches_of_the_module_hold_no_traced_tensors():
    net = Caching().eval()
    model = capture(net, (4,))
    assert (net.cache, net.order) == ({}, [])
    x = images((4,), 3)
    assert torch.equal(net(x), model(x))


@pytest.mark.parametrize("build", ODD_NETS, ids=lambda build: build.__name__)
def test_captures_code_that_a_walk_over_modules_misses(build):
    net = seeded(build)
    model = capture(net, (4,))
    net.eval()
    x = images((4,), 5)
    with torch.no_grad():
        torch.testing.assert_close(model(x), net(x))
    gradients = []
    for function in (model, net):
        leaf = x.clone().requires_grad_()
        gradients += torch.autograd.grad(function(leaf).square().sum(), leaf)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(s, marks=pytest.mark.slow) for s in range(4, 60))])
def test_captures_random_nets_bit_by_bit(seed):
    net = random_net(seed)
    model = capture(net, (2, 6, 6))
    assert model.exact
    assert_same_function(model, net, (2, 6, 6))


def test_captures_attention_to_rounding():
    net = seeded(Attention)
    model = capture(net, (12,))
    net.eval()
    x = images((12,), 5)
    with torch.no_grad():  # here PyTorch's fused encoder runs
        torch.testing.assert_close(model(x), net(x))
    torch.testing.assert_close(model(x), net(x))


@pytest.mark.slow
def test_attention_is_the_same_graph_if_the_fused_encoder_could_run():
    net = seeded(Attention)
    frozen = copy.deepcopy(net).requires_grad_(False)
    assert capture(frozen, (12,)).digest == capture(net, (12,)).digest


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TIMM, reason="timm is not installed")
@pytest.mark.parametrize(
    "name", ["resnet10t", "mobilenetv3_small_050", "convnext_atto", "swin_tiny_patch4_window7_224"]
)
def test_captures_timm_models_bit_by_bit(name):
    options = {"img_size": 56} if "swin" in name else {}
    net = seeded(lambda: import_timm().create_model(name, num_classes=5, **options))
    model = capture(net, (3, 56, 56))
    assert model.exact


def test_captures_bfloat16_and_float64():
    for dtype in (torch.bfloat16, torch.float64):
        net = nn.Sequential(seeded(lambda: nn.Linear(4, 3)), nn.Softplus()).to(dtype)
        model = capture(net, (4,), dtype=dtype)
        x = images((4,)).to(dtype)
        assert torch.equal(model(x), net(x))


def test_folds_what_depends_on_weights_only():
    net = seeded(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.ReLU()))
    model = capture(net, (4,))
    assert model.operations() == {"aten.linear.default": 1, "aten.relu.default": 1}
    weight, bias = dict(model.named_buffers()).values()
    assert torch.equal(weight, net[0].weight)
    assert torch.equal(bias, net[0].bias)
    assert not any(b.requires_grad for b in (weight, bias))


def test_shared_modules_appear_once_per_use():
    linear = nn.Linear(4, 4)
    assert capture(nn.Sequential(*[linear] * 3), (4,)).operations() == {"aten.linear.default": 3}


def test_dropout_and_copies_leave_no_operation():
    net = nn.Sequential(nn.Dropout(), nn.Linear(4, 3), nn.Identity(), nn.Dropout())
    assert capture(net, (4,)).operations() == {"aten.linear.default": 1}


def test_nodes_know_source_arguments_and_names():
    net = Apply(lambda net, x: functional.leaky_relu(net.linear(x), 0.3))
    nodes = {str(n.target): n for n in capture(net, (4,)).graph_module.graph.nodes}
    assert "graph_cases.py" in locate(nodes["aten.leaky_relu.default"])
    assert bind_arguments(nodes["aten.leaky_relu.default"])["negative_slope"] == 0.3
    assert {n.meta.get("tensor_name") for n in nodes.values()} >= {"linear.weight", "linear.bias"}


def test_the_copy_is_private():
    net = nn.Sequential(nn.Linear(4, 3))
    x = images((4,))
    model = capture(net, (4,))
    expected = net(x)
    with torch.no_grad():
        net[0].weight.zero_()
    assert torch.equal(model(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    with pytest.raises(InputError, match="a captured model is frozen"):
        model.load_state_dict(model.state_dict())


def test_one_function_in_any_mode():
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout())
    model = capture(net, (4,))
    x = images((4,))
    expected = net.eval()(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype == torch.bfloat16
        assert torch.equal(model(x), expected)
    assert torch.equal(model.train()(x), expected)


def test_autocast_around_the_capture_is_captured():
    net = nn.Linear(4, 3)
    x = images((4,))
    with torch.autocast("cpu", torch.bfloat16):
        model = capture(net, (4,))
        expected = net(x)
    assert model(x).dtype == torch.bfloat16
    assert torch.equal(model(x), expected)
    assert model.digest != capture(net, (4,)).digest


def test_refuses_other_inputs_and_precisions():
    model = capture(nn.Linear(4, 3), (4,))
    for x in (torch.rand(2, 5), torch.rand(2, 1, 4), torch.rand(2, 4, dtype=torch.float64)):
        with pytest.raises(InputError, match=r"x: expected shape \(batch, 4\) and torch.float32, got"):
            model(x)
    with pytest.raises(InputError, match="capture it again"):
        model.double()
    assert model.to("cpu") is model
    with pytest.raises(InputError, match="dtype: expected a floating-point type"):
        capture(nn.Linear(4, 3), (4,), dtype=torch.int64)
    with pytest.raises(InputError, match=r"module: expected an nn\.Module"):
        capture(torch.relu, (4,))


# --- refusals


class TrainsAlways(nn.Sequential):
    def train(self, mode=True):
        return super().train(True)


def add_to_scale(net, x):
    net.scale.add_(1)
    return x * net.scale


def add_to_data(net, x):
    net.scale.data.add_(1)
    return x * net.scale


def clamp_weights(net, x):
    with torch.no_grad():
        net.linear.weight.clamp_(-0.1, 0.1)
    return net.linear(x)


def count_calls(net, x):
    net.calls += 1
    return x * net.calls


def branch(net, x):
    if x.sum() > 0:
        return x
    return -x


REFUSALS = {
    "dropout": (
        lambda net, x: functional.dropout(x),
        "aten.native_dropout.default draws random numbers (graph_cases.py",
    ),
    "noise": (lambda net, x: x + torch.randn_like(x), "aten.randn_like.default draws random numbers (graph_cases.py"),
    "noise on weights": (lambda net, x: x @ torch.bernoulli(torch.full((4, 4), 0.5)), "draws random numbers"),
    "attention dropout": (
        lambda net, x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        "aten.scaled_dot_product_attention.default draws random numbers",
    ),
    "python noise": (lambda net, x: x * random.random(), "outputs differ from the captured graph"),
    "branch": (branch, "branches on computed values (test_capture.py, line"),
    "branch on a buffer": (lambda net, x: x if float(net.scale) > 0 else -x, "branches on computed values"),
    "cond": (
        lambda net, x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)),
        "cond branches or loops on data",
    ),
    "buffer": (add_to_scale, "the forward pass changes scale"),
    "data": (add_to_data, "uses `.data`"),
    "parameter": (clamp_weights, "the forward pass changes linear.weight"),
    "input": (lambda net, x: x.add_(1), "changes its input in place"),
    "python state": (count_calls, "outputs differ from the captured graph"),
    "gradient mode": (lambda net, x: x if torch.is_grad_enabled() else -x, "for a batch of 1 without gradients"),
    "requires grad": (lambda net, x: x if x.requires_grad else -x, "for a batch of 1 with gradients"),
    "batch of one": (lambda net, x: x if x.shape[0] > 1 else -x, "for a batch of 1 without gradients"),
    "larger batch": (lambda net, x: x if len(x) > 2 else -x, "depends on the batch size"),
    "loop over rows": (lambda net, x: torch.stack([net.linear(row) for row in x]), "depends on the batch size"),
    "flat": (lambda net, x: x.reshape(-1), "expected logits of shape (batch, classes), got (4,)"),
    "squeezed": (lambda net, x: net.linear(x).squeeze(), "expected logits of shape (batch, classes), got (3,)"),
    "sum over rows": (lambda net, x: x.sum(0, keepdim=True), "expected logits of shape (batch, classes), got (1, 4)"),
    "integers": (lambda net, x: x.argmax(1, keepdim=True), "torch.int64"),
    "pair": (lambda net, x: (x, x), "expected one tensor of logits, got 2 outputs"),
    "mapping": (lambda net, x: {"logits": x}, "expected a tensor of logits, got dict"),
    "nothing": (lambda net, x: None, "expected one tensor of logits, got an output that is not a tensor"),
    "numpy": (lambda net, x: torch.from_numpy(x.detach().numpy()), "numpy"),
    "exception": (lambda net, x: x / (1 // 0), "by zero (test_capture.py, line"),
}


def disabled_loggers() -> set[str]:
    return {name for name, logger in logging.root.manager.loggerDict.items() if getattr(logger, "disabled", False)}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses_in_one_sentence_and_leaves_no_trace(name, capfd):
    function, message = REFUSALS[name]
    net = Apply(function)
    net.linear.eval()
    state = copy.deepcopy(net.state_dict())
    attributes, generator = dict(vars(net)), torch.get_rng_state()
    loggers = disabled_loggers()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CaptureError) as error:
            capture(net, (4,))
    assert str(error.value).startswith("cannot capture the model: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert net.training
    assert not net.linear.training
    assert vars(net).keys() == attributes.keys()
    assert net.calls == 0
    assert all(torch.equal(tensor, state[key]) for key, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    assert disabled_loggers() == loggers
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Dropout(), "aten.native_dropout.default draws random numbers (module 1, Dropout)"),
        (nn.BatchNorm1d(3), "the forward pass changes 1.running_mean"),
        (nn.LazyLinear(2), "it has lazy parameters"),
        (nn.Linear(7, 2), "cannot capture the model: "),
    ],
)
def test_refuses_layers(layer, message):
    with pytest.raises(CaptureError) as error:
        capture(TrainsAlways(nn.Linear(4, 3), layer), (4,))
    assert message in str(error.value)


def test_capture_restores_attributes():
    def remember(net, x):
        net.last = x
        net.calls += 1
        return net.linear(x)

    net = Apply(remember)
    assert torch.equal(capture(net, (4,))(images((4,))), net.linear(images((4,))))
    assert net.calls == 0
    assert not hasattr(net, "last")
