"""Operators that get tensors of two dtypes are noted where kernels refuse these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from legoai.specs.models.inspect import inspect_model
from legoai.specs.models.manifests.described.recorders.dtype_recorder import DtypeRecorder
from legoai.specs.models.source import ModelSource
from legoai.specs.models.torch_internals import autocast_without_device

ROWS = torch.zeros(2, dtype=torch.int64)


class Calls(nn.Module):
    """Calls a function of a tensor in half precision and a buffer."""

    def __init__(self, function: Callable[..., Any], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(shape))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.table)


def functions() -> Iterator[tuple[str, Callable[..., Any], tuple[int, ...]]]:
    """Yield functions of [2, 2, 2] and a table, with the table's shape."""
    yield "matmul", lambda x, table: x @ table, (2, 2)
    yield "matmul of batches", lambda x, table: x @ table, (2, 2, 2)
    yield "linear", lambda x, table: F.linear(table, x[0], x[0, 0]), (2, 2)
    yield "einsum", lambda x, table: torch.einsum("abc,cd->abd", x, table), (2, 2)
    yield "layer_norm", lambda x, table: F.layer_norm(table, (2,), x[0, 0], x[0, 0]), (2, 2)
    yield "conv1d", lambda x, table: F.conv1d(table, x), (2, 2, 2)
    yield "conv1d with bias", lambda x, table: F.conv1d(table, x, x[0, 0]), (2, 2, 2)
    yield "attention", lambda x, table: F.scaled_dot_product_attention(x, table, x), (2, 2, 2)
    yield "prelu", F.prelu, (2,)
    yield "index_add", lambda x, table: x.index_add(0, ROWS.to(x.device), table), (2, 2, 2)
    yield "index_put", lambda x, table: x.index_put((ROWS.to(x.device),), table), (2, 2, 2)
    yield "scatter_add", lambda x, table: x.scatter_add(0, ROWS.to(x.device).view(2, 1, 1), table), (2, 2, 2)
    yield "lerp", lambda x, table: torch.lerp(x, table, 0.5), (2, 2, 2)
    yield "add", torch.add, (2, 2, 2)
    yield "cat", lambda x, table: torch.cat([x, table]), (2, 2, 2)
    yield "where", lambda x, table: torch.where(x > 0, x, table), (2, 2, 2)
    yield "embedding", lambda x, table: F.embedding(ROWS.to(x.device), table) + x[0], (2, 2)
    yield "cast", lambda x, table: x @ table.to(x.dtype), (2, 2)
    yield "widened", lambda x, table: x.float() @ table, (2, 2)


@pytest.mark.parametrize(
    ("function", "shape"), [pytest.param(function, shape, id=name) for name, function, shape in functions()]
)
def test_recorder_finds_what_kernels_refuse(function: Callable[..., Any], shape: tuple[int, ...]):
    x = torch.ones(2, 2, 2, dtype=torch.bfloat16)
    try:
        Calls(function, shape)(x)
    except RuntimeError:
        is_refused = True
    else:
        is_refused = False
    with torch.device("meta"):
        model = Calls(function, shape)
    with torch.no_grad(), DtypeRecorder(model) as recorder:
        model(x.to("meta"))
    assert [item.source for item in recorder.mixed] == (["the buffer `table`"] if is_refused else [])


def test_autocast_is_followed_on_the_meta_device():
    arguments = {"kind": "autocast"}
    source = ModelSource(kind="python", target="support.models.other_authors:build", preset=None, arguments=arguments)
    manifest = inspect_model(source, Path())
    assert manifest.flow_error is None
    assert not manifest.mixed_dtypes
    assert "layer" in {step.name for step in manifest.modules["blocks.0"].flow}
    with pytest.raises(RuntimeError, match="unsupported autocast"):
        torch.autocast("meta", torch.bfloat16)


@pytest.mark.filterwarnings("error")
def test_autocast_of_a_gpu_is_made_where_there_is_none():
    with autocast_without_device():
        made = torch.autocast("cuda", torch.bfloat16)
    with made:
        assert torch.is_autocast_enabled("cuda")
