"""How is an attribute of a class or module given another value for a while?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

_INHERITED: Final = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute of a class or module another value while entered; one that a class inherits is covered.

    Raises:
        AttributeError: there is none of this name.
    """
    getattr(owner, name)
    before = owner.__dict__.get(name, _INHERITED)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
