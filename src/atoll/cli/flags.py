"""Flags of measurements as plain data, from the fields of their settings and what the docstrings say about them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """A flag.

    Args:
        name: the field of the settings.
        kind: bool, choice, list, int, float or text.
        help: what it means, with its default.
        choices: what a choice can be.
    """

    name: str
    kind: str
    help: str
    choices: tuple[str, ...] = ()


def flags_of(settings: type) -> Iterator[Flag]:
    """The flags of the settings of a measurement."""
    texts, hints = _help_texts(settings), typing.get_type_hints(settings)
    for item in dataclasses.fields(settings):
        hint, text = hints[item.name], texts.get(item.name, "")
        options = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if typing.get_origin(hint) in (types.UnionType, typing.Union) and len(options) == 1:
            hint = options[0]
        default = ",".join(item.default) if isinstance(item.default, tuple) else item.default
        if "default" not in text and default not in (None, "") and not isinstance(default, bool):
            text = f"{text} (default: {default:g})" if isinstance(default, float) else f"{text} (default: {default})"
        if typing.get_origin(hint) is typing.Literal:
            yield Flag(item.name, "choice", text, typing.get_args(hint))
        elif typing.get_origin(hint) is tuple:
            yield Flag(item.name, "list", text)
        else:
            yield Flag(item.name, {bool: "bool", int: "int", float: "float"}.get(hint, "text"), text)


def _help_texts(settings: type) -> dict[str, str]:
    """What the docstrings of settings and their base classes say about each field."""
    from docstring_parser import parse

    texts: dict[str, str] = {}
    for cls in settings.__mro__[:-1]:
        for parameter in parse(cls.__doc__ or "").params:
            texts.setdefault(parameter.arg_name, (parameter.description or "").rstrip("."))
    return texts
