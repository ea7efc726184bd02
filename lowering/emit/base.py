"""State of an emission: the analysis that emitters read, and the draft of the program that they contribute to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.emit.blocks import BlockGroup, group
from legoai.lowering.emit.code import Function, Group, Imports, Item, Line, Node, Note, Statement, call, literal
from legoai.lowering.emit.step import Step
from legoai.specs.directives.base import Declared, Directive, PathRule

T = TypeVar("T")


class Lowering:
    """The analysis of a plan without holes, and state that only the emission of its program needs."""

    def __init__(self, analysis: Analysis, *, passes: int | None = None) -> None:
        assert analysis.manifest is not None, "a model that cannot be inspected is a diagnostic"
        self.analysis = analysis
        self.plan = analysis.plan
        self.manifest = analysis.manifest
        self.passes = passes
        """How many of the passes over the graph of a step are run; None for all."""
        self.runtime_names: set[str] = set()
        """Names of `legoai.runtime` that conditions of the program use."""

    def note(self, declared: Declared, field: str = "keyword") -> Note:
        """Return the line of ``field``'s value, or else of its statement; no line if the plan has no such statement."""
        span = declared.origin(field).span or declared.origin("keyword").span
        return Note(span)

    def assignment(self, directive: Directive) -> Mapping[str, PathRule[Any]]:
        """Return the rule that each module, and for `shard` each parameter, follows, in the model's order."""
        return self.analysis.assigned(directive).by_path

    def number(self, declared: Declared, field: str) -> str:
        """Return a value as :func:`literal` writes it; a number as in the plan, where Python reads the same value."""
        value, text = getattr(declared, field), declared.origin(field).text
        if text is not None and isinstance(value, float) and not text.isdecimal() and float(text) == value:
            return text
        return literal(value)

    def groups(self, assigned: Mapping[str, T]) -> tuple[BlockGroup[T], ...]:
        """Return the assignment with equal blocks grouped, the children in every group before their parents."""
        deepest_first = dict(sorted(assigned.items(), key=lambda item: -_depth(item[0])))
        return group(deepest_first, self.manifest.block_lists)


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def rule_note(rule: PathRule[Any]) -> Note:
    """The line of a rule."""
    return Note(rule.origin.span)


TRAINER_ARGUMENTS: Final = (
    "plan",
    "plan_hash",
    "device_type",
    "build_model",
    "factory",
    "build_mesh",
    "parallelize",
    "pipeline",
    "build_optimizer",
    "build_lr_scheduler",
    "build_loss",
    "build_model_loss",
    "build_graph",
    "train_step",
    "data_axes",
    "context_axis",
    "context_balance",
    "global_batch",
    "ramp",
    "micro_batch",
    "seq_len",
    "vocab_size",
    "flops_per_token",
    "peak_flops",
    "reads",
    "master_dtype",
    "param_dtype",
    "reduce_dtype",
    "autocast_dtype",
    "attention_kernel",
    "loss_parallel",
    "offload_parameters",
    "allocator_settings",
    "clip_norm",
    "steps",
    "seed",
    "data",
    "data_field",
    "tokenizer",
    "load_weights",
    "save_every",
    "save_async",
    "keep",
    "evaluate_every",
    "evaluate_batches",
)
"""The keyword arguments of `legoai.runtime.Trainer` that a plan decides, in the order in which they are printed."""


@dataclass(slots=True)
class Draft:
    """The program while emitters contribute to it."""

    imports: Imports = field(default_factory=Imports)
    constants: list[Line] = field(default_factory=list)
    """Code before all functions."""
    functions: list[Function] = field(default_factory=list)
    """Functions that build model and mesh and change the model, in printing order."""
    later_functions: list[Function] = field(default_factory=list)
    """Functions for the parallelized model."""
    parallelize: list[Statement] = field(default_factory=list)
    """The body of `parallelize(model, mesh)`, in the order of application."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Reason for the place of each function of `parallelize` in that order, by the function's name."""
    step: Step = field(default_factory=Step)
    """The body of one optimizer step."""
    trainer: dict[str, Item] = field(default_factory=dict)
    """The keyword arguments of `Trainer`."""

    def apply(
        self,
        function: str,
        *,
        mesh: Node | None,
        body: Iterable[Statement],
        note: Note,
        why: str,
        before: str = "",
        meshes: Mapping[str, Node] | None = None,
    ) -> None:
        """Add a function that changes the model, on ``mesh`` if there is one, and its call in `parallelize`.

        The call is inserted before that of ``before``, or last, and the function before those that are called after it;
        ``why`` is the reason for that place. ``meshes`` are further meshes by the names of their parameters.
        """
        self.reasons[function] = why
        given = {**({} if mesh is None else {"mesh": mesh}), **(meshes or {})}
        parameters = ", ".join(["model: nn.Module", *(f"{name}: DeviceMesh" for name in given)])
        made = Function(f"{function}({parameters}) -> None", tuple(body))
        line = Line(call(function, "model", *given.values()), "", note)
        calls = [
            item.value.opening[:-1] if isinstance(item, Line) and not isinstance(item.value, str) else ""
            for item in self.parallelize
        ]
        at = calls.index(before) if before else len(calls)
        behind = [item.signature.partition("(")[0] in calls[at:] for item in self.functions]
        self.functions.insert(behind.index(True) if True in behind else len(behind), made)
        self.parallelize.insert(at, line)

    def order_of_application(self) -> tuple[str, ...]:
        """Return the docstring of `parallelize`: its calls in order, each with the reason for its place."""
        calls = [
            item.value.opening[:-1]
            for item in self.parallelize
            if isinstance(item, Line) and isinstance(item.value, Group)
        ]
        if len(calls) < 2:
            return ()
        reasons = (f"{place}. `{name}`: {self.reasons[name]}." for place, name in enumerate(calls, 1))
        return "Change the model in place, in this order:", "", *reasons

    def train_with(self, name: str, value: Node, note: Note | None = None) -> None:
        """Add a keyword argument of the trainer."""
        assert name in TRAINER_ARGUMENTS, f"the trainer has no {name}"
        self.trainer[name] = Item(value, f"{name}=", note)
