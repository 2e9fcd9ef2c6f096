"""Certified classifiers as ONNX files that give every input a class, or abstain, and a certified radius."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.certify.certificate import Certificate, Certifier, Proof
from atoll.certify.gloro import GloRo, PairwiseLipschitz, radius
from atoll.errors import InputError, UnsoundError
from atoll.files import write_atomic
from atoll.models.liresnet import LinearResidual

TOLERANCE = 1e-9  # how much a radius of the file may differ from the original's, relative


@dataclass(frozen=True)
class Exported:
    """What was written, and how it compared with the original."""

    path: str
    eps: float
    bytes: int
    checked: int  # points
    abstained: int  # of these
    difference: float  # the largest relative one of a radius


class Graph(nn.Module):
    """A GloRo certifier as one module: inputs in float32 to answers (-1: abstains at eps) and radii, float64 inside.

    >>> from atoll.models import MLP
    >>> certifier = GloRo.proven(MLP((2,), 2, hidden=()).double())
    >>> answer, radius = Graph(certifier, eps=0.1)(torch.rand(3, 2))
    >>> answer.dtype, radius.dtype
    (torch.int64, torch.float64)
    """

    eps: Tensor
    lipschitz: Tensor
    relative: Tensor
    absolute: Tensor

    def __init__(self, certifier: GloRo, eps: float) -> None:
        super().__init__()
        self.model = exact_in_onnx(copy.deepcopy(certifier.model).cpu().eval())
        # A tensor: ONNX keeps plain numbers in float32.
        self.register_buffer("eps", torch.tensor(eps, dtype=torch.float64))
        for name, value in vars(certifier.constants).items():
            self.register_buffer(name, value.cpu())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.double()
        logits = self.model(x)
        size = torch.linalg.vector_norm(x.flatten(1), dim=1)
        constants = PairwiseLipschitz(self.lipschitz, self.relative, self.absolute)
        certificate = Certificate(logits.argmax(1), radius(logits, size, constants))
        return certificate.answer(self.eps), certificate.radius


class MatrixConv(nn.Module):
    """A convolution as a product of matrices: ONNX Runtime has no convolution in float64.

    Outputs are the same sums of products in another order, and the certificate's account of rounding holds for any.

    >>> conv, x = nn.Conv2d(2, 3, 3, stride=2, padding=1), torch.rand(4, 2, 7, 5)
    >>> torch.testing.assert_close(MatrixConv(conv)(x), conv(x))
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv
        kernel, stride = conv.kernel_size, conv.stride
        assert not isinstance(conv.padding, str)  # certified layers have numbers
        out = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(x.shape[2:], conv.padding, kernel, stride, strict=True)]
        patches = F.unfold(x, kernel, padding=conv.padding, stride=stride)
        y = conv.weight.flatten(1) @ patches
        if conv.bias is not None:
            y = y + conv.bias[:, None]
        return y.view(x.shape[0], -1, *out)  # len(x) would fix the batch size of the file


class Affine(nn.Module):
    """Batch norm in evaluation mode, step by step: ONNX keeps its epsilon in float32, which is another function.

    >>> norm, x = nn.BatchNorm2d(3).double().eval(), torch.rand(4, 3, 2, 2, dtype=torch.float64)
    >>> torch.testing.assert_close(Affine(norm)(x), norm(x), rtol=1e-14, atol=0)
    """

    mean: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d) -> None:
        super().__init__()
        scale = channel_scale(norm)
        assert scale is not None  # otherwise there is no certificate
        assert norm.running_mean is not None
        self.register_buffer("mean", norm.running_mean)
        self.register_buffer("scale", scale.detach())
        self.register_buffer("shift", norm.bias.detach() if norm.affine else torch.zeros_like(scale))

    def forward(self, x: Tensor) -> Tensor:
        mean, scale, shift = (v.view(-1, *[1] * (x.dim() - 2)) for v in (self.mean, self.scale, self.shift))
        return (x - mean) * scale + shift


def _residual(module: LinearResidual) -> nn.Module:
    """The factor becomes a part of the tensor beside it: ONNX keeps plain numbers in float32."""
    module.beta.data.mul_(module.scale)
    module.scale = 1.0
    return exact_in_onnx(module)


