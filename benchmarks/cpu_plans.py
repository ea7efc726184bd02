"""Plans whose costs are predicted for this machine's processor, and measured on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_LLAMA = 'llama3("tiny", n_layers = {layers}, dim = {dim}, n_heads = {heads}, n_kv_heads = {heads}, ' \
    "hidden_dim = {hidden}, vocab_size = {vocabulary}, max_seq_len = 1024)"  # fmt: skip
_GPT = 'gpt2("small", n_layers = {layers}, dim = {dim}, n_heads = {heads}, vocab_size = {vocabulary}, ' \
    "max_seq_len = 1024)"  # fmt: skip

MODELS = {
    "llama 8M": _LLAMA.format(layers=6, dim=256, heads=4, hidden=768, vocabulary=4096),
    "llama 20M": _LLAMA.format(layers=6, dim=512, heads=8, hidden=1024, vocabulary=4096),
    "llama 36M": _LLAMA.format(layers=8, dim=512, heads=8, hidden=1536, vocabulary=8192),
    "llama 100M": _LLAMA.format(layers=8, dim=960, heads=15, hidden=2560, vocabulary=8192),
    "gpt 8M": _GPT.format(layers=6, dim=256, heads=4, vocabulary=8192),
    "gpt 34M": _GPT.format(layers=8, dim=512, heads=8, vocabulary=16384),
}

_TINY = Path(__file__).parents[1] / "plans" / "tiny.plan"
_TENSOR_PARALLEL = _TINY.read_text("utf-8").partition("\nshard on tp {")[2].partition("\n}\n")[0]
_TENSOR_PARALLEL = f"shard on tp {{{_TENSOR_PARALLEL}\n}}\n"
"""Tensor and sequence parallel styles, as in the worked plan of a small Llama."""
_SINGLE = "precision (param = fp32)\n"
_HALF = "precision (master = bf16, param = bf16)\n"
_MIXED = "precision (param = bf16, reduce = fp32)\n"


def _fsdp(axes: str = "dp_shard", reshard: str = "after_forward") -> str:
    return f"fsdp on {axes} {{ layers.* = unit(reshard = {reshard}), root = unit(reshard = after_backward) }}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPlan:
    """One plan: its model, its ranks, and its other statements.

    Attributes:
        model: a name of :data:`MODELS`.
        world: number of ranks.
        batch: sequences of the global batch, sequences of a micro batch, and tokens of a sequence.
        body: all other statements.
    """

    model: str
    world: int
    batch: tuple[int, int, int]
    body: str

    @property
    def text(self) -> str:
        """Text of the plan."""
        whole, micro, length = self.batch
        return (
            f"plan here\nmodel {MODELS[self.model]}\ncluster cpu(devices = {self.world})\n"
            f"batch (global = {whole}, micro = {micro}, seq_len = {length})\noptimizer adamw(lr = 1e-4)\n{self.body}"
        )


def _alone(model: str, batch: tuple[int, int, int], body: str) -> CpuPlan:
    return CpuPlan(model=model, world=1, batch=batch, body=body)


def _two(model: str, batch: tuple[int, int, int], body: str) -> CpuPlan:
    return CpuPlan(model=model, world=2, batch=batch, body=body)


def _four(model: str, batch: tuple[int, int, int], body: str) -> CpuPlan:
    return CpuPlan(model=model, world=4, batch=batch, body=body)


_CHECKPOINT = "checkpoint { layers.* = full }\n"
_SELECTIVE = "checkpoint { layers.* = selective([attention, alternate_matmul]) }\n"

PLANS = {
    "one device, gpt": _alone("gpt 34M", (2, 2, 256), _SINGLE),
    "one device": _alone("llama 20M", (2, 2, 256), _SINGLE),
    "one device, 100M": _alone("llama 100M", (1, 1, 256), _SINGLE),
    "one device, bf16": _alone("llama 20M", (2, 2, 256), _HALF),
    "one device, checkpointed": _alone("llama 36M", (2, 2, 256), f"{_SINGLE}{_CHECKPOINT}"),
    "one device, selectively checkpointed": _alone("llama 36M", (2, 2, 256), f"{_SINGLE}{_SELECTIVE}"),
    "one device, four micro batches": _alone("llama 8M", (8, 2, 256), _SINGLE),
    "replicas": _two("llama 20M", (4, 2, 256), f"mesh (dp_replicate = 2)\nreplicate on dp_replicate\n{_SINGLE}"),
    "replicas, sharded optimizer": _two(
        "gpt 8M", (8, 4, 256), f"mesh (dp_replicate = 2)\nreplicate on dp_replicate (optimizer = sharded)\n{_SINGLE}"
    ),
    "fsdp": _two("llama 36M", (4, 2, 128), f"mesh (dp_shard = 2)\n{_fsdp()}{_SINGLE}"),
    "fsdp, kept after forward, mixed": _two(
        "llama 20M", (4, 2, 256), f"mesh (dp_shard = 2)\n{_fsdp(reshard='after_backward')}{_MIXED}"
    ),
    "fsdp, two micro batches, checkpointed": _two(
        "llama 36M", (8, 2, 128), f"mesh (dp_shard = 2)\n{_fsdp()}{_SINGLE}{_CHECKPOINT}"
    ),
    "tensor and sequence parallel": _two("llama 20M", (4, 4, 256), f"mesh (tp = 2)\n{_TENSOR_PARALLEL}{_SINGLE}"),
    "fsdp on four": _four("llama 20M", (8, 2, 128), f"mesh (dp_shard = 4)\n{_fsdp()}{_SINGLE}"),
    "fsdp and tensor parallel": _four(
        "llama 20M", (4, 2, 128), f"mesh (dp_shard = 2, tp = 2)\n{_TENSOR_PARALLEL}{_fsdp()}{_SINGLE}"
    ),
    "hybrid shards, selectively checkpointed": _four(
        "llama 8M", (8, 2, 256),
        f"mesh (dp_replicate = 2, dp_shard = 2)\n{_fsdp('dp_replicate, dp_shard')}{_SINGLE}{_SELECTIVE}",
    ),
}  # fmt: skip
