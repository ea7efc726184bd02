"""Cost of the difference of two plans: of the whole, of each group of changes alone, and of their interaction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from legoai.cost.machine.cluster import machine_of
from legoai.cost.profiles import ProfileError
from legoai.cost.replay.plan_key import may_keep, state_of_model
from legoai.cost.search.evaluation.evaluator import Figures, NoFigures, Outcome, Simulation, program_key
from legoai.cost.search.evaluation.figures_cache import figures_file, identity_of, read_cache, write_cache
from legoai.cost.simulated.forking import may_fork
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.differences.changes import Change
from legoai.dsl.differences.comparison import Comparison
from legoai.lowering.program import LoweringError, lower
from legoai.specs.cluster import CatalogueError
from legoai.specs.cores import cores

Progress = Callable[[int, int], None]
"""Called with the number of simulated programs, and of all programs."""

_FREE: Final = ("name", "objective", "schedule", "steps", "seed", "data", "weights", "save", "evaluate")
"""Fields of a plan that affect what is learned, or what a run writes and checks, but not the cost of a step.

Not `require`: passes of graphs observe its memory limit. Where none does, programs are equal.
"""

_FREE_OPTIONS: Final = ("lr",)
"""Optimizer constants whose value does not change the kernels."""


class CannotCompareError(ValueError):
    """The cost of two plans cannot be compared; the message says why, for their author."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Effect of a change on the figures of a step; negative where it saves.

    Attributes:
        step_time: seconds.
        peak_active: bytes, on the fullest rank.
        peak_reserved: bytes, on the rank where they are most.
        exposed: seconds of exposed communication.
    """

    step_time: float = 0.0
    peak_active: float = 0.0
    peak_reserved: float = 0.0
    exposed: float = 0.0

    @staticmethod
    def between(before: Figures, after: Figures) -> Effect:
        """Return the second figures minus the first."""
        return Effect(**{name: of(after) - of(before) for name, of in FIGURES.items()})

    @staticmethod
    def rest(whole: Effect, parts: Sequence[Effect]) -> Effect:
        """Return the whole minus the parts."""
        names = tuple(FIGURES)
        return Effect(
            **{name: math.fsum([getattr(whole, name), *(-getattr(part, name) for part in parts)]) for name in names}
        )


FIGURES: Final[Mapping[str, Callable[[Figures], float]]] = {
    "step_time": lambda figures: figures.step_time,
    "peak_active": lambda figures: figures.metric("peak_memory", "bytes"),
    "peak_reserved": lambda figures: figures.metric("reserved_memory", "bytes"),
    "exposed": lambda figures: figures.metric("exposed_comm", "seconds"),
}
"""The figures of a step that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A group of changes, applied alone to the first plan.

    Attributes:
        changes: those of the group.
        effect: on the first plan's figures; None where it is not known.
        simulated: whether a program was simulated for it; otherwise the changes are known not to affect a step.
        reason: why the effect is not known.
    """

    changes: tuple[Change, ...]
    effect: Effect | None
    simulated: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostDifference:
    """Effects on a step of the changes from one plan to another.

    Attributes:
        before: figures of the first plan.
        after: figures of the second plan.
        parts: the groups of changes, in the order of the changes.
        programs: number of different programs that were simulated, or whose figures were cached.
    """

    before: Figures
    after: Figures
    parts: tuple[Part, ...]
    programs: int

    @property
    def whole(self) -> Effect:
        """The effect of all changes together."""
        return Effect.between(self.before, self.after)

    @property
    def interaction(self) -> Effect:
        """The effect of the changes together minus the effects of each group alone; unknown effects are included."""
        return Effect.rest(self.whole, [part.effect for part in self.parts if part.effect is not None])


def is_free(change: Change) -> bool:
    """Whether a change affects only what is learned, or what a run writes and checks, but not the cost of a step."""
    key = change.key
    return key.field in _FREE or (key.field == "optimizer" and key.names[1:] in {(name,) for name in _FREE_OPTIONS})


def cost_difference(
    comparison: Comparison, *, profile: str | None = None, progress: Progress | None = None
) -> CostDifference:
    """Simulate two plans, and the first with each group of changes that can be applied alone.

    Changes that leave the program unchanged, and those that :func:`is_free`, cost nothing and are not simulated.
    Figures are cached on disk, like those of `legoai solve`.

    Args:
        comparison: of two plans without holes.
        profile: of other devices than the plans'; see :func:`legoai.cost.machine.cluster.machine_of`.
        progress: called with the progress of the simulations.

    Raises:
        CannotCompareError: one of the plans cannot be costed.
    """
    runs = _Runs(profile)
    ends = []
    for side in (comparison.before, comparison.after):
        name = side.linted.resolution.file.name
        if any(True for _ in side.plan.holes()):
            raise CannotCompareError(f"{name} has values that are not decided: solve it first")
        if side.manifest is None:
            raise CannotCompareError(f"the model of {name} is not known")
        end = runs.add(side.analysis)
        if isinstance(end, NoFigures):
            raise CannotCompareError(f"{name} cannot be costed: {end.reason}")
        ends.append(end)
    parts: list[tuple[tuple[Change, ...], str | NoFigures | None]] = []
    for group in comparison.groups():
        if all(map(is_free, group)):
            parts.append((group, None))
        else:
            analysis = comparison.candidate(group)
            assert analysis is not None, "each group is legal alone"
            parts.append((group, runs.add(analysis)))
    found = runs.figures(progress)
    first, last = (found[end] for end in ends)
    for side, outcome in zip((comparison.before, comparison.after), (first, last), strict=True):
        if isinstance(outcome, NoFigures):
            raise CannotCompareError(f"{side.linted.resolution.file.name} cannot be costed: {outcome.reason}")
    assert isinstance(first, Figures) and isinstance(last, Figures)
    done = []
    for group, key in parts:
        if key is None:
            done.append(Part(changes=group, effect=Effect(), simulated=False))
            continue
        outcome = found[key] if isinstance(key, str) else key
        if isinstance(outcome, NoFigures):
            done.append(Part(changes=group, effect=None, simulated=True, reason=outcome.reason))
        else:
            done.append(Part(changes=group, effect=Effect.between(first, outcome), simulated=key != ends[0]))
    return CostDifference(before=first, after=last, parts=tuple(done), programs=len(found))


class _Runs:
    """Programs to simulate; equal ones are simulated once."""

    def __init__(self, profile: str | None) -> None:
        self._profile = profile
        self._jobs: dict[tuple[str, Path], dict[str, Analysis]] = {}
        self._keys: set[str] = set()

    def add(self, analysis: Analysis) -> str | NoFigures:
        """Return the key of the program's outcome, or the reason why there will be none."""
        try:
            program = lower(analysis)
            machine = self._machine(analysis)
        except LoweringError as error:
            return NoFigures(reason=error.diagnostics[0].message)
        except (ProfileError, CatalogueError) as error:
            return NoFigures(reason=str(error))
        # Where nothing is kept, models of two folders may have no other name.
        beside = str(analysis.directory) if _imports(analysis) else ""
        key = f"{program_key(program, self._profile, state_of_model(analysis))} {machine} {beside}"
        if key not in self._keys:
            self._keys.add(key)
            self._jobs.setdefault((machine, analysis.directory), {})[key] = analysis
        return key

    def _machine(self, analysis: Analysis) -> str:
        found = machine_of(
            analysis.plan.cluster, analysis.plan.mesh.world_size, directory=analysis.directory, override=self._profile
        )
        return identity_of(found)

    def figures(self, progress: Progress | None) -> dict[str, Outcome]:
        """Return the outcomes of all programs.

        Raises:
            CannotCompareError: one process would have to import two versions of one Python module.
        """
        folders = {folder for _, folder in self._jobs}
        if len(folders) > 1 and not may_fork() and any(map(_imports, self._analyses())):
            raise CannotCompareError(
                "the factories of two revisions cannot be imported by one process that cannot fork"
            )
        found: dict[str, Outcome] = {}
        for (machine, folder), jobs in self._jobs.items():
            file = figures_file(machine) if all(map(may_keep, jobs.values())) else None
            kept = read_cache(file)
            # At least two, so that they are processes: this process must not import the modules beside one plan.
            evaluator = Simulation(
                directory=folder, profile=self._profile, workers=max(2, cores()), kept=kept, whole=True
            )
            try:
                with evaluator:
                    for key, outcome in zip(jobs, evaluator.evaluate(list(jobs.values()), None), strict=True):
                        found[key] = outcome
                        if progress is not None:
                            progress(len(found), len(self._keys))
            finally:
                write_cache(file, kept)
        return found

    def _analyses(self) -> Iterator[Analysis]:
        for jobs in self._jobs.values():
            yield from jobs.values()


def _imports(analysis: Analysis) -> bool:
    return analysis.plan.model.family == "python"
