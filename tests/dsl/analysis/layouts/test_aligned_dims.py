"""Operands of other numbers of dims are aligned at their last dims, by the linter as by PyTorch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from legoai.dsl.analysis.layouts.operations import operation
from legoai.dsl.analysis.layouts.tensors import UNKNOWN, Tensor, cut_alike
from legoai.specs.models.manifests.manifest import Step
from support.texts.layout_plans import LAYOUT_CODES
from support.texts.rule_plans import diagnostics

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(32, 8), nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.output = nn.Linear(8, 32, bias=False)
        self.register_buffer("places", torch.arange(16), persistent=False)

    def forward(self, tokens):
        x = {sum}
        for layer in self.layers:
            x = layer(x)
        return self.output(x)
"""
TOKENS, PLACES = "self.tok(tokens)", "self.pos(self.places[: tokens.shape[1]])"
SUMS = (f"{TOKENS} + {PLACES}", f"{PLACES} + {TOKENS}", f"{PLACES} * {TOKENS}")
LAYOUTS = {
    "tok": ("shard(1)", "shard(-2)", "replicate"),
    "pos": ("shard(0)", "shard(-2)", "shard(1)", "replicate"),
}
HEAD = """model python("net:Model")
cluster cpu(devices = 2)
batch (global = 4, micro = 4, seq_len = 16)
mesh (tp = 2)
shard on tp {
"""
REST = {
    "shard(1)": """
  layers.*.up   = colwise(input = shard(1))
  layers.*.down = rowwise(output = shard(1))
  output        = colwise(input = shard(1), output = replicate)
}
""",
    "replicate": """
  layers.*.up   = colwise
  layers.*.down = rowwise
  output        = colwise(output = replicate)
}
""",
}


def cases() -> Iterator[tuple[str, str]]:
    for tok in LAYOUTS["tok"]:
        yield from ((tok, pos) for pos in LAYOUTS["pos"])


def written(directory: Path, total: str) -> Path:
    path = directory / "net.py"
    path.write_text(MODEL.replace("{sum}", total))
    return path


def plan(tok: str, pos: str) -> str:
    rest = REST["replicate" if tok == "replicate" else "shard(1)"]
    return f"{HEAD}  tok = rowwise(output = {tok})\n  pos = rowwise(output = {pos}){rest}"


def trained(path: str) -> dict[tuple[str, str], str]:
    """For each case, on the calling rank: "right", or how a step differs from that of one process."""
    import torch
    import torch.distributed.tensor as dt
    import torch.distributed.tensor.parallel as tp
    from torch.distributed.device_mesh import init_device_mesh

    spec = importlib.util.spec_from_file_location("net", path)
    assert spec is not None and spec.loader is not None
    net = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(net)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = dt.Replicate()

    def placement(layout: str) -> Any:
        return whole if layout == "replicate" else dt.Shard(int(layout[6:-1]))

    def step(styles: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(0)
        model = net.Model().double()
        if styles:
            tp.parallelize_module(model, mesh, styles)
        result = model(torch.arange(64).reshape(4, 16) % 32)
        result.square().sum().backward()
        gradients = {name: item.grad for name, item in model.named_parameters()}
        return result, {
            name: item.full_tensor() if isinstance(item, dt.DTensor) else item for name, item in gradients.items()
        }

    expected, gradients = step({})
    verdicts = {}
    for tok, pos in cases():
        inner = whole if tok == "replicate" else dt.Shard(1)
        styles: dict[str, Any] = {
            name: tp.RowwiseParallel(input_layouts=whole, output_layouts=placement(layout))
            for name, layout in (("tok", tok), ("pos", pos))
        }
        styles["layers.*.up"] = tp.ColwiseParallel(input_layouts=inner)
        styles["layers.*.down"] = tp.RowwiseParallel(output_layouts=inner)
        styles["output"] = tp.ColwiseParallel(input_layouts=inner, output_layouts=whole)
        try:
            result, found = step(styles)
            same = torch.allclose(result, expected) and all(
                torch.allclose(found[name], gradients[name]) for name in found
            )
            verdicts[tok, pos] = "right" if same else "other numbers"
        except Exception as error:
            verdicts[tok, pos] = f"{type(error).__name__}: {error}"[:200]
    return verdicts


@pytest.mark.slow
@pytest.mark.parametrize("total", SUMS)
def test_the_linter_and_pytorch_align_dims_alike(total: str, tmp_path: Path, gloo: Callable[[int], Any]) -> None:
    path = written(tmp_path, total)
    verdicts = gloo(2)(trained, str(path))
    assert verdicts[0][("shard(1)", "shard(0)")] == "right"
    for case in cases():
        found = {item.code for item in diagnostics(plan(*case), tmp_path)} & LAYOUT_CODES
        assert found == (set() if all(by_rank[case] == "right" for by_rank in verdicts) else {"LP412"}), case


@pytest.mark.parametrize(
    ("tok", "pos", "says", "help_"),
    [
        ("shard(1)", "shard(0)", None, None),
        (
            "shard(1)",
            "shard(1)",
            "a tensor in layout `shard(1)` of 3 dims, from `tok`, is combined with one in layout `shard(1)` of 2 dims",
            "tensors are aligned at their last dims: dim 0 of the 2 dims from `pos` is dim 1 of the 3 from `tok`; "
            "write `output = shard(0)` for `pos` and `output = shard(1)` for `tok`",
        ),
        ("replicate", "shard(1)", "layout `shard(1)` of 2 dims, from `pos`", "for instance `output = replicate`"),
    ],
)
def test_a_help_names_the_dim_of_each_operand(
    tok: str, pos: str, says: str | None, help_: str | None, tmp_path: Path
) -> None:
    written(tmp_path, SUMS[0])
    found = [item for item in diagnostics(plan(tok, pos), tmp_path) if item.code in LAYOUT_CODES]
    assert [item.code for item in found] == ([] if says is None else ["LP412"])
    for item in found:
        assert says is not None and help_ is not None
        assert says in item.message and item.help[0].endswith(help_)


def shard(dim: int, rank: int | None, **other: Any) -> Tensor:
    return Tensor(state="shard", dim=dim, rank=rank, **other)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (shard(1, 3), shard(0, 2), True),
        (shard(1, 3), shard(1, 2), False),
        (shard(1, 3), shard(-2, 2), True),
        (shard(-1, 3), shard(1, 2), True),
        (shard(-1, None), shard(2, 3), True),
        (shard(1, None), shard(0, None), False),
        (shard(1, 3), shard(1, None), True),
        (shard(1, 3), shard(0, None), None),
        (shard(1, 3, moved=True), shard(0, 2), None),
    ],
)
def test_dims_are_compared_from_the_last(one: Tensor, other: Tensor, alike: bool | None) -> None:
    assert cut_alike(one, other) is alike
    assert cut_alike(other, one) is alike


def test_a_sum_has_the_dims_of_its_widest_operand() -> None:
    def nothing(*_: Any, **__: Any) -> Tensor:
        return UNKNOWN

    for taken in ([shard(1, 3), shard(0, 2)], [shard(0, 2), shard(1, 3)]):
        assert operation("", Step("add", "add", (0, 1)), taken, nothing) == shard(1, 3)
