"""Graph of a step that a rank runs node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from legoai.lowering.graph.operators import GATHERS, SCATTERS, SUM_OVER_REPLICAS
from legoai.lowering.graph.sharding import Unit, groups_of


class StepGraph:
    """Forward, loss, backward and communication of one micro batch.

    Attributes:
        model: whose parameters and buffers it reads, and whose gradients it makes.
        module: takes the shards of the parameters, the buffers, the inputs and the targets; gives the loss and the
            gradients of the shards.
        parameters: the names of the parameters in the order of the inputs.
        units: whose parameters are gathered together.
        on_node: is told of each node before it runs.
    """

    def __init__(
        self, model: nn.Module, module: fx.GraphModule, *, parameters: tuple[str, ...], units: tuple[Unit, ...]
    ) -> None:
        self.model = model
        self.module = module
        self.parameters = parameters
        self.units = units
        self._groups = groups_of(units)
        self.on_node: list[Callable[[fx.Node], None]] = []

    @property
    def graph(self) -> fx.Graph:
        """The graph that passes rewrite."""
        return self.module.graph

    def of_unit(self, node: fx.Node) -> bool:
        """Whether a node is a collective of a unit: a gather of parameters, or a reduction of their gradients."""
        return node.target in (*GATHERS, *SCATTERS, SUM_OVER_REPLICAS) and node.args[-1] in self._groups

    def inputs(self) -> dict[str, fx.Node]:
        """Return the placeholders of the parameters' shards by the parameters' names."""
        return dict(zip(self.parameters, self.graph.find_nodes(op="placeholder"), strict=False))

    def gradients(self) -> dict[str, fx.Node]:
        """Return the nodes that give the gradients of the shards by the parameters' names."""
        _, *nodes = self._outputs()
        return dict(zip(self.parameters, nodes, strict=True))

    def set_gradient(self, parameter: str, node: fx.Node) -> None:
        """Let another node give the gradient of a parameter."""
        outputs = self._outputs()
        outputs[1 + self.parameters.index(parameter)] = node
        self.graph.output_node().args = (outputs,)

    def _outputs(self) -> list[fx.Node]:
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @torch.no_grad()
    def __call__(self, inputs: Sequence[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of a micro batch, and add its gradients to those of the parameters."""
        parameters = list(self.model.parameters())
        shards = [parameter.to_local() for parameter in parameters if isinstance(parameter, DTensor)]
        runner = _Runner(self.module, self.on_node)
        loss, *gradients = runner.run(*shards, *self.model.buffers(), *inputs, targets)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            _add_gradient(parameter, gradient)
        assert isinstance(loss, torch.Tensor)
        return loss


class _Runner(fx.Interpreter):
    """Runs a graph node by node, and frees each value behind its last use."""

    def __init__(self, module: fx.GraphModule, on_node: Sequence[Callable[[fx.Node], None]]) -> None:
        super().__init__(module)
        self._on_node = on_node

    def run_node(self, n: fx.Node) -> Any:
        for look in self._on_node:
            look(n)
        return super().run_node(n)


def _add_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    assert isinstance(parameter, DTensor)
    if parameter.grad is not None:
        parameter.grad.to_local().add_(gradient)  # type: ignore[attr-defined]
        return
    parameter.grad = DTensor.from_local(
        gradient,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
