"""Graph of a step, which a rank interprets node by node."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from legoai.lowering.graph.step.operators import GATHERS, SCATTERS, SUM_OVER_REPLICAS
from legoai.lowering.graph.step.places import place_of
from legoai.lowering.graph.step.sharding import Unit, padded_shard
from legoai.runtime.offloading.state_copies import StateCopies
from legoai.runtime.torch_internals.distributed.meshes import DTensorSpec
from legoai.runtime.training.state import Notice


class Watch(Protocol):
    """Measures nodes while they run."""

    def __call__(self, node: fx.Node, run: Callable[[], Any], values: Mapping[fx.Node, Any]) -> Any:
        """Run a node, given the living values, and return its result."""


class Rounds(Protocol):
    """Rewrites a graph again between steps."""

    @property
    def watch(self) -> Watch | None:
        """The watch that measures the nodes of the current step; None where none is measured."""

    def end_step(self) -> None:
        """Note the end of a step, and rewrite the graph if it is due."""


ACTIONS: Final = (
    "forward",
    "later_forward",
    "backward",
    "later_backward",
    "input_backward",
    "weight_backward",
    "later_weight_backward",
    "reduction",
)
"""The graphs of a stage, by the names of :class:`ActionGraphs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionGraphs:
    """The graphs of a stage's actions.

    Attributes:
        forward: of the first micro batch of a pass. Inputs: the shards of the parameters, the buffers and the stage's
            input. Results: the output, the values for this micro batch's backward, and the gathered parameters that
            stay.
        later_forward: of the others. Inputs: those of the first, and the gathered parameters. Results: the output and
            the values for backward.
        backward: Inputs: the shards, the buffers, the gathered parameters, the gradient of the output and the values
            from forward. Results: the gradient of the stage's input, where it needs one, and those of gathered
            parameters.
        later_backward: Inputs: those of backward, and the gradients of gathered parameters so far, to which it adds.
            Result: the gradient of the stage's input.
        input_backward: Inputs: those of backward. Results: the gradient of the stage's input, where it needs one, and
            the values for the other half. Where a schedule splits backward, the halves replace the two above.
        weight_backward: Inputs: the shards, the buffers, the gathered parameters, and the values from the first half.
            Results: the gradients of gathered parameters.
        later_weight_backward: the same, adding to earlier gradients.
        reduction: Inputs: the sums of the gradients of gathered parameters. Results: the gradients of the shards.
        kept: number of gathered parameters that stay.
    """

    forward: fx.GraphModule
    later_forward: fx.GraphModule
    backward: fx.GraphModule | None = None
    later_backward: fx.GraphModule | None = None
    input_backward: fx.GraphModule | None = None
    weight_backward: fx.GraphModule | None = None
    later_weight_backward: fx.GraphModule | None = None
    reduction: fx.GraphModule
    kept: int

    def modules(self) -> Iterator[tuple[str, fx.GraphModule]]:
        """Yield each graph that there is with its name, forward first."""
        for name in ACTIONS:
            module: fx.GraphModule | None = getattr(self, name)
            if module is not None:
                yield name, module


class StepGraph:
    """Forward, loss, backward and communication of one micro batch.

    Attributes:
        model: whose parameters and buffers it reads, and whose gradients it computes.
        module: Inputs: the shards of the parameters, the buffers, the inputs, the positions of their tokens where there
            are any, and the targets. Results: the loss and the gradients of the shards of trained parameters.
        parameters: the names of the parameters in the order of the inputs.
        trained: the names of those that have gradients, in the order of the results; the others are frozen.
        units: whose parameters are gathered together.
        micro_batches: of a step.
        reading: the modules whose shapes depend on values, such as those of experts on the rows that arrive.
        state: copies of the optimizer's state, where it leaves the device while the graph runs.
        on_node: callbacks that receive each node before it runs.
        is_stage: whether it is of a stage of a pipeline; see :func:`~legoai.lowering.graph.step.trace.trace_stage`.
        splits_backward: whether a stage's schedule computes the gradients of inputs and of weights separately.
        output_spec: layout of a stage's output on its mesh; None where it is a plain tensor, and for a whole step.
        later: the graph of later micro batches of a step, where some parameters stay gathered: it has these as inputs
            after the targets, and ``module`` returns them after the gradients. None where all micro batches run
            ``module``.
        actions: the graphs of a stage's actions, where a pass has split ``module`` to rewrite its parts.
        beyond: bytes that were measured while nodes ran, by their names, beyond those of the living values.
        rounds: rewrites the graph again between steps, if anything does.
        notices: to be shown to the user.
    """

    def __init__(
        self,
        model: nn.Module,
        module: fx.GraphModule,
        *,
        parameters: tuple[str, ...],
        units: tuple[Unit, ...],
        micro_batches: int = 1,
        reading: frozenset[str] = frozenset(),
    ) -> None:
        self.model = model
        self.module = module
        self.parameters = parameters
        named = zip(parameters, model.parameters(), strict=True)
        self.trained = tuple(name for name, parameter in named if parameter.requires_grad)
        self.units = units
        self.micro_batches = micro_batches
        self.reading = reading
        self.state: StateCopies | None = None
        self.on_node: list[Callable[[fx.Node], None]] = []
        self.is_stage = False
        self.splits_backward = False
        self.output_spec: DTensorSpec | None = None
        self.later: fx.GraphModule | None = None
        self.actions: ActionGraphs | None = None
        self.beyond: Mapping[str, int] = {}
        self.rounds: Rounds | None = None
        self.notices: list[Notice] = []
        self._kept: list[torch.Tensor] | None = None

    @property
    def graph(self) -> fx.Graph:
        """The graph that passes rewrite."""
        return self.module.graph

    def of_unit(self, node: fx.Node) -> bool:
        """Whether a node is a collective of a unit: a gather of parameters, or a reduction of their gradients."""
        place = place_of(node)
        return node.target in (*GATHERS, *SCATTERS, SUM_OVER_REPLICAS) and place is not None and place.of_unit

    def inputs(self) -> dict[str, fx.Node]:
        """Return the placeholders of the parameters' shards by the parameters' names."""
        return dict(zip(self.parameters, self.graph.find_nodes(op="placeholder"), strict=False))

    def gradients(self) -> dict[str, fx.Node]:
        """Return the nodes of the gradients of the shards by the names of the trained parameters."""
        nodes = self.outputs()[1 : 1 + len(self.trained)]
        return dict(zip(self.trained, nodes, strict=True))

    def set_gradient(self, parameter: str, node: fx.Node) -> None:
        """Replace the node of a parameter's gradient."""
        outputs = self.outputs()
        outputs[1 + self.trained.index(parameter)] = node
        self.graph.output_node().args = (outputs,)

    def keep(self, given: Sequence[fx.Node], erased: Container[fx.Node]) -> None:
        """Let later micro batches of a step reuse the values of nodes from the first; see ``later``.

        Args:
            given: the nodes.
            erased: nodes that later micro batches do not run, with everything that only they need.
        """
        later, taken = fx.Graph(), dict[fx.Node, fx.Node]()
        inputs = self.graph.find_nodes(op="placeholder")
        for node in (*inputs, *given):
            copied = taken[node] = later.placeholder(node.name)
            copied.meta = dict(node.meta)
        for node in self.graph.nodes:
            if node not in taken and node not in erased:
                taken[node] = later.node_copy(node, taken.__getitem__)
        later.lint()
        self.later = fx.GraphModule(self.module, later)
        self.graph.output_node().args = ([*self.outputs(), *given],)

    def copied(self) -> StepGraph:
        """Return a graph of the same nodes, on which passes can be tried."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        copy = StepGraph(
            self.model,
            fx.GraphModule(self.module, graph),
            parameters=self.parameters,
            units=self.units,
            micro_batches=self.micro_batches,
            reading=self.reading,
        )
        copy.beyond = self.beyond
        return copy

    def replace(self, other: StepGraph) -> None:
        """Run the nodes of another graph of the same model from the next step on."""
        self.module, self.later = other.module, other.later
        self.units, self.state, self.beyond = other.units, other.state, other.beyond
        self._kept = None

    def end_step(self) -> list[Notice]:
        """Note the end of a step, and return the notices since the last call."""
        if self.rounds is not None:
            self.rounds.end_step()
        return self.take_notices()

    def take_notices(self) -> list[Notice]:
        """Return the notices, once."""
        found, self.notices = self.notices, []
        return found

    def reshard(self) -> None:
        """Free all gathered parameters, so that the next micro batch gathers their new values."""
        self._kept = None

    def outputs(self) -> list[fx.Node]:
        """Return the nodes of the graph's results, in order."""
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @torch.no_grad()
    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        targets: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        is_last: bool = True,
    ) -> torch.Tensor:
        """Return the loss of a micro batch, and add its gradients to those of the parameters.

        Args:
            inputs: of the model.
            targets: of the loss.
            positions: of the tokens, where the model takes them.
            optimizer: whose state is offloaded meanwhile, if at all.
            is_last: whether the micro batch is the last of its step, at whose end the state returns.
        """
        parameters = list(self.model.parameters())
        if self.state is not None:
            assert optimizer is not None, "whose state leaves"
            self.state.begin(optimizer, dict(zip(self.parameters, parameters, strict=True)), is_last=is_last)
        shards = [padded_shard(parameter) for parameter in parameters if isinstance(parameter, DTensor)]
        given = (*shards, *self.model.buffers(), *inputs, *(() if positions is None else (positions,)), targets)
        if self.later is None or self._kept is None:
            loss, *values = self._runner(self.module).run(*given)
        else:
            loss, *values = self._runner(self.later).run(*given, *self._kept)
        gradients, kept = values[: len(self.trained)], values[len(self.trained) :]
        if kept:
            self._kept = kept
        add_gradients(self.model, gradients)
        assert isinstance(loss, torch.Tensor)
        return loss

    def _runner(self, module: fx.GraphModule) -> Runner:
        return Runner(module, self.on_node, None if self.rounds is None else self.rounds.watch)


class Runner(fx.Interpreter):
    """Interprets a graph node by node, and frees each value after its last use."""

    def __init__(
        self, module: fx.GraphModule, on_node: Sequence[Callable[[fx.Node], None]], watch: Watch | None = None
    ) -> None:
        super().__init__(module)
        self._on_node = on_node
        self._watch = watch

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        for look in self._on_node:
            look(n)
        if self._watch is None or n.op in ("placeholder", "output"):
            return self._run(n)
        return self._watch(n, lambda: self._run(n), self.env)

    def _run(self, n: fx.Node) -> Any:
        if n.op != "call_module":
            return super().run_node(n)
        region, given = self.fetch_attr(str(n.target)), [self.env[source] for source in n.all_input_nodes]
        for read in self.user_to_last_uses.get(n, ()):
            self.env[read] = None  # the region frees its inputs
        return region.run(given)


def add_gradients(model: nn.Module, gradients: Sequence[torch.Tensor]) -> None:
    """Add the gradients of shards to those of a model's trained parameters, in the model's order."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter, gradient in zip(trained, gradients, strict=True):
        _add_gradient(parameter, gradient)


def _add_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Add the gradient of a parameter's shard, which may be padded, to the existing one."""
    assert isinstance(parameter, DTensor)
    rows = parameter._local_tensor.shape[0]
    if gradient.shape[0] > rows:
        gradient = gradient[:rows]
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
