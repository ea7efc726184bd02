"""All forms in which an estimate is reported, from one simulation."""

from __future__ import annotations

import cProfile
import json
import pstats
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any


def function_calls(function: Callable[[], object]) -> int:
    """Number of function calls, which is independent of the load of the machine."""
    profile = cProfile.Profile()
    profile.runcall(function)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def recomputing(found: Any) -> dict[str, Any]:
    """The estimate with recomputation of a fifth of the step and 30 of 80 GiB taken, and others near it."""
    gib = 2**30

    def case(taken: int, capacity: int | None, share: float) -> Any:
        use = replace(found.ranks[0].use, reserved=taken, outside={}, capacity=capacity)
        return replace(found, step_time=(found.recompute or 1.0) / share, ranks=(replace(found.ranks[0], use=use),))

    return {
        "free": case(30 * gib, 80 * gib, 0.2),
        "filled": case(50 * gib, 80 * gib, 0.2),
        "cheap": case(30 * gib, 80 * gib, 0.02),
        "unknown": case(30 * gib, None, 0.2),
    }


def contributors(found: Any, causes: Any) -> dict[str, list[str]]:
    """The largest contributor to each figure of speed, where one part takes a second of the step."""
    from legoai.cost.report.budgets import contributor
    from legoai.cost.trace.records import Kernel

    one = found.ranks[0]
    none = replace(one.breakdown, exposed=0.0, copies=0.0, host=0.0, idle=0.0)
    first = next(item for item in one.intervals if isinstance(item.record, Kernel))
    cases = {
        "host is slow": (0.0, replace(none, idle=1.0)),
        "other stages": (1.0, replace(none, idle=1.0)),
        "copies": (0.0, replace(none, copies=1.0)),
        "offloaded": (0.0, replace(none, host=1.0)),
        "communication": (0.0, replace(none, exposed=1.0)),
        "module": (0.0, replace(none, idle=1.0)),
    }
    ranks = {case: replace(one, breakdown=parts, bubble=bubble) for case, (bubble, parts) in cases.items()}
    ranks["module"] = replace(ranks["module"], intervals=(first._replace(start=0.0, end=1.5),))
    metrics = ("step_time", "mfu", "tokens_per_s")
    return {
        case: [contributor(metric, replace(found, ranks=(rank,)), causes).words for metric in metrics]
        for case, rank in ranks.items()
    }


def everything(text: str, name: str = "reported.plan") -> dict:
    """All forms of an estimate."""
    from legoai.cost.estimate import estimate
    from legoai.cost.report.bars import rank_tracks
    from legoai.cost.report.budgets import advice, by_segments, violations
    from legoai.cost.report.causes import Causes
    from legoai.cost.report.checkpointing import never_called
    from legoai.cost.report.chrome import Lines, chrome_trace
    from legoai.cost.report.curve import memory_curve
    from legoai.cost.report.document import document
    from legoai.cost.report.lines import line_costs, summary
    from legoai.cost.report.page import page
    from legoai.cost.report.pictures import mesh_picture, pipeline_picture, timeline_picture
    from legoai.cost.report.terminal import terminal
    from legoai.dsl.lint import lint
    from legoai.lowering.program import lower

    linted = lint(text, name, directory=Path())
    plan, analysis = linted.plan, linted.analysis
    assert plan is not None and analysis is not None and analysis.manifest is not None, linted.diagnostics
    found = estimate(lower(analysis), plan, analysis.manifest)
    causes = Causes(analysis)
    curve = memory_curve(found.ranks[0])
    tight = replace(found.ranks[0].use, capacity=2**30, fits=False)
    outside = sum(tight.outside.values()) + tight.workspace
    room = replace(tight, capacity=outside + 2**30)
    small, large = (replace(found.ranks[0].memory, peak=peak) for peak in (2**29, 2**31))
    grown = replace(found.machine, expandable_segments=True)
    fuller = replace(found.ranks[0], rank=1, use=replace(tight, reserved=2 * tight.reserved))
    fuller = replace(fuller, memory=replace(small, peak=1, by_category={"activation": 3 * 2**29}))
    return {
        "segments": {
            "active fits": by_segments(replace(found.ranks[0], use=room, memory=small), found.machine),
            "active does not": by_segments(replace(found.ranks[0], use=room, memory=large), found.machine),
            "they grow": by_segments(replace(found.ranks[0], use=room, memory=small), grown),
            "all fits": by_segments(found.ranks[0], found.machine),
        },
        "short of memory": list(violations(replace(found, ranks=(replace(found.ranks[0], use=tight),)), causes))[-1],
        "short of memory on two ranks": list(
            violations(replace(found, ranks=(replace(found.ranks[0], use=tight), fuller)), causes)
        )[-1],
        "advice": {case: list(advice(item, causes)) for case, item in recomputing(found).items()},
        "contributors": contributors(replace(found, step_time=2.0), causes),
        "document": json.loads(json.dumps(document(found, causes))),
        "lines": json.loads(json.dumps([item.document() for item in line_costs(found, causes)])),
        "summary": summary(found),
        "trace": json.loads(chrome_trace(found, causes)),
        "page": page(found, causes),
        "terminal": terminal(found, causes),
        "mesh": mesh_picture(plan.mesh, devices_per_host=8, name=plan.name),
        "timeline": timeline_picture(found.ranks[0], causes, name=plan.name),
        "pipeline": pipeline_picture(found, alone=True) if plan.pipeline is not None else "",
        "violations": list(violations(found, causes)),
        "never called": list(never_called(found, causes)),
        "attention": causes.of_kernel(
            "aten._scaled_dot_product_flash_attention", "layers.0.attention", "forward"
        ).place,
        "short curve": memory_curve(found.ranks[0], points=50),
        "calls of a curve": function_calls(lambda: memory_curve(found.ranks[0])),
        "records": len(found.ranks[0].trace.records),
        "few bars": [track.bars for track in rank_tracks(found.ranks[0], Lines(causes), most=20)],
        "curve": [(point.at, point.total, dict(point.bytes)) for point in curve],
        "intervals": [len(item.intervals) for item in found.ranks],
        "peak": found.ranks[0].memory.peak,
        "peak categories": dict(found.ranks[0].memory.by_category),
        "actions": [len(item.actions) for item in found.ranks],
    }
