"""Arguments of statements and treatments, read by name and position into the declared options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from legoai.dsl.diagnostics.codes import names as rules
from legoai.dsl.diagnostics.diagnostic import Edit, Fix, Label
from legoai.dsl.diagnostics.suggestion import closest, option_elsewhere, translation
from legoai.dsl.frontend.syntax import (
    Argument,
    Auto,
    Boolean,
    Call,
    Name,
    Node,
    Value,
    children,
)
from legoai.dsl.frontend.values.coerce import ValueReader
from legoai.dsl.frontend.values.forms import fits, uncapitalised
from legoai.specs.directives import kinds
from legoai.specs.directives.base import Calls, Declared, Directive, Option, Treatment
from legoai.specs.directives.hole import Hole
from legoai.specs.span import Origin, Span


class Reader(ValueReader):
    """Reads values and arguments in the scope of one file's `let` names, and collects diagnostics."""

    def options(
        self,
        declared: type[Declared],
        arguments: Iterable[Argument],
        place: Span,
        what: str,
        given: frozenset[str] = frozenset(),
    ) -> tuple[dict[str, Any], dict[str, Origin], list[Argument]]:
        """Read arguments by name and position.

        Returns the values and origins by field, and the named arguments that ``declared`` does not have. ``given`` are
        fields that were given elsewhere; ``what`` names the owner in messages.
        """
        values: dict[str, Any] = {}
        origins: dict[str, Origin] = {}
        unknown: list[Argument] = []
        by_name = {item.name: item for item in declared.options}
        positional = [item for item in declared.options if item.field not in given]
        for index, argument in enumerate(arguments):
            flag = flag_of(argument, declared)
            if flag is not None:
                item = flag
            elif argument.name is None:
                if index >= len(positional):
                    self._too_many(argument, declared, what)
                    continue
                item = positional[index]
            else:
                found = by_name.get(argument.name.text)
                if found is None:
                    unknown.append(argument)
                    continue
                item = found
            if item.field in values:
                first = origins[item.field].span
                others = [Label(first, "first given here")] if first else []
                self._report(
                    rules.DuplicateOption.at(
                        argument.span, f"`{item.name}` is given twice", label="given again", others=others
                    )
                )
                values[item.field] = Hole()
                continue
            bare = argument.value if argument.name is None else None
            self._valueless = bare.text if isinstance(bare, Name) and bare.text in by_name else ""
            values[item.field], origins[item.field] = self.value(
                argument.value if flag is None else Boolean(True, argument.span), item.kind
            )
            self._valueless = ""
        if unknown and not (issubclass(declared, Directive) and declared.open_options):
            # The unknown option may be a misspelling of any option that is not given.
            meant = {closest(item.name.text, tuple(by_name)) for item in unknown if item.name is not None}
            for item in declared.options:
                open_to_it = not item.required or item.name in meant or None in meant
                if open_to_it and item.field not in values and item.field not in given:
                    values[item.field] = Hole()
        self._fill(declared, values, given, place, what)
        return values, origins, unknown

    def unknown_options(
        self, declared: type[Declared], arguments: Iterable[Argument], what: str, origins: Mapping[str, Origin]
    ) -> None:
        """Report named arguments that ``declared`` does not have; ``origins`` are of those that it has."""
        legal = tuple(item.name for item in declared.options)
        taken = {item.name for item in declared.options if item.field in origins}
        for argument in arguments:
            assert argument.name is not None
            self._use(argument.value)
            word = argument.name.text
            meant = closest(word, legal)
            fix = None
            if meant is not None and meant not in taken and self._could_be(argument.value, declared, meant):
                fix = Fix(f"write `{meant}`", (Edit(argument.name.span, meant),), safe=False)
                taken.add(meant)
            listed = f"{what} takes {', '.join(f'`{name}`' for name in legal)}" if legal else f"{what} takes no options"
            self._report(
                rules.UnknownOption.at(
                    argument.name.span, f"{what} has no option `{word}`", label="unknown option",
                    help=[*(translation(word, legal) or option_elsewhere(word)), listed], fix=fix,
                )
            )  # fmt: skip

    def _could_be(self, node: Value, declared: type[Declared], name: str) -> bool:
        """Whether the option of this name accepts values of this form."""
        node, _ = self.scope.look_up(node)
        kind = next(item.kind for item in declared.options if item.name == name)
        return isinstance(node, Auto) or fits(node, kind)

    def _use(self, node: Node) -> None:
        """Count the `let` names in an unread value as used."""
        if isinstance(node, Name) and node.text in self.scope.names:
            self.scope.used.add(node.text)
        for child in children(node):
            self._use(child)

    def _fill(
        self, declared: type[Declared], values: dict[str, Any], given: frozenset[str], place: Span, what: str
    ) -> None:
        for item in declared.options:
            if item.required and item.field not in values and item.field not in given:
                self._report(
                    rules.MissingOption.at(
                        place, f"{what} needs `{item.name}`", label=f"`{item.name}` is missing",
                        help=[f"`{item.name}` is {item.kind.describe()}: {uncapitalised(item.doc)}"],
                    )
                )  # fmt: skip
                values[item.field] = Hole()

    def _too_many(self, argument: Argument, declared: type[Declared], what: str) -> None:
        names = [item.name for item in declared.options]
        takes = f"takes only {', '.join(f'`{name}`' for name in names)}" if names else "takes no arguments"
        self._report(rules.UnknownOption.at(argument.span, f"{what} {takes}", label="one value too many"))

    def _calls(self, node: Value, kind: Calls) -> Any:
        if not isinstance(node, Name | Call):
            return self._wrong(node, kind)
        word = node.text if isinstance(node, Name) else node.name.text
        for treatment in kind.treatments:
            if treatment.name == word:
                return self._treatment(node, treatment)
        return self._unknown_name(node, tuple(treatment.name for treatment in kind.treatments), kind)

    def _treatment(self, node: Name | Call, treatment: type[Treatment]) -> Treatment:
        arguments = node.arguments.items if isinstance(node, Call) else ()
        what = f"`{treatment.name}`"
        values, origins, unknown = self.options(treatment, arguments, node.span, what)
        self.unknown_options(treatment, unknown, what, origins)
        return treatment(**values, origins=origins)


def flag_of(argument: Argument, declared: type[Declared]) -> Option | None:
    """The option of truth that a bare name sets: `sequence` for `sequence = true`. No `let` may have its name."""
    if argument.name is not None or not isinstance(argument.value, Name):
        return None
    word = argument.value.text
    return next((item for item in declared.options if item.name == word and isinstance(item.kind, kinds.Boolean)), None)
