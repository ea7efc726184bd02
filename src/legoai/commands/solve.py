"""`legoai solve`: fills the holes of a plan so that it is as fast as its requirements allow."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING

from legoai.api import PlanError, solved
from legoai.api import opened as open_plan
from legoai.commands import WrongUsage
from legoai.commands.cost import add_profile
from legoai.commands.printing import printing_to_standard_error
from legoai.commands.progress import Progress
from legoai.commands.shared import (
    STANDARD_OUTPUT,
    add_no_factories,
    add_resolution,
    announce,
    check_writable,
    is_same_file,
    lacks_figures,
    output_file,
    refuse,
    settings_of,
    show,
    sound,
    source_of,
    write,
)
from legoai.dsl.frontend.files.sources import Source, UnreadableError, read_source
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.syntax import SolvedLine
from legoai.lowering.file_names import is_beside
from legoai.runtime.torch_internals.cpp_warnings import without_cpp_warnings
from legoai.specs.cache import refreshed
from legoai.specs.directives.require import METRICS
from legoai.specs.files import is_stream

if TYPE_CHECKING:
    from legoai.cost.search.solve import Solution
    from legoai.dsl.open_plan import OpenPlan

_DESCRIPTION = """\
Fill the holes of a plan, every `auto`, with the values that make its objective best and meet its `require`
lines, and write them after the holes of the same text: `auto -> 8`. The objective is the plan's `minimize` or
`maximize`, else the time of a step. Answers that a plan has already are not used: they are searched again, also
where an edit of the plan has made them illegal.

Every candidate is linted by the rules of `legoai lint`, and simulated as by `legoai cost`. A bound is printed
too: no values of the holes are better than that.

