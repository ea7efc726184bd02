"""Evaluation of candidates: each is lowered and simulated, equal programs once, in worker processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias
from weakref import WeakKeyDictionary

from legoai.cost.estimate import CannotEstimateError, Estimate, estimate
from legoai.cost.replay.plan_key import state_of_model
from legoai.cost.search.buckets.costs import UnitWork, work_of_units
from legoai.cost.search.evaluation.workers import Workers, first_result
from legoai.cost.search.lower_bounds.memory_bound_kernels import Moved, moved_of
from legoai.cost.search.lower_bounds.shared_work import MicroBatchWork, work_of_micro_batch
from legoai.cost.search.memory.points import MemoryPoints, memory_points
from legoai.cost.search.memory.stage_points import RankPoints, stage_points
from legoai.cost.search.stages.costs import StageWork, work_of_stages
from legoai.cost.simulated.forking import may_fork
from legoai.cost.trace.garbage import collected, uncollected
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.communication.comm import bucket_rules
from legoai.lowering.program import LoweringError, Program, lower
from legoai.specs.cores import cores
from legoai.specs.directives.require import METRICS
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.plan import Plan

_MANIFESTS: Final = 16
"""Manifests that are kept to be sent to other processes, and there."""


class OutOfTimeError(Exception):
    """The time for evaluating is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a candidate costs in a step.

    Attributes:
        metrics: every figure that a plan may require, by name and dimension: `step_time seconds`.
        fits: whether it fits its devices; None where their memory is not known.
        compute: seconds of the busiest rank in which a kernel runs, recomputation included.
        recompute: seconds of recomputation.
        exposed: seconds of exposed communication by mesh axis.
        waiting: seconds in which the busiest rank does none of these: copies, the host, the pipeline.
        bubble: share of the step in which pipeline ranks wait.
        profile: name and hash of the profile that the figures rest on.
        whole: whether every block and micro batch was simulated; else a few of equal ones stand for the others.
        micro_batch: what bounds candidates with the same layers.
        moved: by each block for a token, which bounds candidates whose ranks share blocks otherwise.
        stages: what the stages of a pipeline took.
        units: what units took that may share their collectives.
        points: what equal blocks held at the points of the step.
        ranks: what those of a pipeline held.
    """

    metrics: Mapping[str, float]
    fits: bool | None
    compute: float
    recompute: float
    exposed: Mapping[str, float]
    waiting: float
    bubble: float
    profile: str
    whole: bool = True
    micro_batch: MicroBatchWork = field(default_factory=MicroBatchWork)
    moved: list[Moved] = field(default_factory=list)
    stages: StageWork = field(default_factory=StageWork)
    units: UnitWork = field(default_factory=UnitWork)
    points: MemoryPoints = field(default_factory=MemoryPoints)
    ranks: list[RankPoints] = field(default_factory=list)

    @property
    def step_time(self) -> float:
        """Seconds of a step."""
        return self.metrics["step_time seconds"]

    @property
    def active(self) -> float:
        """Bytes of active memory at the peak of the fullest rank."""
        return self.metrics["peak_memory bytes"]

    @property
    def reserved(self) -> float:
        """Bytes that the allocator of the fullest rank reserves at most."""
        return self.metrics["reserved_memory bytes"]

    def metric(self, name: str, dimension: str) -> float:
        """A figure that a plan may require, as `Estimate.metric` gives it."""
        return self.metrics[f"{name} {dimension}"]

    @staticmethod
    def of(found: Estimate, analysis: Analysis) -> Figures:
        """The figures of an estimate of a plan."""
        assert analysis.manifest is not None
        one = found.slowest.breakdown
        return Figures(
            metrics={
                f"{name} {dimension}": found.metric(name, dimension)
                for name, metric in METRICS.items()
                for dimension in metric.dimensions
            },
            fits=found.fits,
            compute=one.compute,
            recompute=found.recompute,
            exposed=dict(sorted(found.exposed_by_axis.items())),
            waiting=one.copies + one.host + one.idle,
            bubble=found.bubble_fraction,
            micro_batch=work_of_micro_batch(found, analysis.manifest),
            moved=moved_of(found, analysis),
            stages=work_of_stages(found, analysis.manifest),
            units=work_of_units(found, analysis),
            points=memory_points(found, analysis.manifest),
            ranks=stage_points(found, analysis.manifest),
            profile=f"{found.machine.profile.name}@{found.machine.profile.hash}",
            whole=found.whole,
        )

    def document(self) -> dict[str, Any]:
        """The figures as plain data."""
        return asdict(self)

    @staticmethod
    def read(document: Mapping[str, Any]) -> Figures:
        """The figures of a :meth:`document`."""
        parts = {
            "micro_batch": MicroBatchWork.read(document["micro_batch"]),
            "moved": [Moved(*one) for one in document["moved"]],
            "stages": StageWork.read(document["stages"]),
            "units": UnitWork(**document["units"]),
            "points": MemoryPoints(**document["points"]),
            "ranks": [RankPoints.read(one) for one in document["ranks"]],
        }
        return Figures(**{**document, **parts})


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFigures:
    """Why a candidate has no figures."""

    reason: str


Outcome = Figures | NoFigures

_Running: TypeAlias = list[Future[Outcome]] | Callable[[], Outcome]
"""A candidate that is simulated: in one process or two, or once it is called."""


class Evaluator(Protocol):
    """Gives candidates their figures."""

    @property
    def simulated(self) -> int:
        """Programs that were simulated, or whose figures were kept from an earlier one; equal ones count once."""

    def evaluate(self, candidates: Sequence[Analysis], deadline: float | None) -> Iterator[Outcome]:
        """The outcome of each candidate, in their order; what takes other processes is under way when this returns.

        Raises:
            OutOfTimeError: ``deadline``, a time of `time.monotonic`, has passed; candidates before it have theirs.
        """

    def finished(self, candidates: Sequence[Analysis]) -> list[Outcome | None]:
        """The outcomes of some candidates of :meth:`evaluate`; None for those that would have to be waited for."""

    def begin_likely(self, candidates: Sequence[Analysis]) -> None:
        """Begin to evaluate candidates that are likely to be asked for, while processors would be idle."""

    def verify(self, candidate: Analysis, deadline: float | None) -> Outcome:
        """The outcome of a candidate of which every block and micro batch is simulated.

        Raises:
            OutOfTimeError: as :meth:`evaluate`.
        """


_IDENTITY: Final = re.compile(
    r"""^PLAN(_HASH)?\ =.*$ | ^"{3}.*:\ lowered\ from\ .*$ | ^Start\ it\ with:\ .*$ | \ \ \#\ [^"'\n]*$""",
    re.MULTILINE | re.VERBOSE,
)
"""What a program says of its plan's name, hash and lines. A comment without quotes ends no string."""


