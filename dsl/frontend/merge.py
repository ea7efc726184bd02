"""Which statements of a plan take effect: those of its bases, its own, and those of a variant."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from legoai.dsl.diagnostics.codes import names as rules
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.frontend.parse import parse
from legoai.dsl.frontend.scope import Definition, Scope
from legoai.dsl.frontend.syntax import AnyStatement, Let, PlanFile, Require, SolvedLine, Statement, String, Variant
from legoai.specs.directives import FAMILIES, family
from legoai.specs.record import replace
from legoai.specs.span import Span

Reads = Callable[[Path], str]
"""How the text of a base plan is read."""


def read_text(path: Path) -> str:
    """A base plan from disk, as UTF-8."""
    return path.read_text(encoding="utf-8")


class Loader:
    """Reads a plan and the plans that it extends."""

    def __init__(self, read: Reads) -> None:
        self.read = read
        self.files: dict[str, PlanFile] = {}
        self.diagnostics: list[Diagnostic] = []
        self.damaged: list[Span] = []

    def parse(self, text: str, name: str) -> PlanFile:
        """The tree of a text that belongs to the plan, kept under its name."""
        parsed = parse(text, name)
        self.files[name] = parsed.file
        self.diagnostics.extend(parsed.diagnostics)
        self.damaged.extend(parsed.damaged)
        return parsed.file

    def unreadable(self) -> Iterator[str]:
        """The first words of statements with mistakes in their syntax."""
        for span in self.damaged:
            yield from re.findall(r"\A\s*(\w+)", self.files[span.file].text[span.start : span.end])

    def flatten(self, file: PlanFile, directory: Path, above: tuple[Path, ...]) -> list[AnyStatement]:
        """The statements of the bases, then those of the file."""
        result: list[AnyStatement] = []
        for statement in file.statements:
            if isinstance(statement, Statement) and statement.keyword.text == "extends":
                result = self._extend(statement, directory, above) + result
            elif isinstance(statement, Variant):
                result.append(self._variant(statement))
            else:
                result.append(statement)
        return result

    def _variant(self, variant: Variant) -> Variant:
        """The variant without statements that only a whole plan can hold."""
        kept = []
        for statement in variant.statements:
            keyword = statement.keyword.text if isinstance(statement, Statement) else ""
            if isinstance(statement, Variant) or keyword in ("plan", "extends"):
                self.diagnostics.append(
                    rules.MisplacedPart.at(
                        head_of(statement),
                        f"`{keyword or 'variant'}` cannot stand inside of a variant",
                        label="move it out",
                        others=[Label(variant.name.span, "inside of this variant")],
                    )
                )
            else:
                kept.append(statement)
        return replace(variant, statements=tuple(kept))

    def _extend(self, statement: Statement, directory: Path, above: tuple[Path, ...]) -> list[AnyStatement]:
        if not isinstance(statement.subject, String) or statement.options or statement.block or statement.axes:
            self._refuse(statement.span, "`extends` takes the base plan's file name in quotes", "not a file name")
            return []
        place = statement.subject.span
        path = Path(os.path.normpath(directory / statement.subject.text))
        if path in above or len(above) > 20:
            self._refuse(place, f"`{statement.subject.text}` extends itself", "the circle closes here")
            return []
        try:
            text = self.read(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
            self._refuse(place, f"`{statement.subject.text}` cannot be read: {reason}", f"looked for {path}")
            return []
        shown = str(path) if path.is_absolute() and not directory.is_absolute() else os.path.relpath(path)
        return [
            item
            for item in self.flatten(self.parse(text, shown), path.parent, (*above, path))
            if not (isinstance(item, Statement) and item.keyword.text == "plan")
        ]

    def _refuse(self, span: Span, message: str, label: str) -> None:
        self.diagnostics.append(rules.CannotExtend.at(span, message, label=label))


def head_of(statement: AnyStatement) -> Span:
    """The span of a statement's beginning, for diagnostics about the whole of it."""
    if isinstance(statement, Statement):
        return statement.keyword.span
    return statement.name.span if isinstance(statement, Variant) else statement.span


def likeness(statement: AnyStatement) -> tuple[str, ...]:
    """What a statement decides: of two statements that are alike in this the later replaces the earlier."""
    if isinstance(statement, Let):
        return "let", statement.name.text
    if isinstance(statement, Require):
        return "require", statement.metric.text, statement.comparison[0]
    if isinstance(statement, SolvedLine):
        return ("solved",)
    if isinstance(statement, Variant):
        return "variant", statement.name.text
    keyword = statement.keyword.text
    if keyword in ("minimize", "maximize"):
        return ("objective",)
    if keyword in FAMILIES and family(keyword).repeats_by_axis:
        return keyword, *(axis.text for axis in statement.axes)
    return (keyword,)


def override(statements: Iterable[AnyStatement], diagnostics: list[Diagnostic]) -> list[AnyStatement]:
    """Let later statements replace like ones, in place; two like ones in the same file are a mistake."""
    held: dict[tuple[str, ...], AnyStatement] = {}
    for statement in statements:
        key = likeness(statement)
        first = held.get(key)
        if first is not None and head_of(first).file == head_of(statement).file:
            what = " ".join(key[:2])
            diagnostics.append(
                rules.DuplicateStatement.at(
                    head_of(statement),
                    f"`{what}` is decided twice",
                    label="decided again",
                    others=[Label(head_of(first), "first decided here")],
                )
            )
            continue
        held[key] = statement
    return list(held.values())


def apply_variant(
    body: list[AnyStatement],
    variants: Mapping[str, Variant],
    name: str,
    file: PlanFile,
    diagnostics: list[Diagnostic],
) -> list[AnyStatement]:
    """The statements with those of the variant in place of like ones."""
    chosen = variants.get(name)
    if chosen is None:
        place = head_of(file.statements[0]) if file.statements else Span(file.name, 0, 0, 1, 1, 1, 1)
        known = tuple(variants)
        listed = f"the plan has {', '.join(f'`{item}`' for item in known)}" if known else "the plan has no variants"
        diagnostics.append(
            rules.UnknownVariant.at(
                place,
                f"the plan has no variant `{name}`",
                label="in this plan",
                help=[*suggestion(name, known), listed],
            )
        )
        return body
    held = {likeness(statement): statement for statement in body}
    inner = override(chosen.statements, diagnostics)
    return list((held | {likeness(statement): statement for statement in inner}).values())


def scope_of(body: Iterable[AnyStatement], settings: Mapping[str, str], loader: Loader) -> Scope:
    """The `let` names of the statements, with the values that the command line gives them."""
    definitions = {item.name.text: Definition(item, "human") for item in body if isinstance(item, Let)}
    for name, text in settings.items():
        line = f"let {name} = {text}".replace("\n", " ")  # one value, and no further statement
        for statement in loader.parse(line, f"--set {name}").statements:
            if not isinstance(statement, Let):
                continue
            if name not in definitions:
                loader.diagnostics.append(
                    rules.UnknownLet.at(
                        statement.name.span,
                        f"the plan has no `let {name}` to set",
                        label="unknown name",
                        help=suggestion(name, tuple(definitions)),
                    )
                )
            else:
                definitions[name] = Definition(statement, "command line")
    return Scope(definitions)
