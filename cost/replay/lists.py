"""Kernels over lists of the tensors of all blocks, and their growth with the number of blocks.

The gradient norm, clipping and the optimizer take every parameter at once. For each further block their lists grow by
the tensors of the middle block, with the traffic of each tensor. Vectors with one element per tensor of a list grow
too, also after a sum or a maximum over ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from legoai.cost.replay.repeated_blocks import TAKEN
from legoai.cost.replay.walk import Unequal, Walk
from legoai.cost.trace.editing import Operands
from legoai.cost.trace.numbers import NONE
from legoai.cost.trace.records import Collective, Kernel, TensorType

_JOINS: Final = frozenset({"aten.stack", "aten.cat"})
"""Operators whose one output is as long as their list of inputs."""

Stretch: TypeAlias = tuple[int, tuple[int, ...]]
"""Length of a vector, and its increase with a further block of each container."""


class ListPart(NamedTuple):
    """Consecutive tensors of a list.

    Attributes:
        types: of the tensors.
        traffic: bytes that the kernel reads and writes of them.
        container: each further block of this container adds the same tensors again; `NONE` for none.
        stretch: of one vector whose length depends on the number of blocks; None otherwise.
    """

    types: tuple[TensorType, ...]
    traffic: tuple[int, int]
    container: int = NONE
    stretch: Stretch | None = None

    def grown(self, missing: Sequence[int]) -> tuple[tuple[TensorType, ...], int, int]:
        """Return its tensors, and the bytes read and written, with ``missing`` further blocks of each container."""
        read, written = self.traffic
        if self.stretch is not None:
            (kind,), (short, _) = self.types, self.stretch
            long = stretched_length(self.stretch, missing)
            types = (TensorType((long, *kind.shape[1:]), kind.dtype),)
            return types, read * long // short, written * long // short
        times = 1 if self.container == NONE else 1 + missing[self.container]
        return self.types * times, read * times, written * times


@dataclasses.dataclass(frozen=True, slots=True)
class ListKernel:
    """A kernel whose list of tensors grows with the blocks.

    Attributes:
        kernel: as it was captured.
        inputs: its tensors.
        outputs: its newly allocated outputs.
    """

    kernel: Kernel
    inputs: tuple[ListPart, ...]
    outputs: tuple[ListPart, ...]

    def grown(self, missing: Sequence[int]) -> Kernel:
        """Return the kernel with ``missing`` further blocks of each container."""
        inputs = [part.grown(missing) for part in self.inputs]
        outputs = [part.grown(missing) for part in self.outputs]
        return dataclasses.replace(
            self.kernel,
            inputs=tuple(itertools.chain.from_iterable(types for types, _, _ in inputs)),
            outputs=tuple(itertools.chain.from_iterable(types for types, _, _ in outputs)),
            bytes_read=sum(read for _, read, _ in inputs),
            bytes_written=sum(written for _, _, written in inputs) + sum(written for _, _, written in outputs),
        )


class _Entry(NamedTuple):
    """One tensor of a list, the bytes read and written of it, and its container and block."""

    type: TensorType
    number: int
    traffic: tuple[int, int]
    owner: tuple[int, int]


def stretched_length(stretch: Stretch, missing: Sequence[int]) -> int:
    """Return the length of a vector with ``missing`` further blocks of each container."""
    short, more = stretch
    return short + sum(each * count for each, count in zip(more, missing, strict=True))


def find_stretched(walk: Walk) -> dict[int, tuple[int, int]]:
    """Return the vectors with one element per tensor of a list: their lengths, and the increase per block.

    Keys are the vectors' storages; a vector keeps its storage when it is reduced over ranks in place.
    """
    found: dict[int, tuple[int, int]] = {}
    for record, used, own in zip(walk.trace.records, walk.trace.operands, walk.trace.numbers, strict=True):
        if used is None or len(used.outputs) > 1:
            continue
        if isinstance(record, Collective):
            for reduced in used.inputs:
                if reduced in found:
                    found |= dict.fromkeys((own, *used.outputs), found[reduced])
            continue
        if not isinstance(record, Kernel) or not used.outputs:
            continue
        shape, result = record.outputs[0].shape, used.outputs[0]
        if record.op in _JOINS and shape[:1] == (len(used.inputs),) and _spans(walk, record, used):
            found[result] = shape[0], sum(walk.owners.get(number, NONE) == walk.middle for number in used.inputs)
        for number in used.inputs:
            if number in found and shape == (found[number][0],):
                found[result] = found[number]
    return found


def stretched_by_all(stretched: Sequence[Mapping[int, tuple[int, int]]]) -> dict[int, Stretch]:
    """Return the vectors whose length depends on the number of blocks of any container.

    Args:
        stretched: for each container, the result of :func:`find_stretched`.
    """
    found: dict[int, Stretch] = {}
    for storage in {storage for one in stretched for storage in one}:
        lengths = {one[storage][0] for one in stretched if storage in one}
        if len(lengths) > 1:
            raise Unequal
        found[storage] = lengths.pop(), tuple(one.get(storage, (0, 0))[1] for one in stretched)
    return found


def list_kernel(
    kernel: Kernel, used: Operands, repetitions: Sequence[Walk], stretched: Mapping[int, Stretch]
) -> ListKernel | None:
    """Return the growth of a kernel with the blocks; None where it does not grow.

    Args:
        kernel: of the trace.
        used: its tensors.
        repetitions: of the blocks of each container.
        stretched: storages of vectors whose length depends on the number of blocks.

    Raises:
        Unequal: the kernel uses the blocks in an unsupported way.
    """
    # For one element of a vector, such as the scale of one layer, the kernel's time does not depend on the length.
    widened = any(number in stretched and kind.shape for number, kind in zip(used.inputs, kernel.inputs, strict=True))
    spanned = [index for index, one in enumerate(repetitions) if _spans(one, kernel, used)]
    if not widened and not spanned:
        return None
    if not used.whole or kernel.flops:
        raise Unequal
    owners = {
        number: (index, repetitions[index].owners[number])
        for index in spanned
        for number in {*used.inputs, *used.outputs} & repetitions[index].owners.keys()
    }
    inputs = _entries(kernel.inputs, used.inputs, list(zip(used.read, used.written, strict=True)), owners)
    outputs = _entries(kernel.outputs, used.outputs, [(0, new) for new in used.new], owners)
    joined = bool(spanned) and len(outputs) == 1
    if joined and (outputs[0].number not in stretched or widened):
        raise Unequal
    if spanned and len(outputs) not in (0, 1, len(inputs)):
        raise Unequal
    if widened:
        if any(e.number in stretched and e.type.shape != stretched[e.number][:1] for e in inputs):
            raise Unequal
        if any(e.number not in stretched and e.type.shape for e in outputs):
            raise Unequal
    return ListKernel(
        kernel,
        tuple(_parts(inputs, repetitions, stretched if widened else {})),
        tuple(_parts(outputs, () if joined else repetitions, stretched if widened or joined else {})),
    )


def _entries(
    types: Sequence[TensorType],
    numbers: Sequence[int],
    traffic: Sequence[tuple[int, int]],
    owners: Mapping[int, tuple[int, int]],
) -> list[_Entry]:
    return [
        _Entry(kind, number, shares, owners.get(number, (NONE, NONE)))
        for kind, number, shares in zip(types, numbers, traffic, strict=True)
    ]


def _parts(
    entries: Sequence[_Entry], repetitions: Sequence[Walk], stretched: Mapping[int, Stretch]
) -> Iterator[ListPart]:
    """Yield the parts of a list: those of each block, and vectors whose length grows."""
    runs = [list(run) for _, run in itertools.groupby(entries, key=lambda entry: entry.owner)]
    for at, run in enumerate(runs):
        container, block = run[0].owner
        repeats = bool(repetitions) and container != NONE and block == repetitions[container].middle
        if repeats:
            if not 0 < at < len(runs) - 1:
                raise Unequal
            before, behind = runs[at - 1], runs[at + 1][0].owner
            step = behind[1] - block
            if abs(step) != 1 or behind[0] != container or before[0].owner != (container, block - step):
                raise Unequal
            if [(e.type, e.traffic) for e in before] != [(e.type, e.traffic) for e in run]:
                raise Unequal
        yield from _split(run, container if repeats else NONE, stretched)


def _split(run: Sequence[_Entry], container: int, stretched: Mapping[int, Stretch]) -> Iterator[ListPart]:
    """Yield the tensors of a run as parts; vectors whose length grows form parts of their own."""
    for long, group in itertools.groupby(run, key=lambda entry: entry.number in stretched):
        if not long:
            own = list(group)
            sums = sum(e.traffic[0] for e in own), sum(e.traffic[1] for e in own)
            yield ListPart(tuple(e.type for e in own), sums, container)
            continue
        if container != NONE:
            raise Unequal
        for entry in group:
            stretch = stretched[entry.number]
            if any(share % stretch[0] for share in entry.traffic):
                raise Unequal
            yield ListPart((entry.type,), entry.traffic, NONE, stretch)


def _spans(walk: Walk, kernel: Kernel, used: Operands) -> bool:
    """Whether a kernel outside the blocks takes tensors of all of them."""
    if walk.block_of(kernel.module) != NONE or len(used.inputs) < TAKEN:
        return False
    blocks = {walk.owners.get(number, NONE) for number in used.inputs}
    return {walk.middle - 1, walk.middle, walk.middle + 1} <= blocks
