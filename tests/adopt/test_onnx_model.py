"""ONNX files against ONNX Runtime and the original modules; damaged and hostile files are refused in one sentence."""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from atoll.adopt.onnx_model import read_onnx
from atoll.errors import InputError
from atoll.export import export_model
from atoll.graph import capture
from atoll.graph.stored import StoredGraph, store_graph
from atoll.models.timm_adapter import import_timm
from models.cases import MODELS
from models.timm_support import HAS_TIMM

HAS_EXPORTER = importlib.util.find_spec("onnxscript") is not None  # the default exporter of PyTorch needs it
needs_exporter = pytest.mark.skipif(not HAS_EXPORTER, reason="onnxscript is not installed")
BATCH = {0: torch.export.Dim("batch")}


def export(net, x, path, *, dynamo=False, fixed=False):
    """Write a file with one of PyTorch's exporters."""
    shapes = {"dynamic_shapes": (BATCH,)} if dynamo else {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(net, (x,), str(path), dynamo=dynamo, **({} if fixed else shapes))
    finally:
        logging.disable(previous)


def run_onnx(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name, output = session.get_inputs()[0].name, session.get_outputs()[0].name
    return torch.from_numpy(session.run([output], {name: x.numpy()})[0])


def assert_close(logits, expected):
    torch.testing.assert_close(logits.detach(), expected.detach(), rtol=0, atol=1e-5 * expected.abs().max().item())


def assert_stored(net, shape, x):
    """The stored graph has the outputs of the module, for other batch sizes than that of the capture as well."""
    data, tensors = store_graph(net, shape)
    stored = StoredGraph(data)
    stored.load_state_dict(tensors)
    assert torch.equal(stored(x), net(x))
    assert torch.equal(stored(x[:1]), net(x[:1]))


class Attention(nn.Sequential):
    """Tokens, a class token and attention with the batch on the second axis, as torchvision's transformers have."""

    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.rand(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        tokens = self.patches(x).reshape(x.shape[0], 8, 4).permute(0, 2, 1)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], 1)
        tokens, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.head(tokens[:, 0])


class Convolutions(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.BatchNorm2d(4),
            nn.Hardswish(),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.MaxPool2d(2),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 5),
        )


EXPORTERS = [pytest.param(False, id="torchscript"), pytest.param(True, id="dynamo", marks=needs_exporter)]


@pytest.mark.parametrize("dynamo", EXPORTERS)
@pytest.mark.parametrize("build", [Attention, Convolutions])
def test_files_of_the_exporters(build, dynamo, tmp_path):
    net, x = build().eval(), torch.rand(5, 3, 8, 8)
    export(net, x[:2], tmp_path / "net.onnx", dynamo=dynamo)
    model = read_onnx(tmp_path / "net.onnx")
    assert (model.input_shape, model.input_dtype, model.fixed_batch) == ((3, 8, 8), torch.float32, None)
    assert_close(model(x), run_onnx(tmp_path / "net.onnx", x))
    assert_stored(model, (3, 8, 8), x)
    z = x.clone().requires_grad_()
    gradients = [torch.autograd.grad(f(z).square().sum(), z)[0] for f in (model, net)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert sum(p.numel() for p in model.parameters()) <= sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("dynamo", EXPORTERS)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_fixed_batch_size_is_removed(batch, dynamo, tmp_path):
    net, x = Attention().eval(), torch.rand(5, 3, 8, 8)
    export(net, x[:batch], tmp_path / "net.onnx", dynamo=dynamo, fixed=True)
    model = read_onnx(tmp_path / "net.onnx")
    assert model.fixed_batch == batch
    assert_close(model(x[:batch]), run_onnx(tmp_path / "net.onnx", x[:batch]))
    assert_close(model(x), net(x))
    if batch == 1:
        assert_stored(model, (3, 8, 8), x)


def test_own_exports_have_the_same_logits(tmp_path):
    net, x = nn.Sequential(*list(Convolutions())[:4], nn.Flatten(), nn.Linear(64, 3)).eval(), torch.rand(5, 3, 8, 8)
    export_model(net, x, tmp_path / "net.onnx")
    model = read_onnx(tmp_path / "net.onnx")
    assert model.output_name == "logits"
    assert_close(model(x), net(x))
    captured = capture(model, (3, 8, 8))
    assert captured.exact


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("dynamo", EXPORTERS)
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_every_model_family(case, dynamo, fixed, tmp_path):
    if "orthogonal" in case.name or (not dynamo and case.name == "hybrid-pool"):
        pytest.skip("the exporter fails, or it rounds sizes so that ONNX Runtime fails")
    net, x = case.build().eval(), case.images(5)
    export(net, x[: 1 if fixed else 3], tmp_path / "net.onnx", dynamo=dynamo, fixed=fixed)
    model = read_onnx(tmp_path / "net.onnx")
    assert_close(model(x), net(x))
    assert_close(model(x[:1]), run_onnx(tmp_path / "net.onnx", x[:1]))
    assert_stored(model, case.input_shape, x)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TIMM, reason="timm is not installed")
