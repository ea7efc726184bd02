"""Prediction for one plan: the fields of its estimate that are compared with a row."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.validation.statements import FIRST_FLASH_ATTENTION, FUSED_KERNELS, MEGATRON_PYTHON, OWN_PYTHON

from legoai.cost.estimate import RankEstimate
from legoai.cost.timing.timeline import call_constant
from legoai.cost.trace.marks import MICRO_BATCH
from legoai.cost.trace.records import CALLS, Kernel, Mark
from legoai.dsl.lint import lint
from legoai.specs.plan import Plan

_BATCH = re.compile(r"^batch\s+\(global = (\d+)", re.MULTILINE)
_SHORT = 5
"""Simulated micro batches of a longer step without a pipeline: all but the first and the last are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted figures of one plan, or in `refused` the reason why there are none.

    Attributes:
        refused: reason why there is no prediction; empty if there is one.
        diagnostics: codes of the linter's errors and warnings; empty for a clean plan.
        seconds: seconds of one optimizer step.
        active: peak of active bytes, by pipeline rank.
        reserved: bytes that the allocator reserves, by pipeline rank.
        outside: bytes outside PyTorch's allocator, on the rank with the highest peak.
        capacity: bytes of the device.
        categories: bytes at the highest peak of the ranks, by category.
        phase: phase of the step that contains that peak.
        exposed: seconds of exposed communication.
        recompute: seconds of recomputation.
        bubble: share of the pipeline bubble in the step.
        models: share of the operations' time, by the timing model that predicted it.
        took: seconds that the prediction took.
    """

    refused: str = ""
    diagnostics: tuple[str, ...] = ()
    seconds: float | None = None
    active: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()
    outside: int = 0
    capacity: int | None = None
    categories: dict[str, int] = field(default_factory=dict)
    phase: str = ""
    exposed: float = 0.0
    recompute: float = 0.0
    bubble: float = 0.0
    models: dict[str, float] = field(default_factory=dict)
    took: float = 0.0


def predict(text: str, *, seconds: float = 600.0, memory_only: bool = False) -> Prediction:
    """Simulate a plan in a process of its own, which is killed when it takes too long.

    Args:
        text: text of the plan.
        seconds: limit of the process's time.
        memory_only: predict no time. Kernels are not timed then, and only the first and the last rank of a pipeline are
            simulated: one has the most micro batches in flight, the other the logits.
    """
    begun = time.perf_counter()
    answer = _apart(_remembered if memory_only else simulated, text, seconds=seconds)
    if isinstance(answer, str):
        return Prediction(refused=answer, took=time.perf_counter() - begun)
    return Prediction(**{**answer, "took": time.perf_counter() - begun})


def with_memory_of(predicted: Prediction, held: Prediction) -> Prediction:
    """A prediction with the memory of another plan; without memory, if there is no prediction for that plan."""
    names = ("active", "reserved", "outside", "capacity", "categories", "phase")
    return replace(predicted, took=predicted.took + held.took, **{name: getattr(held, name) for name in names})


def shortened(text: str, plan: Plan) -> tuple[str, int] | None:
    """A plan with few micro batches in place of one with many, and the number of these; None where there are few.

    Without a pipeline, a step's micro batches between the first and the last are equal, so its time is linear in their
    number.
    """
    micro_batches, rest = divmod(plan.batch.global_batch, plan.batch.micro_batch * plan.mesh.data_parallel)
    if plan.pipeline is not None or rest or micro_batches <= _SHORT:
        return None
    return _BATCH.sub(f"batch (global = {plan.batch.global_batch * _SHORT // micro_batches}", text), micro_batches


def for_memory(text: str, plan: Plan) -> str:
    """The plan with the fewest micro batches that have the same activation peak as many.

    A rank of a pipeline of p ranks under 1F1B has at most p micro batches in flight, which it reaches within its first
    p micro batches; 2 p micro batches include all phases of a step. torch's stages also keep a receive buffer for each
    micro batch of a step, Megatron and nanotron one for each in flight; the shorter plan is close to the latter.
    Without a pipeline a step has at most five different micro batches.
    """
    micro_batches, rest = divmod(plan.batch.global_batch, plan.batch.micro_batch * plan.mesh.data_parallel)
    enough = _SHORT if plan.pipeline is None else max(_SHORT, 2 * plan.mesh.pp)
    if rest or micro_batches <= enough:
        return text
    return _BATCH.sub(f"batch (global = {plan.batch.global_batch * enough // micro_batches}", text)


def _linted(text: str) -> tuple[Plan | None, dict[str, Any]]:
    """The plan, if it has no errors, and the linter's diagnostics, as fields of a prediction."""
    linted = lint(text, "row.plan", directory=Path(tempfile.gettempdir()), variants=False)
    diagnostics = tuple(
        sorted({f"{item.severity} {item.code}" for item in linted.diagnostics if item.severity != "advice"})
    )
    if linted.has_errors or linted.plan is None:
        errors = [f"{item.code} {item.message}" for item in linted.diagnostics if item.severity == "error"]
        return None, {"refused": "lint: " + "; ".join(errors), "diagnostics": diagnostics}
    return linted.plan, {"diagnostics": diagnostics}


