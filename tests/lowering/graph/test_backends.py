"""Eager and graph backend of `fsdp`: losses, norms and parameters are equal to the bit, and checkpoints load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.texts.plans import HEAD, SEQUENCE_BESIDE_EXPERTS, SEQUENCE_PARALLEL
from support.training.backends import MIXED, agree, traced
from support.training.meshed import text_of
from support.training.staged import together, train

SPARSE = """\
plan sparse
model   mixtral("8x7b", n_layers = 2, dim = 32, n_heads = 4, n_kv_heads = 2, hidden_dim = 24, vocab_size = 256,
                n_experts = 8, top_k = 2, max_seq_len = 64)
cluster cpu(devices = 4)
"""
UNEVEN = HEAD.replace('"tiny"', '"tiny", vocab_size = 258, hidden_dim = 130')
EXPERTS = "shard on ep { layers.*.feed_forward.experts = experts }\n"
PLANS = {
    "mixed precision": (
        HEAD,
        f"mesh (dp_shard = 2)\nfsdp on dp_shard {{ layers.* = unit }}\n{MIXED}",
        "(reorder = true)",
    ),
    "tied, in bf16": (
        HEAD.replace('"tiny"', '"tiny", tie_embeddings = true'),
        "mesh (dp_shard = 2)\nfsdp on dp_shard { layers.* = unit }\nprecision (param = bf16, reduce = bf16)\n",
        "(reorder = true)",
    ),
    "checkpointed": (
        HEAD,
        "mesh (dp_shard = 2)\nfsdp on dp_shard { layers.* = unit }\n"
        f"checkpoint {{ layers.{{1..3}} = full }}\n{MIXED}",
        "(reorder = true)",
    ),
    "scheduled by torch": (
        HEAD,
        "mesh (dp_shard = 2)\nfsdp on dp_shard { layers.* = unit }\n"
        f"checkpoint {{ layers.1 = full, layers.2 = selective([attention, matmul]) }}\n{MIXED}",
        "{ layers.* = bucket(compiler) }",
    ),
    "scheduled by torch, replicas of shards, compiled": (
        HEAD,
        "mesh (dp_replicate = 2, dp_shard = 2)\nfsdp on dp_replicate, dp_shard { layers.* = unit }\n"
        f"compile {{ layers.* = aot_eager }}\n{MIXED}",
        "{ layers.* = bucket(compiler) }",
    ),
    "scheduled by torch, tensor and sequence parallel": (
        HEAD,
        f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}"
        f"fsdp on dp_shard {{ layers.* = unit }}\ncheckpoint {{ layers.{{1..3}} = full }}\n{MIXED}",
        "{ layers.* = bucket(compiler) }",
    ),
    "never resharded": (
        HEAD,
        "mesh (dp_shard = 2)\n"
        f"fsdp on dp_shard {{ layers.{{0..1}} = unit(reshard = never), layers.{{2..3}} = unit }}\n{MIXED}",
        "(reorder = true)",
    ),
    "operators kept": (
        HEAD,
        "mesh (dp_shard = 2)\nfsdp on dp_shard { layers.* = unit }\ncheckpoint {\n"
        "  layers.0 = selective([attention, alternate_matmul])\n  layers.1 = budget(50%)\n"
        '  layers.2 = selective(["aten.mm"])\n  layers.3.feed_forward = budget(64KiB, by = knapsack)\n}\n'
        f"{MIXED}",
        "(reorder = by_time)",
    ),
    "operators kept beside tensor and sequence parallel": (
        HEAD,
        f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}"
        "fsdp on dp_shard { layers.* = unit }\n"
        "checkpoint { layers.{0,1} = selective([collective, matmul]), layers.{2,3} = budget(50%) }\n"
        f"{MIXED}",
        "(reorder = true)",
    ),
    "operators kept beside context parallel": (
        HEAD,
        "mesh (dp_shard = 2, cp = 2)\ncontext on cp (rotate = alltoall, balance = none)\n"
        "fsdp on dp_shard, cp { layers.* = unit }\n"
        "checkpoint { layers.{0,1} = selective([attention, matmul]), layers.{2,3} = selective([collective]) }\n"
        f"{MIXED}",
        "(reorder = true)",
    ),
    "activations and optimizer state on the host, and units that memory lets stay": (  # layers 0, 1 and 3, and the root
        HEAD,
        "mesh (dp_shard = 2)\n"
        "fsdp on dp_shard { layers.{0, 1} = unit(reshard = never), layers.{2, 3} = unit }\n"
        f"checkpoint {{ layers.1 = full, layers.2 = selective([attention, matmul]) }}\n{MIXED}",
        "(reorder = true, prefetch = proactive(limit = 1MiB), unshard = selective)\n"
        "offload (activations = all, optimizer = all)\nrequire peak_memory <= 10500KB",
    ),
    "what exceeds a limit on the host": (
        HEAD,
        f"mesh (dp_shard = 2)\nfsdp on dp_shard {{ layers.* = unit }}\ncheckpoint {{ layers.1 = full }}\n{MIXED}",
        "(reorder = true)\noffload (optimizer = adaptive, activations = bytes(1MiB))\nrequire peak_memory <= 9MiB",
    ),
    "two ranks after forward": (
        HEAD,
        "mesh (dp_shard = 4)\nfsdp on dp_shard { layers.{0..2} = unit(reshard = 2), layers.3 = unit }\n"
        f"checkpoint {{ layers.1 = full, layers.2 = selective([attention, matmul]) }}\n{MIXED}",
        "(reorder = true, prefetch = proactive(limit = 1MiB))\noffload (activations = all)",
    ),
    "replicas of shards": (
        HEAD,
        "mesh (dp_replicate = 2, dp_shard = 2)\nfsdp on dp_replicate, dp_shard { layers.* = unit }\n"
        f"checkpoint {{ layers.{{1..3}} = full }}\n{MIXED}",
        "(reorder = true, prefetch = proactive(limit = 1MiB)) { layers.* = bucket([1, 3]) }",
    ),
    "tensor and sequence parallel": (
        HEAD,
        f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}"
        "fsdp on dp_shard { layers.* = unit }\n"
        f"checkpoint {{ layers.{{1..3}} = full }}\n{MIXED}",
        "(reorder = true)",
    ),
    "context parallel, keys around the ring": (
        HEAD,
        "mesh (cp = 2)\ncontext on cp (rotate = alltoall)\nfsdp on cp { layers.* = unit }\n"
        f"checkpoint {{ layers.{{1..3}} = full }}\n{MIXED}",
        "(reorder = true)",
    ),
    "shards and context parallel": (
        HEAD,
        f"mesh (dp_shard = 2, cp = 2)\ncontext on cp\nfsdp on dp_shard, cp {{ layers.* = unit }}\n{MIXED}",
        "(reorder = true)",
    ),
    "replicas on ranks of context parallelism": (
        HEAD,
        "mesh (dp_shard = 2, cp = 2)\ncontext on cp (rotate = alltoall, balance = none)\n"
        f"fsdp on dp_shard {{ layers.* = unit }}\n{MIXED}",
        "(reorder = true)",
    ),
    "context and tensor parallel": (
        HEAD,
        f"mesh (cp = 2, tp = 2)\n{SEQUENCE_PARALLEL}context on cp (rotate = alltoall)\n"
        f"fsdp on cp {{ layers.* = unit }}\n{MIXED}",
        "(reorder = true)",
    ),
    "experts, whose groups of rows differ": (
        SPARSE,
        "mesh (dp_shard = 2)\nfsdp on dp_shard { layers.* = unit }\n"
        "checkpoint { layers.1 = full }\nprecision (param = fp32, reduce = fp32)\n",
        "(reorder = true)\ncompile { root = aot_eager }",
    ),
    "experts on two ranks": (
        SPARSE,
        f"mesh (dp_shard = 2, ep = 2)\n{EXPERTS}fsdp on dp_shard {{ layers.* = unit }}\n"
        f"checkpoint {{ layers.1 = full }}\n{MIXED}",
        "(reorder = true)",
    ),
    "experts on two ranks, compiled": (
        SPARSE,
        f"mesh (dp_shard = 2, ep = 2)\n{EXPERTS}fsdp on dp_shard {{ layers.* = unit }}\n"
        f"checkpoint {{ layers.1 = full }}\n{MIXED}",
        "(reorder = true)\ncompile { layers.* = aot_eager }",
    ),
    "experts with a capacity, twice on two ranks": (
        SPARSE,
        f"mesh (dp_shard = 4, ep = 2)\n{EXPERTS.replace('= experts', '= experts(capacity_factor = 0.75)')}"
        f"fsdp on dp_shard {{ layers.* = unit }}\ncheckpoint {{ layers.* = selective([matmul, collective]) }}\n{MIXED}",
        "(reorder = true)",
    ),
    "experts over context and data ranks": (
        SPARSE,
        f"mesh (dp_shard = 2, cp = 2, ep = 4)\n{EXPERTS}context on cp\n"
        f"fsdp on dp_shard, cp {{ layers.* = unit }}\n{MIXED}",
        "(reorder = true)",
    ),
    "experts of replicas": (
        SPARSE,
        f"mesh (dp_replicate = 2, dp_shard = 2, ep = 2)\n{EXPERTS}"
        f"fsdp on dp_replicate, dp_shard {{ layers.* = unit(reshard = never) }}\n{MIXED}",
        "(reorder = true, prefetch = proactive(limit = 1MiB))",
    ),
    "experts beside context ranks that hold the same": (
        SPARSE,
        f"mesh (dp_shard = 2, cp = 2, ep = 2)\n{EXPERTS}context on cp (rotate = alltoall)\n"
        f"fsdp on dp_shard {{ layers.* = unit }}\n{MIXED}",
        "(reorder = true)",
    ),
    "experts beside tensor and sequence parallel": (
        SPARSE,
        f"mesh (dp_shard = 2, tp = 2, ep = 2)\n{SEQUENCE_BESIDE_EXPERTS}{EXPERTS}"
        f"fsdp on dp_shard {{ layers.* = unit }}\n{MIXED}",
        "(reorder = true)",
    ),
    "stages": (
        HEAD,
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = 1F1B)\n"
        f"fsdp on dp_shard {{ layers.* = unit(reshard = after_backward) }}\n{MIXED}",
        "(reorder = true)",
    ),
    "stages, several on each rank, twice in a step": (
        HEAD,
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = Interleaved1F1B, microbatches = 2)\n"
        "fsdp on dp_shard { layers.* = unit(reshard = after_backward) }\n"
        f"checkpoint {{ layers.{{1..3}} = full }}\n{MIXED}",
        "(reorder = true)",
    ),
    "stages, compiled": (
        HEAD,
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = Interleaved1F1B)\n"
        "fsdp on dp_shard { layers.* = unit(reshard = after_backward) }\n"
        f"checkpoint {{ layers.1 = full, layers.2 = selective([attention, matmul]) }}\n{MIXED}",
        "(reorder = true)\ncompile { root = aot_eager }",
    ),
    "stages, all forward first, operators kept": (
        HEAD,
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = GPipe)\n"
        "fsdp on dp_shard { layers.* = unit(reshard = after_backward) }\n"
        "checkpoint { layers.{0,2} = selective([attention, matmul]), layers.1 = budget(50%) }\n"
        "precision (param = bf16, reduce = bf16)\n",
        "",
    ),
    "stages that gather again for backward": (
        HEAD,
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = 1F1B)\n"
        f"fsdp on dp_shard {{ layers.{{0..2}} = unit, layers.3 = unit(reshard = after_backward) }}\n"
        f"checkpoint {{ layers.1 = full, layers.2 = selective([attention, matmul]) }}\n{MIXED}",
        "(reorder = true) { layers.* = bucket(module) }",
    ),
    "stages that gather again for backward, uneven shards, compiled": (
        UNEVEN.replace("258", "257").replace("130", "129"),
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = Interleaved1F1B)\n"
        f"fsdp on dp_shard {{ layers.* = unit, root = unit(reshard = after_forward) }}\n{MIXED}",
        "(reorder = true, prefetch = proactive(limit = 64KiB))\ncompile { root = aot_eager }",
    ),
    "stages whose backward is split": (
        HEAD,
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = ZBVZeroBubble)\n"
        f"fsdp on dp_shard {{ layers.* = unit(reshard = after_backward) }}\n{MIXED}",
        "(reorder = true)\ncheckpoint { layers.1 = full, layers.2 = selective([attention, matmul]) }",
    ),
    "stages whose backward is split, compiled, tied, another decoder": (
        HEAD.replace(
            'llama3("tiny")', 'gpt2("small", dim = 64, n_layers = 4, n_heads = 4, vocab_size = 255, max_seq_len = 64)'
        ),
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = InterleavedZeroBubble)\n"
        "fsdp on dp_shard { layers.* = unit(reshard = after_backward) }\nprecision (param = bf16, reduce = bf16)\n",
        "(reorder = true)\ncheckpoint { layers.{0..2} = full }\ncompile { root = aot_eager }",
    ),
    "stages whose backward is split, tensor and sequence parallel": (
        HEAD,
        f"mesh (pp = 2, dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}pipeline on pp (schedule = InterleavedZeroBubble)\n"
        f"fsdp on dp_shard {{ layers.* = unit(reshard = after_backward) }}\n{MIXED}",
        "(reorder = true)\ncheckpoint { layers.{1..3} = full }",
    ),
    "stages of experts": (
        SPARSE.replace("n_layers = 2", "n_layers = 4"),
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = Interleaved1F1B)\n"
        "fsdp on dp_shard { layers.* = unit }\ncheckpoint { layers.1 = full }\n"
        "precision (param = fp32, reduce = fp32)\n",
        "(reorder = true)",
    ),
    "stages of experts on two ranks": (
        SPARSE.replace("n_layers = 2", "n_layers = 4"),
        f"mesh (pp = 2, dp_shard = 2, ep = 2)\n{EXPERTS}pipeline on pp (schedule = 1F1B)\n"
        "fsdp on dp_shard { layers.* = unit(reshard = after_backward) }\n"
        f"checkpoint {{ layers.1 = full }}\n{MIXED}",
        "(reorder = true)",
    ),
    "stages of experts with a capacity on two ranks, whose backward is split, compiled": (
        SPARSE.replace("n_layers = 2", "n_layers = 4"),
        "mesh (pp = 2, dp_shard = 2, ep = 2)\npipeline on pp (schedule = ZBVZeroBubble)\n"
        f"{EXPERTS.replace('= experts', '= experts(capacity_factor = 0.75)')}"
        f"fsdp on dp_shard {{ layers.* = unit(reshard = after_backward) }}\n{MIXED}",
        "(reorder = true)\ncheckpoint { layers.2 = full }\ncompile { layers.*.attention = aot_eager }",
    ),
    "stages in breadth, another decoder": (
        HEAD.replace(
            'llama3("tiny")', 'gpt2("small", dim = 64, n_layers = 4, n_heads = 4, vocab_size = 256, max_seq_len = 64)'
        ),
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = LoopedBFS)\n"
        "fsdp on dp_shard { layers.* = unit(reshard = after_backward) }\nprecision (param = fp32, reduce = fp32)\n",
        "(reorder = true)",
    ),
    "stages beside tensor and sequence parallel": (
        HEAD,
        f"mesh (pp = 2, dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}pipeline on pp (schedule = 1F1B)\n"
        "fsdp on dp_shard { layers.* = unit(reshard = after_backward) }\n"
        f"checkpoint {{ layers.{{1..3}} = full }}\n{MIXED}",
        "(reorder = true)",
    ),
    "stages beside context parallelism": (
        HEAD,
        "mesh (pp = 2, cp = 2)\ncontext on cp\npipeline on pp (schedule = 1F1B)\n"
        "fsdp on cp { layers.* = unit(reshard = after_backward) }\n"
        f"checkpoint {{ layers.{{1..3}} = full }}\n{MIXED}",
        "(reorder = true)",
    ),
    "stages beside context parallelism, several on each rank": (
        HEAD,
        "mesh (pp = 2, cp = 2)\ncontext on cp (rotate = alltoall)\npipeline on pp (schedule = Interleaved1F1B)\n"
        "fsdp on cp { layers.* = unit(reshard = after_backward) }\n"
        f"checkpoint {{ layers.2 = selective([attention, matmul]) }}\n{MIXED}",
        "(reorder = true)",
    ),
    "stages of replicas": (
        HEAD,
        "mesh (pp = 2, dp_replicate = 2, dp_shard = 2)\npipeline on pp (schedule = Interleaved1F1B)\n"
        f"fsdp on dp_replicate, dp_shard {{ layers.* = unit(reshard = after_backward) }}\n{MIXED}",
        "(reorder = true)",
    ),
    "placed by times, replicas of shards, tensor and sequence parallel": (
        HEAD.replace("devices = 4", "devices = 8"),
        f"mesh (dp_replicate = 2, dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}"
        "fsdp on dp_replicate, dp_shard { layers.* = unit, {norm, output} = unit }\n"
        f"checkpoint {{ layers.{{1..3}} = full }}\n{MIXED}",
        "(reorder = by_time)",
    ),
    "uneven shards": (
        UNEVEN,
        "mesh (dp_shard = 4)\nfsdp on dp_shard { layers.* = unit }\n"
        f"checkpoint {{ layers.1 = full, layers.2 = selective([attention, matmul]) }}\n{MIXED}",
        "(reorder = true)",
    ),
    "uneven shards, tied, another decoder, on the host": (
        HEAD.replace(
            'llama3("tiny")', 'gpt2("small", dim = 62, n_layers = 2, n_heads = 2, vocab_size = 257, max_seq_len = 64)'
        ),
        "mesh (dp_shard = 4)\nfsdp on dp_shard { layers.0 = unit(reshard = never), layers.1 = unit }\n"
        f"checkpoint {{ layers.1 = full }}\n{MIXED}",
        "(reorder = true, prefetch = proactive(limit = 1MiB))\noffload (activations = all, optimizer = all)",
    ),
    "uneven shards, tensor and sequence parallel": (
        UNEVEN,
        f"mesh (dp_shard = 2, tp = 2)\n{SEQUENCE_PARALLEL}fsdp on dp_shard {{ layers.* = unit }}\n"
        f"checkpoint {{ layers.{{1..3}} = full }}\nprecision (param = bf16, reduce = bf16)\n",
        "(reorder = true)",
    ),
    "uneven shards, on two ranks after forward": (
        UNEVEN,
        "mesh (dp_shard = 4)\nfsdp on dp_shard { layers.* = unit(reshard = 2) }\n"
        "precision (param = fp32, reduce = fp32)\n",
        "(reorder = by_time)",
    ),
    "uneven shards, scheduled by torch": (
        UNEVEN,
        f"mesh (dp_shard = 4)\nfsdp on dp_shard {{ layers.* = unit }}\n{MIXED}",
        "{ layers.* = bucket(compiler) }",
    ),
    "uneven shards, of which some are empty": (  # two experts, and a router of two rows, on four ranks
        SPARSE.replace("n_experts = 8", "n_experts = 2"),
        f"mesh (dp_shard = 4)\nfsdp on dp_shard {{ layers.* = unit }}\ncheckpoint {{ layers.1 = full }}\n{MIXED}",
        "(reorder = true)",
    ),
    "uneven shards of stages, compiled": (
        UNEVEN.replace("258", "257").replace("130", "129"),
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = 1F1B)\n"
        "fsdp on dp_shard { layers.* = unit(reshard = after_backward) }\n"
        f"checkpoint {{ layers.1 = full }}\n{MIXED}",
        "(reorder = true)\ncompile { root = aot_eager }",
    ),
    "another decoder, kept after forward": (
        HEAD.replace(
            'llama3("tiny")', 'gpt2("small", dim = 64, n_layers = 2, n_heads = 4, vocab_size = 256, max_seq_len = 64)'
        ),
        f"mesh (dp_shard = 2)\nfsdp on dp_shard {{ layers.* = unit(reshard = after_backward), root = unit }}\n{MIXED}",
        "",
    ),
}


WHOLE_BACKWARD = {
    "stages whose backward is split, tensor and sequence parallel": ("InterleavedZeroBubble", "Interleaved1F1B")
}
"""Schedule of the eager backend with equal sums: split, torch rounds gradients of tensor parallelism differently."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_backends_agree_bitwise(name: str, gloo, tmp_path: Path):
    head, body, comm = PLANS[name]
    agree(gloo, tmp_path, head, body, comm, eager=body.replace(*WHOLE_BACKWARD.get(name, ("", ""))))


@pytest.mark.slow
def test_checkpoint_continues_under_the_other_backend(gloo, tmp_path: Path):
    head, body, comm = PLANS["mixed precision"]
    data = tmp_path / "data.txt"
    data.write_text("begun by hooks, ended as a graph; " * 400)
    texts = {"eager": text_of(body, head), "graph": traced(body, head, comm)}
    whole = together(gloo(2)(train, texts["eager"], str(data), steps=4))
    for first, then in (("eager", "graph"), ("graph", "eager")):
        out = tmp_path / first
        gloo(2)(train, texts[first], str(data), steps=2, out=out)
        after = together(gloo(2)(train, texts[then], str(data), steps=4, out=out))
        assert after["resumed_from"] == 2
        assert after["loss"] == whole["loss"][2:]
        for parameter, value in after["parameters"].items():
            assert torch.equal(value, whole["parameters"][parameter]), parameter
