"""Conversion of inductor's scheduler state: kernels, their buffers, and buffer lifetimes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from legoai.cost.compilation.async_tp import is_in_pieces, pieces_of
from legoai.cost.compilation.schedule import MODULE, Call, Given, Schedule, Slot, Step, Work
from legoai.cost.simulated.device import SimulationError
from legoai.cost.simulated.operators.alignment import Matrix, alignments
from legoai.cost.simulated.operators.grouped_products import is_by_group
from legoai.cost.simulated.operators.properties import FACTORS, Operator, description, operator, tensors
from legoai.cost.trace.records import TensorType
from legoai.runtime.torch_internals.compiler.inductor import (
    BaseSchedulerNode,
    GraphLowering,
    MemoryDep,
    NopKernelSchedulerNode,
    OrderedSet,
    Scheduler,
    SchedulerNode,
    ir,
)
from legoai.runtime.torch_internals.operators import OpOverload, tree_map


@dataclass(slots=True)
class Reader:
    """Converts the schedule of a lowered graph.

    Args:
        lowering: of the graph.
        grouped_kernel: whether the device has a kernel of grouped products.
    """

    lowering: GraphLowering
    grouped_kernel: bool = True
    made: set[str] = field(default_factory=set)
    order: dict[torch.fx.Node, int] = field(default_factory=dict)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that fused and ordered the graph's nodes."""
        return self.lowering.scheduler

    def read(self) -> Schedule:
        """Return the schedule."""
        self.order = {node: index for index, node in enumerate(self.lowering.orig_gm.graph.nodes)}
        steps = [step for node in self.scheduler.nodes for step in self._steps(node)]
        return Schedule(
            inputs=tuple(self.lowering.graph_input_names),
            steps=tuple(steps),
            outputs=tuple(map(self._value, self.lowering.graph_outputs)),
        )

    def _value(self, value: Any) -> Any:
        """Return the slot of a tensor, or any other argument or output as it is."""
        if isinstance(value, ir.NoneAsConstantBuffer):
            return None
        if isinstance(value, ir.ShapeAsConstantBuffer):
            return int(value.expr)
        if isinstance(value, ir.TorchBindObject):
            return value.get_real_obj()
        if isinstance(value, ir.OpaqueObjectState):
            return Given(value.get_name())
        if isinstance(value, ir.NonTensorObj):
            raise SimulationError(f"a graph with {type(value).__name__} is not supported")
        return self._slot(value)

    def _slot(self, value: Any) -> Slot:
        layout = value.get_layout()
        if isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
            layout = layout.real_layout()
        if isinstance(layout, ir.NonOwningLayout):
            layout = layout.as_fixed()
        shape, stride = tuple(map(int, layout.size)), tuple(map(int, layout.stride))
        return Slot(value.get_name(), shape, stride, int(layout.offset), layout.dtype)

    def _steps(self, node: BaseSchedulerNode) -> Iterator[Step]:
        drops = tuple(sorted(node.last_usage))
        inner = node.get_nodes()
        if isinstance(inner[0], SchedulerNode):
            yield self._group(node, drops)
            return
        for member in inner:
            if isinstance(member, NopKernelSchedulerNode):
                yield Step(makes=tuple(self._fresh(member.node)), drops=drops)
            else:
                yield self._extern(member.node, drops)

    def _fresh(self, buffer: Any) -> Iterator[Slot]:
        """Yield the buffer that holds this one, if it is not allocated yet."""
        layout = buffer.get_output_spec()
        if isinstance(layout, ir.NonOwningLayout):
            yield from self._fresh(_held(layout))
        elif isinstance(layout, ir.Layout) and not isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
            name = buffer.get_name()
            if name not in self.made:
                self.made.add(name)
                yield self._slot(buffer)

    def _group(self, node: BaseSchedulerNode, drops: tuple[str, ...]) -> Step:
        names = OrderedSet(member.get_name() for member in node.get_nodes())
        makes: list[Slot] = []
        aliases: list[tuple[str, str]] = []
        outputs: list[TensorType] = []
        taken: set[str] = set()
        for member in node.get_nodes():
            for output in member.get_outputs():
                name = output.get_name()
                if self.scheduler.can_buffer_be_removed_through_fusion(name, names):
                    continue
                assert output.node is not None
                layout = output.node.get_output_spec()
                outputs.append(_type(self._slot(output.node)))
                if isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
                    aliases.append((name, layout.get_buffer().get_name()))
                    continue
                if isinstance(layout, ir.NonOwningLayout):
                    makes.extend(self._fresh(output.node))
                    aliases.append((name, _held(layout).get_name()))
                    continue
                place = self._overwritten(node, member, output.node, drops, taken)
                if place is None:
                    makes.extend(self._fresh(output.node))
                else:
                    taken.add(place)
                    self.made.add(name)
                    aliases.append((name, place))
        origins = self._origins(node)
        work = Work(
            op=_name_of_group(origins),
            inputs=tuple(_type(self._slot_of(name)) for name in self._reads(node)),
            outputs=tuple(outputs),
            flops=0,
            bytes_read=self._accessed(node, reads=True),
            bytes_written=self._accessed(node, reads=False),
            attributes={},
            module=_module_of(origins),
        )
        return Step(makes=tuple(makes), aliases=tuple(aliases), work=work, drops=drops)

    def _accessed(self, node: BaseSchedulerNode, *, reads: bool) -> int:
        """Return the bytes that a kernel reads or writes.

        Inductor treats each fused group as one of 10⁹ elements: it counts no tensor as larger, which logits exceed, and
        counts a tensor in full of which a few elements are gathered.
        """
        counted = node.get_read_write_buffer_accesses(include_reads=reads, include_writes=not reads)
        spans = [_elements_of(member) for member in node.get_nodes() if isinstance(member, SchedulerNode)]
        if isinstance(node, SchedulerNode) or not spans:
            return sum(counted.values())
        touched = [dep.name for dep in (node.read_writes.reads if reads else node.read_writes.writes)]
        total = 0
        for name, bytes in counted.items():
            if not self._is_tensor(name):
                total += bytes
                continue
            slot = self._slot_of(name)
            total += min(_elements(slot), touched.count(name) * max(spans)) * slot.dtype.itemsize
        return total

    def _overwritten(
        self, group: BaseSchedulerNode, member: BaseSchedulerNode, buffer: Any, drops: Sequence[str], taken: set[str]
    ) -> str | None:
        """Return the buffer whose memory inductor's `decide_inplace_update` reuses for this one; None if there is none.

        It has the same size and dtype, and is read for the last time, elementwise as this one is written.
        """
        own = self._slot(buffer)
        (write,) = [dep for dep in member.read_writes.writes if dep.name == buffer.get_name()] or (None,)
        for read in member.read_writes.reads:
            name = read.name
            if name not in drops or name in taken or name not in self.made | set(self._donated()):
                continue
            if not isinstance(read, MemoryDep) or not isinstance(write, MemoryDep):
                continue
            uses = {
                (dep.index, dep.size)
                for other in group.get_nodes()
                for dep in other.read_writes.reads
                if isinstance(dep, MemoryDep) and dep.name == name
            }
            if uses != {(write.index, write.size)}:
                continue
            other = self._slot_of(name)
            if other.dtype == own.dtype and _elements(other) == _elements(own):
                return name
        return None

    def _donated(self) -> dict[str, Any]:
        return self.scheduler.name_to_donated_buffer

    def _reads(self, node: BaseSchedulerNode) -> list[str]:
        inside = {output.get_name() for member in node.get_nodes() for output in member.get_outputs()}
        found = {dep.name: None for member in node.get_nodes() for dep in member.read_writes.reads}
        return [name for name in found if name not in inside and self._is_tensor(name)]

    def _is_tensor(self, name: str) -> bool:
        buffer = self.lowering.try_get_buffer(name)
        return buffer is not None and isinstance(buffer.get_output_spec(), ir.Layout)

    def _slot_of(self, name: str) -> Slot:
        buffer = self.lowering.try_get_buffer(name)
        assert buffer is not None
        return self._slot(buffer)

    def _origins(self, node: BaseSchedulerNode) -> list[torch.fx.Node]:
        found = {
            origin for member in node.get_nodes() if member.node is not None for origin in member.node.get_origins()
        }
        return sorted(found, key=lambda origin: self.order.get(origin, -1))

    def _extern(self, kernel: Any, drops: tuple[str, ...]) -> Step:
        if isinstance(kernel, ir.MultiOutput):
            return Step(makes=tuple(self._fresh(kernel)), drops=drops)
        if isinstance(kernel, ir.RandomSeeds):
            makes = tuple(self._fresh(kernel))
            return Step(makes=makes, work=_draw_of_seeds(self._slot(kernel)), drops=drops)
        origin = self._origin(kernel)
        function = origin.target
        assert isinstance(function, OpOverload)
        if is_in_pieces(function):
            pieces = pieces_of(function, origin, _module_of([origin]))
            return Step(makes=tuple(self._fresh(kernel)), work=pieces, drops=drops)
        known = operator(function)
        if known.treatment in ("collective", "wait"):
            return self._communication(kernel, known, origin, drops)
        if is_by_group(function, list(map(_meta, origin.args[:1])), kernel=self.grouped_kernel):
            return self._by_group(kernel, origin, drops)
        makes = tuple(self._fresh(kernel))
        if known.treatment == "nothing":
            return Step(makes=makes, drops=drops)
        work = _work(function, known, origin)
        if known.name in FACTORS:
            # Inductor lays out intermediate results as it likes, with rows that are padded to an alignment.
            matrices = [_matrix(item) for item in (*kernel.inputs[FACTORS[known.name] :][:2], kernel)]
            work = replace(work, attributes=alignments(matrices[:2], matrices[2]))
        return Step(makes=makes, work=work, drops=drops)

    def _origin(self, kernel: Any) -> torch.fx.Node:
        """Return the node of the graph whose operator a library kernel computes."""
        function = getattr(kernel, "op_overload", None)
        candidates = [kernel.get_origin_node(), *kernel.get_origins()]
        matching = {
            node
            for node in candidates
            if node is not None
            and isinstance(node.target, OpOverload)
            and isinstance(function, OpOverload)
            and _same_operator(node.target, function)
        }
        if not matching:
            raise SimulationError(f"inductor calls {function or type(kernel).__name__}, which is not supported")
        latest: torch.fx.Node = max(matching, key=lambda node: self.order.get(node, -1))
        return latest

    def _communication(self, kernel: Any, known: Operator, origin: torch.fx.Node, drops: tuple[str, ...]) -> Step:
        inputs = [self._value(item) for item in kernel.inputs]
        args, kwargs = kernel.unflatten_args(inputs, kernel.constant_args)
        function = kernel.op_overload
        fresh = isinstance(kernel.get_output_spec(), ir.Layout)
        if fresh:
            self.made.add(kernel.get_name())
        elif known.treatment == "collective" and not function._schema.is_mutable:
            raise SimulationError(f"{known.name} of several tensors in a compiled module is not supported")
        call = Call(
            function=function,
            args=tuple(args),
            kwargs=dict(kwargs),
            result=kernel.get_name() if fresh else None,
            module=_module_of([origin]),
        )
        return Step(work=call, drops=drops)

    def _by_group(self, kernel: Any, origin: torch.fx.Node, drops: tuple[str, ...]) -> Step:
        self.made.add(kernel.get_name())
        function = origin.target
        assert isinstance(function, OpOverload)
        call = Call(
            function=function,
            args=tuple(self._value(item) for item in kernel.inputs),
            kwargs=dict(origin.kwargs),
            result=kernel.get_name(),
            module=_module_of([origin]),
        )
        return Step(work=call, drops=drops)


