"""Writes the reference: statements from the registry of directives, diagnostics from the pages of the rules."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any, Final

from legoai.dsl.diagnostics.examples import EXAMPLES
from legoai.dsl.diagnostics.rule import Rule
from legoai.dsl.diagnostics.vocabulary import torchtitan
from legoai.dsl.frontend.parsing.suppress import NEVER_ACCEPTED
from legoai.dsl.rules import all_rules
from legoai.specs.directives import FAMILIES, family
from legoai.specs.directives.base import MISSING, Calls, Declared, Directive, Option, Treatment, describe
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.kinds import Choice, Fraction, Kind, ListOf, Size, Text, parts_of
from legoai.specs.directives.require import METRICS
from legoai.specs.units import format_bytes, format_fraction

OWN_STATEMENTS: Final[dict[str, tuple[str, str]]] = {
    "plan": (
        "plan NAME",
        "The plan's name, which its program, its logs and its checkpoints carry. It is the first statement.",
    ),
    "extends": (
        'extends "base.plan"',
        "Start from another plan, named relative to this one. A statement of this plan replaces the like one of the\n"
        "base; `let`, `require` and `variant` are alike where they name the same, `require` in one dimension and from\n"
        "one side, `shard` where it is on the same axis.",
    ),
    "let": (
        "let NAME = VALUE",
        "A named value, to be used wherever a value stands. `--set NAME=VALUE` gives it another one on the command\n"
        "line. Numbers and names may be computed with: `+ - * / // %`, `min`, `max` and `floor`.",
    ),
    "variant": (
        "variant NAME { statements }",
        "Statements that replace the like ones of the plan where `--variant NAME` asks for them. `legoai lint` looks\n"
        "at every variant. A statement with rules changes the like one on the same axes: its rules replace those of\n"
        "the same paths and stand beside the others, and so do its options. `PATH = unset` takes a rule away.",
    ),
    "unset": (
        "unset STATEMENT [NAME] [on axis, …]",
        "Takes a statement of the base plan away, or in a variant one of the plan: `unset clip`, `unset fsdp`,\n"
        "`unset shard on tp`, `unset require peak_memory`, `unset let hosts`, `unset variant long_context`. What has\n"
        "defaults has them again. `model`, `cluster` and `batch` can only be replaced. In front of a statement with\n"
        "rules it makes a variant replace the whole of it.",
    ),
    "require": (
        "require FIGURE <= VALUE",
        "A bound that the plan keeps. Comparisons are `<= < >= > ==`. A figure may be bounded once from each side,\n"
        "and as a share of the step beside a time: `require recompute <= 2%` and `require recompute <= 40ms`.\n"
        "Which of the two a bound is follows from the `let` names of its own file and of that file's bases. Where a\n"
        "variant, an extending plan or `--set` makes it the other one, it replaces the same as before, and two bounds\n"
        "of one kind are an error.",
    ),
    "minimize": ("minimize FIGURE", "The figure that solving makes smallest. Figures are those of `require`."),
    "maximize": ("maximize FIGURE", "The figure that solving makes largest. Figures are those of `require`."),
    "solved": (
        'solved "sha256:…" by legoai VERSION, device profile NAME@HASH, gap G%',
        "Written by the solver, never by hand: the plan that it answered and how good its answers are. A plan that\n"
        "was changed since, or whose domains, requirements or objective were, is a diagnostic. The gap is `unknown`\n"
        "where a search was stopped before it had a bound. Where a search did not end by itself, the line ends with\n"
        "what stopped it, `, stopped at the time limit` or `, interrupted`: the answers are the best until then.",
    ),
}
"""Statements of the language itself: form and page of each. All others are directive families."""

WORDS: Final[dict[str, tuple[str, str]]] = {
    "auto": (
        "OPTION = auto [in DOMAIN] [-> ANSWER]",
        "A hole: a value that `legoai solve` finds and writes behind `->`. The domain, a list or a range, limits it.",
    ),
    "in": (
        "OPTION = auto in [1, 2, 4]",
        "Precedes the domain of a hole: a list of values, or a range of whole numbers such as `1..8`.",
    ),
    "rest": ("mesh (AXIS = rest)", "The size of the one axis that takes all devices which the other axes leave."),
    "root": ("root = TREATMENT", "As a path, the model itself."),
    "on": ("STATEMENT on AXIS, …", "Precedes the axes of the mesh that a statement uses."),
    "true": ("OPTION = true", "The value of an option that is switched on; the bare name of the option says the same."),
    "false": ("OPTION = false", "The value of an option that is switched off."),
}
"""Words inside of statements that are no names of their own: form and page of each."""

GROUPS: Final[dict[str, str]] = {
    "LP0": "What cannot be read or done",
    "LP1": "Text that is not of the language",
    "LP2": "Names, values and paths",
    "LP3": "Mesh and cluster",
    "LP4": "Placements and divisibility",
    "LP5": "Pipeline",
    "LP6": "Batch, precision, compilation and what does not go together",
    "LP7": "Budgets",
    "LP8": "Performance",
    "LP9": "Hygiene",
}
"""Beginnings of codes, and what the rules behind them are about."""

_GENERATED: Final = (
    "<!-- Written by `python -m legoai.dsl.reporting.reference --write`; a test keeps it current. -->\n\n"
)

_TORCHTITAN: Final = "<!-- the table of TorchTitan's options -->"
"""Stands in the introduction where the table is written."""


def value_text(value: Any, kind: Kind) -> str:
    """A value as a plan writes it; ``auto`` where it is not decided."""
    if isinstance(value, Hole):
        return "auto"
    if isinstance(value, Treatment):
        return _treatment_text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        inner = next((part.item for part in parts_of(kind) if isinstance(part, ListOf)), kind)
        return f"[{', '.join(value_text(item, inner) for item in value)}]"
    if isinstance(value, str):
        quoted = any(isinstance(part, Text) for part in parts_of(kind)) and value not in _names(kind)
        return json.dumps(value, ensure_ascii=False) if quoted else value
    if any(isinstance(part, Fraction) for part in parts_of(kind)) and isinstance(value, float):
        return format_fraction(value)
    if any(isinstance(part, Size) for part in parts_of(kind)):
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _treatment_text(treatment: Treatment) -> str:
    """A treatment without what it takes by default; without the option's name where its one required option is all."""
    given = [
        item
        for item in treatment.options
        if item.required or describe(getattr(treatment, item.field)) != describe(item.default)
    ]
    words = [value_text(getattr(treatment, item.field), item.kind) for item in given]
    if [item for item in treatment.options if item.required] != given or len(given) != 1:
        words = [f"{item.name} = {word}" for item, word in zip(given, words, strict=True)]
    return f"{treatment.name}({', '.join(words)})" if words else treatment.name


