"""From one statement to its directive: value, axes, options and rules, read as the family declares them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from legoai.dsl.diagnostics.codes import names as rules
from legoai.dsl.diagnostics.codes.statements import MisplacedPart
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Edit, Fix
from legoai.dsl.diagnostics.suggestion import closest, translation
from legoai.dsl.frontend.syntax import (
    Argument,
    Auto,
    Binary,
    Block,
    Boolean,
    Call,
    Name,
    Negation,
    Number,
    Statement,
    String,
    Value,
)
from legoai.dsl.frontend.values.arguments import Reader
from legoai.dsl.frontend.values.forms import names_of
from legoai.dsl.frontend.values.ranges import resolved_path
from legoai.dsl.frontend.values.scope import Scope, is_function
from legoai.specs.directives.base import Directive, PathRule
from legoai.specs.directives.hole import Hole
from legoai.specs.span import Decider, Origin, Span

EXAMPLES: Final = {
    "model": 'model llama3("8b")',
    "cluster": "cluster h100_sxm(hosts = 2, fabric = infiniband_ndr)",
    "batch": "batch (global = 64, micro = 1, seq_len = 8192)",
    "optimizer": "optimizer adamw(lr = 3e-4)",
}
"""Form of a statement, to be shown where it is missing."""


class StatementReader:
    """Reads statements in one scope, and collects diagnostics."""

    def __init__(self, scope: Scope, diagnostics: list[Diagnostic]) -> None:
        self.scope = scope
        self.diagnostics = diagnostics
        self.reader = Reader(scope, diagnostics)

    def directive(
        self, statement: Statement, declared: type[Directive], *, layout: Span | None = None
    ) -> Directive | None:
        """The directive; None, after a diagnostic, where too little of the statement can be read.

        ``layout`` is the span of those rules that are of a standard layout, which a person did not write.
        """
        keyword = statement.keyword.text
        what = f"`{keyword}`"
        origins: dict[str, Origin] = {
            "": Origin("human", statement.span),
            "keyword": Origin("human", statement.keyword.span),
        }
        before = len(self.diagnostics)
        values, extra = self._subject(statement, declared, origins)
        axes = self._axes(statement, declared, origins)
        self._misplaced(statement, declared)
        given = list(statement.options.items) if statement.options else []
        if extra is not None:
            given = list(extra)
        place = statement.subject.span if extra is not None and statement.subject else statement.keyword.span
        unnamed = bool(declared.subject and declared.option(declared.subject).required and not values)
        subject = frozenset({declared.subject} if declared.subject else ())
        read, read_origins, unknown = self.reader.options(declared, given, place, what, subject)
        values |= read
        origins |= read_origins
        arguments: dict[str, Any] = {}
        if declared.open_options:
            for argument in unknown:
                arguments.update(self._open(argument, origins))
        else:
            self.reader.unknown_options(declared, unknown, what, read_origins)
        rules_read = (*self._open_rules(statement, declared), *self._rules(statement.block, declared, layout))
        if axes is None or unnamed:
            assert len(self.diagnostics) > before, "a statement was dropped without a word"
            return None
        return declared(**values, axes=axes, rules=rules_read, arguments=arguments, origins=origins)

    def _open(self, argument: Argument, origins: dict[str, Origin]) -> dict[str, Any]:
        """A keyword argument of a model, which may be any plain value."""
        assert argument.name is not None
        node, decider = self.scope.look_up(argument.value)
        origins[argument.name.text] = Origin(decider, argument.span)
        if isinstance(node, String):
            return {argument.name.text: node.text}
        if isinstance(node, Boolean):
            return {argument.name.text: node.value}
        if isinstance(node, Auto):
            self.diagnostics.append(
                rules.WrongDomain.at(node.span, "the model's dimensions cannot be solved for", label="give a value")
            )
            return {}
        if isinstance(node, Binary | Negation | Number) or is_function(node):
            quantity = self.scope.arithmetic(node)
            if not isinstance(quantity, Diagnostic):
                return {argument.name.text: quantity[0]}
            self.diagnostics.append(quantity)
            return {}
        self.diagnostics.append(
            rules.WrongValue.at(
                node.span, "a model takes numbers, strings and truth values", label="not one of these",
                help=["a `let` name stands for its value; a word needs quotes"],
            )
        )  # fmt: skip
        return {}

    def _subject(
        self, statement: Statement, declared: type[Directive], origins: dict[str, Origin]
    ) -> tuple[dict[str, Any], tuple[Argument, ...] | None]:
        """Return the value after the keyword, by field, with the arguments of the statement where it contains them."""
        keyword = statement.keyword.text
        if declared.subject is None:
            if declared.rules_may_be_open and isinstance(statement.subject, Auto):
                self._decided_rules(statement.subject)
            elif statement.subject is not None and not _is_axis(statement.subject, declared):
                self._refuse_part(
                    statement.subject.span, f"`{keyword}` takes no value before its options", "no value here",
                    help=_where_it_stands(statement.subject, declared),
                )  # fmt: skip
            return {}, None
        item = declared.option(declared.subject)
        node = statement.subject
        if node is None:
            if item.required:
                self.diagnostics.append(
                    rules.MissingOption.at(
                        statement.keyword.span,
                        f"`{keyword}` needs {item.kind.describe()}",
                        label="nothing follows",
                        help=[f"for instance `{EXAMPLES[keyword]}`"] if keyword in EXAMPLES else [],
                    )
                )
            return {}, None
        inner: tuple[Argument, ...] | None = None
        if declared.subject_holds_options:
            node, _ = self.scope.look_up(node)
            inner = node.arguments.items if isinstance(node, Call) else ()
            node = node.name if isinstance(node, Call) else node
        value, origins[item.field] = self.reader.value(node, item.kind)
        if isinstance(value, Hole) and declared.subject_holds_options:
            if isinstance(node, Auto):
                self._refuse_part(node.span, f"`{keyword}` cannot be left open", "give a name")
            return {}, inner
        return {item.field: value}, inner

    def _axes(
        self, statement: Statement, declared: type[Directive], origins: dict[str, Origin]
    ) -> tuple[str, ...] | None:
        """The axes after `on`; None where they are wrong."""
        keyword = statement.keyword.text
        use = declared.axis_use
        if use is None:
            if statement.axes:
                self._refuse_part(statement.axes[0].span, f"`{keyword}` is on no axis", "no axis here")
            return ()
        legal = ", ".join(f"`{axis}`" for axis in use.names)
        if not statement.axes:
            self.diagnostics.append(self._without_axis(statement, use.names))
            return None
        good = True
        for axis in statement.axes:
            if axis.text not in use.names:
                good = False
                self.diagnostics.append(
                    rules.WrongAxis.at(
                        axis.span, f"`{keyword}` cannot be on `{axis.text}`", label="not an axis for this statement",
                        help=[*translation(axis.text, use.names), f"`{keyword}` can be on {legal}"],
                    )
                )  # fmt: skip
        names = tuple(axis.text for axis in statement.axes)
        if good and (len(set(names)) < len(names) or len(names) > use.maximum):
            self.diagnostics.append(
                rules.WrongAxis.at(
                    statement.axes[-1].span,
                    f"`{keyword}` takes one axis" if use.maximum == 1 else f"`{keyword}` takes an axis only once",
                    label="one too many",
                )
            )
            good = False
        origins["axes"] = Origin("human", statement.axes[0].span.to(statement.axes[-1].span))
        return names if good else None

    def _without_axis(self, statement: Statement, names: Sequence[str]) -> Diagnostic:
        keyword, subject = statement.keyword.text, statement.subject
        listed = f"`{keyword}` can be on {', '.join(f'`{name}`' for name in names)}"
        if isinstance(subject, Name) and subject.text in names:
            start = Edit(subject.span._replace(end=subject.span.start), "on ")
            return MisplacedPart.at(
                subject.span, f"`{keyword}` needs `on` before its axis", label=f"write `on {subject.text}`",
                fix=Fix(f"write `on {subject.text}`", (start,), safe=True),
            )  # fmt: skip
        help = [f"write `{keyword} on {names[0]}`"] if len(names) == 1 else [f"write `{keyword} on AXIS`", listed]
        return MisplacedPart.at(
            statement.keyword.span, f"`{keyword}` needs an axis", label="no axis follows", help=help
        )

    def _misplaced(self, statement: Statement, declared: type[Directive]) -> None:
        keyword = statement.keyword.text
        if statement.block is not None and declared.treatments is None:
            self._refuse_part(statement.block.span, f"`{keyword}` has no rules for paths", "no block here")
        if statement.options is not None and declared.subject_holds_options:
            self._refuse_part(statement.options.span, f"the options of `{keyword}` stand behind its value", "not here")

    def _refuse_part(self, span: Span, message: str, label: str, help: Sequence[str] = ()) -> None:
        self.diagnostics.append(MisplacedPart.at(span, message, label=label, help=help))

    def _decided_rules(self, node: Auto) -> None:
        """Reject a domain or an answer of `auto` in place of rules."""
        if node.domain is not None or node.answer is not None:
            self._refuse_part(
                node.span, "`auto` stands for rules here, and has neither a domain nor an answer", "write `auto`",
                help=["`legoai solve` writes the rules, each with its answer"],
            )  # fmt: skip

    def _open_rules(self, statement: Statement, declared: type[Directive]) -> Iterator[PathRule[Any]]:
        """Yield the rules for `auto` before the axes: of any module, and undecided."""
        node = statement.subject
        if declared.rules_may_be_open and isinstance(node, Auto) and declared.treatments is not None:
            value, origin = self.reader.value(Auto(None, None, node.span), declared.treatments)
            yield PathRule(path="**", treatment=value, origin=origin, path_origin=origin)

    def _rules(self, block: Block | None, declared: type[Directive], layout: Span | None) -> tuple[PathRule[Any], ...]:
        if block is None or declared.treatments is None:
            return ()
        result = []
        for line in block.rules:
            decider: Decider = "human" if layout is None or line.span != layout else "standard layout"
            self.reader.decider = decider
            value, origin = self.reader.value(line.value, declared.treatments)
            self.reader.decider = "human"
            path = resolved_path(line.path, self.scope)
            if isinstance(path, Diagnostic):
                self.diagnostics.append(path)
                continue
            # A rule with an undecided treatment still takes part in matching, as a hole.
            result.append(
                PathRule(
                    path=path,
                    treatment=value,
                    origin=Origin(origin.decider, line.span),
                    path_origin=Origin(decider, line.path.span),
                )
            )
        return tuple(result)


def _is_axis(node: Value, declared: type[Directive]) -> bool:
    """Whether a value is an axis of the statement that lacks only its `on`."""
    return declared.axis_use is not None and isinstance(node, Name) and node.text in declared.axis_use.names


def _where_it_stands(node: Value, declared: type[Directive]) -> list[str]:
    """Return help on a value before the options of a statement which accepts none there."""
    keyword = declared.keyword
    word = node.text if isinstance(node, Name) else node.name.text if isinstance(node, Call) else None
    treatments = names_of(declared.treatments) if declared.treatments is not None else ()
    if word in treatments:
        return [f"a treatment stands in a rule: `{keyword} {{ PATH = {word} }}`"]
    legal = [item.name for item in declared.options if word is not None and word in names_of(item.kind)]
    if word is not None and legal:
        return [f"an option has a name: `{keyword} ({closest(word, legal) or legal[0]} = {word})`"]
    help = [f"treatments stand in rules: `{keyword} {{ PATH = {treatments[0]} }}`"] if treatments else []
    if declared.options:
        help.append(f"options stand in parentheses: `{keyword} ({declared.options[0].name} = …)`")
    return help