def _meta(item: Any) -> Any:
    """Return the output tensor of a node of a graph."""
    return item.meta["val"] if isinstance(item, torch.fx.Node) else item


def _matrix(item: Any) -> Matrix:
    """Return the matrix of a buffer, or of a view of one."""
    layout = item.get_layout()
    offset = int(layout.offset)
    return Matrix(list(map(int, layout.size)), list(map(int, layout.stride)), offset, layout.dtype.itemsize)


def _held(layout: ir.NonOwningLayout) -> Any:
    """Return the buffer of which a tensor is a part, as in a concatenation."""
    held: Any = layout.view
    while not isinstance(held, ir.Buffer):
        held = held.data
    return held


def _same_operator(one: OpOverload, other: OpOverload) -> bool:
    """Whether two operators are variants of one: `mm` and `mm.out`, `all_reduce` and `all_reduce_`."""
    return one._schema.name.rstrip("_") == other._schema.name.rstrip("_")


def _work(function: OpOverload, known: Operator, origin: torch.fx.Node) -> Work:
    """Return the kernel of an operator that a library computes."""
    args, kwargs = tree_map(_meta, _call(origin))
    out = origin.meta["val"]
    results = list(tensors(out))
    inputs = list(tensors((args, tuple(kwargs.values()))))
    said = description(function, known, args, kwargs, inputs=inputs, fresh=results, out=out)
    return Work(module=_module_of([origin]), **said)


