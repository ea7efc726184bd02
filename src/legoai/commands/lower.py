"""`legoai lower`: the program that a plan becomes."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from legoai.commands import WrongUsage
from legoai.commands.shared import add_resolution, lowered, output_file
from legoai.dsl.frontend.sources import replace_file

_DESCRIPTION = """\
Print the PyTorch program that a plan becomes. It is the program that `legoai run` starts, and it can be
read from top to bottom, kept, and started with torchrun. The same plan gives the same program to the byte.

A plan with errors is not lowered: they are printed instead, and the exit status is 1.
"""

_EXAMPLES = """\
examples:
  legoai lower plan.tiny                       to standard output
  legoai lower plan.tiny -o tiny.py            to a file
  legoai lower plan.tiny --set hosts=4 -o -    with another value of a `let` name
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai lower`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("file", metavar="FILE", help="a plan, plan.NAME, or -")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=output_file,
        default=Path("-"),
        help="write it to this file (default: -, the terminal)",
    )
    add_resolution(parser)


def run(arguments: Namespace) -> int:
    """Lower; returns 1 where the plan has errors."""
    done = lowered(arguments)
    if done is None:
        return 1
    _, program = done
    if arguments.output == Path("-"):
        sys.stdout.write(program.text)
        return 0
    try:
        replace_file(arguments.output, program.text)
    except OSError as error:
        raise WrongUsage(f"{arguments.output} cannot be written: {error.strerror}") from error
    print(f"wrote {arguments.output}", file=sys.stderr)
    return 0
