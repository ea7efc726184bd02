"""Activation checkpointing within a memory budget: the choice of saved outputs that minimises recomputation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
)
from torch.utils.flop_counter import flop_registry

from legoai.runtime.recomputation.choice import Method, choose, need_solver
from legoai.runtime.recomputation.policies import (
    WAIT,
    Contexts,
    is_collective,
    is_traced,
    measured_alone,
    save,
    selective_contexts,
)
from legoai.runtime.recomputation.storages import changed_by, is_mutable, sizes, tensors_in
from legoai.runtime.torch_internals.distributed.collectives import resolve_process_group
from legoai.runtime.torch_internals.operators import OpOverload, TorchDispatchMode
from legoai.runtime.wrapped import plain_local_part, plain_parts
from legoai.specs.models.random_operators import is_random

FLOP_PER_BYTE: Final = 295
"""Arithmetic that takes as long as moving a byte of memory: 989 Tflop/s in bf16 over 3.35 TB/s (NVIDIA H100 SXM data
sheet). It only ranks operators; the ratio is of the same order on other accelerators."""
FLOP_PER_LINK_BYTE: Final = 2200
"""Arithmetic that takes as long as moving a byte between devices: 989 Tflop/s over 450 GB/s of NVLink in one direction
(the same data sheet)."""

Call = tuple[OpOverload, int]
"""The n-th call of an operator in one forward, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One call of an operator whose output can be saved.

    Attributes:
        call: operator and index of the call.
        size: bytes of its output.
        cost: of recomputing it, in floating-point operations or their equivalent.
        random: whether it draws random numbers.
    """

    call: Call
    size: int
    cost: float
    random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardMeasurement:
    """Operators of a module's forward, and the bytes that it saves.

    Attributes:
        operators: among which there is a choice.
        total: bytes saved for the backward pass without checkpointing, without parameters and inputs.
    """

    operators: tuple[Operator, ...]
    total: int

    def groups(self) -> tuple[tuple[Operator, ...], ...]:
        """The groups of operators that are saved together or not at all: random ones form one, each other is alone.

        If some random operators were recomputed and others not, they would draw other numbers than in forward.
        """
        random = tuple(item for item in self.operators if item.random)
        alone = tuple((item,) for item in self.operators if not item.random)
        return (*alone, random) if random else alone


class RecomputeWithin:
    """Checkpointing that saves operators' outputs within a budget, and recomputes the others.

    Pass it as `checkpoint_fn` of `checkpoint_wrapper`. Before the first forward with gradients, the module is run once
    more, to measure every operator at the shapes, dtypes and layouts of the training.

    Args:
        amount: a float is a share of what the module saves for the backward pass without checkpointing, 0.0 to 1.0; an
            int is a number of bytes. The module's inputs, which all checkpointing saves, are not counted.
        by: `greedy` takes operators by cost per byte, `knapsack` the best set up to rounding of sizes, `ilp` the best
            set by an integer program. Modules with equal measurements share one solution.

    Raises:
        RunError: `ilp` without a solver.
    """

    def __init__(self, amount: float | int, *, by: Method) -> None:
        need_solver(by)
        self.amount = amount
        self.by = by
        self.kept: frozenset[Call] | None = None

    def __call__(
        self,
        module: nn.Module,
        *args: Any,
        preserve_rng_state: bool = True,
        early_stop: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run the module checkpointed."""
        with _uncached_casts():
            if self.kept is None and torch.is_grad_enabled():
                self.kept = self._choose(measure(module, *args, **kwargs))
            return checkpoint(
                module,
                *args,
                use_reentrant=False,
                preserve_rng_state=preserve_rng_state,
                early_stop=early_stop,
                context_fn=self._contexts,
                **kwargs,
            )

    def _choose(self, measured: ForwardMeasurement) -> frozenset[Call]:
        budget = math.floor(self.amount * measured.total) if isinstance(self.amount, float) else self.amount
        groups = measured.groups()
        items = tuple((sum(item.size for item in group), sum(item.cost for item in group)) for group in groups)
        return frozenset(item.call for place in choose(items, budget, by=self.by) for item in groups[place])

    def _contexts(self) -> Contexts:
        kept = self.kept or frozenset()
        calls: Counter[OpOverload] = Counter()

        def policy(_: Any, operator: OpOverload, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
            call = (operator, calls[operator])
            calls[operator] += 1
            return save(call in kept)

        operators = {operator for operator, _ in kept}
        return selective_contexts(policy, operators.__contains__)


@contextmanager
def _uncached_casts() -> Iterator[None]:
    """Disable autocast's cache of cast parameters.

    The cache lives until autocast exits, so that measurement, forward and recomputation would call different operators,
    and calls are matched by their index. Recomputation inherits the setting.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def measure(module: nn.Module, *args: Any, **kwargs: Any) -> ForwardMeasurement:
    """Run a module's forward, and return its operators and saved bytes.

    The random state is restored, and so are buffers that the forward updates. Where the forward communicates, all
    members of a group return the same, the maximum of their measurements, since they have to save the same collectives.
    """
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.update(sizes([tensor]))
        recorder.until = recorder.count
        return tensor.detach()  # a saved output that referred to itself would never be freed

    with (
        measured_alone(module) as there,
        _random_state(args, kwargs),
        _Buffers(module) as buffers,
        saved_tensors_hooks(pack, lambda tensor: tensor),
        _Recorder(buffers) as recorder,
    ):
        output = module(*args, **kwargs)
    given = sizes((*tensors_in((args, kwargs)), *module.parameters(), *there))
    total = sum(size for storage, size in saved.items() if storage not in given)
    del output  # it holds saved tensors, and so has kept their storages distinct until here
    measured = ForwardMeasurement(operators=tuple(recorder.operators()), total=total)
    return measured if is_traced() else agree(measured, recorder.groups)


def _random_state(args: Any, kwargs: Any) -> AbstractContextManager[None]:
    """Restore the random state of the tensors' device and of the CPU in the end."""
    devices = {tensor.device for tensor in map(plain_local_part, tensors_in((args, kwargs)))} - {torch.device("cpu")}
    kind = next((device.type for device in devices), "cuda")
    return torch.random.fork_rng([device for device in devices if device.type == kind], device_type=kind)


class _Buffers:
    """Buffers of a module that an operator changes, or the module replaces, while this is entered: restored in the end.

    A buffer is copied when it is first changed, so that those that stay the same take neither time nor memory.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held = [(owner, name, held) for owner in module.modules() for name, held in owner._buffers.items()]
        self._parts = {
            part.untyped_storage()._cdata: part
            for _, _, held in self._held
            if held is not None
            for part in plain_parts(held)
        }
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> _Buffers:
        return self

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for part, before in self._before:
                part.copy_(before)
        for owner, name, held in self._held:
            owner._buffers[name] = held

    def keep(self, storages: Iterable[int]) -> None:
        """Copy the buffers in these storages, which are about to be changed."""
        for storage in storages:
            part = self._parts.pop(storage, None)
            if part is not None:
                self._before.append((part, part.detach().clone()))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator's size and cost, and which outputs cannot be saved.

    Views are never saved, since recomputing them costs nothing, and neither are tensors that are changed in place, nor
    outputs of operators that change them: torch refuses to return a tensor that was changed after it was saved.
    """

    def __init__(self, buffers: _Buffers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = buffers
        self.count = 0
        self.until = 0
        """Recomputation stops when the last tensor is there that the backward pass needs, after so many operators."""
        self.groups: dict[str, torch.device] = {}
        self._calls: Counter[OpOverload] = Counter()
        self._found: dict[Call, tuple[int, Operator]] = {}
        self._random: dict[Call, int] = {}
        self._owner: dict[int, Call] = {}

    def operators(self) -> Iterator[Operator]:
        """The operators among which there is a choice, in the order of their calls."""
        # All random operators are saved or none: if one of them cannot be, all are recomputed.
        lost = any(place < self.until and call not in self._found for call, place in self._random.items())
        for place, operator in self._found.values():
            if place < self.until and not (operator.random and lost):
                yield operator

    def __torch_dispatch__(
        self, operator: OpOverload, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        changed = [*changed_by(operator, args, kwargs)] if is_mutable(operator) else []
        self._buffers.keep(changed)
        output = operator(*args, **kwargs)
        if operator in SAC_IGNORED_OPS:
            return output
        call = (operator, self._calls[operator])
        self._calls[operator] += 1
        place, self.count = self.count, self.count + 1
        random = is_random(operator, args, kwargs)
        if random:
            self._random[call] = place
        read = sizes(tensors_in((args, kwargs)))
        made = sizes(tensors_in(output))
        if is_mutable(operator):
            self._forget(changed)
        elif made and not read.keys() & made.keys() and operator is not WAIT:  # a fake one returns other memory
            cost = _cost(operator, args, kwargs, output)
            self._found[call] = place, Operator(call=call, size=sum(made.values()), cost=cost, random=random)
            self._owner |= dict.fromkeys(made, call)
            if is_collective(operator):
                self._note_groups(operator, args, output)
        return output

    def _forget(self, storages: Iterable[int]) -> None:
        """Exclude tensors that are changed in place later."""
        for storage in storages:
            owner = self._owner.pop(storage, None)
            if owner is not None:
                self._found.pop(owner, None)

    def _note_groups(self, operator: OpOverload, args: Sequence[Any], output: Any) -> None:
        for parameter, value in zip(operator._schema.arguments, args, strict=False):
            if parameter.name == "group_name" and isinstance(value, str):
                self.groups[value] = next(tensors_in(output)).device


def agree(measured: ForwardMeasurement, groups: Mapping[str, torch.device]) -> ForwardMeasurement:
    """Take the maximum of sizes and costs over all ranks with which the module communicates.

    Args:
        measured: on this rank.
        groups: with which the module communicates, by name, each with the device of its tensors.
    """
    if not groups:
        return measured
    numbers: list[float] = [measured.total]
    numbers += [number for item in measured.operators for number in (item.size, item.cost)]
    device = next(iter(groups.values()))
    agreed = torch.tensor(numbers, dtype=torch.float64, device=device)
    for name in sorted(groups):
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=resolve_process_group(name))  # type: ignore[arg-type]
    total, *rest = agreed.tolist()
    operators = tuple(
        Operator(call=item.call, size=int(size), cost=cost, random=item.random)
        for item, size, cost in zip(measured.operators, rest[::2], rest[1::2], strict=True)
    )
    return ForwardMeasurement(operators=operators, total=int(total))


def _cost(operator: OpOverload, args: Any, kwargs: Any, output: Any) -> float:
    """Cost of recomputation: arithmetic, or moving the operands where that takes longer."""
    moved = sum(part.nbytes for tensor in tensors_in((args, kwargs, output)) for part in plain_parts(tensor))
    if is_collective(operator):
        return float(FLOP_PER_LINK_BYTE * moved)
    formula: Callable[..., Any] | None = flop_registry.get(operator._overloadpacket)
    flops = 0.0
    if formula is not None:
        # The operands may still be sharded differently than the product needs: their own shapes need not fit.
        flops = formula(*args, **kwargs, out_val=output) / _ranks_that_share(output)
    return float(max(flops, FLOP_PER_BYTE * moved))


def _ranks_that_share(output: Any) -> int:
    """Ranks over which a distributed tensor is cut, or is a sum of: each computes a share of it."""
    one = next((tensor for tensor in tensors_in(output) if isinstance(tensor, DTensor)), None)
    if one is None:
        return 1
    sizes = zip(one.device_mesh.shape, one.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())
