"""Plans with holes of many kinds, drawn at random."""

from __future__ import annotations

import random

_MODELS = (
    'llama3("1b", n_layers = {})',
    'llama3("8b", n_layers = {}, dim = 2048, n_heads = 16, hidden_dim = 4096)',
    'gpt2("small", n_layers = {})',
    'mixtral("8x7b", n_layers = {}, dim = 1024, n_heads = 8, hidden_dim = 2048)',
)
_CLUSTERS = {
    4: ("h100_sxm(devices = 4)", "a100_sxm80(devices = 4)"),
    8: ("h100_sxm", "a100_sxm80", "h200", "b200"),
    16: ("h100_sxm(hosts = 2, fabric = infiniband_ndr)", "a100_sxm80(hosts = 2, fabric = ethernet_100)"),
}
_TENSOR_PARALLEL = (
    "shard standard on tp", "shard standard on tp (sequence)", "shard standard on tp (sequence = auto)",
    "shard standard on tp (loss_parallel = auto)", "shard auto on tp",
)  # fmt: skip
_PIPELINES = (
    "(schedule = auto)", "(schedule = 1F1B, split = auto)", "(schedule = Interleaved1F1B, stages = auto)",
    "(schedule = auto in [1F1B, ZBVZeroBubble], microbatches = auto)", "(schedule = GPipe)",
)  # fmt: skip
_UNITS = (
    "", "{ layers.* = auto }", "{ layers.* = unit(reshard = auto) }", "{ layers.* = unit(reshard = after_backward) }",
)  # fmt: skip
_LINES = (
    (
        "", "checkpoint { layers.* = auto }", "checkpoint { layers.* = full }",
        "checkpoint { layers.* = selective(auto) }", "checkpoint { layers.* = budget(auto) }",
    ),
    ("", "attention flash", "attention auto", "attention math"),
    ("", "loss auto", "loss eager", "loss chunked(auto)", "loss chunked(4, last_layer = auto)", "loss fused"),
    ("precision (param = bf16, reduce = fp32)", "precision (param = auto in [bf16, fp32], reduce = fp32)"),
    ("", "optimizer sgd(lr = 0.1)", "optimizer adamw(lr = 1e-3) { layers.**.weight = muon(lr = 0.02) }"),
    (
        "", "", "require peak_memory <= 20GiB", "require reserved_memory <= 30GiB", "require exposed_comm <= 30%",
        "require mfu >= 10%", "require recompute <= 10%", "require bubble <= 40%",
    ),
    ("", "", "maximize mfu", "minimize peak_memory", "maximize tokens_per_s", "minimize reserved_memory"),
)  # fmt: skip
"""Statements, of each of which one is drawn."""
_OF_A_GRAPH = ("", "comm { layers.* = auto }", "comm (prefetch = auto)", "comm (reorder = auto)")
_OTHERS = (
    "", "", "comm (prefetch = auto)", "offload (optimizer = auto)", "offload (activations = auto)",
    "compile { layers.* = auto }", "compile { root = inductor }",
)  # fmt: skip


def open_plan(draw: random.Random) -> str:
    """The text of a plan; some have errors."""
    devices, model = draw.choice([*_CLUSTERS]), draw.choice(_MODELS)
    routed, cut = "mixtral" in model, "gpt2" not in model
    graph = draw.random() < 0.25
    staged = not graph and draw.random() < 0.35
    sharded = not routed and draw.random() < 0.5
    in_context = cut and not routed and not staged and draw.random() < 0.2
    axes = [
        *([f"pp = {draw.choice(('auto', '2', 'auto in [1, 2]'))}"] if staged else []),
        *([f"dp_replicate = {draw.choice(('auto', '2'))}"] if draw.random() < 0.3 else []),
        "dp_shard = rest",
        *([f"cp = {draw.choice(('auto', '2'))}"] if in_context else []),
        *([f"tp = {draw.choice(('auto', '2', 'auto in [1, 2, 4]'))}"] if sharded else []),
        *([f"ep = {draw.choice(('auto', '2'))}"] if routed and draw.random() < 0.5 else []),
    ]
    names = [axis.partition(" ")[0] for axis in axes]
    over = ", ".join(name for name in ("dp_replicate", "dp_shard", "cp") if name in names)
    micro, length = draw.choice(("auto", "1")), draw.choice((512, 1024) if not cut else (512, 2048, 4096))
    lines = [
        "plan drawn",
        f"model {model.format(draw.choice((4, 6, 8, 12)))}",
        f"cluster {draw.choice(_CLUSTERS[devices])}",
        f"batch (global = {devices * draw.choice((1, 2, 4, 8))}, micro = {micro}, seq_len = {length})",
        f"mesh ({', '.join(axes)})",
        draw.choice(_TENSOR_PARALLEL) if sharded else "",
        "shard standard on ep" if "ep" in names else "",
        draw.choice(("context on cp", "context on cp (rotate = auto)")) if in_context else "",
        f"fsdp blocks on {over} {'(backend = graph) ' if graph else ''}{draw.choice(_UNITS)}",
        f"pipeline on pp {draw.choice(_PIPELINES)}" if staged else "",
        *map(draw.choice, _LINES),
        draw.choice(_OF_A_GRAPH if graph else _OTHERS),
    ]
    return "\n".join(line for line in lines if line) + "\n"
