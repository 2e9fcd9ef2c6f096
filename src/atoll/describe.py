"""Objects as the calls that make them."""

from __future__ import annotations

import inspect
from pathlib import Path


def constructor_call(thing: object, **kept_as: str) -> str:
    """The call that makes an object again, arguments with their default value left out.

    Every argument is expected as an attribute of the same name, or of the name given in ``kept_as``.  Arguments that a
    constructor passes on (``**options``) are looked up in its base class.

    >>> class Point:
    ...     def __init__(self, x, *, y=0):
    ...         self.x, self.y = x, y
    >>> constructor_call(Point(3)), constructor_call(Point(3, y=4))
    ('Point(x=3)', 'Point(x=3, y=4)')
    """
    given: dict[str, object] = {}
    for kind in type(thing).__mro__:
        parameters = inspect.signature(kind).parameters
        for name, parameter in parameters.items():
            value = getattr(thing, kept_as.get(name, name), None)
            if parameter.kind is not parameter.VAR_KEYWORD and value != parameter.default:
                given.setdefault(name, str(value) if isinstance(value, Path) else value)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return f"{type(thing).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"