class Simulation:
    """An evaluator that lowers every candidate and simulates its program, of equal blocks and micro batches a few.

    Candidates with the same program are simulated once. Programs are simulated in forked processes where that is
    possible, else here.

    Args:
        directory: of the plan's file.
        profile: of other devices than the plan's.
        workers: processes; by default as many as there are processors.
        kept: figures of earlier simulations, by :func:`program_key`; new ones are added, at the end also those of
            simulations that ended without being waited for.
        whole: simulate all blocks and micro batches of every candidate.
    """

    def __init__(
        self,
        *,
        directory: Path,
        profile: str | None = None,
        workers: int | None = None,
        kept: dict[str, dict[str, Any]] | None = None,
        whole: bool = False,
    ) -> None:
        self.directory = directory
        self.whole = whole
        self.profile = profile
        self.workers = workers or cores()
        self.kept = kept if kept is not None else {}
        self._used: set[str] = set()
        self._failed: dict[str, NoFigures] = {}
        self._packed: dict[int, tuple[Manifest, bytes]] = {}
        self._processes = Workers(self.workers)
        self._keys: WeakKeyDictionary[Analysis, str | NoFigures] = WeakKeyDictionary()
        self._running: dict[str, _Running] = {}
        self._likely: dict[str, Future[Outcome]] = {}

    @property
    def simulated(self) -> int:
        """Different programs that were asked for."""
        return len(self._used)

    def evaluate(self, candidates: Sequence[Analysis], deadline: float | None) -> Iterator[Outcome]:
        """As :meth:`Evaluator.evaluate`."""
        keys: list[str | NoFigures] = []
        for candidate in candidates:
            try:
                program = lower(candidate)
            except LoweringError as error:
                keys.append(NoFigures(reason=error.diagnostics[0].message))
            else:
                key = self._key(program, candidate)
                keys.append(key)
                if not self._is_known(key) and key not in self._running:
                    self._running[key] = self._begin(key, program, candidate, whole=self.whole)
            self._keys[candidate] = keys[-1]
        return self._outcomes(keys, deadline)

    def _outcomes(self, keys: Sequence[str | NoFigures], deadline: float | None) -> Iterator[Outcome]:
        """The outcomes of the candidates with these keys, in their order."""
        for key in keys:
            if isinstance(key, str) and key in self._running:
                self._finish(key, self._running[key], deadline)
                del self._running[key]
            yield self._outcome(key)

    def finished(self, candidates: Sequence[Analysis]) -> list[Outcome | None]:
        """As :meth:`Evaluator.finished`."""
        keys = [self._keys.get(candidate) for candidate in candidates]
        for key in keys:
            outcome = _ended(self._running[key]) if isinstance(key, str) and key in self._running else None
            if isinstance(key, str) and outcome is not None:
                self._note(key, outcome)
                del self._running[key]
        known = (None if isinstance(key, str) and not self._is_known(key) else key for key in keys)
        return [None if key is None else self._outcome(key) for key in known]

    def _outcome(self, key: str | NoFigures) -> Outcome:
        """The outcome of the candidates with a key, of which it is known."""
        if isinstance(key, NoFigures):
            return key
        self._used.add(key)
        kept = self.kept.get(key)
        return self._failed[key] if kept is None else Figures.read(kept)

    def verify(self, candidate: Analysis, deadline: float | None) -> Outcome:
        """As :meth:`Evaluator.verify`, of a candidate that was evaluated."""
        program = lower(candidate)
        key = self._key(program, candidate)
        if not self._is_kept(key, whole=True) and key not in self._failed:
            self._finish(key, self._begin(None, program, candidate, whole=True), deadline)
        return self._failed[key] if key in self._failed else Figures.read(self.kept[key])

    def _key(self, program: Program, candidate: Analysis) -> str:
        # An equal program of a plan that does not decide buckets has no figures of units.
        key = program_key(program, self.profile, state_of_model(candidate))
        return f"{key} with units" if bucket_rules(candidate) else key

    def _is_known(self, key: str) -> bool:
        return self._is_kept(key, whole=self.whole) or key in self._failed

    def _is_kept(self, key: str, *, whole: bool) -> bool:
        return key in self.kept and (not whole or bool(self.kept[key]["whole"]))

    def begin_likely(self, candidates: Sequence[Analysis]) -> None:
        """As :meth:`Evaluator.begin_likely`."""
        # No processor is idle beside a search that has only one.
        for candidate in candidates if self.workers > 1 and self._forks() else ():
            with contextlib.suppress(LoweringError):
                program = lower(candidate)
                key = self._key(program, candidate)
                if not self._is_known(key) and key not in self._likely:
                    job = self._job(program, candidate, whole=self.whole)
                    running = self._processes.submit_idle(_outcome_of_packed, *job)
                    self._likely |= {} if running is None else {key: running}

    def close(self) -> None:
        """End the processes, whatever they do, and keep the figures of simulations that have ended."""
        likely: dict[str, _Running] = {key: [future] for key, future in self._likely.items()}
        for key, running in (likely | self._running).items():
            if not self._is_known(key) and (outcome := _ended(running)) is not None:
                self._note(key, outcome)
        self._processes.close()
        self._likely.clear()
        self._running.clear()

    def __enter__(self) -> Simulation:
        """Processes are started when they are needed."""
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        self.close()

    def _begin(self, key: str | None, program: Program, candidate: Analysis, *, whole: bool) -> _Running:
        """Begin to simulate a candidate that may have been begun as likely, if it has a key."""
        if not self._forks():
            assert candidate.manifest is not None
            job = (candidate.plan, candidate.manifest, self.directory, self.profile, whole)
            return lambda: _outcome_here(program, *job)
        begun = None if key is None else self._likely.pop(key, None)
        if begun is not None and begun.done() and begun.exception() is None:
            return [begun]
        submitted = self._processes.submit(_outcome_of_packed, *self._job(program, candidate, whole=whole))
        # Where other programs keep processors busy, the process of lowest priority may take forever.
        return [submitted] if begun is None or begun.cancel() else [submitted, begun]

    def _forks(self) -> bool:
        """Whether candidates are simulated in other processes: in one, too, since only that ends at a deadline."""
        if not (self._processes.begun or may_fork()):
            return False
        import legoai.cost.simulated.device  # noqa: F401 - once, and not in each process

        return True

    def _job(self, program: Program, candidate: Analysis, *, whole: bool) -> tuple[Any, ...]:
        """The arguments of :func:`_outcome_of_packed`."""
        assert candidate.manifest is not None
        return program, candidate.plan, self.pack(candidate.manifest), self.directory, self.profile, whole

    def pack(self, manifest: Manifest) -> bytes:
        """A manifest for another process; most candidates have the same one."""
        found = self._packed.get(id(manifest))
        if found is None:
            if len(self._packed) >= _MANIFESTS:
                self._packed.clear()
            found = self._packed[id(manifest)] = manifest, pickle.dumps(manifest, protocol=pickle.HIGHEST_PROTOCOL)
        return found[1]

    def _finish(self, key: str, running: _Running, deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0.0:
            raise OutOfTimeError
        try:
            outcome = first_result(running, left) if isinstance(running, list) else running()
        except TimeoutError:
            raise OutOfTimeError from None
        self._note(key, outcome)

    def _note(self, key: str, outcome: Outcome) -> None:
        if isinstance(outcome, Figures):
            self.kept[key] = outcome.document()
        else:
            self._failed[key] = outcome


def _ended(running: _Running) -> Outcome | None:
    """The outcome of a simulation that has ended; None of others, and of those that were ended or raised."""
    futures = running if isinstance(running, list) else []
    done = (one for one in futures if one.done() and not one.cancelled() and one.exception() is None)
    return next((one.result() for one in done), None)


def program_key(program: Program, profile: str | None, model: str | None) -> str:
    """The identity of what a program does: equal for plans whose programs differ in their names, hashes and lines.

    Args:
        program: what a plan was lowered to.
        profile: of other devices than the plan's.
        model: state of the model, as of :func:`legoai.cost.replay.plan_key.state_of_model`.
    """
    text = _IDENTITY.sub("", program.text)
    return hashlib.sha256(f"{profile}\n{model or ''}\n{program.block_classes}\n{text}".encode()).hexdigest()


@functools.lru_cache(_MANIFESTS)
def _unpacked(packed: bytes) -> Manifest:
    manifest: Manifest = pickle.loads(packed)
    return manifest


def _outcome_of_packed(  # noqa: PLR0917
    program: Program, plan: Plan, packed: bytes, directory: Path, profile: str | None, whole: bool
) -> Outcome:
    return _outcome(program, plan, _unpacked(packed), directory, profile, whole)


def _outcome_here(*job: Any) -> Outcome:
    with collected():
        return _outcome(*job)


def _outcome(  # noqa: PLR0917
    program: Program, plan: Plan, manifest: Manifest, directory: Path, profile: str | None, whole: bool
) -> Outcome:
    try:
        # A candidate's records are gone when its figures are known, and no pass over them frees anything earlier.
        # A model may write and flush as it does where its output is shown.
        with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing), uncollected():
            return _figures(program, plan, manifest, directory, profile, whole)
    except CannotEstimateError as error:
        return NoFigures(reason=str(error))


def _figures(  # noqa: PLR0917
    program: Program, plan: Plan, manifest: Manifest, directory: Path, profile: str | None, whole: bool
) -> Figures:
    analysis = Analysis(plan, manifest, directory)
    # Figures of units need every unit in the timeline.
    whole = whole or bool(bucket_rules(analysis))
    found = estimate(program, plan, manifest, directory=directory, profile=profile, whole=whole)
    return Figures.of(found, analysis)
