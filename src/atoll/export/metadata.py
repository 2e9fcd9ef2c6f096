"""What an ONNX file says about its classes, its inputs and its origin: the ``metadata_props`` of the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.errors import InputError
from atoll.graph import CapturedModel
from atoll.subject import Origin, Subject
from atoll.threat import Bounds

# By number of channels: Pillow's mode, ONNX's name of the pixel format, and how to get there.
_MODES = {1: ("L", "Gray8", "gray (0.299 R + 0.587 G + 0.114 B)"), 3: ("RGB", "Rgb8", "RGB")}
_LAYOUTS = {1: "NC", 2: "NCL", 3: "NCHW"}


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What a file has to say besides the function that it computes.

    Args:
        classes: names of the classes, in the order of the labels; their numbers if empty.
        bounds: range of valid inputs; None if there is none.
        resize: length of the shorter side of photos after scaling, before the middle is cut out; None if photos are
            scaled to the size of the input.
        origin: checkpoint that the model comes from.
    """

    classes: Sequence[str] = ()
    bounds: Bounds | None = (0.0, 1.0)
    resize: int | None = None
    origin: Origin = field(default_factory=Origin)

    @staticmethod
    def of(subject: Subject) -> Metadata:
        """As the subject's data say."""
        data = subject.data
        return Metadata(classes=data.classes, bounds=data.bounds, resize=data.resize, origin=subject.origin)

    def properties(self, model: CapturedModel) -> dict[str, str]:
        """Keys and values, as JSON if they are more than one word.

        >>> from torch import nn
        >>> from atoll.graph import capture
        >>> model = capture(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), (1, 8, 8))
        >>> properties = Metadata(classes=("cat", "dog")).properties(model)
        >>> properties["classes"], properties["layout"], properties["channels"], properties["image_size"]
        ('["cat", "dog"]', 'NCHW', 'L', '[8, 8]')
        """
        (logits,) = model.graph_module.graph.output_node().all_input_nodes
        count = logits.meta["val"].shape[1]
        names = [str(name) for name in self.classes] or [str(label) for label in range(count)]
        if len(names) != count:
            raise InputError(f"classes: expected {count} names, one per logit, got {len(names)}")
        return {
            "classes": json.dumps(names, ensure_ascii=False),
            "input_range": json.dumps(self.bounds),
            "layout": _LAYOUTS.get(len(model.shape), "N" + "D" * len(model.shape)),
            **self._image(model.shape),
            "precision": str(model.dtype).removeprefix("torch."),
            "function_digest": model.digest,
            **self._origin(),
        }

    def _image(self, shape: tuple[int, ...]) -> dict[str, str]:
        """How to make an input from an image; nothing if inputs are not images with values from 0 to 1."""
        if len(shape) != 3 or shape[0] not in _MODES or self.bounds != (0.0, 1.0):
            return {}
        channels, height, width = shape
        mode, pixels, target = _MODES[channels]
        properties = {
            "channels": mode,
            "image_size": json.dumps([height, width]),
            "Image.BitmapPixelFormat": pixels,
            "Image.ColorSpaceGamma": "SRGB",
            "Image.NominalPixelRange": "Normalized_0_1",
        }
        scaling = ""
        if height == width:
            properties["resize"] = str(self.resize or height)
            scaling = (
                f"scale the shorter side to {self.resize or height} pixels (bilinear, antialiased), cut out the middle"
                f" {width} x {height} pixels, "
            )
        return properties | {
            "preprocessing": "turn the image upright (EXIF), put transparent pixels on white, convert it to"
            f" {target}, {scaling}divide by 255"
        }

    def _origin(self) -> dict[str, str]:
        origin = self.origin
        if origin.step is None:
            return {}
        epoch = {} if origin.epoch is None else {"epoch": str(origin.epoch)}
        return {"run": origin.run, "checkpoint": f"step {origin.step}", **epoch, "weights": origin.weights}
