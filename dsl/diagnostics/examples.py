"""Examples of statements, for their pages and for those who write other tools' options."""

from __future__ import annotations

from typing import Final

EXAMPLES: Final[dict[str, str]] = {
    "plan": "plan llama3_8b",
    "extends": 'extends "base.plan"',
    "let": "let hosts = 4",
    "variant": "variant small_batch {\n  batch (global = 64, micro = 1, seq_len = 8192)\n}",
    "require": "require peak_memory <= 72GiB",
    "unset": "variant unclipped {\n  unset clip\n}",
    "minimize": "minimize step_time",
    "maximize": "maximize mfu",
    "model": 'model llama3("8b")',
    "cluster": "cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)",
    "batch": "batch (global = 256, micro = 1, seq_len = 8192)",
    "mesh": "mesh (dp_shard = 4, tp = 8)",
    "shard": "shard standard on tp (sequence, loss_parallel)",
    "fsdp": "fsdp on dp_shard {\n  layers.* = unit(reshard = after_backward)\n}",
    "replicate": "replicate on dp_replicate",
    "pipeline": "pipeline on pp (schedule = Interleaved1F1B, stages = 8)",
    "context": "context on cp (rotate = allgather, balance = head_tail)",
    "checkpoint": "checkpoint {\n  layers.*      = selective([attention, matmul])\n  layers.{0..3} = full\n}",
    "comm": "comm (prefetch = units(forward = 2, backward = 2))",
    "offload": "offload (optimizer = all)",
    "allocator": "allocator (expandable_segments = true)",
    "precision": "precision (param = bf16, reduce = fp32)",
    "attention": "attention flash",
    "loss": "loss fused",
    "compile": "compile { layers.* = inductor }",
    "optimizer": (
        "optimizer adamw(lr = 3e-4, betas = [0.9, 0.95], weight_decay = 0.1) {\n"
        "  norm            = group(weight_decay = 0)\n"
        "  layers.*.*_norm = group(weight_decay = 0)\n}"
    ),
    "clip": "clip (norm = 1.0)",
    "schedule": "schedule cosine(steps = 10000, warmup = 1000)",
    "data": 'data (source = "texts.jsonl", field = "text")',
    "weights": 'weights (huggingface = "llama-3.1-8b")',
    "steps": "steps 1000",
    "seed": "seed 7",
    "save": "save (every = 100, keep = 3)",
    "evaluate": "evaluate (every = 100, batches = 8)",
}
"""An example of each statement that a person writes, as its page shows it."""