# Layers that ONNX or its runtime does not have in float64, and equivalents that they have.
REPLACEMENTS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.Conv2d: MatrixConv,
    nn.BatchNorm1d: Affine,
    nn.BatchNorm2d: Affine,
    LinearResidual: _residual,
}


def exact_in_onnx(module: nn.Module) -> nn.Module:
    """The same network of layers that stay in float64 all the way, in place."""
    for name, child in module.named_children():
        layer = REPLACEMENTS[type(child)](child) if type(child) in REPLACEMENTS else exact_in_onnx(child)
        setattr(module, name, layer)
    return module


def export(certifier: Proof, x: Tensor, path: Path, *, eps: float) -> Exported:
    """Write a certifier to an ONNX file, which has been compared with the original before it is there.

    The file has an input ``x``, float32 of any batch size, and outputs ``prediction`` (int64; -1 where the radius is
    below eps) and ``radius`` (float64, l2).  The network and its constants are inside, in float64.

    Args:
        certifier: of a model in float64.
        x: inputs to compare on.
        path: of the file.
        eps: radius that a prediction has to be proven for.
    """
    if not isinstance(certifier, GloRo):
        name = type(certifier).__name__
        raise InputError(f"{name} cannot be exported: expected a certifier from Lipschitz constants")
    if (dtype := next(certifier.model.parameters()).dtype) != torch.float64:
        raise InputError(f"model: expected float64 weights to export (model.double()), got {dtype}")
    if not 0 <= eps < math.inf:
        raise InputError(f"eps: expected a finite number >= 0, got {eps}")
    if not len(x):
        raise InputError("x: expected at least one point to compare on, got none")
    content = to_onnx(Graph(certifier, eps), tuple(x.shape[1:]))
    abstained, difference = compare(content, certifier, x.float(), eps)
    write_atomic(path, content)
    return Exported(str(path), eps, len(content), len(x), abstained, difference)


def to_onnx(graph: nn.Module, shape: tuple[int, ...]) -> bytes:
    """A module with one input and two outputs as an ONNX file, for batches of any size."""
    _expect_onnx()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch about itself
            program = torch.onnx.export(
                graph,
                (torch.zeros(2, *shape),),
                dynamo=True,
                verbose=False,
                input_names=["x"],
                output_names=["prediction", "radius"],
                dynamic_shapes={"x": {0: torch.export.Dim("batch")}},
            )
    except torch.onnx.OnnxExporterError as error:
        raise InputError(f"the model cannot be exported: {str(error).splitlines()[0]}") from error
    assert program is not None
    content: bytes = program.model_proto.SerializeToString()
    return content


def compare(content: bytes, certifier: Certifier, x: Tensor, eps: float) -> tuple[int, float]:
    """How many points the file abstains on, and its largest difference; an error if the two do not agree."""
    prediction, radii = run(content, x)
    original = certifier(x.to(torch.float64))
    answer, truth = original.answer(eps).cpu(), original.radius.cpu()
    positive = truth.isfinite() & (truth > 0)
    # Radii come out of a difference of logits, so tiny ones are less accurate relative to themselves.
    slack = 1e-3 * TOLERANCE * max(truth[positive].tolist(), default=0.0)
    if not (torch.equal(prediction, answer) and torch.allclose(radii, truth, rtol=TOLERANCE, atol=slack)):
        raise UnsoundError(f"the exported file does not agree with the model on {len(x)} points; it was not written")
    relative = (radii - truth)[positive].abs() / truth[positive]
    return int((answer < 0).sum()), max(relative.tolist(), default=0.0)


def run(content: bytes, x: Tensor) -> tuple[Tensor, Tensor]:
    """What ONNX Runtime makes of a file: prediction and radius."""
    _expect_onnx()
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as Missing

    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Missing as error:
        operation = str(error).partition("implementation for ")[2].split("(")[0] or "one of its layers"
        raise InputError(f"the model cannot be exported: ONNX Runtime has no {operation} in float64") from None
    outputs: list[Any] = session.run(["prediction", "radius"], {"x": x.cpu().numpy()})
    return torch.from_numpy(outputs[0]), torch.from_numpy(outputs[1])


def _expect_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(f"export: {error.name} is missing (pip install 'atoll[export]')") from None
