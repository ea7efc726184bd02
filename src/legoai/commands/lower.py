"""`legoai lower`: the program that a plan becomes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from legoai.commands import WrongUsage
from legoai.commands.shared import (
    STANDARD_OUTPUT,
    add_no_factories,
    add_output_file,
    add_resolution,
    announce,
    check_outputs,
    lacks_graph,
    lowered,
    note_profile,
    say,
    write,
)
from legoai.lowering.file_names import is_beside, needed_module
from legoai.lowering.launch import KINDS, LaunchError, launch_path, launch_text
from legoai.runtime.torch_internals.cpp_warnings import without_cpp_warnings
from legoai.specs.files import is_stream, replace_file

if TYPE_CHECKING:
    from legoai.dsl.lint import Linted
    from legoai.lowering.program import Program
    from legoai.specs.plan import Plan

_DESCRIPTION = """\
Print the PyTorch program that a plan becomes. It is the program that `legoai run` starts: it can be read from
top to bottom, saved, and started with torchrun. The same plan gives the same program to the byte.

A plan with errors is not lowered: they are printed instead, and the exit status is 1.
"""

_FINDING_FACTORIES = ("slurm", "k8s")
"""Kinds of launch whose files set PYTHONPATH."""

_EXAMPLES = """\
examples:
  legoai lower plan.tiny                       to standard output
  legoai lower plan.tiny -o tiny.py            to a file
  legoai lower plan.tiny --set hosts=4 -o -    with another value of a `let` name
  legoai lower plan.llama3_70b_256 -o llama.py --launch slurm    also llama.sbatch
  legoai lower plan.g --dump-graphs graphs     of `backend = graph`, also the step's graph after each pass
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai lower`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("file", metavar="FILE", help="a plan, plan.NAME, or -")
    add_output_file(parser, "it")
    parser.add_argument(
        "--launch",
        choices=tuple(KINDS),
        help="with -o, also write the file with which this scheduler starts the program on all hosts of the plan, "
        "beside OUT",
    )
    parser.add_argument(
        "--dump-graphs",
        metavar="DIR",
        type=Path,
        help="of a plan with `backend = graph`, write the graph of the step as traced and after each pass into DIR",
    )
    add_no_factories(parser)
    add_resolution(parser)


@without_cpp_warnings()
def _dump(linted: Linted, program: Program, folder: Path, output: Path) -> None:
    """Write the graphs of a program's step, numbered in the order of the passes."""
    plan, analysis = linted.plan, linted.analysis
    assert plan is not None
    assert analysis is not None
    from legoai.cost.simulated.device import SimulationError
    from legoai.cost.step_graphs import step_graphs

    try:
        found = step_graphs(program, world=plan.mesh.world_size, kind=analysis.device_kind)
        folder.mkdir(parents=True, exist_ok=True)
        files = {folder / f"{number}_{name}.py": text for number, (name, text) in enumerate(found.items())}
        check_outputs([*files, output])
        for path, text in files.items():
            replace_file(path, text)
    except SimulationError as error:
        raise WrongUsage(f"the step of {linted.resolution.file.name} cannot be traced: {error}") from error
    except OSError as error:
        raise WrongUsage(f"{folder} cannot be written: {error.strerror}") from error
    say(f"wrote {len(found)} graphs into {folder}")


def run(arguments: Namespace) -> int:
    """Lower; returns 1 where the plan has errors."""
    launched = _launched(arguments)
    done = lowered(arguments, outputs=[arguments.output, launched])
    if done is None:
        return 1
    linted, program = done
    note_profile(linted)
    if arguments.dump_graphs is not None:
        if lacks_graph(linted):
            return 1
        _dump(linted, program, arguments.dump_graphs, arguments.output)
    if arguments.output == STANDARD_OUTPUT or is_stream(arguments.output):
        write(arguments.output, program.text)
        return 0
    assert linted.plan is not None
    _check_name(arguments.output, linted.plan)
    launch = _launch(linted, program, arguments) if launched is not None else None
    write(arguments.output, program.saved_as(arguments.output.name))
    if launched is not None and launch is not None:
        write(launched, launch)
    _note_factory(linted, arguments)
    return 0


def _check_name(path: Path, plan: Plan) -> None:
    """Refuse names that no program can have.

    Raises:
        WrongUsage: a module that the program needs would be imported from the program's own file.
    """
    whose = needed_module(path.stem, plan) if path.suffix == ".py" else None
    if whose is not None:
        raise WrongUsage(
            f"{path} would be imported in the place of {whose} `{path.stem}`, since torchrun looks for modules beside "
            "a program first; choose another name"
        )


def _note_factory(linted: Linted, arguments: Namespace) -> None:
    """Say how the program finds the model's factory, where that is in the plan's folder and the program is not."""
    plan, analysis = linted.plan, linted.analysis
    assert plan is not None and analysis is not None
    folder, there = analysis.directory, arguments.output.parent
    if arguments.launch in _FINDING_FACTORIES or there.resolve() == folder.resolve():
        return
    if is_beside(plan, folder):
        announce(
            f"the program imports the model's factory from {folder.resolve()}: start it with this folder on PYTHONPATH"
        )


def _launched(arguments: Namespace) -> Path | None:
    """Return the file that `--launch` asks for, if it does.

    Raises:
        WrongUsage: it cannot be beside the program.
    """
    if arguments.launch is None:
        return None
    if arguments.output == STANDARD_OUTPUT or is_stream(arguments.output):
        raise WrongUsage("--launch starts a program that is in a file: name it with -o")
    path = launch_path(arguments.launch, arguments.output)
    if path == arguments.output:
        raise WrongUsage(f"{path} is also the file of --launch {arguments.launch}: choose another name for the program")
    if not str(path).isprintable():
        raise WrongUsage(f"{str(path)!r} has characters that the file of --launch cannot name: choose another name")
    return path


def _launch(linted: Linted, program: Program, arguments: Namespace) -> str:
    """Return the content of the file that `--launch` asks for."""
    from legoai.lowering.launch.job import Job

    assert linted.analysis is not None
    try:
        return launch_text(arguments.launch, Job.of(linted.analysis, program, arguments.output))
    except LaunchError as error:
        raise WrongUsage(f"--launch {arguments.launch}: {error}") from error
