"""Other libraries, each run in a process of an environment of its own (`make bench` builds it)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

PYTHON = Path(".venv-bench/bin/python")


def run_peer(name: str, *arguments: object) -> dict[str, Any]:
    """What a module of this package prints as its last line, in JSON."""
    command = [str(PYTHON), "-m", f"benchmarks.peers.{name}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
