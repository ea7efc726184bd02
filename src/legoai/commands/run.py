"""`legoai run`: lowers a plan and trains it on this machine."""

from __future__ import annotations

import contextlib
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from legoai.commands.failure import internal_error
from legoai.commands.printing import printing_to_standard_error
from legoai.commands.shared import add_no_factories, add_resolution, announce, lowered
from legoai.runtime.torch_internals.cpp_warnings import without_cpp_warnings

if TYPE_CHECKING:
    from legoai.cost.report.run import Predicted
    from legoai.dsl.lint import Linted
    from legoai.lowering.program import Program
    from legoai.runtime.launching.options import RunOptions

_DESCRIPTION = """\
Lower a plan and train it on this machine under torchrun, one process per device of its mesh. The program,
the metrics and the checkpoints go to a folder, runs/NAME, or runs/NAME-VARIANT. Running again resumes from
the newest checkpoint there. Arguments after -- are the trainer's.

Before the start, a step is predicted as by `legoai cost`; at the end prediction and measurement are shown side
by side, and added to the metrics.

The exit status is 1 if the plan has errors or the training cannot be started, 2 if the plan needs another number
of processes, and otherwise that of the training.
"""

_EXAMPLES = """\
examples:
  legoai run plan.tiny                           train
  legoai run plan.tiny -- --steps 200            with options of the trainer
  legoai run plan.tiny -- --help                 what those options are
  legoai run plan.tiny --nproc 8 --set ranks=8   with another number of processes
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai run`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.usage = (
        "%(prog)s [-h] [--nproc N] [--no-prediction] [--no-factories] [--set NAME=VALUE] [--variant NAME] "
        "FILE [-- ARGUMENT ...]"
    )
    parser.add_argument("file", metavar="FILE", help="a plan, plan.NAME, or -")
    parser.add_argument(
        "--nproc",
        type=_positive,
        metavar="N",
        help="processes on this machine, as many as the mesh has devices (default: so many, on one host)",
    )
    parser.add_argument(
        "--no-prediction", dest="predicts", action="store_false", help="predict nothing, and start at once"
    )
    add_no_factories(parser)
    add_resolution(parser)


def run(arguments: Namespace) -> int:
    """Lower and launch; returns the status of the training.

    It is 1 where the plan has errors or cannot be started, and 2 where it needs another number of processes.
    """
    done = lowered(arguments, "run")
    if done is None:
        return 1
    linted, program = done
    assert linted.plan is not None
    assert linted.analysis is not None
    sys.stdout.flush()

    from legoai.lowering.start import start
    from legoai.runtime.errors import RunError, RunErrorCode
    from legoai.runtime.metrics.log import METRICS

    predictions: list[tuple[Predicted, Path, int]] = []

    def begin(options: RunOptions) -> None:
        assert options.out is not None
        metrics = options.out / METRICS
        before = metrics.stat().st_size if metrics.exists() else 0
        _note_cluster(linted, metrics)
        found = _prediction(linted, program, options, arguments) if arguments.predicts else None
        if found is not None:
            predictions.append((found, metrics, before))

    try:
        status = start(
            program,
            linted.plan,
            directory=linted.analysis.directory,
            nproc=arguments.nproc,
            arguments=arguments.arguments,
            usage=f"legoai run {arguments.file}",
            say=announce,
            begin=begin,
        )
    except RunError as error:
        print(error, file=sys.stderr)
        return 2 if error.code == RunErrorCode.WORLD_SIZE else 1
    for predicted, metrics, before in predictions:
        _compare(predicted, metrics, before)
    return status


def _prediction(linted: Linted, program: Program, options: RunOptions, arguments: Namespace) -> Predicted | None:
    """The prediction of a step, which is printed; None where there is none, or where it would not apply to this run."""
    plan, analysis = linted.plan, linted.analysis
    assert plan is not None and analysis is not None and analysis.manifest is not None
    manifest = analysis.manifest
    kind = None if analysis.device is None else analysis.device.kind
    if options.device not in ("auto", kind):
        return None

    if plan.model.family == "python":
        announce(f"building the model with {plan.model.target}, to predict a step")

    @without_cpp_warnings()
    def simulate() -> Predicted | str:
        from legoai.cost.estimate import CannotEstimateError, estimate
        from legoai.cost.report.run import Predicted

        try:
            found = estimate(program, plan, manifest, directory=analysis.directory)
            return Predicted.of(found, plan.batch.global_batch)
        except CannotEstimateError as error:
            return str(error)
        except Exception as error:
            if plan.model.family == "python":  # the run itself reports what a factory raises
                return f"{type(error).__name__}: {error}"
            return internal_error(error)

    from legoai.cost.search.evaluation.workers import WorkerKilledError, apart

    try:
        with printing_to_standard_error():
            found = apart(simulate)
    except WorkerKilledError as error:
        found = str(error)
    if isinstance(found, str):
        announce(f"nothing is predicted: {found}")
        return None
    rate = found.rate(found.step_time_s)
    announce(f"predicted: {found.step_time_s:.3g} s a step, {rate:,.0f} {found.unit}/s/device")
    return found


def _note_cluster(linted: Linted, metrics: Path) -> None:
    """Tell the run's metrics the devices that the plan is for, on which `legoai calibrate --from` builds."""
    from legoai.cost.report.run import note_cluster

    assert linted.plan is not None and linted.analysis is not None
    with contextlib.suppress(OSError):  # the run itself reports what is wrong with its folder
        note_cluster(metrics, linted.plan.cluster, linted.analysis.directory)


def _compare(predicted: Predicted, metrics: Path, before: int) -> None:
    """Show prediction and measurement side by side, if enough steps behind the offset have the predicted batch."""
    from legoai.cost.report.run import compared, measured, note

    run = measured(metrics, before=before, predicted=predicted)
    if run is None:
        return
    if isinstance(run, str):
        announce(run)
        return
    for line in compared(predicted, run):
        print(line, file=sys.stderr)
    with contextlib.suppress(OSError):  # the run's folder may be full, which the run has reported
        note(metrics, predicted, run)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a number of processes, not {text!r}")
    return int(text)
