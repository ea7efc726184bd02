"""One optimizer step of a program: the lines that families of directives contribute to it, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from legoai.lowering.emit.code import Function, Imports, Item, Line, Loop, Node, Note, Statement, call, literal

COUNT: Final = "MICRO_BATCHES"
"""Name of the program's constant for the micro batches of one rank in one optimizer step."""
GROWING: Final = "micro_batches"
"""Name of the program's function that returns their number in a step, where the batch grows."""
PARAMETERS: Final = "training.optimizer.param_groups"
"""Expression for the groups of all parameters in a step."""


@dataclass(slots=True)
class Step:
    """The parts of a step that depend on the plan."""

    micro_batches: Line | None = None
    """`MICRO_BATCHES = …`."""
    ramp: list[tuple[int, int, Note]] = field(default_factory=list)
    """Steps until which a rank takes fewer micro batches, and how many (:mod:`legoai.lowering.emit.training.batch`)."""
    pass_size: int | None = None
    """Micro batches of one pass of a pipeline; None without one."""
    traced: tuple[Note, Line] | None = None
    """Why forward, loss and backward are traced as one graph, and the expression of the graph; None without a graph."""
    before: list[Line] = field(default_factory=list)
    """Before all micro batches."""
    before_forward: list[Line] = field(default_factory=list)
    """Before each micro batch's forward."""
    around: list[Loop] = field(default_factory=list)
    """`with` statements without a body around forward and backward, or their trace, the outermost first."""
    around_forward: list[Loop] = field(default_factory=list)
    """`with` statements without a body around forward and loss, within `around`."""
    arguments: list[Item] = field(default_factory=list)
    """Further arguments of the model's forward."""
    graph_arguments: list[Item] = field(default_factory=list)
    """Further arguments of the graph of a step that is traced."""
    after_backward: list[Line] = field(default_factory=list)
    """After the gradients of all micro batches are accumulated."""
    before_update: list[Line] = field(default_factory=list)
    """After all ranks know the norm of the gradient, whether it is finite or not."""
    clip: list[Line] = field(default_factory=list)
    """Before the optimizer's update."""
    after_update: list[Line] = field(default_factory=list)
    """At the end, also of a step whose update was skipped."""

    def functions(self, imports: Imports) -> tuple[Function, ...]:
        """Return `forward_backward` and `train_step`, preceded by the graph's builder and `micro_batches` of a ramp."""
        imports.module("torch")
        for name in ("Batches", "StepResult", "Training", "reduce_loss_and_norm"):
            imports.name("legoai.runtime", name)
        return (
            *self._building(imports),
            *self._growing(),
            Function("forward_backward(training: Training, batches: Batches) -> torch.Tensor", self._sums(imports)),
            Function("train_step(training: Training, batches: Batches) -> StepResult", self._update()),
        )

    @property
    def _count(self) -> str:
        """The expression for the number of micro batches of one rank in the current step."""
        return "count" if self.ramp else COUNT

    def _building(self, imports: Imports) -> Iterator[Function]:
        """Yield the function that builds the graph of a traced step."""
        if self.traced is None:
            return
        for name in ("Batch", "LossFunction"):
            imports.name("legoai.runtime", name)
        note, rewritten = self.traced
        made = call(
            "trace_step", "model", "loss", "batch.inputs", "batch.targets", *self.arguments, micro_batches=COUNT
        )
        yield Function(
            "build_graph(model: nn.Module, loss: LossFunction, batch: Batch) -> StepGraph",
            (*_inside(self.around, [Line(made, "graph = ", note)]), rewritten),
        )

    def _growing(self) -> Iterator[Function]:
        """Yield the function that returns the number of micro batches in a step, where the batch grows."""
        if self.ramp:
            stages = [
                Loop(f"if step < {until}", (Line(literal(count), "return "),), note) for until, count, note in self.ramp
            ]
            words = "Return the micro batches of one rank in a step, counted from 0."
            yield Function(f"{GROWING}(step: int) -> int", (*stages, Line(COUNT, "return ")), docstring=(words,))

    def _sums(self, imports: Imports) -> tuple[Statement, ...]:
        """Return the statements for gradients and mean loss of this rank's micro batches."""
        assert self.micro_batches is not None, "a plan has a batch"
        each = self._forward_backward(imports) if self.pass_size is None else self._pass(imports)
        together = None if self.pass_size is None else literal(self.pass_size)
        batches = call("batches.take", self._count, together=together).inline()
        return (
            *((Line(call(GROWING, "batches.step"), f"{self._count} = "),) if self.ramp else ()),
            Line(call("torch.zeros", "()", dtype="torch.float64", device="training.device"), "total = "),
            Loop(f"for batch in {batches}", tuple(each)),
            Line(f"total / {self._count}", "return "),
        )

    def _forward_backward(self, imports: Imports) -> list[Statement]:
        if self.traced is not None:
            assert not (self.before_forward or self.around_forward), "all is in the graph"
            given = (*self.arguments, *self.graph_arguments)
            return [Line(call("training.step_graph", "batch.inputs", "batch.targets", *given), "total += ")]
        imports.name("legoai.runtime", "local_value")
        model = call("training.model", "*batch.inputs", *self.arguments)
        forward: list[Statement] = [Line(call("training.loss", model, "batch.targets"), "loss = ")]
        computed = [*_inside(self.around_forward, forward), Line(call(f"(loss / {self._count}).backward"))]
        return [*self.before_forward, *_inside(self.around, computed), Line(call("local_value", "loss"), "total += ")]

    def _pass(self, imports: Imports) -> list[Statement]:
        """Return one pass of a pipeline, whose schedule divides each micro batch's loss by their number in a step."""
        imports.name("legoai.runtime", "add_losses")
        made = call(
            "training.schedule.step",
            "*batch.inputs",
            target="batch.targets",
            losses="losses",
            return_outputs="False",
        )
        return [
            Line("[]", "losses: list[torch.Tensor] = "),
            *_inside(self.around, [Line(made)]),
            Line(call("add_losses", "total", "losses", scale=self._count)),
        ]

    def _update(self) -> tuple[Statement, ...]:
        updated: list[Statement] = [*self.clip, Line("training.optimizer.step()")]
        return (
            *self.before,
            Line("forward_backward(training, batches)", "mean_loss = "),
            *self.after_backward,
            Line("reduce_loss_and_norm(training, mean_loss)", "result = "),
            *self.before_update,
            Loop("if training.may_update(result)", tuple(updated)),
            Line("training.optimizer.zero_grad()"),
            *self.after_update,
            Line("result", "return "),
        )


def context(manager: Node, note: Note) -> Loop:
    """Return a `with` statement whose body is added later."""
    text = manager if isinstance(manager, str) else manager.inline()
    return Loop(f"with {text}", (), note)


def _inside(contexts: Sequence[Loop], body: Sequence[Statement]) -> list[Statement]:
    """Return the body within `with` statements."""
    statements = list(body)
    for outer in reversed(contexts):
        statements = [Loop(outer.header, tuple(statements), outer.note)]
    return statements
