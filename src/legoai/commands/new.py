"""`legoai new`: a first plan of a model on a cluster."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Final

from legoai.commands import WrongUsage
from legoai.commands.making import add_place, check_place, cluster_named, plan_name
from legoai.commands.shared import STANDARD_OUTPUT, add_output, announce, check_outputs, say, show, summary, write

_DESCRIPTION = """\
Write a first plan of a model on a cluster. MODEL is what a plan's `model` statement says, such as 'llama3("8b")'; or
a config.json of Hugging Face; or a Python factory, as my_models:build, which is announced and run to look at the model.

The plan has every kind of parallelism, sharding and checkpointing that lint accepts for the model on these devices.
Degrees, micro batch, schedule, recomputation and the form of the loss are `auto`: `legoai solve` finds them. What is
assumed, and what the model does not allow, is told on standard error.

The exit status is 1 if no plan can be made of the model on these devices.
"""

_EXAMPLES = """\
examples:
  legoai new 'llama3("8b")'                                   on 8 H100s, to standard output
  legoai new 'llama3("8b")' --seq-len 8192 -o llama.plan      into a file
  legoai new config.json --cluster 'h100_sxm(hosts=4,fabric=infiniband_ndr)' -o mine.plan
  legoai new my_models:build --cluster a100_sxm80 --batch 512 -o mine.plan
"""

_USUAL: Final = "h100_sxm"
_STATEMENT: Final = re.compile(r"[A-Za-z_]\w*\([^\r\n#{}]*\)")
_FACTORY: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai new`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument(
        "model", metavar="MODEL", help="the model, as a plan says it; a config.json; or MODULE:FUNCTION"
    )
    parser.add_argument(
        "--cluster", metavar="CLUSTER", default=_USUAL, help=f"the devices, as a plan says them (default: {_USUAL})"
    )
    parser.add_argument("--batch", metavar="SAMPLES", type=_count, help="samples of a step (default: 1 million tokens)")
    parser.add_argument(
        "--seq-len",
        metavar="TOKENS",
        type=_count,
        help="tokens of a sequence (default: 4096, or as many as it has positions)",
    )
    add_place(parser)
    add_output(parser)


def run(arguments: Namespace) -> int:
    """Write the plan; returns 1 where none can be made."""
    check_place(arguments)
    output: Path = arguments.output
    folder = Path() if output == STANDARD_OUTPUT else output.parent
    model, word = _model(arguments.model, folder)
    check_outputs([output], [(Path(arguments.model), "the config that is read")] if word == "config" else [])
    name = plan_name(arguments.name, output, word)
    cluster, _ = cluster_named(arguments.cluster)
    from legoai.dsl.first_plan import first_plan

    found = first_plan(
        model, cluster, name=name, directory=folder, batch=arguments.batch, seq_len=arguments.seq_len,
        announce=announce,
    )  # fmt: skip
    show(found.diagnostics, found.files, stream=sys.stderr, color=arguments.color)
    if found.text is None:
        say(f"there is no plan of {arguments.model} on {cluster}: {summary(found.diagnostics)}")
        return 1
    if not arguments.quiet:
        for note in found.notes:
            announce(note)
    write(output, found.text)
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or int(text) < 1:
        raise ArgumentTypeError(f"expected a number from 1 on, not {text!r}")
    return int(text)


def _model(given: str, folder: Path) -> tuple[str, str]:
    """The value of the plan's `model`, and a word for it.

    Raises:
        WrongUsage: what is given is no model.
    """
    text = given.strip()
    if text.endswith(".json") and "(" not in text:
        if not Path(text).is_file():
            raise WrongUsage(f"there is no file {text}")
        path = os.path.relpath(text, folder) if not Path(text).is_absolute() else text
        if re.search(r'["\\\r\n]', path):
            raise WrongUsage(f"a plan cannot name the file {text!r}")
        return f'huggingface("{path}")', Path(text).stem
    if _FACTORY.fullmatch(text):
        return f'python("{text}")', text.rpartition(":")[2]
    if not _STATEMENT.fullmatch(text):
        raise WrongUsage(
            f"a model is named as in a plan, such as 'llama3(\"8b\")', or by a config.json or MODULE:FUNCTION, not "
            f"{given!r}"
        )
    return text, re.sub(r"\W+", "_", text).strip("_")
