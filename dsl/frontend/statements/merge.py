"""Merging of statements: those of a plan's bases, its own, and those of a variant."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from legoai.dsl.diagnostics.codes import statements as rules
from legoai.dsl.diagnostics.codes.names import UnknownLet
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.statements.likeness import likeness, with_dimensions
from legoai.dsl.frontend.syntax import (
    AnyStatement,
    Arguments,
    Let,
    Name,
    PlanFile,
    RuleLine,
    Statement,
    String,
    Unset,
    Variant,
    same,
)
from legoai.dsl.frontend.values.scope import Definition
from legoai.specs.directives import FAMILIES, REQUIRED, family
from legoai.specs.record import replace
from legoai.specs.span import Span

Reads = Callable[[Path], str]
"""Reads the text of a base plan."""

OF_SETTING: Final = "--set "
"""How the name of the text begins in which the value of a `let` from the command line stands."""
UNSET: Final = "unset"
"""The value of a rule that removes the rule of the same path."""
_NAMED: Final = ("let", "variant", "require")
"""Statements that `unset` identifies by a name."""
_GOALS: Final = ("minimize", "maximize")
_LONGEST_CHAIN: Final = 100
"""Bases of bases. Far more than a person writes, and far less than Python's own stack."""


class Loader:
    """Reads a plan and the plans that it extends."""

    def __init__(self, read: Reads) -> None:
        self.read = read
        self.files: dict[str, PlanFile] = {}
        self.diagnostics: list[Diagnostic] = []
        self.damaged: list[Span] = []

    def parse(self, text: str, name: str) -> PlanFile:
        """Return the tree of a text that belongs to the plan, and store it under its name."""
        parsed = parse(text, name)
        self.files[name] = parsed.file
        self.diagnostics.extend(parsed.diagnostics)
        self.damaged.extend(parsed.damaged)
        return parsed.file

    def unreadable(self) -> Iterator[str]:
        """The first words of statements with syntax errors."""
        for span in self.damaged:
            yield from re.findall(r"\A\s*(\w+)", self.files[span.file].text[span.start : span.end])

    def flatten(self, file: PlanFile, directory: Path, above: tuple[Path, ...]) -> list[AnyStatement]:
        """Return the effective statements of the bases, followed by those of the file."""
        bases: list[tuple[Statement, list[AnyStatement]]] = []
        own: list[AnyStatement] = []
        for statement in file.statements:
            if isinstance(statement, Statement) and statement.keyword.text == "extends":
                if any(same(statement.subject, other.subject) for other, _ in bases):
                    self.diagnostics.append(_twice(statement, bases[0][0]))
                else:
                    bases.append((statement, self._extend(statement, directory, above)))
            elif isinstance(statement, Variant):
                own.append(self._variant(statement))
            else:
                own.append(statement)
        below = [statement for _, statements in bases for statement in statements]
        own = list(with_dimensions(own, below, file.text))
        return [*self._joined(bases, own), *own]

    def _joined(
        self, bases: Sequence[tuple[Statement, list[AnyStatement]]], own: Sequence[AnyStatement]
    ) -> Iterator[AnyStatement]:
        """Merge the statements of several bases, of which the last wins; where they disagree, the file must decide."""
        held: dict[tuple[str, ...], AnyStatement] = {}
        for extends, statements in bases:
            for statement in statements:
                key = likeness(statement)
                first = held.get(key)
                if first is not None and not same(first, statement) and not _decided(key, first, own):
                    self.diagnostics.append(_disagreement(extends, first, statement))
                held[key] = statement
        yield from held.values()

    def _variant(self, variant: Variant) -> Variant:
        """Return the variant without statements that only a whole plan can contain."""
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
        if path in above:
            self._refuse(place, f"`{statement.subject.text}` extends itself", "the circle closes here")
            return []
        if len(above) >= _LONGEST_CHAIN:
            message = f"more than {_LONGEST_CHAIN} plans extend each other in one chain"
            self._refuse(place, message, "one base plan too many")
            return []
        try:
            text = self.read(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
            help = self._nearby(place.file, directory, path) if isinstance(error, FileNotFoundError) else []
            self._refuse(place, f"`{statement.subject.text}` cannot be read: {reason}", f"looked for {path}", help)
            return []
        shown = str(path) if path.is_absolute() else os.path.relpath(path)
        inside = self.flatten(self.parse(text, shown), path.parent, (*above, path))
        statements = [item for item in inside if not (isinstance(item, Statement) and item.keyword.text == "plan")]
        return override(statements, self.diagnostics)

    def _nearby(self, own: str, directory: Path, path: Path) -> list[str]:
        """Suggest other plans of the project that have the file name of a base that is not there, or one like it."""
        from legoai.dsl.frontend.files.project import similar_plans

        try:
            itself = os.path.relpath(own, directory)
            found = [os.path.relpath(item, directory) for item in similar_plans(directory, path) if self._is_read(item)]
        except FileNotFoundError:
            return []  # a relative name, and the working folder has been deleted
        return [f"did you mean `{name}`?" for name in found if name != itself]

    def _is_read(self, path: Path) -> bool:
        """Whether a plan can be read as bases are: those of a revision are not the files of the working tree."""
        try:
            self.read(path)
        except (OSError, ValueError):
            return False
        return True

    def _refuse(self, span: Span, message: str, label: str, help: Sequence[str] = ()) -> None:
        self.diagnostics.append(rules.CannotExtend.at(span, message, label=label, help=help))


def head_of(statement: AnyStatement) -> Span:
    """The span of a statement's beginning, for diagnostics about the whole of it."""
    if isinstance(statement, Statement):
        return statement.keyword.span
    if isinstance(statement, Unset):
        return statement.span
    return statement.name.span if isinstance(statement, Variant) else statement.span


def override(statements: Iterable[AnyStatement], diagnostics: list[Diagnostic]) -> list[AnyStatement]:
    """Replace earlier statements by later ones with equal keys, in place; two in the same file are an error."""
    held: dict[tuple[str, ...], AnyStatement] = {}
    for statement in statements:
        file = head_of(statement).file
        if isinstance(statement, Unset):
            _take_away(statement, held, partial(_is_in, file), diagnostics)
            continue
        key = likeness(statement)
        first = held.get(key)
        if first is not None and _is_in(file, first):
            diagnostics.append(_twice(statement, first))
            continue
        held[key] = statement
    return list(held.values())


def _is_in(file: str, statement: AnyStatement) -> bool:
    return head_of(statement).file == file


def _decided(key: tuple[str, ...], statement: AnyStatement, own: Iterable[AnyStatement]) -> bool:
    """Whether a file itself replaces a statement of its bases with this key, or removes it."""
    return any(_means(item, key, statement) if isinstance(item, Unset) else likeness(item) == key for item in own)


def _disagreement(extends: Statement, first: AnyStatement, second: AnyStatement) -> Diagnostic:
    what = " ".join(likeness(second)[:2])
    return rules.BasesDisagree.at(
        extends.span,
        f"the base plans decide `{what}` differently",
        label="decides it once more",
        others=[Label(head_of(first), "decided in one base"), Label(head_of(second), "decided in the other")],
        help=[f"write the `{likeness(second)[0]}` that is meant in this plan: it takes the place of both"],
    )


def _twice(statement: AnyStatement, first: AnyStatement) -> Diagnostic:
    return rules.DuplicateStatement.at(
        head_of(statement),
        f"`{' '.join(likeness(statement)[:2])}` is decided twice",
        label="decided again",
        others=[Label(head_of(first), "first decided here")],
    )


def _take_away(
    unset: Unset,
    held: dict[tuple[str, ...], AnyStatement],
    is_own: Callable[[AnyStatement], bool],
    diagnostics: list[Diagnostic],
) -> None:
    """Remove the statement that ``unset`` names from the effective statements.

    Args:
        unset: the statement.
        held: effective statements by key; changed.
        is_own: whether one of them is in the same file or variant as ``unset``.
        diagnostics: receives an error if ``unset`` removes nothing.
    """
    shown = " ".join([unset.what.text] + ([unset.name.text] if unset.name is not None else []))
    problem = _wrong_unset(unset)
    if problem is not None:
        diagnostics.append(problem)
        return
    named = ("let", unset.name.text) if unset.what.text == "let" and unset.name is not None else None
    keys = held if named is None else [named] if named in held else []  # of names a plan may have very many
    meant = [key for key in keys if _means(unset, key, held[key])]
    beside = next((held[key] for key in meant if is_own(held[key])), None)
    if beside is not None:
        diagnostics.append(
            rules.DuplicateStatement.at(
                unset.span,
                f"`{shown}` is decided, and taken away",
                label="taken away here",
                others=[Label(head_of(beside), "decided here")],
                help=["write `unset` before the statement that replaces what it takes away, or leave one of them out"],
            )
        )
        return
    if not meant and any(item.code == rules.CannotExtend.code for item in diagnostics):
        return  # the base may have it
    if not meant:
        diagnostics.append(
            rules.WrongUnset.at(
                unset.span,
                f"there is no `{shown}` to take away",
                label="nothing here",
                help=["`unset` takes away a statement of the base plan, or in a variant one of the plan"],
            )
        )
    for key in meant:
        del held[key]


def _wrong_unset(unset: Unset) -> Diagnostic | None:
    """Return an error of an ``unset`` in itself."""
    word = unset.what.text
    legal = (*(keyword for keyword in FAMILIES if keyword not in REQUIRED), *_NAMED, *_GOALS)
    if word in (*REQUIRED, "plan"):
        return rules.WrongUnset.at(
            unset.what.span, f"a plan cannot be without `{word}`", label="must stay",
            help=[f"write another `{word}` statement: it takes the place of this one"],
        )  # fmt: skip
    if word not in legal:
        return rules.WrongUnset.at(
            unset.what.span, f"there is no statement `{word}` to take away", label="unknown statement",
            help=suggestion(word, legal) or [f"statements are {', '.join(f'`{item}`' for item in legal)}"],
        )  # fmt: skip
    if unset.name is None and word in ("let", "variant"):
        return rules.WrongUnset.at(
            unset.what.span, f"`unset {word}` needs a name", label="no name follows",
            help=[f"write `unset {word} NAME`"],
        )  # fmt: skip
    if unset.name is not None and word not in _NAMED:
        on = f"`unset {word} on {unset.name.text}`"
        return rules.WrongUnset.at(
            unset.name.span, f"`{word}` has no name", label="no name here",
            help=[f"did you mean {on}?"] if word in FAMILIES and family(word).axis_use is not None else [],
        )  # fmt: skip
    return None


def _means(unset: Unset, key: tuple[str, ...], statement: AnyStatement) -> bool:
    """Whether ``unset`` removes the statement with this key."""
    word = unset.what.text
    if word in _GOALS:
        return isinstance(statement, Statement) and statement.keyword.text == word
    if key[0] != word:
        return False
    if word in _NAMED:
        return unset.name is None or key[1] == unset.name.text
    assert isinstance(statement, Statement)
    return not unset.axes or _axes(unset) == _axes(statement)


def _axes(statement: Statement | Unset) -> tuple[str, ...]:
    return tuple(axis.text for axis in statement.axes)


def apply_variant(
    body: list[AnyStatement],
    variants: Mapping[str, Variant],
    name: str,
    file: PlanFile,
    diagnostics: list[Diagnostic],
) -> list[AnyStatement]:
    """Return the statements with those of the variant replacing ones with equal keys."""
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
    own: dict[tuple[str, ...], AnyStatement] = {}
    for statement in chosen.statements:
        if isinstance(statement, Unset):
            _take_away(statement, held, lambda item: own.get(likeness(item)) is item, diagnostics)
            continue
        key = likeness(statement)
        if key in own:
            diagnostics.append(_twice(statement, own[key]))
            continue
        held[key] = own[key] = _laid_over(held.get(key), statement, diagnostics)
    return list(held.values())


def _laid_over(below: AnyStatement | None, above: AnyStatement, diagnostics: list[Diagnostic]) -> AnyStatement:
    """Merge a variant's statement with the plan's statement of the same key.

    One with rules on the same axes replaces the options that it names and the rules of the same paths; any other
    replaces the whole statement.
    """
    if not isinstance(above, Statement) or above.block is None:
        return above
    if not isinstance(below, Statement) or _axes(below) != _axes(above):
        return above
    subject = below.subject if above.subject is None else above.subject
    given = below.block.rules if below.block is not None else ()
    declared = family(above.keyword.text) if above.keyword.text in FAMILIES else None
    layouts = {layout.name for layout in declared.layouts} if declared is not None else set()
    # The rules of a standard layout, and so which can be removed, are known once the model is.
    of_layout = isinstance(subject, Name) and subject.text in layouts
    block = replace(above.block, rules=rules_over(given, above.block.rules, diagnostics, keep=of_layout))
    return replace(above, subject=subject, options=_options_over(below.options, above.options), block=block)


def rules_over(
    below: Iterable[RuleLine], above: Iterable[RuleLine], diagnostics: list[Diagnostic], *, keep: bool
) -> tuple[RuleLine, ...]:
    """Return the rules with those of ``above`` replacing ones of the same paths, and appended otherwise.

    A rule `unset` removes the rule of the same path; with ``keep`` it is kept, to be read later.
    """
    changes: dict[str, list[RuleLine]] = {}
    for rule in above:
        changes.setdefault(rule.path.canonical, []).append(rule)
    result: list[RuleLine] = []
    for rule in below:
        replaced = changes.pop(rule.path.canonical, [rule])
        result.extend(item for item in replaced if keep or not takes_away(item))
    for rule in (rule for left in changes.values() for rule in left):
        if takes_away(rule) and not keep:
            diagnostics.append(nothing_to_unset(rule))
        else:
            result.append(rule)
    return tuple(result)


def takes_away(rule: RuleLine) -> bool:
    """Whether a rule has the treatment `unset`."""
    return isinstance(rule.value, Name) and rule.value.text == UNSET


def nothing_to_unset(rule: RuleLine) -> Diagnostic:
    """Return the diagnostic of a rule that removes a missing one."""
    return rules.WrongUnset.at(
        rule.span,
        f"there is no rule for `{rule.path.canonical}` to take away",
        label="nothing here",
        help=["a rule is taken away under the path under which it was written"],
    )


def _options_over(below: Arguments | None, above: Arguments | None) -> Arguments | None:
    """Return the options with those of ``above`` replacing ones of the same names, and appended otherwise."""
    if below is None or above is None:
        return above if below is None else below
    if any(item.name is None for item in (*below.items, *above.items)):
        return above
    named = {item.name.text for item in above.items if item.name is not None}
    held = tuple(item for item in below.items if item.name is not None and item.name.text not in named)
    return replace(above, items=(*held, *above.items))


def definitions_of(body: Iterable[AnyStatement], settings: Mapping[str, str], loader: Loader) -> dict[str, Definition]:
    """Return the `let` names of the statements, with the values from the command line."""
    definitions = {item.name.text: Definition(item, "human") for item in body if isinstance(item, Let)}
    for name, text in settings.items():
        line = f"let {name} = {text}".replace("\n", " ")  # one value, and no further statement
        for statement in loader.parse(line, f"{OF_SETTING}{name}").statements:
            if not isinstance(statement, Let):
                continue
            if name not in definitions:
                loader.diagnostics.append(
                    UnknownLet.at(
                        statement.name.span,
                        f"the plan has no `let {name}` to set",
                        label="unknown name",
                        help=suggestion(name, tuple(definitions)),
                    )
                )
            else:
                definitions[name] = Definition(statement, "command line")
    return definitions
