"""Buckets: modules whose parameters share one all-gather, or whose gradients share one reduction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.parallelism.shard import shard_on_tp
from legoai.specs.directives.layouts import Sharded
from legoai.specs.directives.shard import Colwise, Rowwise
from legoai.specs.record import Record
from legoai.specs.span import Span


class ModuleBucket(Record):
    """Modules that share a collective."""

    paths: tuple[str, ...]
    """In the order of the model, none inside another."""
    span: Span | None
    """Span of the plan that makes the bucket."""


def local_numel(analysis: Analysis, path: str) -> int:
    """Number of parameters below a module on one rank of `tp`."""
    assert analysis.manifest is not None
    shard = shard_on_tp(analysis)
    assigned = {} if shard is None else analysis.assigned(shard).by_path
    prefix = f"{path}." if path else ""
    count = 0
    for name, shape in analysis.manifest.parameters():
        if not name.startswith(prefix):
            continue
        rules = (assigned.get(place) for place in (name.rpartition(".")[0], name))
        cut = any(rule is not None and isinstance(rule.treatment, Colwise | Rowwise | Sharded) for rule in rules)
        count += math.prod(shape) // (analysis.plan.mesh.tp if cut else 1)
    return count


def counted(paths: Sequence[str], counts: Sequence[int]) -> list[tuple[str, ...]]:
    """Cut a sequence of modules into buckets of so many each; counts that do not add up leave some out or are cut."""
    ends = list(accumulate(counts))
    cut = (tuple(paths[end - count : end]) for end, count in zip(ends, counts, strict=True))
    return [bucket for bucket in cut if bucket]


def fill(sizes: Sequence[tuple[str, int]], least: int) -> list[tuple[str, ...]]:
    """Divide a sequence of modules and their bytes into buckets of at least ``least`` bytes, but for the last."""
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
