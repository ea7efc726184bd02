"""Communication that is placed by the times of a traced step's nodes, and the plans for which ranks agree on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.communication.node_times import unpriced
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.span import Span

BY_TIME: Final = "by_time"
_STATEMENT: Final = "`reorder = by_time`"
_ROWS: Final = "how many rows an expert gets is known only when it runs, and so is the time of its operators"
_OTHER_AXES: Final = {
    "cp": "its ranks compute blocks of attention that take different times, and would order their collectives apart",
    "ep": _ROWS,
}
"""Why an axis is not lowered beside it."""


def overlaps_by_time(analysis: Analysis) -> bool:
    """Whether the simulator's times decide when gathers start and reductions are waited for."""
    comm = analysis.plan.comm
    return comm is not None and comm.reorder == BY_TIME


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Supported is a dense decoder that is fully traced, on devices of the catalogue."""
    comm, mesh = analysis.plan.comm, analysis.plan.mesh
    if comm is None or not overlaps_by_time(analysis) or not is_traced(analysis):
        return
    place = analysis.span_of(comm, "reorder")
    if is_staged(analysis):
        why = "a stage's gathers are of all micro batches in flight, and the times are of one"
        yield _refused(place, f"{_STATEMENT} with stages", why)
    if comm.prefetch != "implicit":
        why = "the times say how far ahead units are gathered"
        yield _refused(analysis.span_of(comm, "prefetch"), f"`prefetch` beside {_STATEMENT}", why, "leave it out")
    for axis, why in _OTHER_AXES.items():
        if axis in mesh.used():
            yield _refused(analysis.span_of(mesh, axis), f"the axis `{axis}` beside {_STATEMENT}", why)
    modules = {} if analysis.manifest is None else analysis.manifest.modules
    if any(module.kind == "moe" for module in modules.values()) and "ep" not in mesh.used():
        yield _refused(place, f"{_STATEMENT} with experts", _ROWS)
    for span, what, why in unpriced(analysis):
        yield _refused(span, f"{what} beside {_STATEMENT}", f"{why}, from which the times follow")


def _refused(span: Span, what: str, why: str, *help: str) -> Unsupported:
    return Unsupported(span, f"{what} is not lowered: {why}", "no times", help or ("write `reorder = true`",))
