"""`legoai check`: enforces what plans require, by simulating them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from legoai.commands.cost import add_profile, estimated
from legoai.commands.failure import failure
from legoai.commands.reporting import add_files, add_reporting, choice_of, plans_of, report
from legoai.commands.shared import add_no_factories, add_resolution, examine, files_of, say, settings_of
from legoai.dsl.config import reported
from legoai.dsl.diagnostics.diagnostic import Diagnostic, errors_of
from legoai.dsl.frontend.files.sources import Source, UnreadableError, read_source
from legoai.dsl.frontend.parsing import suppress
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.lint import Linted
from legoai.dsl.rules.devices.profile import UnmeasuredCluster
from legoai.dsl.rules.hygiene import UnusedSuppression
from legoai.dsl.rules.training.unsimulated import UnsimulatedModel
from legoai.specs.directives.hole import Undecided
from legoai.specs.record import replace
from legoai.specs.units import counted

_DESCRIPTION = """\
Lint plans, simulate each of them and each of its variants, and compare the results with their `require`
lines and with the memory of their devices.

The exit status is 1 if there is an error or a requirement is violated, and 2 if a plan cannot be costed.
"""

_EXAMPLES = """\
examples:
  legoai check plan.tiny                      one plan
  legoai check plans/                         every plan in a directory
  legoai check plans/ --no-factories          in CI, on pull requests from strangers
  legoai check plans/*.plan --format github   annotate a pull request
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai check`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    add_files(parser)
    add_reporting(parser)
    add_profile(parser)
    add_no_factories(parser)
    add_resolution(parser)


def run(arguments: Namespace) -> int:
    """Check; returns 1 where something is wrong with a plan, 2 where one cannot be costed."""
    choice = choice_of(arguments)
    found: list[Diagnostic] = []
    shown: list[Diagnostic] = []
    files: dict[str, PlanFile] = {}
    failed: list[str] = []
    names = plans_of(arguments, choice)
    for name in names:
        try:
            source = read_source(name, arguments.stdin_filename)
            linted = examine(source, settings_of(arguments), arguments.variant, factories=arguments.factories)
            files |= linted.files
            simulates = not linted.has_errors and linted.analysis is not None and linted.analysis.manifest is not None
            # Simulating the plan gives the errors of these warnings, unless other devices have figures.
            hidden = {UnsimulatedModel.code} if simulates else set()
            if simulates or (arguments.profile is not None and not _has_unmeasured_fabric(linted)):
                hidden.add(UnmeasuredCluster.code)
            found += [item for item in linted.diagnostics if item.code not in hidden]
            if simulates:
                found += _simulated(source, linted, arguments)
            errors = errors_of(linted.diagnostics)
            if not any(reported(item, choice) for item in errors):
                shown += errors  # nothing was simulated, which no choice of codes may hide
        except UnreadableError as error:
            found.append(error.diagnostic)
            files |= files_of(error)
        except BrokenPipeError:
            raise
        except Exception as error:  # the other plans are reported nevertheless
            failed.append(failure(error, name))
    return report(found, files, len(names), arguments, choice, shown=shown, failed=failed)


def _has_unmeasured_fabric(linted: Linted) -> bool:
    """Whether nothing is known of the speed of the fabric between a plan's hosts, which `--profile` does not change."""
    try:
        return linted.plan is not None and linted.plan.cluster.unmeasured_fabric is not None
    except Undecided:
        return False


def _simulated(source: Source, linted: Linted, arguments: Namespace) -> list[Diagnostic]:
    """The diagnostics from simulating a plan and its variants, in the order of its text; equal ones are reported once.

    Raises:
        WrongUsage: the plan cannot be costed.
    """
    found: list[Diagnostic] = []
    seen = set()
    chosen = [arguments.variant] if arguments.variant is not None else [None, *linted.resolution.variants]
    for variant in chosen:
        one = linted
        if variant is not None:
            one = examine(source, settings_of(arguments), variant, variants=False, factories=arguments.factories)
        if one.analysis is None or one.analysis.manifest is None:
            continue  # a factory that is not run
        for item in _of_simulation(one, arguments):
            if (item.code, item.label.span) not in seen:
                seen.add((item.code, item.label.span))
                named = variant if arguments.variant is None else None
                found.append(item if named is None else _in_variant(item, named))
    kept, _, unused = suppress.split(found, linted.files.values())
    kept.extend(UnusedSuppression.find(unused, simulated=True))
    return sorted(kept, key=lambda item: item.order)


def _in_variant(item: Diagnostic, variant: str) -> Diagnostic:
    return replace(item, help=(*item.help, f"this is so in the variant `{variant}`"))


def _of_simulation(linted: Linted, arguments: Namespace) -> Iterator[Diagnostic]:
    """The diagnostics from simulating one resolution of a plan, or those of one that cannot be lowered."""
    from legoai.api import without_figures
    from legoai.lowering.program import LoweringError, lower

    assert linted.plan is not None
    assert linted.analysis is not None
    name = linted.resolution.file.name
    unmeasured = without_figures(linted, arguments.profile)
    if unmeasured is not None:
        yield unmeasured
        return
    try:
        program = lower(linted.analysis)
    except LoweringError as error:
        yield from error.diagnostics
        return
    estimate = estimated(linted, program, profile=arguments.profile)

    from legoai.cost.report.budgets import advice, violations
    from legoai.cost.report.causes import Causes
    from legoai.cost.report.checkpointing import never_called
    from legoai.cost.words import seconds, size

    variant = f", variant {linted.plan.variant}" if linted.plan.variant else ""
    ok = sum(item.ok for item in estimate.requirements)
    required = f", {ok} of {counted(len(estimate.requirements), 'requirement')} ok" if estimate.requirements else ""
    if not arguments.quiet:
        say(f"{name}{variant}: step {seconds(estimate.step_time)}, peak memory {size(estimate.peak_active)}{required}")
    causes = Causes(linted.analysis)
    yield from violations(estimate, causes)
    yield from never_called(estimate, causes)
    yield from advice(estimate, causes)
