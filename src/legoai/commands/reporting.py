"""Reporting of diagnostics: the options that `lint` and `check` share, and the project's configuration."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence

from legoai.commands import WrongUsage
from legoai.commands.shared import add_output, announce, show, summary
from legoai.dsl.config import (
    Configuration,
    ConfigurationError,
    find_configuration,
    never_ignored,
    reported,
    unknown_selectors,
)
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.files.project import working_folder
from legoai.dsl.frontend.files.sources import STANDARD_INPUT, Excluded, named
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.reporting.output import FORMATS
from legoai.specs.units import counted


def add_files(parser: ArgumentParser, *, default: bool = False) -> None:
    """Add the plans to look at; with ``default`` none means those of the current folder."""
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*" if default else "+",
        default=["."] if default else None,
        help="a plan, a directory of plans, plan.NAME, or -" + (" (default: the current folder)" if default else ""),
    )
    parser.add_argument(
        "--stdin-filename", metavar="FILE", help="what diagnostics call standard input, and where it would stand"
    )


def add_reporting(parser: ArgumentParser) -> None:
    """Add the options that decide which diagnostics are reported, how, and when they fail."""
    parser.add_argument("--format", choices=tuple(FORMATS), help="how diagnostics are written (default: full)")
    parser.add_argument("--strict", action="store_true", default=None, help="let warnings fail as errors do")
    parser.add_argument(
        "--select",
        metavar="RULES",
        action="append",
        help="report only these, by code, beginning of codes or name: LP401,LP5,unused-let; what leaves no plan, or no "
        "figures, always",
    )
    parser.add_argument(
        "--ignore",
        metavar="RULES",
        action="append",
        help="do not report these, unless they leave no plan, or no figures",
    )
    parser.add_argument(
        "--exit-zero", action="store_true", help="end with status 0 whatever is found; wrong usage still ends with 2"
    )
    add_output(parser)


def plans_of(arguments: Namespace, configuration: Configuration) -> list[str]:
    """The plans that the command line names.

    Raises:
        WrongUsage: standard input is named twice, or given a name and not read.
    """
    if arguments.files.count(STANDARD_INPUT) > 1:
        raise WrongUsage("standard input can be read only once")
    if arguments.stdin_filename is not None and STANDARD_INPUT not in arguments.files:
        raise WrongUsage("--stdin-filename names standard input, and no FILE is -")
    return list(named(arguments.files, Excluded(configuration.exclude, configuration.folder)))


def project() -> Configuration:
    """The configuration of the working folder; the default one where that has been deleted.

    Raises:
        WrongUsage: it means nothing.
    """
    here = working_folder()
    try:
        return Configuration() if here is None else find_configuration(here)
    except ConfigurationError as error:
        raise WrongUsage(str(error)) from error


def choice_of(arguments: Namespace) -> Configuration:
    """The options of the command line, completed by the project's configuration.

    Raises:
        WrongUsage: a selector matches no rule, or the configuration is invalid.
    """
    held = project()
    chosen = Configuration(
        format=arguments.format or held.format,
        select=_selectors(arguments.select) if arguments.select else held.select,
        ignore=_selectors(arguments.ignore) if arguments.ignore else held.ignore,
        strict=held.strict if arguments.strict is None else True,
        exclude=held.exclude,
        folder=held.folder,
    )
    if not arguments.quiet and chosen.ignore and (without := never_ignored(chosen.ignore)):
        place = "--ignore" if arguments.ignore else "`ignore` of [tool.legoai]"
        announce(
            f"{place} has no effect on {', '.join(without)}: what leaves no plan, or no figures, is always reported"
        )
    return chosen


def _selectors(given: Sequence[str]) -> tuple[str, ...]:
    selectors = tuple(word.strip() for text in given for word in text.split(",") if word.strip())
    if wrong := unknown_selectors(selectors):
        raise WrongUsage(wrong)
    return selectors


def report(
    found: Iterable[Diagnostic],
    files: Mapping[str, PlanFile],
    count: int,
    arguments: Namespace,
    choice: Configuration,
    *,
    shown: Collection[Diagnostic] = (),
    failed: Sequence[str] = (),
) -> int:
    """Write the diagnostics of ``count`` plans, and sum them up on standard error; the result is the exit status.

    ``shown`` are those that no choice of codes hides, ``failed`` messages, as they are printed, about plans on which
    the command could not do its work.
    """
    distinct = dict.fromkeys(found)  # two plans may extend one base
    kept = [item for item in distinct if item in shown or reported(item, choice)]
    show(kept, files, format=choice.format or "full", color=arguments.color)
    for message in failed:
        print(message, file=sys.stderr)
    if not arguments.quiet:
        lost = f", {len(failed)} failed" if failed else ""
        print(f"{counted(count, 'plan')}{lost}: {summary(kept) or 'no diagnostics'}", file=sys.stderr)
    if failed:
        return 2
    failing = ("error", "warning") if choice.strict else ("error",)
    return int(not arguments.exit_zero and any(item.severity in failing for item in kept))
