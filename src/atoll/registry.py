"""Which classes a recipe can name: everything a package exports, by its short name."""

from __future__ import annotations

import difflib
import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

from atoll.errors import InputError


@dataclass(frozen=True)
class Kind:
    """A kind of component: where its classes are exported and what they all derive from."""

    name: str
    package: str
    base: str
    title: str


KINDS = {
    kind.name: kind
    for kind in (
        Kind("data", "atoll.data", "atoll.data.base.Data", "data sets"),
        Kind("augment", "atoll.data", "atoll.data.augment.Augmentation", "augmentations"),
        Kind("model", "atoll.models", "atoll.models.base.Classifier", "models"),
        Kind("attack", "atoll.attacks", "atoll.attacks.base.Attack", "attacks"),
        Kind("loss", "atoll.training.losses", "atoll.training.losses.base.Loss", "losses"),
        Kind("method", "atoll.training.methods", "atoll.training.methods.base.Method", "methods"),
        Kind("optimizer", "torch.optim", "torch.optim.Optimizer", "optimizers"),
        Kind("schedule", "atoll.training.schedules", "atoll.training.schedules.Schedule", "schedules"),
    )
}


def base(kind: str) -> type:
    """The class all members of a kind derive from."""
    module, _, name = KINDS[kind].base.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found


@cache
def members(kind: str) -> dict[str, type]:
    """The classes of a kind by short name.

    >>> sorted(members("loss"))  # doctest: +ELLIPSIS
    ['ALP', 'AT', 'CentroidMargin', 'EMMA', 'FixedMarginCE', ..., 'Standard', 'TRADES']
    """
    parent, package = base(kind), importlib.import_module(KINDS[kind].package)
    return {
        name: value
        for name, value in vars(package).items()
        if inspect.isclass(value) and issubclass(value, parent) and value is not parent and not name.startswith("_")
    }


def kind_of(hint: Any) -> str | None:
    """The kind a type hint stands for, if it is the base class of one."""
    if not inspect.isclass(hint):
        return None
    path = f"{hint.__module__}.{hint.__qualname__}"
    return next((name for name, kind in KINDS.items() if base(name) is hint or kind.base == path), None)


def resolve(class_path: object, kind: str, *, trust: bool = True) -> type:
    """The class for a short name (``TRADES``) or a dotted path (``my.package.MyLoss``).

    A dotted path imports a module, which runs it; without ``trust`` only Atoll's own and PyTorch's optimizers are
    allowed, which is how checkpoints from elsewhere are opened.
    """
    known = members(kind)
    if not isinstance(class_path, str):
        raise InputError(f"expected the name of a class of {KINDS[kind].title}, got {class_path!r}")
    if class_path in known:
        return known[class_path]
    module, _, name = class_path.rpartition(".")
    if not module:
        close = difflib.get_close_matches(class_path, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InputError(f"expected one of {', '.join(sorted(known))}, got {class_path!r}{hint}")
    if not trust and not class_path.startswith(("atoll.", "torch.optim.")):
        raise InputError(f"{class_path} is not a class of Atoll; it is only imported if you trust its author")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot import {class_path!r}: {error}") from None
    if not (inspect.isclass(found) and issubclass(found, base(kind))):
        raise InputError(f"expected a subclass of {KINDS[kind].base}, got {class_path}")
    return found


def summary(cls: type) -> str:
    """First line of a class's own documentation."""
    text = cls.__dict__.get("__doc__") or ""
    return inspect.cleandoc(text).splitlines()[0] if text.strip() else ""
