"""Asynchronous checkpoints: copied to the host, and written by a thread of each rank while training continues.

Training waits only for the copy. The threads use a process group of their own, so that their collectives do not mix
with those of the training. Their exceptions are raised at the next checkpoint or at the end of the training, on every
rank.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from legoai.runtime.checkpoint.checkpoint import CheckpointMeta, State
from legoai.runtime.checkpoint.folder import Checkpoints
from legoai.runtime.process_group import talking_over

_LAST_SECONDS: Final = 30.0
"""Seconds that a checkpoint has to be finished when the training ends with an error."""


@dataclass(slots=True)
class Writing:
    """A checkpoint that is being written.

    Attributes:
        begun: start, by `time.perf_counter`.
        waited: seconds for which the training waited until it was copied.
        seconds: until it was published; 0 until then.
        path: where it is then.
        error: the reason if it could not be written.
        recorded: whether it is in the metrics.
        thread: that writes it.
    """

    step: int
    begun: float
    waited: float = 0.0
    seconds: float = 0.0
    path: Path | None = None
    error: BaseException | None = None
    recorded: bool = False
    thread: threading.Thread = field(init=False)


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time. All methods but `leave` and `written` are collective.

    Args:
        checkpoints: of the run.
        pinned: whether they are copied from a GPU to page-locked host memory.
    """

    def __init__(self, checkpoints: Checkpoints, *, pinned: bool) -> None:
        self.checkpoints = checkpoints
        self._group = dist.new_group(backend="gloo")
        options = StagingOptions(
            use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)
        self._writing: Writing | None = None

    def save(self, state: State, meta: CheckpointMeta) -> Writing | None:
        """Copy a checkpoint and begin to write it; return the one before, which is finished first.

        Raises:
            RunError: the one before could not be written.
        """
        before = self.finish()
        one = Writing(meta.step, time.perf_counter())
        staged = self._stager.stage(dict(state))
        assert isinstance(staged, dict), "staging was not asked to run beside the training"
        self._writing = one
        one.waited = time.perf_counter() - one.begun
        one.thread = threading.Thread(target=self._write, args=(one, staged, meta), name="checkpoint", daemon=True)
        one.thread.start()
        return before

    def finish(self) -> Writing | None:
        """Wait until the pending checkpoint is written, and return it; None where there is none.

        Raises:
            RunError: it could not be written.
        """
        one, self._writing = self._writing, None
        if one is not None:
            one.thread.join()
            if one.error is not None:
                raise one.error
        return one

    def written(self) -> Writing | None:
        """Return the pending checkpoint if this rank has written it; other ranks, or its error, are not waited for."""
        one = self._writing
        return one if one is not None and not one.thread.is_alive() and one.error is None else None

    def leave(self) -> None:
        """Give a pending checkpoint some time when the training ends with an error, which is raised instead."""
        if self._writing is not None:
            self._writing.thread.join(_LAST_SECONDS)

    def _write(self, one: Writing, state: dict[str, torch.Tensor], meta: CheckpointMeta) -> None:
        try:
            with talking_over(self._group):
                one.path = self.checkpoints.save(state, meta)
            one.seconds = time.perf_counter() - one.begun
        except BaseException as error:
            one.error = error