def simulated(text: str) -> dict[str, Any]:
    """Lint, lower and simulate a plan."""
    plan, found = _linted(text)
    if plan is None:
        return found
    short = shortened(text, plan)
    return {**(_cost(text) if short is None else _cost(*short)), **found}


def _remembered(text: str) -> dict[str, Any]:
    """Lint and lower a plan, and follow the memory of its first rank, and of the last of a pipeline."""
    plan, found = _linted(text)
    if plan is None:
        return found
    from legoai.api import load, lower
    from legoai.cost.capture import capture
    from legoai.cost.machine.cluster import machine_of
    from legoai.cost.memory.storages import memory
    from legoai.cost.memory.use import memory_use

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.plan"
        path.write_text(for_memory(text, plan), encoding="utf-8")
        plan, program = load(path), lower(path)
    world, places = plan.mesh.world_size, plan.mesh.pp
    machine = machine_of(plan.cluster, world, directory=Path())
    looked_at = []
    for place in dict.fromkeys((0, places - 1)):
        trace = capture(program.text, world=world, rank=place * (world // places), gpu=machine.device)
        looked_at.append((memory(trace), memory_use(trace, machine)))
    fullest = max((report for report, _ in looked_at), key=lambda report: report.peak)
    return {
        **found,
        "active": tuple(report.peak for report, _ in looked_at),
        "reserved": tuple(use.reserved for _, use in looked_at),
        "outside": max(sum(use.outside.values()) for _, use in looked_at),
        "capacity": looked_at[0][1].capacity,
        "categories": dict(fullest.by_category),
        "phase": fullest.peak_phase,
    }


def _megatron_python() -> tuple[float, float]:
    """Host time of a layer of Megatron-DeepSpeed over that of its kernels, in forward and in backward.

    Of one rank: what its layers take longer on several ranks, 14% on two and 25% on eight, is less than what the
    operations add that a tensor parallel plan has in addition.
    """
    rows = json.loads((Path(__file__).parents[1] / "results" / "megatron_host.json").read_text("utf-8"))["rows"]
    [alone] = (row for row in rows if row["ranks"] == 1)
    return alone["forward_ratio"], alone["backward_ratio"]


def _profile(text: str, folder: Path) -> str | None:
    """Write the profile of a plan's device with the kernels that lines of the plan state, if there are any.

    Fused norms, rotations and casts run at the rate of an addition, and products by groups at that of Transformer
    Engine's. The first FlashAttention has a curve of its own where it was measured, on the H100; of its clock in a step
    nothing is known.
    """
    from legoai.cost.profiles import read_document, shipped_file, write_document

    device = re.search(r"^cluster (\w+)", text, re.MULTILINE)
    fused, first, own = FUSED_KERNELS in text, FIRST_FLASH_ATTENTION in text, OWN_PYTHON in text
    if device is None or not (fused or first or own):
        return None
    document, _ = read_document(shipped_file(device[1]))
    document.pop("format")
    curves, attention, constants = document["movement"], document["attention"], document["constants"]
    if fused:
        for name in ("unvectorised", "copy unvectorised", "normalisation backward"):
            curves.pop(name)
        curves["normalisation"] = curves["elementwise"]
        if "derived" in document["products"].get("bf16 grouped", {}):  # from the times of Transformer Engine's kernels
            document["products"]["bf16 grouped"]["scale"] = 1.0
    if own:
        constants["recompute_seconds"] = constants["python_seconds"]
        calls = map(call_constant, CALLS)
        for name in ("policy_seconds", "policy_recompute_seconds", *calls):
            constants.pop(name)
    if MEGATRON_PYTHON in text:
        forward, backward = _megatron_python()
        for name, ratio in (
            ("python_seconds", forward), ("recompute_seconds", backward), ("dispatch_seconds", backward),
            ("function_seconds", backward),
        ):  # fmt: skip
            constants[name] = {**constants[name], "value": ratio * constants[name]["value"]}
    if first and "flash1 forward bf16" in attention:
        for direction in ("forward", "backward"):
            attention[f"efficient {direction} bf16"] = attention[f"flash1 {direction} bf16"]
        constants.pop("attention_slowdown")
    path = folder / f"{device[1]}.json.gz"
    write_document(path, document)
    return str(path)


def _cost(text: str, micro_batches: int | None = None) -> dict[str, Any]:
    """The figures of an estimate that are stored; for a shortened plan, its times for as many micro batches."""
    from legoai.api import estimate

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.plan"
        path.write_text(text, encoding="utf-8")
        found = estimate(path, profile=_profile(text, Path(folder)))
    fullest = found.fullest
    seconds, longer = found.step_time, 1.0
    if micro_batches is not None:
        seconds += (micro_batches - _SHORT) * period(fullest)
        longer = micro_batches / _SHORT
    return {
        "seconds": seconds,
        "active": tuple(item.memory.peak for item in found.ranks),
        "reserved": tuple(item.use.reserved for item in found.ranks),
        "outside": max(sum(item.use.outside.values()) for item in found.ranks),
        "capacity": fullest.use.capacity,
        "categories": dict(fullest.memory.by_category),
        "phase": fullest.memory.peak_phase,
        "exposed": found.exposed_communication * longer,
        "recompute": found.recompute * longer,
        "bubble": found.bubble_fraction,
        "models": dict(found.share_by_model),
    }


def period(rank: RankEstimate) -> float:
    """Seconds from the first kernel of one micro batch to that of the next, of the last two of a step."""
    kernels, begins = 0, []
    for record in rank.trace.records[rank.span.start : rank.span.stop]:
        if isinstance(record, Mark) and record.name.startswith(MICRO_BATCH):
            begins.append(kernels)
        kernels += isinstance(record, Kernel) and record.stream == 0
    starts = [item.start for item in rank.intervals if isinstance(item.record, Kernel) and item.record.stream == 0]
    assert len(starts) == kernels, "a stream runs its kernels in their order"
    return starts[begins[-1]] - starts[begins[-2]]


def _apart(function: Callable[[str], dict[str, Any]], text: str, *, seconds: float) -> dict[str, Any] | str:
    """Call a function in a forked process; a sentence in place of its result if it fails or takes too long."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, text), daemon=False)
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return f"no answer within {seconds:.0f} s"
        return ours.recv()
    except EOFError:
        return "the process ended without an answer, probably for want of memory"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # with those that it has forked for ranks of a pipeline
        process.kill()
        process.join()
        ours.close()


def _answer(pipe: Connection, function: Callable[[str], dict[str, Any]], text: str) -> None:
    os.setpgid(0, 0)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            answer: dict[str, Any] | str = function(text)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        answer = f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"
    pipe.send(answer)


def as_json(prediction: Prediction) -> dict[str, Any]:
    """A prediction as JSON values."""
    return json.loads(json.dumps(asdict(prediction)))
