"""Command line of a lowered program."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from legoai.runtime.errors import RunError, RunErrorCode

OnNotFinite = Literal["stop", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of one run; the plan decides everything else.

    Attributes:
        steps: optimizer steps of the whole training, those before a resume included.
        data: `python` (the standard library's sources), a text file, a JSONL or Parquet file, or a folder;
            `hf:NAME[@REVISION][:CONFIG[:SPLIT]]` for a dataset; `synthetic` for a model of images.
        data_field: the field of a JSONL object, or the column of a Parquet file or a dataset, that holds the text.
        tokenizer: the file of a Hugging Face tokenizer, or its folder; empty trains on bytes.
        out: folder of `metrics.jsonl` and `checkpoints/`; None writes no files.
        seed: of weights, data order and dropout; None takes the plan's.
        device: `auto` (what the plan is for), `cpu`, `cuda`, or the name of a registered device backend.
        save_every: steps between checkpoints; 0 saves only at the end. Without `out` none are saved.
        save_async: write checkpoints beside the training, which waits only until they are copied to the host.
        keep: complete checkpoints kept; 0 keeps all.
        resume: `auto` (the newest complete checkpoint in `out`, else from the start), `never`, or a
            checkpoint's path. From an older one than the newest a branch begins, which `auto` then follows.
        restart: where every checkpoint in `out` is damaged, start from the beginning instead of stopping.
        load_weights: folder of published weights, checkpoint or run whose weights a new training starts with; None
            draws them. A training that resumes has its own.
        resume_other_plan: accept a checkpoint of another model: load what has the same name and shape.
        log_every: steps between terminal lines; 0 for none.
        evaluate_every: steps between validations; 0 for none.
        evaluate_batches: micro batches per rank in one validation; a pipeline rounds up to whole passes.
        on_nan: action if a loss or gradient is not finite: `stop` the run, or `skip` the update.
        deterministic: demand deterministic kernels everywhere; slower on a GPU.
        profile_step: the step that is profiled on each rank, into `out`; 0 for none.
        tensorboard: write the metrics for TensorBoard too, into `out`.
        record_collectives: number of last collectives of each rank to write where one over NCCL times out; 0 for none.
        timeout: seconds after which a pending collective fails, once the first step is done; until then 600 seconds, if
            that is more.
    """

    steps: int = 1000
    data: str = "python"
    data_field: str = "text"
    tokenizer: str = ""
    out: Path | None = None
    seed: int | None = None
    device: str = "auto"
    save_every: int = 0
    save_async: bool = False
    keep: int = 3
    resume: str = "auto"
    resume_other_plan: bool = False
    restart: bool = False
    load_weights: Path | None = None
    log_every: int = 10
    evaluate_every: int = 0
    evaluate_batches: int = 8
    on_nan: OnNotFinite = "stop"
    deterministic: bool = False
    profile_step: int = 0
    tensorboard: bool = False
    record_collectives: int = 2000
    timeout: float = 600.0


PLANNED = (
    "steps",
    "data",
    "data_field",
    "tokenizer",
    "load_weights",
    "save_every",
    "save_async",
    "keep",
    "evaluate_every",
    "evaluate_batches",
)
"""Options with defaults from the plan."""


