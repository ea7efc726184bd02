"""Lowering of a plan to the text of a Python program."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

import legoai
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.repetition.repeated_blocks import BlockClasses, block_classes, look_ahead
from legoai.dsl.analysis.support import unsupported
from legoai.dsl.diagnostics.codes.lowering import UndecidedHole
from legoai.dsl.diagnostics.codes.names import ModelUnavailable
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.lowering.emit import EMITTERS
from legoai.lowering.emit.base import TRAINER_ARGUMENTS, Draft, Lowering
from legoai.lowering.emit.code import Function, Line, Writer, call, in_docstring, quoted
from legoai.lowering.emit.data_parallelism.graph import graph_passes
from legoai.lowering.file_names import factory_module, program_name
from legoai.specs.models.manifests.manifest import ManifestError
from legoai.specs.plan import Plan
from legoai.specs.span import Span

_START: Final = re.compile(r"^(Start it with: torchrun .*) \S+$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A plan as Python text. Equal plans, models and versions give equal bytes.

    Attributes:
        text: the program; run it with torchrun.
        plan_name: the plan's name.
        digest: the plan's hash, as :attr:`legoai.specs.plan.Plan.digest` gives it.
        lines: for each line of the program, counted from 1, the span of the plan that it comes from.
        block_classes: the model's lists of blocks (`layers`), each with the class of every block: blocks of a class get
            the same treatments, so that a few of them represent all.
        look_ahead: how many blocks away, at most, a block refers to another.
    """

    text: str
    plan_name: str
    digest: str
    lines: Mapping[int, Span]
    block_classes: BlockClasses = ()
    look_ahead: int = 1

    def saved_as(self, name: str) -> str:
        """Return the text for a file of this name, by which its docstring says how to start it."""
        return _START.sub(lambda match: f"{match[1]} {in_docstring(shlex.quote(name))}", self.text, count=1)


class LoweringError(ValueError):
    """A plan cannot be lowered.

    Attributes:
        diagnostics: the reasons, one diagnostic for each line of the plan that prevents lowering, in the order of the
            text.
    """

    def __init__(self, diagnostics: tuple[Diagnostic, ...]) -> None:
        assert diagnostics, "something stands in the way"
        first = diagnostics[0]
        more = f" (and {len(diagnostics) - 1} more)" if len(diagnostics) > 1 else ""
        super().__init__(f"{first.label.span}: {first.code} {first.message}{more}")
        self.diagnostics = diagnostics


def lower(analysis: Analysis, *, passes: int | None = None) -> Program:
    """Lower a plan that has no lint errors but those that its comments accept, whose model is known.

    The program's docstring names the plan's file, and its comments the files of the plan's spans, without folders.

    Args:
        analysis: of the plan.
        passes: for `backend = graph`, run only the first so many of the plan's passes; see :func:`pass_names`.

    Raises:
        LoweringError: the plan has holes, or something that no program supports, or the config file of its model was
            changed since it was linted. Nothing is silently left out.
    """
    check_decided(analysis)
    _raise(list(unsupported(analysis)))
    lowering, draft = Lowering(analysis, passes=passes), Draft()
    try:
        for emit in EMITTERS.values():
            emit(lowering, draft)
    except ManifestError as error:
        # The config file that lint has read is missing, or has changed since.
        raise LoweringError((unavailable(analysis, error),)) from error
    return _write(lowering, draft)


def pass_names(analysis: Analysis) -> tuple[str, ...]:
    """Return the passes over the graph of a step that a lowered plan runs, in order; none without `backend = graph`."""
    if not is_traced(analysis):
        return ()
    return tuple(name for name, _ in graph_passes(Lowering(analysis)))


def unavailable(analysis: Analysis, error: ManifestError) -> Diagnostic:
    """Return the diagnostic for a model that could be inspected when its plan was linted, and no longer can."""
    return ModelUnavailable.at(
        analysis.span_of(analysis.plan.model, "target"),
        error.message,
        label="cannot be looked at",
        help=("it could when the plan was linted: has its file changed since?",),
    )


def _raise(diagnostics: list[Diagnostic]) -> None:
    if diagnostics:
        raise LoweringError(tuple(sorted(diagnostics, key=lambda item: item.order)))


