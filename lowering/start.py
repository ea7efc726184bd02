"""Start of a plan's program on this machine, in the run's own folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from legoai.lowering.emit.training.run import planned
from legoai.lowering.program import Program
from legoai.runtime.durable import not_writable
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.launching import torchrun
from legoai.runtime.launching.lock import START, locked
from legoai.runtime.launching.options import RunOptions, parse_options
from legoai.runtime.metrics.log import check_metrics
from legoai.specs.files import replace_file
from legoai.specs.models.import_path import author_folder
from legoai.specs.plan import Plan


def run_folder(plan: Plan) -> Path:
    """Return the folder of a run without `--out`: one for each plan and variant."""
    return Path("runs", plan.name if plan.variant is None else f"{plan.name}-{plan.variant}")


def start(
    program: Program,
    plan: Plan,
    *,
    directory: Path,
    nproc: int | None = None,
    arguments: Sequence[str] = (),
    usage: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    begin: Callable[[RunOptions], None] = lambda options: None,
) -> int:
    """Write a program into the folder of its run, start it with torchrun, and wait for it.

    The folder is locked until it ends, so that no other start replaces the program or adds to the metrics. The ranks
    lock it too, and do not run a program that was replaced all the same.

    Args:
        program: of ``plan``.
        plan: for one host, unless ``nproc`` is given.
        directory: the plan's, from which a model factory is imported.
        nproc: processes; by default the devices of the plan's mesh.
        arguments: for the trainer.
        usage: the command that starts this run, for the trainer's help and messages; None where a function does.
        say: called with a message about what is started.
        begin: called before that, when the run is certain to start.

    Returns:
        0, the status of a failed rank, or 128 + n after signal n.

    Raises:
        RunError: the plan is for several hosts or another number of processes, another run holds the folder, it cannot
            be written, or this is not the main thread; or, without ``usage``, the trainer does not accept the
            arguments.
        SystemExit: with ``usage``: status 2 where the trainer does not accept the arguments, 0 after its help.
    """
    torchrun.check_thread()
    folder = run_folder(plan)
    given = ["--out", str(folder), *arguments]
    command = None if usage is None else f"{usage} --"
    options = parse_options(given, plan=plan.name, usage=command, out=folder, called=usage is None, **planned(plan))
    if nproc is None and plan.cluster.hosts > 1:
        raise RunError(
            RunErrorCode.WORLD_SIZE,
            f"the plan is for {plan.cluster.hosts} hosts, and this command starts one",
            help="on each host, start the program that `legoai lower` writes with torchrun, as its first lines state. "
            f"--nproc {plan.mesh.world_size} starts all processes on this host anyway",
        )
    if nproc not in (None, plan.mesh.world_size):
        raise RunError(
            RunErrorCode.WORLD_SIZE,
            f"the mesh of the plan needs {plan.mesh.world_size} processes, and --nproc is {nproc}",
            help=f"--nproc {plan.mesh.world_size}, or another mesh in the plan",
        )
    assert options.out is not None, "it has a default"
    path = options.out / f"{program.plan_name}.py"
    count = nproc or plan.mesh.world_size
    with locked(options.out, START):
        with locked(options.out):
            try:
                replace_file(path, program.text)
            except OSError as error:
                raise not_writable(f"{path} cannot be written", error, "choose another --out") from error
            check_metrics(options.out)
            begin(options)
        say(f"wrote {path}; starting it in {count} process{'' if count == 1 else 'es'}")
        return torchrun.launch(
            path, nproc=count, arguments=given, directory=author_folder(plan.model.family, directory), text=program.text
        )
