"""What of the program's text depends on the model being split into stages?

The functions that change the model are then called for each stage, so that what they name may be missing.
"""

from __future__ import annotations

from typing import TypeVar

from legoai.dsl.rules.split_points import SplitPoints
from legoai.lowering.emit import blocks as whole
from legoai.lowering.emit.base import Lowering
from legoai.lowering.emit.blocks import Blocks, Group
from legoai.lowering.emit.code import Loop, Statement

T = TypeVar("T")


def is_staged(lowering: Lowering) -> bool:
    """Whether the program splits the model into stages."""
    return lowering.plan.pipeline is not None and lowering.plan.mesh.pp > 1


def blocks_of(lowering: Lowering, group: Group[T], *, replace: bool = False) -> Blocks:
    """Say how the program goes over a group's blocks; with ``replace``, so that other modules can take their places."""
    return whole.blocks_of(group, lowering.manifest, replace=replace, staged=is_staged(lowering))


def where_held(lowering: Lowering, group: Group[T], path: str, *statements: Statement) -> list[Statement]:
    """Statements about the module at ``path``, for those stages that hold it.

    Where the group is of the blocks of a list, its loop sees to that.
    """
    if group.blocks is not None or not is_staged(lowering):
        return list(statements)
    start = SplitPoints(lowering.manifest).holder(path)
    if start is None:
        return list(statements)
    return [Loop(f"if {whole.presence(lowering.manifest, start)}", statements)]
