"""JSON answers of commands, also for errors.  Quick to import, so that a mistyped command gets a quick answer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from atoll.files import finite

SCHEMA = 1
"""Version of the JSON that commands print.  It increases when a key is renamed or removed or changes its meaning."""


def print_json(command: str, value: Mapping[str, Any]) -> None:
    """Print the answer of a command as JSON, with the version of the schema and the name of the command."""
    answer = {"schema": SCHEMA, "command": command, **value}
    sys.stdout.write(json.dumps(finite(answer), indent=2) + "\n")


def print_error(command: str, kind: str, message: str, *, as_json: bool) -> None:
    """Print what went wrong: a sentence on standard error, or JSON on standard output.

    Args:
        command: name of the command; empty if there is none.
        kind: type of the error.
        message: the sentence.
        as_json: whether the user asked for JSON.
    """
    message = message.encode("utf-8", "backslashreplace").decode()  # names of files may contain any byte
    message = re.sub(r"(\S{100})\S{200,}(\S{100})", r"\1...\2", message)  # values that were typed may be endless
    if as_json:
        print_json(command, {"error": {"type": kind, "message": message}})
        return
    from rich.console import Console

    line = f"{f'atoll {command}'.strip()}: {message}"
    Console(stderr=True).print(line, style="red", markup=False, highlight=False, soft_wrap=True)
