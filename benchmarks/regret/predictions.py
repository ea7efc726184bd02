"""Predictions for many plans in one process, whose operator caches stay warm."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.validation.predict import Prediction, simulated

LONG = 512
"""Micro batches times ranks from which on the step of a pipeline is extrapolated from shorter ones."""
_BATCH = re.compile(r"^batch\s+\(global = (\d+), micro = (\d+)", re.MULTILINE)
_AXES = re.compile(r"^mesh \(([^)]*)\)", re.MULTILINE)


class Predictor:
    """Predicts plans in a process of its own, which is restarted when an answer takes too long.

    Args:
        seconds: limit for one plan.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def __call__(self, text: str) -> Prediction:
        """The prediction for a plan; a refusal if it cannot be simulated in time."""
        begun = time.perf_counter()
        if self._process is None:
            self._begin()
        assert self._pipe is not None
        answer: dict[str, Any] | str = f"no answer within {self.seconds:.0f} s"
        try:
            self._pipe.send(text)
            if self._pipe.poll(self.seconds):
                answer = self._pipe.recv()
            else:
                self.close()
        except (EOFError, BrokenPipeError):
            answer = "the process ended without an answer, probably for want of memory"
            self.close()
        took = time.perf_counter() - begun
        return Prediction(refused=answer, took=took) if isinstance(answer, str) else Prediction(**answer, took=took)

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = self._pipe = None

    def _begin(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()


def _serve(pipe: Connection) -> None:
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.suppress(EOFError):
        os.dup2(nowhere.fileno(), 2)  # torch warns of simulated process groups
        while True:
            text = pipe.recv()
            try:
                answer: dict[str, Any] | str = figures(text)
            except Exception as error:
                answer = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'without a message')}"
            pipe.send(answer)


def figures(text: str, *, long: int = LONG) -> dict[str, Any]:
    """The figures of a plan; those of a long pipeline are extrapolated from two shorter ones."""
    line = shorter(text, long=long)
    if line is None:
        return simulated(text)
    micro_batches, few, texts = line
    one, two = map(simulated, texts)
    if one.get("refused") or two.get("refused"):
        return two
    slope = (two["seconds"] - one["seconds"]) / few
    return {**two, "seconds": two["seconds"] + (micro_batches - 3 * few) * slope}


def shorter(text: str, *, long: int = LONG) -> tuple[int, int, tuple[str, str]] | None:
    """The micro batches of a long 1F1B pipeline, its ranks, and the plan with two and three times as many of them.

    Under 1F1B every further micro batch takes as long as the slowest rank needs for one, once all ranks are busy.
    """
    axes, batch = _AXES.search(text), _BATCH.search(text)
    if axes is None or batch is None or "schedule = 1F1B" not in text:
        return None
    degrees = {name: int(size) for name, size in (item.split(" = ") for item in axes[1].split(", "))}
    pp = degrees.pop("pp")
    replicas = degrees.get("dp_shard", 1) * degrees.get("dp_replicate", 1)
    sequences = int(batch[2]) * replicas
    micro_batches = int(batch[1]) // sequences
    if micro_batches * pp < long or micro_batches <= 3 * pp:
        return None
    plans = tuple(_BATCH.sub(f"batch (global = {count * pp * sequences}, micro = {batch[2]}", text) for count in (2, 3))
    return micro_batches, pp, (plans[0], plans[1])
