"""Passages through lists of blocks: what a model's forward computes with each block and before the next one.

The blocks of a list are interchangeable only where forward does the same with each of them. The manifest's flow shows
this: the steps from the first call of a block to that of the next are its *passage*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.facts import holders
from legoai.specs.models.manifests.block_list import BlockList
from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo, Step

Word: TypeAlias = tuple[object, ...]
"""A step of a passage, or the source of one of its inputs, in terms that are the same for equal passages."""

_LONGEST_PERIOD: Final = 8
"""Most blocks after which passages may repeat."""


@fact
def passages(analysis: Analysis) -> dict[str, tuple[int, ...]]:
    """Return the class of the passage of each block, by the path of its list.

    Left out are lists whose passages do not repeat with a period, or that forward does not go through once and block by
    block: each takes what the passage before it computes, and leaves nothing to passages after the next one. Of a model
    that cannot be followed, all are left out.
    """
    manifest = analysis.manifest
    assert manifest is not None, "a model that can be inspected"
    if manifest.flow_error is not None:
        return {}
    periods = {blocks.path: _period(manifest, blocks) for blocks in manifest.block_lists}
    return {
        blocks.path: tuple(place % period for place in range(len(blocks)))
        for blocks in manifest.block_lists
        if (period := periods[blocks.path]) is not None
    }


@dataclass(frozen=True, slots=True)
class _Passage:
    """Steps of one block.

    Attributes:
        steps: all of them, each with its inputs.
        calls: how many of these lead to the last call of the block, or of a part of it.
    """

    steps: tuple[Word, ...]
    calls: int

    @property
    def head(self) -> tuple[Word, ...]:
        """The steps to the block's last call; those after it have another meaning for the last block."""
        return self.steps[: self.calls]

    def names(self, *, head: bool) -> tuple[object, ...]:
        """The operations without their inputs, which come from elsewhere for the first block."""
        return tuple(step[:-1] for step in (self.head if head else self.steps))


def _period(manifest: Manifest, blocks: BlockList) -> int | None:
    """Return after how many blocks the passages repeat; None where they do not, or are none."""
    caller = _caller(manifest, blocks)
    if caller is None:
        return None
    found = _Reader(caller, blocks).passages()
    if found is None:
        return None
    return next((period for period in range(1, _LONGEST_PERIOD + 1) if _repeats(found, period)), None)


def _repeats(found: Sequence[_Passage], period: int) -> bool:
    last = len(found) - 1
    for place in range(last + 1 - period):
        one, other = found[place], found[place + period]
        at_end = place + period == last
        if place == 0:
            equal = one.names(head=at_end) == other.names(head=at_end)
        else:
            equal = one.head == other.head if at_end else one.steps == other.steps
        if not equal:
            return False
    return True


def _caller(manifest: Manifest, blocks: BlockList) -> ModuleInfo | None:
    """Return the module whose forward calls the blocks; None for none or several, or where it runs more than once."""
    above = (blocks.path, *holders(blocks.path)) if blocks.path else ("",)
    paths = set(blocks.paths)
    callers = [
        path
        for path in above
        if any(
            step.op == "call" and _block_of(path, step.name, blocks) in paths for step in manifest.modules[path].flow
        )
    ]
    if len(callers) != 1:
        return None
    [caller] = callers
    inner: str | None = caller
    while inner:
        inner = _only_caller(manifest, inner)
    return None if inner is None else manifest.modules[caller]


def _only_caller(manifest: Manifest, path: str) -> str | None:
    """Return the module that calls the one at ``path``; None where it is not called exactly once."""
    found = [
        above
        for above in holders(path)
        for step in manifest.modules[above].flow
        if step.op == "call" and manifest.modules[above].child_path(step.name) == path
    ]
    return found[0] if len(found) == 1 else None


def _block_of(above: str, name: str, blocks: BlockList) -> str | None:
    """Return the block that holds what is called ``name`` relative to the module ``above``, or is it."""
    path, prefix = f"{above}.{name}" if above else name, f"{blocks.path}." if blocks.path else ""
    return prefix + path[len(prefix) :].partition(".")[0] if path.startswith(prefix) else None


class _Reader:
    """Divides the flow of a module into the passages of the blocks that it calls."""

    def __init__(self, caller: ModuleInfo, blocks: BlockList) -> None:
        self.caller = caller
        self.blocks = blocks
        self.place = {path: place for place, path in enumerate(blocks.paths)}
        self.passage: list[int] = []
        """For each step, the block whose passage it is in; -1 before the first."""
        self.index: list[int] = []
        """For each step, its index in that passage, which leaves out what is read and not computed."""

    def passages(self) -> list[_Passage] | None:
        """Return them in order; None where forward does not go through the blocks one by one."""
        steps: list[list[Word]] = [[] for _ in self.blocks.names]
        calls = [0] * len(steps)
        current = -1
        for step in self.caller.flow:
            own = self._place(step) if step.op == "call" else None
            if own is not None:
                if own not in (current, current + 1):
                    return None
                if 0 < own != current and not any(self._is_made(source, current) for source in step.inputs):
                    return None
                current = own
            is_leaf = _is_leaf(step)
            self.passage.append(current)
            self.index.append(len(steps[current]) if current >= 0 and not is_leaf else -1)
            if current < 0 or is_leaf:
                continue
            inputs = [self._source(source, current) for source in step.inputs]
            if None in inputs:
                return None
            steps[current].append((*self._name(step, current), tuple(inputs)))
            if own is not None:
                calls[current] = len(steps[current])
        if current + 1 != len(steps) or any(self._source(source, current) is None for source in self.caller.outputs):
            return None
        return [_Passage(tuple(own), count) for own, count in zip(steps, calls, strict=True)]

    def _place(self, step: Step) -> int | None:
        """Return the index of the block that a step names, or of which it names a part."""
        return self.place.get(_block_of(self.caller.path, step.name, self.blocks) or "")

    def _is_made(self, source: int, passage: int) -> bool:
        """Whether a step is computed in a passage."""
        return self.passage[source] == passage and self.index[source] >= 0

    def _name(self, step: Step, current: int) -> Word:
        """Return the operation of a step, with the names of blocks relative to the block of its passage."""
        own = self._place(step) if step.op in ("call", "parameter", "buffer") else None
        if own is None:
            return step.op, step.name
        path = self.caller.child_path(step.name)
        return step.op, own - current, path[len(self.blocks.paths[own]) :]

    def _source(self, source: int, current: int) -> Word | None:
        """Return what an input of a step is; None for the result of a passage further back than the one before."""
        step, passage = self.caller.flow[source], self.passage[source]
        if _is_leaf(step) and step.op != "input":
            return self._name(step, current)
        if passage < 0:
            return "before", source
        return (current - passage, self.index[source]) if current - passage <= 1 else None


def _is_leaf(step: Step) -> bool:
    """Whether a step reads a tensor or makes one from none, which forward may do anywhere."""
    return not step.inputs and step.op != "call"
