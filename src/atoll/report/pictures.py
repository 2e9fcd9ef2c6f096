"""Pictures of results as data URIs: decoded and encoded again, so that nothing but pixels gets into the page."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

from atoll.data.decode import decode

WIDEST, TALLEST = 1200, 2400  # pixels


def embedded(path: Path) -> str:
    """A picture as a data URI; a DataError if it is broken.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("L", (4, 3)).save(Path(folder, "small.png"))
    ...     embedded(Path(folder, "small.png"))[:22]
    'data:image/png;base64,'
    """
    image = Image.fromarray(decode(path, path.name).permute(1, 2, 0).contiguous().numpy())
    image.thumbnail((WIDEST, TALLEST))
    file = io.BytesIO()
    image.save(file, "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
