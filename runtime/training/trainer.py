"""Trainer of a lowered program: from its description to a training."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from legoai.runtime.attention.kernel_choice import attention_kernel
from legoai.runtime.attention.positions import check_takes_positions, local_positions
from legoai.runtime.checkpoint.checkpoint import model_digest
from legoai.runtime.compiled import own_compile_cache
from legoai.runtime.device import Device
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.float8 import float8_products
from legoai.runtime.initialize import cast_parameters, materialize
from legoai.runtime.launching.attendant import attend, dismiss
from legoai.runtime.launching.failures import explained
from legoai.runtime.launching.lock import LockedFolder, locked
from legoai.runtime.launching.options import PLANNED, RunOptions, parse_options
from legoai.runtime.launching.report import report_error
from legoai.runtime.launching.signals import StopRequest, unhurried
from legoai.runtime.loss import LossFunction, of_one_tensor
from legoai.runtime.metrics.log import check_metrics
from legoai.runtime.optimizer.parameter_groups import ParameterGroups
from legoai.runtime.parallelism.mesh import coordinate_along, is_first_elsewhere
from legoai.runtime.process_group import on_first_rank, process_group, record_collectives
from legoai.runtime.published.whole_model import WholeModel
from legoai.runtime.training.batches import Batch
from legoai.runtime.training.loop import History, TrainingLoop
from legoai.runtime.training.recipe import Recipe
from legoai.runtime.training.state import Training
from legoai.specs.models.first_values import FirstValues, construct, move_to_meta
from legoai.specs.models.torch_internals import meta_device

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from legoai.runtime.parallelism.pipeline import Pipeline, StagedModel


class Trainer(Recipe):
    """Everything that a lowered program specifies; `main` trains it."""

    __slots__ = ()

    def main(self, argv: Sequence[str] | None = None) -> None:
        """Read the command line and train.

        Raises:
            SystemExit: 1 after an error, 2 after wrong usage, 128 + n after signal n.
        """
        attend()
        options = parse_options(argv, plan=self.plan, **{name: getattr(self, name) for name in PLANNED})
        try:
            history = self.fit(options)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        except (Exception, SystemExit) as error:
            with unhurried():
                told = explained(error)
            report_error(told, error)
            _leave(told)
        finally:
            dismiss()
        if history.stopped_by is not None:
            sys.exit(128 + history.stopped_by)

    def fit(
        self,
        options: RunOptions,
        *,
        observe: Callable[[Training], None] | None = None,
        prepared: Callable[[Training], None] | None = None,
    ) -> History:
        """Train according to the options, in the caller's process group if there is one.

        Args:
            options: of the run.
            observe: called on every rank in every step when the gradients are complete, before they are clipped.
            prepared: called on every rank once, before the first step.

        Raises:
            RunError: a user's mistake, on every rank that sees it.
        """
        device = Device.choose(options.device, planned=self.device_type)
        device.activate(allocator_settings=self.allocator_settings)
        flights = None if options.out is None else options.out / "flight_recorder"
        record_collectives(device, flights, entries=options.record_collectives)
        with (
            _deterministic(options.deterministic),
            attention_kernel(self.attention_kernel),
            process_group(device, timeout_seconds=options.timeout) as started,
            _run_folder(options.out) as loss_of_folder,
        ):
            training = self.prepare(device, seed=self.seed if options.seed is None else options.seed)
            if observe is not None:
                training.control.on_gradients.append(lambda _: observe(training))
            if prepared is not None:
                prepared(training)
            with own_compile_cache(training.mesh):
                stop = StopRequest()
                loop = TrainingLoop(
                    self, options, training, device, stop, started=started, loss_of_folder=loss_of_folder
                )
                with stop:  # a signal before ends the process as usual, also while a corpus is built
                    return loop.run()

    def prepare(self, device: Device, *, seed: int) -> Training:
        """Build mesh, model, optimizer and schedule before the first step, within an existing process group.

        Raises:
            RunError: the mesh does not fit the world, or the batch does not fit the mesh.
        """
        mesh = self._mesh(device)
        device.distribute_random_numbers(mesh)
        degree = 1
        for axis in self.data_axes:
            degree *= mesh[axis].size()
        uneven = [n for n in (self.global_batch, *(n for _, n in self.ramp)) if n % (self.micro_batch * degree)]
        if uneven:
            raise RunError(
                RunErrorCode.BATCH,
                f"a global batch of {uneven[0]} samples is not a multiple of micro batch {self.micro_batch} "
                f"x data-parallel degree {degree}",
            )
        accumulation = self.global_batch // (self.micro_batch * degree)
        model, first_values = self._constructed(device, seed)
        digest, whole = model_digest(model), WholeModel.of(model, self.factory)
        positions = self._positions(mesh)
        token_axes = (*self.data_axes, *(() if self.context_axis is None else (self.context_axis,)))
        random_stream = f"data rank {coordinate_along(mesh, token_axes)}"
        counts_loss, holders = is_first_elsewhere(mesh, (*token_axes, "pp")), mesh.size()
        staged = None
        if self.pipeline is None:
            model = self._parallel(model, mesh, device, seed, first_values)
            loss = self._loss(model)
        else:
            staged, loss = self._staged(
                self.pipeline,
                model,
                mesh,
                device,
                seed=seed,
                first_values=first_values,
                accumulation=accumulation,
                positions=positions,
            )
            model = staged.whole
            counts_loss, holders = counts_loss and staged.holds_last, holders // mesh["pp"].size()
            random_stream += f" stage rank {mesh.get_local_rank('pp')}"
        optimizer = self.build_optimizer(ParameterGroups(model.named_parameters()))
        if staged is not None and staged.splits_backward:
            from legoai.runtime.parallelism.pipeline import lay_out_gradients

            optimizer.register_step_pre_hook(lay_out_gradients)
        scheduler = self.build_lr_scheduler(optimizer) if self.build_lr_scheduler is not None else None
        return Training(
            model=model,
            mesh=mesh,
            device=device.torch_device,
            optimizer=optimizer,
            scheduler=scheduler,
            loss=loss,
            graph=None if self.build_graph is None else self.build_graph(model, loss, self._example(device, positions)),
            positions=positions,
            degree=degree,
            accumulation=accumulation,
            holders=holders,
            counts_loss=counts_loss,
            seed=seed,
            random_stream=random_stream,
            digest=digest,
            whole=whole,
            staged=staged,
        )

    def _example(self, device: Device, positions: torch.Tensor | None) -> Batch:
        """Return a micro batch of zeros, of which the rank reads the tokens at the given positions."""
        sizes = (self.micro_batch, self.seq_len)
        *inputs, targets = (
            torch.zeros(
                item.shape, dtype=self.master_dtype if item.floating else torch.int64, device=device.torch_device
            )
            for item in (*self.reads.inputs(*sizes), self.reads.targets(*sizes))
        )
        if positions is not None:
            inputs, targets = [item[:, positions] for item in inputs], targets[:, positions]
        return Batch(tuple(inputs), targets, positions=positions, is_last=True)

    def _positions(self, mesh: DeviceMesh) -> torch.Tensor | None:
        """Return the positions in their sequence of the tokens that this rank reads; None where it reads them all."""
        if self.context_axis is None:
            return None
        return local_positions(
            rank=mesh.get_local_rank(self.context_axis),
            size=mesh[self.context_axis].size(),
            length=self.seq_len,
            balance=self.context_balance,
        )

    def _constructed(self, device: Device, seed: int) -> tuple[nn.Module, FirstValues | None]:
        """Build the model on the meta device; return also the constructor's values, if the device holds values."""
        if not device.holds_values:
            return self._meta_model(), None
        model, first_values = construct(self.build_model, seed=seed)
        return self._prepared(model), first_values

    def _meta_model(self) -> nn.Module:
        with meta_device():
            model = self.build_model()
            move_to_meta(model)
            return self._prepared(model)

    def _prepared(self, model: nn.Module) -> nn.Module:
        if self.context_axis is not None:
            check_takes_positions(model)
        cast_parameters(model, self.master_dtype)
        return model

    def _parallel(
        self, model: nn.Module, mesh: DeviceMesh, device: Device, seed: int, first_values: FirstValues | None
    ) -> nn.Module:
        with float8_products(in_fp32=device.type == "cpu"):
            model = self.parallelize(model, mesh)
        materialize(
            model,
            device=device,
            seed=seed,
            first_values=first_values,
            parameters_on_host=self.offload_parameters,
        )
        return model

    def _staged(
        self,
        pipeline: Pipeline,
        whole: nn.Module,
        mesh: DeviceMesh,
        device: Device,
        *,
        seed: int,
        first_values: FirstValues | None,
        accumulation: int,
        positions: torch.Tensor | None,
    ) -> tuple[StagedModel, LossFunction]:
        """Build the stages of this rank, each from a whole model, and the loss; ``whole`` becomes the first stage."""
        from legoai.runtime.parallelism.pipeline import StagedModel, keep_modules
        from legoai.runtime.parallelism.placeholders import put_placeholders

        if accumulation % pipeline.microbatches:
            raise RunError(
                RunErrorCode.BATCH,
                f"{accumulation} micro batches of one rank in a step are not a multiple of the "
                f"{pipeline.microbatches} of one pass of the pipeline",
            )
        pieces = 1 if self.context_axis is None else mesh[self.context_axis].size()
        tokens = (self.micro_batch, self.seq_len // pieces)
        stages: list[PipelineStage] = []
        for index in pipeline.stages_of_rank[mesh.get_local_rank("pp")]:
            stage = self._meta_model() if stages else whole
            if pipeline.placeholders:
                put_placeholders(stage, pipeline.stages, index, tokens, results=pipeline.results, dtype=pipeline.dtype)
            else:
                keep_modules(stage, pipeline.stages[index])
            stage = self._parallel(stage, mesh, device, seed, first_values)
            stages.append(pipeline.build_stage(stage, index, mesh, device.torch_device))
        loss = self._loss(stages[-1].submod if stages[-1].is_last else None)
        staged = StagedModel(
            pipeline,
            stages,
            loss=loss,
            autocast=None if self.autocast_dtype is None else torch.autocast(device.type, dtype=self.autocast_dtype),
        )
        if positions is not None:
            staged.give_all(positions=positions.to(device.torch_device))
        return staged, loss

    def _loss(self, model: nn.Module | None) -> LossFunction:
        """Build the loss of what a model returns; None for a rank without the last stage, which computes none."""
        if self.build_model_loss is None or model is None:
            return of_one_tensor(self.build_loss())
        return of_one_tensor(self.build_model_loss(model))

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


def _leave(error: RunError) -> NoReturn:
    """End this process; at once where others are gone, for which exit handlers could wait."""
    if error.code in (RunErrorCode.NO_ANSWER, RunErrorCode.LOST_RANK):
        sys.stdout.flush()
        os._exit(1)
    sys.exit(1)


@contextlib.contextmanager
def _run_folder(folder: Path | None) -> Iterator[Callable[[], RunError | None]]:
    """Lock the folder of a run on the first rank, before anything that takes long; yield how to see whether it is lost.

    What is yielded is collective, and as `LockedFolder.loss`.

    Raises:
        RunError: another run holds the lock, or the folder or its metrics cannot be written; on every rank.
    """
    with contextlib.ExitStack() as stack:
        held: list[LockedFolder] = []

        def hold() -> None:
            assert folder is not None
            held.append(stack.enter_context(locked(folder)))
            check_metrics(folder)

        if folder is not None:
            on_first_rank(hold)
        yield lambda: None if folder is None else on_first_rank(lambda: next((one.loss() for one in held), None))


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Demand deterministic kernels while entered; cuBLAS reads its variable when its first handle is created."""
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
