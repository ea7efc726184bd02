"""Difference of two plans as text, Markdown and JSON; `docs/diff-output.md` documents the fields of the last."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from legoai.cost import words
from legoai.dsl.differences.changes import Change
from legoai.dsl.differences.checkpoints import Loading
from legoai.dsl.differences.communication import Group
from legoai.dsl.differences.comparison import Comparison, Side
from legoai.dsl.differences.numerics import KINDS
from legoai.dsl.differences.summary import StepSize, Summary
from legoai.specs.span import Span
from legoai.specs.visible_text import visible_line

if TYPE_CHECKING:
    from legoai.cost.differences import CostDifference, Effect, Part
    from legoai.cost.search.evaluation.evaluator import Figures

FORMAT_VERSION: Final = 1
"""Adding a field keeps the version; removing or changing one increments it."""

_WIDEST: Final = 72
"""Characters of a change in a line of text; JSON has all of it."""

COLUMNS: Final = ("step time", "peak active", "peak reserved", "exposed comm")


def place(side: Side, span: Span | None) -> str:
    """Return where a value is stated: `a.plan:12`, with the `let` that provides it; `default` if nowhere."""
    if span is None:
        return "default"
    let = side.let_of(span)
    through = f" (`let {let.name.text}`, line {let.span.line})" if let is not None else ""
    return f"{visible_line(side.shown(span.file))}:{span.line}{through}"


def places(comparison: Comparison, change: Change) -> str:
    """Return where both plans state the subject of a change."""
    found = [
        place(side, span)
        for side, value, span in (
            (comparison.before, change.before, change.before_at),
            (comparison.after, change.after, change.after_at),
        )
        if value is not None
    ]
    return " → ".join(dict.fromkeys(found))


def document(
    comparison: Comparison, summary: Summary, cost: CostDifference | None, reason: str | None
) -> dict[str, Any]:
    """The difference as plain data: seconds and bytes.

    Args:
        comparison: of the plans.
        summary: of the comparison.
        cost: None where it is not known.
        reason: why it is not.
    """
    every = (*comparison.changes, *comparison.in_variants)
    return {
        "format_version": FORMAT_VERSION,
        "before": _plan(comparison.before),
        "after": _plan(comparison.after),
        "different": comparison.differs,
        "changes": [_change(comparison, change) for change in every],
        "batch": {
            "changed": summary.steps[0] != summary.steps[1],
            **{name: _step(step) for name, step in zip(("before", "after"), summary.steps, strict=True)},
        },
        "numerics": {
            "effect": summary.numerics,
            "reasons": [
                {"change": every.index(item.change), "effect": item.kind, "why": item.why} for item in summary.reasons
            ],
        },
        "checkpoints": {"forward": _loading(summary.forward), "backward": _loading(summary.backward)},
        "communication": None
        if summary.communication is None
        else [
            {
                "axes": item.name.split("+"),
                "changed": item.before != item.after,
                "before": _group(item.before),
                "after": _group(item.after),
            }
            for item in summary.communication
        ],
        "cost": None if cost is None else _cost(cost, every),
        "cost_reason": reason,
    }


def _plan(side: Side) -> dict[str, Any]:
    return {
        "file": side.linted.resolution.file.name,
        "name": side.plan.name,
        "hash": side.plan.digest,
        "variant": side.plan.variant,
    }


def _change(comparison: Comparison, change: Change) -> dict[str, Any]:
    return {
        "subject": change.subject,
        "statement": change.statement,
        "what": change.what,
        "kind": change.kind,
        "variant": change.variant,
        "before": change.before,
        "after": change.after,
        "before_at": _at(comparison.before, change.before_at),
        "after_at": _at(comparison.after, change.after_at),
    }


def _at(side: Side, span: Span | None) -> dict[str, Any] | None:
    if span is None:
        return None
    let = side.let_of(span)
    return {
        "file": side.shown(span.file),
        "line": span.line,
        "let": None
        if let is None
        else {"name": let.name.text, "file": side.shown(let.span.file), "line": let.span.line},
    }


def _step(step: StepSize) -> dict[str, Any]:
    return {
        "samples_per_step": step.samples,
        "tokens_per_step": step.tokens,
        "micro_batches_per_rank": step.micro_batches,
        "ramp": step.ramp,
    }


def _loading(found: Loading) -> dict[str, Any]:
    return {"verdict": found.verdict, "reasons": list(found.reasons), "notes": list(found.notes)}


def _group(group: Group | None) -> dict[str, Any] | None:
    if group is None:
        return None
    return {"groups": group.groups, "ranks": group.ranks, "stride": group.stride, "hosts": group.hosts}


def _cost(cost: CostDifference, every: Sequence[Change]) -> dict[str, Any]:
    return {
        "before": _figures(cost.before),
        "after": _figures(cost.after),
        "whole": _effect(cost.whole),
        "parts": [
            {
                "changes": [every.index(change) for change in part.changes],
                "effect": None if part.effect is None else _effect(part.effect),
                "simulated": part.simulated,
                "reason": part.reason or None,
            }
            for part in cost.parts
        ],
        "interaction": _effect(cost.interaction),
        "programs": cost.programs,
    }


def _figures(figures: Figures) -> dict[str, Any]:
    return {
        "step_time_s": figures.step_time,
        "peak_active_bytes": round(figures.metric("peak_memory", "bytes")),
        "peak_reserved_bytes": round(figures.metric("reserved_memory", "bytes")),
        "exposed_communication_s": figures.metric("exposed_comm", "seconds"),
        "exposed_communication_by_axis_s": dict(figures.exposed),
        "fits": figures.fits,
        "profile": figures.profile,
    }


def _effect(effect: Effect) -> dict[str, float]:
    return {
        "step_time_s": effect.step_time,
        "peak_active_bytes": round(effect.peak_active),
        "peak_reserved_bytes": round(effect.peak_reserved),
        "exposed_communication_s": effect.exposed,
    }


def terminal(comparison: Comparison, summary: Summary, cost: CostDifference | None, reason: str | None) -> str:
    """The difference in lines of text. Arguments are those of :func:`document`."""
    if not comparison.differs:
        return f"{_title(comparison)}: no difference\n"
    every = (*comparison.changes, *comparison.in_variants)
    head = f"{_title(comparison)}: {len(every)} change{'s' * (len(every) != 1)}"
    blocks = [
        [head],
        words.columns([(_cut(change.line), places(comparison, change)) for change in every]),
        list(_costs(comparison, cost, reason)),
        list(facts(summary)),
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks if block) + "\n"


def _title(comparison: Comparison) -> str:
    names = [_name(side) for side in (comparison.before, comparison.after)]
    return f"{names[0]} → {names[1]}"


def _name(side: Side) -> str:
    variant = f", variant {side.plan.variant}" if side.plan.variant else ""
    return f"{visible_line(side.linted.resolution.file.name)}{variant}"


def _cut(text: str) -> str:
    text = visible_line(text)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 2]} …"


def _costs(comparison: Comparison, cost: CostDifference | None, reason: str | None) -> Iterator[str]:
    if cost is None:
        if reason is not None:
            yield f"cost: not known, {reason}"
        return
    known = [part for part in cost.parts if part.simulated]
    names = [_cut(f"  {_subjects(part)}") for part in known]
    rows = [
        ("cost of a step", *COLUMNS),
        (_name(comparison.before), *absolute(cost.before)),
        *((name, *_cells(part, cost)) for name, part in zip(names, known, strict=True)),
    ]
    interaction = relative(cost.interaction, cost)
    # With one change of the program too: another that leaves the first program unchanged can counter it.
    if len(known) > 1 or any(part.effect is None for part in known) or {*interaction} != {"0"}:
        rows.append(("  interaction", *interaction))
    rows.append((_name(comparison.after), *absolute(cost.after)))
    rows.append(("  in all", *relative(cost.whole, cost)))
    yield from words.columns(rows)
    free = [part for part in cost.parts if not part.simulated]
    if free:
        yield f"cost nothing: {', '.join(map(_subjects, free))}"
    for part in known:
        if part.effect is None:
            yield f"not known alone, and so within the interaction: {_subjects(part)}: {part.reason}"
    if any(len(part.changes) > 1 for part in known):
        yield "changes in one line can only be made together"
    for side, figures in ((comparison.before, cost.before), (comparison.after, cost.after)):
        if figures.fits is False:
            yield f"{_name(side)} does not fit the memory of its devices"


def _subjects(part: Part) -> str:
    return " + ".join(change.subject for change in part.changes)


def _cells(part: Part, cost: CostDifference) -> tuple[str, ...]:
    return ("?",) * len(COLUMNS) if part.effect is None else relative(part.effect, cost)


def absolute(figures: Figures) -> tuple[str, ...]:
    """The cells of a plan's figures."""
    return (
        words.seconds(figures.step_time),
        words.size(figures.metric("peak_memory", "bytes")),
        words.size(figures.metric("reserved_memory", "bytes")),
        words.seconds(figures.metric("exposed_comm", "seconds")),
    )


