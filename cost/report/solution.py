"""Terminal table and JSON form of a solution; `docs/solve-output.md` documents the fields of the latter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from legoai.cost import words
from legoai.cost.search.buckets.solved import Bucketing
from legoai.cost.search.candidates import Choices, Evaluated
from legoai.cost.search.joint.decision import Tried
from legoai.cost.search.objective import rounded
from legoai.cost.search.solve import Solution
from legoai.dsl.frontend.solved import STOPS
from legoai.specs.directives.require import METRICS
from legoai.specs.units import counted

FORMAT_VERSION: Final = 1
"""Adding a field keeps the version; removing or changing one increments it."""

SHOWN: Final = 5
"""Number of candidates that are shown by default."""

_COLUMNS: Final = ("step_time", "peak_memory", "bubble", "recompute")
"""Objectives that the table of candidates has a column for in any case."""
_SMALL: Final = 0.001
"""Share of the step below which a difference is not listed."""

STATUSES: Final = {
    "optimal": "no candidate is better",
    "bounded": "no candidate is better by more than the gap",
    "time_limit": STOPS["time_limit"],
    "interrupted": STOPS["interrupted"],
    "infeasible": "no candidate is feasible",
}
_UNBOUNDED: Final = "no simulated candidate is better"
"""What `bounded` means where what was not simulated has no bound."""


def document(
    solution: Solution, estimate: dict[str, Any] | None, *, top: int = 0, every: bool = False
) -> dict[str, Any]:
    """Return the solution as plain data: seconds, bytes and shares.

    Args:
        solution: of a plan.
        estimate: of the best candidate, as `legoai cost --json` gives it.
        top: candidates to list with their differences from the best one, as the table shows them.
        every: whether to list every evaluated candidate.
    """
    found, objective = solution.result, solution.objective
    body: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "status": found.status,
        "objective": {
            "direction": objective.direction,
            "metric": objective.metric,
            "dimension": METRICS[objective.metric].dimensions[0],
            "value": solution.value,
        },
        "bound": found.bound,
        "gap": solution.gap,
        "solve_time_s": solution.seconds,
        "candidates": {
            "enumerated": found.total,
            "pruned": {
                "by_rules": dict(sorted(found.refused.items())),
                "by_bound": found.bounded,
                "by_placements": found.left_out,
            },
            "evaluated": len(found.evaluated),
            "failed": len(found.failed),
            "simulated": solution.simulated,
        },
        "choices": _choices(solution, solution.best.choices) if solution.best is not None else [],
        "buckets": list(_buckets(solution)),
        "baselines": [
            {
                "name": item.name,
                "note": item.note,
                **(_candidate(solution, item.found) if item.found is not None else {}),
            }
            for item in solution.baselines
        ],
        "joint": _joint(solution),
        "estimate": estimate,
    }
    if top:
        body["top"] = [
            {**_candidate(solution, item), "difference": _why(solution, item)} for item in solution.ranked()[:top]
        ]
    if every:
        body["all"] = [_candidate(solution, item) for item in solution.ranked()]
    return body


def _joint(solution: Solution) -> dict[str, Any] | None:
    """Return how the jointly decided answers were found, apart from the best candidate."""
    answers = solution.joint
    if answers is None:
        return None
    named = {"program": answers.program, "greedy": answers.greedy}
    return {
        "programs": answers.programs,
        **{name: None if tried is None else _tried(solution, tried) for name, tried in named.items()},
    }


def _tried(solution: Solution, tried: Tried) -> dict[str, Any]:
    found = {} if tried.found is None else _candidate(solution, tried.found)
    return {"choices": _choices(solution, tried.choices), "predicted_step_time_s": tried.predicted, **found}


def _choices(solution: Solution, choices: Choices) -> list[dict[str, Any]]:
    return [
        {"line": solution.plan.written(hole.span).line, "hole": hole.what, "value": hole.choices[index]}
        for hole, index in zip(solution.plan.holes, choices, strict=True)
        if index is not None
    ]


def _buckets(solution: Solution) -> Iterator[dict[str, Any]]:
    """Yield the open buckets with their solutions, given the best candidate's other answers."""
    if solution.best is None:
        return
    holes = solution.plan.holes
    open_ones = [index for index, hole in enumerate(holes) if hole.buckets]

    def others(choices: Choices) -> list[int | None]:
        return [value for index, value in enumerate(choices) if index not in open_ones]

    wanted = others(solution.best.choices)
    choices, found = next(
        (item for item in solution.result.bucketings.items() if others(item[0]) == wanted), (solution.best.choices, [])
    )
    took = {item.choices: item.figures.step_time for item in solution.result.evaluated}
    for index in open_ones:
        for item in found:
            if not holes[index].span.is_inside(item.span):
                continue

            def shown(one: Bucketing | None, index: int = index) -> dict[str, Any] | None:
                if one is None:
                    return None
                known = holes[index].choices
                place = known.index(one.text) if one.text in known else None
                step = took.get((*choices[:index], place, *choices[index + 1 :]))
                return {"value": one.text, "added_s": one.added, "fits": one.fits, "step_time_s": step}

            yield {
                "line": solution.plan.written(holes[index].span).line,
                "hole": holes[index].what,
                "algorithm_1": shown(item.algorithm_1),
                "least": shown(item.least),
            }


