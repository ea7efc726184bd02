"""Times of kernels on a GPU, with operands in its cache and out of it: `python -m benchmarks.gpu_kernels -o FILE`.

Rows, all by the GPU's clock with a full queue (`legoai.cost.calibration.timing`):

- `product`: bf16, by the three layouts of a linear layer (`forward`, `input`, `weight`), out of the cache;
- `unaligned product`: the same of layers whose rows do not begin at multiples of 16 bytes;
- `grouped product`: bf16, of experts with equal numbers of rows, by the same three layouts;
- `float8 product`: with fast accumulation, as in forward, and without it, as in backward;
- `cached product`: the same products with operands, result or all of it just used;
- `attention`: forward and backward by torch's implementations, causal;
- `unmasked attention`: the same of few heads and pieces of sequences, without a mask, as in context parallelism;
- `convolution`: forward, and the gradients that a backward computes together, in bf16 and in fp32 (TF32, by default);
- `channels-last convolution`: the same of convolutions of images, whose memory has channels last;
- `list`: kernels on lists of tensors, as `torch.distributed.fsdp` and clipping call them;
- `movement`: a kernel that reads and writes, only reads, or only writes what is in the cache or out of it;
- `distance`: a kernel that reads what was written before a number of other bytes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from benchmarks.gpu_steps import about
from benchmarks.machine import write_document
from torch.nn.attention import SDPBackend, sdpa_kernel

from legoai.cost.calibration.timing import measure
from legoai.runtime.torch_internals.operators import foreach_copy_, foreach_mul_, foreach_norm

BUDGET = 0.012
TOKENS = (1024, 2048, 4096, 8192, 16384)
LAYERS = (
    (1024, 1024), (1024, 4096), (4096, 1024), (2048, 2048), (2048, 8192), (8192, 2048), (4096, 4096), (4096, 14336),
    (14336, 4096), (8192, 1024), (1024, 8192), (8192, 8192), (8192, 3584), (3584, 8192), (8192, 28672), (28672, 8192),
    (6144, 3072), (3072, 6144), (4096, 32000), (1024, 51200),
)  # fmt: skip
"""Features in and out of linear layers."""
UNALIGNED = (
    (1024, 50257), (4096, 50257), (4096, 50258), (4096, 50264), (4097, 4096), (4098, 4096), (4104, 4096), (4096, 14337),
)  # fmt: skip
"""The same of layers whose rows begin at multiples of 2, 4, 8 or 16 bytes."""
EXPERTS = ((2048, 1536), (1536, 2048), (4096, 14336), (14336, 4096), (7168, 2048), (2048, 7168))
"""Features in and out of experts."""
GROUPS = (8, 32, 128)
SMALL = ((1024, 1024, 1024), (1024, 4096, 1024), (2048, 1024, 1024), (2048, 2048, 2048), (4096, 1024, 4096),
         (4096, 4096, 1024), (8192, 1024, 4096), (8192, 4096, 1024), (2048, 8192, 1024))  # fmt: skip
ATTENTION = (
    (1, 16, 1024, 64), (8, 16, 1024, 64), (2, 16, 1024, 128), (8, 16, 1024, 128), (2, 48, 2048, 128), (1, 6, 2048, 128),
    (4, 32, 2048, 64), (1, 8, 4096, 128), (1, 32, 4096, 128), (2, 32, 8192, 128), (1, 8, 8192, 128), (1, 4, 8192, 128),
)  # fmt: skip
"""Sequences, heads, length and width."""
UNMASKED = (
    *((heads, queries, 8192, 128) for heads in (1, 2, 4, 8) for queries in (1024, 4096, 8192)),
    *((heads, 2048, 2048, 128) for heads in (1, 4, 8, 32)), (8, 4096, 32768, 128), (8, 2048, 4096, 64),
)  # fmt: skip
"""Heads, queries, keys and width."""
CONVOLUTIONS = (
    (64, 3, 224, 64, 7, 2, 1), (64, 64, 56, 64, 3, 1, 1), (64, 64, 56, 256, 1, 1, 1), (64, 128, 28, 128, 3, 1, 1),
    (64, 256, 14, 256, 3, 1, 1), (64, 512, 7, 2048, 1, 1, 1), (64, 256, 56, 512, 1, 2, 1),
    (32, 3, 224, 1024, 16, 16, 1), (32, 3, 224, 96, 4, 4, 1), (32, 96, 56, 192, 2, 2, 1),
    (32, 96, 56, 96, 7, 1, 96), (32, 384, 14, 384, 7, 1, 384), (32, 768, 7, 768, 7, 1, 768),
    (64, 128, 56, 128, 3, 1, 32), (64, 1024, 14, 1024, 3, 1, 32),
)  # fmt: skip
"""Batch, channels, height and width of images, filters, size of a filter, stride, and groups: ResNet, ViT, ConvNeXt and
ResNeXt."""
OF_IMAGES = tuple(shape for shape in CONVOLUTIONS if shape[1] == 3)
"""Those of images, for which cuDNN has kernels of its own where channels are last."""
LISTS = ((1, 2**24), (9, 2**21), (9, 2**18), (64, 2**16), (64, 2**20), (300, 2**12))
"""Tensors of a list, and elements of each."""
BACKENDS = {
    "flash2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
MIB = 2**20
MOST_SETS = 640
SIZES = (0.25, 0.5, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)
COLD = 320 * MIB
"""Bytes between two uses of memory that is in no cache: six times an H100's."""


