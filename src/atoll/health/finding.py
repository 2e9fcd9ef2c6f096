"""What a health check reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something that looks wrong.

    Args:
        kind: short name, such as ``range``.
        message: what was observed.
        option: the option of ``atoll adopt`` that would fix it, "" if there is none.

    >>> print(Finding("range", "accuracy is 12.0 %, but 97.4 % if the inputs are in [0, 255]", "--range 0,255"))
    range: accuracy is 12.0 %, but 97.4 % if the inputs are in [0, 255]; use --range 0,255
    """

    kind: str
    message: str
    option: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" + (f"; use {self.option}" if self.option else "")
