"""Plans for runs of Megatron-LM (SimuMax) and Megatron-DeepSpeed (vTrain).

Read for this: Megatron-LM's `distributed/distrib_optimizer` and `core/tensor_parallel/layers.py`, SimuMax's scripts and
vTrain's validation configs, as far as the files of rows cite them.

Megatron-LM with the distributed optimizer keeps parameters whole in bf16 and gradients whole in fp32, and shards the
fp32 parameters and Adam's moments: 6 + 12 / n bytes. A plan states that by units that are never resharded and gradients
that are reduced once. With sequence parallelism column-wise layers save their sharded input; SwiGLU is one kernel that
saves its input and not the sigmoid's result. Attention is cuDNN's, by Transformer Engine.

Megatron-DeepSpeed of 2023 trains in fp16 with whole replicas, whose parameters the optimizer alone writes
(`FP16_Optimizer.step`), and reduces all gradients after the last micro batch: one unit, over one rank, replicated. It
computes attention step by step, and checkpoints whole blocks; `megatron_models.py` has its layers.
"""

from __future__ import annotations

import re

from benchmarks.validation.rows import Row, UnstatedError
from benchmarks.validation.sources.common import batch_of, cluster_of, deepseek_of, gpt_of, llama_of, padded_vocabulary
from benchmarks.validation.statements import (
    FUSED_KERNELS,
    MEGATRON_PYTHON,
    OWN_PYTHON,
    TENSOR_PARALLEL_GPT,
    TENSOR_PARALLEL_LLAMA_LOCAL,
    Draft,
    Stated,
    keeping_sharded_inputs,
    kept_units,
    mesh,
    name_of,
    one_forward_one_backward,
    reshard_policy,
    whole_parameters,
)

MEGATRON_KEEPS = """checkpoint {
  layers.*.attention    = selective([matmul, attention])
  layers.*.feed_forward = selective([matmul, "aten.mul.Tensor"])
}"""
STEPWISE = "benchmarks.validation.megatron_models:gpt"
ONE_KERNEL = "benchmarks.validation.models:llama_with_swiglu_in_one_kernel"
OPTIMIZER = "optimizer adamw(lr = 1e-4, betas = [0.9, 0.95], weight_decay = 0.1)"


