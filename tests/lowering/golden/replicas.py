"""replicas: lowered from tiny.plan by legoai 0.0.0.

Cluster: h100_sxm, 2 hosts, infiniband_ndr; 16 processes.
Start it with: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 replicas.py
"""

from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from legoai.runtime import (
    Batches,
    LossFunction,
    ShardedOptimizer,
    StepResult,
    Trainer,
    Training,
    local_value,
    reduce_loss_and_norm,
    token_cross_entropy,
)
from legoai.runtime.offloading.offload import offload_activations
from legoai.specs.models.configs import LlamaConfig
from legoai.specs.models.llama import Llama

PLAN = "replicas"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 2  # tiny.plan:4


def build_model() -> nn.Module:
    config = LlamaConfig(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=8192,
        vocab_size=128256,
        max_seq_len=131072,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=32.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_seq_len=8192,
        tie_embeddings=True,
    )  # tiny.plan:2
    return Llama(config)


def build_mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (16,), mesh_dim_names=("dp_replicate",))  # tiny.plan:5


def apply_replicate(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # default
    for first in range(0, 14, 2):
        replicate(
            [model.layers[str(index)] for index in range(first, first + 2)],
            mesh=mesh,
            mp_policy=policy,
        )  # tiny.plan:7
    replicate([model.layers["14"], model.layers["15"], model.norm], mesh=mesh, mp_policy=policy)  # tiny.plan:7
    replicate(model, mesh=mesh, mp_policy=policy)  # tiny.plan:7


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Change the model in place, in this order:

    1. `apply_replicate`: after all wrappers, so that the hooks that reduce gradients enclose them.
    2. `offload_activations`: around the whole forward, after the hooks that gather parameters.
    """
    apply_replicate(model, mesh["dp_replicate"])  # tiny.plan:7
    offload_activations(model)  # tiny.plan:9
    return model


def build_optimizer(parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return ShardedOptimizer(
        parameters,
        torch.optim.AdamW,
        axis="dp_replicate",  # tiny.plan:7
        lr=3e-4,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.01,
        fused=True,
    )  # tiny.plan:10


def build_loss() -> LossFunction:
    return token_cross_entropy  # default


def forward_backward(training: Training, batches: Batches) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=training.device)
    for batch in batches.take(MICRO_BATCHES):
        training.model.set_requires_gradient_sync(batch.is_last)  # tiny.plan:8
        training.model.set_is_last_backward(batch.is_last)  # tiny.plan:8
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
        device_type="cuda",  # tiny.plan:3
        build_model=build_model,
        build_mesh=build_mesh,
        parallelize=parallelize,
        build_optimizer=build_optimizer,
        build_loss=build_loss,
        train_step=train_step,
        data_axes=("dp_replicate",),  # tiny.plan:5
        global_batch=128,  # tiny.plan:4
        micro_batch=4,  # tiny.plan:4
        seq_len=2048,  # tiny.plan:4
        vocab_size=128256,  # tiny.plan:2
        flops_per_token=8219787264,  # tiny.plan:2
        peak_flops=989.4e12,  # tiny.plan:3
        master_dtype=torch.float32,  # default
        param_dtype=torch.bfloat16,  # default
        reduce_dtype=torch.float32,  # default
    )


if __name__ == "__main__":
    trainer().main()