def relative(effect: Effect, cost: CostDifference) -> tuple[str, ...]:
    """The cells of an effect; the step's with its share of the first plan's step."""
    return (
        words.signed_share(effect.step_time, cost.before.step_time, words.seconds),
        words.signed(effect.peak_active, words.size),
        words.signed(effect.peak_reserved, words.size),
        words.signed(effect.exposed, words.seconds),
    )


def facts(summary: Summary) -> Iterator[str]:
    """Batch, numerics, checkpoints and communication, a line each."""
    before, after = summary.steps
    if before == after:
        yield f"batch: unchanged, {_batch(before)}"
    else:
        yield f"batch: {_batch(before)} → {_batch(after)}"
    yield f"numerics: {KINDS[summary.numerics]}"
    for item in summary.reasons:
        yield f"  {item.change.subject}: {item.why}"
    forward, backward = summary.forward, summary.backward
    yield f"checkpoints of the first under the second: {forward.words}"
    yield from (f"  {line}" for line in (*forward.reasons, *forward.notes))
    if backward.verdict != forward.verdict:
        yield f"checkpoints of the second under the first: {backward.words}"
        yield from (f"  {line}" for line in backward.reasons)
    if summary.communication is None:
        yield "communication: not known, since the mesh is not decided"
        return
    changed = [item for item in summary.communication if item.before != item.after]
    yield f"communication: {'' if changed else 'unchanged'}".rstrip()
    for axis in changed:
        ends = [group.words if group is not None else "none" for group in (axis.before, axis.after)]
        yield f"  {axis.name}: {ends[0]} → {ends[1]}"