def _candidate(solution: Solution, item: Evaluated) -> dict[str, Any]:
    figures = item.figures
    return {
        "choices": _choices(solution, item.choices),
        "step_time_s": figures.step_time,
        "peak_active_bytes": figures.metric("peak_memory", "bytes"),
        "peak_reserved_bytes": figures.metric("reserved_memory", "bytes"),
        "exposed_communication_by_axis_s": dict(figures.exposed),
        "bubble_fraction": figures.bubble,
        "recompute_s": figures.recompute,
        "whole": figures.whole,
        "objective": solution.of(item),
        "verdict": verdict(item),
    }


def verdict(item: Evaluated) -> str:
    """Return `feasible`, or the reason why a candidate is not."""
    if item.figures.fits is False:
        return "does not fit"
    violated = ", ".join(f"{required.metric} {required.limit}" for required in item.violated)
    return f"violates {violated}" if violated else "feasible"


def terminal(solution: Solution, *, top: int = SHOWN) -> str:
    """Return the solution as lines of text: the answers, the best few candidates, and the comparison with them.

    Args:
        solution: of a plan.
        top: candidates to show.
    """
    blocks = [
        list(_head(solution)),
        list(_answers(solution)),
        list(_table(solution, top)),
        list(_jointly(solution)),
        list(_failures(solution)),
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks if block) + "\n"


def _head(solution: Solution) -> Iterator[str]:
    found, objective = solution.result, solution.objective
    dimension = METRICS[objective.metric].dimensions[0]
    if solution.value is None:
        yield f"no solution: {STATUSES[found.status]}"
    else:
        known = ", no bound is known" if found.bound is None else f", bound {words.bound(found.bound, dimension)}"
        gap = "" if solution.gap is None else f", gap {words.share(solution.gap)}"
        so_far = ": the best so far" if found.status in ("time_limit", "interrupted") else ""
        value = words.bound(solution.value, dimension)
        status = _UNBOUNDED if found.status == "bounded" and found.bound is None else STATUSES[found.status]
        yield f"{objective.metric} {value}{known}{gap} ({status}{so_far})"
        same = [
            item for item in found.evaluated if item.feasible and rounded(solution.of(item)) == rounded(solution.value)
        ]
        if len(same) > 1:
            yield f"{len(same):,} candidates have this {objective.metric}: none of them reserves less memory"
    refused = sum(found.refused.values())
    yield (
        f"{counted(found.total, 'way')} to fill {counted(len(solution.plan.holes), 'hole')}: "
        f"{refused:,} not legal, {found.bounded:,} excluded by a bound, {len(found.evaluated):,} evaluated with "
        f"{counted(solution.simulated, 'program')}"
    )
    if found.left_out:
        yield f"{found.left_out:,} of them have other styles than those that were tried"


def _answers(solution: Solution) -> Iterator[str]:
    if solution.best is not None:
        chosen = _choices(solution, solution.best.choices)
        width = max(len(item["hole"]) for item in chosen)
        for item in chosen:
            yield f"  {item['hole']:<{width}}  {item['value']}  (line {item['line']})"
    for item in _buckets(solution):
        yield f"  buckets of line {item['line']}, and what their communication is foreseen to add to a step"
        for name, one in (("Algorithm 1", item["algorithm_1"]), ("least", item["least"])):
            if one is None:
                yield f"    {name:<11}  none fits"
                continue
            step = "" if one["step_time_s"] is None else f", step {words.seconds(one['step_time_s'])}"
            fits = "" if one["fits"] else ", does not fit"
            yield f"    {name:<11}  {words.seconds(one['added_s'])}{step}{fits}: {one['value']}"


