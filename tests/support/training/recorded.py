"""Collectives of a real run over gloo, as its ranks call them and as the process groups record them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroup, _dump_fr_trace_json, _resolve_process_group
from torch.distributed.distributed_c10d import _world
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from legoai.cost.simulated.few_batches import FewBatches
from legoai.runtime import Trainer
from legoai.runtime.attention.kernel_choice import attention_kernel
from legoai.runtime.device import Device
from legoai.runtime.training.batches import Batches
from legoai.runtime.training.step import take_step
from support.simulation.simulated import Zeros

STEPS = 2


class Issued(NamedTuple):
    """One collective: its kind, global ranks, bytes of the whole buffer, and dtype."""

    kind: str
    ranks: tuple[int, ...]
    bytes: int
    dtype: str


KINDS = {
    "_allgather_base_": "all_gather", "allgather_": "all_gather", "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather", "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce", "all_reduce_coalesced": "all_reduce", "all_reduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all", "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all", "broadcast_": "broadcast", "broadcast": "broadcast",
    "send": "send", "recv_": "receive",
}  # fmt: skip
"""By the name of torch's operator."""

QUIET = frozenset({"wait_tensor", "_wrap_tensor_autograd"})

ALL_REDUCES = frozenset({"all_reduce", "reduce_scatter"})
"""What gloo carries out as an all-reduce: it has no reduce-scatter of its own (ProcessGroupGloo.cpp)."""


class Recorder(TorchDispatchMode):
    """Notes the collectives that are called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[Issued] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor") and name not in QUIET:
            self.issued.append(self._issued(func, name, args, out))
        return out

    def _issued(self, func, name: str, args, out) -> Issued:
        names = [item.name for item in func._schema.arguments]
        place = next(index for index, item in enumerate(names) if item in ("process_group", "group_name"))
        group = args[place]
        group = _resolve_process_group(group) if isinstance(group, str) else ProcessGroup.unbox(group)
        ranks, here = tuple(dist.get_process_group_ranks(group)), dist.get_rank()
        kind = KINDS[name]
        if kind == "send":
            ranks = here, ranks[args[2]]
        elif kind == "receive":
            ranks = ranks[args[2]], here
        # The larger of what goes in and what comes out is the whole buffer; an all-to-all's is what goes in.
        sides = [flat(value) for value in (*args, out)]
        if kind == "all_to_all":
            sides = [flat(args[1] if func.namespace == "c10d" else args[0])]
        whole = max(sides, key=lambda side: sum(item.nbytes for item in side))
        dtype = str(whole[0].dtype).removeprefix("torch.")
        return Issued(kind, ranks, sum(item.nbytes for item in whole), dtype)


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [found for item in value for found in flat(item)] if isinstance(value, list | tuple) else []


class Noted(NamedTuple):
    """One entry of the flight recorder of a process group: gloo's own name for the collective, and the ranks."""

    kind: str
    ranks: tuple[int, ...]


def flight_records(since: int = -1) -> dict[int, Noted]:
    """Entries of the flight recorder after a sequence number."""
    ranks = {name: tuple(_world.pg_group_ranks[group]) for group, name in _world.pg_names.items()}
    entries = {entry["record_id"]: entry for entry in json.loads(_dump_fr_trace_json()).get("entries", ())}
    assert since in (-1, *entries), "more entries than the recorder keeps"
    return {
        number: Noted(entries[number]["profiling_name"].partition(":")[2], ranks[entries[number]["process_group"][0]])
        for number in sorted(entries)
        if number > since
    }


@contextlib.contextmanager
def even_routing(model: nn.Module) -> Iterator[None]:
    """Let each expert of each mixture of experts get equally many rows, as the simulator takes it."""

    def spread(module: nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
        tokens, experts = logits.shape
        token, choice = torch.arange(tokens)[:, None], torch.arange(2)[None, :]
        wanted = torch.zeros_like(logits).scatter(1, (2 * token + choice) % experts, 1.0)
        return logits * 0 + wanted

    routers = [module for name, module in model.named_modules() if name.endswith("router")]
    handles = [router.register_forward_hook(spread) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def evenly_traced(trainer: Trainer) -> Trainer:
    """The trainer of a program, whose graphs of the step or of its stages, if it has any, route evenly as well."""
    build, pipeline = trainer.build_graph, trainer.pipeline
    if pipeline is not None:

        def build_stage(model: nn.Module, *args: Any) -> Any:
            with even_routing(model):
                return pipeline.build_stage(model, *args)

        return dataclasses.replace(trainer, pipeline=dataclasses.replace(pipeline, build_stage=build_stage))
    if build is None:
        return trainer

    def build_graph(model: nn.Module, *args: Any) -> Any:
        with even_routing(model):
            return build(model, *args)

    return dataclasses.replace(trainer, build_graph=build_graph)


def run_and_record(text: str) -> tuple[list[list[Issued]], list[Noted]]:
    """Take two optimizer steps of a lowered program on this rank, the first of one micro batch, as the simulator does.

    Returns:
        What was called in each step, and what the process groups noted in both of them.
    """
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    trainer, device = evenly_traced(namespace["trainer"]()), Device(type="cpu")
    with attention_kernel(trainer.attention_kernel):
        training = trainer.prepare(device, seed=0)
        source = Zeros(trainer)
        whole = Batches(training, source)
        before = max(flight_records(), default=-1)
        steps = []
        with even_routing(training.model):
            for index in range(STEPS):
                few = FewBatches(training, source, most=1 if index == 0 else None)
                batches = few if training.staged is None else whole
                with Recorder() as recorder:
                    take_step(trainer, training, batches, step=index)
                steps.append(recorder.issued)
    return steps, list(flight_records(before).values())
