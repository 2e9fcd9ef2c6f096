"""Where modules are imported from: not from the current folder, and not from the folder of a run.

It imports nothing that Python has not imported at its start, because ``python -m`` looks for modules in the current
folder first.
"""

from __future__ import annotations

import os
import sys


def may_hold_foreign_code(folder: str) -> bool:
    """Whether an entry of ``sys.path`` may hold somebody else's code: the current folder, or the folder of a run.

    ``python -m`` and an empty entry in ``PYTHONPATH`` make the current folder importable.  Names that a run stores must
    not lead there.  The folder that Atoll itself comes from is fine.
    """
    path = os.path.realpath(folder or os.curdir)
    if path == os.path.dirname(os.path.dirname(os.path.realpath(__file__))):
        return False
    return path == os.path.realpath(os.curdir) or os.path.lexists(os.path.join(path, "recipe.yaml"))


def forget_foreign_folders() -> None:
    """Make the current folder and folders of runs not importable in this process."""
    sys.path[:] = [folder for folder in sys.path if not may_hold_foreign_code(folder)]
