"""`legoai explain`: any word of the language, the defaults, or a plan's statements about one module."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable

from legoai.commands import WrongUsage
from legoai.commands.shared import (
    add_no_factories,
    add_resolution,
    announce,
    examine,
    lacks_factory,
    refuse,
    settings_of,
    source_of,
)
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.codes.statements import UnknownVariant
from legoai.dsl.diagnostics.diagnostic import Diagnostic, errors_of
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.frontend.statements.merge import OF_SETTING
from legoai.dsl.rules import all_rules

_CODE = re.compile(r"LP[0-9]+", re.IGNORECASE)
_RUN_CODE = re.compile(r"RUN[0-9]+", re.IGNORECASE)
_WIDTH = 100

_DESCRIPTION = """\
Explain any word of the language: a diagnostic by its code or name, a statement, a treatment, an option, an axis,
a model and its presets, a device, a fabric, a figure of `require`; with `defaults` every default. With --plan,
explain everything that this plan states about one module or parameter, and on which line; with `defaults`, the
defaults that apply to this plan.
"""

_EXAMPLES = """\
examples:
  legoai explain LP401                                      a diagnostic
  legoai explain fsdp                                       a statement
  legoai explain colwise                                    a treatment
  legoai explain RUN020                                     a failure of a run
  legoai explain llama3                                     a model, its presets and dimensions
  legoai explain h100_sxm                                   a device
  legoai explain defaults                                   every default
  legoai explain --list                                     everything that can be explained
  legoai explain layers.3.attention.wq --plan plan.tiny     one module of a plan
  legoai explain root --plan plan.tiny                      the model itself
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai explain`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument(
        "subject",
        metavar="SUBJECT",
        nargs="?",
        help="a word of the language, `defaults`, or with --plan a module's path",
    )
    parser.add_argument("--list", action="store_true", help="list everything that can be explained")
    parser.add_argument("--plan", metavar="FILE", help="the plan to explain")
    add_no_factories(parser)
    add_resolution(parser)


def run(arguments: Namespace) -> int:
    """Explain; returns 1 where the plan has no answer because of its errors, 2 for unknown words."""
    if arguments.list and (arguments.subject is not None or arguments.plan is not None):
        raise WrongUsage("--list lists everything, and takes neither a subject nor a plan")
    if arguments.subject is None and not arguments.list:
        raise WrongUsage("name what is to be explained; `legoai explain --list` lists what can be")
    if arguments.plan is not None:
        return _of_plan(arguments)
    if arguments.settings or arguments.variant:
        raise WrongUsage("--set and --variant need a plan: --plan FILE")
    if arguments.list:
        from legoai.dsl.reporting.topics import listing

        sys.stdout.write(listing())
        return 0
    subject: str = arguments.subject
    if subject == "defaults":
        from legoai.dsl.reporting.reference import defaults

        _table((owner, option.name, value) for owner, option, value in defaults())
        return 0
    sys.stdout.write(_page(subject))
    return 0


def subjects() -> tuple[str, ...]:
    """The words that can be explained without a plan, and the codes of diagnostics and of failed runs."""
    from legoai.dsl.reporting.topics import names
    from legoai.runtime.errors import RunErrorCode

    return (*names(), *sorted(rule.code for rule in all_rules()), *RunErrorCode)


def _page(subject: str) -> str:
    """The pages of a word; of a diagnostic as they are, of all else filled to the width of a terminal.

    Raises:
        WrongUsage: it has none.
    """
    from legoai.dsl.reporting.topics import found, names

    if pages := found(subject):
        return "\n".join(item.page() if item.group == "Diagnostics" else _wrapped(item.page()) for item in pages)
    if _CODE.fullmatch(subject):
        codes = [rule.code for rule in all_rules()]
        raise WrongUsage(
            " ".join([f"no rule has the code `{subject}`;", *suggestion(subject.upper(), codes)]).rstrip(";")
        )
    if _RUN_CODE.fullmatch(subject):
        return _of_run(subject.upper())
    help = suggestion(subject, names()) if "." not in subject else []
    raise WrongUsage(
        f"`{subject}` is no word of the language; "
        + (help[0] if help else "`legoai explain --list` lists them. If it is a module of a model: --plan FILE")
    )


def _of_run(code: str) -> str:
    """A sentence on the code of a failed run.

    Raises:
        WrongUsage: there is no such code.
    """
    from legoai.runtime.errors import RunErrorCode

    if code not in list(RunErrorCode):
        raise WrongUsage(
            " ".join([f"no failure of a run has the code `{code}`;", *suggestion(code, list(RunErrorCode))])
        )
    what = RunErrorCode(code).name.lower().replace("_", " ")
    return _wrapped(f"{code} is a failure of a run ({what}); its message names what is at fault, and the remedy.")


def _of_plan(arguments: Namespace) -> int:
    """A plan's statements about a module, or its defaults."""
    from legoai.dsl.reporting.explain import NoSuchModuleError, defaults_of, explain

    analysis = _analysis(arguments)
    if analysis is None:
        return 1
    if arguments.subject == "defaults":
        _table(defaults_of(analysis))
        return 0
    try:
        sys.stdout.write(explain(analysis, arguments.subject))
    except NoSuchModuleError as error:
        raise WrongUsage(str(error)) from error
    return 0


def _analysis(arguments: Namespace) -> Analysis | None:
    """The plan; None, after its errors were shown, where it comes to nothing or its model is not known."""
    source = source_of(arguments.plan)
    if source is None:
        return None
    linted = examine(source, settings_of(arguments), arguments.variant, variants=False, factories=arguments.factories)
    errors = errors_of(linted.diagnostics)
    if asked := [item for item in errors if _is_of_command_line(item)]:
        refuse(source.name, "explained", asked, linted.files)  # what would be explained is not what was asked for
        return None
    if linted.analysis is not None and linted.analysis.manifest is not None:
        if errors:
            announce(f"{source.name} has errors; `legoai lint` shows them")
        return linted.analysis
    if errors:
        refuse(source.name, "explained", errors, linted.files)
    else:
        lacking = lacks_factory(linted, arguments, "explained")
        assert lacking, "without errors, no other model is unknown"
    return None


def _is_of_command_line(item: Diagnostic) -> bool:
    """Whether an error is in `--set` or `--variant`, and not in a plan's text."""
    return item.code == UnknownVariant.code or item.label.span.file.startswith(OF_SETTING)


def _table(rows: Iterable[tuple[str, str, str]]) -> None:
    held = list(rows)
    widths = [max((len(row[column]) for row in held), default=0) for column in (0, 1)]
    previous = None
    for owner, option, value in held:
        print(f"{owner if owner != previous else '':<{widths[0]}}  {option:<{widths[1]}} = {value}")
        previous = owner


def _wrapped(page: str) -> str:
    """The page with each paragraph and each item of a list filled to the width of a terminal."""
    from textwrap import fill

    blocks = []
    for block in page.rstrip().split("\n\n"):
        if block.startswith("```"):
            blocks += [*(f"    {line}" for line in block.splitlines()[1:-1]), ""]
            continue
        items = block.splitlines() if block.lstrip().startswith("- ") else [" ".join(block.split())]
        for item in items:
            hang = " " * (len(item) - len(item.lstrip()) + 2) if item.lstrip().startswith("- ") else ""
            blocks.append(fill(item, _WIDTH, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False))
        blocks.append("")
    return "\n".join(blocks[:-1]) + "\n"
