"""`comm`: in what pieces are units gathered, how far ahead, and when are gradients reduced?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile

from legoai.dsl.analysis.batch import passes
from legoai.dsl.analysis.buckets import ModuleBucket, fill, local_numel
from legoai.dsl.analysis.precision import DTYPE_BYTES
from legoai.lowering.emit.base import Draft, Lowering, rule_span, written
from legoai.lowering.emit.blocks import expression
from legoai.lowering.emit.code import Group, Item, Line, Loop, Note, Statement, call, quoted
from legoai.lowering.emit.stages import is_staged
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.comm import Bucket as BucketRule
from legoai.specs.directives.comm import ByBytes, Comm, Units
from legoai.specs.models.manifest import BlockList

_GRAPH_ONLY = "it moves collectives inside one traced graph, which the eager backend does not have"


def emit(lowering: Lowering, draft: Draft) -> None:
    """Say when gradients are reduced; buckets and prefetching belong to `apply_fsdp`."""
    plan, comm = lowering.plan, lowering.plan.comm
    if comm is None:
        return
    if comm.reorder:
        _refuse(lowering, comm, "reorder", _GRAPH_ONLY)
    if comm.unshard != "by_unit":
        _refuse(lowering, comm, "unshard", _GRAPH_ONLY)
    if not isinstance(comm.prefetch, Units) and comm.prefetch != "implicit":
        _refuse(lowering, comm, "prefetch", f"{_GRAPH_ONLY}; `units(…)` is lowered")
    if plan.fsdp is None:
        _refuse_without_units(lowering, comm)
    if comm.reduce == "last_micro_batch":
        if plan.fsdp is None and plan.replicate is None:
            _refuse(lowering, comm, "reduce", "no statement reduces gradients")
        if not is_staged(lowering):  # a pipeline reduces after the last micro batch of a pass by itself
            draft.train_with("reduce_gradients", quoted(comm.reduce), lowering.note(comm, "reduce"))
        elif passes(plan) != 1:
            _refuse(lowering, comm, "reduce", f"a pipeline reduces after each of its {passes(plan)} passes in a step")


def _refuse(lowering: Lowering, comm: Comm, field: str, why: str) -> None:
    value = getattr(comm, field)
    lowering.refuse(
        lowering.place(comm, field),
        f"`{field} = {written(value)}` of `comm` is not lowered: {why}",
        label="not in this program",
        help=[f"leave `{field}` out, or write `{written(comm.option(field).default)}`"],
    )


def _refuse_without_units(lowering: Lowering, comm: Comm) -> None:
    if isinstance(comm.prefetch, Units):
        _refuse(lowering, comm, "prefetch", "without `fsdp` nothing is gathered")
    for rule in comm.rules:
        lowering.refuse(
            rule_span(rule),
            "without `fsdp` nothing is gathered in buckets",
            label="no effect in this plan",
            help=["`replicate on dp_replicate (bucket = 25MiB)` sets the buckets of plain data parallelism"],
        )


def buckets(lowering: Lowering, reshards: Mapping[str, str]) -> list[ModuleBucket]:
    """Units that share their collectives, by the rules of `comm`; without those that are alone in their bucket.

    Args:
        lowering: of the plan.
        reshards: the units of `fsdp` in the model's order, each with how it reshards; equal in a bucket.
    """
    comm = lowering.plan.comm
    if comm is None:
        return []
    matched: dict[int, tuple[PathRule[BucketRule], list[str]]] = {}
    for path, rule in lowering.assignment(comm).items():
        matched.setdefault(id(rule), (rule, []))[1].append(path)
    found: list[ModuleBucket] = []
    for rule, paths in matched.values():
        if not _are_units(lowering, rule, paths, reshards):
            continue
        for together in _cut(lowering, rule, paths):
            unlike = next((path for path in together if reshards[path] != reshards[together[0]]), None)
            if unlike is not None:
                lowering.refuse(
                    rule_span(rule),
                    f"`{together[0]}` and `{unlike}` reshard differently, and would be freed together",
                    label="one bucket for both",
                    help=["give their units in `fsdp` the same `reshard`"],
                )
            elif len(together) > 1 and is_staged(lowering):
                lowering.refuse(
                    rule_span(rule),
                    "a bucket of several units is not lowered under a pipeline: they may lie on different stages",
                    help=["write `bucket(module)`"],
                )
            elif len(together) > 1:
                found.append(ModuleBucket(together, rule.origin.span))
    return found


def _are_units(lowering: Lowering, rule: PathRule[BucketRule], paths: list[str], reshards: Mapping[str, str]) -> bool:
    """Whether a bucket can be made of the modules: of whole units, and of none together with one inside of it."""
    for path in paths:
        inside = next((unit for unit in reshards if unit.startswith(f"{path}.")), None) if path else None
        if path == "":
            what = "`root` is gathered before all other units, and shares no bucket"
        elif path not in reshards:
            what = f"`{path}` is no unit of `fsdp`, and FSDP2 gathers whole units"
        elif inside is not None:
            what = f"`{inside}` is a unit inside of `{path}`, and is gathered by itself"
        else:
            continue
        lowering.refuse(
            rule_span(rule), what, label="a bucket is of whole units", help=["make the modules units of `fsdp`"]
        )
        return False
    return True


def _cut(lowering: Lowering, rule: PathRule[BucketRule], paths: list[str]) -> list[tuple[str, ...]]:
    by = rule.treatment.by
    if by == "group":
        return [tuple(paths)]
    if isinstance(by, ByBytes):
        size = DTYPE_BYTES[lowering.plan.precision.param]
        return fill([(path, local_numel(lowering.analysis, path) * size) for path in paths], by.n)
    if by == "balanced":
        lowering.refuse(
            rule_span(rule),
            "`bucket(balanced)` is not lowered: it needs the times of computation and communication",
            label="not in this program",
            help=["write `bucket(module)`, `bucket(group)` or `bucket(bytes(…))`"],
        )
    return [(path,) for path in paths]


def prefetch(lowering: Lowering, draft: Draft, units: list[str], joined: list[ModuleBucket]) -> None:
    """Add `apply_prefetch` where the plan says how many units ahead are gathered.

    Args:
        lowering: of the plan.
        draft: of the program.
        units: the paths of all units in the model's order, `root` included.
        joined: buckets of several of these units.
    """
    comm = lowering.plan.comm
    if comm is None or not isinstance(comm.prefetch, Units):
        return
    ahead, note = comm.prefetch, lowering.note(comm, "prefetch")
    if is_staged(lowering):
        _refuse(lowering, comm, "prefetch", "a stage of a pipeline gathers its units once for all micro batches")
        return
    if ahead.backward == 0:
        _refuse(lowering, comm, "prefetch", "FSDP2 gathers at least one unit ahead in the backward pass")
        return
    later = {path for bucket in joined for path in bucket.paths[1:]}
    chain = [path for path in units if path and path not in later]
    nested = next((path for path in chain if any(path.startswith(f"{unit}.") for unit in chain)), None)
    if nested is not None:
        _refuse(lowering, comm, "prefetch", f"the unit `{nested}` lies inside of another")
        return
    if chain:
        draft.apply("apply_prefetch", mesh=None, body=_chain(lowering, chain, ahead, note), note=note)


def _chain(lowering: Lowering, chain: list[str], ahead: Units, note: Note) -> list[Statement]:
    """The lines that tell each unit which to gather next; the model itself comes first in both passes."""
    elements = Group("[", tuple(Item(element) for element in _elements(lowering, chain)), "]")
    body: list[Statement] = [Line(elements, "units = ", note)]
    every: list[Statement] = []
    if ahead.forward:
        following = f"units[index + 1 : index + {ahead.forward + 1}]"
        every.append(Line(call("unit.set_modules_to_forward_prefetch", following), "", note))
        body.append(Line(call("model.set_modules_to_forward_prefetch", f"units[:{ahead.forward}]"), "", note))
    preceding = f"units[max(index - {ahead.backward}, 0) : index][::-1]"
    every.append(Line(call("unit.set_modules_to_backward_prefetch", preceding), "", note))
    body.append(Line(call("model.set_modules_to_backward_prefetch", f"units[:-{ahead.backward + 1}:-1]"), "", note))
    return [*body, Loop("for index, unit in enumerate(units)", tuple(every))]


def _elements(lowering: Lowering, chain: list[str]) -> list[str]:
    """The units as elements of a list, evenly spaced blocks of one container together."""
    found: list[str] = []
    left = list(chain)
    while left:
        blocks, places = _leading_blocks(lowering, left)
        if blocks is None:
            found.append(expression(lowering.manifest, left.pop(0)))
            continue
        found.append(_several(lowering, blocks, places))
        del left[: len(places)]
    return found


def _leading_blocks(lowering: Lowering, chain: list[str]) -> tuple[BlockList | None, list[int]]:
    """The places in their list of the blocks with which the chain begins, as far as they are evenly spaced."""
    for blocks in lowering.manifest.block_lists:
        names = tuple(str(index) for index in range(len(blocks)))
        place = {f"{blocks.path}.{name}": index for index, name in enumerate(blocks.names)} if blocks.path else {}
        places = list(_evenly([place[path] for path in takewhile(place.__contains__, chain)]))
        if len(places) > 1 and (len(places) == len(blocks) or (len(places) > 2 and blocks.names == names)):
            return blocks, places
    return None, []


def _evenly(places: list[int]) -> Iterator[int]:
    """The first numbers, as long as their steps are equal."""
    for index, place in enumerate(places):
        if index > 1 and place - places[index - 1] != places[1] - places[0]:
            return
        yield place


def _several(lowering: Lowering, blocks: BlockList, places: list[int]) -> str:
    container = expression(lowering.manifest, blocks.path)
    is_dictionary = lowering.manifest.modules[blocks.path].class_name == "ModuleDict"
    if len(places) == len(blocks):
        return f"*{container}.values()" if is_dictionary else f"*{container}"
    step = places[1] - places[0]
    bounds = f"{places[0]}, {places[-1] + 1}" + (f", {step}" if step > 1 else "")
    return f"*({container}[{'str(index)' if is_dictionary else 'index'}] for index in range({bounds}))"
