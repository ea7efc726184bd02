"""Alignment of the rows of a product's matrices in memory."""

from __future__ import annotations

import pytest
import torch

from legoai.cost.capture import capture
from legoai.cost.simulated.operators.alignment import Matrix, alignments
from legoai.cost.trace.records import Kernel
from legoai.specs.cluster import device
from support.simulation.simulated import in_a_fork
from support.texts.plans import lowered


def of(left: torch.Tensor, right: torch.Tensor) -> dict[str, int]:
    return alignments(map(Matrix.of, (left, right)), Matrix.of(left @ right))


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (matrix(64, 32), matrix(48, 32).t(), {}),
        (matrix(63, 32), matrix(48, 32).t(), {}),  # rows may be as many as they like
        (matrix(64, 33), matrix(48, 33).t(), {"operands_aligned": 2}),
        (matrix(64, 34), matrix(48, 34).t(), {"operands_aligned": 4}),
        (matrix(64, 36), matrix(48, 36).t(), {"operands_aligned": 8}),
        (matrix(64, 32), matrix(49, 32).t(), {"result_aligned": 2}),
        (matrix(64, 32), matrix(32, 50), {"operands_aligned": 4, "result_aligned": 4}),
        (matrix(64, 50).t(), matrix(64, 48), {"operands_aligned": 4}),  # a gradient of a weight
        (matrix(64, 80)[:, 4:36], matrix(48, 32).t(), {"operands_aligned": 8}),  # a part that begins inside a row
        (matrix(64, 1), matrix(48, 1).t(), {}),
        (matrix(64, 80)[:, 1:33], matrix(48, 32).t(), {"operands_aligned": 2}),
        (matrix(64, 64)[:, ::2], matrix(48, 32).t(), {}),  # copied for the library, which has no such layout
        (matrix(64, 64)[:, 1::2], matrix(48, 32).t(), {}),
        (matrix(64, 33, torch.float32), matrix(48, 33, torch.float32).t(), {}),
    ],
)  # fmt: skip
def test_rows_begin_at_multiples_of_bytes(left: torch.Tensor, right: torch.Tensor, expected: dict[str, int]):
    assert of(left, right) == expected


def test_matrices_of_a_batch_begin_at_multiples_of_bytes_too():
    left, right = (torch.empty(3, 5, 8, dtype=torch.float16, device="meta") for _ in range(2))
    assert of(left, right.mT) == {"result_aligned": 2}
    square = torch.empty(3, 5, 5, dtype=torch.float16, device="meta")
    assert of(square, left) == {"operands_aligned": 2}
    innermost = torch.empty(8, 16, 3, dtype=torch.float16, device="meta").permute(2, 0, 1)
    assert of(innermost, torch.empty(3, 16, 8, dtype=torch.float16, device="meta")) == {}, (
        "copied, as columns are apart"
    )


PLAN = """\
plan tiny

model   gpt3("125m", dim = 512, n_heads = 4, n_layers = 1, vocab_size = 4098)
cluster h100_sxm(devices = 1)
batch   (global = 2, micro = 2, seq_len = 512)
precision (param = bf16)
{}
"""


def _products(text: str) -> list[tuple[str, tuple[int, ...], int, int]]:
    trace = capture(lowered(PLAN.format(text)), world=1, gpu=device("h100_sxm"), replay=False)
    step = trace.between(trace.steps[-1])
    return [
        (
            item.phase,
            item.outputs[0].shape,
            *(item.attributes.get(f"{one}_aligned", 16) for one in ("operands", "result")),
        )
        for item in step
        if isinstance(item, Kernel) and item.op in ("aten.mm", "aten.addmm")
    ]


def test_products_of_an_unaligned_vocabulary_are_recorded_so():
    found = in_a_fork(_products, "")
    assert [item for item in found if item[2:] != (16, 16)] == [
        ("forward", (1024, 4098), 16, 4),
        ("backward", (4098, 512), 4, 16),
        ("backward", (1024, 512), 4, 16),
    ]


@pytest.mark.slow
def test_inductor_pads_the_products_that_it_compiles():
    found = in_a_fork(_products, "compile { root = inductor }")
    assert all(item[2:] == (16, 16) for item in found)
    assert sorted(shape for _, shape, *_ in found if 4104 in shape) == [(1024, 4104), (4104, 512)]


IMAGES = """\
plan images

model   vit("b16", n_layers = 1, image_size = 512)
cluster h100_sxm(devices = 1)
batch   (global = 1, micro = 1)
attention math
precision (param = bf16)
compile { layers.* = inductor }
"""


def _products_with_scores() -> list[dict[str, int]]:
    trace = capture(lowered(IMAGES), world=1, gpu=device("h100_sxm"), replay=False)
    step = trace.between(trace.steps[-1])
    kernels = [item for item in step if isinstance(item, Kernel) and item.op == "aten.bmm"]
    return [dict(item.attributes) for item in kernels if item.inputs[0].shape[-2:] == (1025, 1025)]


@pytest.mark.slow
def test_results_that_inductor_lays_out_with_padded_rows_are_aligned():
    found = in_a_fork(_products_with_scores)
    assert {} in found, "scores of 1,025 keys in rows of 1,088"
