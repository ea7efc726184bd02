"""`legoai run`: lowers a plan and trains it on this machine."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from legoai.commands import WrongUsage
from legoai.commands.shared import add_resolution, announce, counted, lowered
from legoai.dsl.frontend.sources import replace_file
from legoai.specs.plan import Plan

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
    parser.usage = "%(prog)s [-h] [--nproc N] [--set NAME=VALUE] [--variant NAME] FILE [-- ARGUMENT ...]"
    parser.add_argument("file", metavar="FILE", help="a plan, plan.NAME, or -")
    parser.add_argument(
        "--nproc",
        type=_positive,
        metavar="N",
        help="processes on this machine (default: the devices of the plan's mesh)",
    )
    add_resolution(parser)


def run(arguments: Namespace) -> int:
    """Lower and launch; returns the status of the training, or 1 where the plan has errors."""
    done = lowered(arguments)
    if done is None:
        return 1
    linted, program = done
    assert linted.plan is not None
    nproc = _processes(linted.plan, arguments.nproc)
    folder = run_directory(linted.plan)
    path = folder / f"{program.plan_name}.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, program.text)
    except OSError as error:
        raise WrongUsage(f"{path} cannot be written: {error.strerror}") from error
    announce(f"wrote {path}; starting it in {counted(nproc, 'process').replace('processs', 'processes')}")
    sys.stdout.flush()

    from legoai.runtime.torchrun import launch

    return launch(path, nproc=nproc, arguments=["--out", str(folder), *arguments.arguments])


def run_directory(plan: Plan) -> Path:
    """Where the program and what it writes are kept: a folder for each plan and variant."""
    return Path("runs", plan.name if plan.variant is None else f"{plan.name}-{plan.variant}")


def _processes(plan: Plan, asked: int | None) -> int:
    """How many processes to start here."""
    if asked is not None:
        return asked
    if plan.cluster.hosts > 1:
        raise WrongUsage(
            f"the plan is for {plan.cluster.hosts} hosts, and `legoai run` starts one. On each host, start the program "
            "that `legoai lower` writes with torchrun; its first lines say how. --nproc N starts N processes here all "
            "the same"
        )
    return plan.mesh.world_size


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a number of processes, not {text!r}")
    return int(text)
