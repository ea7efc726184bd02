"""The effective statements of a plan, before any of them is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from legoai.dsl.diagnostics.codes import statements as rules
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.statements.merge import Loader, Reads, apply_variant, definitions_of, override
from legoai.dsl.frontend.syntax import AnyStatement, PlanFile, Variant
from legoai.dsl.frontend.values.scope import Definition
from legoai.specs.record import Record
from legoai.specs.span import Span

_UNDECIDED: Final = (rules.DuplicateStatement.code, rules.CannotExtend.code, rules.BasesDisagree.code)
"""Diagnostics of ambiguous statements."""


class Merged(Record, kw_only=True):
    """The effective statements of a text, of its bases and of a variant, before any of them is read.

    `reserved` are names of the language, which keep their meaning; a `let` of such a name is reported.
    """

    file: PlanFile
    files: Mapping[str, PlanFile]
    statements: Sequence[AnyStatement]
    variants: dict[str, Variant]
    definitions: Mapping[str, Definition]
    reserved: Collection[str]
    diagnostics: Sequence[Diagnostic]
    damaged: Sequence[Span]
    unreadable: Collection[str]


def merged(
    text: str, name: str, directory: Path, *, settings: Mapping[str, str], variant: str | None, read: Reads
) -> Merged:
    """Merge a text with its bases and with a variant.

    Args:
        text: the plan.
        name: of its file.
        directory: base of relative file names of bases.
        settings: values that replace those of `let` names.
        variant: to apply.
        read: reads a base.
    """
    loader = Loader(read)
    parsed = loader.parse(text, name)
    statements = override(loader.flatten(parsed, directory, ()), loader.diagnostics)
    variants = {item.name.text: item for item in statements if isinstance(item, Variant)}
    body: list[AnyStatement] = [item for item in statements if not isinstance(item, Variant)]
    if variant is not None:
        body = apply_variant(body, variants, variant, parsed, loader.diagnostics)
    definitions = definitions_of(body, settings, loader)
    reserved: set[str] = set()
    if definitions:
        from legoai.dsl.frontend.values.reserved import reserved_names

        reserved = reserved_names().keys() & definitions.keys()
    unreadable = set(loader.unreadable())
    if any(item.code in _UNDECIDED for item in loader.diagnostics):
        unreadable.add("")
    return Merged(
        file=parsed,
        files=loader.files,
        statements=body,
        variants=variants,
        definitions={name: one for name, one in definitions.items() if name not in reserved},
        reserved=reserved,
        diagnostics=loader.diagnostics,
        damaged=loader.damaged,
        unreadable=unreadable,
    )
