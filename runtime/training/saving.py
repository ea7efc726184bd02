"""Saving of a run's checkpoints, at once or beside the training, and their records in the metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from legoai.runtime.checkpoint.checkpoint import CheckpointMeta, training_state
from legoai.runtime.checkpoint.folder import Checkpoints
from legoai.runtime.checkpoint.writer import CheckpointWriter, Writing
from legoai.runtime.metrics.log import MetricsLog
from legoai.runtime.process_group import gather_objects
from legoai.runtime.published.saved_model import recorded_config
from legoai.runtime.training.constants import constants_of, mesh_of, optimizer_name
from legoai.runtime.training.recipe import Recipe
from legoai.runtime.training.state import Training


class Saving:
    """Saves the checkpoints of one run. All methods but `report_written` and `finished_on_errors` are collective.

    Args:
        checkpoints: of the run; None where it saves none.
        recipe: of the run.
        training: what is saved.
        corpus: digest of the data.
        asynchronous: whether checkpoints are written while the training goes on.
        pinned: whether those are copied from a GPU to page-locked host memory.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        recipe: Recipe,
        training: Training,
        *,
        corpus: str,
        asynchronous: bool,
        pinned: bool,
    ) -> None:
        self.checkpoints = checkpoints
        self.recipe = recipe
        self.training = training
        self.corpus = corpus
        self.constants = constants_of(recipe, training)
        self.writer = CheckpointWriter(checkpoints, pinned=pinned) if checkpoints is not None and asynchronous else None

    def save(self, log: MetricsLog, step: int, *, samples: int, updated: bool) -> None:
        """Save the training after a step; or begin to, when the one before is finished.

        Args:
            log: of the run.
            step: that is done.
            samples: the data position.
            updated: whether this run has made an update.
        """
        if self.checkpoints is None:
            return
        started = time.perf_counter()
        training = self.training
        meta = CheckpointMeta(
            step=step,
            plan=self.recipe.plan,
            plan_hash=self.recipe.plan_hash,
            model=training.digest,
            seed=training.seed,
            samples=samples,
            corpus=self.corpus,
            world=dist.get_world_size(),
            torch=torch.__version__,
            optimizer=optimizer_name(training.optimizer),
            seq_len=self.recipe.seq_len,
            updated=any(gather_objects(updated or bool(training.optimizer.state))),
            model_class=training.whole.kind,
            model_config=recorded_config(training.whole),
            factory=training.whole.factory,
            tied=dict(training.whole.tied),
            constants=self.constants,
            mesh=mesh_of(training),
        )
        state = training_state(training.model, training.optimizer)
        if self.writer is not None:
            _record(log, self.writer.save(state, meta))
            return
        path = self.checkpoints.save(state, meta)
        log.event("checkpoint", step=step, path=str(path), seconds=time.perf_counter() - started)

    def report_written(self, log: MetricsLog) -> None:
        """Record the pending checkpoint if this rank has finished it; between two steps, as nobody waits for it."""
        if self.writer is not None:
            _record(log, self.writer.written())

    def finish(self, log: MetricsLog) -> None:
        """Wait until the pending checkpoint is written."""
        if self.writer is not None:
            _record(log, self.writer.finish())

    @contextlib.contextmanager
    def finished_on_errors(self) -> Iterator[None]:
        """Give a pending checkpoint some time where the training ends with an error."""
        try:
            yield
        except BaseException:
            if self.writer is not None:
                self.writer.leave()
            raise


def _record(log: MetricsLog, one: Writing | None) -> None:
    """Record a checkpoint that was written asynchronously, once."""
    if one is not None and not one.recorded:
        one.recorded = True
        log.event("checkpoint", step=one.step, path=str(one.path), seconds=one.seconds, waited=one.waited)