@pytest.mark.parametrize("dynamo", EXPORTERS)
@pytest.mark.parametrize(
    "name",
    ["resnet18", "mobilenetv3_small_050", "efficientnet_lite0", "convnext_atto", "vit_tiny_patch16_224", "regnety_002"],
)
def test_timm_networks(name, dynamo, tmp_path):
    options = {"img_size": 64} if "vit" in name else {}
    net, x = import_timm().create_model(name, num_classes=7, **options).eval(), torch.rand(3, 3, 64, 64)
    export(net, x[:1], tmp_path / "net.onnx", dynamo=dynamo, fixed=True)
    model = read_onnx(tmp_path / "net.onnx")
    assert_close(model(x), net(x))
    assert_close(model(x[:1]), run_onnx(tmp_path / "net.onnx", x[:1]))
    assert_stored(model, (3, 64, 64), x)


LIGHT = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("*.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize("path", LIGHT, ids=lambda path: path.stem)
def test_networks_that_onnx_ships(path):
    """Well-known networks with made-up weights, opset 9."""
    if "vgg" in path.name:
        pytest.skip("500 MB of weights")
    model = read_onnx(path)
    x = torch.rand(1, *model.input_shape)
    assert_close(model(x), run_onnx(path, x))


# --- files that are written by hand

FLOAT = TensorProto.FLOAT
make = helper.make_node
WEIGHT = numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(4, 3), "W")
MATMUL = make("MatMul", ["x", "W"], ["y"], name="product")


def values(*names, dtype=FLOAT, shape=("batch", 4)):
    return [helper.make_tensor_value_info(name, dtype, shape) for name in names]


