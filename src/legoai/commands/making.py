"""Options and checks of the commands that make a plan."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

from legoai.commands import WrongUsage
from legoai.commands.shared import STANDARD_OUTPUT, add_output_file
from legoai.dsl.analysis.parallelism.mesh import number_of_devices
from legoai.dsl.diagnostics.diagnostic import errors_of
from legoai.dsl.lint import lint
from legoai.specs.directives.hole import Undecided
from legoai.specs.files import is_stream

_CLUSTER: Final = re.compile(r"\w+(?:\([^\r\n#{}]*\))?")


def add_place(parser: ArgumentParser) -> None:
    """Add the options for the plan's name and file."""
    parser.add_argument("--name", metavar="NAME", help="the plan's name (default: that of the file)")
    add_output_file(parser, "the plan")
    parser.add_argument("--force", action="store_true", help="with -o, replace a file that is there")


def check_place(arguments: Namespace) -> None:
    """Check that the plan may be written where the options say.

    Raises:
        WrongUsage: it may not.
    """
    output: Path = arguments.output
    if arguments.force and output == STANDARD_OUTPUT:
        raise WrongUsage("--force replaces the file of -o, and without one the plan goes to standard output")
    if output != STANDARD_OUTPUT and output.exists() and not is_stream(output) and not arguments.force:
        raise WrongUsage(f"{output} is there already; --force replaces it")


def plan_name(given: str | None, output: Path, otherwise: str) -> str:
    """The given name, or that of the output's file, or another, as a word of the language.

    Raises:
        WrongUsage: the given name is no such word.
    """
    if given is not None:
        if not re.fullmatch(r"[A-Za-z_]\w*", given, re.ASCII):
            raise WrongUsage(f"a plan's name is a word of letters, digits and `_`, not `{given}`")
        return given
    stem = output.stem if output != STANDARD_OUTPUT else otherwise
    word = re.sub(r"\W", "_", stem, flags=re.ASCII)
    return word if re.match(r"[A-Za-z_]", word) else f"plan_{word}"


def cluster_named(given: str) -> tuple[str, int]:
    """The value of a plan's `cluster`, and its devices.

    Raises:
        WrongUsage: what is given is no cluster.
    """
    text = given.strip()
    if not _CLUSTER.fullmatch(text):
        raise WrongUsage(f"a cluster is named as in a plan, such as 'h100_sxm(hosts = 8, fabric = …)', not {given!r}")
    return text, _devices(text)


def _devices(cluster: str) -> int:
    """The number of devices of a cluster.

    Raises:
        WrongUsage: it is no cluster.
    """
    text = f'plan devices\nmodel llama3("tiny")\ncluster {cluster}\nmesh (dp_shard = rest)\n'
    text += "batch (global = 1, micro = 1, seq_len = 1)\n"
    linted = lint(text, "--cluster", directory=Path())
    analysis = linted.analysis
    wrong = [item for item in errors_of(linted.diagnostics) if item.label.span.line == 3]
    try:
        devices = None if wrong or analysis is None else number_of_devices(analysis)
    except Undecided:
        raise WrongUsage(f"--cluster {cluster}: the plan is made for a number of devices: name it") from None
    if devices is None:
        said = [wrong[0].message, *reversed(wrong[0].help)] if wrong else ["this is no cluster"]
        raise WrongUsage(f"--cluster {cluster}: {'; '.join(said)}")
    return devices
