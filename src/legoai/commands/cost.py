"""`legoai cost`: estimated step time and memory of a plan, without a GPU."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from legoai.commands import WrongUsage
from legoai.commands.printing import printing_to_standard_error
from legoai.commands.progress import Progress
from legoai.commands.shared import (
    STANDARD_OUTPUT,
    add_no_factories,
    add_resolution,
    announce,
    lacks_figures,
    lacks_graph,
    lowered,
    note_profile,
    output_file,
    write,
)
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.runtime.torch_internals.cpp_warnings import without_cpp_warnings
from legoai.specs.cluster import PROFILE_SUFFIX, device_names

if TYPE_CHECKING:
    from legoai.cost.estimate import Estimate
    from legoai.cost.graph_passes import PassEstimate
    from legoai.dsl.lint import Linted
    from legoai.lowering.program import Program

_DESCRIPTION = """\
Simulate one step of a plan on this machine, without a GPU: the program that the plan becomes is run on a
simulated device, and its operations, collectives and memory are timed and followed there.

The exit status is 1 if the plan has errors, and 2 if it cannot be costed. Budgets are shown, and enforced by
`legoai check`.
"""

_EXAMPLES = """\
examples:
  legoai cost plan.tiny                             a summary
  legoai cost plan.tiny --json                      every figure
  legoai cost plan.tiny --html tiny.html            a page with the step's timeline and memory
  legoai cost plan.g --passes                       of `backend = graph`, what each pass over the graph changes
  legoai cost plan.llama3_8b_8 --profile h200       on other devices
  legoai cost plan.tiny --profile calibrated.toml   on devices that `legoai calibrate` measured
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai cost`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("file", metavar="FILE", help="a plan, plan.NAME, or -")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    parser.add_argument("--lines", action="store_true", help="with --json: what each line of the plan causes, too")
    parser.add_argument(
        "--trace",
        metavar="OUT",
        type=output_file,
        help="write the step as a Chrome trace for Perfetto; - is standard output",
    )
    parser.add_argument(
        "--passes",
        action="store_true",
        help="of a plan with `backend = graph`, show what each pass over the step's graph changes",
    )
    parser.add_argument(
        "--html",
        metavar="OUT",
        type=output_file,
        help="write a page with timeline, memory and tables; - is standard output",
    )
    add_profile(parser)
    parser.add_argument(
        "--rank", type=_rank, metavar="N", help="the rank that is simulated (default: the one with the most work)"
    )
    add_no_factories(parser)
    add_resolution(parser)


def add_profile(parser: ArgumentParser) -> None:
    """Add the option that names other devices."""
    parser.add_argument(
        "--profile",
        metavar="DEVICE",
        type=device_or_file,
        help="other devices than the plan's: a name of the catalogue, a device file NAME.toml with its profile "
        "beside it, or a profile NAME.json.gz",
    )


def device_or_file(text: str) -> str:
    """The type of an argument that names a device of the catalogue, or the file of another one.

    Raises:
        ArgumentTypeError: it is the name of no device, and of no such file.
    """
    if text not in device_names() and not text.endswith((".toml", PROFILE_SUFFIX)):
        known = f"devices are {', '.join(device_names())}, and files end in .toml or {PROFILE_SUFFIX}"
        raise ArgumentTypeError("; ".join([f"unknown device {text!r}", known, *suggestion(text, device_names())]))
    return text


def run(arguments: Namespace) -> int:
    """Cost; returns 1 where the plan has errors."""
    if arguments.lines and (not arguments.json or arguments.passes):
        raise WrongUsage("--lines adds to --json what each line of the plan causes, and is not for --passes")
    piped = [name for name in ("json", "trace", "html") if getattr(arguments, name) in (True, STANDARD_OUTPUT)]
    if len(piped) > 1:
        raise WrongUsage(f"--{piped[0]} and --{piped[1]} both write to standard output: name a file")
    done = lowered(arguments, "costed", [arguments.trace, arguments.html])
    if done is None or lacks_figures(done[0], arguments.profile):
        return 1
    linted, program = done
    if arguments.passes:
        return _passes(linted, arguments)
    estimate = estimated(linted, program, profile=arguments.profile, rank=arguments.rank)

    from legoai.cost.report.causes import Causes

    assert linted.analysis is not None
    causes = Causes(linted.analysis)
    if arguments.trace is not None:
        from legoai.cost.report.chrome import chrome_trace

        write(arguments.trace, chrome_trace(estimate, causes))
    if arguments.html is not None:
        from legoai.cost.report.page import page

        write(arguments.html, page(estimate, causes))
    if arguments.json:
        from legoai.cost.report.document import document

        body = document(estimate, causes)
        if arguments.lines:
            from legoai.cost.report.lines import line_costs, summary

            body |= {"summary": summary(estimate), "lines": [x.document() for x in line_costs(estimate, causes)]}
        print(json.dumps(body, indent=2))
    else:
        from legoai.cost.report.terminal import terminal

        stream = sys.stderr if piped else sys.stdout
        stream.write(terminal(estimate, causes))
    return 0


def estimated(linted: Linted, program: Program, *, profile: str | None = None, rank: int | None = None) -> Estimate:
    """The estimate of a lowered plan, with progress on a terminal.

    Raises:
        WrongUsage: it cannot be costed.
    """
    assert linted.plan is not None
    assert linted.analysis is not None
    assert linted.analysis.manifest is not None
    with _simulating(linted) as progress:
        from legoai.cost.estimate import estimate

        return estimate(
            program,
            linted.plan,
            linted.analysis.manifest,
            directory=linted.analysis.directory,
            profile=profile,
            rank=rank,
            progress=progress,
        )


def pass_estimated(
    linted: Linted, *, profile: str | None, rank: int | None = None, between: bool = True
) -> Sequence[PassEstimate]:
    """The estimates of a plan with `backend = graph`, as `pass_estimates` gives them, with progress on a terminal.

    Raises:
        WrongUsage: it cannot be costed.
    """
    assert linted.analysis is not None
    with _simulating(linted) as progress:
        from legoai.cost.graph_passes import pass_estimates

        return pass_estimates(
            linted.analysis,
            profile=profile,
            rank=rank,
            between=between,
            progress=progress,
        )


def _passes(linted: Linted, arguments: Namespace) -> int:
    """Print what each pass changes; returns 1 where the plan has no graph."""
    given = next((name for name in ("trace", "html") if getattr(arguments, name) is not None), None)
    if given is not None:
        raise WrongUsage(f"--{given} is of one simulation, and --passes makes one for each pass")
    if lacks_graph(linted):
        return 1
    note_profile(linted)
    found = pass_estimated(linted, profile=arguments.profile, rank=arguments.rank)

    from legoai.cost.report import graph_passes

    if arguments.json:
        print(json.dumps(graph_passes.document(found), indent=2))
    else:
        sys.stdout.write(graph_passes.terminal(found))
    return 0


@contextlib.contextmanager
def _simulating(linted: Linted) -> Iterator[Progress]:
    """Prepare to simulate a plan; progress is shown on a terminal while entered, and what a model factory prints.

    Raises:
        WrongUsage: it cannot be costed.
    """
    from legoai.cost.trace.garbage import uncollected

    assert linted.plan is not None
    if linted.plan.model.family == "python":
        announce(f"building the model with {linted.plan.model.target} in this process, to simulate it")
    progress = Progress()
    progress("reading torch")
    with without_cpp_warnings():
        # What torch's modules hold the collector would scan again and again, and free none of it.
        with uncollected(kept=True):
            from legoai.cost.estimate import CannotEstimateError

        try:
            with printing_to_standard_error():
                yield progress
        except CannotEstimateError as error:
            raise WrongUsage(f"{linted.resolution.file.name} cannot be costed: {error}") from error
        finally:
            gc.unfreeze()
            progress.clear()


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"expected a rank, counted from 0, not {text!r}")
    return int(text)
