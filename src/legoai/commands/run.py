"""`legoai run`: lowers a plan and trains it on this machine."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace

from legoai.commands.shared import add_no_factories, add_resolution, announce, lowered

_DESCRIPTION = """\
Lower a plan and train it on this machine under torchrun, one process per device of its mesh. The program,
the metrics and the checkpoints go to a folder, runs/NAME, or runs/NAME-VARIANT. Running again goes on from
the newest checkpoint there. What follows -- goes to the trainer.

The exit status is 1 if the plan has errors, and otherwise that of the training.
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
        "%(prog)s [-h] [--nproc N] [--no-factories] [--set NAME=VALUE] [--variant NAME] FILE [-- ARGUMENT ...]"
    )
    parser.add_argument("file", metavar="FILE", help="a plan, plan.NAME, or -")
    parser.add_argument(
        "--nproc",
        type=_positive,
        metavar="N",
        help="processes on this machine (default: the devices of the plan's mesh)",
    )
    add_no_factories(parser)
    add_resolution(parser)


def run(arguments: Namespace) -> int:
    """Lower and launch; returns the status of the training, or 1 where the plan has errors or cannot be started."""
    done = lowered(arguments)
    if done is None:
        return 1
    linted, program = done
    assert linted.plan is not None
    assert linted.analysis is not None
    sys.stdout.flush()

    from legoai.lowering.start import start
    from legoai.runtime.errors import RunError, RunErrorCode

    try:
        return start(
            program,
            linted.plan,
            directory=linted.analysis.directory,
            nproc=arguments.nproc,
            arguments=arguments.arguments,
            usage=f"legoai run {arguments.file}",
            say=announce,
        )
    except RunError as error:
        print(error, file=sys.stderr)
        return 2 if error.code == RunErrorCode.WORLD_SIZE else 1


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a number of processes, not {text!r}")
    return int(text)
