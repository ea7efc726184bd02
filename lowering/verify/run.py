"""Execution of a lowered program, and of its plan's training on one device, for comparison."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from legoai.lowering.verify.compare import (
    Difference,
    InitialDifference,
    Kind,
    Tolerances,
    differences,
    relative,
    tolerances,
    worst,
    wrong_samples,
)
from legoai.lowering.verify.processes import Job, JobError, Processes
from legoai.specs.directives.model import FOREIGN
from legoai.specs.dtypes import TORCH_DTYPES
from legoai.specs.models.import_path import add_author_folder, author_folder
from legoai.specs.models.reads import SYNTHETIC, Images, ImagesWithTexts, Reads, Tokens, TwoTexts
from legoai.specs.plan import Plan

if TYPE_CHECKING:
    from legoai.lowering.verify.prepared import Prepared
    from legoai.lowering.verify.rates import RateDifference

ONE_DEVICE: Final = "one device"
SEED: Final = 0
STUCK_SECONDS: Final = 120.0
"""Seconds without a report after which ranks are considered stuck; a waiting collective fails after half of it."""

Watch = Callable[[dict[str, str]], None]


class ProgramFailedError(Exception):
    """The program did not complete.

    Attributes:
        message: the rank and its exception.
        detail: its traceback and the end of its output.
    """

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of running a program and comparing it with one device.

    Attributes:
        tolerances: of the comparison.
        losses: of each step, the program's and one device's.
        norms: of each step's gradient, likewise.
        differences: of every gradient and updated parameter, in the model's order; the largest of any rank.
        compared_beginnings: number of parameters and buffers whose initial values were compared with those of the
            model's own constructor; 0 for a built-in model, which has no other.
        unlike: descriptions of those that differ.
        compared_rates: number of steps of the whole schedule in which learning rates were compared.
        wrong_rates: a difference for each step that has one.
        samples: samples of all steps.
        wrong_samples: descriptions of those that ranks did not read as they should.
        reductions: number of reductions of gradients of all ranks by dtype; empty where they were not counted.
        reduce_dtype: of the plan.
        draws: whether forward draws random numbers although dropout is disabled.
        clipped: whether clipping changed the gradient in every step; None where the plan does not clip.
    """

    tolerances: Tolerances
    losses: tuple[tuple[float, float], ...]
    norms: tuple[tuple[float, float], ...]
    differences: tuple[Difference, ...]
    compared_beginnings: int = 0
    unlike: tuple[InitialDifference, ...] = ()
    compared_rates: int = 0
    wrong_rates: tuple[RateDifference, ...] = ()
    samples: int = 0
    wrong_samples: tuple[str, ...] = ()
    reductions: Mapping[str, int] = field(default_factory=dict)
    reduce_dtype: str = ""
    draws: bool = False
    clipped: bool | None = None

    @property
    def wrong_reductions(self) -> Mapping[str, int]:
        """Reductions in another dtype than the plan's, by dtype."""
        return {dtype: count for dtype, count in self.reductions.items() if dtype != self.reduce_dtype}

    @property
    def first(self) -> Difference | None:
        """The first gradient in the model's order that differs, or else the first update."""
        wrong = [item for item in self.differences if not item.size <= self.limit(item)]
        order = ("gradient", "clipped", "update")
        return min(wrong, key=lambda item: (order.index(item.kind), item.step), default=None)

    def limit(self, item: Difference) -> float:
        """Return the tolerance for a difference."""
        return self.tolerances.update if item.kind == "update" else self.tolerances.gradient

    @property
    def wrong_losses(self) -> tuple[int, ...]:
        """The steps, counted from 1, whose losses differ."""
        return self._wrong(self.losses)

    @property
    def wrong_norms(self) -> tuple[int, ...]:
        """The steps, counted from 1, whose gradient norms differ."""
        return self._wrong(self.norms)

    def _wrong(self, pairs: tuple[tuple[float, float], ...]) -> tuple[int, ...]:
        limits = itertools.chain([self.tolerances.loss], itertools.repeat(self.tolerances.after))
        steps = enumerate(zip(pairs, limits, strict=False), 1)
        return tuple(step for step, (pair, limit) in steps if relative(*pair) > limit)

    @property
    def equal(self) -> bool:
        """Whether no difference exceeds its tolerance."""
        wrong = self.wrong_losses or self.wrong_norms or self.unlike or self.wrong_samples or self.wrong_reductions
        return self.first is None and not wrong and not self.wrong_rates