def _table(solution: Solution, top: int) -> Iterator[str]:
    shown = [(f"{place}", item, "") for place, item in enumerate(solution.ranked()[:top], start=1)]
    baselines = [(item.name, item.found, item.note) for item in solution.baselines]
    named = [hole for hole in solution.plan.holes if hole.line is None]  # styles are many, and are listed above
    extra = _extra(solution)
    rows = [("", *(hole.what for hole in named), "step", "memory", "exposed", "bubble", "recompute", *extra, "")]
    for name, one, note in [*shown, *baselines]:
        if one is None:
            rows.append((name, *("" for _ in named), "", "", "", "", "", *("" for _ in extra), note))
        else:
            rows.append((name, *_row(solution, one)))
    if len(rows) == 1:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))


def _jointly(solution: Solution) -> Iterator[str]:
    """Yield the result of the joint program for memory beside the greedy choice."""
    answers = solution.joint
    if answers is None or answers.program is None:
        return
    yield f"memory decided jointly by {counted(answers.programs, 'program')}"
    for name, tried in (("program", answers.program), ("greedy", answers.greedy)):
        if tried is None:
            yield f"  {name:<7}  found nothing that fits"
            continue
        took = "not simulated" if tried.found is None else f"step {words.seconds(tried.found.figures.step_time)}"
        stands = "" if tried.found is None or tried.found.feasible else f", {verdict(tried.found)}"
        yield f"  {name:<7}  {took}, {words.seconds(tried.predicted)} predicted{stands}"
    if answers.greedy is not None and answers.program.predicted >= answers.greedy.predicted:
        yield "  the program has nothing better than the greedy choice"


def _row(solution: Solution, item: Evaluated) -> Sequence[str]:
    figures = item.figures
    values = [
        "" if index is None else hole.choices[index]
        for hole, index in zip(solution.plan.holes, item.choices, strict=True)
        if hole.line is None
    ]
    exposed = [f"{axis} {words.seconds(took)}" for axis, took in figures.exposed.items() if took]
    return (
        *values,
        words.seconds(figures.step_time),
        words.size(figures.metric("peak_memory", "bytes")),
        ", ".join(exposed) or "none",
        words.share(figures.bubble),
        words.share(figures.recompute / figures.step_time),
        *(_figure(solution, item) for _ in _extra(solution)),
        _why(solution, item),
    )


def _extra(solution: Solution) -> Sequence[str]:
    """Return the heading of the objective's column, where the table has none for it otherwise."""
    metric = solution.objective.metric
    return () if metric in _COLUMNS else (metric,)


def _figure(solution: Solution, item: Evaluated) -> str:
    return words.bound(solution.of(item), METRICS[solution.objective.metric].dimensions[0])


def _why(solution: Solution, item: Evaluated) -> str:
    """Return why a candidate loses against the best: its violation, its objective, or the part of its step that grows.

    Steps are compared under any objective, and explained where they are longer.
    """
    best = solution.best
    if best is None or not item.feasible:
        return verdict(item)
    if item.choices == best.choices:
        return "the solution"
    parts = {name: seconds - _parts(best)[name] for name, seconds in _parts(item).items() if name in _parts(best)}
    parts |= {name: seconds for name, seconds in _parts(item).items() if name not in parts}
    slower = item.figures.step_time - best.figures.step_time
    name, most = max(parts.items(), key=lambda pair: pair[1])
    relative = slower / best.figures.step_time
    by = f"{_objective(solution, item)}{100 * relative:+.1f}% step"
    return by if slower < 0 or most <= _SMALL * best.figures.step_time else f"{by}: {words.seconds(most)} more {name}"


def _objective(solution: Solution, item: Evaluated) -> str:
    """Return a candidate's objective beside the best one's, unless that is the step."""
    metric, value, best = solution.objective.metric, solution.of(item), solution.value
    if metric == "step_time" or best is None:
        return ""
    if rounded(value) == rounded(best):
        return f"same {metric}; "
    shown = _figure(solution, item)
    return f"{100 * (value / best - 1):+.1f}% {metric} ({shown}); " if best else f"{metric} {shown}; "


def _parts(item: Evaluated) -> dict[str, float]:
    figures = item.figures
    return {
        "computation": figures.compute - figures.recompute,
        "recomputation": figures.recompute,
        "waiting": figures.waiting,
        **{f"exposed communication on {axis}": took for axis, took in figures.exposed.items()},
    }


def _failures(solution: Solution) -> Iterator[str]:
    if solution.result.failed:
        count = len(solution.result.failed)
        reason = solution.result.failed[0][1]
        theirs = "their lower bounds count" if count > 1 else "its lower bound counts"
        yield f"{counted(count, 'candidate')} could not be simulated, and only {theirs}: {reason}"
