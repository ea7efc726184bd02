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
    results: tuple[ChangedResult, ...] = ()
    """Results of modules below that are changed, each in the innermost forward that contains both modules."""
    noise: bool = False
    """Whether forward itself calls an operator that autograd saves a tensor for before the operator fills it with
    random numbers, such as `rrelu`."""


class ChangesByDtype(NamedTuple):
    """The changes in one module's forward where parameters and activations have a dtype.

    A cast returns a tensor that has its dtype already as it is: `x.float()` is a copy of `x` in bf16, and `x` itself in
    fp32; `x.to(self.weight.dtype)` is `x` itself in both.
    """

    fp32: Changes = Changes()
    bf16: Changes = Changes()
    """Those of fp16 too."""


NO_CHANGES: Final = ChangesByDtype()


def changes_from(raw: Sequence[Sequence[Any]] | None) -> ChangesByDtype:
    """Read the serialised form; None is that of no changes."""
    return NO_CHANGES if raw is None else ChangesByDtype(*map(_changes_from, raw))


def _changes_from(raw: Sequence[Any]) -> Changes:
    own_input, trained_input, received_input, results, noise = raw
    return Changes(own_input, trained_input, received_input, tuple(ChangedResult(*item) for item in results), noise)
