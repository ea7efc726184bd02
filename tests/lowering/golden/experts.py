"""sparse: lowered from tiny.plan by legoai 0.0.0.

Cluster: h100_sxm, 1 host; 8 processes.
Start it with: torchrun --nproc-per-node 8 sparse.py
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from legoai.runtime import (
    Batches,
    LossFunction,
    StepResult,
    Trainer,
    Training,
    local_value,
    reduce_loss_and_norm,
    token_cross_entropy,
)
from legoai.runtime.parallelism.experts import ExpertParallel
from legoai.runtime.parallelism.mesh import split_off_experts
from legoai.specs.models.configs import MixtralConfig
from legoai.specs.models.mixtral import Mixtral

PLAN = "sparse"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 8  # tiny.plan:5


def build_model() -> nn.Module:
    config = MixtralConfig(
        dim=4096,
        n_layers=4,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=4096,
        n_experts=8,
        top_k=2,
        vocab_size=32000,
        max_seq_len=32768,
        norm_eps=1e-5,
        rope_theta=1000000.0,
    )  # tiny.plan:3
    return Mixtral(config)


def build_mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (8,), mesh_dim_names=("dp_shard",))  # tiny.plan:6


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model.layers["0"].feed_forward.experts, mesh, ExpertParallel())  # tiny.plan:10
    for index in range(1, 4):
        parallelize_module(
            model.layers[str(index)].feed_forward.experts,
            mesh,
            ExpertParallel(capacity_factor=1.25),
        )  # tiny.plan:9


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # default
    fully_shard(
        model.layers["0"].feed_forward.experts,
        mesh=expert_mesh,
        mp_policy=policy,
        reshard_after_forward=False,
    )  # tiny.plan:10
    fully_shard(model.layers["0"], mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # tiny.plan:15
    for index in range(1, 4):
        layer = model.layers[str(index)]
        fully_shard(
            layer.feed_forward.experts,
            mesh=expert_mesh,
            mp_policy=policy,
            reshard_after_forward=True,
        )  # tiny.plan:9
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # tiny.plan:14
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # tiny.plan:16


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Change the model in place, in this order:

    1. `apply_expert_parallel`: like tensor parallelism, before modules are wrapped.
    2. `apply_fsdp`: after all wrappers, so that the hooks that gather parameters enclose them.
    """
    expert_mesh = split_off_experts(mesh["dp_shard"], ep=4)  # tiny.plan:6
    apply_expert_parallel(model, expert_mesh["ep"])  # tiny.plan:8
    apply_fsdp(model, mesh["dp_shard"], expert_mesh["dp_shard_mod_ep"])  # tiny.plan:13
    return model


def build_optimizer(parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=0.001,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.01,
        fused=True,
    )  # default


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
        training.optimizer.step()
    training.optimizer.zero_grad()
    return result


def trainer() -> Trainer:
    return Trainer(
        plan=PLAN,
        plan_hash=PLAN_HASH,
        device_type="cuda",  # tiny.plan:4
        build_model=build_model,
        build_mesh=build_mesh,
        parallelize=parallelize,
        build_optimizer=build_optimizer,
        build_loss=build_loss,
        train_step=train_step,
        data_axes=("dp_shard",),  # tiny.plan:6
        global_batch=64,  # tiny.plan:5
        micro_batch=1,  # tiny.plan:5
        seq_len=4096,  # tiny.plan:5
        vocab_size=32000,  # tiny.plan:3
        flops_per_token=5015076864,  # tiny.plan:3
        peak_flops=989.4e12,  # tiny.plan:4
        master_dtype=torch.float32,  # default
        param_dtype=torch.bfloat16,  # default
        reduce_dtype=torch.float32,  # default
    )


if __name__ == "__main__":
    trainer().main()
