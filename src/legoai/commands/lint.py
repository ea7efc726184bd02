"""`legoai lint`: diagnostics about plans, and their fixes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from legoai.commands import WrongUsage
from legoai.commands.failure import failure
from legoai.commands.reporting import add_files, add_reporting, choice_of, plans_of, report
from legoai.commands.shared import add_no_factories, add_resolution, examine, files_of, rewrite, say, settings_of
from legoai.dsl.config import Configuration, reported
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.files.sources import STANDARD_INPUT, Source, UnreadableError, read_source
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.lint import Linted

_DESCRIPTION = """\
Find mistakes in plans. Nothing is run, except a Python factory that a plan names as its model: that is
announced first, and it runs in a process of its own. Each variant of a plan is linted too.

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
    failed: list[str] = []
    names = plans_of(arguments, choice)
    for name in names:
        try:
            linted = _lint(read_source(name, arguments.stdin_filename), arguments, choice)
        except UnreadableError as error:
            found.append(error.diagnostic)
            files |= files_of(error)
        except BrokenPipeError:
            raise
        except Exception as error:  # the other plans are reported nevertheless
            failed.append(failure(error, name))
        else:
            found += linted.diagnostics
            files |= linted.files
    return report(found, files, len(names), arguments, choice, failed=failed)


def _lint(source: Source, arguments: Namespace, choice: Configuration) -> Linted:
    settings = settings_of(arguments)
    linted = examine(source, settings, arguments.variant, factories=arguments.factories)
    if not arguments.fix:
        return linted
    if source.rewritable is None:
        raise WrongUsage(f"--fix writes files, and {source.name} is none")
    from legoai.dsl.fixing import fixed

    def again(text: str) -> Linted:
        changed = Source(source.name, text, source.path)
        return examine(changed, settings, arguments.variant, factories=arguments.factories)

    text, linted = fixed(source, linted, again, lambda item: reported(item, choice), unsafe=arguments.unsafe_fixes)
    if text != source.text:
        rewrite(source.rewritable, source.content(text))
        if not arguments.quiet:
            say(f"{source.name}: fixed")
    return linted