def cycled(runs: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Return a run that takes its turn among several."""
    turn = itertools.cycle(runs)

    def run() -> object:
        return next(turn)()

    return run


def microseconds(runs: Sequence[Callable[[], object]]) -> float:
    return measure(cycled(runs), "cuda", BUDGET) * 1e6


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def layer(m: int, n: int, k: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Inputs, weight and outputs of a linear layer, as many times as no cache holds them."""
    sets = math.ceil(COLD / (2 * (m * k + k * n + m * n)))
    return [(noise(m, k), noise(n, k), noise(m, n)) for _ in range(sets)]


def products() -> Iterator[dict[str, Any]]:
    yield from of_layers("product", LAYERS, TOKENS)


def unaligned_products() -> Iterator[dict[str, Any]]:
    yield from of_layers("unaligned product", UNALIGNED, TOKENS[1::2])


def of_layers(kind: str, layers: Sequence[tuple[int, int]], tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    for (k, n), m in itertools.product(layers, tokens):
        if 2.0 * m * k * n > 2.0**43 or m * n > 2**31:
            continue
        held = layer(m, n, k)
        layouts = {
            "forward": [partial(torch.mm, x, w.t(), out=y) for x, w, y in held],
            "input": [partial(torch.mm, y, w, out=x) for x, w, y in held],
            "weight": [partial(torch.mm, y.t(), x, out=w) for x, w, y in held],
        }
        for layout, runs in layouts.items():
            yield {"kind": kind, "layout": layout, "m": m, "n": n, "k": k, "us": microseconds(runs)}


def grouped_products() -> Iterator[dict[str, Any]]:
    grouped = torch.ops.aten._grouped_mm.default
    for (k, n), groups, m in itertools.product(EXPERTS, GROUPS, (128, 512, 2048)):
        rows = groups * m
        if 2.0 * rows * k * n > 2.0**43 or groups * k * n > 2**32:
            continue
        x, w, y = noise(rows, k), noise(groups, k, n), noise(rows, n)
        ends = torch.arange(m, rows + 1, m, dtype=torch.int32, device="cuda")
        layouts = {
            "forward": partial(grouped, x, w, ends),
            "input": partial(grouped, y, w.transpose(1, 2), ends),
            "weight": partial(grouped, x.t(), y, ends),
        }
        for layout, run in layouts.items():
            yield {
                "kind": "grouped product", "layout": layout, "groups": groups, "m": m, "n": n, "k": k,
                "us": microseconds([run]),
            }  # fmt: skip


def float8_products() -> Iterator[dict[str, Any]]:
    scale = torch.ones((), device="cuda")
    for (k, n), m, fast in itertools.product(LAYERS[6:12], TOKENS[1::2], (True, False)):
        held = [(x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).t()) for x, w, _ in layer(m, n, k)]
        rest = (scale, scale, None, None, torch.bfloat16, fast)
        runs = [partial(torch.ops.aten._scaled_mm.default, x, w, *rest) for x, w in held]
        yield {"kind": "float8 product", "fast": fast, "m": m, "n": n, "k": k, "us": microseconds(runs)}


def cached_products() -> Iterator[dict[str, Any]]:
    for m, n, k in SMALL:
        held = layer(m, n, k)
        first = held[0]
        modes = {
            "none": held,
            "all": [first],
            "input": [(first[0], w, y) for _, w, y in held],
            "output": [(x, w, first[2]) for x, w, _ in held],
            "weight": [(x, first[1], y) for x, _, y in held],
        }
        for mode, operands in modes.items():
            took = microseconds([partial(torch.mm, x, w.t(), out=y) for x, w, y in operands])
            yield {"kind": "cached product", "cached": mode, "m": m, "n": n, "k": k, "us": took}


def attentions() -> Iterator[dict[str, Any]]:
    for (batch, heads, length, width), (name, backend) in itertools.product(ATTENTION, BACKENDS.items()):
        # As models lay them out: [batch, length, heads, width], transposed.
        query, key, value, upstream = (noise(batch, length, heads, width).transpose(1, 2) for _ in range(4))
        operands = tuple(one.detach().requires_grad_() for one in (query, key, value))
        with sdpa_kernel(backend):
            attend = partial(F.scaled_dot_product_attention, *operands, is_causal=True)
            forward = microseconds([attend])
            back = partial(torch.autograd.grad, attend(), operands, upstream, retain_graph=True)
            backward = microseconds([back])
        yield {
            "kind": "attention", "implementation": name, "batch": batch, "heads": heads, "length": length,
            "width": width, "forward_us": forward, "backward_us": backward,
        }  # fmt: skip


def unmasked_attentions() -> Iterator[dict[str, Any]]:
    for heads, queries, keys, width in UNMASKED:
        query, upstream = (noise(1, queries, heads, width).transpose(1, 2) for _ in range(2))
        key, value = (noise(1, keys, heads, width).transpose(1, 2) for _ in range(2))
        operands = tuple(one.detach().requires_grad_() for one in (query, key, value))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attend = partial(F.scaled_dot_product_attention, *operands)
            forward = microseconds([attend])
            back = partial(torch.autograd.grad, attend(), operands, upstream, retain_graph=True)
            backward = microseconds([back])
        yield {
            "kind": "unmasked attention", "heads": heads, "queries": queries, "keys": keys, "width": width,
            "forward_us": forward, "backward_us": backward,
        }  # fmt: skip


def convolutions() -> Iterator[dict[str, Any]]:
    yield from of_images("convolution", CONVOLUTIONS, torch.contiguous_format)


def channels_last_convolutions() -> Iterator[dict[str, Any]]:
    yield from of_images("channels-last convolution", OF_IMAGES, torch.channels_last)


def of_images(kind: str, shapes: Sequence[tuple[int, ...]], layout: torch.memory_format) -> Iterator[dict[str, Any]]:
    for dtype, (batch, channels, size, filters, kernel, stride, groups) in itertools.product(
        (torch.bfloat16, torch.float32), shapes
    ):
        padding = kernel // 2 if stride < kernel else 0
        given = torch.randn(batch, channels, size, size, device="cuda", dtype=dtype)
        weight = torch.randn(filters, channels // groups, kernel, kernel, device="cuda", dtype=dtype)
        given, weight = given.to(memory_format=layout), weight.to(memory_format=layout)
        arguments = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups
        run = partial(torch.ops.aten.convolution, given, weight, None, *arguments)
        upstream = torch.randn_like(run())
        masks = {"both": (True, True, False), "input": (True, False, False), "weight": (False, True, False)}
        took = {
            f"{name}_us": microseconds(
                [partial(torch.ops.aten.convolution_backward, upstream, given, weight, None, *arguments, mask)]
            )
            for name, mask in masks.items()
        }
        yield {
            "kind": kind, "dtype": str(dtype).removeprefix("torch."), "batch": batch, "channels": channels,
            "size": size, "filters": filters, "kernel": kernel, "stride": stride, "groups": groups,
            "forward_us": microseconds([run]), **took,
        }  # fmt: skip


def lists() -> Iterator[dict[str, Any]]:
    for dtype, (count, elements) in itertools.product((torch.bfloat16, torch.float32), LISTS):
        sets = min(MOST_SETS // count + 1, math.ceil(COLD / (count * elements * dtype.itemsize)))
        held = [[torch.randn(elements, device="cuda").to(dtype) for _ in range(count)] for _ in range(sets)]
        other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
        cast = [[torch.empty(elements, device="cuda", dtype=other) for _ in range(count)] for _ in range(sets)]
        runs = {
            "norm": [partial(foreach_norm, one, 2) for one in held],
            "scale": [partial(foreach_mul_, one, 1.0) for one in held],
            "copy": [partial(foreach_copy_, to, one) for to, one in zip(cast, held, strict=True)],
        }
        for name, functions in runs.items():
            yield {
                "kind": "list", "function": name, "dtype": str(dtype).removeprefix("torch."), "count": count,
                "elements": elements, "us": microseconds(functions),
            }  # fmt: skip
        del held, cast


def scaled(source: torch.Tensor, result: torch.Tensor) -> Callable[[], object]:
    """Return a run of a kernel that reads one tensor and writes another."""
    return partial(torch.mul, source, 1.5, out=result)


def movements() -> Iterator[dict[str, Any]]:
    for size in SIZES:
        elements = int(size * MIB) // 2
        ring = [noise(elements) for _ in range(min(max(2, math.ceil(COLD / (size * MIB))), MOST_SETS))]
        others = [torch.empty_like(one) for one in ring]
        modes: dict[str, tuple[int, Sequence[Callable[[], object]]]] = {
            "read and write, cold": (2, [scaled(x, y) for x, y in zip(ring, others, strict=True)]),
            "read and write, read hot": (2, [scaled(ring[i - 1], ring[i]) for i in range(len(ring))]),
            "read and write, write hot": (2, [scaled(x, others[0]) for x in ring]),
            "read and write, hot": (2, [scaled(ring[0], others[0])]),
            "read, cold": (1, [x.amax for x in ring]),
            "read, hot": (1, [ring[0].amax]),
            "write, cold": (1, [x.zero_ for x in ring]),
            "write, hot": (1, [ring[0].zero_]),
        }
        for mode, (passes, runs) in modes.items():
            yield {"kind": "movement", "mode": mode, "bytes": passes * elements * 2, "us": microseconds(runs)}
        del ring, others


def distances() -> Iterator[dict[str, Any]]:
    for size in (1, 4, 8):
        elements = int(size * MIB) // 2
        ring = [noise(elements) for _ in range(COLD // (size * MIB))]
        for lag in sorted({1, 2, 3, *(round(between / (2 * size)) for between in range(4, 81, 4))} - {0}):
            took = microseconds([scaled(ring[i - lag], ring[i]) for i in range(len(ring))])
            yield {"kind": "distance", "bytes": 4 * elements, "between": 4 * (lag - 1) * elements, "us": took}


PARTS = {
    "lists": lists, "convolutions": convolutions, "channels_last_convolutions": channels_last_convolutions,
    "unmasked_attentions": unmasked_attentions, "movements": movements,
    "distances": distances, "cached_products": cached_products, "attentions": attentions, "products": products,
    "unaligned_products": unaligned_products, "grouped_products": grouped_products, "float8_products": float8_products,
}  # fmt: skip


def main() -> int:
    """Measure the parts that are asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="write the measurements here")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"only {', '.join(PARTS)}")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, part in PARTS.items():
        if arguments.parts and name not in arguments.parts:
            continue
        begin = time.perf_counter()
        rows += [{**row, **{key: round(row[key], 3) for key in row if key.endswith("us")}} for row in part()]
        torch.cuda.empty_cache()
        write_document(arguments.output, {**about(), "rows": rows})
        print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
