"""The training loop: steps, validations and checkpoints, from the newest checkpoint to the last step."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from legoai.runtime.checkpoint.folder import Checkpoints
from legoai.runtime.data.samples import Data, Stream, check_equal, open_data
from legoai.runtime.data.tokens import Bytes
from legoai.runtime.device import Device
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.launching.options import RunOptions
from legoai.runtime.launching.patience import patiently_on_first_rank
from legoai.runtime.launching.signals import StopRequest
from legoai.runtime.metrics.log import METRICS, MetricsLog, StepRecord, is_validated
from legoai.runtime.metrics.profile import profiled, trace_path, write_trace
from legoai.runtime.metrics.tensorboard import TensorBoard, check_installed
from legoai.runtime.optimizer.schedule import learning_rate, schedule_end, set_schedule_step
from legoai.runtime.parallelism.mesh import coordinate_along
from legoai.runtime.process_group import on_first_rank
from legoai.runtime.training.batches import Batches
from legoai.runtime.training.constants import mesh_of, optimizer_name
from legoai.runtime.training.first_weights import start_with_weights
from legoai.runtime.training.recipe import Recipe
from legoai.runtime.training.resume import differences, find_checkpoint, followed_already, restore
from legoai.runtime.training.saving import Saving
from legoai.runtime.training.state import Notice, StepResult, Training
from legoai.runtime.training.step import take_step
from legoai.runtime.training.validation import passes, validation_loss

KEPT_RECORDS: Final = 100_000
"""Steps of which a run keeps the records: some 40 MB on each rank. The metrics' file has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Result of a run.

    Attributes:
        steps: a record per step of this run, of a long one the last :data:`KEPT_RECORDS`, the same losses and norms on
            every rank.
        validations: (step, loss) of each validation.
        training: the objects as the last step left them.
        resumed_from: the step that this run continued from; 0 for a new one.
        stopped_by: the signal that ended the run before its last step, or None.
    """

    steps: tuple[StepRecord, ...]
    validations: tuple[tuple[int, float], ...]
    training: Training
    resumed_from: int
    stopped_by: int | None


class TrainingLoop:
    """Trains from the newest checkpoint to the last step; every rank has one."""

    def __init__(
        self,
        recipe: Recipe,
        options: RunOptions,
        training: Training,
        device: Device,
        stop: StopRequest,
        *,
        started: Callable[[], None],
        loss_of_folder: Callable[[], RunError | None],
    ) -> None:
        self.recipe = recipe
        self.options = options
        self.training = training
        self.device = device
        self.stop = stop
        self.started = started
        self.loss_of_folder = loss_of_folder
        self.step = 0
        self.updated = False
        self._stopping = False
        training.control.asked_to_stop = lambda: stop.signal is not None
        if options.on_nan == "stop":
            training.control.on_gradients.insert(0, self._check_finite)
        self.data_rank = coordinate_along(training.mesh, recipe.data_axes)
        self.data = _open_data(recipe, options)
        self.stream = self._stream(validation=False)
        if options.evaluate_every:
            self._stream(validation=True)  # raises where the data have too few samples for it
        self.records: deque[StepRecord] = deque(maxlen=KEPT_RECORDS)
        self.validations: list[tuple[int, float]] = []
        self.checkpoints = (
            Checkpoints(options.out / "checkpoints", keep=options.keep) if options.out is not None else None
        )
        self.saving = Saving(
            self.checkpoints,
            recipe,
            training,
            corpus=self.data.digest,
            asynchronous=options.save_async,
            pinned=device.type == "cuda",
        )

    def run(self) -> History:
        """Train until the last step or a stop signal, save, and return the result.

        Raises:
            RunError: a user's mistake, or a loss that is not finite under `--on-nan stop`.
        """
        self.device.reset_peak_memory()
        with self._metrics() as log, self.saving.finished_on_errors():
            for warning in self._warnings():
                log.say(f"warning: {warning}")
            if self.training.graph is not None:
                self._report(log, self.training.graph.take_notices())
            resumed_from = self._resume(log)
            saved = resumed_from
            while self.step < self.options.steps and not self._stopping:
                self._train_step(log)
                if len(self.records) == 1:
                    self.started()
                self.saving.report_written(log)
                if self._due(self.options.save_every):  # first, as a validation may take longer than a signal gives
                    saved = self._save(log)
                if self._due(self.options.evaluate_every) and not self._stopping:
                    self._validate(log)
            if self.step > saved:
                self._save(log)
            self.saving.finish(log)
            if (lost := self.loss_of_folder()) is not None:
                raise lost
            stopped_by = self._leave(log)
        return History(
            steps=tuple(self.records),
            validations=tuple(self.validations),
            training=self.training,
            resumed_from=resumed_from,
            stopped_by=stopped_by,
        )

    def _train_step(self, log: MetricsLog) -> None:
        started = time.perf_counter()
        rate = learning_rate(self.training.optimizer, self.training.scheduler)
        batches = Batches(self.training, self.stream)
        with self._profiled(log):
            result = take_step(self.recipe, self.training, batches, step=self.step)
        samples = self.recipe.global_batch_at(self.step)
        if batches.taken * self.recipe.micro_batch * self.training.degree != samples:
            raise self._wrong_count(batches.taken, samples)
        self._stopping = result.stops
        self.updated |= result.finite
        self.step += 1
        self.device.synchronize()
        seconds = time.perf_counter() - started
        rate_of_samples = samples / (seconds * dist.get_world_size())
        record = StepRecord(
            step=self.step,
            loss=result.loss,
            grad_norm=result.norm,
            lr=rate,
            samples_per_second_per_device=rate_of_samples,
            tokens_per_sample=self.recipe.seq_len,
            mfu=self.recipe.utilization(rate_of_samples * self.recipe.seq_len) if self.device.type == "cuda" else None,
            seconds=seconds,
            data_seconds=batches.seconds,
            peak_memory=self.device.peak_memory(),
            epoch=self.stream.epoch,
            skipped=not result.finite,
        )
        self.records.append(record)
        log.step(record)
        if self.training.graph is not None:
            self._report(log, self.training.graph.end_step())

    @contextlib.contextmanager
    def _profiled(self, log: MetricsLog) -> Iterator[None]:
        """Profile the step, if it is the one to be profiled. A rank that cannot write its trace says so by itself."""
        if self.options.out is None or self.step + 1 != self.options.profile_step:
            yield
            return
        path = trace_path(self.options.out, self.step + 1)
        with profiled(self.device) as found:
            yield
        try:
            write_trace(found, path)
        except OSError as error:
            log.warn(f"step {self.step + 1} could not be profiled into {path}: {error.strerror}; the training goes on")
            return
        log.event("profile", step=self.step + 1, path=str(path))
        log.say(f"step {self.step + 1} is profiled, and slower for it: {path}")

    def _report(self, log: MetricsLog, notices: Iterable[Notice]) -> None:
        for notice in notices:
            log.event(notice.event, step=self.step, **notice.values)
            for line in notice.lines:
                log.say(line)

    def _validate(self, log: MetricsLog) -> None:
        loss = validation_loss(
            self.recipe,
            self.training,
            self._stream(validation=True),
            batches=self.options.evaluate_batches,
            device=self.device,
            stop=self.stop,
        )
        if loss is None:
            self._stopping = True
            log.say(f"step {self.step}: a signal ended the validation")
            return
        self.validations.append((self.step, loss))
        log.event("validation", step=self.step, loss=loss)
        log.say(f"step {self.step}: validation loss {loss:.4f}")

    def _resume(self, log: MetricsLog) -> int:
        """Continue from a checkpoint where the options request it; return its step, or 0."""
        if self.checkpoints is not None:
            self.checkpoints.sweep()
        options, training = self.options, self.training
        if followed_already(options, self.checkpoints):
            log.say(f"note: --resume {options.resume} was followed before the restart; the run goes on where it was")
            options = replace(options, resume="auto")
        found = find_checkpoint(options, self.checkpoints, warn=lambda text: log.say(f"warning: {text}"))
        if found is None or found[1].step < self.options.steps:  # later runs follow it, so it begins with a step
            self._choose_branch(None if found is None else found[0], log, resume=options.resume)
        if found is None:
            if self.options.load_weights is not None:
                start_with_weights(self.options.load_weights, training, options, log)
            return 0
        path, meta = found
        left_out, notices = restore(path, meta, training, other_plan=self.options.resume_other_plan)
        self.step, self.stream.consumed = meta.step, meta.samples
        if training.scheduler is not None:
            set_schedule_step(training.scheduler, self.step)
        log.event("resume", step=self.step, path=str(path), left_out=left_out)
        log.say(f"resumed from {path}")
        if self.checkpoints is not None and self.step < self.options.steps:
            self.checkpoints.remove_before(path)
        notices += differences(
            meta,
            plan_hash=self.recipe.plan_hash,
            optimizer=optimizer_name(training.optimizer),
            constants=self.saving.constants,
            mesh=mesh_of(training),
            seed=training.seed,
            seq_len=self.recipe.seq_len,
            data=self.data,
            left_out=left_out,
        )
        for notice in notices:
            log.say(f"note: {notice}")
        if self.options.load_weights is not None:
            log.say(f"note: {options.load_weights} is for a new training, and this one resumes; {path} has its weights")
        if 0 < options.profile_step <= self.step:
            log.say(f"note: step {options.profile_step} is done already, and no step is profiled")
        if self.step >= self.options.steps:
            log.say(f"note: step {self.step} of {self.options.steps} is done, nothing is left; raise --steps")
        run = path.resolve().parent.parent
        validated = not self._due(self.options.evaluate_every) or on_first_rank(lambda: is_validated(run, self.step))
        if not validated:
            known = f"step {self.step} was not validated before the run ended, and"
            unknown = f"no record says that step {self.step} was validated: it"
            log.say(f"note: {unknown if validated is None else known} is now")
            self._validate(log)
        return self.step

    def _warnings(self) -> Iterator[str]:
        """Yield warnings about this run that would otherwise show only in its numbers."""
        scheduler, vocabulary = self.training.scheduler, self.recipe.vocab_size
        end = schedule_end(scheduler) if scheduler is not None else None
        if end is not None and self.options.steps > end[0]:
            after = f"stays at {end[1]:.2e}" if end[1] else "is 0, and nothing more is learnt"
            yield (
                f"the plan's schedule ends at step {end[0]}, and this run at step {self.options.steps}: after step "
                f"{end[0]} the learning rate {after}"
            )
        if self.data.left_out:
            yield f"{self.data.name} has what is not read, as it is no file of text by its name: {self.data.left_out}"
        if self.data.note:
            yield self.data.note
        profiled_step = self.options.profile_step
        if profiled_step > self.options.steps:
            yield f"--profile-step {profiled_step}: the run ends at step {self.options.steps}, and none is profiled"
        batches = self.options.evaluate_batches
        if self.options.evaluate_every and (
            (times := passes(self.training, self._stream(validation=True), batches=batches)) > 1
        ):
            yield f"a validation of {batches} micro batches of each rank reads the validation part {times:.2f} times"
        if vocabulary is not None and self.data.tokens is not None and vocabulary > 4 * self.data.tokens:
            are = "are bytes," if self.data.unit == Bytes.unit else "have"
            beyond = ", and losses say nothing about tokenized text" if self.data.unit == Bytes.unit else ""
            yield (
                f"the data {are} {self.data.tokens:,} different tokens, and the model's vocabulary has "
                f"{vocabulary:,}: most of the embedding and the logits is never used{beyond}"
            )

    def _choose_branch(self, path: Path | None, log: MetricsLog, *, resume: str) -> None:
        """Save on a branch beside newer checkpoints of another history, and replace damaged ones."""
        checkpoints = self.checkpoints
        if checkpoints is None:
            return
        auto = resume == "auto"  # auto skips only damaged checkpoints
        if checkpoints.choose_branch(path, newer_are_damaged=auto, asked=None if auto else resume):
            branch = checkpoints.branch
            log.event("branch", branch=branch, path=None if path is None else str(path))
            log.say(
                f"note: {checkpoints.root} has newer checkpoints; this run saves on branch {branch}, which "
                "--resume auto will follow"
            )

    def _save(self, log: MetricsLog) -> int:
        """Save the training; where the run's folder is lost, end, but save first unless another run has it now.

        Raises:
            RunError: the folder is lost.
        """
        lost = self.loss_of_folder()
        if lost is not None:
            with contextlib.suppress(RunError):  # of a checkpoint that was being written when the folder went
                self.saving.finish(log)
        if lost is None or lost.code == RunErrorCode.FOLDER_GONE:
            self.saving.save(log, self.step, samples=self.stream.consumed, updated=self.updated)
        if lost is not None:
            self.saving.finish(log)
            if self.checkpoints is not None and lost.code == RunErrorCode.FOLDER_GONE:
                log.say(f"note: step {self.step} is saved in {self.checkpoints.root}")
            raise lost
        return self.step

    def _leave(self, log: MetricsLog) -> int | None:
        """Report how the run ended; return the signal that ended it early, the same on every rank."""
        if not self._stopping or self.step >= self.options.steps:
            log.event("end", step=self.step)
            if self.records and dist.get_rank() == 0:
                guess, loss = self.data.ignorant_loss(self.recipe.micro_batch)
                log.say(
                    f"finished step {self.step}: loss {self.records[-1].loss:.4f} nats; {guess} would cost {loss:.4f}"
                )
            return None
        signals = torch.zeros(1, dtype=torch.int64, device=self.device.torch_device)
        signals += int(self.stop.signal or 0)
        dist.all_reduce(signals, op=dist.ReduceOp.MAX)
        number = int(signals.item())
        saved = f"saved in {self.checkpoints.root}" if self.checkpoints is not None else "not saved: no --out"
        log.event("stopped", step=self.step, signal=number)
        log.say(f"stopped by signal {number} after step {self.step}/{self.options.steps}, {saved}")
        return number

    def _metrics(self) -> MetricsLog:
        first = dist.get_rank() == 0
        board = None
        if self.options.tensorboard and self.options.out is not None:
            on_first_rank(check_installed)
            board = TensorBoard(self.options.out / "tensorboard") if first else None
        guess, ignorant = self.data.ignorant_loss(self.recipe.micro_batch) if first else ("", 0.0)
        log = MetricsLog(
            self.options.out / METRICS if first and self.options.out is not None else None,
            header={
                "plan": self.recipe.plan,
                "plan_hash": self.recipe.plan_hash,
                "torch": torch.__version__,
                "world": dist.get_world_size(),
                "local_world": int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size()),
                "device": self.device.type,
                "processor": self.device.name() if first else "",
                "data": self.data.name,
                "ignorant_loss": ignorant,
            },
            every=self.options.log_every if first else 0,
            steps=self.options.steps,
            silent=not first,
            board=board,
        )
        log.say(
            f"plan {self.recipe.plan} {self.recipe.plan_hash[:19]}: {dist.get_world_size()} x {self.device.type}, "
            f"data {self.data.name}, {self.data.size()}; {guess} costs {ignorant:.4f} nats"
        )
        return log

    def _check_finite(self, result: StepResult) -> None:
        """Raise where loss or gradient of a step is not finite."""
        if result.finite:
            return
        saved = self.checkpoints is not None and self.checkpoints.points()
        where = f"checkpoints are in {self.checkpoints.root}" if self.checkpoints and saved else "nothing was saved"
        raise RunError(
            RunErrorCode.NOT_FINITE,
            f"step {self.step + 1}: loss {result.loss}, gradient norm {result.norm}; the update was not made, {where}",
            help="lower the learning rate, clip the gradient, or pass --on-nan skip",
        )

    def _wrong_count(self, taken: int, samples: int) -> RunError:
        wanted = samples // (self.recipe.micro_batch * self.training.degree)
        return RunError(
            RunErrorCode.BATCH,
            f"the program's step takes {taken} micro batches of a rank, and a global batch of {samples} samples has "
            f"{wanted}",
            help="change micro_batches, or the ramp of Trainer"
            if self.recipe.ramp
            else "change MICRO_BATCHES, or the global_batch of Trainer",
        )

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _stream(self, *, validation: bool) -> Stream:
        return self.data.stream(
            validation=validation,
            micro_batch=self.recipe.micro_batch,
            rank=self.data_rank,
            degree=self.training.degree,
            seed=None if validation else self.training.seed,
        )


def _open_data(recipe: Recipe, options: RunOptions) -> Data:
    """Let rank 0 build a corpus; ranks on other hosts then find it, or build their own."""

    def opened(key: str = "") -> Data:
        return open_data(
            options.data,
            recipe.reads,
            seq_len=recipe.seq_len,
            dtype=recipe.master_dtype,
            field=options.data_field,
            tokenizer=options.tokenizer,
            built=key,
            vocabulary=recipe.vocab_size,
        )

    def built() -> tuple[str, str]:
        data = opened()
        return data.key, data.left_out

    key, left_out = patiently_on_first_rank("data", built)
    data = check_equal(opened(key), key)
    data.left_out = left_out
    return data
