"""Eight small `transformers` models, built from a config and trained as a lowered program trains them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from legoai.runtime import Trainer, matching_cross_entropy, token_cross_entropy
from legoai.specs.models.huggingface import transformers_model
from legoai.specs.models.reads import ImagesWithTexts
from support.training import programs

SEQUENCE = 16

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300,
        "query_pre_attn_scalar": 8, "sliding_window": 8, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 2, "eos_token_id": 1,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
        "max_position_embeddings": 64, "tie_word_embeddings": True,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4,
        "n_positions": 64, "vocab_size": 300, "bos_token_id": 1, "eos_token_id": 1,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 32, "d_ff": 64, "d_kv": 8,
        "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": 300, "decoder_start_token_id": 0,
        "pad_token_id": 0, "eos_token_id": 1,
    },
    "bart": {
        "architectures": ["BartForConditionalGeneration"], "model_type": "bart", "d_model": 32, "vocab_size": 300,
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.0,
    },
    "clip": {
        "architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 16,
        "text_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
            "vocab_size": 300, "max_position_embeddings": 32, "bos_token_id": 298, "eos_token_id": 299,
            "pad_token_id": 1, "projection_dim": 16,
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
            "image_size": 32, "patch_size": 8, "projection_dim": 16,
        },
    },
    "convnextv2": {
        "architectures": ["ConvNextV2ForImageClassification"], "model_type": "convnextv2", "depths": [1, 1, 2, 1],
        "hidden_sizes": [8, 16, 32, 64], "image_size": 64, "num_labels": 10,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 32,
        "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8,
        "num_labels": 10, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
}  # fmt: skip

BLOCKS = ("Gemma2DecoderLayer", "LlamaDecoderLayer", "GPT2Block", "T5Block", "BartEncoderLayer",
          "BartDecoderLayer", "CLIPEncoderLayer", "ConvNextV2Layer", "ViTLayer")  # fmt: skip

PRECISIONS: dict[str, dict[str, Any]] = {
    "full": {"master_dtype": torch.float32},
    "mixed": {"master_dtype": torch.float32, "autocast_dtype": torch.bfloat16},
    "half": {"master_dtype": torch.bfloat16},
}


def trainer_of(
    name: str, precision: str = "full", *, checkpointed: bool = False, micro_batch: int = 2, **fields: Any
) -> Trainer:
    """Return the trainer of a model on one device.

    Args:
        name: of `CONFIGS`.
        precision: of `PRECISIONS`.
        checkpointed: whether every block keeps only its input.
        micro_batch: samples in a step.
        fields: of the config to use instead.
    """

    def parallelize(model, mesh):
        if checkpointed:
            for module in list(model.modules()):
                for child_name, child in list(module.named_children()):
                    if type(child).__name__ in BLOCKS:
                        setattr(module, child_name, checkpoint_wrapper(child))
        return model

    config = {**CONFIGS[name], **fields}
    with torch.device("meta"):
        reads = transformers_model(config).reads
    return Trainer(
        plan=name,
        plan_hash="sha256:zoo",
        build_model=lambda: transformers_model(config),
        build_mesh=lambda kind: init_device_mesh(kind, (1,), mesh_dim_names=("dp_shard",)),
        parallelize=parallelize,
        build_optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3, foreach=True),
        global_batch=micro_batch,
        micro_batch=micro_batch,
        seq_len=SEQUENCE if reads.has_text else 0,
        reads=reads,
        train_step=programs.step_of(1, autocast_dtype=PRECISIONS[precision].get("autocast_dtype")),
        build_loss=lambda: matching_cross_entropy if isinstance(reads, ImagesWithTexts) else token_cross_entropy,
        **PRECISIONS[precision],
    )