def run(prepared: Prepared, *, directory: Path, steps: int = 2, watch: Watch = lambda told: None) -> Verdict:
    """Run a program with one process per rank of its mesh, run its plan on one device, and compare.

    Everything is computed on the CPU, with gloo between the ranks. No process outlives the call.

    Args:
        prepared: the plan, small enough for this machine, and its program.
        directory: the plan's; a model factory is searched there first.
        steps: optimizer steps.
        watch: called with the activity of each process, by its name.

    Raises:
        ProgramFailedError: a rank raised an exception, ended, or got stuck.
    """
    plan = prepared.shrunken.plan
    import_before_the_fork(prepared.program.text)
    with tempfile.TemporaryDirectory(prefix="legoai-verify-") as scratch:
        folder = Path(scratch)
        jobs = jobs_of(prepared, directory=directory, steps=steps, folder=folder)
        ranks = [name for name in jobs if name != ONE_DEVICE]
        try:
            with Processes(jobs, folder, silence=STUCK_SECONDS, watch=watch) as processes:
                [reference] = processes.results([ONE_DEVICE])
                processes.say(ranks, reference["file"])
                found = processes.results(ranks)
        except JobError as error:
            raise ProgramFailedError(str(error), error.detail) from error
    return verdict(plan, found, reference)


def jobs_of(prepared: Prepared, *, directory: Path, steps: int, folder: Path) -> dict[str, Job]:
    """Return what :func:`run` runs, by name: the plan's training on one device, and then each rank of the program.

    Args:
        prepared: as of :func:`run`, like the others.
        directory: of the plan.
        steps: optimizer steps.
        folder: of files that all jobs read and write; the data are written into it.
    """
    plan, text, drawing = prepared.shrunken.plan, prepared.program.text, prepared.drawing
    world, reads = plan.mesh.world_size, prepared.reads or Tokens()
    data = SYNTHETIC if isinstance(reads, Images | ImagesWithTexts) else str(folder / "text.txt")
    if data != SYNTHETIC:
        Path(data).write_text(_text(plan, reads, steps), encoding="ascii")
    clips = plan.clip is not None
    looks = plan.compile is None and (plan.fsdp is not None or plan.replicate is not None)
    traced = plan.fsdp is not None and plan.fsdp.backend == "graph"
    limits, author = tolerances(plan), author_folder(plan.model.family, directory)
    ranks = {
        f"rank {rank}": _Rank(rank, world, text, data, folder, steps, author, looks, traced, clips, drawing, limits)
        for rank in range(world)
    }
    return {ONE_DEVICE: _OneDevice(plan, reads, data, folder, steps, directory, drawing), **ranks}


def verdict(plan: Plan, ranks: list[dict[str, Any]], reference: dict[str, Any]) -> Verdict:
    """Compare the results of the ranks with that of one device."""
    from legoai.lowering.verify.rates import merged

    held = worst(rank["differences"] for rank in ranks)
    steps = len(reference["losses"])
    ordered = []
    looked_at: list[tuple[Kind, int]] = [("gradient", 1), ("update", 1), ("update", steps)]
    if plan.clip is not None:
        looked_at.insert(1, ("clipped", 1))
    for kind, step in dict.fromkeys(looked_at):
        for names in reference["names"]:  # a tied parameter has several names, of which a rank may hold one
            found = [held[kind, step, name] for name in names if (kind, step, name) in held]
            ordered += found or [_missing(kind, names[0], step)]
    return Verdict(
        tolerances=tolerances(plan),
        losses=tuple(zip(ranks[0]["losses"], reference["losses"], strict=True)),
        norms=tuple(zip(ranks[0]["norms"], reference["norms"], strict=True)),
        differences=tuple(ordered),
        compared_beginnings=reference["compared_beginnings"],
        unlike=tuple(reference["unlike"]),
        compared_rates=reference["compared_rates"],
        wrong_rates=merged(rank["wrong_rates"] for rank in ranks),
        samples=sum(len(batch) for batch in reference["samples"]),
        wrong_samples=tuple(wrong_samples([rank["samples"] for rank in ranks], reference["samples"])),
        reductions=sum((Counter(rank["reductions"]) for rank in ranks), Counter()),
        reduce_dtype=TORCH_DTYPES[plan.precision.reduce],
        draws=reference["draws"],
        clipped=None if plan.clip is None else min(reference["norms"]) > plan.clip.norm,
    )


def _missing(kind: Any, name: str, step: int) -> Difference:
    return Difference(kind=kind, name=name, size=float("inf"), largest=float("inf"), step=step)


