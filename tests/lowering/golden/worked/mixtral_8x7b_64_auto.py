"""mixtral_8x7b_64_auto: lowered from mixtral_8x7b_64_auto.plan by legoai 0.0.0.

Cluster: h100_sxm, 8 hosts, infiniband_ndr; 64 processes.
Start it with: torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 mixtral_8x7b_64_auto.py
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
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
from legoai.runtime.parallelism.experts import ExpertParallel
from legoai.runtime.parallelism.mesh import split_off_experts
from legoai.specs.models.configs import MixtralConfig
from legoai.specs.models.mixtral import Mixtral

PLAN = "mixtral_8x7b_64_auto"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 2  # mixtral_8x7b_64_auto.plan:7


def build_model() -> nn.Module:
    config = MixtralConfig(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=14336,
        n_experts=8,
        top_k=2,
        vocab_size=32000,
        max_seq_len=32768,
        norm_eps=1e-5,
        rope_theta=1000000.0,
    )  # mixtral_8x7b_64_auto.plan:5
    return Mixtral(config)


def build_mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (64,), mesh_dim_names=("dp_shard",))  # mixtral_8x7b_64_auto.plan:9


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.layers.values():
        parallelize_module(layer.feed_forward.experts, mesh, ExpertParallel())  # mixtral_8x7b_64_auto.plan:11


def apply_checkpoint(model: nn.Module) -> None:
    for name, layer in model.layers.items():
        model.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=False)  # mixtral_8x7b_64_auto.plan:17


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )  # mixtral_8x7b_64_auto.plan:20
    for layer in model.layers.values():
        fully_shard(
            layer.feed_forward.experts,
            mesh=expert_mesh,
            mp_policy=policy,
            reshard_after_forward=False,
            shard_placement_fn=lambda _: Shard(1),
        )  # mixtral_8x7b_64_auto.plan:11
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # mixtral_8x7b_64_auto.plan:14
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # mixtral_8x7b_64_auto.plan:13


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Change the model in place, in this order:

    1. `apply_expert_parallel`: like tensor parallelism, before modules are wrapped.
    2. `apply_checkpoint`: before units are made, so that their hooks enclose the recomputation.
    3. `apply_fsdp`: after all wrappers, so that the hooks that gather parameters enclose them.
    """
    expert_mesh = split_off_experts(mesh["dp_shard"], ep=8)  # mixtral_8x7b_64_auto.plan:9
    apply_expert_parallel(model, expert_mesh["ep"])  # mixtral_8x7b_64_auto.plan:11
    apply_checkpoint(model)  # mixtral_8x7b_64_auto.plan:17
    apply_fsdp(model, mesh["dp_shard"], expert_mesh["dp_shard_mod_ep"])  # mixtral_8x7b_64_auto.plan:13
    return model


def build_optimizer(parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=2e-4,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        fused=True,
    )  # mixtral_8x7b_64_auto.plan:21


def build_lr_scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return warmup_schedule(
        optimizer,
        warmup=2000,
        steps=100000,
        decay="cosine",
        floor=0.1,
    )  # mixtral_8x7b_64_auto.plan:23


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
        )  # mixtral_8x7b_64_auto.plan:22
        training.optimizer.step()
    training.optimizer.zero_grad()
    training.scheduler.step()  # mixtral_8x7b_64_auto.plan:23
    return result


def trainer() -> Trainer:
    return Trainer(
        plan=PLAN,
        plan_hash=PLAN_HASH,
        device_type="cuda",  # mixtral_8x7b_64_auto.plan:6
        build_model=build_model,
        build_mesh=build_mesh,
        parallelize=parallelize,
        build_optimizer=build_optimizer,
        build_lr_scheduler=build_lr_scheduler,
        build_loss=build_loss,
        train_step=train_step,
        data_axes=("dp_shard",),  # mixtral_8x7b_64_auto.plan:9
        global_batch=512,  # mixtral_8x7b_64_auto.plan:7
        micro_batch=4,  # mixtral_8x7b_64_auto.plan:7
        seq_len=4096,  # mixtral_8x7b_64_auto.plan:7
        vocab_size=32000,  # mixtral_8x7b_64_auto.plan:5
        flops_per_token=82933972992,  # mixtral_8x7b_64_auto.plan:5
        peak_flops=989.4e12,  # mixtral_8x7b_64_auto.plan:6
        master_dtype=torch.float32,  # mixtral_8x7b_64_auto.plan:20
        param_dtype=torch.bfloat16,  # mixtral_8x7b_64_auto.plan:20
        reduce_dtype=torch.float32,  # mixtral_8x7b_64_auto.plan:20
        attention_kernel=SDPBackend.FLASH_ATTENTION,  # mixtral_8x7b_64_auto.plan:18
        clip_norm=1.0,  # mixtral_8x7b_64_auto.plan:22
        steps=100000,  # mixtral_8x7b_64_auto.plan:23
    )


if __name__ == "__main__":
    trainer().main()
