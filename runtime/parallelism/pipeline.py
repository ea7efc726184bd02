"""Pipeline stages of one rank, and the schedule that runs them.

A stage is the whole model without the modules of the other stages, so that every module and parameter keeps its name.
The order in which micro batches pass the stages is one of the schedules of `torch.distributed.pipelining`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import GraphExecGroup

from legoai.runtime.loss import LossFunction
from legoai.runtime.parallelism.placeholders import held_children
from legoai.runtime.torch_internals.distributed.pipelining import Action, ComputationType, PipelineScheduleRuntime
from legoai.runtime.torch_internals.patching import patched_attribute
from legoai.runtime.wrapped import local_part


class RecomputingStage(PipelineStage):
    """A stage with split backward that recomputes each module twice only.

    torch computes the gradients of the weights by a backward for each layer, which would recompute the module that
    holds the layer each time. Here a module is recomputed once for all of them, from the last to the first, so that
    recomputed tensors are freed with the nodes that read them before the next module is recomputed.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """As torch's own."""
        if backward_type != "weight":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        backwards = {**bwd_kwargs, "param_groups": bwd_kwargs["param_groups"][::-1]}
        with GraphExecGroup():
            return super().backward_maybe_with_nosync(backward_type, backwards, last_backward)


class PipelineSchedule(Protocol):
    """Common interface of the schedules of `torch.distributed.pipelining`."""

    def step(
        self, *args: torch.Tensor, target: torch.Tensor | None, losses: list[torch.Tensor], return_outputs: bool
    ) -> Any:
        """Forward and backward of all micro batches."""

    def eval(
        self, *args: torch.Tensor, target: torch.Tensor | None, losses: list[torch.Tensor], return_outputs: bool
    ) -> Any:
        """Forward of all micro batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Description of a pipeline from a lowered program.

    Attributes:
        stages: the modules that each stage holds, in the model's order.
        stages_of_rank: the stages that each rank of `pp` holds, ascending.
        microbatches: micro batches in one pass of the schedule.
        build_stage: builds torch's stage from the stage's parallelized module, its index, the mesh and the device.
        build_schedule: builds the schedule from this rank's stages and the loss of one micro batch.
        placeholders: whether the model's forward calls the modules of all stages, so that placeholders replace those of
            other ranks; if not, it skips missing modules.
        results: shapes of modules of earlier stages that return something laid out otherwise than what crosses.
        dtype: to which stages with placeholders cast what crosses; None where that has one dtype anyway.
    """

    stages: tuple[tuple[str, ...], ...]
    stages_of_rank: tuple[tuple[int, ...], ...]
    microbatches: int
    build_stage: Callable[[nn.Module, int, DeviceMesh, torch.device], PipelineStage]
    build_schedule: Callable[[list[PipelineStage], LossFunction], PipelineSchedule]
    placeholders: bool = False
    results: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtype: torch.dtype | None = None


def keep_modules(model: nn.Module, kept: Sequence[str]) -> None:
    """Remove every module from a model that neither is among `kept`, nor contains or is contained in one of these.

    Modules in a list or dictionary are removed with their names; other modules are replaced by None, which the forward
    of LegoAI's models skips.

    Args:
        model: changed in place.
        kept: paths as `named_modules()` prints them.
    """
    _keep(model, frozenset(kept), "")


def _keep(module: nn.Module, kept: frozenset[str], path: str) -> None:
    for name, child in list(module.named_children()):
        below = f"{path}.{name}" if path else name
        if below in kept:
            continue
        if any(other.startswith(f"{below}.") for other in kept):
            _keep(child, kept, below)
        elif isinstance(child, nn.ModuleDict | nn.ModuleList):
            child._modules.clear()
        elif isinstance(module, nn.ModuleDict | nn.ModuleList):
            del module._modules[name]
        else:
            setattr(module, name, None)


