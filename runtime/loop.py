"""What happens in a training, step by step?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from legoai.runtime.checkpoint import CheckpointMeta, Checkpoints, training_state
from legoai.runtime.device import Device
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.loss import local_value, loss_context
from legoai.runtime.metrics import MetricsLog, StepRecord
from legoai.runtime.optim import set_schedule_step
from legoai.runtime.options import RunOptions
from legoai.runtime.process_group import on_first_rank, sum_over_world
from legoai.runtime.resume import differences, find_checkpoint, restore
from legoai.runtime.samples import Data, Stream, open_data
from legoai.runtime.signals import StopRequest
from legoai.runtime.step import OptimizerStep, Training, rank_along
from legoai.runtime.units import reshard_units

if TYPE_CHECKING:
    from legoai.runtime.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a run did.

    Attributes:
        steps: a record per step of this run, the same losses and norms on every rank.
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
        trainer: Trainer,
        options: RunOptions,
        training: Training,
        device: Device,
        stop: StopRequest,
        *,
        observe: Callable[[Training], None] | None = None,
    ) -> None:
        self.trainer = trainer
        self.options = options
        self.training = training
        self.device = device
        self.stop = stop
        self.step = 0
        self.optimizer_step = OptimizerStep(trainer, training, device, observe=observe)
        self.data_rank = rank_along(training.mesh, trainer.data_axes)
        self.data = _open_data(trainer, options)
        self.stream = self._stream(validation=False)
        self.records: list[StepRecord] = []
        self.validations: list[tuple[int, float]] = []
        self.checkpoints = (
            Checkpoints(options.out / "checkpoints", keep=options.keep) if options.out is not None else None
        )

    def run(self) -> History:
        """Train until the last step or a stop signal, save, and return what was done.

        Raises:
            RunError: a user's mistake, or a loss that is not finite under `--on-nan stop`.
        """
        self.device.reset_peak_memory()
        with self._metrics() as log:
            resumed_from = self._resume(log)
            saved = resumed_from
            while self.step < self.options.steps and not self._stopping:
                self._train_step(log)
                if self._due(self.options.validate_every):
                    self._validate(log)
                if self._due(self.options.checkpoint_every):
                    saved = self._save(log)
            if self.step > saved:
                self._save(log)
            stopped_by = self._leave(log)
        return History(
            steps=tuple(self.records),
            validations=tuple(self.validations),
            training=self.training,
            resumed_from=resumed_from,
            stopped_by=stopped_by,
        )

    _stopping = False

    def _train_step(self, log: MetricsLog) -> None:
        started = time.perf_counter()
        gradient = self.optimizer_step.gradient(self.step, self.stream, stop=self.stop.signal is not None)
        self._stopping = gradient.stops
        if not gradient.finite and self.options.on_nan == "stop":
            raise self._not_finite(gradient.loss, gradient.norm)
        rate = float(self.training.optimizer.param_groups[0]["lr"])
        self.optimizer_step.update(gradient, step=self.step)
        self.step += 1
        self.device.synchronize()
        seconds = time.perf_counter() - started
        record = StepRecord(
            step=self.step,
            loss=gradient.loss,
            grad_norm=gradient.norm,
            lr=rate,
            samples_per_second_per_device=self.trainer.global_batch / (seconds * dist.get_world_size()),
            tokens_per_sample=self.trainer.seq_len,
            seconds=seconds,
            data_seconds=gradient.data_seconds,
            peak_memory=self.device.peak_memory(),
            epoch=self.stream.epoch,
            skipped=not gradient.finite,
        )
        self.records.append(record)
        log.step(record)

    @torch.no_grad()
    def _validate(self, log: MetricsLog) -> None:
        stream = self._stream(validation=True)
        for part in self.training.parts:
            part.eval()
        total, count = self._validation_loss(stream)
        for part in self.training.parts:
            part.train()
        reshard_units(self.optimizer_step.units)  # no backward does it for units that stay gathered after forward
        values = torch.stack([total / count, torch.ones_like(total)])
        summed, ranks = sum_over_world(values if self.optimizer_step.counts_loss else torch.zeros_like(values))
        self.validations.append((self.step, summed / ranks))
        log.event("validation", step=self.step, loss=summed / ranks)
        log.say(f"step {self.step}: validation loss {summed / ranks:.4f}")

    def _validation_loss(self, stream: Stream) -> tuple[torch.Tensor, int]:
        """Return the sum of the micro batches' losses, and their number: whole passes where there is a pipeline."""
        total = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
        staged, wanted, step = self.training.staged, self.options.validate_batches, self.optimizer_step
        if staged is not None:
            passes = -(-wanted // staged.microbatches)
            for _ in range(passes):
                batch = step.next_pass(staged, stream)
                with loss_context(parallel=self.trainer.loss_parallel):
                    for loss in staged.evaluate_pass(*batch):
                        total += local_value(loss)
            return total, passes * staged.microbatches
        for _ in range(wanted):
            inputs, targets = step.next_batch(stream)
            with loss_context(parallel=self.trainer.loss_parallel), step.autocast:
                total += local_value(step.loss(step.outputs(inputs), targets))
        return total, wanted

    def _resume(self, log: MetricsLog) -> int:
        """Continue from a checkpoint where the options say so; return its step, or 0."""
        found = find_checkpoint(self.options, self.checkpoints, warn=lambda text: log.say(f"warning: {text}"))
        if found is None:
            return 0
        path, meta = found
        training = self.training
        left_out = restore(path, meta, training, other_plan=self.options.resume_other_plan)
        self.step, self.stream.consumed = meta.step, meta.samples
        if training.scheduler is not None:
            set_schedule_step(training.scheduler, self.step)
        log.event("resume", step=self.step, path=str(path), left_out=left_out)
        log.say(f"resumed from {path}")
        for notice in differences(
            meta,
            plan_hash=self.trainer.plan_hash,
            seed=training.seed,
            data=self.data,
            left_out=left_out,
        ):
            log.say(f"note: {notice}")
        if self.step >= self.options.steps:
            log.say(f"note: step {self.step} of {self.options.steps} is done, nothing is left; raise --steps")
        return self.step

    def _save(self, log: MetricsLog) -> int:
        if self.checkpoints is None:
            return self.step
        started = time.perf_counter()
        training = self.training
        meta = CheckpointMeta(
            step=self.step,
            plan=self.trainer.plan,
            plan_hash=self.trainer.plan_hash,
            model=training.digest,
            seed=training.seed,
            samples=self.stream.consumed,
            corpus=self.data.digest,
            world=dist.get_world_size(),
            torch=torch.__version__,
        )
        path = self.checkpoints.save(training_state(training.model, training.optimizer), meta)
        log.event("checkpoint", step=self.step, path=str(path), seconds=time.perf_counter() - started)
        return self.step

    def _leave(self, log: MetricsLog) -> int | None:
        """Tell how the run ended; return the signal that ended it early, the same on every rank."""
        if not self._stopping or self.step >= self.options.steps:
            log.event("end", step=self.step)
            if self.records and dist.get_rank() == 0:
                guess, loss = self.data.ignorant_loss(self.trainer.micro_batch)
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
        guess, ignorant = self.data.ignorant_loss(self.trainer.micro_batch) if first else ("", 0.0)
        log = MetricsLog(
            self.options.out / "metrics.jsonl" if first and self.options.out is not None else None,
            header={
                "plan": self.trainer.plan,
                "plan_hash": self.trainer.plan_hash,
                "torch": torch.__version__,
                "world": dist.get_world_size(),
                "data": self.data.name,
                "ignorant_loss": ignorant,
            },
            every=self.options.log_every if first else 0,
            steps=self.options.steps,
            silent=not first,
        )
        log.say(
            f"plan {self.trainer.plan} {self.trainer.plan_hash[:19]}: {dist.get_world_size()} x {self.device.type}, "
            f"data {self.data.name}, {self.data.size()}; {guess} costs {ignorant:.4f} nats"
        )
        return log

    def _not_finite(self, loss: float, norm: float) -> RunError:
        where = f"checkpoints are in {self.checkpoints.root}" if self.checkpoints is not None else "nothing was saved"
        return RunError(
            RunErrorCode.NOT_FINITE,
            f"step {self.step + 1}: loss {loss}, gradient norm {norm}; the update was not made, {where}",
            help="lower the learning rate, clip the gradient, or pass --on-nan skip",
        )

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _stream(self, *, validation: bool) -> Stream:
        return self.data.stream(
            validation=validation,
            micro_batch=self.trainer.micro_batch,
            rank=self.data_rank,
            degree=self.training.degree,
            seed=None if validation else self.training.seed,
        )


def _open_data(trainer: Trainer, options: RunOptions) -> Data:
    """Let rank 0 build a corpus; ranks of other hosts then find it, or build their own."""

    def opened() -> Data:
        return open_data(
            options.data,
            trainer.reads,
            seq_len=trainer.seq_len,
            dtype=trainer.master_dtype,
            field=options.data_field,
        )

    on_first_rank(lambda: opened().digest)
    return opened()
