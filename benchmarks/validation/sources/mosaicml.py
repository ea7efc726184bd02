"""Plans for runs of llm-foundry: MPT with Composer and FSDP1.

Read for this: llm-foundry's `scripts/train/benchmarking/README.md` and `scripts/train/yamls/pretrain/mpt-*.yaml`, and
Composer's notes on FSDP, as far as the file of rows cites them; `scripts/train/benchmarking/submit_benchmarks.py` and
`sweep.sh`.

- Units are the blocks and the model. Gradients are reduced for every micro batch.
- `mixed_precision: DEFAULT` computes in bf16 and reduces in fp32; `PURE` reduces in bf16 too.
- Attention is the first FlashAttention in Triton: `attn_impl: triton` in every `mpt-*.yaml`, and the default of
  `submit_benchmarks.py`. By the figures of FlashAttention-2's paper it is half as fast as FlashAttention-2 and about as
  fast as torch's memory-efficient kernel (A100, width 128, causal, 2048 tokens: 68, 155 and 82 TFLOP/s).
- MPT has no biases, learned positions, tied embeddings, and the fused cross entropy of flash-attention.
- Composer computes two metrics in training, each a cross entropy of the logits in fp32: a factory states that model.
- The optimizer is DecoupledAdamW, a loop in Python over the parameters; gradients are clipped to a norm of 1.
"""

from __future__ import annotations

from benchmarks.validation.rows import Row, UnstatedError
from benchmarks.validation.sources.common import batch_of, cluster_of, gpt_of
from benchmarks.validation.statements import FIRST_FLASH_ATTENTION, Draft, Stated, mesh, name_of

WITH_METRICS = "benchmarks.validation.models:mpt"
FLOAT8 = """precision (param = bf16, reduce = fp32) {
  layers.*.attention.{wq, wk, wv, wo} = float8(tensorwise)
  layers.*.mlp.{up, down}             = float8(tensorwise)
}"""


def convert(row: Row, device: str | None = None) -> Stated:
    """State a run of llm-foundry.

    Raises:
        UnstatedError: the row leaves too much open, or has options that the language cannot state.
    """
    draft = Draft(name_of(row.id), f"{row.text('model')}, {row.text('framework')}")
    fabric = "roce_200" if "RoCE" in row.text("interconnect") else "infiniband_ndr"
    if row.whole("n_gpus") > row.whole("gpus_per_node", 8) and not row.text("interconnect"):
        draft.assumed.append("the network between hosts")
    model = gpt_of(row, seq_len=row.whole("seq_len"), vocab=row.whole("vocab"), bias=False)
    draft.add(
        model.replace('gpt3("1.3b"', f'python("{WITH_METRICS}", preset = "1.3b"'),
        cluster_of(row, device, fabric=fabric),
        batch_of(row),
        mesh(dp_replicate=row.whole("dp_replicate", 1), dp_shard=row.whole("dp_shard", 1)),
    )
    axes = [axis for axis in ("dp_replicate", "dp_shard") if row.whole(axis, 1) > 1]
    if "dp_shard" not in axes:
        raise UnstatedError("one rank holds all parameters, which FSDP does not shard")
    units = "unit(reshard = after_backward)" if row.whole("zero_stage", 3) == 2 else "unit"
    draft.add(f"fsdp on {', '.join(axes)} {{\n  layers.* = {units}\n  root = unit\n}}")
    mode, precision = row.text("ac_mode"), row.text("precision")
    if mode not in ("none", "full"):
        raise UnstatedError(f"checkpointing is {mode or 'not stated'}")
    if mode == "full":
        draft.add("checkpoint { layers.* = full }")
    draft.add("attention efficient", FIRST_FLASH_ATTENTION, "loss fused")
    draft.differs.append("the first FlashAttention, in Triton: the memory-efficient kernel is about as fast")
    if "fp8" in precision:
        draft.add(FLOAT8)
        draft.differs.append("Transformer Engine's delayed scaling, and its kernels")
    elif "PURE" in precision:
        draft.add("precision (param = bf16, reduce = bf16)")
    else:
        draft.add("precision (param = bf16, reduce = fp32)")
    draft.add("optimizer adamw(lr = 1e-4, betas = [0.9, 0.95], weight_decay = 0.1, fused = false)", "clip (norm = 1.0)")
    draft.differs.append("an optimizer step for each parameter by itself; FSDP1's flat parameters")
    return draft.done()
