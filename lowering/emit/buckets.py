"""Which modules share one collective, and how does the program name them together?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from legoai.lowering.emit.base import Lowering
from legoai.lowering.emit.blocks import expression
from legoai.lowering.emit.code import Line, Loop, Node, Note, Statement
from legoai.lowering.emit.shard import tensor_parallel
from legoai.lowering.emit.stages import blocks_of, where_held
from legoai.specs.directives.layouts import Sharded
from legoai.specs.directives.shard import Colwise, Rowwise

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

Make = Callable[[str], Node]
"""The call for a module, or for a list of modules, whose expression is given."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Modules whose parameters are gathered, or whose gradients are reduced, in one collective."""

    paths: tuple[str, ...]
    """In the order of the model, none inside another."""
    note: Note


def local_numel(lowering: Lowering, path: str) -> int:
    """Parameters below a module that one rank of `tp` holds."""
    shard = tensor_parallel(lowering)
    assigned = {} if shard is None else lowering.assignment(shard)
    prefix = f"{path}." if path else ""
    count = 0
    for name, shape in lowering.manifest.parameters():
        if not name.startswith(prefix):
            continue
        rules = (assigned.get(place) for place in (name.rpartition(".")[0], name))
        cut = any(rule is not None and isinstance(rule.treatment, Colwise | Rowwise | Sharded) for rule in rules)
        count += math.prod(shape) // (lowering.plan.mesh.tp if cut else 1)
    return count


def fill(sizes: Sequence[tuple[str, int]], least: int) -> list[tuple[str, ...]]:
    """Cut a sequence of modules and their bytes into buckets of at least ``least`` bytes; the last may hold less."""
    buckets: list[tuple[str, ...]] = []
    held: list[str] = []
    total = 0
    for path, size in sizes:
        held.append(path)
        total += size
        if total >= least:
            buckets.append(tuple(held))
            held, total = [], 0
    if held:
        buckets.append(tuple(held))
    return buckets


def statements(lowering: Lowering, buckets: Sequence[Bucket], make: Make) -> list[Statement]:
    """The calls for all buckets: those of one module first, in loops over blocks, then those of several."""
    single = {bucket.paths[0]: bucket.note for bucket in buckets if len(bucket.paths) == 1}
    body: list[Statement] = []
    for group in lowering.groups(single):
        blocks = blocks_of(lowering, group)
        lines: list[Statement] = []
        for relative, note in group.members:
            path = f"{blocks.base}.{relative}" if blocks.base and relative else blocks.base or relative
            module = expression(lowering.manifest, path, base=blocks.base, block=blocks.block)
            lines += where_held(lowering, group, path, Line(make(module), "", note))
        body += blocks.loop(lines)
    several = [bucket for bucket in buckets if len(bucket.paths) > 1]
    for _, alike in groupby(several, key=lambda bucket: _run(lowering, bucket)):
        body += _together(lowering, list(alike), make)
    return body


@dataclass(frozen=True, slots=True)
class _Run:
    """What neighbouring buckets must have in common to be made in one loop."""

    container: str
    length: int
    note: Note


def _run(lowering: Lowering, bucket: Bucket) -> _Run | Bucket:
    """The bucket's kind where it is of consecutive numbered blocks of one list; itself where nothing is like it."""
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
                return _Run(blocks.path, len(places), bucket.note)
    return bucket


def _together(lowering: Lowering, buckets: list[Bucket], make: Make) -> list[Statement]:
    run = _run(lowering, buckets[0])
    firsts = [int(bucket.paths[0].rpartition(".")[2]) for bucket in buckets] if isinstance(run, _Run) else []
    if not isinstance(run, _Run) or not _adjacent(firsts, run.length):
        modules = (", ".join(expression(lowering.manifest, path) for path in bucket.paths) for bucket in buckets)
        return [Line(make(f"[{text}]"), "", bucket.note) for bucket, text in zip(buckets, modules, strict=True)]
    container = expression(lowering.manifest, run.container)
    if lowering.manifest.modules[run.container].class_name == "ModuleDict":
        element = f"{container}[str(index)]"
    else:
        element = f"{container}[index]"
    if len(buckets) == 1:
        bounds = f"{firsts[0]}, {run.length + firsts[0]}" if firsts[0] else f"{run.length}"
        return [Line(make(f"[{element} for index in range({bounds})]"), "", buckets[0].note)]
    stop = firsts[-1] + run.length
    made = make(f"[{element} for index in range(first, first + {run.length})]")
    return [Loop(f"for first in range({firsts[0]}, {stop}, {run.length})", (Line(made, "", run.note),))]


def _adjacent(firsts: Sequence[int], length: int) -> bool:
    return all(after - before == length for before, after in pairwise(firsts))


def pieces(lowering: Lowering) -> list[str]:
    """The modules of which buckets are made, in the order of the model: its blocks, and what stands beside them."""
    modules = lowering.manifest.modules
    lists = {blocks.path for blocks in lowering.manifest.block_lists}

    def cut(path: str) -> list[str]:
        info = modules[path]
        holds_blocks = path == "" or path in lists or any(held.startswith(f"{path}.") for held in lists)
        if holds_blocks or info.class_name in ("ModuleDict", "ModuleList"):
            return [piece for name in info.children for piece in cut(info.child_path(name))]
        return [path]

    return cut("")