def _batch(step: StepSize) -> str:
    samples = "undecided" if step.samples is None else f"{step.samples:,} samples"
    tokens = "" if step.tokens is None else f" of {step.tokens:,} tokens"
    count = (
        ""
        if step.micro_batches is None
        else f" in {step.micro_batches} micro batch{'es' * (step.micro_batches != 1)} of a rank"
    )
    return f"{samples}{tokens}{count}{', after a ramp' if step.ramp else ''}"


def markdown(comparison: Comparison, summary: Summary, cost: CostDifference | None, reason: str | None) -> str:
    """The difference as a comment of a pull request. Arguments are those of :func:`document`."""
    title = f"{_code(_name(comparison.before))} → {_code(_name(comparison.after))}"
    if not comparison.differs:
        return f"**{title}**: no difference\n"
    every = (*comparison.changes, *comparison.in_variants)
    lines = [f"**{title}**: {_headline(every, summary, cost)}", ""]
    if cost is None:
        lines += ["| change | lines |", "|---|---|"]
        lines += [f"| {_cell(change.line)} | {_cell(places(comparison, change))} |" for change in every]
        if reason is not None:
            lines += ["", f"The cost is not known: {_code(reason)}."]
    else:
        lines += [f"| change | lines | {' | '.join(COLUMNS)} |", f"|---|---|{'---:|' * len(COLUMNS)}"]
        for part in cost.parts:
            shown = "<br>".join(_cell(change.line) for change in part.changes)
            where = "<br>".join(_cell(places(comparison, change)) for change in part.changes)
            lines.append(f"| {shown} | {where} | {' | '.join(_cells(part, cost))} |")
        for change in comparison.in_variants:
            lines.append(f"| {_cell(change.line)} | {_cell(places(comparison, change))} |{' |' * len(COLUMNS)}")
        lines.append(f"| interaction | | {' | '.join(relative(cost.interaction, cost))} |")
        lines.append(f"| **in all** | | {' | '.join(relative(cost.whole, cost))} |")
        lines.append(f"| before | | {' | '.join(absolute(cost.before))} |")
        lines.append(f"| after | | {' | '.join(absolute(cost.after))} |")
    inside = list(facts(summary))
    fence = _fence("\n".join(inside), shortest=3)
    lines += ["", "<details><summary>Batch, numerics, checkpoints, communication</summary>", "", fence]
    lines += [*inside, fence, "", "</details>"]
    return "\n".join(lines) + "\n"


def _headline(every: Sequence[Change], summary: Summary, cost: CostDifference | None) -> str:
    parts = []
    if cost is not None:
        step, active, _, _ = relative(cost.whole, cost)
        parts.append(f"step time {'unchanged' if step == '0' else step}")
        parts.append(f"peak memory {'unchanged' if active == '0' else active}")
    parts.append(f"{len(every)} change{'s' * (len(every) != 1)}")
    parts.append(f"numerics {KINDS[summary.numerics].partition(':')[0]}")
    verdict = {"resumes": "resume", "weights": "load as weights only", "partly": "are of another model"}
    parts.append(f"checkpoints {verdict.get(summary.forward.verdict, 'not known')}")
    return ", ".join(parts)


def _cell(text: str) -> str:
    """Code in a cell of a table, whose rows are divided before code is recognised.

    Renderers differ on whether a backslash before an escaped bar escapes the backslash of that: a space parts them.
    """
    return _code(re.sub(r"\\(?=\|)", r"\\ ", text).replace("|", "\\|"))


def _code(text: str) -> str:
    """A text of one line as a code span (CommonMark 0.31, section 6.1)."""
    line = visible_line(text)
    fence = _fence(line)
    pad = " " if line[:1] in ("`", " ") or line[-1:] in ("`", " ") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def _fence(text: str, *, shortest: int = 1) -> str:
    """The backticks around code: more than any that stand together in it."""
    return "`" * max([shortest, *(len(run) + 1 for run in re.findall("`+", text))])
