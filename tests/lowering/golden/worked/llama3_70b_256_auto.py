"""llama3_70b_256_auto: lowered from llama3_70b_256_auto.plan by legoai 0.0.0.

Cluster: h100_sxm, 32 hosts, infiniband_ndr; 256 processes.
Start it with: torchrun --nnodes 32 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 llama3_70b_256_auto.py
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend
from torch.optim.lr_scheduler import LambdaLR

from legoai.runtime import (
    Batches,
    LossFunction,
    StepResult,
    Trainer,
    Training,
    clip_gradients,
    local_value,
    reduce_loss_and_norm,
    token_cross_entropy,
    warmup_schedule,
)
from legoai.specs.models.configs import LlamaConfig
from legoai.specs.models.llama import Llama

PLAN = "llama3_70b_256_auto"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 1  # llama3_70b_256_auto.plan:9


def build_model() -> nn.Module:
    config = LlamaConfig(
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        hidden_dim=28672,
        vocab_size=128256,
        max_seq_len=131072,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=8.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_seq_len=8192,
        tie_embeddings=False,
    )  # llama3_70b_256_auto.plan:7
    return Llama(config)


def build_mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (256,), mesh_dim_names=("dp_shard",))  # llama3_70b_256_auto.plan:11


def apply_checkpoint(model: nn.Module) -> None:
    for name, layer in model.layers.items():
        model.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=False)  # llama3_70b_256_auto.plan:19


def apply_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # llama3_70b_256_auto.plan:22
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # llama3_70b_256_auto.plan:16
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # llama3_70b_256_auto.plan:15


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Change the model in place, in this order:

    1. `apply_checkpoint`: before units are made, so that their hooks enclose the recomputation.
    2. `apply_fsdp`: after all wrappers, so that the hooks that gather parameters enclose them.
    """
    apply_checkpoint(model)  # llama3_70b_256_auto.plan:19
    apply_fsdp(model, mesh["dp_shard"])  # llama3_70b_256_auto.plan:15
    return model


def build_optimizer(parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=1.5e-4,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        fused=True,
    )  # llama3_70b_256_auto.plan:23


def build_lr_scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return warmup_schedule(
        optimizer,
        warmup=2000,
        steps=100000,
        decay="cosine",
        floor=0.1,
    )  # llama3_70b_256_auto.plan:25


def build_loss() -> LossFunction:
    return token_cross_entropy  # default


def forward_backward(training: Training, batches: Batches) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=training.device)
    for batch in batches.take(MICRO_BATCHES):
        loss = training.loss(training.model(*batch.inputs), batch.targets)
        (loss / MICRO_BATCHES).backward()
        total += local_value(loss)
    return total / MICRO_BATCHES


def train_step(training: Training, batches: Batches) -> StepResult:
    mean_loss = forward_backward(training, batches)
    result = reduce_loss_and_norm(training, mean_loss)
    if training.may_update(result):
        clip_gradients(
            training.optimizer.param_groups,
            max_norm=1.0,
            total_norm=result.norm,
        )  # llama3_70b_256_auto.plan:24
        training.optimizer.step()
    training.optimizer.zero_grad()
    training.scheduler.step()  # llama3_70b_256_auto.plan:25
    return result


def trainer() -> Trainer:
    return Trainer(
        plan=PLAN,
        plan_hash=PLAN_HASH,
        device_type="cuda",  # llama3_70b_256_auto.plan:8
        build_model=build_model,
        build_mesh=build_mesh,
        parallelize=parallelize,
        build_optimizer=build_optimizer,
        build_lr_scheduler=build_lr_scheduler,
        build_loss=build_loss,
        train_step=train_step,
        data_axes=("dp_shard",),  # llama3_70b_256_auto.plan:11
        global_batch=512,  # llama3_70b_256_auto.plan:9
        micro_batch=2,  # llama3_70b_256_auto.plan:9
        seq_len=8192,  # llama3_70b_256_auto.plan:9
        vocab_size=128256,  # llama3_70b_256_auto.plan:7
        flops_per_token=481434796032,  # llama3_70b_256_auto.plan:7
        peak_flops=989.4e12,  # llama3_70b_256_auto.plan:8
        master_dtype=torch.float32,  # llama3_70b_256_auto.plan:22
        param_dtype=torch.bfloat16,  # llama3_70b_256_auto.plan:22
        reduce_dtype=torch.float32,  # llama3_70b_256_auto.plan:22
        attention_kernel=SDPBackend.FLASH_ATTENTION,  # llama3_70b_256_auto.plan:20
        clip_norm=1.0,  # llama3_70b_256_auto.plan:24
        steps=100000,  # llama3_70b_256_auto.plan:25
    )


if __name__ == "__main__":
    trainer().main()
