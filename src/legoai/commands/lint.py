"""`legoai lint`: diagnostics about plans, and their fixes."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Container, Sequence

from legoai.commands import WrongUsage
from legoai.commands.reporting import add_files, add_reporting, choice_of, plans_of, report, reported
from legoai.commands.shared import add_no_factories, add_resolution, examine, files_of, settings_of
from legoai.dsl.config import Configuration
from legoai.dsl.diagnostics.cascade import is_cause
from legoai.dsl.diagnostics.diagnostic import Diagnostic, apply_fixes
from legoai.dsl.frontend.sources import STANDARD_INPUT, Source, UnreadableError, read_source, replace_file
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.lint import Linted

_MOST_ROUNDS = 50
"""Rounds of fixing: a fix may make another diagnostic, but not for ever."""

_DESCRIPTION = """\
Find mistakes in plans. Nothing is run, but for a Python factory that a plan names as its model: that is
said first, and it runs in a process of its own. Each variant of a plan is looked at too.

The exit status is 1 if there is an error; with --strict, also if there is a warning.
"""

_EXAMPLES = """\
examples:
  legoai lint                                every plan in the current folder and below it
  legoai lint plans/                         every plan in a directory
  legoai lint plan.tiny --set hosts=4        with another value of a `let` name
  legoai lint plans/*.plan --format github   annotate a pull request
  legoai lint plan.tiny --fix                apply the fixes that leave the plan's meaning
  legoai lint - --stdin-filename plans/a.plan   what an editor holds

Defaults of --format, --select, --ignore and --strict may stand in [tool.legoai] of pyproject.toml, and the
folders and files that are left out as `exclude`.
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai lint`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    add_files(parser, default=True)
    add_reporting(parser)
    parser.add_argument(
        "--fix", action="store_true", help="apply the fixes that leave what a plan means, and report the rest"
    )
    parser.add_argument("--unsafe-fixes", action="store_true", help="with --fix: also those that decide something")
    add_no_factories(parser)
    add_resolution(parser)


def run(arguments: Namespace) -> int:
    """Lint; returns 1 where a diagnostic fails."""
    if arguments.unsafe_fixes and not arguments.fix:
        raise WrongUsage("--unsafe-fixes says which fixes --fix applies, and there is no --fix")
    if arguments.fix and STANDARD_INPUT in arguments.files:
        raise WrongUsage("--fix writes files, and standard input is none")
    choice = choice_of(arguments)
    found: list[Diagnostic] = []
    files: dict[str, PlanFile] = {}
    names = plans_of(arguments, choice)
    for name in names:
        try:
            linted = _lint(read_source(name, arguments.stdin_filename), arguments, choice)
        except UnreadableError as error:
            found.append(error.diagnostic)
            files |= files_of(error)
        else:
            found += linted.diagnostics
            files |= linted.files
    return report(found, files, len(names), arguments, choice)


def _lint(source: Source, arguments: Namespace, choice: Configuration) -> Linted:
    settings = settings_of(arguments)
    linted = examine(source, settings, arguments.variant, factories=arguments.factories)
    if not arguments.fix:
        return linted

    def again(text: str) -> Linted:
        fixed = Source(source.name, text, source.path)
        return examine(fixed, settings, arguments.variant, factories=arguments.factories)

    before = source.text
    text, linted = fixed(source, linted, again, lambda item: reported(item, choice), unsafe=arguments.unsafe_fixes)
    source = Source(source.name, text, source.path)
    if source.text != before:
        assert source.path is not None
        replace_file(source.path, source.text)
        if not arguments.quiet:
            print(f"{source.name}: fixed", file=sys.stderr)
    return linted


def fixed(
    source: Source,
    linted: Linted,
    again: Callable[[str], Linted],
    wanted: Callable[[Diagnostic], bool],
    *,
    unsafe: bool,
) -> tuple[str, Linted]:
    """The plan's text after its fixes, and what lint finds in it.

    Safe fixes are applied together. An unsafe one is applied alone, causes before what may follow from them, and stays
    only if what it is for is gone and no other error came in its place.

    Args:
        source: the plan.
        linted: what lint finds in it.
        again: lints another text in its place.
        wanted: whether a diagnostic is to be fixed.
        unsafe: whether fixes that decide something are applied.
    """
    text = source.text
    refused: set[tuple[str, str, str]] = set()
    for _ in range(_MOST_ROUNDS):
        mistakes = [item for item in linted.diagnostics if wanted(item) and _has_fix(item, source.name)]
        safe = list(dict.fromkeys(item.fix for item in mistakes if item.fix is not None and item.fix.safe))
        changed = apply_fixes(text, safe)
        if changed != text:
            after = again(changed)
            if _unreadable(after) > _unreadable(linted):
                raise AssertionError(f"a fix broke {source.name}: {[fix.title for fix in safe]}")
            text, linted = changed, after
            continue
        chosen = next(iter(_unsafe(linted, mistakes, refused)), None) if unsafe else None
        if chosen is None:
            break
        assert chosen.fix is not None
        changed = apply_fixes(text, [chosen.fix])
        after = again(changed)
        if _is_better(chosen, linted, after):
            text, linted = changed, after
        else:
            refused.add(_identity(chosen))
    return text, linted


def _has_fix(item: Diagnostic, name: str) -> bool:
    """Whether a fix changes the plan's own file; what a plan extends is fixed when it is named itself."""
    return item.fix is not None and all(edit.span.file == name for edit in item.fix.edits)


def _unsafe(linted: Linted, mistakes: Sequence[Diagnostic], refused: Container[object]) -> Sequence[Diagnostic]:
    """What to try next: mistakes in names, and only where none is left what may have followed from one."""
    causes = any(map(is_cause, linted.diagnostics))
    open_to_it = [item for item in mistakes if _identity(item) not in refused and (is_cause(item) or not causes)]
    return sorted(open_to_it, key=lambda item: (item.severity != "error", item.code, item.order))


def _is_better(chosen: Diagnostic, before: Linted, after: Linted) -> bool:
    if _identity(chosen) in set(map(_identity, after.diagnostics)) or _causes(after) > _causes(before):
        return False
    return is_cause(chosen) or _errors(after) <= _errors(before)


def _identity(item: Diagnostic) -> tuple[str, str, str]:
    return item.code, item.message, item.fix.title if item.fix is not None else ""


def _causes(linted: Linted) -> int:
    return sum(map(is_cause, linted.diagnostics))


def _errors(linted: Linted) -> int:
    return sum(item.severity == "error" for item in linted.diagnostics)


def _unreadable(linted: Linted) -> int:
    return sum(item.code.startswith("LP1") for item in linted.diagnostics)
