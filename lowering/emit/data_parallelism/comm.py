"""`comm`: the function that sets the prefetching of units, and when gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Final

from legoai.dsl.analysis.communication.comm import prefetching_units, reduces_last
from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.blocks import expression
from legoai.lowering.emit.code import Group, Item, Line, Loop, Note, Statement, call
from legoai.specs.directives.comm import Units
from legoai.specs.models.manifests.block_list import BlockList

_WHY: Final = "after all units are made, since each prefetches others"


def emit(lowering: Lowering, draft: Draft) -> None:
    """Emit when gradients are reduced; buckets and prefetching belong to `apply_fsdp`.

    A pipeline schedule reduces after the last micro batch of a pass by itself.
    """
    comm = lowering.plan.comm
    if comm is not None and reduces_last(lowering.analysis):
        for name in ("set_requires_gradient_sync", "set_is_last_backward"):
            line = Line(call(f"training.model.{name}", "batch.is_last"), "", lowering.note(comm, "reduce"))
            draft.step.before_forward.append(line)


def prefetch(lowering: Lowering, draft: Draft) -> None:
    """Add `apply_prefetch` where the plan decides how many units are prefetched."""
    comm = lowering.plan.comm
    if comm is None or not isinstance(comm.prefetch, Units):
        return
    note = lowering.note(comm, "prefetch")
    chain = list(prefetching_units(lowering.analysis))
    if chain:
        draft.apply("apply_prefetch", mesh=None, body=_chain(lowering, chain, comm.prefetch, note), note=note, why=_WHY)


def _chain(lowering: Lowering, chain: list[str], ahead: Units, note: Note) -> list[Statement]:
    """Return the lines that set for each unit which to prefetch; the root unit comes first in both passes."""
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
    """Return the units as elements of a list, joining evenly spaced blocks of one container."""
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
    """Return the indices of the blocks with which the chain begins, as far as they are evenly spaced."""
    for blocks in lowering.manifest.block_lists:
        names = tuple(str(index) for index in range(len(blocks)))
        place = {f"{blocks.path}.{name}": index for index, name in enumerate(blocks.names)} if blocks.path else {}
        places = list(_evenly([place[path] for path in takewhile(place.__contains__, chain)]))
        if len(places) > 1 and (len(places) == len(blocks) or (len(places) > 2 and blocks.names == names)):
            return blocks, places
    return None, []


def _evenly(places: list[int]) -> Iterator[int]:
    """Yield the first numbers, as long as their differences are equal."""
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
