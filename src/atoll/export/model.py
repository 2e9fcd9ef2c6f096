"""Any classifier as an ONNX file with outputs ``logits`` and ``label``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from atoll.display import Displayed, TextTable, cell
from atoll.errors import InputError, UnsoundError
from atoll.export.fast_forms import FAST_FORMS
from atoll.export.forms import FORMS, Values, write_graph
from atoll.export.metadata import Metadata
from atoll.export.writer import OnnxValue, Writer
from atoll.files import check_output, write_atomic
from atoll.graph import CapturedModel, capture
from atoll.modules import evaluation_mode

# Differences that logits of the file and of the model may have, in parts of the largest logit.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
ROWS = 64  # points that are compared at a time: patches of convolutions take memory


@dataclass(frozen=True)
class Exported(Displayed):
    """What was written, and how it compared with the original.

    Args:
        path: of the file.
        bytes: its size.
        outputs: their names.
        checked: number of points it was compared on.
        difference: the largest one between the file and the model: of logits, in parts of the largest logit; of a
            radius, relative to it.
        eps: radius below which the file abstains; None if it has no certificates.
        abstained: number of points on which it abstains.
        warning: why the exported checkpoint may be a poor choice.
    """

    path: str
    bytes: int
    outputs: tuple[str, ...]
    checked: int
    difference: float
    eps: float | None = None
    abstained: int | None = None
    warning: str = ""

    def table(self) -> TextTable:
        values: dict[str, object] = {
            "bytes": self.bytes,
            "outputs": ", ".join(self.outputs),
            "compared on": f"{self.checked:,} points",
            "largest difference": self.difference,
        }
        if self.eps is not None:
            values |= {"eps": self.eps, "abstains on": f"{self.abstained:,} points"}
        rows = [[name, cell(value)] for name, value in values.items()]
        return TextTable(self.path, ["", "value"], rows, [self.warning] if self.warning else [])


def export_model(model: nn.Module, x: Tensor, path: Path | str, *, metadata: Metadata | None = None) -> Exported:
    """Write a classifier to an ONNX file, after comparing the file with the model.

    The file has an input ``x``, float32 of any batch size, and outputs ``logits`` and ``label`` (int64).

    Args:
        model: any module from inputs to logits; normalization belongs inside.
        x: inputs to compare on.
        path: of the file.
        metadata: names of the classes and the like.

    Raises:
        CaptureError: the model cannot be captured as a graph.
        InputError: an operation has no ONNX form; the message names it.
        UnsoundError: the file does not agree with the model; nothing is written.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export_model(net, torch.rand(5, 1, 8, 8), Path(folder) / "net.onnx")
    >>> exported.outputs, exported.checked
    (('logits', 'label'), 5)
    """
    if not len(x):
        raise InputError("x: expected at least one point to compare on, got none")
    expect_onnx()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    captured = capture(model, tuple(x.shape[1:]), dtype=dtype)
    if dtype not in TOLERANCES:
        raise InputError(f"model: expected weights of float32 or float64, got {dtype}")
    content = OnnxClassifier.write(captured, exact=dtype != torch.float32).to_bytes(metadata or Metadata())
    difference = compare(content, model, x.float(), dtype)
    check_output(Path(path), "an ONNX file")
    write_atomic(Path(path), content)
    return Exported(str(path), len(content), ("logits", "label"), len(x), difference)


@dataclass(frozen=True)
class OnnxClassifier:
    """The graph of a captured model in ONNX, to which more outputs can be added.

    Args:
        model: the captured model.
        x: the input, float32.
        values: of every node of the captured graph.
    """

    model: CapturedModel
    x: OnnxValue
    values: Mapping[fx.Node, Values]

    @staticmethod
    def write(model: CapturedModel, *, exact: bool) -> OnnxClassifier:
        """Write the captured graph operation by operation.

        Args:
            model: the captured model.
            exact: compute as certificates assume, instead of as fast as possible.
        """
        model.check_unchanged()
        x = Writer(exact=exact).input("x", torch.float32, (-1, *model.shape))
        values = write_graph(model, x.to(model.dtype), FORMS if exact else FAST_FORMS)
        return OnnxClassifier(model, x, values)

    def value(self, node: fx.Node) -> OnnxValue:
        value = self.values[node]
        assert isinstance(value, OnnxValue)  # logits and features are no tuples
        return value

    @property
    def logits(self) -> OnnxValue:
        return self.value(self.model.graph_module.graph.output_node())

    def to_bytes(self, metadata: Metadata, properties: Mapping[str, str] | None = None, **outputs: OnnxValue) -> bytes:
        """The file, with the given outputs after logits and label, and properties after those of the metadata."""
        label = self.logits.argmax(1).of_shape((-1,))
        described = metadata.properties(self.model) | dict(properties or {})
        return self.x.writer.to_bytes(described, logits=self.logits, label=label, **outputs)


def compare(content: bytes, model: nn.Module, x: Tensor, dtype: torch.dtype) -> float:
    """The largest difference of logits in parts of the largest; an error if file and model do not agree."""
    logits, labels = run_file(content, x, "logits", "label")
    device = next((p.device for p in model.parameters()), x.device)
    with evaluation_mode(model), torch.no_grad():
        truth = torch.cat([model(rows.to(device, dtype)).cpu() for rows in torch.split(x, ROWS)])
    scale = max(truth[truth.isfinite()].abs().tolist(), default=0.0)
    allowed = TOLERANCES[dtype] * scale
    same = torch.allclose(logits, truth, rtol=0, atol=allowed, equal_nan=True)
    # A label may differ only if rounding decides between two logits.
    chosen = truth.gather(1, labels[:, None]).squeeze(1)
    if not same or (chosen < truth.amax(1) - 2 * allowed).any():
        raise UnsoundError(f"the exported file does not agree with the model on {len(x)} points; it was not written")
    differences = (logits - truth)[truth.isfinite()].abs()
    return max(differences.tolist(), default=0.0) / scale if scale else 0.0


def run_file(content: bytes, x: Tensor, *outputs: str) -> tuple[Tensor, ...]:
    """Some outputs of a file, computed by ONNX Runtime."""
    expect_onnx()
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    parts: list[Any] = [session.run(list(outputs), {"x": rows.cpu().numpy()}) for rows in torch.split(x, ROWS)]
    return tuple(torch.cat([torch.from_numpy(part) for part in column]) for column in zip(*parts, strict=True))


def expect_onnx() -> None:
    """Refuse to go on if the packages for ONNX are missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise InputError(f"export: {error.name} is missing (pip install 'atoll[export]')") from None