@dataclass(frozen=True, slots=True)
class _OneDevice:
    """The plan's training on one device."""

    plan: Plan
    reads: Reads
    data: str
    folder: Path
    steps: int
    directory: Path
    drawing: tuple[str, ...]

    def __call__(self, tell: Callable[[str], None], hear: Callable[[], Any]) -> dict[str, Any]:
        import torch

        from legoai.lowering.verify.one_device import compare_initial_values, train
        from legoai.specs.models.build import build_model

        settle(self.folder, author_folder(self.plan.model.family, self.directory))
        build = functools.partial(build_model, self.plan.model.source(), self.directory)
        undropped = functools.partial(_undropped, build, self.drawing)
        found = train(self.plan, undropped, self.reads, data=self.data, steps=self.steps, seed=SEED, tell=tell)
        found["compared_beginnings"], found["unlike"] = 0, []
        if self.plan.model.family in FOREIGN:
            found["compared_beginnings"], found["unlike"] = compare_initial_values(self.plan, build, seed=SEED)
        file = self.folder / "reference.pt"
        torch.save(
            {name: found[name] for name in ("gradients", "clipped", "updated", "trained", "rates", "schedule")}, file
        )
        tell("done")
        plain = ("losses", "norms", "names", "samples", "compared_beginnings", "unlike", "draws")
        return {
            "file": str(file),
            "compared_rates": len(found["schedule"]["steps"]),
            **{name: found[name] for name in plain},
        }


def _undropped(build_model: Callable[[], Any], drawing: tuple[str, ...]) -> Any:
    from legoai.lowering.verify.dropout import without_dropout

    return without_dropout(build_model(), drawing)


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank of the program."""

    rank: int
    world: int
    text: str
    data: str
    folder: Path
    steps: int
    author: Path | None
    looks_at_reductions: bool
    traced: bool
    clips: bool
    drawing: tuple[str, ...]
    limits: Tolerances

    def __call__(self, tell: Callable[[str], None], hear: Callable[[], Any]) -> dict[str, Any]:
        import torch

        from legoai.lowering.verify.rates import wrong_rates
        from legoai.lowering.verify.watching import Reductions, Watch
        from legoai.runtime.launching.options import RunOptions

        settle(self.folder, self.author)
        tell("building")
        with _group(self.rank, self.world, self.folder / "store"):
            namespace: dict[str, Any] = {"__name__": "program"}
            exec(compile(self.text, "program.py", "exec"), namespace)
            trainer = namespace["trainer"]()
            build = functools.partial(_undropped, trainer.build_model, self.drawing)
            trainer = replace(trainer, build_model=build, seed=SEED)
            seen = Watch(tell, self.steps, clips=self.clips)
            reductions = Reductions(traced=self.traced) if self.looks_at_reductions else None
            options = RunOptions(
                device="cpu",
                steps=self.steps,
                data=self.data,
                log_every=0,
                on_nan="skip",
                timeout=STUCK_SECONDS / 2,
            )
            with reductions or contextlib.nullcontext():
                history = trainer.fit(options, observe=seen, prepared=seen.prepared)
            trained = seen.parameters(history.training)
            tell("comparing")
            reference = torch.load(hear(), weights_only=True)
            own = {
                "gradients": seen.gradients,
                "clipped": seen.clipped,
                "updated": seen.updated or trained,
                "trained": trained,
            }
            found = differences(own, reference, self.limits)
            rates = wrong_rates(history.training, seen.rates, reference["schedule"])
        return {
            "losses": [record.loss for record in history.steps],
            "norms": [record.grad_norm for record in history.steps],
            "differences": found,
            "wrong_rates": rates,
            "samples": seen.samples,
            "reductions": dict(reductions.dtypes) if reductions is not None else {},
        }


@contextlib.contextmanager
def _group(rank: int, world: int, store: Path) -> Iterator[None]:
    from datetime import timedelta

    import torch.distributed as dist

    os.environ["LOCAL_RANK"] = str(rank)
    timeout = timedelta(seconds=STUCK_SECONDS / 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    yield
    # The group is kept until the process ends: other ranks may still be in a collective.


def settle(folder: Path, directory: Path | None) -> None:
    """Use one thread and files in the scratch folder, and make a factory's modules importable, if there is one."""
    import torch

    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    add_author_folder(directory)


def import_before_the_fork(text: str) -> None:
    """Import the modules that the program needs once, before forking, but no foreign code."""
    if "torch.compile(" in text or ".compile(" in text:
        from legoai.runtime.torch_internals.compiler.dynamo import import_dynamo

        import_dynamo()
    for node in ast.parse(text).body:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [item.name for item in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.partition(".")[0] in ("torch", "legoai"):
                import_module(name)


def _text(plan: Plan, reads: Reads, steps: int) -> str:
    """Return random text, long enough that no sequence is read twice."""
    length = plan.batch.length * (2 if isinstance(reads, TwoTexts) else 1)
    tokens = int(1.25 * length * (plan.batch.global_batch * steps + 16))
    letters = [chr(code) for code in range(32, 127)]
    return "".join(random.Random(SEED).choices(letters, k=tokens))
