"""Pipeline stage whose actions are graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from legoai.lowering.graph.step.sharding import padded_shard
from legoai.lowering.graph.step.split import actions_of
from legoai.lowering.graph.step.step_graph import Runner, StepGraph, add_gradients


class GraphStage(PipelineStage):
    """A stage that runs the graph of each action.

    Args:
        graph: of the stage, after its passes.
        arguments: of torch's stage, after the module.
        options: of torch's stage.
    """

    def __init__(self, graph: StepGraph, *arguments: Any, **options: Any) -> None:
        module = StageModule(graph)
        if graph.splits_backward:
            options["dw_builder"] = module.take_weight_backward
        super().__init__(module, *arguments, **options)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients of a pass, after its last backward."""
        assert isinstance(self.submod, StageModule)
        self.submod.reduce_gradients()
        super().perform_reduce_grad(grad_scale_factor)


class StageModule(nn.Module):
    """The modules of a stage under their names, whose forward and backward run graphs.

    Validation calls the modules themselves: it needs no gradients, and forward's graph would keep tensors for backward.

    Attributes:
        graphs: of its actions.
        on_node: callbacks that receive each node before it runs.
        on_sum: callbacks that receive each unsharded gradient to which later micro batches add, with the input of the
            reduction that reads it.
    """

    def __init__(self, graph: StepGraph) -> None:
        super().__init__()
        for name, child in graph.model.named_children():
            self.add_module(name, child)
        for name, buffer in graph.model.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=False)  # a decoder's buffers follow from its sizes
        assert not list(graph.model.named_parameters(recurse=False)), "the modules of a decoder hold its parameters"
        self.on_node: list[Callable[[fx.Node], None]] = []
        self.on_sum: list[Callable[[fx.Node, torch.Tensor], None]] = []
        self._whole: Callable[..., torch.Tensor] = graph.model.__call__
        self.graphs = actions_of(graph)
        self._output_spec = graph.output_spec
        self._needs_gradient = torch.empty(0, requires_grad=True)
        self._kept: list[torch.Tensor] | None = None
        self._sums: list[torch.Tensor] = []
        self._left: list[torch.Tensor] = []
        self._gives = len(graph.outputs()) - 1 - len(graph.trained)

    def forward(self, arrived: torch.Tensor, **placed: torch.Tensor) -> torch.Tensor:
        """Return the next stage's input, or the logits.

        Args:
            arrived: the stage's input.
            placed: `positions`, of the tokens in their sequence, where the model takes them.
        """
        if not torch.is_grad_enabled():
            return self._whole(arrived, **placed)
        given = arrived, *placed.values()
        output: torch.Tensor = _MicroBatch.apply(self, self._needs_gradient, *given)  # type: ignore[no-untyped-call]
        return output

    def run_forward(self, *arrived: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the output of a micro batch, and what its backward needs; the first of a pass gathers parameters."""
        graphs = self.graphs
        if self._kept is None:
            output, *left = self._run(graphs.forward, [*self._shards(), *self.buffers(), *arrived])
            saved = len(left) - graphs.kept
            self._kept = left[saved:]
            del left[saved:]
        else:
            given = [*self._shards(), *self.buffers(), *arrived, *self._kept]
            output, *left = self._run(graphs.later_forward, given)
        return output, [value.detach() if value is output else value for value in left]

    def run_backward(self, gradient: torch.Tensor, saved: list[torch.Tensor]) -> torch.Tensor | None:
        """Return the gradient of the stage's input, and accumulate those of the gathered parameters.

        Where a schedule splits backward, the latter is left to the function that :meth:`take_weight_backward` returns.

        Args:
            gradient: of the output.
            saved: the tensors that forward has saved, which are removed from the list.
        """
        given, graphs = [*self._there(), gradient, *saved], self.graphs
        saved.clear()
        if graphs.input_backward is not None:
            made = self._run(graphs.input_backward, given)
            self._left = made[self._gives :]
        else:
            made = self._add_up(graphs.backward, graphs.later_backward, given)
        return made[0] if self._gives else None

    def take_weight_backward(self) -> Callable[[], None]:
        """Return a function that accumulates the weight gradients of the micro batch whose backward ran last."""
        left, self._left = self._left, []

        def run() -> None:
            given = [*self._there(), *left]
            left.clear()
            with torch.no_grad():
                self._add_up(self.graphs.weight_backward, self.graphs.later_weight_backward, given)

        return run

    def _there(self) -> list[torch.Tensor]:
        """Return the inputs that all parts of backward share."""
        assert self._kept is not None, "backward comes behind forward"
        return [*self._shards(), *self.buffers(), *self._kept]

    def _add_up(
        self, first: fx.GraphModule | None, later: fx.GraphModule | None, given: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run the graph that creates sums or, if there are some, that which adds to them; return the other results."""
        assert first is not None and later is not None, "the graphs of this stage's schedule"
        if self._sums:
            given += self._sums
            return self._run(later, given)
        made = self._run(first, given)
        inputs = self.graphs.reduction.graph.find_nodes(op="placeholder")
        count = len(made) - len(inputs)
        made, self._sums = made[:count], list(made[count:])
        for look in self.on_sum:
            for node, value in zip(inputs, self._sums, strict=True):
                look(node, value)
        return made

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Free the gathered parameters, and reduce the gradients of a pass, if there are any."""
        self._kept = None
        given, self._sums = self._sums, []
        if not given:
            return
        add_gradients(self, self._run(self.graphs.reduction, given))

    def _shards(self) -> list[torch.Tensor]:
        return [padded_shard(parameter) for parameter in self.parameters() if isinstance(parameter, DTensor)]

    def _run(self, module: fx.GraphModule, given: list[Any]) -> list[torch.Tensor]:
        """Run a graph, which removes its inputs from the list."""
        made: list[torch.Tensor] = Runner(module, self.on_node).boxed_run(given)
        return made

    def as_output(self, local: torch.Tensor) -> torch.Tensor:
        """Return a local output as the modules return it."""
        if self._output_spec is None:
            return local
        return DTensor(local, self._output_spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of an output as the graph reads it."""
        if not isinstance(gradient, DTensor):
            return gradient
        assert self._output_spec is not None, "a gradient is laid out as its output"
        return gradient.redistribute(placements=self._output_spec.placements).to_local()


class _MicroBatch(torch.autograd.Function):
    """Forward and backward of a micro batch through a stage."""

    @staticmethod
    def forward(ctx: Any, stage: StageModule, _: torch.Tensor, *arrived: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        output, ctx.saved = stage.run_forward(*(item.detach() for item in arrived))
        ctx.stage, ctx.positions = stage, len(arrived) - 1
        return stage.as_output(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the stage's input."""
        [gradient] = gradients
        of_arrived = ctx.stage.run_backward(ctx.stage.local_gradient(gradient), ctx.saved)
        return None, None, of_arrived, *[None] * ctx.positions
