"""Observed computation and activations of repeated blocks, which bound candidates with the same blocks.

The kernels of a block follow from the model, the micro batch, the degrees and styles that shard layers and sequences,
and the dtypes. They do not depend on the loss, on data-parallel degrees, or on how many stages share the blocks;
recomputation depends on the block's own treatment. One simulated candidate without a pipeline therefore bounds all of
these, also while they are open. A schedule that splits backward runs the same kernels in two halves: that of the inputs
and that of the weights, normalisation and what is recomputed in both.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from legoai.cost.search.lower_bounds.communication.unit_elements import elements_of_units
from legoai.cost.search.lower_bounds.memory_bound_kernels import repeated_blocks
from legoai.cost.search.lower_bounds.shared_work import DEGREES, MicroBatchWork, straddles_hosts
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.facts import below, holders
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.parallelism.mesh import shard_ranks
from legoai.specs.directives.base import describe
from legoai.specs.directives.checkpoint import Every, Full, KeepAll
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.dtypes import DTYPE_BYTES
from legoai.specs.plan import holes_of

_DECIDE: Final = ("model", "attention", "precision", "context")
"""Statements on which the kernels of a block depend, beside styles, degrees, batch and device."""

_OF_STEP: Final = ("global", "seq_len", "ramp")
"""What `batch` says of a step, and no micro batch; the length may be the model's own."""

_MOST_TEXTS: Final = 1024
"""Texts of treatments that are kept."""

_Key: TypeAlias = str


class ObservedTreatment(NamedTuple):
    """What a treatment of a block was observed to cost for one micro batch.

    Attributes:
        recomputed: seconds.
        kept: bytes that the block holds until its backward, its input included, at least; 0 where that is not known.
    """

    recomputed: float
    kept: float


class ObservedBlock(NamedTuple):
    """Seconds that a block was observed to compute for one micro batch, and to wait in forward for its collectives.

    Attributes:
        forward: all of it.
        backward: likewise.
    """

    forward: float
    backward: float


@dataclass(slots=True)
class ObservedBlocks:
    """What was observed of blocks in the candidates of one plan.

    Attributes:
        revision: number of times that something new was observed.
    """

    revision: int = 0
    _blocks: dict[_Key, ObservedBlock] = field(default_factory=dict)
    _treatments: dict[_Key, dict[str, ObservedTreatment]] = field(default_factory=dict)

    def observe(self, analysis: Analysis, micro_batch: MicroBatchWork, released: float) -> None:
        """Note what all blocks of a candidate took together; of a pipeline, nothing.

        Args:
            analysis: of the candidate.
            micro_batch: what one took.
            released: bytes that were free behind the backward of each block and were not before; 0 if not known.
        """
        work = micro_batch.in_blocks
        key = block_key(analysis) if work is not None and analysis.plan.pipeline is None else None
        if key is None or work is None or not work.forward:
            return
        count, treatment = len(repeated_blocks(analysis.manifest)), one_treatment(analysis)
        if key not in self._blocks:
            self._blocks[key] = ObservedBlock(work.forward / count, work.backward / count)
            self.revision += 1
        known = self._treatments.setdefault(key, {})
        if treatment is not None and treatment not in known and work.recomputed is not None:
            kept = released - _freed_in_backward(analysis) if keeps_on_device(analysis) else 0.0
            known[treatment] = ObservedTreatment(work.recomputed / count, max(0.0, kept))
            self.revision += 1

    def version(self, analysis: Analysis) -> tuple[_Key | None, int]:
        """Version of the observations of a candidate's blocks: while it is the same, no more is known of them."""
        key = block_key(analysis) if self._blocks else None
        return (None, 0) if key not in self._blocks else (key, len(self._treatments[key]))

    def of(self, analysis: Analysis) -> ObservedBlock | None:
        """What each block of a candidate computes; None where none with such blocks was observed."""
        key = block_key(analysis) if self._blocks else None
        return None if key is None else self._blocks.get(key)

    def under(self, analysis: Analysis, treatment: Any) -> ObservedTreatment | None:
        """What a treatment costs a block; None where it was not observed."""
        key = block_key(analysis) if self._blocks else None
        return None if key is None else self._treatments.get(key, {}).get(text_of(analysis, treatment))

    def kept(self, analysis: Analysis) -> dict[str, float]:
        """Bytes that each block keeps for one micro batch under its own treatment, its input included, as far as seen.

        Raises:
            Undecided: a treatment is a hole.
        """
        if self.of(analysis) is None or not keeps_on_device(analysis):
            return {}
        found = {}
        for path, treatment in treatments_of_blocks(analysis).items():
            seen = self.under(analysis, treatment)
            if seen is not None:
                found[path] = seen.kept
        return found

    def recomputed(self, analysis: Analysis) -> dict[str, float]:
        """Seconds for which each block recomputes under its own treatment, as far as that was observed.

        Raises:
            Undecided: a treatment is a hole.
        """
        if self.of(analysis) is None:
            return {}
        blocks, rules = frozenset(repeated_blocks(analysis.manifest)), recomputed_modules(analysis)
        found = {path: self.under(analysis, rule.treatment) for path, rule in rules.items() if path in blocks}
        return {path: seen.recomputed for path, seen in found.items() if seen is not None}

    def unobserved(self, analysis: Analysis) -> str | None:
        """Key of what simulating a candidate without a pipeline would show of its blocks; None where it is known."""
        key, treatment = block_key(analysis), one_treatment(analysis)
        if key is None or (key in self._blocks and (treatment is None or treatment in self._treatments[key])):
            return None
        return f"{key} {treatment}"


