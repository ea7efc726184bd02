"""Compiled regions of a step's graph train as the eager backend does, with any checkpointing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support.texts.plans import SEQUENCE_PARALLEL
from support.training.meshed import text_of
from support.training.staged import together, train

SMALL = """\
plan small
model llama3("tiny", n_layers = 3, dim = 32, n_heads = 4, n_kv_heads = 4, hidden_dim = 64, vocab_size = 256)
cluster cpu(devices = 2)
"""
SPARSE = """\
plan sparse
model mixtral("8x7b", n_layers = 2, dim = 32, n_heads = 4, n_kv_heads = 2, hidden_dim = 24, vocab_size = 256,
              n_experts = 8, top_k = 2, max_seq_len = 64)
cluster cpu(devices = 2)
"""
BODY = """\
mesh (dp_shard = 2)
fsdp on dp_shard { layers.* = unit }
precision (param = bf16, reduce = fp32)
"""
COMM = "comm (reorder = true)\n"


def both(body: str, compiled: str, gloo, folder: Path, head: str = SMALL, more: str = "") -> tuple[dict, dict]:
    """Results of one training under the eager backend, and compiled under the graph backend."""
    data = folder / "data.txt"
    data.write_text("the same text for both of them, over and over; " * 400)
    ranks = 4 if "tp" in body or "pp" in body else 2
    eager = together(gloo(ranks)(train, text_of(body, head), str(data), steps=3))
    graph = re.sub(r"(fsdp on [\w, ]+) \{", r"\1 (backend = graph) {", body)
    text = text_of(f"{graph}{COMM}compile {{ {compiled} }}\n{more}", head)
    return eager, together(gloo(ranks)(train, text, str(data), steps=3))


def agree_to_the_bit(eager: dict, graph: dict) -> None:
    assert (graph["loss"], graph["norm"]) == (eager["loss"], eager["norm"])
    for parameter, value in graph["parameters"].items():
        assert torch.equal(value, eager["parameters"][parameter]), parameter


@pytest.mark.slow
def test_regions_between_host_copies_agree_bitwise(gloo, tmp_path: Path):
    agree_to_the_bit(*both(
        f"{BODY}checkpoint {{ layers.1 = full, layers.2 = selective([attention, alternate_matmul]) }}\n",
        "root = aot_eager", gloo, tmp_path, more="offload (activations = all)\n",
    ))  # fmt: skip


@pytest.mark.slow
def test_regions_of_experts_agree_bitwise(gloo, tmp_path: Path):
    agree_to_the_bit(*both(f"{BODY}checkpoint {{ layers.1 = full }}\n", "layers.* = aot_eager", gloo, tmp_path, SPARSE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "checkpointed",
        "operators kept",
        "never resharded",
        "whole",
        "tensor parallel",
        "stages",
        "experts on two ranks",
        "experts in shards",
    ],
)
def test_inductor_regions_train_as_the_eager_backend(name: str, gloo, tmp_path: Path):
    body, compiled = {
        "plain": (BODY, "layers.* = inductor"),
        "checkpointed": (f"{BODY}checkpoint {{ layers.* = full }}\n", "layers.* = inductor"),
        "operators kept": (
            f"{BODY}checkpoint {{ layers.0 = budget(50%), layers.1 = selective([attention, alternate_matmul]) }}\n",
            "layers.* = inductor",
        ),
        "never resharded": (BODY.replace("= unit", "= unit(reshard = never)"), "root = inductor"),
        "whole": (BODY, "root = inductor"),
        "tensor parallel": (
            f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}fsdp on dp_shard {{ layers.* = unit }}\n",
            "root = inductor",
        ),
        "stages": (
            "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = 1F1B)\n"
            "fsdp on dp_shard { layers.* = unit(reshard = after_backward) }\n"
            "precision (param = bf16, reduce = fp32)\n",
            "layers.* = inductor",
        ),
        "experts on two ranks": (
            "mesh (dp_shard = 2, ep = 2)\nshard on ep { layers.*.feed_forward.experts = experts }\n"
            "fsdp on dp_shard { layers.* = unit }\nprecision (param = bf16, reduce = fp32)\n",
            "layers.* = inductor",
        ),
        "experts in shards": (f"{BODY}checkpoint {{ layers.1 = full }}\n", "layers.* = inductor"),
    }[name]
    head = SPARSE if "experts" in name else SMALL.replace("n_layers = 3", "n_layers = 2")
    eager, graph = both(body, compiled, gloo, tmp_path, head)
    # A kernel that rounds otherwise lets a token choose another expert, once weights have moved by it.
    steps = 1 if name == "experts in shards" else 3
    assert graph["loss"][:steps] == pytest.approx(eager["loss"][:steps], rel=2e-3)
    assert graph["norm"][:steps] == pytest.approx(eager["norm"][:steps], rel=2e-2)
