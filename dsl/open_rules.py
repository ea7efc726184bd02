"""Expansion of `shard auto on tp` into one rule for each module with a choice of styles, in the plan's text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.parallelism.styles import open_paths
from legoai.dsl.diagnostics.diagnostic import Edit, Fix, apply_fixes
from legoai.dsl.formatting.unedited import Unedited
from legoai.dsl.frontend.paths import pattern
from legoai.dsl.frontend.statements.merge import Reads
from legoai.dsl.frontend.syntax import Auto, Statement, Variant
from legoai.dsl.holes import chooses_styles, place_of_rules
from legoai.dsl.lint import Announce, Linted, lint
from legoai.specs.directives.shard import Shard
from legoai.specs.record import replace
from legoai.specs.span import Span


def with_open_rules(
    linted: Linted,
    *,
    directory: Path,
    settings: Mapping[str, str] | None = None,
    read: Reads | None = None,
    announce: Announce | None = None,
    reopen: bool = False,
) -> Linted:
    """Return the plan with a rule `PATH = auto` for each module that `shard auto on tp` covers.

    A plan without such a statement of its own, or with a model that is unknown or reads no tokens, is returned
    unchanged. Diagnostics name the lines that a person wrote. ``reopen`` is that of :func:`legoai.dsl.lint.lint`;
    other arguments are those of :class:`legoai.dsl.open_plan.OpenPlan`.
    """
    analysis, file = linted.analysis, linted.resolution.file
    if analysis is None or analysis.manifest is None or not chooses_styles(analysis):
        return linted
    edits: list[tuple[Edit, Span]] = []
    for shard in analysis.plan.shard:
        place = place_of_rules(shard)
        found = _statement(linted, place) if place is not None else None
        if found is not None:
            edits += [(edit, found.span) for edit in _edits(file.text, found, _lines(analysis, shard))]
    if not edits:
        return linted
    text = apply_fixes(file.text, [Fix("", (edit,), safe=True) for edit, _ in edits])
    unedited = Unedited(file, tuple(sorted(edits, key=lambda item: item[0].span.start)))
    again = lint(
        text, file.name, directory=directory, settings=settings, variant=linted.resolution.variant, announce=announce,
        read=read, variants=False, reopen=reopen,
    )  # fmt: skip
    return replace(
        again,
        diagnostics=tuple(unedited.diagnostics(again.diagnostics)),
        files=unedited.files(again.files),
        unedited=unedited,
    )


def _statement(linted: Linted, place: Span) -> Statement | None:
    """Return the statement of the plan's own text that starts there; None where it is in a base plan."""
    own = linted.resolution.file.statements
    inside = (item for variant in own if isinstance(variant, Variant) for item in variant.statements)
    for item in (*own, *inside):
        if isinstance(item, Statement) and isinstance(item.subject, Auto) and item.subject.span == place:
            return item
    return None


def _lines(analysis: Analysis, shard: Shard) -> list[str]:
    """The rules of modules that no rule of the statement names."""
    assert analysis.manifest is not None
    paths = analysis.paths_for(shard)
    named = {path for rule in shard.rules[1:] for path in paths.matching(pattern(rule.path))}
    patterns = list(open_paths(analysis.manifest, frozenset(named)))
    width = max(map(len, patterns), default=0)
    return [f"{path:<{width}} = auto" for path in patterns]


def _edits(text: str, statement: Statement, lines: list[str]) -> list[Edit]:
    """Return the edits that write the rules into the statement's block, before its own, in place of `auto`."""
    assert statement.subject is not None
    after = text[statement.subject.span.end :]
    start = statement.subject.span
    edits = [Edit(start._replace(end=start.end + len(after) - len(after.lstrip(" \t"))), "")]
    head = text.rfind("\n", 0, statement.span.start) + 1
    margin = text[head : statement.span.start] if not text[head : statement.span.start].strip() else ""
    body = "".join(f"\n{margin}  {line}" for line in lines)
    block = statement.block
    if block is None:
        end = statement.span
        edits.append(Edit(end._replace(start=end.end), f" {{{body}\n{margin}}}"))
    else:
        rest = text[block.span.start + 1 : block.span.end - 1]
        alone = "\n" in rest
        edits.append(Edit(block.span._replace(start=block.span.start + 1, end=block.span.start + 1), body))
        if not alone:
            opened = block.span.start + 1
            own = rest.strip()
            edits[-1] = Edit(
                block.span._replace(start=opened, end=block.span.end - 1),
                f"{body}{f'{chr(10)}{margin}  {own}' if own else ''}\n{margin}",
            )
    return edits