def _names(kind: Kind) -> set[str]:
    return {name for part in parts_of(kind) if isinstance(part, Choice) for name in part.names}


def keyword_page(keyword: str) -> str:
    """The reference of one statement, a directive or one of the language's own, as Markdown without a heading."""
    if keyword in FAMILIES:
        return _directive_page(family(keyword))
    form, page = OWN_STATEMENTS[keyword]
    parts = [f"`{form}`", page, *_example(keyword)]
    if keyword == "require":
        rows = [f"- `{name}` ({' or '.join(metric.dimensions)}): {metric.doc}" for name, metric in METRICS.items()]
        parts.append("\n".join(["Figures:\n", *rows]))
    return "\n\n".join(parts) + "\n"


def _example(keyword: str) -> list[str]:
    return [f"```\n{EXAMPLES[keyword]}\n```"] if keyword in EXAMPLES else []


def _directive_page(declared: type[Directive]) -> str:
    parts = [f"`{_form(declared)}`", cleandoc(declared.__doc__ or ""), *_example(declared.keyword)]
    options = "\n".join(option_lines(declared))
    if options:
        parts.append(options)
    held = {treatment.name for treatment in declared.treatments.treatments} if declared.treatments else set()
    if declared.layouts:
        parts.append("Standard layouts:\n\n" + "\n".join(treatment_lines(declared.layouts)))
    values: dict[tuple[type[Treatment], ...], list[str]] = {}
    for item in declared.options:
        inner = [treatment for treatment in treatments_in(item.kind) if treatment.name not in held]
        if inner:
            values.setdefault(tuple(inner), []).append(f"`{item.name}`")
    for choices, names in values.items():
        parts.append(f"Values of {', '.join(names)}:\n\n" + "\n".join(treatment_lines(choices)))
    if declared.treatments is not None:
        treatments = declared.treatments.treatments
        parts.append(
            f"What a rule may say of the {_named(declared)} it names:\n\n" + "\n".join(treatment_lines(treatments))
        )
        inner = [found for treatment in treatments for item in treatment.options for found in treatments_in(item.kind)]
        inner = [found for found in dict.fromkeys(inner) if found not in treatments]
        if inner:
            parts.append("Values in their arguments:\n\n" + "\n".join(treatment_lines(inner)))
    return "\n\n".join(parts) + "\n"


def _named(declared: type[Directive]) -> str:
    return "modules or parameters" if declared.names_parameters else "modules"


def _form(declared: type[Directive]) -> str:
    """The statement's form, with its options by name."""
    options = [item for item in declared.options if item.field != declared.subject]
    inside = ", ".join(f"{item.name} = …" for item in options)
    form = declared.keyword
    if declared.subject is not None:
        form += f" {declared.subject.upper()}" + (f"({inside})" if declared.subject_holds_options else "")
    if declared.layouts:
        form += f" [{' | '.join(layout.name for layout in declared.layouts)}]"
    if declared.axis_use is not None:
        form += f" on {' | '.join(declared.axis_use.names)}"
    if inside and not declared.subject_holds_options:
        form += f" ({inside})"
    if declared.treatments is not None:
        form += f" {{ PATH = {' | '.join(treatment.signature() for treatment in declared.treatments.treatments)} }}"
    return form


def option_lines(declared: type[Declared], indent: str = "") -> Iterator[str]:
    """Each option of a directive or treatment: its name, what it is, and which values are legal."""
    for item in declared.options:
        yield f"{indent}- `{item.name}`: {item.doc} {legal_values(item)}"


