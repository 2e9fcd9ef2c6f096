"""Pictures that other commands have kept, as data URIs: decoded and written anew, so that only pixels come along."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

from atoll.data.decode import decode
from atoll.errors import DataError

WIDEST, TALLEST = 1200, 2400  # pixels
LARGEST = 32 * 2**20  # bytes of a file


def embedded(path: Path) -> str | None:
    """A picture as a data URI; None if it is not there, broken or too large.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("L", (4, 3)).save(Path(folder, "small.png"))
    ...     embedded(Path(folder, "small.png"))[:22], embedded(Path(folder, "none.png"))
    ('data:image/png;base64,', None)
    """
    if not path.is_file() or path.stat().st_size > LARGEST:
        return None
    try:
        pixels = decode(path, str(path))
    except DataError:
        return None
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    image.thumbnail((WIDEST, TALLEST))
    file = io.BytesIO()
    image.save(file, "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