def treatments_of_blocks(analysis: Analysis) -> dict[str, Any]:
    """The treatment of each block, by its path; of those in whose parts, or with which others, are recomputed, none.

    Raises:
        Undecided: one is a hole.
    """
    rules, blocks = recomputed_modules(analysis), repeated_blocks(analysis.manifest)
    others = rules.keys() - set(blocks)
    alone = [one for one in blocks if not any(below(one, other) or below(other, one) for other in others)]
    return {path: rules[path].treatment if path in rules else KeepAll() for path in alone}


def keeps_on_device(analysis: Analysis) -> bool:
    """Whether the activations of blocks, and parameters, stay on the device."""
    offload = analysis.plan.offload
    return offload is None or (offload.activations == "none" and offload.parameters == "none")


@fact
def block_key(analysis: Analysis) -> _Key | None:
    """What decides the kernels of a block; None where it is not decided, blocks differ, or a compiler chooses them."""
    try:
        return _block_key(analysis)
    except Undecided:
        return None


def _block_key(analysis: Analysis) -> _Key | None:
    plan = analysis.plan
    if plan.compile is not None or is_traced(analysis) or not repeated_blocks(analysis.manifest):
        return None
    statements = [*plan.shard, *(one for name in _DECIDE if (one := getattr(plan, name)) is not None)]
    options = {
        f"{statement.keyword} {one.name}": getattr(statement, one.field)
        for statement, left_out in ((plan.mesh, DEGREES), (plan.batch, _OF_STEP), (plan.cluster, ("hosts",)))
        for one in statement.options
        if one.name not in left_out
    }
    if any(isinstance(one, Hole) for one in options.values()) or any(any(holes_of(one)) for one in statements):
        raise Undecided("what blocks compute is not decided yet")
    if straddles_hosts(analysis):
        options["stage"] = plan.mesh.world_size // plan.mesh.pp
    # Parameters that are not sharded are cast otherwise.
    casts = [shard_ranks(analysis) > 1, plan.fsdp is not None, plan.replicate is not None]
    return json.dumps([describe(statements), describe(options), plan.batch.seq_len, casts], sort_keys=True)


def one_treatment(analysis: Analysis) -> str | None:
    """The treatment that all blocks have, as text; None where they differ, or parts of blocks have one."""
    rules, blocks = recomputed_modules(analysis), repeated_blocks(analysis.manifest)
    if not rules:
        return text_of(analysis, KeepAll())
    if rules.keys() != set(blocks):
        return None
    found = {text_of(analysis, rule.treatment) for rule in rules.values()}
    return found.pop() if len(found) == 1 else None


def text_of(analysis: Analysis, treatment: Any) -> str:
    """A treatment of a block as text, with what `checkpoint` says of all."""
    options = "{}" if isinstance(treatment, KeepAll) else _options_of_checkpoint(analysis)
    return _as_text(Full() if isinstance(treatment, Every) else treatment, options)


@fact
def _options_of_checkpoint(analysis: Analysis) -> str:
    """What `checkpoint` says of all modules, as text."""
    checkpoint = analysis.plan.checkpoint
    described = {} if checkpoint is None else describe(checkpoint)
    options = {name: value for name, value in described.items() if name not in ("rules", "on", "arguments")}
    return json.dumps(options, sort_keys=True)


@functools.lru_cache(_MOST_TEXTS)
def _as_text(treatment: Any, options: str) -> str:
    return f"[{json.dumps(describe(treatment), sort_keys=True)}, {options}]"


def _freed_in_backward(analysis: Analysis) -> float:
    """Bytes of gathered parameters that may be freed with a block behind its backward, at most."""
    if analysis.plan.fsdp is None or shard_ranks(analysis) == 1:
        return 0.0
    blocks, elements = frozenset(repeated_blocks(analysis.manifest)), elements_of_units(analysis)
    of_blocks = dict.fromkeys(blocks, 0)
    for path, unit in fsdp_units(analysis).items():
        block = next((one for one in (path, *holders(path)) if one in blocks), None)
        if block is not None and unit.reshard not in ("after_forward", "never"):
            of_blocks[block] += elements[path]
    return float(DTYPE_BYTES[analysis.plan.precision.param] * max(of_blocks.values()))
