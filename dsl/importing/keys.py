"""Options of TorchTitan's job config: type, default, and translation of each.

Names and defaults are those of `torchtitan/config/job_config.py` of January 2026 (commit 658f94cb9), the last months of
the TOML format; older names are those of its history since April 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Type = Literal["integer", "number", "boolean", "text", "texts", "lists of texts"]
Value = int | float | bool | str | list[str] | list[list[str]] | None


@dataclass(frozen=True, slots=True)
class Key:
    """An option.

    Attributes:
        type: of its value.
        default: of TorchTitan; None where it has none.
        beside: why plans have no equivalent; empty for an option that is translated.
        changes: whether a value other than the default changes the training.
        choices: allowed texts; empty where any is allowed.
        least: minimum of a number.
        most: maximum of a number.
        takes_none: whether None, which is not the default, is a value too.
        idle: why an option that is translated is listed where it changes nothing.
    """

    type: Type
    default: Value = None
    beside: str = ""
    changes: bool = False
    choices: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    takes_none: bool = False
    idle: str = "it changes nothing in this configuration"


WHERE: Final = "where a run writes and what it prints is said to `legoai run`"
DATA: Final = "what is trained on is said by `data`, or by --data and --tokenizer"
WATCH: Final = "profiles and estimates are commands and options of their own"
_WAIT: Final = "timeouts and recorders of the process group have no place in a plan"
_COLLECT: Final = "the garbage collector is the trainer's own affair"
_FORM: Final = "checkpoints have one format"
MOE: Final = "the model has no experts"
GROUPED: Final = "grouped products of experts have the dtype of `param`"
_OTHER: Final = "no plan says it"
_DTYPES: Final = ("bfloat16", "float32")


def beside(type: Type, default: Value, why: str) -> Key:
    """An option on which no schedule depends."""
    return Key(type, default, why)


def other(type: Type, default: Value, why: str = _OTHER, choices: tuple[str, ...] = ()) -> Key:
    """An option without an equivalent in plans, except for its default."""
    return Key(type, default, why, changes=True, choices=choices)


def _under(section: str, keys: dict[str, Key]) -> dict[str, Key]:
    return {f"{section}.{name}": key for name, key in keys.items()}


_WORKERS: Final = {
    "dataloader.num_workers": beside("integer", 0, DATA),
    "dataloader.persistent_workers": beside("boolean", False, DATA),
    "dataloader.pin_memory": beside("boolean", False, DATA),
    "dataloader.prefetch_factor": beside("integer", None, DATA),
}

KEYS: Final[dict[str, Key]] = {
    **_under(
        "job",
        {
            "config_file": beside("text", None, WHERE),
            "dump_folder": beside("text", "./outputs", WHERE),
            "description": beside("text", "default job", WHERE),
            "print_config": beside("boolean", False, WHERE),
            "save_config_file": beside("text", None, WHERE),
            "use_for_integration_test": beside("boolean", False, WHERE),
            "custom_config_module": other("text", ""),
        },
    ),
    **_under(
        "profiling",
        {
            "enable_profiling": beside("boolean", False, WATCH),
            "save_traces_folder": beside("text", "profile_traces", WATCH),
            "profile_freq": beside("integer", 10, WATCH),
            "profiler_active": beside("integer", 1, WATCH),
            "profiler_warmup": beside("integer", 3, WATCH),
            "enable_memory_snapshot": beside("boolean", False, WATCH),
            "save_memory_snapshot_folder": beside("text", "memory_snapshot", WATCH),
        },
    ),
    **_under(
        "metrics",
        {
            "log_freq": beside("integer", 10, WHERE),
            "enable_tensorboard": beside("boolean", False, WHERE),
            "disable_color_printing": beside("boolean", False, WHERE),
            "enable_color_printing": beside("boolean", True, WHERE),
            "save_tb_folder": beside("text", "tb", WHERE),
            "save_for_all_ranks": beside("boolean", False, WHERE),
            "rank_0_only": beside("boolean", True, WHERE),
            "enable_wandb": beside("boolean", False, WHERE),
        },
    ),
    **_under(
        "model",
        {
            "name": Key("text", "llama3"),
            "flavor": Key("text", "debugmodel"),
            "hf_assets_path": Key("text", "./tests/assets/tokenizer", idle=DATA),
            "tokenizer_path": beside("text", None, DATA),
            "converters": Key("texts", []),
            "print_after_conversion": beside("boolean", False, WHERE),
            "norm_type": other("text", "rmsnorm", "built-in models of this family have RMSNorm"),
        },
    ),
    **_under(
        "optimizer",
        {
            "name": Key("text", "AdamW", choices=("Adam", "AdamW")),
            "lr": Key("number", 8e-4, least=0),
            "beta1": Key("number", 0.9, least=0, most=1),
            "beta2": Key("number", 0.95, least=0, most=1),
            "eps": Key("number", 1e-8, least=0),
            "weight_decay": Key("number", 0.1, least=0),
            "implementation": Key("text", "fused", choices=("for-loop", "foreach", "fused")),
            "fused": Key("boolean", False),
            "early_step_in_backward": other("boolean", False, "optimizers step after the backward pass"),
        },
    ),
    **_under(
        "lr_scheduler",
        {
            "warmup_steps": Key("integer", 200, least=0),
            "total_steps": Key("integer", None, least=1),
            "decay_ratio": Key("number", None, least=0, most=1),
            "decay_type": Key("text", "linear", choices=("linear", "sqrt", "cosine")),
            "min_lr_factor": Key("number", 0.0, least=0, most=1),
        },
    ),
    **_under(
        "training",
        {
            "dataset": beside("text", "c4_test", DATA),
            "dataset_path": beside("text", None, DATA),
            "local_batch_size": Key("integer", 8, least=1),
            "global_batch_size": Key("integer", -1),
            "seq_len": Key("integer", 2048, least=1),
            "max_norm": Key("number", 1.0),
            "steps": Key("integer", 10000, least=1),
            "enable_cpu_offload": Key("boolean", False),
            "dtype": Key("text", "float32", choices=_DTYPES),
            "mixed_precision_param": Key("text", "bfloat16", choices=_DTYPES),
            "mixed_precision_reduce": Key("text", "float32", choices=_DTYPES),
            "gc_freq": beside("integer", 50, _COLLECT),
            "gc_debug": beside("boolean", False, _COLLECT),
            "enable_loss_parallel": Key("boolean", True),
            "data_parallel_type": Key("text", "fsdp", choices=("fsdp", "ddp")),
            **_WORKERS,
        },
    ),
    **_under(
        "parallelism",
        {
            "data_parallel_replicate_degree": Key("integer", 1, least=1),
            "data_parallel_shard_degree": Key("integer", -1),
            "fsdp_reshard_after_forward": Key("text", "default", choices=("default", "always", "never")),
            "tensor_parallel_degree": Key("integer", 1, least=1),
            "disable_loss_parallel": Key("boolean", False),
            "enable_async_tensor_parallel": Key("boolean", False),
            "pipeline_parallel_degree": Key("integer", 1, least=1),
            "pipeline_parallel_split_points": Key("texts", []),
            "module_fqns_per_model_part": Key("lists of texts", None),
            "pipeline_parallel_first_stage_less_layers": Key("integer", 1, least=0),
            "pipeline_parallel_last_stage_less_layers": Key("integer", 1, least=0),
            "pipeline_parallel_layers_per_stage": Key("integer", None, least=1),
            "pipeline_parallel_schedule": Key("text", "1F1B"),
            "pipeline_parallel_schedule_csv": Key(
                "text", "", "write the order file into `schedule = csv(…)`", changes=True, takes_none=True
            ),
            "pipeline_parallel_microbatch_size": Key("integer", 1, least=1),
            "pipeline_parallel_microbatches": Key("integer", None, least=1),
            "pipeline_parallel_expert_parallel_overlap": beside("boolean", True, MOE),
            "context_parallel_degree": Key("integer", 1, least=1),
            "context_parallel_load_balancer": Key("text", "headtail", choices=("headtail", "ptrr"), takes_none=True),
            "context_parallel_rotate_method": Key("text", "allgather", choices=("allgather", "alltoall")),
            "expert_parallel_degree": Key("integer", 1, least=1, idle=MOE),
            "expert_tensor_parallel_degree": Key("integer", 1, least=1, idle=MOE),
            "expert_parallel_comm_backend": beside("text", "standard", MOE),
            "enable_compiled_autograd": other("boolean", False, "backward passes are not compiled by themselves"),
        },
    ),
    **_under(
        "checkpoint",
        {
            "enable": Key("boolean", False),
            "interval": Key("integer", 500, least=1),
            "interval_type": other("text", "steps", "checkpoints are counted in steps", ("steps", "seconds")),
            "keep_latest_k": Key("integer", 10, least=0),
            "async_mode": Key("text", "disabled", choices=("disabled", "async", "async_with_pinned_mem")),
            "folder": beside("text", "checkpoint", WHERE),
            "enable_ft_dataloader_checkpoints": beside("boolean", True, _FORM),
            "initial_load_path": Key("text", None),
            "initial_load_model_only": Key("boolean", True),
            "initial_load_in_hf": Key("boolean", False),
            "initial_load_in_hf_quantized": Key("boolean", False),
            "last_save_model_only": beside("boolean", True, _FORM),
            "last_save_in_hf": beside("boolean", False, "`legoai export` writes weights in the layout of Hugging Face"),
            "last_save_in_safetensors_format": beside("boolean", False, "`legoai export` writes safetensors files"),
            "export_dtype": beside("text", "float32", "`legoai export` has the dtype of its own"),
            "load_step": beside("integer", -1, "`legoai run` says from which step a training resumes"),
            "exclude_from_loading": other("texts", [], "a training resumes from all of a checkpoint"),
            "enable_first_step_checkpoint": beside("boolean", False, "`save` has one interval"),
            "create_seed_checkpoint": other("boolean", False, "TorchTitan then saves drawn weights and does not train"),
            "load_only": Key("boolean", False),
        },
    ),
    **_under(
        "activation_checkpoint",
        {
            "mode": Key("text", "selective", choices=("selective", "full", "memory_budget", "none")),
            "selective_ac_option": Key("text", "2"),
            "per_op_sac_force_recompute_mm_shapes_by_fqns": other(
                "texts", ["moe.router.gate"], "operators are not told apart by shape"
            ),
            "early_stop": beside("boolean", False, "recomputation stops as soon as everything is there again"),
            "memory_budget": Key("number", 0.5, least=0, most=1),
            "visualize_memory_budget_pareto": beside("boolean", False, WATCH),
            "preserve_rng_state": beside("boolean", False, "the model draws no random numbers"),
            "determinism_check": beside("text", "default", "the check changes no result"),
            "debug": beside("boolean", False, WATCH),
        },
    ),
    **_under(
        "compile",
        {
            "enable": Key("boolean", False),
            "components": Key("texts", ["model", "loss"]),
            "backend": Key("text", "inductor"),
        },
    ),
    **_under(
        "quantize",
        {
            "linear.float8.enable_float8_linear": Key("boolean", False),
            "linear.float8.enable_fsdp_float8_all_gather": Key("boolean", False),
            "linear.float8.precompute_float8_dynamic_scale_for_fsdp": beside(
                "boolean", False, "scales of gathered weights are computed once, at the start of a step"
            ),
            "linear.float8.recipe_name": Key("text", None, choices=("tensorwise", "rowwise", "rowwise_with_gw_hp")),
            "linear.float8.filter_fqns": Key("texts", []),
            "linear.float8.emulate": other("boolean", False, "float8 is never emulated"),
            "linear.float8.force_recompute_fp8_weight_in_bwd": other(
                "boolean", False, "weights in float8 are kept as torchao keeps them"
            ),
            **{
                f"linear.float8.scaling_type_{name}": other("text", "dynamic", "scales are dynamic")
                for name in ("input", "weight", "grad_output")
            },
            "linear.mx.recipe_name": other("text", "mxfp8_cublas", "`mxfp8` has one recipe"),
            "linear.mx.mxfp8_dim1_cast_kernel_choice": beside("text", "triton", "torchao chooses how it casts"),
            "linear.mx.use_fp8_dim1_cast_triton_kernel": beside("boolean", True, "torchao chooses how it casts"),
            "linear.mx.filter_fqns": Key("texts", ["output"]),
            "grouped_mm.float8.fqns": beside("texts", [], MOE),
            "grouped_mm.mx.fqns": beside("texts", [], MOE),
            "grouped_mm.mx.recipe_name": beside("text", "mxfp8", MOE),
        },
    ),
    **_under(
        "comm",
        {
            "init_timeout_seconds": beside("integer", 300, _WAIT),
            "train_timeout_seconds": beside("integer", 100, _WAIT),
            "trace_buf_size": beside("integer", 20000, _WAIT),
            "save_traces_folder": beside("text", "comm_traces", _WAIT),
            "save_traces_file_prefix": beside("text", "rank_", _WAIT),
            "mode": other("text", "default", "ranks talk by `torch.distributed`; `legoai cost` needs none"),
        },
    ),
    **_under(
        "memory_estimation",
        {
            "enable": beside("boolean", False, WATCH),
            "disable_fake_mode": beside("boolean", False, WATCH),
        },
    ),
    **_under(
        "fault_tolerance",
        {
            "enable": other("boolean", False, "replica groups do not come and go"),
            "process_group": beside("text", "gloo", _WAIT),
            "process_group_timeout_ms": beside("integer", 10000, _WAIT),
            "replica_id": beside("integer", 0, _WAIT),
            "group_size": beside("integer", 0, _WAIT),
            "min_replica_size": beside("integer", 1, _WAIT),
            "semi_sync_method": other("text", None, "gradients are reduced in each step"),
            "sync_steps": beside("integer", 5, _WAIT),
            "should_quantize": beside("boolean", False, _WAIT),
            "fragment_sync_delay": beside("integer", 0, _WAIT),
            "fragment_update_alpha": beside("number", 0.0, _WAIT),
            "num_fragments": beside("integer", 1, _WAIT),
            "module_fqns_per_model_fragment": beside("lists of texts", [], _WAIT),
        },
    ),
    **_under(
        "experimental",
        {
            "custom_import": other("text", ""),
            "custom_args_module": other("text", ""),
            "custom_model_path": other("text", ""),
            "pipeline_parallel_split_mode": beside("text", "manual", "the split is by modules"),
        },
    ),
    **_under(
        "validation",
        {
            "enable": Key("boolean", False),
            "freq": Key("integer", 10, least=1),
            "steps": Key("integer", -1),
            "dataset": beside("text", "c4_validation", DATA),
            "dataset_path": beside("text", None, DATA),
            "local_batch_size": Key("integer", 8, least=1),
            "seq_len": Key("integer", 2048, least=1),
            **_WORKERS,
        },
    ),
    **_under(
        "debug",
        {
            "seed": Key("integer", None, least=0),
            "deterministic": other("boolean", False, "it is `--deterministic` of `legoai run`"),
            "deterministic_warn_only": beside("boolean", False, "`--deterministic` of `legoai run` only fails"),
            "moe_force_load_balance": beside("boolean", False, MOE),
        },
    ),
}
"""Every option by its name of January 2026, or the last that it had."""

OLD_DEFAULTS: Final[dict[str, Value]] = {"checkpoint.keep_latest_k": 0, "model.name": "llama"}
"""Defaults that were others in December 2024."""

_TO_PARALLELISM: Final = {
    "training": (
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree",
        "disable_loss_parallel", "fsdp_reshard_after_forward", "pipeline_parallel_degree",
    ),
    "experimental": (
        "context_parallel_degree", "context_parallel_rotate_method", "enable_async_tensor_parallel",
        "enable_compiled_autograd", "pipeline_parallel_degree", "pipeline_parallel_microbatches",
        "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv", "pipeline_parallel_split_points",
    ),
}  # fmt: skip
_FLOAT8: Final = tuple(
    name.removeprefix("quantize.linear.float8.") for name in KEYS if name.startswith("quantize.linear.float8.")
)
_MX: Final = tuple(name.removeprefix("quantize.linear.mx.") for name in KEYS if name.startswith("quantize.linear.mx."))

BEFORE_MARCH_2025: Final[dict[str, str]] = {
    **{f"{old}.{name}": f"parallelism.{name}" for old, names in _TO_PARALLELISM.items() for name in names},
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.enable_float8_linear": "quantize.linear.float8.enable_float8_linear",
    "float8.enable_float8_linear": "quantize.linear.float8.enable_float8_linear",
    "training.enable_fsdp_float8_all_gather": "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "training.precompute_float8_dynamic_scale_for_fsdp":
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
    **{
        f"{old}scaling_type_{name}": f"quantize.linear.float8.scaling_type_{name}"
        for old in ("training.float8_", "float8.") for name in ("input", "weight", "grad_output")
    },
}  # fmt: skip
"""Names that TorchTitan had until March 2025, when `[parallelism]` came, to the later ones."""

RENAMED: Final[dict[str, str]] = {
    **{f"float8.{name}": f"quantize.linear.float8.{name}" for name in _FLOAT8},
    **{f"mx.{name}": f"quantize.linear.mx.{name}" for name in _MX},
    **{f"quantize.dense.float8.{name}": f"quantize.linear.float8.{name}" for name in _FLOAT8},
    **{f"quantize.dense.mx.{name}": f"quantize.linear.mx.{name}" for name in _MX},
    **{f"quantize.moe.{name}.fqns": f"quantize.grouped_mm.{name}.fqns" for name in ("float8", "mx")},
    **{f"{name}.moe_fqns_prototype": f"quantize.grouped_mm.{name}.fqns" for name in ("float8", "mx")},
    "float8.moe_fqns": "quantize.grouped_mm.float8.fqns",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "job.print_args": "job.print_config",
    "job.save_config_folder": "job.save_config_file",
    "memory_estimation.enabled": "memory_estimation.enable",
    "validation.enabled": "validation.enable",
    "comm.timeout_seconds": "comm.train_timeout_seconds",
    **BEFORE_MARCH_2025,
}
"""Older names of options to those of :data:`KEYS`."""
