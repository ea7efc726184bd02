"""tiny: lowered from tiny.plan by legoai 0.0.0.

Cluster: cpu, 1 host, 4 devices each; 4 processes.
Start it with: torchrun --nproc-per-node 4 tiny.py
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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
from legoai.specs.models.configs import LlamaConfig
from legoai.specs.models.llama import Llama

PLAN = "tiny"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 8  # tiny.plan:6


def build_model() -> nn.Module:
    config = LlamaConfig(
        dim=128,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        hidden_dim=384,
        vocab_size=256,
        max_seq_len=1024,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=1.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_seq_len=8192,
        tie_embeddings=False,
    )  # tiny.plan:3
    return Llama(config)


def build_mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (4,), mesh_dim_names=("dp_shard",))  # tiny.plan:12


def apply_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # default
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # tiny.plan:13
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # tiny.plan:13


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    apply_fsdp(model, mesh["dp_shard"])  # tiny.plan:13
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


def micro_batches(step: int) -> int:
    """Return the micro batches of one rank in a step, counted from 0."""
    if step < 100:  # tiny.plan:10
        return 2
    if step < 500:  # tiny.plan:10
        return 4
    return MICRO_BATCHES


def forward_backward(training: Training, batches: Batches) -> torch.Tensor:
    count = micro_batches(batches.step)
    total = torch.zeros((), dtype=torch.float64, device=training.device)
    for batch in batches.take(count):
        loss = training.loss(training.model(*batch.inputs), batch.targets)
        (loss / count).backward()
        total += local_value(loss)
    return total / count


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
        device_type="cpu",  # tiny.plan:4
        build_model=build_model,
        build_mesh=build_mesh,
        parallelize=parallelize,
        build_optimizer=build_optimizer,
        build_loss=build_loss,
        train_step=train_step,
        data_axes=("dp_shard",),  # tiny.plan:12
        global_batch=64,  # tiny.plan:7
        ramp=((100, 16), (500, 32)),  # tiny.plan:10
        micro_batch=2,  # tiny.plan:8
        seq_len=64,  # tiny.plan:9
        vocab_size=256,  # tiny.plan:3
        master_dtype=torch.float32,  # default
        param_dtype=torch.bfloat16,  # default
        reduce_dtype=torch.float32,  # default
    )


if __name__ == "__main__":
    trainer().main()
