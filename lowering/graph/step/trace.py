"""Trace of forward, loss, backward and gradient reduction as one graph, on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.fx.graph import CodeGen

from legoai.lowering.graph.step.checkpointed import KeptOutputs
from legoai.lowering.graph.step.collectives import in_order
from legoai.lowering.graph.step.operators import WAIT
from legoai.lowering.graph.step.places import Places
from legoai.lowering.graph.step.routing import read_once
from legoai.lowering.graph.step.sharding import added_up, padded_shard, units_of
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.lowering.graph.step.values import shows
from legoai.runtime.initialize import plain_path
from legoai.runtime.loss import LossFunction, local_value
from legoai.runtime.recomputation.policies import traced_by
from legoai.runtime.torch_internals.compiler.graph_passes import ShapeEnv, get_proxy_mode, make_fx, rename
from legoai.runtime.torch_internals.compiler.graphs import reparametrize_module
from legoai.runtime.torch_internals.distributed.meshes import DTensorSpec
from legoai.runtime.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from legoai.runtime.wrapped import local_part

GRADIENT: Final = "gradient"
"""The input of a stage's graph that is the gradient of its output."""


def trace_step(
    model: nn.Module,
    loss: LossFunction,
    inputs: Sequence[torch.Tensor],
    targets: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    micro_batches: int,
) -> StepGraph:
    """Trace one micro batch: the loss, its gradients, and their reduction.

    Args:
        model: whose units gather their parameters (:func:`~legoai.lowering.graph.step.sharding.shard_unit`), with
            values or without.
        loss: of the model's output and the targets.
        inputs: of the model; with arbitrary values.
        targets: likewise.
        positions: of the tokens in their sequence, where the model takes them.
        micro_batches: of a step, by which the gradient is divided.
    """

    def compute(leaves: list[DTensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
        *read, wanted = given
        value = loss(model(*read[: len(inputs)], **_named(read[len(inputs) :])), wanted)
        gradients = torch.autograd.grad(value / micro_batches, _trained(leaves))
        return [local_value(value), *map(local_part, gradients)]

    given = {
        **{f"input {index}": item for index, item in enumerate(inputs)},
        **_named(() if positions is None else (positions,)),
        "targets": targets,
    }
    return _traced(model, compute, given, micro_batches=micro_batches)


def trace_stage(
    model: nn.Module,
    given: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    device: torch.device,
    splits_backward: bool = False,
) -> StepGraph:
    """Trace one micro batch through a pipeline stage: its output, and all gradients from that of the output.

    Args:
        model: the stage, whose units gather their parameters, with values or without.
        given: the shape and dtype of the stage's input, on the meta device; it needs a gradient where another stage
            computes it.
        positions: likewise, of the tokens in their sequence, where the model takes them.
        device: on which the stage computes.
        splits_backward: whether its schedule computes the gradients of inputs and of weights separately.
    """
    gradient_of: list[fx.Node] = []
    specs: list[DTensorSpec | None] = []

    def compute(leaves: list[DTensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
        arrived, *placed = given
        output = model(arrived, **_named(placed))
        gradient = torch.empty_like(local_part(output))
        tracing = get_proxy_mode()
        assert tracing is not None, "a function that is traced"
        gradient_of.append(next(iter(reversed(tracing.tracer.graph.nodes))))
        specs.append(output._spec if isinstance(output, DTensor) else None)
        wanted = [*_trained(leaves), *([arrived] if arrived.requires_grad else [])]
        gradients = torch.autograd.grad(output, wanted, _like_output(gradient, output)) if wanted else ()
        return [local_part(output), *map(local_part, gradients)]

    examples = {
        name: torch.empty(like.shape, dtype=like.dtype, device=device, requires_grad=like.requires_grad)
        for name, like in {"arrived": given, **_named(() if positions is None else (positions,))}.items()
    }
    with added_up():
        graph = _traced(model, compute, examples)
    graph.is_stage, graph.splits_backward = True, splits_backward
    [made], [graph.output_spec] = gradient_of, specs
    *_, last = graph.graph.find_nodes(op="placeholder")
    with graph.graph.inserting_after(last):
        taken = graph.graph.placeholder(GRADIENT)
    taken.meta["val"] = made.meta["val"]
    made.replace_all_uses_with(taken)
    graph.graph.erase_node(made)
    graph.module.recompile()
    return graph


def _trained(leaves: Sequence[DTensor]) -> list[DTensor]:
    """Return the leaves that have a gradient: not those of frozen parameters, which nothing may reach."""
    return [leaf for leaf in leaves if leaf.requires_grad]


def _like_output(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an output from its local tensor."""
    if not isinstance(output, DTensor):
        return gradient
    return DTensor(gradient, output._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _traced(
    model: nn.Module,
    compute: Callable[[list[DTensor], list[torch.Tensor]], list[torch.Tensor]],
    given: Mapping[str, torch.Tensor],
    *,
    micro_batches: int = 1,
) -> StepGraph:
    """Trace a function of the parameters' shards and of named inputs."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    laid = [(parameter._spec, parameter.requires_grad) for parameter in names if isinstance(parameter, DTensor)]
    padded = [padded_shard(parameter) for parameter in names if isinstance(parameter, DTensor)]
    assert len(laid) == len(names), "all parameters are in shards"
    buffers, units, places = dict(model.named_buffers()), units_of(model), Places(model)

    def step(shards: list[torch.Tensor], held: list[torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [
            DTensor(shard, spec, requires_grad=trained)  # type: ignore[no-untyped-call]
            for shard, (spec, trained) in zip(shards, laid, strict=True)
        ]
        substitutes: dict[str, torch.Tensor] = dict(zip(buffers, held, strict=True))
        for leaf, known in zip(leaves, names.values(), strict=True):
            substitutes.update(dict.fromkeys(known, leaf))
        with places.followed(), read_once(places), reparametrize_module(model, substitutes):
            return compute(leaves, given)

    example = next(iter(given.values()))
    with _fake_mode(example) as fake, torch.enable_grad(), _one_thread(), traced_by(KeptOutputs()):
        shards = [_like(shard, fake) for shard in padded]
        held = [_like(buffer, fake) for buffer in buffers.values()]
        fakes = [_like(item, fake).requires_grad_(item.requires_grad) for item in given.values()]
        module = make_fx(step)(shards, held, fakes)
    module.graph.set_codegen(CodeGen())  # lists of inputs and outputs, whose lengths passes may change
    paths = [plain_path(known[0]) for known in names.values()]
    _name_inputs(module.graph, [*paths, *map(plain_path, buffers), *given])
    graph = StepGraph(
        model,
        module,
        parameters=tuple(paths),
        units=units,
        micro_batches=micro_batches,
        reading=frozenset(places.reading),
    )
    _erase_unread(graph)
    _wait_late(graph)
    module.recompile()
    return graph


def _named(positions: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the positions as an argument of the model, if there are any."""
    return dict(zip(("positions",), positions, strict=False))


def _wait_late(graph: StepGraph) -> None:
    """Wait for communication outside units where its result is first read, as modules outside a graph do."""
    place = in_order(graph)
    for node in list(graph.graph.nodes):
        if node.target is WAIT and node.users and not graph.of_unit(node.args[0]):
            min(node.users, key=place.__getitem__).prepend(node)


def _erase_unread(graph: StepGraph) -> None:
    """Erase dead results of operators, which would live to the end of the graph."""
    for node in reversed(list(graph.graph.nodes)):
        if shows(node) and not node.users:
            graph.graph.erase_node(node)


@contextlib.contextmanager
def _fake_mode(tensor: torch.Tensor) -> Iterator[FakeTensorMode]:
    """Enter a fake tensor mode: on the simulated device the existing one, which supports the device."""
    if isinstance(tensor, FakeTensor):
        yield tensor.fake_mode
        return
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes) as mode:
        yield mode


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run backward on this thread, whose modes observe its operators."""
    before = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    try:
        yield
    finally:
        torch.autograd.set_multithreading_enabled(before)


def _like(tensor: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor.detach()
    return fake.from_tensor(tensor.detach(), static_shapes=True)


def _name_inputs(graph: fx.Graph, names: Sequence[str]) -> None:
    placeholders: list[Any] = list(graph.find_nodes(op="placeholder"))
    for node, name in zip(placeholders, names, strict=True):
        identifier = "".join(letter if letter.isalnum() else "_" for letter in name)
        rename(node, identifier)
        node.target = node.name