class StagesOfRank(nn.Module):
    """The stages of one rank as one module, with the names of the full model.

    It is not called; optimizer and checkpoints find parameters by it.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        names = dict.fromkeys(name for stage in stages for name, _ in held_children(stage))
        for name in names:
            held = [child for stage in stages for other, child in held_children(stage) if other == name]
            self.add_module(name, held[0] if len(held) == 1 else StagesOfRank(held))


class StagedModel:
    """The stages of this rank, with the schedule that runs them together with those of other ranks.

    Args:
        pipeline: from the program.
        stages: of this rank, ascending.
        loss: the mean loss of one micro batch, of the last stage's output and the targets.
        autocast: entered for the forward of a stage and for the loss, but not for their backward; None for none.

    Attributes:
        splits_backward: whether a rank computes the gradients of inputs and of weights separately.
        given: keyword arguments of every stage's forward, besides what stages pass on.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stages: list[PipelineStage],
        *,
        loss: LossFunction,
        autocast: torch.autocast | None = None,
    ) -> None:
        self.microbatches = pipeline.microbatches
        self.modules = [stage.submod for stage in stages]
        self.holds_first = any(stage.is_first for stage in stages)
        self.holds_last = any(stage.is_last for stage in stages)
        if autocast is not None:
            loss = autocast(loss)
            for module in self.modules:
                module.forward = autocast(module.forward)
        self.schedule = pipeline.build_schedule(stages, loss)
        self.splits_backward = _splits_backward(self.schedule)
        if self.splits_backward:
            for stage in stages:
                if not stage.is_last:  # whose loss is what is detached
                    stage.submod.register_forward_hook(_detachable)
        self.given: dict[str, torch.Tensor] = {}

    def give_all(self, **arguments: torch.Tensor) -> None:
        """Pass these arguments, such as positions, to the forward of every stage for every micro batch."""

        def add(
            module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return positional, {**keywords, **arguments}

        self.given |= arguments
        for module in self.modules:
            module.register_forward_pre_hook(add, with_kwargs=True)

    @property
    def whole(self) -> nn.Module:
        """All modules of this rank, with the names of the full model."""
        return self.modules[0] if len(self.modules) == 1 else StagesOfRank(self.modules)

    def evaluate_pass(self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None) -> list[torch.Tensor]:
        """Run the forward of one pass.

        Args:
            inputs: [micro batches * micro batch, sequence] where the first stage is, else none.
            targets: the same shape where the last stage is, else None.

        Returns:
            The loss of each micro batch as the schedule computes it where the last stage is, else nothing.
        """
        losses: list[torch.Tensor] = []
        with _forward_only(self.schedule):
            self.schedule.eval(*inputs, target=targets, losses=losses, return_outputs=False)
        return losses


def _splits_backward(schedule: PipelineSchedule) -> bool:
    """Whether a rank computes the gradients of inputs and of weights separately."""
    return isinstance(schedule, PipelineScheduleRuntime) and any(
        part.computation_type is ComputationType.BACKWARD_INPUT
        for actions in schedule.pipeline_order_with_comms.values()
        for action in actions
        for part in action.sub_actions or (action,)
    )


def lay_out_gradients(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
    """Hook before an optimizer's step that gives gradients the strides of their parameters.

    Autograd does so where it accumulates gradients. With split backward torch keeps those of weights as they were
    computed, transposed for instance, and a fused optimizer goes through both in the order of memory.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and local_part(gradient).stride() != local_part(parameter).stride():
                parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _detachable(module: nn.Module, given: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Forward hook that returns a stage's output as a tensor that can be detached in place, which a view cannot.

    torch detaches the output where it has computed the gradients of the stage's input alone.
    """
    if not output._is_view():
        return output
    made: torch.Tensor = _NoView.apply(output)  # type: ignore[no-untyped-call]
    return made


class _NoView(torch.autograd.Function):
    """The same elements, as a tensor that autograd does not know as a view of another."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


@contextlib.contextmanager
def _forward_only(schedule: PipelineSchedule) -> Iterator[None]:
    """Leave everything but forward out of an order of actions while entered.

    `eval` of torch 2.13 passes over backward itself, but for schedules in which neighbouring stages are on one rank.
    """
    if not isinstance(schedule, PipelineScheduleRuntime):
        yield
        return
    forward = {
        rank: [part for action in actions for part in (action.sub_actions or (action,)) if _is_forward(part)]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }
    with patched_attribute(schedule, "pipeline_order_with_comms", forward):
        yield


_FORWARD = frozenset(
    {
        ComputationType.FORWARD,
        ComputationType.SEND_F,
        ComputationType.RECV_F,
        ComputationType.UNSHARD,
        ComputationType.RESHARD,
    }
)


def _is_forward(action: Action) -> bool:
    return action.computation_type in _FORWARD


def ordered_schedule(
    order: Sequence[Sequence[str]],
    stages: list[PipelineStage],
    *,
    n_microbatches: int,
    loss_fn: LossFunction,
    scale_grads: bool,
) -> PipelineSchedule:
    """Return a schedule that executes given actions on each rank, as an order file lists them.

    Args:
        order: for each rank of `pp` its actions (`2F0`, `0B3`, `1I2`), separated by spaces, in any number of strings.
            An order that names a send or receive must name all of them, and every UNSHARD and RESHARD; otherwise they
            are added.
        stages: of this rank.
        n_microbatches: micro batches in one pass.
        loss_fn: of one micro batch.
        scale_grads: whether gradients are divided by the number of micro batches.
    """
    actions = {
        rank: [Action.from_str(text) for piece in pieces for text in piece.split()] for rank, pieces in enumerate(order)
    }
    explicit = any(not action.is_compute_op for row in actions.values() for action in row)
    options = {"n_microbatches": n_microbatches, "loss_fn": loss_fn, "scale_grads": scale_grads}
    schedule = PipelineScheduleRuntime(stages, **options)  # type: ignore[no-untyped-call]
    schedule._prepare_schedule_with_comms(actions, format="compute_comms" if explicit else "compute_only")
    return schedule
