"""Repeated blocks: lists of blocks that are built alike and treated equally, so that one stands for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from legoai.dsl.analysis.analysis import Analysis, fact
from legoai.dsl.analysis.checkpoint import recomputed_modules
from legoai.dsl.analysis.comm import prefetching_units, unit_buckets
from legoai.dsl.analysis.compile import compiled_modules
from legoai.dsl.analysis.facts import below, following
from legoai.dsl.analysis.fsdp import fsdp_units
from legoai.dsl.analysis.optimizer import muon_parameters, parameter_rules
from legoai.dsl.analysis.replicate import gradient_buckets
from legoai.specs.directives.comm import Units
from legoai.specs.directives.precision import Float8, MxFp8
from legoai.specs.models.manifest import BlockList

_FAR: Final = 2
"""Units gathered ahead beyond which too many blocks are near an end of their list for one to stand for all."""


@fact
def repeated_blocks(analysis: Analysis) -> tuple[str, ...]:
    """The paths of the lists of blocks (`layers`) whose blocks are equal in structure and in treatment.

    Every statement treats them by the same rules, and each is gathered and reduced by itself.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    assert analysis.manifest is not None
    treatments = list(_treatments(analysis))
    apart = _treated_apart(analysis)
    return tuple(
        blocks.path
        for blocks in analysis.manifest.block_lists
        if len(blocks.groups) == 1
        and not any(below(path, blocks.path) for path in apart)
        and all(_treats_equally(treatment, blocks) for treatment in treatments)
    )


def _treatments(analysis: Analysis) -> Iterator[Mapping[str, object]]:
    """What follows from the rules of each statement, by the path of a module or parameter."""
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


def _treats_equally(treatment: Mapping[str, object], blocks: BlockList) -> bool:
    """Whether what is in one block is treated as what is at the same place in every other."""
    prefix = f"{blocks.path}." if blocks.path else ""
    of_block: dict[str, dict[str, object]] = {name: {} for name in blocks.names}
    for path, rule in treatment.items():
        if path.startswith(prefix):
            name, _, rest = path[len(prefix) :].partition(".")
            if name in of_block:
                of_block[name][rest] = rule
    first = of_block[blocks.names[0]]
    return all(found == first for found in of_block.values())


def _treated_apart(analysis: Analysis) -> list[str]:
    """Modules that share a collective with others, and units that are told one by one what to gather ahead."""
    assert analysis.manifest is not None
    buckets = (*unit_buckets(analysis), *gradient_buckets(analysis))
    apart = [path for bucket in buckets if len(bucket.paths) > 1 for path in bucket.paths]
    apart += muon_parameters(analysis)  # ranks divide equal matrices of several blocks among them
    comm = analysis.plan.comm
    if comm is None or not isinstance(comm.prefetch, Units):
        return apart
    chain = prefetching_units(analysis)
    lists = (blocks for blocks in analysis.manifest.block_lists if blocks.path)
    whole = {f"{blocks.path}.{name}" for blocks in lists for name in blocks.names}
    far = max(comm.prefetch.forward, comm.prefetch.backward) > _FAR
    return apart + [path for path in chain if far or path not in whole]
