"""Lower bound of the time of the collectives that a plan implies.

Parameters of `fsdp` are gathered before a unit computes, and gradients reduced. Those of all units cross the same
links one after another, whatever computes beside them; and what computes beside them is slower. Collectives of `tp`
between the layers of a sequential block hand on what the next layer takes, so that nothing computes meanwhile.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from legoai.cost.kernels.kinds import Attention, Movement, Product
from legoai.cost.machine.cluster import Machine
from legoai.cost.machine.collective_time import seconds_on, slowest
from legoai.cost.machine.contention import beside_collectives
from legoai.cost.machine.kernel_time import seconds_of
from legoai.cost.network.topology import Placement, World, group_placements, possible_placements
from legoai.cost.search.lower_bounds.activations import bytes_of_feature, inputs_of_blocks
from legoai.cost.search.lower_bounds.communication.unit_elements import (
    elements_of_units,
    trained_of_units,
    used_of_units,
)
from legoai.cost.search.lower_bounds.local_kernels import Pass
from legoai.cost.search.lower_bounds.sharded_layers import children, cut_layers
from legoai.cost.timing.timeline import COMMUNICATION, Cost
from legoai.cost.trace.records import CollectiveKind
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.communication.comm import reduces_last
from legoai.dsl.analysis.computation.precision import computes_in_float8
from legoai.dsl.analysis.facts import below
from legoai.dsl.analysis.magnitudes.state import state_bytes, summed_gradients
from legoai.dsl.analysis.parallelism.experts import distributed_experts
from legoai.dsl.analysis.parallelism.fsdp import FsdpUnit, fsdp_units
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.parallelism.mesh import shard_ranks, sharded_axes
from legoai.dsl.analysis.stages.pipeline import most_stages
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.layouts import Partial, Sharded
from legoai.specs.dtypes import DTYPE_BYTES
from legoai.specs.models.manifests.block_list import BlockList
from legoai.specs.models.manifests.manifest import Manifest

_SEQUENTIAL: Final = ("attention", "feed_forward")
"""Kinds of the modules of a block that run one after the other."""


def of_parameters(analysis: Analysis, machine: Machine, room: float) -> float:
    """Seconds of a step in which a rank gathers the parameters of its units, or reduces their gradients.

    0 where it is not known: where experts are distributed, and under float8.

    Args:
        analysis: of the plan.
        machine: on which it runs.
        room: bytes of active memory that a rank may take.

    Raises:
        Undecided: it depends on a hole.
        ProfileError: nothing is known of the links.
    """
    ranks = _group(analysis, sharded_axes(analysis))
    gathered, reduced = _bytes_of_parameters(analysis)
    return sum(
        each.units
        * (
            each.gathers * _seconds(analysis, machine, ranks, "all_gather", each.elements * gathered)
            + each.reductions * _seconds(analysis, machine, ranks, "reduce_scatter", each.trained * reduced)
        )
        for each in _units_alike(analysis, room)
    )


def copies_of_parameters(analysis: Analysis, machine: Machine, room: float) -> float:
    """Seconds of a step in which a rank copies what it has gathered into parameters, or gradients to be reduced.

    What is gathered lies rank by rank: before a layer can use it, the stream on which layers compute copies it into
    the parameters, and behind their backward it copies their gradients, in the dtype in which they are reduced, to
    where they lie rank by rank again. 0 where :func:`of_parameters` is, which has the same arguments.

    Raises:
        Undecided: it depends on a hole.
    """
    gathered, reduced = _bytes_of_parameters(analysis)
    found = 0.0
    for each in _units_alike(analysis, room):
        gather, reduce = seconds_of_copies(analysis, machine, each.elements * gathered, each.trained * reduced)
        found += each.units * (each.gathers * gather + each.reductions * reduce)
    return found


def seconds_of_copies(analysis: Analysis, machine: Machine, gathered: int, reduced: int) -> tuple[float, float]:
    """Seconds in which a unit is copied when it is gathered, and when it is reduced, by its bytes then."""
    if shard_ranks(analysis) == 1:
        return 0.0, 0.0
    rate = analysis.plan.precision.param
    moved = (2 * gathered, min(gathered, reduced) + reduced)
    gather, reduce = (seconds_of(Movement(kind="copy", bytes=size, rate=rate), machine.profile)[0] for size in moved)
    return gather, reduce


class _Alike(NamedTuple):
    """Equal units: how many a mean rank has, elements gathered and reduced, how often each of these is, at least."""

    units: float
    elements: int
    trained: int
    gathers: int
    reductions: int


def _units_alike(analysis: Analysis, room: float) -> list[_Alike]:
    """The units of a rank, equal ones together; none where nothing is known of them."""
    return analysis.once((_units_alike, room), lambda: _alike(analysis, room))


def _alike(analysis: Analysis, room: float) -> list[_Alike]:
    plan, manifest = analysis.plan, analysis.manifest
    batches = micro_batches(plan)
    if plan.fsdp is None or manifest is None or batches is None or is_traced(analysis):
        return []
    if distributed_experts(analysis) or computes_in_float8(plan.precision):
        return []
    stages = plan.mesh.pp  # which share the units, gather each once at least, and overlap
    reductions = 1 if reduces_last(analysis) or stages > 1 else batches
    freed, alike = _freed(analysis, room), Counter[tuple[int, int, int]]()
    for each in _units_of_rules(analysis):
        gathers = _gathers(each, batches, staged=stages > 1, freed=id(each.unit.rule) in freed)
        alike[each.elements, each.trained, gathers] += len(each.paths)
    return [
        _Alike(number / stages, count, trained, gathers, reductions)
        for (count, trained, gathers), number in alike.items()
    ]


class GatheredUnits(NamedTuple):
    """Equal units by their paths: bytes that are gathered and reduced of each, and how often, at least."""

    paths: tuple[str, ...]
    gathered: int
    reduced: int
    gathers: int
    reductions: int


def gathered_units(analysis: Analysis, room: float, inside: str | None = None) -> list[GatheredUnits]:
    """The units of a plan without a pipeline, inside of a module; none where nothing is known of them.

    Raises:
        Undecided: it depends on a hole.
    """
    batches, known = micro_batches(analysis.plan), _units_alike(analysis, room)
    if not known or batches is None or analysis.plan.mesh.pp > 1:
        return []
    freed, (gathered, reduced) = _freed(analysis, room), _bytes_of_parameters(analysis)
    found = []
    for each in _units_of_rules(analysis):
        gathers = _gathers(each, batches, staged=False, freed=id(each.unit.rule) in freed)
        own = tuple(path for path in each.paths if inside is None or below(path, inside))
        if own:
            sizes = each.elements * gathered, each.trained * reduced
            found.append(GatheredUnits(own, *sizes, gathers, known[0].reductions))
    return found


def seconds_of_collective(analysis: Analysis, machine: Machine, kind: CollectiveKind, size: float) -> float:
    """Seconds in which the ranks that share a unit gather or reduce it.

    Raises:
        ProfileError: nothing is known of the links.
    """
    return _seconds(analysis, machine, _group(analysis, sharded_axes(analysis)), kind, size)


def _bytes_of_parameters(analysis: Analysis) -> tuple[int, int]:
    """Bytes of an element when it is gathered, and of its gradient when it is reduced."""
    precision = analysis.plan.precision
    return DTYPE_BYTES[precision.param], DTYPE_BYTES[precision.reduce]


class _UnitsOfRule(NamedTuple):
    """Units that one rule treats alike: one of them, elements of each that are gathered and reduced, all paths."""

    unit: FsdpUnit
    elements: int
    trained: int
    paths: list[str]


@fact
def _units_of_rules(analysis: Analysis) -> list[_UnitsOfRule]:
    """The units that one rule treats alike, and that have as many elements.

    Raises:
        Undecided: it depends on a hole.
    """
    units, found = fsdp_units(analysis), dict[tuple[int, int, int, int], _UnitsOfRule]()
    trained = trained_of_units(analysis)
    for path, count in used_of_units(analysis).items():
        unit, key = units[path], (id(units[path].rule), id(units[path].reshard), count, trained[path])
        found.setdefault(key, _UnitsOfRule(unit, count, trained[path], [])).paths.append(path)
    return list(found.values())


@fact
def gathered_bytes(analysis: Analysis) -> int:
    """Bytes of the parameters that are gathered when the first backward of a micro batch begins, at least.

    0 where it is not known: in a pipeline, where experts are distributed, and under float8.

    Raises:
        Undecided: it depends on a hole.
    """
    plan = analysis.plan
    if analysis.manifest is None or plan.fsdp is None or is_traced(analysis) or plan.mesh.pp > 1:
        return 0
    if shard_ranks(analysis) == 1 or distributed_experts(analysis) or computes_in_float8(plan.precision):
        return 0
    units = fsdp_units(analysis)
    kept = {path for path, unit in units.items() if path and not may_reshard(unit)}
    return DTYPE_BYTES[plan.precision.param] * sum(
        count for path, count in used_of_units(analysis).items() if path in kept
    )


def gathered_for_backward(analysis: Analysis) -> int:
    """Bytes of the parameters of a block that are gathered for its backward, and do not count as staying gathered.

    0 where :func:`gathered_bytes` is not known.

    Raises:
        Undecided: it depends on a hole.
    """
    plan, manifest = analysis.plan, analysis.manifest
    if manifest is None or plan.fsdp is None or is_traced(analysis) or plan.mesh.pp > 1:
        return 0
    if shard_ranks(analysis) == 1 or distributed_experts(analysis) or computes_in_float8(plan.precision):
        return 0
    units, elements, trained = fsdp_units(analysis), elements_of_units(analysis), trained_of_units(analysis)
    blocks = [path for item in manifest.block_lists for path in item.paths]
    freed = (elements[path] if path in units and may_reshard(units[path]) and trained[path] else 0 for path in blocks)
    return DTYPE_BYTES[plan.precision.param] * min(freed, default=0)


def _freed(analysis: Analysis, room: float) -> frozenset[int]:
    """Identities of open rules whose units cannot stay gathered from forward to backward, as those of one rule do."""
    state, elements = state_bytes(analysis), Counter[int]()
    for each in _units_of_rules(analysis):
        if isinstance(each.unit.reshard, Hole):
            elements[id(each.unit.rule)] += each.elements * len(each.paths)
    held, stages = 0 if state is None else state.parameters + state.optimizer, most_stages(analysis)
    # In the fullest stage, when its second backward begins.
    held += summed_gradients(analysis) // stages if stages > 1 else _inputs(analysis)
    size = DTYPE_BYTES[analysis.plan.precision.param] / stages
    too_large = frozenset(rule for rule, count in elements.items() if held + size * count > room)
    return too_large if shard_ranks(analysis) > 1 else frozenset()


def _inputs(analysis: Analysis) -> int:
    """Bytes of the inputs of all blocks, which are there when the first backward of a micro batch begins."""
    try:
        return inputs_of_blocks(analysis)
    except Undecided:
        return 0


def may_reshard(unit: FsdpUnit) -> bool:
    """Whether a unit is freed after its forward, or might be, as far as that is decided."""
    return isinstance(unit.reshard, Hole) or unit.is_resharded_after_forward


def slowed(analysis: Analysis, machine: Machine) -> float:
    """How much longer a product or an attention takes beside a collective, at least, as a share of that time."""
    return 1.0 - 1.0 / min(_slowdowns(analysis, machine))


def most_slowdown(analysis: Analysis, machine: Machine) -> float:
    """The time of a kernel beside a collective over its time alone, at most."""
    return max(_slowdowns(analysis, machine))


def _slowdowns(analysis: Analysis, machine: Machine) -> tuple[float, ...]:
    """The times of a product and of an attention beside a collective, on each link, over their times alone."""
    rate = analysis.plan.precision.param
    works = (
        Product(batch=1, m=1, n=1, k=1, rate=rate, bytes=0),
        Attention(
            batch=1, heads=1, key_heads=1, queries=1, keys=1, head_dim=1, value_dim=1, causal=True, backward=False,
            rate=rate, implementation="flash2", bytes=0,
        ),
    )  # fmt: skip
    collectives = [
        Cost(seconds=0.0, resource=link, model="", slowdown=machine.slowdown(link)) for link in COMMUNICATION
    ]
    kernels = [
        Cost(seconds=0.0, resource="compute", model="", beside=beside_collectives(work, machine.profile))
        for work in works
    ]
    return tuple(machine.host().slowdown(one, [other]) for one in kernels for other in collectives)


def seconds_on_tp(analysis: Analysis, machine: Machine, kind: CollectiveKind, size: float) -> float:
    """Seconds of a collective of the ranks of `tp`.

    Raises:
        Undecided: the number of ranks is a hole.
        ProfileError: nothing is known of the links.
    """
    return _seconds(analysis, machine, range(analysis.plan.mesh.tp), kind, size)


def of_layers(analysis: Analysis, machine: Machine) -> dict[str, Pass]:
    """Seconds of one micro batch in which a rank waits for `tp` at a linear layer, by the layer's path.

    A layer that is cut by input features gives summands, which are summed up before the next layer. Where the sums are
    cut again, along the sequence, what comes next in the model takes them whole; no more is gathered than was cut, so
    that nothing counts of the first block. Backward then gathers the gradients of the sums before it can compute those
    of the layer, and sums up and cuts those of what the next layer took, unless it computes gradients of weights
    meanwhile.

    Raises:
        Undecided: it depends on a hole.
        ProfileError: nothing is known of the links.
    """
    plan, manifest = analysis.plan, analysis.manifest
    if (
        manifest is None
        or plan.mesh.tp == 1
        or plan.compile is not None
        or is_traced(analysis)
        or computes_in_float8(plan.precision)
    ):
        return {}
    cut, of_feature = cut_layers(analysis), bytes_of_feature(analysis)

    @functools.cache
    def passed(forward: CollectiveKind, backward: CollectiveKind | None, features: int) -> Pass:
        size = of_feature * features
        took = (seconds_on_tp(analysis, machine, kind, size) if kind else 0.0 for kind in (forward, backward))
        return Pass(*took)

    found: dict[str, Pass] = {}
    for blocks in manifest.block_lists:
        in_pieces = False
        for part in _parts(manifest, blocks):
            linear = [item for item in children(manifest, part) if item.kind == "linear"]
            whole = next((item for item in linear if item.path in cut.take_whole), None)
            if whole is not None and in_pieces:
                taken = int(whole.attributes["in_features"])
                hidden = whole.path in cut.gather_again
                found[whole.path] = passed("all_gather", None if hidden else "reduce_scatter", taken)
            in_pieces = False
            for item in linear:
                layout, given = cut.sum_up.get(item.path), int(item.attributes["out_features"])
                if layout is None or isinstance(layout, Partial):
                    continue
                in_pieces = isinstance(layout, Sharded)
                found[item.path] = (
                    passed("reduce_scatter", "all_gather", given) if in_pieces else passed("all_reduce", None, given)
                )
    return found


def _parts(manifest: Manifest, blocks: BlockList) -> Iterator[str]:
    """The modules of the blocks that run one after the other."""
    for block in blocks.paths:
        if manifest.modules[block].kind == "block":
            yield from (item.path for item in children(manifest, block) if item.kind in _SEQUENTIAL)


def _gathers(units: _UnitsOfRule, batches: int, *, staged: bool, freed: bool) -> int:
    """How often a unit is gathered in a step, at least; `freed` is whether an open one is freed after its forward.

    That nothing is trained before a unit, so that it has no backward, is possible if nothing of it is. In a pipeline
    gradients are reduced at the end, and parameters stay from each backward to the next forward: so they are gathered
    behind each forward, whatever comes next, and before the first.
    """
    unit = units.unit
    if not units.trained:
        return batches if unit.reshard == "after_forward" and not staged else 1
    if staged:
        if not isinstance(unit.reshard, Hole):
            freed = unit.reshard == "after_forward"
        elif any(isinstance(value, int) for value in unit.reshard.domain or ()):
            freed = False  # it may be gathered from fewer ranks
        return 1 + batches if freed else 1
    if isinstance(unit.reshard, Hole):
        from_fewer = any(isinstance(value, int) for value in unit.reshard.domain or ())
        return (batches if from_fewer else 2 * batches) if freed else 1
    if unit.is_resharded_after_forward and not isinstance(unit.reshard, int):
        return 2 * batches
    return batches if unit.reshard == "after_backward" or isinstance(unit.reshard, int) else 1


def _group(analysis: Analysis, axes: Sequence[str]) -> list[int]:
    """The ranks that differ from the first along some axes only."""
    mesh = analysis.plan.mesh
    ends = ((mesh.size(axis), mesh.stride(axis)) for axis in axes)
    steps = [range(0, size * stride, stride) for size, stride in ends]
    return [sum(places) for places in itertools.product(*steps)]


def _seconds(analysis: Analysis, machine: Machine, ranks: Sequence[int], kind: CollectiveKind, size: float) -> float:
    """Least seconds of a collective, which are kept with those that the network was asked for before.

    Of a pipeline's stages, those of the fastest one: other groups wait for the slowest one of their stage only.
    """
    if len(ranks) < 2 or not size:
        return 0.0
    network, first = machine.network, (ranks[0], ranks[-1], len(ranks))
    stages = _placements(analysis, machine, ranks)
    key = "least", kind, size, first, stages, machine.profile.hash
    if key not in network.answers:
        slow = (slowest(places, kind, size, network, machine.profile) for places in stages)
        network.answers[key] = min(seconds_on(on, kind, size, network, machine.profile) for on in slow)
    return network.answers[key][0]


def _placements(analysis: Analysis, machine: Machine, ranks: Sequence[int]) -> tuple[tuple[Placement, ...], ...]:
    """The placements of the groups in each stage, different ones once; where degrees are open, each as if alone."""
    per_host = machine.network.devices_per_host
    possible = possible_placements(tuple(ranks), per_host)
    if len(possible) == 1:
        return (possible,)
    try:
        world = World(analysis.plan.mesh.world_size, analysis.plan.mesh.pp)
    except Undecided:
        return tuple((one,) for one in possible)
    stages = range(0, world.size, world.of_stage)
    groups = (group_placements(tuple(rank + start for rank in ranks), per_host, world) for start in stages)
    return tuple(dict.fromkeys(groups))
