"""Tensors that a module's forward changes in place, as far as parallelism and recomputation depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple


class ChangedResult(NamedTuple):
    """Result of a module that is changed in place after the module returned it."""

    path: str
    """Of the module that returned it, relative to the module whose forward leads to the change."""
    by: str
    """Of the module that changes it, relative likewise; `""` is the forward itself."""
    operator: str = ""
    """What made it, such as `aten.mm.default`, if the module that returned it made it and computed with it too."""
    behind_cast: bool = False
    """Whether what is changed is a cast of it, and thus itself only where it has that dtype already."""
    is_view: bool = False
    """Whether the module returned a view, as a linear layer with bias does of its product."""


class Changes(NamedTuple):
    """In-place operators on floating-point tensors in one module's forward, the modules that it calls included."""

    own_input: bool = False
    """Whether a tensor that forward was given is changed."""
    trained_input: bool = False
    """Whether one is that was computed from parameters that are trained, and thus has a gradient."""
    received_input: bool = False
    """Whether one is, with a gradient, that a module returned, or a view of it."""
    cast_input: bool = False
    """Whether a cast of a tensor that forward was given is changed, and thus the tensor itself where the cast does
    nothing."""
    results: tuple[ChangedResult, ...] = ()
    """Results of modules below that are changed, each in the innermost forward that contains both modules."""
    noise: bool = False
    """Whether forward itself calls an operator that autograd saves a tensor for before the operator fills it with
    random numbers, such as `rrelu`."""


NO_CHANGES: Final = Changes()


def changes_from(raw: Sequence[Any] | None) -> Changes:
    """Read the serialised form; None is that of no changes."""
    if raw is None:
        return NO_CHANGES
    own_input, trained_input, received_input, cast_input, results, noise = raw
    changed = tuple(ChangedResult(*item) for item in results)
    return Changes(own_input, trained_input, received_input, cast_input, changed, noise)
