"""The Python API: lint, lower, cost, solve, run and verify plans that are given by their file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from legoai.dsl.diagnostics.diagnostic import Diagnostic, errors_of
from legoai.dsl.frontend.files.sources import UnreadableError, read_base, read_source
from legoai.dsl.lint import Announce, Linted
from legoai.dsl.lint import lint as lint_text
from legoai.dsl.reporting.output import Files, render_full
from legoai.runtime.torch_internals.cpp_warnings import without_cpp_warnings
from legoai.specs.cache import refreshed
from legoai.specs.plan import Plan

if TYPE_CHECKING:
    from legoai.cost.estimate import Estimate
    from legoai.cost.search.result import Progress
    from legoai.cost.search.solve import Solution
    from legoai.dsl.open_plan import OpenPlan
    from legoai.dsl.rules.devices.profile import Unmeasured
    from legoai.lowering.program import Program
    from legoai.lowering.verify.run import Verdict

PathLike = str | os.PathLike[str]


class PlanError(ValueError):
    """A plan that cannot be used. Its text is what `legoai lint` prints.

    Attributes:
        diagnostics: the diagnostics, errors only.
        files: the files that they are about, by name.
    """

    def __init__(self, diagnostics: tuple[Diagnostic, ...], files: Files) -> None:
        super().__init__("\n" + render_full(diagnostics, files).rstrip())
        self.diagnostics = diagnostics
        self.files = files


def lint(
    path: PathLike, *, settings: Mapping[str, str] | None = None, variant: str | None = None
) -> tuple[Diagnostic, ...]:
    """All diagnostics of `legoai lint` in a plan, in the order of its text.

    Args:
        path: the plan's file, or `plan.NAME` as on the command line.
        settings: values for `let` names, each as a plan would write it: ``{"hosts": "4"}``.
        variant: lint this variant only; by default the plan and each of its variants.

    A Python factory that the plan names as its model is run, in a process of its own. No file makes this function
    raise: one that cannot be read gives a diagnostic.
    """
    try:
        return _linted(path, settings, variant, variants=True).diagnostics
    except UnreadableError as error:
        return (error.diagnostic,)


def load(path: PathLike, *, settings: Mapping[str, str] | None = None, variant: str | None = None) -> Plan:
    """The resolved plan of a file, without importing torch. Arguments are those of :func:`lint`.

    Raises:
        PlanError: the plan, with the variant, has errors or cannot be read.
    """
    return _checked(path, settings, variant)[0]


def lower(path: PathLike, *, settings: Mapping[str, str] | None = None, variant: str | None = None) -> Program:
    """The program that a plan lowers to. Arguments are those of :func:`lint`.

    Raises:
        PlanError: the plan has errors, cannot be read, or cannot be lowered.
    """
    return _lowered(path, settings, variant)[0]


@without_cpp_warnings()
def estimate(
    path: PathLike,
    *,
    settings: Mapping[str, str] | None = None,
    variant: str | None = None,
    profile: str | None = None,
    rank: int | None = None,
) -> Estimate:
    """The cost of a plan, simulated on this machine without a GPU. The first arguments are those of :func:`lint`.

    Call it in a process that belongs to no process group and has not forked since torch's autograd ran in it.

    Args:
        path: the plan's file, or `plan.NAME` as on the command line.
        settings: values for `let` names.
        variant: cost this variant.
        profile: other devices than the plan's: a name of the catalogue, `NAME.toml` with its profile beside it, or
            `NAME.json.gz`.
        rank: global rank to simulate, by default the one with the most work; under a pipeline one rank of each stage
            is simulated.

    Raises:
        PlanError: the plan has errors, cannot be read, or cannot be lowered, or its cluster has no figures.
        legoai.cost.estimate.CannotEstimateError: it cannot be simulated, or ``profile`` names none.
    """
    from legoai.cost.estimate import estimate as estimate_program

    program, plan, linted = _lowered(path, settings, variant)
    _check_figures(linted, profile)
    assert linted.analysis is not None
    assert linted.analysis.manifest is not None
    return estimate_program(
        program, plan, linted.analysis.manifest, directory=linted.analysis.directory, profile=profile, rank=rank
    )


@without_cpp_warnings()
def solve(
    path: PathLike,
    *,
    settings: Mapping[str, str] | None = None,
    variant: str | None = None,
    profile: str | None = None,
    time_limit: float | None = None,
    gap: float | None = None,
    refresh: bool = False,
) -> Solution:
    """Fill the holes of a plan, as `legoai solve` does. The first arguments are those of :func:`lint`.

    Candidates are simulated in processes that are forked from this one, in which torch's autograd must not have run; if
    it has, they are simulated in this process, one after another. Nothing is written: `Solution.text` returns the plan
    with the answers of a candidate, as `solution.text(solution.best.choices)` where one is feasible.

    Args:
        path: the plan's file, or `plan.NAME` as on the command line.
        settings: values for `let` names.
        variant: solve this variant.
        profile: other devices than the plan's; see :func:`estimate`.
        gap: share by which a better candidate need not be found; by default none where the holes have fewer than 256
            assignments, else 0.5%.
        time_limit: seconds after which the best candidate so far is the result. Results are cached, and an equal
            search with no higher limit returns them.
        refresh: read nothing that was cached before: search and simulate again.

    Raises:
        PlanError: the plan has errors, cannot be read, or has holes that are not searched, or its cluster has no
            figures.
        legoai.cost.search.solve.CannotSolveError: the plan has no holes, or ``profile`` names none.
    """
    with refreshed(refresh):
        return solved(_opened(path, settings, variant, profile), profile=profile, time_limit=time_limit, gap=gap)


def _opened(path: PathLike, settings: Mapping[str, str] | None, variant: str | None, profile: str | None) -> OpenPlan:
    """The plan with its holes; see :func:`solve`."""
    from legoai.cost.search.solve import CannotSolveError

    _, written = _checked(path, settings, variant, reopen=True)
    found = opened(written, settings=settings)
    if not found.holes:
        raise CannotSolveError("the plan has no holes: write `auto` where a value is to be found")
    _check_figures(written, profile)
    return found


def opened(written: Linted, *, settings: Mapping[str, str] | None = None, announce: Announce | None = None) -> OpenPlan:
    """A linted plan with all its holes open, each of which can be searched.

    Args:
        written: the plan, without errors, linted with its holes reopened.
        settings: values for `let` names, as for linting.
        announce: called before a model factory is run.

    Raises:
        PlanError: the rules in the place of `shard auto on tp` have errors, or a hole is not searched.
    """
    from legoai.dsl.open_plan import OpenPlan
    from legoai.dsl.open_rules import with_open_rules

    directory = written.resolution.directory
    linted = with_open_rules(
        written, directory=directory, settings=settings, read=read_base, announce=announce, reopen=True
    )
    _check_errors(linted)
    found = OpenPlan(linted, directory=directory, settings=settings, read=read_base, announce=announce)
    if found.refused:
        raise PlanError(tuple(found.refused), linted.files)
    return found


def solved(
    opened: OpenPlan,
    *,
    profile: str | None = None,
    time_limit: float | None = None,
    gap: float | None = None,
    progress: Progress | None = None,
) -> Solution:
    """The solution of a plan all of whose holes can be searched, with simulations cached on disk.

    In a block of :func:`legoai.specs.cache.refreshed`, none from before it are read. Arguments and errors are those of
    :func:`solve`; ``progress`` is called with the search's progress.
    """
    from legoai.cost.replay.plan_key import may_keep
    from legoai.cost.search.evaluation.evaluator import Simulation
    from legoai.cost.search.evaluation.figures_cache import figures_file, read_cache, write_cache
    from legoai.cost.search.results_cache import CachedResult, read_result, result_file, write_result
    from legoai.cost.search.solve import devices_of, solve

    keeps = opened.analysis is not None and may_keep(opened.analysis)
    devices = devices_of(opened, profile)
    file = figures_file(devices) if keeps else None
    kept = read_cache(file)
    results = result_file(opened, devices, gap) if keeps else None
    cached = read_result(results)
    try:
        with Simulation(directory=opened.directory, profile=profile, kept=kept) as evaluator:
            solution = solve(
                opened, evaluator, profile=profile, time_limit=time_limit, gap=gap, progress=progress, cached=cached
            )
            if cached is None or not cached.answers(time_limit):
                found, simulated, seconds = solution.result, solution.simulated, solution.seconds
                answer = CachedResult.of(opened, found, seconds=seconds, time_limit=time_limit, simulated=simulated)
                write_result(results, answer)
            return solution
    finally:
        write_cache(file, kept)


def run(
    path: PathLike,
    *,
    settings: Mapping[str, str] | None = None,
    variant: str | None = None,
    nproc: int | None = None,
    arguments: Sequence[str] = (),
) -> int:
    """Train a plan on this machine under torchrun, as `legoai run` does, and wait for it.

    Program, metrics and checkpoints go to `runs/NAME` in the working folder. SIGINT, SIGTERM and SIGHUP are forwarded,
    so that this must be called in the main thread.

    Args:
        path: the plan's file, or `plan.NAME` as on the command line.
        settings: values for `let` names.
        variant: run this variant.
        nproc: processes; by default the devices of the plan's mesh.
        arguments: for the trainer: ``["--steps", "200"]``.

    Returns:
        0, the status of a failed rank, or 128 + n after signal n.

    Raises:
        PlanError: the plan has errors, cannot be read, or cannot be lowered.
        legoai.runtime.RunError: it cannot be started here, or the trainer does not accept the arguments, of which
            `--help` is none here.
    """
    from legoai.lowering.start import start

    program, plan, linted = _lowered(path, settings, variant)
    assert linted.analysis is not None
    return start(program, plan, directory=linted.analysis.directory, nproc=nproc, arguments=arguments)


@without_cpp_warnings()
def verify(
    path: PathLike,
    *,
    settings: Mapping[str, str] | None = None,
    variant: str | None = None,
    ranks: int = 16,
    steps: int = 2,
    double: bool = True,
) -> Verdict:
    """Compare a shrunken copy of a plan with one device, as `legoai verify` does; `Verdict.equal` is the answer.

    Processes are forked from this one, in which torch's autograd must not have run.

    Args:
        path: the plan's file, or `plan.NAME` as on the command line.
        settings: values for `let` names.
        variant: verify this variant.
        ranks: the most processes to start.
        steps: optimizer steps.
        double: compute in fp64, instead of in the plan's dtypes.

    Raises:
        PlanError: the plan has errors, cannot be read, or cannot be lowered.
        legoai.lowering.shrink_sizes.CannotShrinkError: no smaller plan is equivalent to it.
        legoai.lowering.verify.run.ProgramFailedError: a rank raised, exited or hung.
    """
    from legoai.lowering.program import LoweringError
    from legoai.lowering.verify.prepare import prepare
    from legoai.lowering.verify.run import run as run_beside_one_device

    _, linted = _checked(path, settings, variant)
    assert linted.analysis is not None
    directory = linted.analysis.directory
    try:
        prepared = prepare(linted, directory=directory, ranks=ranks, double=double)
    except LoweringError as error:
        raise PlanError(error.diagnostics, linted.files) from error
    return run_beside_one_device(prepared, directory=directory, steps=steps)


def without_figures(linted: Linted, profile: str | None) -> Diagnostic | None:
    """The error of costing a plan whose model is not simulated, or whose devices or fabric have no figures.

    The profile of a device file is not missed where other devices are named. Lint looks at its sections only, and
    warns; here the whole is read.
    """
    from legoai.dsl.analysis.simulation import not_simulated
    from legoai.dsl.rules.training.unsimulated import FiguresOfUnsimulatedModel, place_of

    found = None if linted.analysis is None else not_simulated(linted.analysis)
    if linted.analysis is not None and found is not None:
        return FiguresOfUnsimulatedModel.at(
            place_of(linted.analysis),
            f"the model cannot be simulated: it {found.cause}",
            label="not simulated", help=found.help,
        )  # fmt: skip
    from legoai.dsl.rules.devices.profile import FiguresOfUnmeasuredCluster, unmeasured_fabric
    from legoai.specs.directives.hole import Undecided

    assert linted.plan is not None
    part = None if profile is not None else _unmeasured_device(linted)
    if part is None and linted.analysis is not None:
        with contextlib.suppress(Undecided):
            part = unmeasured_fabric(linted.analysis)
    if part is None:
        return None
    place = linted.plan.cluster.span_of(part.option) or linted.resolution.start
    return FiguresOfUnmeasuredCluster.at(place, part.fault, label="not measured", help=part.help)


def _unmeasured_device(linted: Linted) -> Unmeasured | None:
    from legoai.cost.machine.cluster import profile_of
    from legoai.cost.profiles import ProfileError
    from legoai.dsl.rules.devices.profile import file_without_figures, unmeasured_device
    from legoai.specs.cluster import CatalogueError

    assert linted.plan is not None
    use = linted.plan.cluster
    part = None if linted.analysis is None else unmeasured_device(linted.analysis)
    if part is None and use.device == "profile":
        try:
            profile_of(use, linted.resolution.directory)
        except (ProfileError, CatalogueError) as error:
            part = file_without_figures(use, str(error))
    return part


def _check_errors(linted: Linted) -> None:
    errors = tuple(errors_of(linted.diagnostics))
    if errors:
        raise PlanError(errors, linted.files)


def _check_figures(linted: Linted, profile: str | None) -> None:
    found = without_figures(linted, profile)
    if found is not None:
        raise PlanError((found,), linted.files)


def _lowered(path: PathLike, settings: Mapping[str, str] | None, variant: str | None) -> tuple[Program, Plan, Linted]:
    from legoai.lowering.program import LoweringError
    from legoai.lowering.program import lower as lower_plan

    plan, linted = _checked(path, settings, variant)
    assert linted.analysis is not None
    try:
        program = lower_plan(linted.analysis)
    except LoweringError as error:
        raise PlanError(error.diagnostics, linted.files) from error
    return program, plan, linted


def _linted(
    path: PathLike,
    settings: Mapping[str, str] | None,
    variant: str | None,
    *,
    variants: bool = False,
    reopen: bool = False,
) -> Linted:
    source = read_source(os.fspath(path))
    return lint_text(
        source.text,
        source.name,
        directory=source.directory,
        settings=settings,
        variant=variant,
        read=read_base,
        variants=variants,
        reopen=reopen,
    )


def _checked(
    path: PathLike, settings: Mapping[str, str] | None, variant: str | None, *, reopen: bool = False
) -> tuple[Plan, Linted]:
    try:
        linted = _linted(path, settings, variant, reopen=reopen)
    except UnreadableError as error:
        raise PlanError((error.diagnostic,), {error.file.name: error.file} if error.file else {}) from error
    _check_errors(linted)
    assert linted.plan is not None, "a plan that could not be resolved has an error"
    return linted.plan, linted