def legal_values(item: Option) -> str:
    """A sentence on the values that an option may have, and on its default."""
    legal = item.kind.describe()
    if item.default is MISSING:
        return f"Must be given, as {legal}."
    if item.default is None:
        return f"May be given, as {legal}."
    return f"{legal[:1].upper()}{legal[1:]}; by default `{value_text(item.default, item.kind)}`."


def treatment_lines(treatments: Sequence[type[Treatment]]) -> Iterator[str]:
    """Each treatment with its options."""
    for treatment in treatments:
        yield f"- `{treatment.signature()}`: {' '.join(cleandoc(treatment.__doc__ or '').split())}"
        yield from option_lines(treatment, "  ")


def treatments_in(kind: Kind) -> list[type[Treatment]]:
    """Every treatment that a value of the kind may be, those inside of lists included."""
    found: list[type[Treatment]] = []
    for part in parts_of(kind):
        if isinstance(part, Calls):
            found += part.treatments
        elif isinstance(part, ListOf):
            found += treatments_in(part.item)
    return list(dict.fromkeys(found))


def defaults() -> Iterator[tuple[str, Option, str]]:
    """Every default of the language: its owner, such as ``fsdp`` or ``shard: colwise``, the option, and its text."""
    for keyword in FAMILIES:
        declared = family(keyword)
        owners: list[tuple[str, type[Declared]]] = [(keyword, declared)]
        inner = [*(declared.treatments.treatments if declared.treatments else ())]
        inner += [treatment for item in declared.options for treatment in treatments_in(item.kind)]
        owners += [(f"{keyword}: {treatment.name}", treatment) for treatment in dict.fromkeys(inner)]
        for owner, holder in owners:
            for item in holder.options:
                if item.default is not MISSING and item.default is not None:
                    yield owner, item, value_text(item.default, item.kind)


def rule_page(rule: type[Rule], *, heading: str = "##") -> str:
    """A rule's page as Markdown, whose sections have headings of the level ``heading``."""
    page = cleandoc(rule.__doc__ or "").replace("\n## ", f"\n{heading} ")
    return f"{page}\n"


def rules_document() -> str:
    """`docs/rules.md`: every rule's page, by family."""
    pages = {rule.code: rule for rule in reversed(all_rules())}
    parts = [
        "# Diagnostics\n\nEvery diagnostic has a stable code. `legoai explain CODE` prints its page. "
        "`# legoai: ignore[CODE]`\nbehind a line, or on a line of its own above it, accepts the diagnostic there. "
        f"What leaves no plan, or no figures\nto check, cannot be accepted: {', '.join(NEVER_ACCEPTED)}.\n"
    ]
    for prefix, title in GROUPS.items():
        codes = sorted(code for code in pages if code.startswith(prefix))
        if codes:
            parts.append(f"## {prefix}xx: {title}\n")
        for code in codes:
            rule = pages[code]
            severity = "" if rule.severity == "error" else f" ({rule.severity})"
            parts.append(f"### {code} {rule.slug}{severity}\n\n{rule_page(rule, heading='####')}")
    return _GENERATED + "\n".join(parts)


def torchtitan_table() -> str:
    """What TorchTitan's configuration calls what, as a Markdown table: an option of it, and the statement."""
    rows = [f"| {options} | {ours.replace('|', chr(92) + '|')} |" for options, ours in torchtitan()]
    return "\n".join(["| TorchTitan | in a plan |", "|---|---|", *rows])


def language_document(introduction: str) -> str:
    """`docs/language.md`: the hand-written introduction, then every statement."""
    parts = [
        introduction.replace(_TORCHTITAN, torchtitan_table()).rstrip() + "\n",
        "## Statements of the language itself\n",
    ]
    parts += [f"### `{keyword}`\n\n{keyword_page(keyword)}" for keyword in OWN_STATEMENTS]
    parts.append("## Directives\n")
    parts += [f"### `{keyword}`\n\n{keyword_page(keyword)}" for keyword in FAMILIES]
    return _GENERATED + "\n".join(parts)


def documents(folder: Path) -> dict[Path, str]:
    """The generated documents of the folder ``docs/``: path to text."""
    introduction = (folder / "_introduction.md").read_text(encoding="utf-8")
    return {folder / "language.md": language_document(introduction), folder / "rules.md": rules_document()}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the documents, or say which are not current."""
    parser = ArgumentParser(prog="python -m legoai.dsl.reporting.reference", description=__doc__)
    parser.add_argument(
        "--docs", type=Path, default=Path("docs"), metavar="FOLDER", help="where they are (default: docs)"
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write them")
    action.add_argument("--check", action="store_true", help="fail where one is not current")
    arguments = parser.parse_args(argv)
    stale = []
    for path, text in documents(arguments.docs).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
            if arguments.write:
                path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{'wrote' if arguments.write else 'not current:'} {path}")
    return int(bool(stale) and not arguments.write)


if __name__ == "__main__":
    sys.exit(main())
