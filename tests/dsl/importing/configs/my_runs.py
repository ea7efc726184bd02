"""Configs as TorchTitan's users write them in Python: functions that derive from each other.

Values are those of TorchTitan's published configs at commit b5bcd76c6 (August 2026).
"""

import dataclasses
from copy import deepcopy
from typing import cast

from torchtitan.components import optimizer as optimizers
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

SEQUENCE = 8 * 1024
WARMUP: int = 200
TREATMENTS = {"full": FullAC.Config(), "none": None}


def _loss(pieces=8):
    return ChunkedLossWrapper.Config(num_chunks=pieces, loss_fn=CrossEntropyLoss.Config(global_vocab_size=128_256))


def _training(rows, *, steps=1000, **more):
    """So many rows for a rank."""
    return TrainingConfig(
        num_tokens_per_microbatch_per_dp_rank=rows * SEQUENCE, max_context_length=SEQUENCE, steps=steps, **more
    )


def llama3_8b() -> Trainer.Config:
    """The published config."""
    return Trainer.Config(
        loss=_loss(),
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        profiler=Profiler.Config(enable_profiling=True, profile_freq=100),
        model_spec=model_registry("8B"),
        optimizer=default_adamw(lr=3e-4),
        training=_training(1),
        checkpoint=CheckpointManager.Config(interval=500),
        activation_checkpoint=SelectiveAC.Config(),
        validator=Validator.Config(freq=500, steps=1200),
    )


def llama3_70b_of_256() -> "Trainer.Config":
    config = llama3_8b()
    config.model_spec = model_registry("70B")
    config.optimizer = default_adamw(1.5e-4, weight_decay=0.05)
    config.training = _training(8, dtype="bfloat16", max_norm=0.5)
    config.parallelism.tensor_parallel_degree = 8
    config.activation_checkpoint = TREATMENTS["full"]
    return config


def llama3_405b_in_float8() -> Trainer.Config:
    compiled = CompileConfig(enable=True, components=["model", "loss"], enable_async_tensor_parallel=True)
    is_compiled = compiled.enable and "model" in compiled.components
    converter = Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=is_compiled)
    config = dataclasses.replace(
        llama3_8b(),
        model_spec=model_registry(flavor="405B", converters=[converter]),
        optimizer=default_adamw(lr=8e-5),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=3 * WARMUP, decay_ratio=0.8, decay_type="cosine"),
        training=_training(2, steps=3000),
        compile=compiled,
    )
    config.parallelism = ParallelismConfig(tensor_parallel_degree=8, enable_sequence_parallel=True)
    config.activation_checkpoint = FullAC.Config()
    return config


def llama3_8b_of_pipelines() -> Trainer.Config:
    config = deepcopy(llama3_8b())
    stages, ranks = (2, 4)
    config.parallelism = ParallelismConfig(
        pipeline_parallel_degree=ranks,
        pipeline_parallel_schedule="Interleaved1F1B",
        pipeline_parallel_layers_per_stage=(32 + 2) // (stages * ranks) - (1 if ranks > 2 else 0),
        num_pp_microbatches=2 * ranks,
    )
    config.training.disable_cuda_graphs = True
    config.loss = _loss(pieces=1)
    return config


def llama3_8b_budgeted(budget: float = 0.25, *, is_compiled=True) -> Trainer.Config:
    config = cast(Trainer.Config, llama3_8b())
    if is_compiled and not budget > 1:
        config.compile.enable = True
        config.activation_checkpoint = MemoryBudgetAC.Config(memory_budget=budget)
    else:
        config.activation_checkpoint = None
    config.compile.components = []
    for name in ("model", "loss"):
        config.compile.components.append(name)
    return config


def llama3_8b_by_groups() -> Trainer.Config:
    config = llama3_8b()
    shared = {"betas": (0.9, 0.95), "eps": 1e-8}
    config.optimizer = optimizers.OptimizersContainer.Config(
        implementation="foreach",
        param_groups=[
            optimizers.ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 2e-4, **shared})
        ],
    )
    config.training.num_tokens_per_train_step = 64 * SEQUENCE
    config.training.steps //= 2 if config.training.steps > 10 else 1
    return config
