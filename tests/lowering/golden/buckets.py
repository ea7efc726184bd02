"""buckets: lowered from tiny.plan by legoai 0.0.0.

Cluster: h100_sxm, 2 hosts, infiniband_ndr; 16 processes.
Start it with: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 buckets.py
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from legoai.runtime import (
    Batches,
    LossFunction,
    StepResult,
    Trainer,
    Training,
    local_value,
    reduce_loss_and_norm,
    reshard_units,
    token_cross_entropy,
)
from legoai.specs.models.configs import LlamaConfig
from legoai.specs.models.llama import Llama

PLAN = "buckets"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 2  # tiny.plan:4


def build_model() -> nn.Module:
    config = LlamaConfig(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=14336,
        vocab_size=128256,
        max_seq_len=131072,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=8.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_seq_len=8192,
        tie_embeddings=False,
    )  # tiny.plan:2
    return Llama(config)


def build_mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (16,), mesh_dim_names=("dp_shard",))  # tiny.plan:5


def apply_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # default
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")  # tiny.plan:19
    fully_shard(
        model.tok_embeddings,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload,
        reshard_after_forward=True,
    )  # tiny.plan:8
    for first in range(0, 32, 4):
        fully_shard(
            [model.layers[str(index)] for index in range(first, first + 4)],
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=True,
        )  # tiny.plan:15
    fully_shard(
        [model.norm, model.output],
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload,
        reshard_after_forward=False,
    )  # tiny.plan:16
    model.norm.set_reshard_after_backward(False, recurse=False)  # tiny.plan:10
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False)  # tiny.plan:11


def apply_prefetch(model: nn.Module) -> None:
    units = [model.tok_embeddings, *(model.layers[str(index)] for index in range(0, 29, 4)), model.norm]  # tiny.plan:14
    model.set_modules_to_forward_prefetch(units[:2])  # tiny.plan:14
    model.set_modules_to_backward_prefetch(units[:-2:-1])  # tiny.plan:14
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 3])  # tiny.plan:14
        unit.set_modules_to_backward_prefetch(units[max(index - 1, 0) : index][::-1])  # tiny.plan:14


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Change the model in place, in this order:

    1. `apply_fsdp`: after all wrappers, so that the hooks that gather parameters enclose them.
    2. `apply_prefetch`: after all units are made, since each prefetches others.
    """
    apply_fsdp(model, mesh["dp_shard"])  # tiny.plan:7
    apply_prefetch(model)  # tiny.plan:14
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
    reshard_units(training.model)  # tiny.plan:10
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
        data_axes=("dp_shard",),  # tiny.plan:5
        global_batch=32,  # tiny.plan:4
        micro_batch=1,  # tiny.plan:4
        seq_len=8192,  # tiny.plan:4
        vocab_size=128256,  # tiny.plan:2
        flops_per_token=57912852480,  # tiny.plan:2
        peak_flops=989.4e12,  # tiny.plan:3
        master_dtype=torch.float32,  # default
        param_dtype=torch.bfloat16,  # default
        reduce_dtype=torch.float32,  # default
        offload_parameters=True,  # tiny.plan:19
    )


if __name__ == "__main__":
    trainer().main()
