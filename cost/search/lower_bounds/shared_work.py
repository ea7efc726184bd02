"""Work that candidates share: the computation of a micro batch does not depend on data-parallel degrees.

Nor does that of a block depend on its pipeline stage, or on how many stages there are, but where the groups of a stage
lie otherwise on hosts.

The kernels of a forward and a backward, and the collectives between layers, follow from the model, the micro batch, the
degrees and styles that shard layers and sequences, and the dtypes. Sharding of parameters over data-parallel ranks,
recomputation and the global batch add to them. A simulated candidate bounds those that differ only there.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

from legoai.cost.composed import BETWEEN_LAYERS, SteadyBlock
from legoai.cost.estimate import Estimate
from legoai.cost.kernels.work import is_product, kind_of
from legoai.cost.machine.op_costs import OpCosts
from legoai.cost.trace.marks import MICRO_BATCH
from legoai.cost.trace.numbers import NONE
from legoai.cost.trace.records import Collective, Kernel, Mark, Phase, Record, WaitWork
from legoai.cost.trace.segments import Instance, Item, Segment
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.facts import below
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.parallelism.mesh import devices_per_host
from legoai.dsl.analysis.stages.pipeline import splits_backward
from legoai.specs.directives.mesh import DATA_AXES
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.plan import Plan, holes_of

_LEFT_OUT: Final = frozenset({
    "name", "defaults", "format", "pipeline", "offload", "allocator", "optimizer", "clip", "schedule", "data",
    "weights", "steps", "seed", "save", "evaluate",
})  # fmt: skip
"""Statements that decide nothing of what a micro batch computes in its layers."""
_SHARDS: Final = ("fsdp", "replicate")
"""Statements whose presence decides how parameters are cast."""
DEGREES: Final = (*DATA_AXES, "pp")
COPIES: Final = ("copy", "fill")
"""Kinds of kernels that do not count: parameters are copied when they are gathered, and cast as often as recomputed."""

PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "recompute")
"""In which layers compute."""

_Key = TypeVar("_Key", bound=Hashable)


class BlockWork(NamedTuple):
    """Least seconds of one micro batch in a module with which a stage of a pipeline can begin, and in what follows it.

    `recomputed` is None where another candidate was simulated, which recomputes otherwise.
    """

    forward: float
    backward: float
    recomputed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchWork:
    """What one micro batch takes on a rank without a pipeline, at least.

    Attributes:
        computed: seconds of the kernels of forward and backward, and of the collectives for which forward waits.
        recomputed: the same of recomputation.
        activations: bytes of the activations that lived at the peak.
        in_blocks: of these seconds, those in the model's blocks; None where there are none.
        steady: what each block adds to the step in a micro batch, delays included; None where it is not known.
    """

    computed: float = 0.0
    recomputed: float = 0.0
    activations: int = 0
    in_blocks: BlockWork | None = None
    steady: SteadyBlock | None = None

    @staticmethod
    def read(document: Mapping[str, Any]) -> MicroBatchWork:
        """The work whose fields are these, as plain data."""
        in_blocks, steady = document["in_blocks"], document["steady"]
        parts = {"in_blocks": in_blocks and BlockWork(*in_blocks), "steady": steady and SteadyBlock.read(steady)}
        return MicroBatchWork(**{**document, **parts})


def work_of_micro_batch(found: Estimate, manifest: Manifest) -> MicroBatchWork:
    """What one micro batch took in the simulation of a plan without a pipeline; of one with several ranks, nothing."""
    [rank, *others] = found.ranks
    if others:
        return MicroBatchWork()
    kernels = (item for item in rank.trace.once_each() if isinstance(item, Kernel))
    stream = next((item.stream for item in kernels if is_product(item.op)), 0)
    blocks = manifest.block_lists[0].path if len(manifest.block_lists) == 1 else ""
    seconds: LayerSeconds[_Place] = LayerSeconds(
        OpCosts(machine=found.machine), stream, lambda record: _Place(record.phase, below(record.module, blocks))
    )
    each: list[defaultdict[_Place, float]] = []
    for item in rank.trace.between(rank.span):
        if isinstance(item, Mark):
            if item.name.startswith(MICRO_BATCH):
                each.append(defaultdict(float))
        elif each:
            for key, took in seconds.of(item).items():
                each[-1][key] += took

    def least(counts: Callable[[_Place], bool]) -> float:
        return min((sum(took for place, took in one.items() if counts(place)) for one in each), default=0.0)

    def of_blocks(phase: Phase) -> float:
        return least(lambda place: place.phase == phase and place.in_block)

    return MicroBatchWork(
        computed=least(lambda place: place.phase in ("forward", "backward")),
        recomputed=least(lambda place: place.phase == "recompute"),
        activations=rank.memory.by_category.get("activation", 0),
        in_blocks=BlockWork(*map(of_blocks, PHASES)) if blocks and each else None,
        steady=rank.block,
    )


class _Place(NamedTuple):
    """Where layers compute."""

    phase: Phase
    in_block: bool


def in_layers(kernel: Kernel, stream: int) -> bool:
    """Whether a kernel is computed by layers on their stream, however parameters are sharded."""
    counts = is_product(kernel.op) or not (kernel.op.startswith("fsdp.") or kind_of(kernel.op) in COPIES)
    return counts and kernel.stream == stream and bool(kernel.module)


@dataclass(slots=True)
class LayerSeconds(Generic[_Key]):
    """Seconds of what layers run one after another, by a key; those of a segment are added up once.

    These are their kernels, and the collectives of forward and recomputation for which their stream waits before it
    runs another of them. What a CPU's calls add depends on units and replicas, and does not count.

    Args:
        cost: of a kernel.
        stream: on which layers compute.
        key: of a kernel or a collective.
    """

    cost: OpCosts
    stream: int
    key: Callable[[Kernel | Collective], _Key]
    _known: dict[int, tuple[Segment, Mapping[_Key, float]]] = field(default_factory=dict)

    def of(self, item: Item) -> Mapping[_Key, float]:
        """Those of an item of a trace."""
        if not isinstance(item, Instance):
            return self._sum((item,), (NONE,))
        segment = item.segment
        if id(segment) not in self._known:
            self._known[id(segment)] = segment, self._sum(segment.records, segment.slots)
        return self._known[id(segment)][1]

    def _sum(self, records: Sequence[Record], slots: Sequence[int]) -> Mapping[_Key, float]:
        found: defaultdict[_Key, float] = defaultdict(float)
        begun: dict[int, Collective] = {}
        for record, slot in zip(records, slots, strict=True):
            if isinstance(record, Kernel):
                if in_layers(record, self.stream):
                    begun.clear()  # the rest of these runs beside it
                    found[self.key(record)] += self.cost.alone(record).seconds
            elif isinstance(record, Collective):
                if record.axis in BETWEEN_LAYERS and record.stream == self.stream:
                    begun[slot] = record
            elif isinstance(record, WaitWork) and slot in begun and record.stream == self.stream:
                waited = begun.pop(slot)
                if waited.phase != "backward":  # what is recomputed decides which of these are left for it
                    found[self.key(waited)] += self.cost.alone(waited).seconds
        return found


@dataclass(slots=True)
class SharedWork:
    """What is known of micro batches from the candidates that were simulated.

    Attributes:
        computed: seconds of a micro batch's forward and backward, as of :class:`MicroBatchWork`, by :func:`shared_key`.
    """

    computed: dict[str, float] = field(default_factory=dict)
    _recomputed: dict[tuple[str, str], MicroBatchWork] = field(default_factory=dict)
    _blocks: dict[str, dict[str, Mapping[str, BlockWork]]] = field(default_factory=dict)
    """Of pipelines, by the key of a block and by what is recomputed."""

    def observe(self, analysis: Analysis, work: MicroBatchWork) -> None:
        """Note what a candidate took; of a pipeline, whose micro batches overlap, nothing is noted."""
        key = shared_key(analysis) if analysis.plan.pipeline is None else None
        if key is not None and work.computed:
            self.computed[key] = work.computed
            self._recomputed[key, _treatments(analysis.plan)] = work

    def observe_blocks(self, analysis: Analysis, work: Mapping[str, BlockWork]) -> None:
        """Note what the blocks of a pipeline took, by the modules with which a stage can begin."""
        key = _block_key(analysis)
        if key is not None and work:
            self._blocks.setdefault(key, {})[_treatments(analysis.plan)] = work

    def blocks(self, analysis: Analysis) -> Mapping[str, BlockWork]:
        """What the blocks of a pipeline take, as far as that is known from others; empty where nothing is."""
        key = _block_key(analysis) if self._blocks else None
        known = self._blocks.get(key, {}) if key is not None else {}
        if not known:
            return {}
        same = known.get(_treatments(analysis.plan))
        if same is not None:
            return same
        other = next(iter(known.values()))
        return {start: work._replace(recomputed=None) for start, work in other.items()}

    def unobserved(self, analysis: Analysis) -> str | None:
        """Key of what simulating a candidate would show of others; None where that is known, or nothing."""
        plan = analysis.plan
        if plan.pipeline is not None:
            key = _block_key(analysis)
            known = self._blocks.get(key, {}) if key is not None else {}
            return None if key is None or _treatments(plan) in known else f"{key} {_treatments(plan)}"
        key = shared_key(analysis)
        if key is None or (key, _treatments(plan)) in self._recomputed:
            return None
        return key if key not in self.computed else f"{key} {_treatments(plan)}"

    def seconds(self, analysis: Analysis, recomputed: float) -> float:
        """Least seconds of a step; 0 where nothing is known.

        Args:
            analysis: of a candidate; nothing is known of one with holes.
            recomputed: least seconds of a micro batch's recomputation.
        """
        key = shared_key(analysis) if self.computed else None
        same = None if key is None else self._recomputed.get((key, _treatments(analysis.plan)))
        return self._at_least(analysis, key, recomputed if same is None else same.recomputed)

    def whatever_is_recomputed(self, analysis: Analysis, recomputed: float) -> float:
        """Least seconds of a step of every plan that differs from a candidate in recomputation, units or offloading.

        `recomputed` are the least seconds of recomputation of a micro batch in all of them. 0 where nothing is known,
        as of compiled blocks, where the compiler chooses by itself what it recomputes.
        """
        if analysis.plan.compile is not None:
            return 0.0
        return self._at_least(analysis, shared_key(analysis) if self.computed else None, recomputed)

    def _at_least(self, analysis: Analysis, key: str | None, recomputed: float) -> float:
        plan = analysis.plan
        if key not in self.computed:
            return 0.0
        batches = micro_batches(plan)
        assert key is not None
        return 0.0 if batches is None else (self.computed[key] + recomputed) * batches / plan.mesh.pp

    def activations(self, analysis: Analysis) -> int:
        """Least bytes of activations at the peak; 0 where nothing is known."""
        plan = analysis.plan
        key = shared_key(analysis) if self.computed else None
        if key is None or plan.mesh.pp > 1 or plan.offload is not None:
            return 0
        same = self._recomputed.get((key, _treatments(plan)))
        return 0 if same is None else same.activations


@fact
def straddles_hosts(analysis: Analysis) -> bool:
    """Whether groups of `tp` and `cp` may lie otherwise on the hosts of one pipeline stage than on those of another.

    Raises:
        Undecided: it depends on a hole.
    """
    per_host = devices_per_host(analysis)
    ranks = analysis.plan.mesh.tp * analysis.plan.mesh.cp
    return bool(per_host and per_host % ranks and ranks % per_host)


@fact
def shared_key(analysis: Analysis) -> str | None:
    """What decides what a micro batch's layers run one after another; None of a plan with holes that may.

    Which collectives share a bucket decides nothing of it, unless the compiler schedules them.
    """
    plan = analysis.plan
    decided = [one for one in plan.directives() if one is not plan.comm or plan.compile is not None]
    if any(True for one in decided for _ in holes_of(one)):
        return None
    body = {name: value for name, value in plan.canonical().items() if name not in _LEFT_OUT}
    mesh, batch, cluster = (dict(body.get(name, {})) for name in ("mesh", "batch", "cluster"))
    for name in DEGREES:
        mesh.pop(name, None)
    # Parameters that are not sharded are cast otherwise.
    mesh["sharded"], mesh["replicated"] = plan.mesh.dp_shard > 1, plan.mesh.dp_replicate > 1
    for name in ("global", "ramp"):
        batch.pop(name, None)
    cluster.pop("hosts", None)
    if straddles_hosts(analysis):
        mesh["stage"] = plan.mesh.world_size // plan.mesh.pp
    body |= {"mesh": mesh, "batch": batch, "cluster": cluster}
    for name in ("fsdp", "replicate", "checkpoint", "comm"):
        held = body.pop(name, None)
        body[name] = _of_compiled(analysis, name, held) if plan.compile else held is not None and name in _SHARDS
    return json.dumps(body, sort_keys=True)


def _of_compiled(analysis: Analysis, name: str, held: Any) -> object:
    """What decides of a statement what compiled layers run: units divide a module, and treatments its graph."""
    if held is None or is_traced(analysis) or name not in ("fsdp", "comm"):
        return held
    if name == "comm":
        return None
    rules = [{key: value for key, value in rule.items() if key != "reshard"} for rule in held.get("rules", ())]
    return {**held, "rules": rules}


def _block_key(analysis: Analysis) -> str | None:
    """What decides what a block of a pipeline runs for one micro batch; None without one, or of a plan with holes."""
    is_decided = analysis.plan.pipeline is not None and not any(True for _ in analysis.plan.holes())
    key = shared_key(analysis) if is_decided else None
    if key is not None and straddles_hosts(analysis):
        return None  # what a block takes depends on its stage
    # In the second half of a backward, sums of gradients are recorded outside of layers.
    return None if key is None else f"{splits_backward(analysis)} {key}"


def _treatments(plan: Plan) -> str:
    """What is recomputed, as text."""
    return json.dumps(plan.canonical().get("checkpoint"), sort_keys=True)
