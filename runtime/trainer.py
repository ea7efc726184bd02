"""How does a lowered program become a training?"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend

from legoai.runtime.checkpoint import model_digest
from legoai.runtime.context import Balance, check_takes_positions
from legoai.runtime.device import Device
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.initialize import cast_parameters, materialize
from legoai.runtime.kernels import attention_kernel
from legoai.runtime.loop import History, TrainingLoop
from legoai.runtime.loss import LOSSES, LossFunction, loss_function
from legoai.runtime.optim import parameter_groups
from legoai.runtime.options import RunOptions, parse_options
from legoai.runtime.process_group import process_group
from legoai.runtime.report import report_error
from legoai.runtime.signals import StopRequest
from legoai.runtime.step import Training
from legoai.specs.models.reads import ImagesWithTexts, Reads, Tokens

if TYPE_CHECKING:
    from legoai.runtime.pipeline import Pipeline, StagedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Everything that a lowered program says; `main` trains it.

    Attributes:
        plan: the plan's name.
        plan_hash: the plan's hash; in metrics and checkpoints.
        build_model: makes the model; called under `torch.device("meta")`.
        build_mesh: makes the device mesh from a device type.
        parallelize: applies tensor parallel, checkpointing, compile and data sharding to the model, and
            returns it.
        pipeline: how the model is split into stages, and their schedule; None keeps it whole. `parallelize` then
            gets each stage of a rank by itself.
        build_optimizer: makes the optimizer from parameter groups.
        build_lr_scheduler: makes the schedule from the optimizer; None keeps the optimizer's learning rate.
        data_axes: mesh axes whose ranks read different samples, outermost first.
        context_axis: mesh axis whose ranks read different tokens of the same samples, or None. The model's forward then
            has a parameter `positions`, the places of its tokens in their sequence, int64 [tokens].
        context_balance: which tokens each rank of `context_axis` reads, as `local_positions` says.
        global_batch: samples in one optimizer step.
        micro_batch: samples in one forward of one rank.
        seq_len: tokens in a sequence, and in each text of a sample; 0 where a sample has none.
        reads: what the model takes and gives.
        master_dtype: in which parameters are stored.
        autocast_dtype: of matrix products where no FSDP unit carries the mixed precision policy; None for
            none.
        attention_kernel: the only kernel of scaled dot-product attention; None leaves the choice to PyTorch.
        loss: name of the loss, one of `LOSSES`.
        loss_pieces: into which a `chunked` loss cuts the sequence.
        loss_parallel: whether logits arrive as a DTensor sharded on the vocabulary.
        reduce_gradients: after which micro batches of a step the data-parallel ranks add up their gradients.
        offload_parameters: whether parameters, gradients and optimizer state are in host memory, from which
            `fully_shard` brings them; the optimizer then runs on the host.
        clip_norm: the largest gradient norm; None clips nothing.
        weight_decay_on: `matrices` spares parameters of fewer than two dims the optimizer's weight decay.
        seed: of weights, data order and dropout.
        steps: of the whole training where the command line does not say.
    """

    plan: str
    plan_hash: str
    build_model: Callable[[], nn.Module]
    build_mesh: Callable[[str], DeviceMesh]
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module]
    build_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    build_lr_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LambdaLR] | None = None
    pipeline: Pipeline | None = None
    data_axes: tuple[str, ...] = ()
    context_axis: str | None = None
    context_balance: Balance = "head_tail"
    global_batch: int
    micro_batch: int
    seq_len: int = 0
    reads: Reads = field(default_factory=Tokens)
    master_dtype: torch.dtype = torch.float32
    autocast_dtype: torch.dtype | None = None
    attention_kernel: SDPBackend | None = None
    loss: str = "eager"
    loss_pieces: int = 1
    loss_parallel: bool = False
    reduce_gradients: Literal["every_micro_batch", "last_micro_batch"] = "every_micro_batch"
    offload_parameters: bool = False
    clip_norm: float | None = None
    weight_decay_on: Literal["all", "matrices"] = "all"
    seed: int = 0
    steps: int = 1000

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, not {self.loss!r}")

    def loss_function(self) -> LossFunction:
        """Return the loss of the model's result and the targets."""
        matches = isinstance(self.reads, ImagesWithTexts)
        return loss_function(self.loss, pieces=self.loss_pieces, matches=matches)

    def main(self, argv: Sequence[str] | None = None) -> None:
        """Read the command line and train.

        Raises:
            SystemExit: 1 after a user's mistake, 2 after wrong usage, 128 + n after signal n.
        """
        options = parse_options(argv, plan=self.plan, steps=self.steps)
        try:
            history = self.fit(options)
        except RunError as error:
            report_error(error)
            sys.exit(1)
        if history.stopped_by is not None:
            sys.exit(128 + history.stopped_by)

    def fit(self, options: RunOptions, *, observe: Callable[[Training], None] | None = None) -> History:
        """Train as the options say, in the caller's process group if there is one.

        Args:
            options: of the run.
            observe: is called on every rank in every step when the gradients are complete, before they are clipped.

        Raises:
            RunError: a user's mistake, on every rank that sees it.
        """
        device = Device.choose(options.device)
        device.activate()
        with (
            _deterministic(options.deterministic),
            attention_kernel(self.attention_kernel),
            process_group(device, timeout_seconds=options.timeout),
        ):
            training = self.prepare(device, seed=self.seed if options.seed is None else options.seed)
            with StopRequest() as stop:  # a signal before the first step ends the process as usual
                return TrainingLoop(self, options, training, device, stop, observe=observe).run()

    def prepare(self, device: Device, *, seed: int) -> Training:
        """Build mesh, model, optimizer and schedule, before the first step; the process group stands.

        Raises:
            RunError: the mesh does not fit the world, or the batch does not fit the mesh.
        """
        mesh = self._mesh(device)
        degree = 1
        for axis in self.data_axes:
            degree *= mesh[axis].size()
        if self.global_batch % (self.micro_batch * degree):
            raise RunError(
                RunErrorCode.BATCH,
                f"a global batch of {self.global_batch} samples is not a multiple of micro batch {self.micro_batch} "
                f"x data-parallel degree {degree}",
            )
        accumulation = self.global_batch // (self.micro_batch * degree)
        model = self._meta_model()
        digest = model_digest(model)
        staged = None
        if self.pipeline is None:
            model = self._parallel(model, mesh, device, seed)
        else:
            staged = self._staged(self.pipeline, model, mesh, device, seed=seed, accumulation=accumulation)
            model = staged.whole
        groups = parameter_groups(model.named_parameters(), weight_decay_on=self.weight_decay_on)
        optimizer = self.build_optimizer(groups)
        scheduler = self.build_lr_scheduler(optimizer) if self.build_lr_scheduler is not None else None
        return Training(
            model=model,
            mesh=mesh,
            optimizer=optimizer,
            scheduler=scheduler,
            degree=degree,
            accumulation=accumulation,
            seed=seed,
            digest=digest,
            staged=staged,
        )

    def _meta_model(self) -> nn.Module:
        with torch.device("meta"):
            model = self.build_model()
        if self.context_axis is not None:
            check_takes_positions(model)
        cast_parameters(model, self.master_dtype)
        return model

    def _parallel(self, model: nn.Module, mesh: DeviceMesh, device: Device, seed: int) -> nn.Module:
        model = self.parallelize(model, mesh)
        materialize(model, device=device, seed=seed, parameters_on_host=self.offload_parameters)
        return model

    def _staged(
        self, pipeline: Pipeline, whole: nn.Module, mesh: DeviceMesh, device: Device, *, seed: int, accumulation: int
    ) -> StagedModel:
        """Build the stages of this rank, each from a whole model; ``whole`` becomes the first of them."""
        from legoai.runtime.pipeline import StagedModel, keep_modules
        from legoai.runtime.stand_ins import stand_in

        if accumulation % pipeline.microbatches:
            raise RunError(
                RunErrorCode.BATCH,
                f"{accumulation} micro batches of one rank in a step are not a multiple of the "
                f"{pipeline.microbatches} of one pass of the pipeline",
            )
        pieces = 1 if self.context_axis is None else mesh[self.context_axis].size()
        tokens = (self.micro_batch, self.seq_len // pieces)
        stages = []
        for index in pipeline.stages_of_rank[mesh.get_local_rank("pp")]:
            stage = self._meta_model() if stages else whole
            if pipeline.stand_ins:
                stand_in(stage, pipeline.stages, index, tokens)
            else:
                keep_modules(stage, pipeline.stages[index])
            stage = self._parallel(stage, mesh, device, seed)
            stages.append(pipeline.build_stage(stage, index, mesh, device.torch_device))
        return StagedModel(
            pipeline,
            stages,
            loss=self.loss_function(),
            divisor=accumulation,
            autocast=None if self.autocast_dtype is None else torch.autocast(device.type, dtype=self.autocast_dtype),
        )

    def _mesh(self, device: Device) -> DeviceMesh:
        world = torch.distributed.get_world_size()
        try:
            mesh = self.build_mesh(device.type)
        except RuntimeError as error:
            larger = re.search(r"bigger than default world size \d+, but found (\d+)", str(error))
            if larger is None:
                raise
            raise _world_error("the plan's mesh", int(larger[1]), world) from error
        if mesh.size() != world:
            raise _world_error(f"the plan's mesh ({_axes(mesh)})", mesh.size(), world)
        return mesh


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Demand deterministic kernels while entered; cuBLAS reads its variable when its first handle is made."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _world_error(mesh: str, needed: int, world: int) -> RunError:
    started = "1 was started" if world == 1 else f"{world} were started"
    return RunError(
        RunErrorCode.WORLD_SIZE,
        f"{mesh} needs {needed} processes, and {started}",
        help=f"start it with torchrun --nproc-per-node {needed} on one host, or --nnodes N --nproc-per-node {needed}/N",
    )


def _axes(mesh: DeviceMesh) -> str:
    return ", ".join(f"{name} = {size}" for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
