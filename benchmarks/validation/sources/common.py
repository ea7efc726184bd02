"""Parts that rows of several frameworks share: devices, fabrics, and models by their dimensions."""

from __future__ import annotations

import dataclasses

from benchmarks.validation.rows import Row, UnstatedError
from benchmarks.validation.statements import cluster, model

from legoai.specs.models.families import DEEPSEEK_PRESETS, GPT3_PRESETS, LLAMA3_PRESETS

LLAMA = dataclasses.asdict(LLAMA3_PRESETS["8b"])
GPT = dataclasses.asdict(GPT3_PRESETS["1.3b"])


def device_of(row: Row, named: str | None) -> str:
    """The catalogue's device for the row's GPU, unless one is named.

    Raises:
        UnstatedError: the catalogue has none.
    """
    if named is not None:
        return named
    gpu = row.text("gpu").upper()
    if "H100" in gpu:
        return "h100_sxm96" if "96" in gpu or row.text("gpu_mem_gb") == "96" else "h100_sxm"
    if "A100" in gpu:
        return "a100_sxm40" if "40" in gpu or row.text("gpu_mem_gb") == "40" else "a100_sxm80"
    for word, device in (("H200", "h200"), ("B200", "b200")):
        if word in gpu and "GB200" not in gpu:
            return device
    raise UnstatedError(f"no device of the catalogue is a {row.text('gpu') or 'GPU that is not named'}")


def cluster_of(row: Row, named: str | None, *, fabric: str) -> str:
    """The cluster statement for the row's GPUs and hosts."""
    return cluster(
        device_of(row, named), gpus=row.whole("n_gpus"), per_host=row.whole("gpus_per_node", 8), fabric=fabric
    )


def llama_of(
    row: Row, *, seq_len: int, tied: bool = False, vocab: int | None = None, theta: float = 500_000.0, **more: object
) -> str:
    """A Llama of the row's dimensions, without the stretched wavelengths of Llama 3.1, which cost nothing.

    Args:
        row: of a Llama, or of a model that is one with other options.
        seq_len: the longest sequence.
        tied: whether the output layer has the embedding's weights.
        vocab: tokens, in place of the row's.
        theta: of the rotations.
        more: further options of the built-in model.
    """
    return model(
        "llama3",
        "8b",
        LLAMA,
        dim=row.whole("hidden"),
        n_layers=row.whole("n_layers"),
        n_heads=row.whole("n_heads"),
        n_kv_heads=row.whole("n_kv_heads"),
        hidden_dim=row.whole("ffn_hidden"),
        vocab_size=vocab or row.whole("vocab"),
        max_seq_len=seq_len,
        rope_theta=theta,
        tie_embeddings=tied,
        **more,
    )


def deepseek_of(row: Row, *, seq_len: int, vocab: int, dense: int) -> str:
    """A DeepSeek-V2 or -V3 of the row's depth, whose other dimensions must be the published ones.

    Raises:
        UnstatedError: it is neither, or has other dimensions.
    """
    preset = next((name for name in ("v2", "v3") if row.text("model").lower().startswith(f"deepseek{name}")), None)
    if preset is None:
        raise UnstatedError(f"no DeepSeek of the presets is named: {row.text('model')}")
    known = dataclasses.asdict(DEEPSEEK_PRESETS[preset])
    for field, ours in (("hidden", "dim"), ("n_heads", "n_heads"), ("ffn_hidden", "dense_hidden_dim")):
        if row.whole(field) != known[ours]:
            raise UnstatedError(f"DeepSeek-{preset.upper()} with {field} = {row.whole(field)}, not {known[ours]}")
    return model(
        "deepseek",
        preset,
        known,
        n_layers=row.whole("n_layers"),
        n_dense_layers=dense,
        vocab_size=vocab,
        max_seq_len=seq_len,
    )


def gpt_of(row: Row, *, seq_len: int, vocab: int, bias: bool = True, tied: bool = True) -> str:
    """A GPT of the row's dimensions."""
    return model(
        "gpt3",
        "1.3b",
        GPT,
        dim=row.whole("hidden"),
        n_layers=row.whole("n_layers"),
        n_heads=row.whole("n_heads"),
        hidden_dim=row.whole("ffn_hidden"),
        vocab_size=vocab,
        max_seq_len=seq_len,
        bias=bias,
        tie_embeddings=tied,
    )


def batch_of(row: Row, *, micro: int | None = None) -> str:
    """The batch statement."""
    return (
        f"batch (global = {row.whole('global_batch')}, micro = {micro or row.whole('micro_batch')}, "
        f"seq_len = {row.whole('seq_len')})"
    )


def padded_vocabulary(size: int, tp: int) -> int:
    """Megatron's: a multiple of 128 for each tensor-parallel rank (`make-vocab-size-divisible-by`)."""
    step = 128 * tp
    return -(-size // step) * step
