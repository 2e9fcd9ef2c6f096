"""Other libraries, which run in separate processes with a separate environment (`make bench` creates it)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

PYTHON = Path(".venv-bench/bin/python")


def run_peer(name: str, *arguments: object) -> dict[str, Any]:
    """Run a module of this package and parse the last line of its output as JSON."""
    command = [str(PYTHON), "-m", f"benchmarks.peers.{name}", *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result