def model_of(nodes=(MATMUL,), tensors=(WEIGHT,), inputs=None, outputs=None, opset=18, functions=(), domains=()):
    graph = helper.make_graph(nodes, "net", inputs or values("x"), outputs or values("y", shape=None), tensors)
    imports = [helper.make_operatorsetid("", opset), *(helper.make_operatorsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9, functions=functions)


def save(path, **parts):
    path.write_bytes(model_of(**parts).SerializeToString())
    return path


def ints(name, *numbers):
    return numpy_helper.from_array(np.array(numbers, dtype=np.int64), name)


def scalar(name, number):
    return numpy_helper.from_array(np.array(number), name)


def test_computed_shapes_keep_the_batch_size(tmp_path):
    nodes = [
        make("Shape", ["x"], ["shape"]),
        make("Gather", ["shape", "zero"], ["batch"], axis=0),
        make("Unsqueeze", ["batch", "axis"], ["row"]),
        make("Concat", ["row", "rest"], ["sizes"], axis=0),
        make("Reshape", ["x", "sizes"], ["pairs"]),
        make("ConstantOfShape", ["sizes"], ["ones"], value=helper.make_tensor("v", FLOAT, [1], [1.0])),
        make("Add", ["pairs", "ones"], ["sum"]),
        make("Shape", ["sum"], ["shape2"]),
        make("Slice", ["shape2", "axis", "one"], ["first"]),
        make("Concat", ["first", "minus"], ["flat"], axis=0),
        make("Cast", ["batch"], ["count"], to=FLOAT),
        make("Div", ["count", "count"], ["unit"]),
        make("Mul", ["sum", "unit"], ["scaled"]),
        make("Reshape", ["scaled", "flat"], ["y"]),
    ]
    tensors = [scalar("zero", 0), ints("axis", 0), ints("one", 1), ints("rest", 2, 2), ints("minus", -1)]
    model = read_onnx(save(tmp_path / "net.onnx", nodes=nodes, tensors=tensors))
    x = torch.rand(5, 4)
    torch.testing.assert_close(model(x), x + 1)
    torch.testing.assert_close(model(x), run_onnx(tmp_path / "net.onnx", x))
    data, tensors = store_graph(model, (4,))
    for batch in (x, x[:1]):
        torch.testing.assert_close(StoredGraph(data)(batch), batch + 1)
    assert not tensors  # the numbers are part of the graph


def test_weights_are_parameters_and_other_constants_are_not(tmp_path):
    nodes = [
        make("MatMul", ["x", "onnx::MatMul_1"], ["a"]),
        make("Mul", ["a", "factor"], ["b"]),
        make("Clip", ["b", "low", "high"], ["c"]),
        make("Constant", [], ["shift"], value=numpy_helper.from_array(np.ones(3, np.float32))),
        make("Add", ["c", "shift"], ["d"]),
        make("Gather", ["d", "order"], ["e"], axis=1),
        make("Add", ["e", "fc.bias"], ["f"]),
        make("Add", ["f", "fc"], ["y"]),
    ]
    bias = numpy_helper.from_array(np.ones(3, np.float32), "fc.bias")
    clash = numpy_helper.from_array(np.ones(3, np.float32), "fc")
    weight = numpy_helper.from_array(numpy_helper.to_array(WEIGHT), "onnx::MatMul_1")
    factor, low, high = (scalar(name, np.float32(v)) for name, v in (("factor", 0.5), ("low", 0), ("high", 6)))
    tensors = [weight, bias, clash, factor, low, high, ints("order", 2, 1, 0)]
    path = save(tmp_path / "net.onnx", nodes=nodes, tensors=tensors)
    model = read_onnx(path)
    assert sorted(name for name, _ in model.named_parameters()) == ["fc.bias", "fc_1", "onnx_MatMul_1"]
    assert sorted(name for name, _ in model.named_buffers()) == ["order", "shift"]
    x = torch.rand(5, 4)
    assert_close(model(x), run_onnx(path, x))
    data, tensors = store_graph(model, (4,))
    assert "aten.clamp.default" in {node["operation"] for node in data["nodes"]}  # with numbers, not tensors
    assert {"fc.bias", "fc_1", "onnx_MatMul_1"} <= tensors.keys()


def test_quantized_files_have_zero_gradients(tmp_path):
    nodes = [
        make("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        make("DequantizeLinear", ["q", "scale", "zero"], ["r"]),
        make("DequantizeLinear", ["w", "scales"], ["weight"], axis=1),
        make("MatMul", ["r", "weight"], ["y"]),
    ]
    weight = numpy_helper.from_array(np.arange(-6, 6, dtype=np.int8).reshape(4, 3), "w")
    scales = numpy_helper.from_array(np.array([0.1, 0.2, 0.3], np.float32), "scales")
    tensors = [weight, scales, scalar("scale", np.float32(0.01)), scalar("zero", np.uint8(3))]
    model = read_onnx(save(tmp_path / "net.onnx", nodes=nodes, tensors=tensors))
    x = torch.rand(5, 4).requires_grad_()
    logits = model(x)
    assert_close(logits, run_onnx(tmp_path / "net.onnx", x.detach()))
    assert not torch.autograd.grad(logits.sum(), x)[0].any()
    assert not list(model.parameters())


def test_functions_are_inlined(tmp_path):
    double = helper.make_function(
        "own", "Double", ["a"], ["b"], [make("Add", ["a", "a"], ["b"])], [helper.make_operatorsetid("", 18)]
    )
    nodes = [make("Double", ["x"], ["z"], domain="own"), make("MatMul", ["z", "W"], ["y"])]
    path = save(tmp_path / "net.onnx", nodes=nodes, functions=[double], domains=["own"])
    x = torch.rand(5, 4)
    assert_close(read_onnx(path)(x), run_onnx(path, x))


def external(folder, location, **entries):
    """A weight whose data is in another file."""
    tensor = TensorProto(name="W", data_type=FLOAT, dims=[4, 3], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def test_data_in_the_folder_of_the_file_is_read(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"junk" + WEIGHT.raw_data)
    path = save(tmp_path / "net.onnx", tensors=[external(tmp_path, "weights.bin", offset=4, length=48)])
    x = torch.rand(5, 4)
    assert_close(read_onnx(path)(x), x @ torch.arange(12.0).reshape(4, 3))


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/passwd", "link.bin", "inner/weights.bin", "", "."])
def test_data_outside_the_folder_is_refused(location, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "weights.bin").write_bytes(WEIGHT.raw_data)
    (folder / "link.bin").symlink_to(tmp_path / "weights.bin")
    (folder / "inner").symlink_to(tmp_path)
    path = save(folder / "net.onnx", tensors=[external(tmp_path, location)])
    with pytest.raises(InputError, match=r"outside the folder|missing or damaged"):
        read_onnx(path)


@pytest.mark.parametrize("entries", [{"offset": 8}, {"length": 12}, {"offset": -48}, {"offset": "x"}])
def test_wrong_sizes_of_external_data_are_refused(entries, tmp_path):
    (tmp_path / "weights.bin").write_bytes(WEIGHT.raw_data)
    path = save(tmp_path / "net.onnx", tensors=[external(tmp_path, "weights.bin", **entries)])
    with pytest.raises(InputError, match=r"'W',? (is missing or damaged|cannot be read)"):
        read_onnx(path)


def test_as_strided_in_a_file_for_one_image_works_for_any_batch_size(tmp_path):
    """PyTorch's exporter writes it as places in the flat values."""
    places = np.arange(4)[::-1].reshape(1, 2, 2)
    tensors = [numpy_helper.from_array(np.array(a), n) for n, a in (("flat", [-1]), ("at", places), ("rows", [1, 4]))]
    nodes = [
        make("Reshape", ["x", "flat"], ["a"]),
        make("Gather", ["a", "at"], ["b"], axis=0),
        make("Reshape", ["b", "rows"], ["y"]),
    ]
    model = read_onnx(save(tmp_path / "net.onnx", nodes=nodes, tensors=tensors, inputs=values("x", shape=(1, 4))))
    x = torch.rand(3, 4)
    assert torch.equal(model(x), x.flip(1))
    assert_stored(model, (4,), x)


def tensor(**fields):
    return TensorProto(**{"name": "W", "data_type": FLOAT, **fields})


def function(name, *calls):
    nodes = [make(call, ["a"], ["b"], domain="own") for call in calls]
    for i, node in enumerate(nodes):
        node.input[0], node.output[0] = f"v{i}" if i else "a", f"v{i + 1}" if i + 1 < len(nodes) else "b"
    return helper.make_function("own", name, ["a"], ["b"], nodes, [helper.make_operatorsetid("own", 1)])


CALL = make("F0", ["x"], ["y"], domain="own")
BRANCH = helper.make_graph([], "branch", [], values("z"))
HUGE = tensor(dims=[2**40, 2**20], raw_data=b"1234")
HUGE_EXTERNAL = tensor(dims=[2**40], data_location=TensorProto.EXTERNAL)
SHORT = tensor(dims=[4, 3], raw_data=b"1234")
FEW = tensor(dims=[4, 3], float_data=[1.0])
DOUBLE = [
    make("Concat", ["x" if i == 0 else f"v{i}"] * 2, ["y" if i == 40 else f"v{i + 1}"], axis=1) for i in range(41)
]
HOSTILE = {
    "two inputs": ({"inputs": values("x", "z")}, r"expected one input, got 2 \(x, z\)"),
    "two outputs": (
        {"nodes": [MATMUL, make("Neg", ["y"], ["z"])], "outputs": values("y", "z")},
        r"it has 2 outputs \(y, z\); choose one",
    ),
    "labels": ({"outputs": values("y", dtype=TensorProto.INT64)}, "no output is floating-point"),
    "bytes": ({"inputs": values("x", dtype=TensorProto.UINT8)}, "the input 'x' is not floating-point"),
    "constant output": ({"nodes": [make("Neg", ["W"], ["y"])]}, "does not depend on the input"),
    "missing": ({"tensors": []}, r"'W' is used before it is computed \(node 'product'\)"),
    "unsorted": ({"nodes": [make("Neg", ["a"], ["y"]), make("Neg", ["x"], ["a"])]}, "'a' is used before"),
    "cycle": ({"nodes": [make("Add", ["x", "y"], ["z"]), make("Neg", ["z"], ["y"])]}, "'y' is used before"),
    "twice": ({"nodes": [MATMUL, MATMUL]}, "'y' is computed twice"),
    "operator": (
        {"nodes": [make("Whatever", ["x"], ["y"], name="n")]}, r"the operator Whatever is not supported \(node 'n'\)"
    ),
    "domain": (
        {"nodes": [make("Relu", ["x"], ["y"], domain="evil")], "domains": ["evil"]}, "operator evil.Relu is not"
    ),
    "branch": (
        {"nodes": [make("If", ["x"], ["y"], then_branch=BRANCH, else_branch=BRANCH)]}, r"'y' \(If\) branches or loops"
    ),
    "attribute": ({"nodes": [make("Relu", ["x"], ["y"], speed=3)]}, "attribute 'speed' of Relu .* is not supported"),
    "type": ({"nodes": [make("Elu", ["x"], ["y"], alpha="1")]}, "attribute 'alpha' of Elu .* has the wrong type"),
    "required": ({"nodes": [make("MaxPool", ["x"], ["y"])]}, "attribute 'kernel_shape' of MaxPool .* is missing"),
    "few inputs": ({"nodes": [make("MatMul", ["x"], ["y"])]}, "1 inputs of MatMul are not supported"),
    "many inputs": ({"nodes": [make("Relu", ["x", "x"], ["y"])]}, "2 inputs of Relu are not supported"),
    "output": ({"nodes": [make("Dropout", ["x"], ["z", "y"])]}, "output 2 of Dropout is not supported"),
    "huge": ({"tensors": [HUGE]}, "'W' .* has too little or too much data"),
    "huge data": ({"tensors": [HUGE_EXTERNAL]}, "its tensors have .* bytes, more than"),
    "short": ({"tensors": [SHORT]}, "'W' .* has too little or too much data"),
    "few numbers": ({"tensors": [FEW]}, "'W' .* has too little or too much data"),
    "strings": ({"tensors": [helper.make_tensor("W", TensorProto.STRING, [1], [b"a"])]}, "data type .* 'W'"),
    "old": ({"opset": 8}, "expected an opset from 9 to"),
    "new": ({"opset": 1000}, "expected an opset from 9 to"),
    "recursion": (
        {"nodes": [CALL], "functions": [function("F0", "F1"), function("F1", "F0")], "domains": ["own"]},
        "call each other without end",
    ),
    "explosion": (
        {"nodes": [CALL], "functions": [function(f"F{i}", *[f"F{i + 1}"] * 9) for i in range(20)], "domains": ["own"]},
        "expand to more than 100,000 nodes",
    ),
    "batch": (
        {"nodes": [make("Softmax", ["x"], ["y"], axis=0)], "inputs": values("x", shape=(2, 4))},
        "the file has a fixed batch size of 2: its outputs depend on the other inputs",
    ),
    "squeezed batch": (
        {"nodes": [make("Reshape", ["x", "S"], ["y"])], "tensors": [ints("S", 4)], "inputs": values("x", shape=(1, 4))},
        "the file has a fixed batch size of 1: its outputs depend on the other inputs",
    ),
    "unknown shape": ({"inputs": values("x", shape=(2, "n"))}, "fixed batch size of 2 and an input of unknown shape"),
    "sizes": ({"inputs": values("x", shape=(1, 5))}, r"\(node 'product', MatMul\)"),
    "other sizes": ({"inputs": values("x", shape=("n", 5))}, r"\(node 'product', MatMul\)"),
    "duplicate names": ({"tensors": [WEIGHT, WEIGHT]}, "two of its tensors have the same name"),
    "negative": ({"tensors": [tensor(dims=[-4, -3], raw_data=bytes(48))]}, "the shape .* 'W' is not supported"),
    "overflow": ({"tensors": [tensor(dims=[2**32, 2**32])]}, "'W' .* has too little or too much data"),
    "empty but huge": ({"tensors": [tensor(dims=[2**62, 0])]}, "it is damaged"),
    "many dimensions": ({"tensors": [tensor(dims=[1] * 5000, raw_data=bytes(4))]}, "it is damaged"),
    "unknown type": ({"tensors": [tensor(data_type=99, dims=[4, 3], raw_data=bytes(48))]}, "data type .* 'W'"),
    "many nodes": ({"nodes": [MATMUL, *[make("Neg", ["x"], ["z"])] * 100_000]}, "more than 100,000 nodes"),
    "loop": ({"nodes": [make("Scan", ["x"], ["y"], body=BRANCH)]}, r"'y' \(Scan\) branches or loops"),
    "huge input": ({"inputs": values("x", shape=("n", 2**40))}, "it computes a value of 4,398,046,511,104 bytes"),
    "huge batch": ({"inputs": values("x", shape=(2**31, 4))}, "it computes a value of 34,359,738,368 bytes"),
    "growth": ({"nodes": DOUBLE}, "it computes a value of [0-9,]+ bytes"),
    "huge kernel": (
        {"nodes": [make("MaxPool", ["x"], ["y"], kernel_shape=[2**40])], "inputs": values("x", shape=("n", 4, 5))},
        r"\(node 'y', MaxPool\)",
    ),
    "escapes": ({"nodes": [make("A\x1b[31m\nB", ["x"], ["y"])]}, r"the operator A\?\[31m\?B is not supported"),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "message"), HOSTILE.values(), ids=HOSTILE)
def test_what_cannot_be_read_is_refused_in_one_sentence(parts, message, tmp_path):
    path = save(tmp_path / "net.onnx", **parts)
    with pytest.raises(InputError, match=f"^cannot read net.onnx: .*{message}") as error:
        read_onnx(path)
    assert "\n" not in str(error.value)


def nested(depth):
    """The bytes of a model with a graph in an attribute of a node of a graph, and so on."""
    content = b""
    for field in [*(6, 5, 1) * depth, 7]:  # the numbers of AttributeProto.g, attribute, node and ModelProto.graph
        size, prefix = len(content), bytearray([field << 3 | 2])
        while size > 127:
            prefix.append(size & 127 | 128)
            size >>= 7
        content = bytes([*prefix, size]) + content
    return content


def sparse():
    model = model_of()
    model.graph.sparse_initializer.add(values=WEIGHT, dims=[4, 3])
    return model.SerializeToString()


WHOLE = model_of().SerializeToString()
FILES = {
    "empty": (b"", "it is not an ONNX file, or it is damaged"),
    "text": (b"not a model", "it is not an ONNX file, or it is damaged"),
    "pickle": (b"\x80\x04junk", "it is not an ONNX file, or it is damaged"),
    "half": (WHOLE[: len(WHOLE) // 2], "it is not an ONNX file, or it is damaged"),
    "nested graphs": (nested(1000), "it is not an ONNX file, or it is damaged"),
    "a name that is not UTF-8": (WHOLE.replace(b"MatMul", b"Mat\xfful"), "is not supported|it is damaged"),
    "sparse": (sparse(), "it has sparse tensors"),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_other_files_are_refused(content, message, tmp_path):
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        read_onnx(tmp_path / "net.onnx")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("node", "tensors"),
    [
        (make("ConstantOfShape", ["S"], ["z"]), [ints("S", 2**40)]),
        (make("Tile", ["x", "S"], ["z"]), [ints("S", 1, 2**40)]),
        (make("Pad", ["x", "S"], ["z"]), [ints("S", 0, 0, 0, 2**40)]),
        (make("Pad", ["x", "S"], ["z"], mode="edge"), [ints("S", 0, 0, 0, 2**40)]),
        (make("Resize", ["x", "", "", "S"], ["z"]), [ints("S", 2, 2**40)]),
        (make("Expand", ["x", "S"], ["z"]), [ints("S", 2**40, 1, 1)]),
        (make("Range", ["zero", "S", "one"], ["z"]), [scalar("S", 2**40), scalar("zero", 0), scalar("one", 1)]),
    ],
    ids=lambda value: getattr(value, "op_type", ""),
)
def test_huge_results_are_refused(node, tensors, tmp_path):
    nodes = [node, make("Shape", ["z"], ["s"]), make("Cast", ["s"], ["f"], to=FLOAT), make("Mul", ["x", "f"], ["y"])]
    path = save(tmp_path / "net.onnx", nodes=nodes, tensors=tensors)
    with pytest.raises(InputError, match=f"is too large .*{node.op_type}"):
        read_onnx(path)


def count_refused(content, cases, path):
    """Damage a file in many ways, and count how often it is refused; files that are read must work."""
    generator = np.random.default_rng(0)
    messages = []
    for case in range(cases):
        damaged = bytearray(content if case % 5 else content[: generator.integers(len(content))])
        for place in generator.integers(len(damaged), size=generator.integers(1, 4)) if damaged else ():
            damaged[place] = generator.integers(256)
        path.write_bytes(damaged)
        try:
            model = read_onnx(path)
        except InputError as error:
            messages.append(str(error))
            continue
        if model.input_shape is not None and None not in model.input_shape:
            assert isinstance(model(torch.zeros(1, *model.input_shape, dtype=model.input_dtype)), torch.Tensor)
    assert not any("\n" in message for message in messages)
    return len(messages)


def test_damaged_files_are_read_or_refused(tmp_path):
    nodes = [
        make("Constant", [], ["c"], value_floats=[1.0, 2.0, 3.0]),
        make("MatMul", ["x", "W"], ["a"]),
        make("Add", ["a", "c"], ["b"]),
        make("Reshape", ["b", "S"], ["d"]),
        make("Softmax", ["d"], ["y"], axis=-1),
    ]
    content = model_of(nodes=nodes, tensors=[WEIGHT, ints("S", -1, 3)]).SerializeToString()
    assert 100 < count_refused(content, 300, tmp_path / "net.onnx") < 300


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", EXPORTERS)
@pytest.mark.parametrize("build", [Attention, Convolutions])
def test_damaged_files_of_the_exporters_are_read_or_refused(build, dynamo, tmp_path):
    export(build().eval(), torch.rand(2, 3, 8, 8), tmp_path / "net.onnx", dynamo=dynamo)
    content = (tmp_path / "net.onnx").read_bytes()
    assert 100 < count_refused(content, 800, tmp_path / "net.onnx") < 800