def _draw_of_seeds(seeds: Slot) -> Work:
    """Return the kernel that draws the seeds of all random numbers of a graph, such as those of dropout."""
    count = _elements(seeds) * seeds.dtype.itemsize
    return Work(
        op="aten.randint", inputs=(), outputs=(_type(seeds),), flops=0, bytes_read=0, bytes_written=count,
        attributes={}, module="",
    )  # fmt: skip


def _call(node: torch.fx.Node) -> Any:
    return node.args, node.kwargs


def _type(slot: Slot) -> TensorType:
    return TensorType(slot.shape, str(slot.dtype).removeprefix("torch."))


def _elements_of(node: SchedulerNode) -> int:
    """Return the number of elements over which a node runs, including reduced ones."""
    return math.prod(int(size) for sizes in node.get_ranges() for size in sizes)


def _elements(slot: Slot) -> int:
    return functools.reduce(lambda product, size: product * size, slot.shape, 1)


def _name_of_group(origins: Sequence[torch.fx.Node]) -> str:
    """Return `fused(aten.mul, aten.add)`: the operators in the graph's order, each once, without views.

    A tensor that is copied to another layout for a product has the product among its origins, which is not in the
    group.
    """
    names: dict[str, None] = {}
    for node in origins:
        if isinstance(node.target, OpOverload) and not is_in_pieces(node.target):
            known = operator(node.target)
            if known.treatment in ("kernel", "copy") and node.target.overloadpacket not in flop_registry:
                names[known.name] = None
    return f"fused({', '.join(names)})"


def _module_of(origins: Sequence[torch.fx.Node]) -> str:
    """Return the innermost module that contains all of some nodes."""
    paths = [str((node.meta.get("custom") or {}).get(MODULE, "")).split(".") for node in origins]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
