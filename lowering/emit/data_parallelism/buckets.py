"""Calls for modules that share one collective, in loops where consecutive blocks do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from legoai.dsl.analysis.parallelism.buckets import ModuleBucket
from legoai.lowering.emit.base import Lowering
from legoai.lowering.emit.blocks import expression
from legoai.lowering.emit.code import Line, Loop, Node, Note, Statement
from legoai.lowering.emit.held_modules import blocks_of, where_held

Make = Callable[[str], Node]
"""Returns the call for a module, or for a list of modules, given its expression."""


def statements(lowering: Lowering, buckets: Sequence[ModuleBucket], make: Make) -> list[Statement]:
    """Return the calls for all buckets: those of one module first, in loops over blocks, then those of several."""
    single = {bucket.paths[0]: Note(bucket.span) for bucket in buckets if len(bucket.paths) == 1}
    body: list[Statement] = []
    for group in lowering.groups(single):
        blocks = blocks_of(lowering, group)
        lines: list[Statement] = []
        for relative, note in group.members:
            path = blocks.path(relative)
            module = expression(lowering.manifest, path, base=blocks.base, block=blocks.block)
            lines += where_held(lowering, group, path, Line(make(module), "", note))
        body += blocks.loop(lines)
    several = [bucket for bucket in buckets if len(bucket.paths) > 1]
    for _, alike in groupby(several, key=lambda bucket: _run(lowering, bucket)):
        body += _together(lowering, list(alike), make)
    return body


@dataclass(frozen=True, slots=True)
class _Run:
    """Key of buckets that can be made in one loop."""

    container: str
    length: int
    note: Note


def _run(lowering: Lowering, bucket: ModuleBucket) -> _Run | ModuleBucket:
    """Return the bucket's key where it holds consecutive numbered blocks of one list; otherwise the bucket itself."""
    for blocks in lowering.manifest.block_lists:
        numbered = blocks.names == tuple(str(index) for index in range(len(blocks)))
        prefix = f"{blocks.path}." if blocks.path else ""
        kind = lowering.manifest.modules[blocks.path].class_name
        if not numbered or kind not in ("ModuleDict", "ModuleList", "Sequential"):
            continue
        names = [path.removeprefix(prefix) for path in bucket.paths if path.startswith(prefix)]
        if len(names) == len(bucket.paths) and all(name.isdigit() for name in names):
            places = [int(name) for name in names]
            if places == list(range(places[0], places[0] + len(places))):
                return _Run(blocks.path, len(places), Note(bucket.span))
    return bucket


def _together(lowering: Lowering, buckets: list[ModuleBucket], make: Make) -> list[Statement]:
    run = _run(lowering, buckets[0])
    firsts = [int(bucket.paths[0].rpartition(".")[2]) for bucket in buckets] if isinstance(run, _Run) else []
    if not isinstance(run, _Run) or not _adjacent(firsts, run.length):
        modules = (", ".join(expression(lowering.manifest, path) for path in bucket.paths) for bucket in buckets)
        return [Line(make(f"[{text}]"), "", Note(bucket.span)) for bucket, text in zip(buckets, modules, strict=True)]
    container = expression(lowering.manifest, run.container)
    if lowering.manifest.modules[run.container].class_name == "ModuleDict":
        element = f"{container}[str(index)]"
    else:
        element = f"{container}[index]"
    if len(buckets) == 1:
        bounds = f"{firsts[0]}, {run.length + firsts[0]}" if firsts[0] else f"{run.length}"
        return [Line(make(f"[{element} for index in range({bounds})]"), "", Note(buckets[0].span))]
    stop = firsts[-1] + run.length
    made = make(f"[{element} for index in range(first, first + {run.length})]")
    return [Loop(f"for first in range({firsts[0]}, {stop}, {run.length})", (Line(made, "", run.note),))]


def _adjacent(firsts: Sequence[int], length: int) -> bool:
    return all(after - before == length for before, after in pairwise(firsts))
