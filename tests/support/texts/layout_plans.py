"""Plans of the small Llama with right layouts, by rule, and the codes of diagnostics about layouts."""

from __future__ import annotations

HEAD = 'plan x\nmodel llama3("tiny")\ncluster h100_sxm\nbatch (global = 64, micro = 1, seq_len = 256)\n'

SEQUENCE_PARALLEL = {
    "tok_embeddings": "rowwise(input = replicate, output = shard(1))",
    "layers.*.attention_norm": "sequence",
    "layers.*.ffn_norm": "sequence",
    "layers.*.attention": "inputs(from = shard(1), to = replicate)",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise(output = shard(1))",
    "layers.*.feed_forward": "inputs(from = shard(1), to = replicate)",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise(output = shard(1))",
    "norm": "sequence",
    "output": "colwise(input = shard(1), loss_parallel = true)",
}

WHOLE_SEQUENCE = {
    "tok_embeddings": "rowwise",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "output": "colwise(loss_parallel = true)",
}

LAYOUT_CODES = {"LP411", "LP412", "LP414", "LP415", "LP417", "LP418", "LP419", "LP420"}


def plan(styles: dict[str, str], extra: str = "") -> str:
    rules = "\n".join(f"  {path} = {style}" for path, style in styles.items())
    return f"mesh (dp_shard = 4, tp = 2)\nfsdp on dp_shard {{ layers.* = unit }}\n{extra}\nshard on tp {{\n{rules}\n}}"
