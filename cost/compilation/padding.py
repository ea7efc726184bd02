"""Padding of matrix products to the alignment of the fastest kernels, as inductor pads them.

`torch/_inductor/fx_passes/pad_mm.py` pads a product where any of its dims is no multiple of 16 bytes, the product is
bound by arithmetic and not by memory, and a measurement shows that it pays. Here it pays where rows of the matrices do
not begin at multiples of 16 bytes: such products run at a fraction of the rate
(`legoai.cost.machine.kernel_time.narrow_rate`), and others as fast as padded ones. Single precision is left as it is,
since it is computed without tensor cores by default, and alignment matters little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import fx

from legoai.cost.kernels.kinds import ALIGNED
from legoai.cost.simulated.operators.alignment import Matrix, alignments
from legoai.runtime.torch_internals.fake_tensors import FakeTensorMode
from legoai.specs.cluster import CatalogueError, Device

_aten: Final = torch.ops.aten
_PRODUCTS: Final = {_aten.mm.default: 0, _aten.bmm.default: 0, _aten.addmm.default: 1}
"""Where the first factor is among the arguments."""
_HALF_PRECISION: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_HOPPER: Final = 9.0
"""Compute capability below which inductor takes bf16 products of long sums as bound by arithmetic."""
_OF_BALANCE: Final = 0.5
"""Share of the device's operations for each byte from which on inductor takes a product as bound by arithmetic."""


def pad_products(graph: fx.GraphModule, mode: FakeTensorMode, gpu: Device) -> None:
    """Pad the products of a joint graph.

    Args:
        graph: of `aten` operators; changed.
        mode: of the graph's tensors.
        gpu: the device.
    """
    padded: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
    for node in list(graph.graph.nodes):
        first = _PRODUCTS.get(node.target) if node.op == "call_function" else None
        if first is None:
            continue
        left, right = node.args[first : first + 2]
        m, k = left.meta["val"].shape[-2:]
        n = right.meta["val"].shape[-1]
        dtype = left.meta["val"].dtype
        if dtype not in _HALF_PRECISION or 0 in left.meta["val"].shape:
            continue
        # A dim of size 1 is squeezed away.
        more_m, more_k, more_n = (-size % (ALIGNED // dtype.itemsize) if size > 1 else 0 for size in (m, k, n))
        unaligned = alignments([Matrix.of(one.meta["val"]) for one in (left, right)], Matrix.of(node.meta["val"]))
        if unaligned and (more_m or more_k or more_n) and _is_bound_by_arithmetic(m, k, n, dtype, gpu):
            _Padding(graph.graph, node, mode, padded).run(first, more_m, more_k, more_n)


class _Padding:
    """Replacement of one product by one of padded operands, of whose result a part is taken."""

    def __init__(
        self,
        graph: fx.Graph,
        node: fx.Node,
        mode: FakeTensorMode,
        padded: dict[tuple[fx.Node, tuple[int, ...]], fx.Node],
    ) -> None:
        self._graph, self._node, self._mode, self._padded = graph, node, mode, padded

    def run(self, first: int, more_m: int, more_k: int, more_n: int) -> None:
        """Replace the product, whose first factor is the argument ``first``, and whose dims grow by so much."""
        node = self._node
        args = list(node.args)
        with self._graph.inserting_before(node):
            args[first] = self._pad(args[first], (0, more_k, 0, more_m))
            args[first + 1] = self._pad(args[first + 1], (0, more_n, 0, more_k))
            if first:
                args[0] = self._pad(args[0], self._of_addend(args[0], more_m, more_n))
            found = self._call(node.target, args, node.kwargs)
            for dim, more in ((-2, more_m), (-1, more_n)):
                if more:
                    found = self._call(_aten.slice.Tensor, [found, dim, 0, found.meta["val"].shape[dim] - more], {})
        node.replace_all_uses_with(found)
        self._graph.erase_node(node)

    def _of_addend(self, addend: Any, more_m: int, more_n: int) -> tuple[int, ...]:
        """How much the addend of a product grows: not in dims over which it is broadcast."""
        shape = addend.meta["val"].shape
        grows = [more if size != 1 else 0 for size, more in zip(shape[::-1], (more_n, more_m), strict=False)]
        return tuple(size for more in grows for size in (0, more))

    def _pad(self, operand: Any, lengths: tuple[int, ...]) -> Any:
        if not any(lengths):
            return operand
        found = self._padded.get((operand, lengths))
        if found is None:
            found = self._padded[operand, lengths] = self._call(_aten.constant_pad_nd.default, [operand, lengths], {})
        return found

    def _call(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> fx.Node:
        """Insert a call that has the source of the product, and the tensor that it returns."""
        node = self._graph.call_function(target, tuple(args), kwargs)
        node.meta = {name: value for name, value in self._node.meta.items() if name not in ("val", "tensor_meta")}
        known = [one.meta["val"] if isinstance(one, fx.Node) else one for one in args]
        with self._mode:
            node.meta["val"] = target(*known, **kwargs)
        return node


def _is_bound_by_arithmetic(m: int, k: int, n: int, dtype: torch.dtype, gpu: Device) -> bool:
    """As `is_mm_compute_bound` of `pad_mm.py`, with the datasheet's figures; true where these are not known."""
    capability = gpu.compute_capability
    if dtype is torch.bfloat16 and k > m and k > n and capability is not None and float(capability) < _HOPPER:
        return True
    try:
        balance = gpu.peak(_HALF_PRECISION[dtype]) / gpu.figure("memory.bandwidth_bytes_per_second")
    except CatalogueError:
        return True
    return m * k * n / (m * k + n * k + m * n) > _OF_BALANCE * balance
