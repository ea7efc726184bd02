"""Formats of TorchTitan's configs: the options of each, and the version that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from legoai.dsl.importing.keys import DATA, KEYS, MOE, OLD_DEFAULTS, WATCH, WHERE, Key, Value, beside, other


@dataclass(frozen=True, slots=True)
class Format:
    """A format.

    Attributes:
        version: of TorchTitan whose treatment of the options is known.
        keys: the options.
        is_python: whether configs are functions.
        removed: options of earlier formats that no field of a config has any more.
    """

    version: str
    keys: Mapping[str, Key]
    is_python: bool = False
    removed: frozenset[str] = frozenset()


def _with_defaults(keys: Mapping[str, Key], defaults: Mapping[str, Value]) -> dict[str, Key]:
    return {name: replace(key, default=defaults[name]) if name in defaults else key for name, key in keys.items()}


_FEBRUARY: Final = {
    **KEYS,
    **{
        f"profiling.{name}": beside("integer", None, WATCH)
        for name in (
            "profiler_repeat", "profiler_skip_first", "profiler_skip_first_wait", "memory_snapshot_freq",
            "memory_snapshot_max_entries",
        )
    },
    "profiling.trace_post_processor": beside("text", None, WATCH),
    "model.attn_backend": beside("text", None, "within a document every kernel computes the same attention"),
    "model.moe_comm_backend": beside("text", None, MOE),
    "model.non_blocking_capacity_factor": beside("number", None, MOE),
    "model.num_mtp_layers": other("integer", 0, "models predict one token of each position"),
    "model.tp_gemm_backend": other(
        "text", "default", "collectives are pipelined with products by `compile (async_tp = true)`"
    ),
    "optimizer.param_groups": other(
        "text", None, "write a rule of `optimizer` for the parameters that each expression matches"
    ),
    "optimizer.optimizer_factory_kwargs_by_name": other("text", None, "optimizers have the arguments of their groups"),
    **{
        f"optimizer.{name}": other("boolean", False, "`adam` and `adamw` have no such form")
        for name in ("amsgrad", "maximize", "capturable", "differentiable", "decoupled_weight_decay")
    },
    "dataloader": beside("text", None, DATA),
    "tokenizer": beside("text", None, DATA),
    "validation.dataloader": beside("text", None, DATA),
    "parallelism.enable_sequence_parallel": Key("boolean", True),
    "parallelism.spmd_backend": beside("text", None, "how placements are checked changes no schedule"),
    "parallelism.enable_fsdp_symm_mem": other("boolean", False, "collectives use NCCL's own buffers"),
    "parallelism.context_parallel_ptrr_mask_key": beside("text", None, "sequences are balanced by head and tail"),
    "training.disable_cuda_graphs": beside("boolean", False, "a step is not recorded as a CUDA graph"),
    "debug.print_config": beside("boolean", False, WHERE),
    "debug.save_config_file": beside("text", None, WHERE),
    "debug.enable_structured_logging": beside("boolean", True, WHERE),
    "debug.spmd_typechecking": beside("boolean", False, "the check changes no result"),
    "debug.detect_anomaly": beside("boolean", False, "the check changes no result"),
    "debug.batch_invariant": other("boolean", False),
    "override.imports": other("texts", [], "modules of TorchTitan are not replaced"),
    "loss.num_chunks": Key("integer", 1, least=1),
    "loss.name": Key("text", "CrossEntropyLoss"),
}  # fmt: skip

_NO_FIELDS: Final = {
    "metrics": ("enable_color_printing", "rank_0_only"),
    "training": (
        "dataset", "dataset_path", "local_batch_size", "global_batch_size", "seq_len", "enable_loss_parallel",
        "data_parallel_type",
    ),
    "parallelism": (
        "disable_loss_parallel", "pipeline_parallel_split_points", "pipeline_parallel_microbatch_size",
        "pipeline_parallel_microbatches", "pipeline_parallel_expert_parallel_overlap", "enable_async_tensor_parallel",
        "context_parallel_rotate_method", "expert_tensor_parallel_degree", "expert_parallel_comm_backend",
        "enable_compiled_autograd",
    ),
    "checkpoint": ("interval_type", "enable_ft_dataloader_checkpoints", "last_save_in_safetensors_format"),
    "validation": ("dataset", "dataset_path", "local_batch_size", "seq_len"),
}  # fmt: skip
"""Options of the formats before August 2026 that its configs have no fields for, by section."""

DECEMBER_2024: Final = Format("of December 2024 (commit ba2469780)", _with_defaults(KEYS, OLD_DEFAULTS))
JANUARY_2026: Final = Format("of January 2026 (commit 658f94cb9)", KEYS)
FEBRUARY_2026: Final = Format("of February 2026 (commit 9810191bb)", _FEBRUARY, is_python=True)
AUGUST_2026: Final = Format(
    "of August 2026 (commit b5bcd76c6)",
    {
        **_with_defaults(
            _FEBRUARY,
            {
                "activation_checkpoint.selective_ac_option": "op", "quantize.linear.float8.recipe_name": "rowwise",
                "parallelism.pipeline_parallel_microbatches": 1,
            },
        ),
        "quantize.linear.mx.fqns": Key("texts", []),
        "optimizer.implementation": Key(
            "text", "fused", choices=("for-loop", "foreach", "fused", "fused_opt_states_bf16")
        ),
    },
    is_python=True,
    removed=frozenset(f"{section}.{name}" for section, names in _NO_FIELDS.items() for name in names),
)  # fmt: skip
