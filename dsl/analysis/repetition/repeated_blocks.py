"""Repeated blocks: classes of blocks with equal structure and equal treatments, a few of which represent all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.communication.comm import prefetching_units, unit_buckets
from legoai.dsl.analysis.compilation.graph_breaks import break_inside, effectively_compiled
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.facts import below, following, is_within
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.parallelism.replicate import gradient_buckets
from legoai.dsl.analysis.repetition.passages import passages
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.analysis.training.optimizer import muon_parameters, parameter_rules
from legoai.specs.directives.comm import Units
from legoai.specs.directives.compile import Inductor
from legoai.specs.directives.precision import Float8, MxFp8
from legoai.specs.models.manifests.block_list import BlockList
from legoai.specs.plan import Plan

BlockClasses: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""Path of each list of blocks, with the class of every block."""


@fact
def block_classes(analysis: Analysis) -> BlockClasses:
    """Return the lists of blocks (`layers`), each with the class of every block: blocks of a class are interchangeable.

    Blocks of a class have equal structure, forward does the same with them, and every statement treats them by the same
    rules. Left out are lists of which a block is not gathered and reduced on its own, those that forward does not go
    through block by block, and lists in one graph, in which blocks overlap: all where the step is one, and those of a
    module that inductor compiles without breaks among the blocks. Stages that are graphs are compared as a whole.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    assert analysis.manifest is not None
    if is_traced(analysis) and not is_staged(analysis):
        return ()
    treatments = list(_treatments(analysis))
    apart, passage_of = _treated_apart(analysis), passages(analysis)
    fused = [] if is_staged(analysis) else _fused_lists(analysis)
    found = tuple(
        (blocks.path, _classes(blocks, [*treatments, dict(zip(blocks.paths, passage_of[blocks.path], strict=True))]))
        for blocks in analysis.manifest.block_lists
        if blocks.path in passage_of and blocks.path not in fused
        if not any(below(path, blocks.path) for path in apart)
    )
    if _prefetched(analysis.plan) is None:
        return found
    # Where some blocks are no units, the program names the next ones explicitly: none of them may be missing.
    chain = set(prefetching_units(analysis))
    whole = {blocks.path for blocks in analysis.manifest.block_lists if chain.issuperset(blocks.paths)}
    return tuple((path, of_block) for path, of_block in found if path in whole or len(set(of_block)) == 1)


def look_ahead(analysis: Analysis) -> int:
    """Return how many blocks away, at most, a block refers to another: units to prefetch, or its neighbours.

    The first blocks are prefetched by the unit before them, as if that were one more block.
    """
    prefetch = _prefetched(analysis.plan)
    return 1 if prefetch is None else 1 + max(prefetch.forward, prefetch.backward)


def _treatments(analysis: Analysis) -> Iterator[Mapping[str, object]]:
    """Yield the treatments of each statement, by the path of a module or parameter."""
    plan = analysis.plan
    yield {path: id(unit.rule) for path, unit in fsdp_units(analysis).items() if unit.rule is not None}
    yield {path: id(rule) for path, rule in recomputed_modules(analysis).items()}
    yield {path: id(rule) for path, rule in compiled_modules(analysis).items()}
    yield {path: id(rule) for path, rule in following(analysis, plan.precision, (Float8, MxFp8)).items()}
    yield {path: id(rule) for path, rule in parameter_rules(analysis).items()}
    for shard in plan.shard:
        if "ep" in shard.axes or plan.mesh.tp > 1:
            yield {path: id(rule) for path, rule in analysis.assigned(shard).by_path.items()}
    yield {bucket.paths[0]: None for bucket in gradient_buckets(analysis) if len(bucket.paths) == 1}


def _classes(blocks: BlockList, treatments: Sequence[Mapping[str, object]]) -> tuple[int, ...]:
    """Return the class of each block: equal for equal structure with equal treatments at corresponding paths."""
    prefix = f"{blocks.path}." if blocks.path else ""
    of_block: dict[str, dict[tuple[int, str], object]] = {name: {} for name in blocks.names}
    for number, group in enumerate(blocks.groups):
        for index in group:
            of_block[blocks.names[index]][-1, ""] = number
    for number, treatment in enumerate(treatments):
        for path, rule in treatment.items():
            if path.startswith(prefix):
                name, _, rest = path[len(prefix) :].partition(".")
                if name in of_block:
                    of_block[name][number, rest] = rule
    known: dict[frozenset[object], int] = {}
    return tuple(known.setdefault(frozenset(found.items()), len(known)) for found in of_block.values())


def _fused_lists(analysis: Analysis) -> list[str]:
    """Return the paths of the lists of which inductor compiles all blocks as one graph."""
    assert analysis.manifest is not None
    compiled = effectively_compiled(analysis)
    around = [path for path, rule in compiled.items() if isinstance(rule.treatment, Inductor)]
    lists = (blocks.path for blocks in analysis.manifest.block_lists if break_inside(analysis, blocks.path) is None)
    return [path for path in lists if any(is_within(path, module) for module in around)]


def _prefetched(plan: Plan) -> Units | None:
    """Return how many units each unit prefetches explicitly; None where nothing is set."""
    return plan.comm.prefetch if plan.comm is not None and isinstance(plan.comm.prefetch, Units) else None


def _treated_apart(analysis: Analysis) -> list[str]:
    """Return modules that share a collective with others, and units with explicit prefetching."""
    assert analysis.manifest is not None
    buckets = (*unit_buckets(analysis), *gradient_buckets(analysis))
    apart = [path for bucket in buckets if len(bucket.paths) > 1 for path in bucket.paths]
    apart += muon_parameters(analysis)  # ranks divide equal matrices of several blocks among them
    prefetch = _prefetched(analysis.plan)
    if prefetch is None:
        return apart
    chain = prefetching_units(analysis)
    lists = (blocks for blocks in analysis.manifest.block_lists if blocks.path)
    whole = {f"{blocks.path}.{name}" for blocks in lists for name in blocks.names}
    return apart + [path for path in chain if path not in whole]
