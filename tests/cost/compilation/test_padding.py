"""Padding of matrix products: equal results, and only where inductor would consider it."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from legoai.cost.compilation.padding import pad_products
from legoai.runtime.torch_internals.fake_tensors import FakeTensorMode
from legoai.specs.cluster import device
from support.marks import slow_but

aten = torch.ops.aten


def padded(function, *tensors: torch.Tensor, gpu: str = "h100_sxm") -> fx.GraphModule:
    """The graph of a function after padding."""
    graph = make_fx(function, tracing_mode="fake")(*tensors)
    mode = next(node.meta["val"].fake_mode for node in graph.graph.nodes if "val" in node.meta)
    assert isinstance(mode, FakeTensorMode)
    pad_products(graph, mode, device(gpu))
    graph.graph.lint()
    graph.recompile()
    return graph


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def count(graph: fx.GraphModule, target: object) -> int:
    return sum(node.target is target for node in graph.graph.nodes)


# The smallest that an A100 is bound by arithmetic for: a processor takes seconds for products that an H100 is.
@pytest.mark.parametrize("sizes", slow_but([(512, 511, 512), (512, 512, 511), (509, 510, 511)], (509, 510, 511)))
@pytest.mark.parametrize("kind", ["mm", "bmm", "addmm", "addmm by rows", "addmm of a matrix"])
def test_padded_products_have_the_same_values(kind: str, sizes: tuple[int, int, int]):
    m, k, n = sizes
    outer = (2,) if kind == "bmm" else ()
    factors = [drawn(*outer, m, k), drawn(*outer, k, n)]
    addend = {"addmm": (n,), "addmm by rows": (m, 1), "addmm of a matrix": (m, n)}.get(kind)
    tensors = [*([drawn(*addend)] if addend else []), *factors]
    function = getattr(aten, kind.split()[0])
    graph = padded(function, *tensors, gpu="a100_sxm80")
    [product] = [node for node in graph.graph.nodes if node.target is function.default]
    shapes = [one.meta["val"].shape for one in (*product.args[-2:], product)]
    assert all(size % 8 == 0 for shape in shapes for size in shape[-2:])
    found, expected = graph(*tensors), function(*tensors)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.5)


def test_operand_of_several_products_is_padded_once():
    graph = padded(lambda x, y: (x @ y, x @ (y + 1)), drawn(1024, 1023), drawn(1023, 1024))
    assert (count(graph, aten.mm.default), count(graph, aten.constant_pad_nd.default)) == (2, 3)


@pytest.mark.parametrize(
    "tensors",
    [
        (drawn(1024, 1024), drawn(1024, 1032)),
        (drawn(1024, 33), drawn(33, 1024)),  # bound by memory
        (torch.randn(1024, 1023), torch.randn(1023, 1024)),
        (drawn(1, 1024), drawn(1024, 1024)),
        (drawn(1023, 1024), drawn(1024, 1024)),  # every row begins at a multiple of 16 bytes
        (drawn(1023, 1024).t(), drawn(1023, 1024)),
    ],
    ids=["aligned", "bound by memory", "single precision", "one row", "odd rows", "gradient of a weight for odd rows"],
)
def test_other_products_stay_as_they_are(tensors: tuple[torch.Tensor, torch.Tensor]):
    assert count(padded(torch.mm, *tensors), aten.constant_pad_nd.default) == 0


def test_products_of_long_sums_are_padded_before_hopper():
    tensors = drawn(64, 1026), drawn(1026, 32)
    assert count(padded(torch.mm, *tensors, gpu="a100_sxm80"), aten.constant_pad_nd.default) == 2
    assert count(padded(torch.mm, *tensors), aten.constant_pad_nd.default) == 0
