"""The values of options: numbers and paths, checked when the command line is parsed."""

from __future__ import annotations

import argparse
import math
from pathlib import Path


def whole_number(word: str) -> int:
    """An integer option."""
    try:
        return int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {word!r}") from None


def number(word: str) -> float:
    """An option that is a number."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"expected a number, got {word!r}")
    return value


def path(word: str) -> Path:
    """A file or folder; an empty word would be the current folder."""
    if not word or "\0" in word:
        raise argparse.ArgumentTypeError(f"expected a path, got {word!r}")
    return Path(word)
