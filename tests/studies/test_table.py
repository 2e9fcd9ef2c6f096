"""Marks, Markdown, CSV and figures of tables."""

from __future__ import annotations

import csv

from atoll.stats import Estimate
from atoll.studies import Column, Table


def test_marks() -> None:
    column = Column("robust", "high")
    rows = {name: [Estimate(value, error)] for name, value, error in [("a", 5, 0.4), ("b", 4.4, 0.3), ("c", 4, 0.5)]}
    table = Table([column], rows)
    assert [table.mark(row, 0) for row in rows] == ["best", "silver", None]  # 5 - 0.4 <= 4.4 + 0.3; 4 + 0.5 < 4.6
    assert [Table([Column("time", "low")], rows).mark(row, 0) for row in rows] == [None, "silver", "best"]
    assert [Table([Column("time")], rows).mark(row, 0) for row in rows] == [None] * 3


def test_missing_numbers_and_bars_in_names() -> None:
    nothing = Estimate(float("nan"), float("nan"))
    table = Table(
        [Column("x | y", "high")], {"one seed": [Estimate(1.25, float("nan"))], "a|b": [nothing], "c": [None]}
    )
    assert table.markdown().splitlines()[2:] == ["| one seed | **1.25** |", "| a\\|b | - |", "| c | - |"]
    rows = list(csv.reader(table.csv().splitlines()))
    assert rows[1] == ["one seed", "1.25", "", "best"]
    assert [len(row) for row in rows] == [4] * 4
    (axis,) = table.figure().axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["one seed", "a|b", "c"]
    assert [len(line.get_xdata()) for line in axis.lines] == [
        1
    ]  # one dot and no error bar, because the error is unknown


def test_figure() -> None:
    rows = {name: [Estimate(value, 0.3), "text"] for name, value in [("a", 5.0), ("b", 4.5), ("c", 3.0)]}
    (axis,) = Table([Column("x", "high"), Column("not numbers")], rows).figure().axes
    dots = [container.lines[0] for container in axis.containers]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in dots] == [(5.0, 0), (4.5, 1), (3.0, 2)]
    assert len({(line.get_color(), line.get_markerfacecolor()) for line in dots}) == 3  # best, silver, neither
