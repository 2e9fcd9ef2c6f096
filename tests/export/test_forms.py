"""The ONNX forms of operations, run by ONNX Runtime, against PyTorch."""

import math

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.certify.rules import RULES
from atoll.errors import InputError
from atoll.export.fast_forms import FAST_FORMS
from atoll.export.forms import FORMS, write_graph
from atoll.export.writer import Writer
from atoll.graph import capture

FLAT, LINE, IMAGE = (6,), (4, 9), (4, 6, 7)
MATRIX = torch.linspace(-1, 1, 42, dtype=torch.float64).view(6, 7)
MASK = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)

# By shape of the input: modules and functions.  A new form joins by one line.
CASES = {
    FLAT: {
        "linear": nn.Linear(6, 3),
        "linear without bias": nn.Linear(6, 3, bias=False),
        "addmm": lambda x: torch.addmm(x.new_tensor([1.0, 2, 3, 4, 5, 6, 7]), x, MATRIX.to(x)),
        "scaled addmm": lambda x: torch.addmm(x.new_ones(7), x, MATRIX.to(x), beta=0.3, alpha=-0.7),
        "batch norm": nn.BatchNorm1d(6),
        "relu": nn.ReLU(),
        "relu6": nn.ReLU6(),
        "leaky relu": nn.LeakyReLU(0.3),
        "negative slope": nn.LeakyReLU(-0.3),
        "hardtanh": nn.Hardtanh(-0.5, 0.3),
        "elu": nn.ELU(1.7),
        "selu": nn.SELU(),
        "celu": nn.CELU(0.7),
        "softplus": nn.Softplus(),
        "sharp softplus": nn.Softplus(beta=3.3, threshold=2.0),
        "gelu": nn.GELU(),
        "gelu by tanh": nn.GELU("tanh"),
        "tanh": nn.Tanh(),
        "sigmoid": nn.Sigmoid(),
        "log sigmoid": nn.LogSigmoid(),
        "silu": nn.SiLU(),
        "mish": nn.Mish(),
        "hardsigmoid": nn.Hardsigmoid(),
        "hardswish": nn.Hardswish(),
        "prelu": nn.PReLU(6),
        "threshold": nn.Threshold(0.1, 0.1),
        "full like": lambda x: x + torch.full_like(x, 0.3),
        "erf": torch.erf,
        "sin": torch.sin,
        "cos": torch.cos,
        "atan": torch.atan,
        "softmax": nn.Softmax(1),
        "log softmax": nn.LogSoftmax(1),
        "layer norm": nn.LayerNorm(6),
        "layer norm without weights": nn.LayerNorm(6, elementwise_affine=False),
        "rms norm": nn.RMSNorm(6),
        "rms norm with eps": nn.RMSNorm(6, eps=0.1),
        "exp": torch.exp,
        "log": lambda x: (x * x + 0.1).log(),
        "sqrt": lambda x: (x * x + 0.1).sqrt(),
        "rsqrt": lambda x: (x * x + 0.1).rsqrt(),
        "reciprocal": lambda x: (x * x + 0.1).reciprocal(),
        "square": torch.square,
        "power": lambda x: (x * x + 0.1) ** 1.7,
        "where": lambda x: torch.where(x > 0.1, x, 0.3 * x.flip(1)),
        "comparisons": lambda x: x.where(x >= -1, 2 * x).where(x <= 1, 3 * x).where(x < 1.5, x.new_tensor(0.3)),
    },
    LINE: {
        "conv1d": nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2),
        "conv1d without bias": nn.Conv1d(4, 2, 2, bias=False),
        "transposed conv1d": nn.ConvTranspose1d(4, 6, 3, stride=3, padding=1, output_padding=2, groups=2),
        "max pool": nn.MaxPool1d(3, stride=2, padding=1),
        "avg pool": nn.AvgPool1d(3, stride=2, padding=1),
        "adaptive pool": nn.AdaptiveAvgPool1d(4),
        "constant padding": nn.ConstantPad1d((1, 2), 0.3),
        "reflect": nn.ReflectionPad1d((2, 1)),
        "replicate": nn.ReplicationPad1d((2, 1)),
        "circular": nn.CircularPad1d((2, 1)),
        "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
        "glu": nn.GLU(1),
        "attention": lambda x: F.scaled_dot_product_attention(x, x.flip(1), 2 * x),
        "scaled attention": lambda x: F.scaled_dot_product_attention(x, x.flip(1), x, attn_mask=MASK.to(x), scale=0.3),
        "masked attention": lambda x: F.scaled_dot_product_attention(x, x, x.flip(1), attn_mask=MASK.T > -0.5),
    },
    IMAGE: {
        "conv2d": nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        "depthwise": nn.Conv2d(4, 8, 3, padding="same", groups=4),
        "circular conv2d": nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular"),
        "transposed conv2d": nn.ConvTranspose2d(4, 6, 3, stride=(2, 1), padding=1, dilation=(1, 2), groups=2),
        "batch norm 2d": nn.BatchNorm2d(4),
        "batch norm without weights": nn.BatchNorm2d(4, affine=False),
        "max pool 2d": nn.MaxPool2d(3, stride=2, padding=1),
        "dilated max pool": nn.MaxPool2d(2, dilation=2, ceil_mode=True),
        "avg pool 2d": nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True),
        "avg pool without padding": nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
        "avg pool divisor": nn.AvgPool2d(2, divisor_override=3),
        "global pool": nn.AdaptiveAvgPool2d(1),
        "uneven pool": nn.AdaptiveAvgPool2d((4, 3)),
        "uneven max pool": nn.AdaptiveMaxPool2d((4, 3)),
        "zero padding": nn.ZeroPad2d((1, -1, 0, 2)),
        "reflect 2d": nn.ReflectionPad2d((2, 1, 1, 0)),
        "replicate 2d": nn.ReplicationPad2d((2, 1, 1, 0)),
        "circular 2d": nn.CircularPad2d((2, 1, 1, 0)),
        "nearest": nn.Upsample(scale_factor=2),
        "bilinear": nn.Upsample(size=(9, 10), mode="bilinear"),
        "pixel shuffle": nn.PixelShuffle(2),
        "channel shuffle": nn.ChannelShuffle(2),
        "im2col": nn.Unfold((2, 3), dilation=(2, 1), padding=1, stride=2),
        "mean": lambda x: x.mean((2, 3)),
        "mean of channels": lambda x: x.mean(1, keepdim=True),
        "sum": lambda x: x.sum((1, -1)),
        "cumsum": lambda x: x.cumsum(-2),
        "add": lambda x: torch.add(x, x.flip(1), alpha=0.3) + 1.7,
        "sub": lambda x: torch.sub(x, x.flip(1), alpha=0.3) - MATRIX.to(x),
        "number minus x": lambda x: 1.3 - x,
        "rsub": lambda x: torch.rsub(x, x.flip(2), alpha=0.3),
        "mul": lambda x: 0.3 * x * MATRIX.to(x),
        "div": lambda x: x / 0.3 / x.new_tensor([[[1.0]], [[2.0]], [[3.0]], [[7.0]]]),
        "neg": torch.neg,
        "broadcast": lambda x: x + x[:, :1, :, :1],
        "constant rows": lambda x: torch.cat([x, x.new_full((x.shape[0], 1, 6, 7), 0.3)], 1),
        "one row": lambda x: torch.cat([MATRIX.to(x).expand(x.shape[0], 1, 6, 7), x], 1),
        "stack": lambda x: torch.stack([x, 2 * x], -1),
        "reshape": lambda x: x.reshape(-1, 6, 28),
        "permute": lambda x: x.permute(0, 2, -1, 1),
        "transpose": lambda x: x.transpose(-1, 1),
        "slice": lambda x: x[:, :, 1:-1:2, -3:],
        "select": lambda x: x[:, -1],
        "squeeze": lambda x: x[:, :1].squeeze(1),
        "unsqueeze": lambda x: x[:, None],
        "expand": lambda x: x[:, :1].expand(-1, 3, -1, -1),
        "repeat": lambda x: x.repeat(1, 2, 1, 3),
        "index select": lambda x: x.index_select(-1, torch.tensor([3, 0, 3])),
        "roll": lambda x: x.roll(2, -1),
        "flip": lambda x: x.flip((1, -1)),
        "unbind": lambda x: x.unbind(2)[-1],
        "split": lambda x: x.split(4, -1)[1],
        "chunk": lambda x: x.chunk(3, 2)[1],
        "windows": lambda x: x.unfold(2, 3, 2),
        "clone": lambda x: x.clone(memory_format=torch.channels_last),
        "detach": lambda x: x.detach(),
        "round trip": lambda x: x.to(torch.float32).to(x.dtype),
        "prelu 2d": nn.PReLU(4),
        "clamp": lambda x: x.clamp(-0.1, 0.2),
        "clamp min": lambda x: x.clamp_min(0.1),
        "clamp max": lambda x: x.clamp_max(0.1),
        "abs": torch.abs,
        "minimum": lambda x: torch.minimum(x, 0.3 * x.flip(1)),
        "maximum": lambda x: torch.maximum(x, x.new_tensor(0.3)),
        "amax": lambda x: x.amax((2,)),
        "amin": lambda x: x.amin((1, -1), keepdim=True),
        "max": lambda x: x.max(1).values,
        "min": lambda x: x.min(-1, keepdim=True).values,
        "sort": lambda x: x.reshape(x.shape[0], 2, 2, 42).sort(2).values,
        "descending": lambda x: x.sort(-1, descending=True).values,
        "topk": lambda x: x.topk(3, 2).values,
        "matmul": lambda x: x @ MATRIX.T.to(x),
        "matmul from the left": lambda x: MATRIX.T.to(x) @ x,
        "group norm": nn.GroupNorm(2, 4),
        "group norm without weights": nn.GroupNorm(2, 4, affine=False),
        "layer norm 2d": nn.LayerNorm((6, 7)),
        "var": lambda x: x.var((1, 3)),
        "biased var": lambda x: x.var(2, correction=0, keepdim=True),
        "channels last": lambda x: F.adaptive_avg_pool2d(x.contiguous(memory_format=torch.channels_last), 1),
        "norm": lambda x: torch.linalg.vector_norm(x, dim=(1, 2)),
    },
}  # fmt: skip


