"""A standard net and one trained by AT, alike in everything else: what studies of explanations compare."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.studies.base import Cell

NETS: Mapping[str, tuple[str, ...]] = {"standard": ("loss=Standard",), "AT": ()}


def two_nets(recipe: str, seeds: int, overrides: tuple[str, ...]) -> list[Cell]:
    """The cells of both nets; the recipe is that of AT.

    >>> [cell.name for cell in two_nets("digits-at", 2, ())]
    ['standard-0', 'standard-1', 'at-0', 'at-1']
    """
    return [Cell(row, seed, recipe, (*overrides, *own)) for row, own in NETS.items() for seed in range(seeds)]
