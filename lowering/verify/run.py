"""Runs of a lowered program and of its plan's training on one device, side by side."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from legoai.lowering.program import Program
from legoai.lowering.verify.compare import TOLERANCES, Difference, Tolerances, differences, relative, worst
from legoai.lowering.verify.processes import Job, JobError, Processes
from legoai.specs.directives.model import FOREIGN
from legoai.specs.models.reads import Images, ImagesWithTexts, Reads, Tokens, TwoTexts
from legoai.specs.plan import Plan

ONE_DEVICE: Final = "one device"
SYNTHETIC: Final = "synthetic"
"""What `legoai.runtime.samples`, which imports torch, calls data that are made."""
SEED: Final = 0
STUCK_SECONDS: Final = 120.0
"""After so long without a word the ranks are taken to be stuck; a collective that waits fails after half of it."""

Watch = Callable[[dict[str, str]], None]


class ProgramFailedError(Exception):
    """The program did not run to its end.

    Attributes:
        message: which rank raised what.
        detail: its traceback and the end of its output.
    """

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of running a program beside one device.

    Attributes:
        tolerances: by which it was judged.
        losses: of each step, the program's and one device's.
        norms: of each step's gradient, likewise.
        differences: of every gradient and updated parameter, in the model's order; the largest of any rank.
    """

    tolerances: Tolerances
    losses: tuple[tuple[float, float], ...]
    norms: tuple[tuple[float, float], ...]
    differences: tuple[Difference, ...]

    @property
    def first(self) -> Difference | None:
        """The first gradient in the model's order that differs, or else the first update."""
        wrong = [item for item in self.differences if not item.size <= self.limit(item)]
        return min(wrong, key=lambda item: (item.kind != "gradient", item.step), default=None)

    def limit(self, item: Difference) -> float:
        """How large a difference may be."""
        return self.tolerances.gradient if item.kind == "gradient" else self.tolerances.update

    @property
    def wrong_losses(self) -> tuple[int, ...]:
        """The steps, counted from 1, of which the loss differs."""
        return self._wrong(self.losses)

    @property
    def wrong_norms(self) -> tuple[int, ...]:
        """The steps, counted from 1, of which the norm of the gradient differs."""
        return self._wrong(self.norms)

    def _wrong(self, pairs: tuple[tuple[float, float], ...]) -> tuple[int, ...]:
        found = (step for step, (own, wanted) in enumerate(pairs, 1) if relative(own, wanted) > self.tolerances.loss)
        return tuple(found)

    @property
    def equal(self) -> bool:
        """Whether nothing differs by more than its tolerance."""
        return self.first is None and not self.wrong_losses and not self.wrong_norms


def run(
    program: Program,
    plan: Plan,
    *,
    reads: Reads | None = None,
    directory: Path,
    steps: int = 2,
    watch: Watch = lambda told: None,
) -> Verdict:
    """Run the program on as many processes as its mesh has ranks, and its plan on one device, and compare.

    Everything is computed on the CPU, with gloo between the ranks. No process outlives the call.

    Args:
        program: of ``plan``.
        plan: small enough for this machine; see :mod:`legoai.lowering.shrink`.
        reads: what the plan's model takes; tokens by default.
        directory: the plan's; a model factory is sought there first.
        steps: optimizer steps.
        watch: is told what each process is doing, by the process's name.

    Raises:
        ProgramFailedError: a rank raised, ended or got stuck.
    """
    _import_before_the_fork(program.text)
    world = plan.mesh.world_size
    with tempfile.TemporaryDirectory(prefix="legoai-verify-") as scratch:
        folder = Path(scratch)
        reads = reads or Tokens()
        data = SYNTHETIC if isinstance(reads, Images | ImagesWithTexts) else str(folder / "text.txt")
        if data != SYNTHETIC:
            Path(data).write_text(_text(plan, reads, steps), encoding="ascii")
        ranks = {
            f"rank {rank}": _Rank(rank, world, program.text, data, folder, steps, directory) for rank in range(world)
        }
        jobs: dict[str, Job] = {ONE_DEVICE: _OneDevice(plan, reads, data, folder, steps, directory), **ranks}
        try:
            with Processes(jobs, folder, silence=STUCK_SECONDS, watch=watch) as processes:
                [reference] = processes.results([ONE_DEVICE])
                processes.say(list(ranks), reference["file"])
                found = processes.results(list(ranks))
        except JobError as error:
            raise ProgramFailedError(str(error), error.detail) from error
    return _verdict(plan, found, reference)


