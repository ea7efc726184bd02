"""`legoai fmt`: the one canonical layout of a plan."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence

from legoai.commands import WrongUsage
from legoai.commands.reporting import add_files, plans_of, project
from legoai.commands.shared import add_output, files_of, put, rewrite, show
from legoai.dsl.diagnostics.diagnostic import Diagnostic, errors_of
from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.frontend.files.sources import STANDARD_INPUT, Source, UnreadableError, read_base, read_source
from legoai.dsl.frontend.resolve import resolve
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.lint import lint
from legoai.specs.directives.model import Model
from legoai.specs.units import counted
from legoai.specs.visible_text import visible_line

_DESCRIPTION = """\
Lay plans out in the one canonical form, which has no options. Comments, blank lines and order are preserved; the
result is proved to mean the same. Files are rewritten in place; a plan from standard input is written to standard
output.

The exit status is 1 if a plan cannot be read, or with --check or --diff if one would change.
"""

_EXAMPLES = """\
examples:
  legoai fmt plans/               every plan in a directory
  legoai fmt --check plans/       in CI: say which plans would change
  legoai fmt --diff plan.tiny     show what would change
  legoai fmt - < plans/tiny.plan  from standard input to standard output
  legoai fmt --expand plan.tiny   print the plan with every default that has an effect
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai fmt`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    add_files(parser)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a plan would change")
    parser.add_argument("--diff", action="store_true", help="change nothing; print what would change")
    parser.add_argument(
        "--expand", action="store_true", help="change nothing; print the plan with every default that has an effect"
    )
    parser.add_argument(
        "--no-factories",
        action="store_true",
        help="taken as by the other commands; formatting runs no Python factory, with it or without",
    )
    add_output(parser)


def run(arguments: Namespace) -> int:
    """Format; returns 1 where a plan cannot be read or, with `--check` or `--diff`, would change."""
    found: list[Diagnostic] = []
    files: dict[str, PlanFile] = {}
    changed = []
    names = plans_of(arguments, project())
    if arguments.expand and (len(names) > 1 or arguments.check or arguments.diff):
        raise WrongUsage("--expand prints one plan, and neither checks nor compares")
    for name in names:
        try:
            source = read_source(name, arguments.stdin_filename)
        except UnreadableError as error:
            found.append(error.diagnostic)
            files |= files_of(error)
            continue
        text, diagnostics, parsed = _formatted(source, expand=arguments.expand)
        found += diagnostics
        files |= parsed
        if text is None:
            continue
        if text != source.text:
            changed.append(source.name)
        _put(source, text, arguments)
    stream = sys.stderr if STANDARD_INPUT in names or arguments.expand else sys.stdout
    show(found, files, stream=stream, color=arguments.color)
    if not arguments.expand and not arguments.quiet:
        would = "would change" if arguments.check or arguments.diff else "changed"
        print(f"{counted(len(names), 'plan')}, {len(changed)} {would}", file=sys.stderr)
    return int(bool(found) or bool((arguments.check or arguments.diff) and changed))


def _formatted(source: Source, *, expand: bool) -> tuple[str | None, Sequence[Diagnostic], Mapping[str, PlanFile]]:
    """The plan laid out, None where it cannot be; why; and the files that the diagnostics speak of."""
    if expand:
        return _expanded(source)
    formatted = format_text(source.text, source.name)
    return formatted.text, formatted.diagnostics, {source.name: PlanFile(source.name, source.text, (), ())}


def _expanded(source: Source) -> tuple[str | None, Sequence[Diagnostic], Mapping[str, PlanFile]]:
    from legoai.dsl.formatting.idle import expand_meant

    def diagnose(text: str) -> Sequence[Diagnostic]:
        directory = source.directory
        return lint(text, source.name, directory=directory, read=read_base, factories=_runs_nothing).diagnostics

    resolution = resolve(source.text, source.name, directory=source.directory, read=read_base)
    errors = errors_of(resolution.diagnostics)
    return (None if errors else expand_meant(resolution, diagnose)), errors, resolution.files


def _runs_nothing(model: Model) -> bool:
    return model.family != "python"


def _put(source: Source, text: str, arguments: Namespace) -> None:
    """Write the result where it belongs."""
    if arguments.diff:
        put("".join(_difference(source, text)))
    elif arguments.check:
        if text != source.text:
            print(f"would change {visible_line(source.name)}")
    elif source.rewritable is None or arguments.expand:
        put(text)
    elif text != source.text:
        rewrite(source.rewritable, source.content(text))


def _difference(source: Source, text: str) -> Iterator[str]:
    from difflib import unified_diff

    before, after, name = _lines(source.text), _lines(text), visible_line(source.name)
    for line in unified_diff(before, after, name, f"{name} (formatted)"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _lines(text: str) -> list[str]:
    *whole, last = text.split("\n")
    return [*(f"{line}\n" for line in whole), *([last] if last else [])]
