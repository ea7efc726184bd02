"""Conditions of statements about modules that a stage of the model may not hold.

The functions that change the model are called for each stage, so modules that they name may be missing.
"""

from __future__ import annotations

from dataclasses import replace as dataclass_replace
from typing import TypeVar

from legoai.dsl.analysis.stages.pipeline import has_placeholders, is_staged, split_points
from legoai.lowering.emit import blocks as whole
from legoai.lowering.emit.base import Lowering
from legoai.lowering.emit.blocks import BlockGroup, Blocks
from legoai.lowering.emit.code import Loop, Statement

T = TypeVar("T")


def blocks_of(lowering: Lowering, group: BlockGroup[T], *, replace: bool = False) -> Blocks:
    """Return the loop of the program over a group's blocks; with ``replace``, blocks can be assigned."""
    if not has_placeholders(lowering.analysis):
        return whole.blocks_of(group, lowering.manifest, replace=replace, staged=is_staged(lowering.analysis))
    found = whole.blocks_of(group, lowering.manifest, replace=replace)
    if group.blocks is None:
        return found
    module = found.block if found.binding is None else str(found.binding.value)
    return dataclass_replace(found, presence=_is_held(lowering, module))


def where_held(lowering: Lowering, group: BlockGroup[T], path: str, *statements: Statement) -> list[Statement]:
    """Return statements about the module at ``path``, conditional on the stage holding it.

    Where the group consists of the blocks of a list, its loop is the condition.
    """
    if group.blocks is not None or not is_staged(lowering.analysis):
        return list(statements)
    start = split_points(lowering.analysis).holder(path)
    if start is None:
        return list(statements)
    if has_placeholders(lowering.analysis):
        condition = _is_held(lowering, whole.expression(lowering.manifest, start))
    else:
        condition = whole.presence(lowering.manifest, start)
    return [Loop(f"if {condition}", statements)]


def _is_held(lowering: Lowering, module: str) -> str:
    lowering.runtime_names.add("is_held")
    return f"is_held({module})"
