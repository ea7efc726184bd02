"""`legoai lint`: diagnostics about plans, and their fixes."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from legoai.commands import WrongUsage
from legoai.commands.shared import add_resolution, counted, examine, files_of, settings_of, show, summary
from legoai.dsl.config import Configuration, ConfigurationError, find_configuration, selects, unknown_selectors
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Fix, apply_fixes
from legoai.dsl.frontend.sources import STANDARD_INPUT, Source, UnreadableError, named, read_source, replace_file
from legoai.dsl.frontend.suppress import suppressible
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.lint import Linted
from legoai.dsl.reporting.output import FORMATS

_MOST_ROUNDS = 10
"""Rounds of fixing: a fix may make another diagnostic, but not for ever."""

_DESCRIPTION = """\
Find mistakes in plans. Nothing is run, but for a Python factory that a plan names as its model: that is
said first, and it runs in a process of its own. Each variant of a plan is looked at too.

The exit status is 1 if there is an error; with --strict, also if there is a warning.
"""

_EXAMPLES = """\
examples:
  legoai lint plans/                         every plan in a directory
  legoai lint plan.tiny --set hosts=4        with another value of a `let` name
  legoai lint plans/*.plan --format github   annotate a pull request
  legoai lint plan.tiny --fix                apply the fixes that leave the plan's meaning

Defaults of --format, --select, --ignore and --strict may stand in [tool.legoai] of pyproject.toml.
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai lint`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("files", metavar="FILE", nargs="+", help="a plan, a directory of plans, plan.NAME, or -")
    parser.add_argument("--format", choices=tuple(FORMATS), help="how diagnostics are written (default: full)")
    parser.add_argument("--strict", action="store_true", default=None, help="let warnings fail as errors do")
    parser.add_argument(
        "--select",
        metavar="CODES",
        action="append",
        help="report only these, such as LP401,LP5; what cannot be read always",
    )
    parser.add_argument("--ignore", metavar="CODES", action="append", help="do not report these")
    parser.add_argument(
        "--fix", action="store_true", help="apply the fixes that leave what a plan means, and report the rest"
    )
    parser.add_argument("--unsafe-fixes", action="store_true", help="with --fix: also those that decide something")
    add_resolution(parser)


def run(arguments: Namespace) -> int:
    """Lint; returns 1 where a diagnostic fails."""
    choice = _choice(arguments)
    found: list[Diagnostic] = []
    files: dict[str, PlanFile] = {}
    names = list(named(arguments.files))
    for name in names:
        try:
            linted = _lint(read_source(name), arguments, choice)
        except UnreadableError as error:
            found.append(error.diagnostic)
            files |= files_of(error)
        else:
            found += [item for item in linted.diagnostics if _reported(item, choice)]
            files |= linted.files
    found = list(dict.fromkeys(found))  # two plans may extend one base
    show(found, files, format=choice.format or "full")
    said = summary(found) or "no diagnostics"
    print(f"{counted(len(names), 'plan')}: {said}", file=sys.stderr)
    failing = ("error", "warning") if choice.strict else ("error",)
    return int(any(item.severity in failing for item in found))


def _choice(arguments: Namespace) -> Configuration:
    """What the command line says, and for the rest the project's configuration."""
    try:
        held = find_configuration(Path.cwd())
    except ConfigurationError as error:
        raise WrongUsage(str(error)) from error
    if arguments.unsafe_fixes and not arguments.fix:
        raise WrongUsage("--unsafe-fixes says which fixes --fix applies, and there is no --fix")
    if arguments.fix and STANDARD_INPUT in arguments.files:
        raise WrongUsage("--fix writes files, and standard input is none")
    if arguments.files.count(STANDARD_INPUT) > 1:
        raise WrongUsage("standard input can be read only once")
    return Configuration(
        format=arguments.format or held.format,
        select=_codes(arguments.select) if arguments.select else held.select,
        ignore=_codes(arguments.ignore) if arguments.ignore else held.ignore,
        strict=held.strict if arguments.strict is None else True,
    )


def _codes(given: Sequence[str]) -> tuple[str, ...]:
    codes = tuple(code.strip() for text in given for code in text.split(",") if code.strip())
    if wrong := unknown_selectors(codes):
        raise WrongUsage(wrong)
    return codes


def _reported(item: Diagnostic, choice: Configuration) -> bool:
    if not suppressible(item):
        return True
    selected = not choice.select or any(selects(selector, [item.code]) for selector in choice.select)
    return selected and not any(selects(selector, [item.code]) for selector in choice.ignore)


def _lint(source: Source, arguments: Namespace, choice: Configuration) -> Linted:
    settings = settings_of(arguments)
    linted = examine(source, settings, arguments.variant)
    if not arguments.fix:
        return linted
    before = source.text
    for _ in range(_MOST_ROUNDS):
        reported = [item for item in linted.diagnostics if _reported(item, choice)]
        fixes = _fixes(reported, source.name, unsafe=arguments.unsafe_fixes)
        text = apply_fixes(source.text, fixes)
        if text == source.text:
            break
        fixed = Source(source.name, text, source.path)
        after = examine(fixed, settings, arguments.variant)
        if _unreadable(after) > _unreadable(linted):
            raise AssertionError(f"a fix broke {source.name}: {[fix.title for fix in fixes]}")
        source, linted = fixed, after
    if source.text != before:
        assert source.path is not None
        replace_file(source.path, source.text)
        print(f"{source.name}: fixed", file=sys.stderr)
    return linted


def _fixes(diagnostics: Sequence[Diagnostic], name: str, *, unsafe: bool) -> list[Fix]:
    """The fixes to apply to the plan's own file; what a plan extends is fixed when it is named itself."""
    fixes = [item.fix for item in diagnostics if item.fix is not None and (item.fix.safe or unsafe)]
    return [fix for fix in dict.fromkeys(fixes) if all(edit.span.file == name for edit in fix.edits)]


def _unreadable(linted: Linted) -> int:
    return sum(item.code.startswith("LP1") for item in linted.diagnostics)
