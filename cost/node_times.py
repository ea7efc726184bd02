"""Predicted times of the nodes of a step's graph on a cluster, as a simulation of the step uses them.

A program passes them to the pass that lets torch schedule communication. They depend only on the devices of the
catalogue and on shapes, so that every rank, and the simulator, computes the same schedule.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.distributed_c10d import GroupName
from torch.fx.node import map_arg

from legoai.cost.machine.cluster import Machine
from legoai.cost.machine.collective_time import network_of
from legoai.cost.machine.op_costs import OpCosts
from legoai.cost.network.topology import World
from legoai.cost.profiles import profile
from legoai.cost.simulated.operators.properties import Operator, description, operator, tensors, type_of, whole_buffer
from legoai.cost.timing.timeline import Timed
from legoai.cost.trace.records import Collective, Kernel
from legoai.runtime.torch_internals.distributed.collectives import resolve_process_group
from legoai.runtime.torch_internals.operators import OpOverload
from legoai.specs.cluster import Cluster, device, fabric


class NodeTimes:
    """Milliseconds of nodes when nothing runs beside them.

    Args:
        name: of the device, in the catalogue.
        hosts: of the cluster.
        devices: of each host.
        fabric: between hosts, in the catalogue.
    """

    def __init__(self, name: str, *, devices: int, hosts: int = 1, fabric: str | None = None) -> None:
        self._name = name
        self._hosts = hosts
        self._devices = devices
        self._fabric = fabric

    @functools.cached_property
    def costs(self) -> OpCosts:
        """Costs of the cluster's operations; loaded on first use."""
        wires = fabric(self._fabric) if self._fabric is not None else None
        # The slowest group's times, which are the same on every rank, wherever its own groups lie.
        world = World(dist.get_world_size()) if dist.is_initialized() else None
        cluster = Cluster(device=device(self._name), hosts=self._hosts, devices_per_host=self._devices, fabric=wires)
        network = network_of(cluster)
        return OpCosts(machine=Machine(cluster=cluster, profile=profile(self._name), network=network, world=world))

    def __call__(self, node: fx.Node, bytes: int | None = None) -> float | None:
        """Return the milliseconds of a node; None where it is no operation of the device.

        Args:
            node: with the shapes of its inputs and outputs.
            bytes: of the buffer of a collective, where it differs from the node's own.
        """
        if not isinstance(node.target, OpOverload):
            return None
        record = _record(node, node.target, bytes)
        return None if record is None else 1e3 * self.costs(record).seconds

    def transfer(self, node: fx.Node) -> tuple[str, int] | None:
        """Return the kind and ranks of a collective, and the bytes of its buffer; None for other nodes.

        Ranks are given relative to the first, which is the same for all groups of an axis.
        """
        if not isinstance(node.target, OpOverload) or operator(node.target).treatment != "collective":
            return None
        record = _record(node, node.target, None)
        assert isinstance(record, Collective), "a collective"
        first, *others = record.ranks
        return f"{record.kind} {' '.join(str(rank - first) for rank in others)}", record.bytes


def _record(node: fx.Node, func: OpOverload, bytes: int | None) -> Timed | None:
    """Return the record that the simulated device would make of a node."""
    known = operator(func)
    if known.treatment not in ("kernel", "copy", "collective"):
        return None
    args: tuple[Any, ...] = map_arg(node.args, _value)
    names = {item.name for item in func._schema.arguments}
    kwargs: dict[str, Any] = {name: map_arg(value, _value) for name, value in node.kwargs.items() if name in names}
    out = node.meta["val"]
    inputs = list(tensors((args, tuple(kwargs.values()))))
    if known.treatment == "collective":
        return _collective(known, args, out, bytes)
    fresh = [] if known.written else list(tensors(out))
    said = description(func, known, args, kwargs, inputs=inputs, fresh=fresh, out=out)
    return Kernel(stream=0, module="", phase="other", **said)


def _collective(known: Operator, args: tuple[Any, ...], out: Any, bytes: int | None) -> Collective:
    assert known.collective is not None
    whole = whole_buffer(known, args, out)
    size = sum(item.numel() * item.itemsize for item in whole) if bytes is None else bytes
    return Collective(
        work=0, stream=0, kind=known.collective, ranks=_ranks(args[known.group]), axis="", bytes=size,
        dtype=type_of(whole[0]).dtype, module="", phase="other",
    )  # fmt: skip


def _ranks(group: str) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(resolve_process_group(GroupName(group))))


def _value(node: fx.Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value
