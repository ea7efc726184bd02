"""What of the program's text depends on the model being split into stages?

The functions that change the model are then called for each stage, so that what they name may be missing.
"""

from __future__ import annotations

from dataclasses import replace as dataclass_replace
from typing import TypeVar

from legoai.dsl.analysis.split_points import SplitPoints
from legoai.lowering.emit import blocks as whole
from legoai.lowering.emit.base import Lowering
from legoai.lowering.emit.blocks import Blocks, Group
from legoai.lowering.emit.code import Loop, Statement
from legoai.specs.directives.model import FOREIGN

T = TypeVar("T")


def is_staged(lowering: Lowering) -> bool:
    """Whether the program splits the model into stages."""
    return lowering.plan.pipeline is not None and lowering.plan.mesh.pp > 1


def has_stand_ins(lowering: Lowering) -> bool:
    """Whether something stands for the modules of other stages; the built-in models pass over what is missing."""
    return is_staged(lowering) and lowering.plan.model.family in FOREIGN


def blocks_of(lowering: Lowering, group: Group[T], *, replace: bool = False) -> Blocks:
    """Say how the program goes over a group's blocks; with ``replace``, so that other modules can take their places."""
    if not has_stand_ins(lowering):
        return whole.blocks_of(group, lowering.manifest, replace=replace, staged=is_staged(lowering))
    found = whole.blocks_of(group, lowering.manifest, replace=replace)
    if group.blocks is None:
        return found
    module = found.block if found.binding is None else str(found.binding.value)
    return dataclass_replace(found, presence=_is_held(lowering, module))


def where_held(lowering: Lowering, group: Group[T], path: str, *statements: Statement) -> list[Statement]:
    """Statements about the module at ``path``, for those stages that hold it.

    Where the group is of the blocks of a list, its loop sees to that.
    """
    if group.blocks is not None or not is_staged(lowering):
        return list(statements)
    start = SplitPoints(lowering.manifest).holder(path)
    if start is None:
        return list(statements)
    if has_stand_ins(lowering):
        condition = _is_held(lowering, whole.expression(lowering.manifest, start))
    else:
        condition = whole.presence(lowering.manifest, start)
    return [Loop(f"if {condition}", statements)]


def _is_held(lowering: Lowering, module: str) -> str:
    lowering.runtime_names.add("is_held")
    return f"is_held({module})"
