"""Plans whose costs are predicted for one GPU, and measured on it."""

from __future__ import annotations

from dataclasses import dataclass

_GPT = 'gpt3("1.3b", dim = {dim}, n_layers = {layers}, n_heads = {heads}, hidden_dim = {hidden}, ' \
    "vocab_size = 51200, max_seq_len = {length})"  # fmt: skip
_LLAMA = 'llama3("1b", dim = {dim}, n_layers = {layers}, n_heads = {heads}, n_kv_heads = {groups}, ' \
    "head_dim = {width}, hidden_dim = {hidden}, vocab_size = {vocabulary}, tie_embeddings = false)"  # fmt: skip

MODELS = {
    "gpt 1024": _GPT.format(dim=1024, layers=12, heads=16, hidden=4096, length=1024),
    "gpt 2048": _GPT.format(dim=2048, layers=12, heads=16, hidden=8192, length=1024),
    "gpt 6144": _GPT.format(dim=6144, layers=4, heads=48, hidden=24576, length=2048),
    "llama 1b": _LLAMA.format(dim=2048, layers=16, heads=32, groups=8, width=64, hidden=8192, vocabulary=128256),
    "llama 8b, 4 layers": _LLAMA.format(
        dim=4096, layers=4, heads=32, groups=8, width=128, hidden=14336, vocabulary=128256
    ),
    "llama 8b, 16 layers": _LLAMA.format(
        dim=4096, layers=16, heads=32, groups=8, width=128, hidden=14336, vocabulary=32000
    ),
    "llama 8b, a quarter": _LLAMA.format(
        dim=4096, layers=8, heads=8, groups=2, width=128, hidden=3584, vocabulary=32000
    ),
    "llama 70b, an eighth": _LLAMA.format(
        dim=8192, layers=8, heads=8, groups=1, width=128, hidden=3584, vocabulary=16000
    ),
}
"""Of the last two, widths are those of one rank of tensor parallelism, and the residual stream is whole."""

MIXED = "precision (master = fp32, param = bf16)\n"
HALF = "precision (master = bf16, param = bf16)  # legoai: ignore[LP823]\n"
FULL = "precision (param = fp32)\n"
_FLASH = "attention flash\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """One plan: its model, its batch, and its other statements.

    Attributes:
        model: a name of :data:`MODELS`.
        batch: sequences of the global batch, sequences of a micro batch, and tokens of a sequence.
        body: all other statements.
    """

    model: str
    batch: tuple[int, int, int]
    body: str

    def text(self, device: str) -> str:
        """Text of the plan on one device of the catalogue."""
        whole, micro, length = self.batch
        return (
            f"plan here\nmodel {MODELS[self.model]}\ncluster {device}(hosts = 1, devices = 1)\n"
            f"batch (global = {whole}, micro = {micro}, seq_len = {length})\noptimizer adamw(lr = 1e-4)\n{self.body}"
        )


def _plan(model: str, batch: tuple[int, int, int], body: str) -> GpuPlan:
    return GpuPlan(model=model, batch=batch, body=body)


_CHECKPOINT = "checkpoint { layers.* = full }\n"
_SELECTIVE = "checkpoint { layers.* = selective([attention, matmul]) }\n"
_COMPILED = "compile { layers.* = inductor }\n"

PLANS = {
    "gpt 1024, micro batch 1": _plan("gpt 1024", (4, 1, 1024), HALF),
    "gpt 1024, micro batch 8": _plan("gpt 1024", (8, 8, 1024), HALF),
    "gpt 1024, micro batch 8, checkpointed": _plan("gpt 1024", (8, 8, 1024), HALF + _CHECKPOINT),
    "gpt 2048, micro batch 2": _plan("gpt 2048", (4, 2, 1024), HALF),
    "gpt 2048, micro batch 8": _plan("gpt 2048", (8, 8, 1024), MIXED),
    "gpt 6144": _plan("gpt 6144", (2, 2, 2048), HALF),
    "llama 1b": _plan("llama 1b", (4, 4, 2048), HALF),
    "llama 1b, mixed precision": _plan("llama 1b", (8, 2, 2048), MIXED),
    "llama 1b, single precision": _plan("llama 1b", (2, 2, 2048), FULL),
    "llama 1b, compiled": _plan("llama 1b", (4, 4, 2048), HALF + _COMPILED),
    "llama 8b, 4 layers": _plan("llama 8b, 4 layers", (2, 2, 8192), HALF + _FLASH),
    "llama 8b, 4 layers, fused loss": _plan("llama 8b, 4 layers", (2, 2, 8192), f"{HALF}{_FLASH}loss fused\n"),
    "llama 8b, 4 layers, cudnn": _plan("llama 8b, 4 layers", (2, 2, 8192), HALF + "attention cudnn\n"),
    "llama 8b, 16 layers, checkpointed": _plan("llama 8b, 16 layers", (4, 2, 8192), HALF + _FLASH + _CHECKPOINT),
    "llama 8b, 16 layers, selectively checkpointed": _plan(
        "llama 8b, 16 layers", (2, 1, 8192), HALF + _FLASH + _SELECTIVE
    ),
    "llama 8b, 16 layers, compiled": _plan("llama 8b, 16 layers", (4, 2, 8192), HALF + _FLASH + _SELECTIVE + _COMPILED),
    "llama 8b, a quarter": _plan("llama 8b, a quarter", (4, 1, 4096), HALF + _FLASH),
    "llama 70b, an eighth": _plan("llama 70b, an eighth", (4, 1, 4096), HALF + _FLASH),
}
