"""tiny: lowered from tiny.plan by legoai 0.0.0.

Cluster: cpu, 1 host, 4 devices each; 4 processes.
Start it with: torchrun --nproc-per-node 4 tiny.py
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR

from legoai.runtime import (
    Batches,
    LossFunction,
    ParameterGroups,
    StepResult,
    Trainer,
    Training,
    local_value,
    reduce_loss_and_norm,
    token_cross_entropy,
    warmup_schedule,
)
from legoai.specs.models.configs import LlamaConfig
from legoai.specs.models.llama import Llama

PLAN = "tiny"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 1  # tiny.plan:6


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
    return init_device_mesh(device_type, (4,), mesh_dim_names=("dp_shard",))  # tiny.plan:7


def apply_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # default
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # tiny.plan:9
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # tiny.plan:9


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    apply_fsdp(model, mesh["dp_shard"])  # tiny.plan:9
    return model


def build_optimizer(parameters: ParameterGroups) -> torch.optim.Optimizer:
    groups = [
        *parameters.take("tok_embeddings.weight", "output.weight", lr=0.5 * 3e-4),  # tiny.plan:13
        *parameters.take(
            "layers.*.attention_norm.weight",
            "layers.*.ffn_norm.weight",
            weight_decay=0.0,
        ),  # tiny.plan:12
        *parameters.take(
            *(f"layers.{index}.attention.wq.weight" for index in range(2)),
            *(f"layers.{index}.attention.wk.weight" for index in range(2)),
            *(f"layers.{index}.attention.wv.weight" for index in range(2)),
            *(f"layers.{index}.attention.wo.weight" for index in range(2)),
            lr=1e-4,
            betas=(0.9, 0.99),
        ),  # tiny.plan:14
        *parameters.take("norm.weight", weight_decay=0.0),  # tiny.plan:11
        *parameters.rest(),
    ]
    return torch.optim.AdamW(
        groups,
        lr=3e-4,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.1,
        fused=True,
    )  # tiny.plan:10


def build_lr_scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return warmup_schedule(optimizer, warmup=20, steps=300, decay="cosine", floor=0.1)  # tiny.plan:16


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
    training.scheduler.step()  # tiny.plan:16
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
        build_lr_scheduler=build_lr_scheduler,
        build_loss=build_loss,
        train_step=train_step,
        data_axes=("dp_shard",),  # tiny.plan:7
        global_batch=8,  # tiny.plan:6
        micro_batch=2,  # tiny.plan:6
        seq_len=64,  # tiny.plan:6
        vocab_size=256,  # tiny.plan:3
        master_dtype=torch.float32,  # default
        param_dtype=torch.bfloat16,  # default
        reduce_dtype=torch.float32,  # default
        steps=300,  # tiny.plan:16
    )


if __name__ == "__main__":
    trainer().main()
