"""Trace of forward, loss, backward and the reduction of gradients as one graph, on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.fx.graph import CodeGen

from legoai.lowering.graph.activations import KeptOutputs
from legoai.lowering.graph.collectives import in_order, shows
from legoai.lowering.graph.operators import WAIT
from legoai.lowering.graph.places import Places
from legoai.lowering.graph.routing import read_once
from legoai.lowering.graph.sharding import units_of
from legoai.lowering.graph.step_graph import StepGraph
from legoai.runtime.activation import traced_by
from legoai.runtime.initialize import plain_path
from legoai.runtime.loss import LossFunction, local_value
from legoai.runtime.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from legoai.runtime.torch_internals.graph_passes import ShapeEnv, make_fx, rename
from legoai.runtime.torch_internals.graphs import reparametrize_module


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
        model: whose units gather their parameters (:func:`~legoai.lowering.graph.sharding.shard_unit`), with values
            or without.
        loss: of the model's result and the targets.
        inputs: what the model takes; of any values.
        targets: likewise.
        positions: of the tokens in their sequence, where the model takes them.
        micro_batches: of a step, by which the gradient is divided.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    specs = [parameter._spec for parameter in names if isinstance(parameter, DTensor)]
    assert len(specs) == len(names), "all parameters are in shards"
    buffers, units = dict(model.named_buffers()), units_of(model)

    def step(
        shards: list[torch.Tensor], held: list[torch.Tensor], given: list[torch.Tensor], wanted: torch.Tensor
    ) -> list[torch.Tensor]:
        leaves = [
            DTensor(shard, spec, requires_grad=True)  # type: ignore[no-untyped-call]
            for shard, spec in zip(shards, specs, strict=True)
        ]
        substitutes: dict[str, torch.Tensor] = dict(zip(buffers, held, strict=True))
        for leaf, known in zip(leaves, names.values(), strict=True):
            substitutes.update(dict.fromkeys(known, leaf))
        places = Places(model)
        with places.followed(), read_once(places):
            with reparametrize_module(model, substitutes):
                value = loss(model(*given[: len(inputs)], **_named(given[len(inputs) :])), wanted)
                gradients = torch.autograd.grad(value / micro_batches, leaves)
            return [local_value(value), *(gradient._local_tensor for gradient in gradients)]  # type: ignore[attr-defined]

    with _fake_mode(inputs[0]) as fake, torch.enable_grad(), _one_thread(), traced_by(KeptOutputs()):
        shards = [_like(parameter._local_tensor, fake) for parameter in names]  # type: ignore[attr-defined]
        held = [_like(buffer, fake) for buffer in buffers.values()]
        given = [_like(item, fake) for item in (*inputs, *(() if positions is None else (positions,)))]
        module = make_fx(step)(shards, held, given, _like(targets, fake))
    module.graph.set_codegen(CodeGen())  # lists of inputs and outputs, whose lengths passes may change
    paths = [plain_path(known[0]) for known in names.values()]
    _name_inputs(
        module.graph,
        [
            *paths,
            *map(plain_path, buffers),
            *(f"input {i}" for i in range(len(inputs))),
            *_named(given[len(inputs) :]),
            "targets",
        ],
    )
    graph = StepGraph(model, module, parameters=tuple(paths), units=units, micro_batches=micro_batches)
    _erase_unread(graph)
    _wait_late(graph)
    module.recompile()
    return graph


def _named(positions: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the positions as an argument of the model, if there are any."""
    return dict(zip(("positions",), positions, strict=False))


def _wait_late(graph: StepGraph) -> None:
    """Wait for what no unit communicates where it is first read, as modules outside of a graph do."""
    place = in_order(graph)
    for node in list(graph.graph.nodes):
        if node.target is WAIT and node.users and not graph.of_unit(node.args[0]):
            min(node.users, key=place.__getitem__).prepend(node)


def _erase_unread(graph: StepGraph) -> None:
    """Erase results of operators that nobody reads, which would live to the end of the graph."""
    for node in reversed(list(graph.graph.nodes)):
        if shows(node) and not node.users:
            graph.graph.erase_node(node)


@contextlib.contextmanager
def _fake_mode(tensor: torch.Tensor) -> Iterator[FakeTensorMode]:
    """Enter a fake tensor mode: on the simulated device the one that is there, which knows the device."""
    if isinstance(tensor, FakeTensor):
        yield tensor.fake_mode
        return
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes) as mode:
        yield mode


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let backward run on this thread, whose modes see what it computes."""
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
