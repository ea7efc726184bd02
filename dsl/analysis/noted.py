"""Plan proxy that records which statements are read, and for mesh, batch and pipeline which of their values.

Most facts depend on few statements, so that plans that differ in another one can share them
(:class:`legoai.dsl.frontend.kept.Kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

from legoai.specs.directives.base import Directive
from legoai.specs.directives.batch import Batch
from legoai.specs.directives.mesh import Mesh
from legoai.specs.directives.pipeline import Pipeline
from legoai.specs.plan import Plan

_Note = Callable[[Hashable], None]
_D = TypeVar("_D", bound=Directive)

_FIELDS: Final = frozenset(Plan.fields_)
_EXTRA: Final = ("origins", "axes", "rules", "arguments")
"""Values of a statement that are none of its options."""


def _recording(kind: type[Directive]) -> Callable[[Directive, str], Any]:
    """Proxy of a statement that records reads of its values."""
    names = {field: (kind.keyword, field) for field in (*_EXTRA, *(item.field for item in kind.options))}

    def recorded(self: Directive, name: str) -> Any:
        if name in names:
            object.__getattribute__(self, "note")(names[name])
        return object.__getattribute__(self, name)

    return recorded


class _NotedMesh(Mesh):
    __slots__ = ("note",)
    __getattribute__ = _recording(Mesh)


class _NotedBatch(Batch):
    __slots__ = ("note",)
    __getattribute__ = _recording(Batch)


class _NotedPipeline(Pipeline):
    __slots__ = ("note",)
    __getattribute__ = _recording(Pipeline)


_HAS_PIPELINE: Final = ("pipeline", "keyword")
"""Name of whether a plan has a pipeline."""


class _NotedPlan(Plan):
    """Proxy of a plan that records which of its statements are read."""

    __slots__ = ("note", "parts")

    def __getattribute__(self, name: str) -> Any:
        if name not in _FIELDS:
            return object.__getattribute__(self, name)
        parts = object.__getattribute__(self, "parts")
        if name in parts:
            if name == "pipeline":
                object.__getattribute__(self, "note")(_HAS_PIPELINE)
            return parts[name]
        value = object.__getattribute__(self, name)
        object.__getattribute__(self, "note")(name)
        return value


def noted(plan: Plan, note: _Note) -> Plan:
    """Return a proxy of the plan that records reads.

    Args:
        plan: to read.
        note: called with each name that is read: of a statement, or the names of a statement and of its option.
    """
    parts = {
        "mesh": _copied(_NotedMesh, plan.mesh, note),
        "batch": _copied(_NotedBatch, plan.batch, note),
        "pipeline": None if plan.pipeline is None else _copied(_NotedPipeline, plan.pipeline, note),
    }
    found = object.__new__(_NotedPlan)
    for field, setter in zip(Plan.fields_, Plan.setters_, strict=True):
        setter(found, getattr(plan, field))
    object.__setattr__(found, "note", note)
    object.__setattr__(found, "parts", parts)
    return found


def read(plan: Plan, name: Any) -> Any:
    """Return the value of a recorded name; None for an option where there is no such statement."""
    return getattr(getattr(plan, name[0]), name[1], None) if isinstance(name, tuple) else getattr(plan, name)


def _copied(kind: type[_D], directive: Directive, note: _Note) -> _D:
    found = object.__new__(kind)
    object.__setattr__(found, "__dict__", directive.__dict__)
    object.__setattr__(found, "note", note)
    return found