class Bundle(nn.Module):
    """All functions of one input, next to each other: one capture for a whole table."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions
        self.layers = nn.ModuleList(f for f in functions if isinstance(f, nn.Module))

    def forward(self, x):
        return torch.cat([function(x).flatten(1) for function in self.functions], 1)


def session_of(model, forms=FORMS):
    """ONNX Runtime with its optimizer, as users run files."""
    writer = Writer(exact=forms is FORMS)
    x = writer.input("x", torch.float32, (-1, *model.shape))
    values = write_graph(model, x.to(model.dtype), forms)
    content = writer.to_bytes(y=values[model.graph_module.graph.output_node()])
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def logits_of(session, x):
    return torch.from_numpy(session.run(["y"], {"x": x.numpy()})[0])


def settled(module, seed=0):
    """Statistics and weights of batch norm that are not 0 and 1."""
    draw = torch.Generator().manual_seed(seed)
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point():
            tensor.data.copy_(torch.rand(tensor.shape, generator=draw) - (0.5 if tensor.dim() > 1 else -0.1))
    return module.eval()


PRECISIONS = [
    (FORMS, torch.float64),
    pytest.param(FORMS, torch.float32, marks=pytest.mark.slow),
    pytest.param(FAST_FORMS, torch.float32, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("forms", "dtype"), PRECISIONS, ids=["exact", "exact in float32", "fast"])
@pytest.mark.parametrize("shape", CASES)
def test_forms_agree_with_pytorch(shape, forms, dtype):
    cases = CASES[shape]
    module = settled(Bundle(list(cases.values()))).to(dtype)
    session = session_of(capture(module, shape, dtype=dtype), forms)
    draw = torch.Generator().manual_seed(1)
    tolerance = 1e-13 if dtype == torch.float64 else 2e-5
    for batch in (1, 4):
        x = 2 * torch.randn(batch, *shape, generator=draw)
        outputs = logits_of(session, x)
        with torch.no_grad():
            expected = [function(x.to(dtype)).flatten(1) for function in cases.values()]
        parts = outputs.split([part.shape[1] for part in expected], 1)
        for name, part, truth in zip(cases, parts, expected, strict=True):
            error = float((part - truth).abs().max() / truth.abs().max())
            assert error <= tolerance, (name, error)


def test_every_certified_operation_has_a_form():
    assert RULES.keys() <= FORMS.keys()


# Rules count at least 8 roundings of the slope times |x|, or of 1 more where the function is not 0 at 0.
SMOOTH = {
    torch.erf: torch.special.erf,
    torch.atan: torch.atan,
    torch.tanh: torch.tanh,
    torch.sigmoid: lambda x: torch.where(x > 0, 1 / (1 + (-x).exp()), x.exp() / (1 + x.exp())),
    F.softplus: lambda x: torch.where(x > 20, x, torch.logaddexp(x, torch.zeros(()))),
    F.elu: lambda x: torch.where(x > 0, x, torch.expm1(x.clamp_max(0))),
    F.gelu: lambda x: x * torch.special.ndtr(x),
    torch.sin: lambda x: (x / 2).sin() * (x / 2).cos() * 2,
}


def test_smooth_functions_are_as_accurate_as_certificates_assume():
    session = session_of(capture(Bundle(list(SMOOTH)), (1,), dtype=torch.float64))
    x = torch.cat([torch.linspace(-40, 40, 4001), torch.logspace(-30, 2, 300), -torch.logspace(-30, 2, 300)])[:, None]
    outputs = logits_of(session, x)
    for (function, truth), column in zip(SMOOTH.items(), outputs.split(1, 1), strict=True):
        size = x.double().abs() + float(function(torch.zeros(1)) != 0)
        assert ((column - truth(x.double())).abs() <= 8 * 2.0**-53 * size).all(), function


@pytest.mark.parametrize("number", [1 + 1e-9, 0.3])
def test_the_runtime_does_not_round_numbers_to_float32(number):
    functions = [
        lambda x: x * number,
        lambda x: x / number,
        lambda x: x @ MATRIX[:, :6].to(x) * number,
        lambda x: x / number @ MATRIX[:, :6].to(x),
        lambda x: torch.addmm(x.new_zeros(6), x, MATRIX[:, :6].to(x), alpha=number),
        lambda x: x * x.new_tensor([[number]]),
    ]
    module = Bundle([lambda x, f=f: f(x.abs()).abs() for f in functions])  # optimizers need neighbors
    session = session_of(capture(module, FLAT, dtype=torch.float64))
    x = torch.rand(5, 6, generator=torch.Generator().manual_seed(0))
    assert (logits_of(session, x) - module(x.double())).abs().max() <= 1e-14


LAYERS = {
    "conv": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2),
    "down": lambda: nn.Sequential(nn.Conv2d(4, 4, 2, stride=2), nn.Upsample(scale_factor=2)),
    "up": lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 2, stride=2), nn.AvgPool2d(2)),
    "norm": lambda: nn.BatchNorm2d(4),
    "pool": lambda: nn.MaxPool2d(3, stride=1, padding=1),
    "circular": lambda: nn.Sequential(nn.CircularPad2d(1), nn.AvgPool2d(3, stride=1)),
    "relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "softplus": nn.Softplus,
    "elu": nn.ELU,
    "shuffle": lambda: nn.ChannelShuffle(2),
}


@settings(max_examples=4, deadline=None, derandomize=True)
@given(names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_random_networks_agree_with_pytorch(names, seed):
    net = settled(nn.Sequential(*(LAYERS[name]() for name in names), nn.Flatten(), nn.Linear(64, 3)), seed).double()
    x = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(seed))
    outputs = logits_of(session_of(capture(net, (4, 4, 4), dtype=torch.float64)), x)
    with torch.no_grad():
        expected = net(x.double())
    assert (outputs - expected).abs().max() <= 1e-12 * expected.abs().max()


class UsesIndices(nn.Module):
    def forward(self, x):
        return x.sort(1).indices.to(x.dtype)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Bundle([torch.atanh]), r"^aten\.atanh\.default \(.*\) has no ONNX form$"),
        (Bundle([lambda x: x**x]), "expected a tensor to the power of a number"),
        (UsesIndices(), r"aten\.sort\.default \(.*x\.sort.*\) has no ONNX form: the network reads output 1 of it"),
        (Bundle([lambda x: torch.linalg.vector_norm(x, 1, dim=1, keepdim=True)]), "expected the l2 norm, got order 1"),
        (Bundle([lambda x: x - x.mean(0)]), "it combines the inputs of a batch"),
    ],
)
def test_operations_without_a_form_are_refused(module, sentence):
    with pytest.raises(InputError, match=sentence):
        session_of(capture(module, (3,)))


def test_types_without_a_form_are_refused():
    with pytest.raises(InputError, match=r"onnx: expected float32, .*, got torch\.float16"):
        session_of(capture(Bundle([lambda x: x.half().float()]), (3,)))


def test_files_are_limited_to_two_gigabytes(monkeypatch):
    monkeypatch.setattr("atoll.export.writer._MAX_BYTES", 50)
    session_of(capture(nn.Linear(3, 3), (3,)))  # 48 bytes
    with pytest.raises(InputError, match=r"at most 2 GB, the limit of the format, got 64 bytes"):
        session_of(capture(nn.Linear(3, 4), (3,)))


def test_equal_constants_are_stored_once():
    writer = Writer()
    x = writer.input("x", torch.float64, (-1, 3))
    y = x + torch.ones(3) + torch.ones(3) + math.pi + math.pi
    tables = [tensor.numel() for tensor in writer.constants.values()]
    assert sorted(tables) == [2, 3]
    content = writer.to_bytes(y=y.of_shape((-1, 3)))
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    outputs = session.run(["y"], {"x": np.zeros((2, 3))})[0]
    np.testing.assert_allclose(outputs, 2 + 2 * math.pi, rtol=1e-15)