def convert_vtrain(row: Row, device: str | None = None) -> Stated:
    """State a run of Megatron-DeepSpeed.

    Raises:
        UnstatedError: the row leaves too much open, or has options that the language cannot state.
    """
    draft = Draft(name_of(row.id), f"{row.text('model')}, {row.text('source')}")
    pp, tp, dp = row.whole("pp", 1), row.whole("tp", 1), row.whole("dp_replicate", 1)
    accumulates = row.whole("global_batch") > row.whole("micro_batch") * dp
    model = gpt_of(row, seq_len=row.whole("seq_len"), vocab=padded_vocabulary(row.whole("vocab"), tp), tied=pp == 1)
    draft.add(
        model.replace('gpt3("1.3b"', f'python("{STEPWISE}", preset = "1.3b"'),
        cluster_of(row, device, fabric="infiniband_hdr100"),
        batch_of(row),
        mesh(pp=pp, dp_replicate=dp, tp=tp),
    )
    if tp > 1:
        draft.add(TENSOR_PARALLEL_GPT.replace("layers.*.attention.{wq, wk, wv} =", "layers.*.attention.wqkv         ="))
    draft.add(whole_parameters(f"  root = unit(reshard = {reshard_policy(pp)})", dp=dp))
    if accumulates:
        draft.add("comm (reduce = last_micro_batch)")
    if pp > 1:
        schedule = one_forward_one_backward(row.whole("global_batch") // (row.whole("micro_batch") * dp), pp)
        draft.add(f"pipeline on pp (schedule = {schedule}, stages = {pp})")
    draft.add("checkpoint { layers.* = full }", "loss eager")
    draft.add("precision (param = bf16, reduce = bf16)", OPTIMIZER, MEGATRON_PYTHON)
    draft.assumed.append("bf16 for fp16, which has the same rates")
    draft.differs.append("attention copies what it reads where a micro batch has several sequences")
    draft.differs.append("no dropout behind the embedding")
    return draft.done()


def convert_simumax(row: Row, device: str | None = None) -> Stated:
    """State a run of Megatron-LM on B200s.

    Raises:
        UnstatedError: the row leaves too much open, or has options that the language cannot state.
    """
    latent, ep = "MLA" in row.text("arch"), row.whole("ep", 1)
    if ep > 1 and not latent:
        raise UnstatedError("experts of a model that is not DeepSeek's")
    draft = Draft(name_of(row.id), f"{row.text('model')}, {row.text('framework')}")
    pp, tp, cp = row.whole("pp", 1), row.whole("tp", 1), row.whole("cp", 1)
    dp = row.whole("dp_replicate", 1) * row.whole("dp_shard", 1)
    shards = [axis for axis, size in (("dp_shard", dp), ("cp", cp)) if size > 1] or ["dp_shard"]
    length, vocab = row.whole("seq_len"), padded_vocabulary(row.whole("vocab"), tp)
    draft.add(
        _latent_of(row, seq_len=length, vocab=vocab) if latent else llama_of(row, seq_len=length, vocab=vocab),
        cluster_of(row, device, fabric="infiniband_ndr"),
        batch_of(row),
        mesh(pp=pp, dp_shard=dp, cp=cp, tp=tp, ep=ep),
    )
    across = ep > 1 and tp > 1
    if ep > 1:
        draft.add(f"shard standard on ep{' (across_tp)' if across else ''}")
    if tp > 1 and latent:
        options = f"sequence, loss_parallel{', across_tp' if across else ''}"
        draft.add(f"shard standard on tp ({options}) {{ tok_embeddings = colwise(output = shard(1)) }}")
    elif tp > 1:
        draft.add(TENSOR_PARALLEL_LLAMA_LOCAL)
    if across:
        draft.assumed.append("no expert is divided: an expert tensor parallel size of 1")
    idle = "" if dp > 1 or cp > 1 else "  # legoai: ignore[LP307] one rank holds all, in units that cast to bf16"
    units = kept_units(reshard_policy(pp), tied=False)
    draft.add(f"fsdp on {', '.join(shards)} {{{idle}\n{units}\n}}", "comm (reduce = last_micro_batch)")
    if pp > 1:
        draft.add(f"pipeline on pp (schedule = 1F1B, stages = {pp})")
    if cp > 1:
        draft.add("context on cp (rotate = heads)")
    if not latent:
        draft.add(MEGATRON_KEEPS)
    draft.add("attention cudnn", "loss fused", "precision (param = bf16, reduce = fp32)")
    draft.add(OPTIMIZER, "clip (norm = 1.0)", FUSED_KERNELS, OWN_PYTHON)
    draft.differs.append("no communication beside computation: SimuMax turned all overlap off")
    draft.differs.append("Transformer Engine's kernels, such as norm and linear layer in one")
    if latent:
        draft.assumed.append("tokens are routed evenly")
        draft.differs.append("kernels that permute rows, rotate and apply SwiGLU in one, and save their inputs alone")
        return draft.done()
    return draft.done(for_memory=_held)


def _latent_of(row: Row, *, seq_len: int, vocab: int) -> str:
    """DeepSeek with the one dense block that the descriptions of all these rows name.

    Raises:
        UnstatedError: the row names another number, or sizes that no preset has.
    """
    found = re.search(r"\b(\d+) dense layer|\bdense_layers=(\d+)", row.text("arch"))
    if found is None:
        raise UnstatedError("how many blocks have no experts is not stated")
    return deepseek_of(row, seq_len=seq_len, vocab=vocab, dense=int(found[1] or found[2]))


def _held(text: str) -> str:
    """The same plan with SwiGLU in one kernel, which saves its inputs, and with sharded inputs saved."""
    text = text.replace('llama3("8b"', f'python("{ONE_KERNEL}", preset = "8b"')
    if "shard on tp" in text:
        return keeping_sharded_inputs(text)
    return text.replace(f"{MEGATRON_KEEPS}\n", "")
