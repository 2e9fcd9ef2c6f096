"""Where the numbers come from: commands that make them again, and the environment they were made in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.report import commands
from atoll.report.blocks import Block, Cell, Code, Section, Table, Title, Words
from atoll.report.read import Reading
from atoll.report.values import plain


def section(runs: Sequence[Reading]) -> Section:
    words = "Same versions, same seed: the same numbers, whatever the batch size and the number of processes."
    blocks: list[Block] = [Words([words])]
    for run in runs:
        blocks += [Title(run.name, str(run.folder), run.number), Code(_lines(run))]
    names = list(dict.fromkeys(name for run in runs for name in run.environment if name != "command"))
    if names:
        rows: list[list[str | Cell]] = [
            [plain(name), *(_value(run.environment.get(name)) for run in runs)] for name in names
        ]
        table = Table(["", *(run.name for run in runs)], rows, [None, *(run.number for run in runs)])
        blocks += [Title("Environment of the training"), table]
    return Section("reproduce", "Reproduce", blocks)


def _lines(run: Reading) -> list[str]:
    lines = commands.train_again(run.folder, run.environment)
    lines += [line for kept in run.evaluations if (line := commands.attack_again(run.folder, kept.tree))]
    lines += [commands.certify_again(run.folder, kept.tree) for kept in run.certifications]
    if run.curvature is not None:
        more: dict[str, Any] = {"landscapes": run.landscapes, "density": run.density is not None}
        lines += commands.curvature_again(run.folder, run.curvature.tree, **more)
    lines += [line for kept in run.explanations if (line := commands.explain_again(run.folder, kept.tree))]
    return lines


def _value(value: object) -> str:
    return ", ".join(map(plain, value)) or "none" if isinstance(value, list) else plain(value)
