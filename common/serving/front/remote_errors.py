"""Errors that cross a process boundary: by class name and text, never pickled.

Only our own errors and ValueError keep their class; anything else is a bug over there and arrives as FarProcessError with its text.
"""

from __future__ import annotations

from common import errors
from common.transfer import errors as transfer_errors


class FarProcessError(errors.RoseError):
    """The other process failed in a way it did not expect; the text is its own."""


_CLASSES: dict[str, type[Exception]] = {
    cls.__name__: cls
    for module in (errors, transfer_errors)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, errors.RoseError)
} | {"ValueError": ValueError}


def to_wire(error: BaseException) -> list[str]:
    """[class name, text] of an error."""
    name = type(error).__name__
    return [name, str(error)] if name in _CLASSES else [name, f"{name}: {error}"]


def from_wire(fields: list[str]) -> Exception:
    """The inverse of `to_wire`."""
    name, text = fields
    return _CLASSES.get(name, FarProcessError)(text)
