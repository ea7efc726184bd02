"""Configs of mixtures of experts, as TorchTitan's users write them in Python.

Values are those of TorchTitan's published configs at commit b5bcd76c6 (August 2026).
"""

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.quantization import Float8GroupedExpertsConverter, Float8LinearConverter
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.deepseek_v3 import model_registry as deepseek
from torchtitan.models.qwen3 import model_registry as qwen
from torchtitan.trainer import Trainer

SEQUENCE = 4096


def _mixture(model_spec, *, lr, rows=4, ep=1, steps=1000) -> Trainer.Config:
    """A config in which only the model, the batch and the ranks of experts are said."""
    vocabulary = decoder_vocab_size(model_spec)
    return Trainer.Config(
        model_spec=model_spec,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocabulary)),
        optimizer=default_adamw(lr=lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=steps // 5),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=rows * SEQUENCE, max_context_length=SEQUENCE, steps=steps
        ),
        parallelism=ParallelismConfig(expert_parallel_degree=ep),
        activation_checkpoint=SelectiveAC.Config(),
    )


def qwen3_30b() -> Trainer.Config:
    config = _mixture(qwen("30B-A3B"), lr=8e-4, rows=2, steps=3000)
    config.activation_checkpoint = FullAC.Config()
    return config


def qwen3_235b_on_hosts() -> Trainer.Config:
    config = qwen3_30b()
    config.model_spec = qwen(flavor="235B-A22B", attn_backend="flex")
    config.parallelism.expert_parallel_degree = 8
    config.activation_checkpoint = SelectiveAC.Config()
    return config


def deepseek_16b() -> Trainer.Config:
    config = _mixture(deepseek("16B", attn_backend="flex"), lr=2.2e-4, ep=8)
    config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    config.training.disable_cuda_graphs = True
    config.compile = CompileConfig(enable=True, components=["loss"])
    return config


def deepseek_671b() -> Trainer.Config:
    config = _mixture(deepseek("671B"), lr=2.2e-4, ep=2, steps=10_000)
    config.activation_checkpoint = FullAC.Config()
    config.compile.enable = True
    return config


def deepseek_in_float8() -> Trainer.Config:
    config = deepseek_16b()
    is_compiled = "model" in config.compile.components
    config.model_spec = deepseek(
        "16B",
        converters=[
            Float8LinearConverter.Config(filter_fqns=["lm_head", "router.gate"], model_compile_enabled=is_compiled),
            Float8GroupedExpertsConverter.Config(model_compile_enabled=is_compiled),
        ],
    )
    return config