The exit status is 1 if the plan has errors, or no values were found that meet its requirements, 2 if it cannot
be solved, and 130 if it was interrupted before there was a solution.
"""

_ESTIMATE = "estimate"
"""Under which the estimate of the best candidate is kept."""

_EXAMPLES = """\
examples:
  legoai solve plan.auto                     the best few, and what they cost
  legoai solve plan.auto --in-place          write the answers into the file
  legoai solve plan.auto -o solved.plan      write them into another file
  legoai solve plan.auto -o -                print it alone; the candidates go to standard error
  legoai solve plan.auto --time-limit 60     the best within a minute
  legoai solve plan.auto --gap 2%            to within 2%, which takes less time
  legoai solve plan.auto --in-place --pin    plain values in the place of the holes
  legoai solve plan.auto --json --all        every candidate
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai solve`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("file", metavar="FILE", help="a plan, plan.NAME, or -")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--in-place", action="store_true", help="write the answers into the plan's file")
    place.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=output_file,
        help="write the solved plan into another file; - is standard output",
    )
    parser.add_argument("--pin", action="store_true", help="write plain values in the place of the holes")
    parser.add_argument(
        "--top", metavar="K", type=_count, help="candidates to show (default: 5, and none beside the best in JSON)"
    )
    parser.add_argument(
        "--time-limit", metavar="S", type=_seconds, help="stop after so many seconds with the best so far"
    )
    parser.add_argument(
        "--gap", metavar="SHARE", type=_share,
        help=(
            "stop when no candidate can be better than the best by more than this share (default: 0.5%%, and 0 for "
            "holes with fewer than 256 assignments)"
        ),
    )  # fmt: skip
    parser.add_argument("--refresh", action="store_true", help="ignore the cache: search and simulate again")
    parser.add_argument("--json", action="store_true", help="print the solution as JSON")
    parser.add_argument("--all", action="store_true", help="with --json, every candidate that was evaluated")
    add_profile(parser)
    add_no_factories(parser)
    add_resolution(parser)


def run(arguments: Namespace) -> int:
    """Solve; returns 1 where the plan has errors or no solution.

    Raises:
        KeyboardInterrupt: interrupted before there was a solution.
    """
    with refreshed(arguments.refresh):
        return _run(arguments)


def _run(arguments: Namespace) -> int:
    if arguments.all and not arguments.json:
        raise WrongUsage("--all belongs to --json")
    if arguments.json and arguments.output == STANDARD_OUTPUT:
        raise WrongUsage("--json and -o - both write to standard output: name a file")
    source = source_of(arguments.file)
    if source is None:
        return 1
    if arguments.in_place and source.rewritable is None:
        raise WrongUsage(f"{source.name} is no file that can be rewritten in place: use -o")
    if arguments.in_place:
        assert source.rewritable is not None
        check_writable(source.rewritable)
    elif arguments.output is not None and source.path is not None and is_same_file(arguments.output, source.path):
        raise WrongUsage(f"{arguments.output} is the plan itself: --in-place writes the answers into it")
    written = sound(source, arguments, "solved", [arguments.output], reopen=True)
    if written is None:
        return 1
    settings = settings_of(arguments)
    try:
        opened = open_plan(written, settings=settings, announce=announce)
    except PlanError as error:
        refuse(source.name, "solved", error.diagnostics, error.files)
        return 1
    if not opened.holes:
        raise WrongUsage(f"{source.name} has no holes: write `auto` where a value is to be found")
    if lacks_figures(written, arguments.profile):
        return 1
    if arguments.output is not None:
        _check_place(opened, source, arguments)
    question = opened.question()
    solution, estimate = _solved(opened, arguments)
    if solution.diagnostics:
        show(solution.diagnostics, opened.files, stream=sys.stderr)
    _print(solution, estimate, arguments)
    if solution.best is None:
        return _unsolved(solution, source.name)
    is_same = opened.question() == question
    text = solution.text(solution.best.choices, pinned=arguments.pin, record=is_same)
    if arguments.in_place and is_same and _is_as_read(source):
        assert source.rewritable is not None
        write(source.rewritable, source.content(text))
        if not opened.is_alone:
            _announce_replaced(solution, text, arguments)
        return 0
    if arguments.in_place:
        _write_beside(source, text, arguments, what="" if is_same else " or a file that it is made of")
        return 1
    if arguments.output is not None:
        write(arguments.output, text)
        if not is_same:
            announce(
                f"a file that {source.name} is made of was changed while it was solved: the answers are those to the "
                "earlier question, and no line records them as solved"
            )
            return 1
    return 0


def _check_place(opened: OpenPlan, source: Source, arguments: Namespace) -> None:
    """Check that the plan is the same in the folder of its solution, as its file names are relative to its own.

    Raises:
        WrongUsage: it is another plan there, or none.
    """
    folder, plan = arguments.output.parent, opened.resolution.plan
    if (
        arguments.output == STANDARD_OUTPUT
        or is_stream(arguments.output)
        or folder.resolve() == source.directory.resolve()
    ):
        return
    assert plan is not None
    there = opened.moved(folder).plan
    lacks_factory_there = is_beside(plan, source.directory) and not is_beside(plan, folder)
    if there is None or there.digest != plan.digest or lacks_factory_there:
        raise WrongUsage(
            f"{arguments.output} would not be the same plan: {source.name} names files or a factory by their place "
            f"beside it; write the solution into {source.directory}, or use --in-place"
        )


def _announce_replaced(solution: Solution, text: str, arguments: Namespace) -> None:
    """Announce what the plan itself has lost to the answers that were found under a variant or settings."""
    assert solution.best is not None
    before = solution.plan.resolution.file
    replaced = ", ".join(solution.replaced(solution.best.choices))
    if replaced:
        options = [f"--set {name}={value}" for name, value in settings_of(arguments).items()]
        options += [] if arguments.variant is None else [f"--variant {arguments.variant}"]
        announce(f"{before.name} has these answers without `{' '.join(options)}` too, in place of its own: {replaced}")
    files = before, parse(text, before.name).file
    if [any(isinstance(item, SolvedLine) for item in file.statements) for file in files] == [True, False]:
        announce(f"the `solved` line of {before.name}, which was of other answers, is removed")


def _is_as_read(source: Source) -> bool:
    """Whether the plan's file still has the text that was solved."""
    try:
        return read_source(str(source.rewritable)).text == source.text
    except UnreadableError:
        return False


def _write_beside(source: Source, text: str, arguments: Namespace, *, what: str) -> None:
    """Write the solution of a plan that was changed meanwhile: into a new file, or else to standard output."""
    path = source.rewritable
    assert path is not None
    announce(f"{source.name}{what} was changed while it was solved, and is left as it is")
    names = (f"{path.stem}.solved{number}{path.suffix}" for number in ("", *(f".{count}" for count in range(2, 100))))
    free = next((beside for name in names if not os.path.lexists(beside := path.with_name(name))), None)
    if free is not None:
        with contextlib.suppress(WrongUsage):
            write(free, source.content(text))
            return
    if arguments.json:  # which lists the answers
        announce("the solved text is not written: there is no place beside the plan")
    else:
        write(STANDARD_OUTPUT, text)


@without_cpp_warnings()
def _solved(opened: OpenPlan, arguments: Namespace) -> tuple[Solution, dict[str, object] | None]:
    """The solution, and the best candidate's estimate where it is to be printed."""
    plan = opened.resolution.plan
    assert plan is not None
    if plan.model.family == "python":
        announce(f"building the model with {plan.model.target} in processes of this one, to simulate it")
    progress = Progress()
    progress("reading torch")
    from legoai.cost.search.solve import CannotSolveError
    from legoai.cost.words import bound as shown

    gc.freeze()
    metric = plan.objective.metric if plan.objective is not None else "step_time"
    dimension = METRICS[metric].dimensions[0]

    def say(count: int, best: float | None, least: float | None) -> None:
        words = "none feasible" if best is None else f"best {shown(best, dimension)}"
        progress(f"{count} candidates, {words}" + ("" if least is None else f", bound {shown(least, dimension)}"))

    try:
        with printing_to_standard_error():
            solution = solved(
                opened,
                profile=arguments.profile,
                time_limit=arguments.time_limit,
                gap=arguments.gap,
                progress=say,
            )
        progress.clear()
        if not arguments.json or solution.best is None:
            return solution, None
        try:
            with printing_to_standard_error():
                return solution, _estimate(solution, arguments.profile)
        except KeyboardInterrupt:  # the answers are there, and take no more time
            return solution, None
    except CannotSolveError as error:
        raise WrongUsage(f"{opened.resolution.file.name} cannot be solved: {error}") from error
    finally:
        gc.unfreeze()
        progress.clear()


def _unsolved(solution: Solution, name: str) -> int:
    """The status where there is no solution; says on standard error why, where no diagnostic does.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    status = solution.result.status
    if status == "time_limit":
        announce(f"{name} is not solved: no candidate is feasible of those evaluated within the time limit")
    if status == "interrupted":
        announce(f"{name} is not solved: interrupted before a candidate was feasible")
        raise KeyboardInterrupt
    return 1


def _estimate(solution: Solution, profile: str | None) -> dict[str, object]:
    """The best candidate's estimate, as `legoai cost --json` prints it; that of an equal plan is kept."""
    from legoai.cost.estimate import estimate
    from legoai.cost.report.causes import Causes
    from legoai.cost.report.document import document
    from legoai.cost.search.evaluation.figures_cache import estimate_file, read_cache, write_cache
    from legoai.cost.search.evaluation.workers import apart
    from legoai.cost.search.solve import devices_of
    from legoai.lowering.program import lower

    assert solution.best is not None
    analysis = solution.plan.candidate(solution.best.choices).analysis
    assert analysis is not None
    program = lower(analysis)
    path = estimate_file(devices_of(solution.plan, profile), analysis, program)
    kept = read_cache(path)
    if _ESTIMATE in kept:
        return kept[_ESTIMATE]

    def simulated() -> dict[str, object]:
        assert analysis.manifest is not None
        found = estimate(program, analysis.plan, analysis.manifest, directory=analysis.directory, profile=profile)
        return document(found, Causes(analysis))

    found = apart(simulated)
    write_cache(path, {_ESTIMATE: found})
    return found


def _print(solution: Solution, estimate: dict[str, object] | None, arguments: Namespace) -> None:
    from legoai.cost.report.solution import SHOWN, document, terminal

    if arguments.json:
        print(json.dumps(document(solution, estimate, top=arguments.top or 0, every=arguments.all), indent=2))
    else:
        stream = sys.stderr if arguments.output == STANDARD_OUTPUT else sys.stdout
        stream.write(terminal(solution, top=arguments.top or SHOWN))
        if solution.best is not None and not arguments.in_place and arguments.output is None:
            print("\nnothing is written: --in-place writes the answers into the plan, -o into another file")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a number of candidates, at least 1, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ArgumentTypeError(f"expected a number of seconds above 0, not {text!r}")
    return seconds


def _share(text: str) -> float:
    number, percent = (text[:-1], True) if text.endswith("%") else (text, False)
    try:
        share = float(number) / (100.0 if percent else 1.0)
    except ValueError:
        share = -1.0
    if not 0.0 <= share < 1.0:
        raise ArgumentTypeError(f"expected a share of at least 0 and below 1, like 0.5%, not {text!r}")
    return share
