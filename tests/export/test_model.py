"""Exported classifiers, run by ONNX Runtime, against PyTorch."""

from functools import partial

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from atoll.errors import CaptureError, InputError, UnsoundError
from atoll.export import Metadata, export_model
from atoll.export.model import OnnxClassifier, compare
from atoll.graph import capture
from atoll.models import MLP, LiResNet, MobileNetV2, PreActResNet, SmallConvNet, Timm, ViT, WideResNet
from atoll.models.timm_adapter import import_timm
from models.timm_support import HAS_TIMM


class Patches(nn.Module):
    """Not a model of the library: patches, attention, normalization, an output that is scaled by a number."""

    def __init__(self):
        super().__init__()
        self.input_shape = (3, 8, 8)
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, activation="gelu", batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        return 1.7 * self.head(self.block(tokens).mean(1))


class Layers(nn.Sequential):
    """Convolutions up and down, pooling, batch norm and smooth functions."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.SiLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
            nn.GELU(),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
            nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=4),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(16, 5),
        )
        self.input_shape = (3, 8, 8)


def timm_model(name, **options):
    import_timm()
    return Timm((3, 32, 32), 5, name=name, options=options)


def slow(build, *marks):
    return pytest.param(build, marks=[pytest.mark.slow, *marks])


TINY = {"input_shape": (3, 16, 16), "num_classes": 5}
needs_timm = pytest.mark.skipif(not HAS_TIMM, reason="timm is not installed")

# A new kind of network that can be exported joins by one line.
NETS = [
    Patches,
    Layers,
    slow(partial(MLP, (2,), 3, bounds=None)),
    slow(partial(SmallConvNet, **TINY, activation="softplus", batch_norm=True)),
    slow(partial(PreActResNet, **TINY)),
    slow(partial(WideResNet, **TINY, depth=10, widen_factor=1)),
    slow(partial(MobileNetV2, **TINY)),
    slow(partial(ViT, **TINY, patch_size=4, width=16, depth=2, heads=2)),
    slow(partial(LiResNet, **TINY, depth=2, width=4, features=8)),
    slow(partial(timm_model, "resnet18"), needs_timm),
    slow(partial(timm_model, "vit_tiny_patch16_224", img_size=32), needs_timm),
    slow(partial(timm_model, "convnext_atto"), needs_timm),
]


@pytest.mark.parametrize("build", NETS)
def test_files_agree_with_pytorch(build, tmp_path):
    net = build().train()
    shape = tuple(net.input_shape)
    exported = export_model(net, torch.rand(3, *shape), tmp_path / "net.onnx")
    assert net.training  # the mode is restored
    net.eval()
    assert (exported.outputs, exported.checked, exported.eps) == (("logits", "label"), 3, None)
    assert exported.difference < 1e-5
    assert exported.bytes == (tmp_path / "net.onnx").stat().st_size
    onnx.checker.check_model(tmp_path / "net.onnx", full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    for batch in (1, 7):
        x = 2 * torch.rand(batch, *shape) - 0.5
        with torch.no_grad():
            truth = net(x)
        logits, label = session.run(["logits", "label"], {"x": x.numpy()})
        assert (torch.from_numpy(logits) - truth).abs().max() <= 1e-5 * truth.abs().max()
        assert label.tolist() == truth.argmax(1).tolist()


def test_files_use_the_operators_of_runtimes_in_float32_only(tmp_path):
    operators = {}
    for dtype in (torch.float32, torch.float64):
        exported = export_model(Layers().to(dtype), torch.rand(2, 3, 8, 8), tmp_path / "net.onnx")
        operators[dtype] = {node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node}
        assert exported.difference < (1e-5 if dtype == torch.float32 else 1e-13)
    assert {"Conv", "ConvTranspose", "MaxPool", "Erf", "Sigmoid"} <= operators[torch.float32]
    assert not operators[torch.float64] & {"Conv", "ConvTranspose", "MaxPool", "Erf", "Sigmoid"}


class Unwritable(nn.Linear):
    def forward(self, x):
        return torch.atanh(super().forward(x))


class Random(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn_like(x)


@pytest.mark.parametrize(
    ("model", "options", "error", "sentence"),
    [
        (Unwritable(3, 3), {}, InputError, r"^aten\.atanh\.default \(.*torch\.atanh.*\) has no ONNX form$"),
        (Random(3, 3), {}, CaptureError, "draws random numbers"),
        (nn.Linear(3, 3).bfloat16(), {}, InputError, "expected weights of float32 or float64, got torch.bfloat16"),
        (nn.Linear(3, 3), {"x": torch.rand(0, 3)}, InputError, "x: expected at least one point"),
        (nn.Linear(3, 3), {"metadata": Metadata(classes="ab")}, InputError, "expected 3 names, one per logit, got 2"),
    ],
)
def test_what_cannot_be_exported_is_refused(model, options, error, sentence, tmp_path):
    arguments = {"x": torch.rand(2, 3), "path": tmp_path / "net.onnx"} | options
    with pytest.raises(error, match=sentence):
        export_model(model, **arguments)
    assert not list(tmp_path.iterdir())


def test_a_file_that_disagrees_is_not_written(tmp_path, monkeypatch):
    net, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(net.state_dict())
    with torch.no_grad():
        other.bias[0] += 0.01
    file = OnnxClassifier.write(capture(other, (3,)), exact=False)
    monkeypatch.setattr(OnnxClassifier, "write", lambda *_, **__: file)
    x = torch.rand(4, 3)
    with pytest.raises(UnsoundError, match="does not agree with the model on 4 points"):
        export_model(net, x, tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())
    assert export_model(other, x, tmp_path / "net.onnx").difference < 1e-6


@pytest.mark.parametrize("wrong", [1, 2])
def test_labels_are_compared(wrong, monkeypatch):
    """Logits of the classes 0 and 1 are equal to rounding, so either label is right."""
    logits = torch.tensor([[1.0, 1.0 - 1e-7, 0.0]])
    monkeypatch.setattr("atoll.export.model.run_file", lambda *_: (logits, torch.tensor([wrong])))
    model = nn.Module()
    model.forward = lambda x: logits
    if wrong == 1:
        assert compare(b"", model, torch.rand(1, 3), torch.float32) == 0
    else:
        with pytest.raises(UnsoundError):
            compare(b"", model, torch.rand(1, 3), torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_compared(value, monkeypatch):
    truth = torch.tensor([[1.0, value]])
    model = nn.Module()
    model.forward = lambda x: truth
    for logits, same in ((truth, True), (torch.tensor([[1.0, 2.0]]), False)):
        monkeypatch.setattr("atoll.export.model.run_file", lambda *_, y=logits: (y, torch.tensor([1])))
        if same:
            assert compare(b"", model, torch.rand(1, 3), torch.float32) == 0
        else:
            with pytest.raises(UnsoundError):
                compare(b"", model, torch.rand(1, 3), torch.float32)