def _verdict(plan: Plan, ranks: list[dict[str, Any]], reference: dict[str, Any]) -> Verdict:
    held = worst(rank["differences"] for rank in ranks)
    steps = len(reference["losses"])
    ordered = []
    for kind, step in dict.fromkeys((("gradient", 1), ("update", 1), ("update", steps))):
        for names in reference["names"]:  # a tied parameter has several, of which a rank may hold one
            found = [held[kind, step, name] for name in names if (kind, step, name) in held]  # type: ignore[index]
            ordered += found or [_missing(kind, names[0], step)]
    dtype = plan.precision.param
    if dtype == "fp64" and plan.model.family in FOREIGN:
        dtype = "fp64, partly fp32"
    return Verdict(
        tolerances=TOLERANCES[dtype],
        losses=tuple(zip(ranks[0]["losses"], reference["losses"], strict=True)),
        norms=tuple(zip(ranks[0]["norms"], reference["norms"], strict=True)),
        differences=tuple(ordered),
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

    def __call__(self, tell: Callable[[str], None], hear: Callable[[], Any]) -> dict[str, Any]:
        import torch

        from legoai.lowering.verify.one_device import train
        from legoai.specs.models.build import build_model

        _settle(self.folder, self.directory)
        build = functools.partial(build_model, self.plan.model.source(), self.directory)
        found = train(self.plan, build, self.reads, data=self.data, steps=self.steps, seed=SEED, tell=tell)
        file = self.folder / "reference.pt"
        torch.save({name: found[name] for name in ("gradients", "updated", "trained", "rates")}, file)
        tell("done")
        return {"file": str(file), "losses": found["losses"], "norms": found["norms"], "names": found["names"]}


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank of the program."""

    rank: int
    world: int
    text: str
    data: str
    folder: Path
    steps: int
    directory: Path

    def __call__(self, tell: Callable[[str], None], hear: Callable[[], Any]) -> dict[str, Any]:
        import torch

        from legoai.lowering.verify.one_device import without_dropout
        from legoai.runtime.options import RunOptions

        _settle(self.folder, self.directory)
        tell("building")
        with _group(self.rank, self.world, self.folder / "store"):
            namespace: dict[str, Any] = {"__name__": "program"}
            exec(compile(self.text, "program.py", "exec"), namespace)
            trainer = namespace["trainer"]()
            build = trainer.build_model
            trainer = replace(trainer, build_model=lambda: without_dropout(build()), seed=SEED)
            seen = _Seen(tell, self.steps)
            options = RunOptions(
                device="cpu",
                steps=self.steps,
                data=self.data,
                log_every=0,
                on_nan="skip",
                timeout=STUCK_SECONDS / 2,
            )
            history = trainer.fit(options, observe=seen)
            trained = seen.parameters(history.training)
            tell("comparing")
            reference = torch.load(hear(), weights_only=True)
            own = {"gradients": seen.gradients, "updated": seen.updated or trained, "trained": trained}
            found = differences(own, reference)
        return {
            "losses": [record.loss for record in history.steps],
            "norms": [record.grad_norm for record in history.steps],
            "differences": found,
        }


class _Seen:
    """What a rank holds, whole and by the names of the model, as the training goes on."""

    def __init__(self, tell: Callable[[str], None], steps: int) -> None:
        self._tell = tell
        self._steps = steps
        self._step = 0
        self.gradients: dict[str, Any] = {}
        self.updated: dict[str, Any] = {}

    def __call__(self, training: Any) -> None:
        """Look at the gradients of the first step, and then at what came of them."""
        self._step += 1
        self._tell(f"step {self._step}/{self._steps}")
        if self._step == 1:
            for name, parameter in self._named(training):
                self.gradients[name] = None if parameter.grad is None else self._whole(parameter.grad)
        elif self._step == 2:
            self.updated = self.parameters(training)

    def parameters(self, training: Any) -> dict[str, Any]:
        """Every parameter that this rank holds."""
        return {name: self._whole(parameter) for name, parameter in self._named(training)}

    def _named(self, training: Any) -> Iterator[tuple[str, Any]]:
        from legoai.runtime.initialize import plain_path

        for name, parameter in training.model.named_parameters(remove_duplicate=False):
            yield plain_path(name), parameter

    def _whole(self, tensor: Any) -> Any:
        from torch.distributed.tensor import DTensor

        tensor = tensor.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.clone()  # what is replicated is its own whole, and changes in place


@contextlib.contextmanager
def _group(rank: int, world: int, store: Path) -> Iterator[None]:
    from datetime import timedelta

    import torch.distributed as dist

    os.environ["LOCAL_RANK"] = str(rank)
    timeout = timedelta(seconds=STUCK_SECONDS / 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    yield
    # The group is left to the end of the process: others may be about a collective when this rank is done.


def _settle(folder: Path, directory: Path) -> None:
    """Keep to one thread, to files in the scratch folder, and find the author's modules."""
    import torch

    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if str(directory.resolve()) not in sys.path:
        sys.path.insert(0, str(directory.resolve()))


def _import_before_the_fork(text: str) -> None:
    """Import what the program imports once, rather than on every rank, but nobody else's code."""
    if "torch.compile(" in text or ".compile(" in text:
        from legoai.runtime.torch_internals.dynamo import import_dynamo

        import_dynamo()
    for node in ast.parse(text).body:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [item.name for item in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.partition(".")[0] in ("torch", "legoai"):
                import_module(name)


def _text(plan: Plan, reads: Reads, steps: int) -> str:
    """Random text, long enough that no sequence is read twice."""
    length = plan.batch.length * (2 if isinstance(reads, TwoTexts) else 1)
    tokens = int(1.25 * length * (plan.batch.global_batch * steps + 16))
    letters = [chr(code) for code in range(32, 127)]
    return "".join(random.Random(SEED).choices(letters, k=tokens))
