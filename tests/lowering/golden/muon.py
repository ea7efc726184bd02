"""muon: lowered from tiny.plan by legoai 0.0.0.

Cluster: h100_sxm, 1 host; 8 processes.
Start it with: torchrun --nproc-per-node 8 muon.py
"""

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from legoai.runtime import (
    Batches,
    CombinedOptimizer,
    LossFunction,
    Muon,
    ParameterGroups,
    ShardedOptimizer,
    StepResult,
    Trainer,
    Training,
    local_value,
    reduce_loss_and_norm,
    token_cross_entropy,
)
from legoai.specs.models.configs import LlamaConfig
from legoai.specs.models.llama import Llama

PLAN = "muon"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 8  # tiny.plan:4


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
    return init_device_mesh(device_type, (8,), mesh_dim_names=("dp_replicate",))  # tiny.plan:5


def apply_replicate(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # default
    for index in range(15):
        replicate(model.layers[str(index)], mesh=mesh, mp_policy=policy)  # tiny.plan:7
    replicate([model.layers["15"], model.norm], mesh=mesh, mp_policy=policy)  # tiny.plan:7
    replicate(model, mesh=mesh, mp_policy=policy)  # tiny.plan:7


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    apply_replicate(model, mesh["dp_replicate"])  # tiny.plan:7
    return model


def build_optimizer(parameters: ParameterGroups) -> torch.optim.Optimizer:
    matrices = [
        *parameters.take(
            "layers.0.attention.wq.weight",
            "layers.0.attention.wk.weight",
            "layers.0.attention.wv.weight",
            "layers.0.feed_forward.w1.weight",
            "layers.0.feed_forward.w2.weight",
            "layers.0.feed_forward.w3.weight",
            lr=1e-4,
            momentum=0.9,
            weight_decay=0.1,
            nesterov=False,
            ns_steps=6,
            adjust_lr_fn="original",
        ),  # tiny.plan:11
        *parameters.take(
            *(f"layers.{index}.attention.wq.weight" for index in range(1, 16)),
            *(f"layers.{index}.attention.wk.weight" for index in range(1, 16)),
            *(f"layers.{index}.attention.wv.weight" for index in range(1, 16)),
            *(f"layers.{index}.feed_forward.w1.weight" for index in range(1, 16)),
            *(f"layers.{index}.feed_forward.w2.weight" for index in range(1, 16)),
            *(f"layers.{index}.feed_forward.w3.weight" for index in range(1, 16)),
            lr=3e-4,
            momentum=0.95,
            weight_decay=0.1,
            nesterov=True,
            ns_steps=5,
            adjust_lr_fn="match_rms_adamw",
        ),  # tiny.plan:10
    ]
    groups = [
        *parameters.take("layers.*.attention.wo.weight"),  # tiny.plan:12
        *parameters.take("norm.weight", weight_decay=0.0),  # tiny.plan:9
        *parameters.rest(),
    ]
    return CombinedOptimizer(
        ShardedOptimizer(
            groups,
            torch.optim.AdamW,
            axis="dp_replicate",  # tiny.plan:7
            lr=3e-4,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.1,
            fused=True,
        ),  # tiny.plan:8
        ShardedOptimizer(
            matrices,
            Muon,
            axis="dp_replicate",  # tiny.plan:7
        ),  # tiny.plan:8
    )  # tiny.plan:8


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
        device_type="cuda",  # tiny.plan:3
        build_model=build_model,
        build_mesh=build_mesh,
        parallelize=parallelize,
        build_optimizer=build_optimizer,
        build_loss=build_loss,
        train_step=train_step,
        data_axes=("dp_replicate",),  # tiny.plan:5
        global_batch=64,  # tiny.plan:4
        micro_batch=1,  # tiny.plan:4
        seq_len=8192,  # tiny.plan:4
        vocab_size=128256,  # tiny.plan:2
        flops_per_token=10635706368,  # tiny.plan:2
        peak_flops=989.4e12,  # tiny.plan:3
        master_dtype=torch.float32,  # default
        param_dtype=torch.bfloat16,  # default
        reduce_dtype=torch.float32,  # default
    )


if __name__ == "__main__":
    trainer().main()