def check_decided(analysis: Analysis) -> None:
    """Raise diagnostics for what a plan leaves undecided.

    Raises:
        LoweringError: it has holes.
    """
    help = ("solve the plan, or give the value",)
    _raise([
        UndecidedHole.at(found.origin.span or analysis.start, f"{found.what} is not decided", label="a hole", help=help)
        for found in analysis.plan.holes()
    ])  # fmt: skip


def _write(lowering: Lowering, draft: Draft) -> Program:
    plan = lowering.plan
    draft.imports.name("torch", "nn")
    draft.imports.name("torch.distributed.device_mesh", "DeviceMesh")
    for name in (*sorted(lowering.runtime_names), "Trainer"):
        draft.imports.name("legoai.runtime", name)
    draft.imports.module("torch")
    parallelize = Function(
        "parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module",
        (*draft.parallelize, Line("model", "return ")),
        docstring=draft.order_of_application(),
    )
    assert draft.step.micro_batches is not None, "every plan has a batch"
    step = draft.step.functions(draft.imports)
    draft.train_with("train_step", "train_step")
    for name, value in (("plan", "PLAN"), ("plan_hash", "PLAN_HASH"), ("parallelize", "parallelize")):
        draft.train_with(name, value)
    arguments = [draft.trainer[name] for name in TRAINER_ARGUMENTS if name in draft.trainer]
    trainer = Function("trainer() -> Trainer", (Line(call("Trainer", *arguments), "return "),))
    writer = Writer()
    for line in _docstring(lowering):
        writer.write(line)
    writer.write()
    for line in draft.imports.lines():
        writer.write(line)
    writer.write()
    writer.write(f"PLAN = {quoted(plan.name)}")
    writer.write(f"PLAN_HASH = {quoted(plan.digest)}")
    writer.body([draft.step.micro_batches, *draft.constants], 0)
    for function in (*draft.functions, parallelize, *draft.later_functions, *step, trainer):
        writer.write()
        writer.write()
        writer.function(function)
    writer.write()
    writer.write()
    writer.write('if __name__ == "__main__":')
    writer.write("    trainer().main()")
    text = "\n".join(writer.text) + "\n"
    return Program(
        text=text,
        plan_name=plan.name,
        digest=plan.digest,
        lines=writer.spans,
        block_classes=block_classes(lowering.analysis),
        look_ahead=look_ahead(lowering.analysis),
    )


def _docstring(lowering: Lowering) -> list[str]:
    """Return the program's docstring: what it is, its machines, and how to start it on them."""
    plan = lowering.plan
    name = in_docstring(PurePath(lowering.analysis.file).name) or "a plan"
    variant = f" (variant {plan.variant})" if plan.variant is not None else ""
    devices = plan.mesh.world_size
    factory = factory_module(plan)
    return [
        f'"""{plan.name}: lowered from {name}{variant} by legoai {legoai.__version__}.',
        "",
        f"Cluster: {_cluster(lowering)}; {devices} {'process' if devices == 1 else 'processes'}.",
        f"Start it with: torchrun {_torchrun(lowering)} {program_name(plan)}",
        *([f"The module {in_docstring(factory)} has to be in its folder, or on PYTHONPATH."] if factory else ()),
        '"""',
    ]


def _cluster(lowering: Lowering) -> str:
    use = lowering.plan.cluster
    device = f"profile {in_docstring(PurePath(use.profile).name)}" if use.profile is not None else use.device
    parts = [f"{use.hosts} {'host' if use.hosts == 1 else 'hosts'}"]
    if use.devices is not None:
        parts.append(f"{use.devices} devices each")
    if use.fabric is not None:
        parts.append(use.fabric)
    return f"{device}, {', '.join(parts)}"


def _torchrun(lowering: Lowering) -> str:
    hosts, each = hosts_and_processes(lowering.plan)
    if hosts == 1:
        return f"--nproc-per-node {each}"
    return f"--nnodes {hosts} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint HOST:29400"


def hosts_and_processes(plan: Plan) -> tuple[int, int]:
    """Return the number of hosts and the processes on each; one host where the mesh leaves devices idle."""
    hosts, devices = plan.cluster.hosts, plan.mesh.world_size
    return (1, devices) if devices % hosts else (hosts, devices // hosts)
