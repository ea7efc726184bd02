"""Plans for the single-GPU tables 4.11 and 4.14 of the LegoAI dissertation.

Read for this: the author's experiments, `exp_utils.py` and `driver.py` of sanketpurandare/mem-run-estimator (November
2024, with the outputs that the tables print), and `transformers` 4.46, which they call.

- Gemma is `google/gemma-2b`, of 18 blocks, not Gemma 2; Llama is 3.2 1B; the classifiers are `timm`'s ViT-H/14 and
  ConvNeXt V2 huge, at 224 pixels; CLIP reads 20 tokens.
- Half precision is a model in fp16, with fp16 moments; mixed precision is autocast to fp16. The plans say bf16, of the
  same size and rates: the language refuses fp16, which needs its losses scaled.
- Checkpointing recomputes whole blocks in ViT and CLIP alone; in Llama and Gemma the feed-forward layers and the norms,
  in T5 the same, in ConvNeXt the feed-forward layers.
- Adam with an L2 penalty of 1e-4, in lists, without a fused kernel; `timm`'s has no penalty. No gradients are clipped.
- Memory is `active_bytes.all.peak` over five steps: with the workspaces of cuBLAS, 32 MiB on a Hopper for each of the
  two threads that multiply, forward's and backward's (`aten/src/ATen/cuda/CublasHandlePool.cpp`).
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.validation.rows import Row, UnstatedError
from benchmarks.validation.statements import Draft, Stated, cluster, name_of

MIB = 2**20
_FACTORY = "benchmarks.validation.models"
_PRECISION = {
    "FP": "precision (master = fp32, param = fp32)",
    "MP": "precision (master = fp32, param = bf16)",
    "HP": "precision (master = bf16, param = bf16)  # legoai: ignore[LP823]",
}


@dataclass(frozen=True, slots=True)
class _Model:
    """A model of the tables: its factory, what is recomputed, its input (`text` or `image`), whether it has dropout."""

    factory: str
    checkpoint: tuple[str, ...]
    reads: str
    penalty: float = 1e-4
    drops_out: bool = False


_GATED = ("model.layers.*.mlp", "model.layers.*.{input, post_attention}_layernorm", "model.norm")
_T5 = (
    "{encoder, decoder}.block.*.layer.0.layer_norm",
    "decoder.block.*.layer.1.layer_norm",
    "encoder.block.*.layer.1",
    "decoder.block.*.layer.2",
    "{encoder, decoder}.final_layer_norm",
)
_GPT2 = 'causal", config = "gpt2_large", loss_in_fp32 = false'
_CLIP = ("{text_model, vision_model}.encoder.layers.*",)
_VIT = 'images", name = "vit_huge_patch14_clip_224.laion2b_ft_in12k_in1k", size = 224'
_CONVNEXT = 'images", name = "convnextv2_huge.fcmae_ft_in22k_in1k_512", size = 224'
_MODELS = {
    "GEMMA 2B": _Model('causal", config = "gemma_2b"', _GATED, "text"),
    "LLAMA": _Model('causal", config = "llama3_1b"', _GATED, "text"),
    "HF GPT2": _Model(_GPT2, ("transformer.h.*",), "text", drops_out=True),
    "HF T5": _Model('encoder_decoder", config = "t5_large"', _T5, "text", drops_out=True),
    "HF CLIP": _Model('images_with_texts", config = "clip_l14_336"', _CLIP, "text"),
    "TIMM VIT": _Model(_VIT, ("blocks.*",), "image", penalty=0.0),
    "CONVNEXT": _Model(_CONVNEXT, ("stages.*.blocks.*.mlp",), "image", penalty=0.0),
}
_CLIP_TOKENS = 20


def convert(row: Row, device: str | None = None) -> Stated:
    """State a run of one GPU.

    Raises:
        UnstatedError: the row is not a run of its own, or names a model that is not known.
    """
    if row.text("estimator", "LEARNED") != "LEARNED":
        raise UnstatedError("the same run as the row of the learned model")
    name = row.text("model").replace("_", " ").replace("LLAMA 1B", "LLAMA")
    model = _MODELS.get(name)
    if model is None or row.text("precision") not in _PRECISION:
        raise UnstatedError(f"no model of the tables is {name} in {row.text('precision') or 'no'} precision")
    draft = Draft(name_of(row.id), f"{row.text('model')}, table {'4.11' if row.text('estimator') else '4.14'}")
    if row.text("precision") != "FP":
        draft.assumed.append("bf16 for fp16, of the same size and rates")
    batch = row.whole("batch")
    length = ""
    if model.reads == "text":
        length = f", seq_len = {_CLIP_TOKENS if 'CLIP' in name else row.whole('seq_or_img')}"
    draft.add(
        f'model python("{_FACTORY}:{model.factory})',
        cluster(device or "h100_sxm", gpus=1, per_host=8, fabric="infiniband_ndr"),
        f"batch (global = {batch}, micro = {batch}{length})",
    )
    if row.text("ac").lower() in ("yes", "true"):
        rules = "".join(f"\n  {path} = full" for path in model.checkpoint)
        options = "" if model.drops_out else " (preserve_rng = false)"
        draft.add(f"checkpoint{options} {{{rules}\n}}")
    draft.add("loss eager", _PRECISION[row.text("precision")])
    draft.add(f"optimizer adam(lr = 1e-4, weight_decay = {model.penalty}, fused = false)")
    return draft.done(beside={"workspaces of cuBLAS": 2 * 32 * MIB})