def parse_options(
    argv: Sequence[str] | None,
    *,
    plan: str,
    usage: str | None = None,
    out: Path | None = None,
    called: bool = False,
    **planned: str | int,
) -> RunOptions:
    """Read the command line of a lowered program.

    Args:
        argv: without the program's name; None takes the process's own.
        plan: the plan's name, in the help text and in the default of `--out`.
        usage: the command in front of these options; by default the program's own, under torchrun.
        out: the default of `--out`.
        called: whether a function is called with these options, which prints no help and does not end the process.
        planned: the plan's defaults of :data:`PLANNED`.

    Raises:
        RunError: wrong usage, or `--help`, where ``called``.
        SystemExit: else, with status 2 on wrong usage, and 0 after the help, as argparse does.
    """
    parser = (_CalledParser if called else _Parser)(
        add_help=not called,
        prog=usage,
        usage="%(prog)s [OPTION ...]",
        description=f"Train the plan {plan}."
        + (" Start it with torchrun, one process per device." if usage is None else ""),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_training(parser)
    _add_checkpoints(parser, out or Path("runs", plan))
    _add_reporting(parser)
    parser.set_defaults(**planned)
    return RunOptions(**vars(parser.parse_args(argv)))


class _Parser(argparse.ArgumentParser):
    """Speaks on one rank, however many read the same command line."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and leave with status 2."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from legoai.runtime.launching.report import leave_for_the_launcher

            leave_for_the_launcher(RunError(RunErrorCode.WRONG_OPTION, message))
        if _speaks():
            super().error(message)
        sys.exit(2)

    def print_help(self, file: Any = None) -> None:
        """Print the options."""
        if _speaks():
            super().print_help(file)


class _CalledParser(argparse.ArgumentParser):
    """Raises what is wrong with the arguments of a function."""

    def error(self, message: str) -> NoReturn:
        """Raise the message, in place of ending the caller's process."""
        raise RunError(
            RunErrorCode.WRONG_OPTION, message, help="`legoai run PLAN -- --help` lists the options of the trainer"
        )


def _speaks() -> bool:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    from legoai.runtime.launching.report import first_to_report

    return first_to_report()


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training", "`data`, `steps` and `seed` of the plan give the defaults.")
    group.add_argument(
        "--steps",
        type=_positive,
        metavar="N",
        default=1000,
        help="optimizer steps of the whole training, before a resume included",
    )
    group.add_argument(
        "--data",
        metavar="SOURCE",
        default="python",
        help="text to train on: 'python' for the standard library's sources, a text file, a JSONL or "
        "Parquet file, or a folder of them; 'hf:NAME[@REVISION][:CONFIG[:SPLIT]]' for a dataset of Hugging Face, or a "
        "folder of a saved one as NAME; 'synthetic' for made patterns, where the model reads images",
    )
    group.add_argument(
        "--data-field",
        metavar="NAME",
        default="text",
        help="field of a JSONL object, or column of a Parquet file or a dataset, that holds the text",
    )
    group.add_argument(
        "--tokenizer",
        metavar="FILE",
        default="",
        help="a Hugging Face tokenizer.json, or the folder that has it; without one each byte is a token",
    )
    group.add_argument(
        "--seed",
        type=_seed,
        metavar="N",
        default=argparse.SUPPRESS,
        help="of weights, data order and dropout; by default the plan's",
    )
    group.add_argument("--device", metavar="NAME", default="auto", help="cpu, cuda, or auto: what the plan is for")
    group.add_argument(
        "--on-nan",
        choices=("stop", "skip"),
        default="stop",
        help="when loss or gradient is not finite: stop, or skip the update",
    )
    group.add_argument("--deterministic", action="store_true", help="demand deterministic kernels")
    group.add_argument(
        "--timeout",
        type=_positive_seconds,
        metavar="S",
        default=600.0,
        help="seconds after which a stuck collective fails, once the first step is done; "
        "until then 600, or this if it is longer",
    )


def _add_checkpoints(parser: argparse.ArgumentParser, out: Path) -> None:
    group = parser.add_argument_group("checkpoints", "`save` and `weights` of the plan give the defaults.")
    group.add_argument(
        "--out", type=Path, metavar="FOLDER", default=out, help="folder of metrics.jsonl and checkpoints/"
    )
    group.add_argument(
        "--save-every", type=_count, metavar="N", default=0, help="steps between checkpoints; 0 saves only at the end"
    )
    group.add_argument(
        "--save-async",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="write checkpoints beside the training, which waits only until they are copied to the host's memory",
    )
    group.add_argument(
        "--keep",
        type=_count,
        metavar="N",
        default=3,
        help="complete checkpoints kept, of those that can be read; 0 keeps all",
    )
    group.add_argument(
        "--resume",
        metavar="WHICH",
        default="auto",
        help="auto (the newest complete checkpoint in OUT, else from the start), never, "
        "or the path of a checkpoint or run; from an older checkpoint of OUT a branch begins, which auto then follows",
    )
    group.add_argument(
        "--restart",
        action="store_true",
        help="where every checkpoint in OUT is damaged, train from the first step instead of stopping",
    )
    group.add_argument(
        "--load-weights",
        type=_folder_or_none,
        metavar="FOLDER",
        default="none",
        help="start a new training with the weights of this folder of safetensors, as Hugging Face publishes them, or "
        "of this checkpoint or run, and a fresh optimizer; a training that resumes has its own; none draws weights",
    )
    group.add_argument(
        "--resume-other-plan",
        action="store_true",
        help="accept a checkpoint, or weights, of another model: load what has the same name and shape",
    )


def _add_reporting(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reporting", "`evaluate` of the plan gives the defaults.")
    group.add_argument(
        "--log-every", type=_count, metavar="N", default=10, help="steps between terminal lines; 0 for none"
    )
    group.add_argument(
        "--profile-step",
        type=_count,
        metavar="N",
        default=0,
        help="profile step N with torch's profiler, and write a Chrome trace of each rank into OUT/profile; 0 for none",
    )
    group.add_argument(
        "--tensorboard",
        action="store_true",
        help="write the metrics for TensorBoard too, into OUT/tensorboard; needs `pip install 'legoai[tensorboard]'`",
    )
    group.add_argument(
        "--record-collectives",
        type=_count,
        metavar="N",
        default=2000,
        help="on GPUs, write each rank's last N collectives into OUT/flight_recorder where one times out; 0 for none",
    )
    group.add_argument(
        "--evaluate-every", type=_count, metavar="N", default=0, help="steps between validations; 0 for none"
    )
    group.add_argument(
        "--evaluate-batches",
        type=_positive,
        metavar="N",
        default=8,
        help="micro batches per rank in one validation; a pipeline rounds up to whole passes",
    )


def _folder_or_none(text: str) -> Path | None:
    return None if text in ("", "none") else Path(text)


def _count(text: str) -> int:
    number = _integer(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


def _seed(text: str) -> int:
    number = _count(text)
    if number >= 2**64:
        raise argparse.ArgumentTypeError(f"{number} is not below 2**64, as seeds of torch are")
    return number


def _positive(text: str) -> int:
    number = _integer(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return seconds


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
