"""gpt3_175b_384: lowered from gpt3_175b_384.plan by legoai 0.0.0.

Cluster: a100_sxm80, 48 hosts, infiniband_hdr; 384 processes.
Start it with: torchrun --nnodes 48 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 gpt3_175b_384.py
"""

from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.optim.lr_scheduler import LambdaLR

from legoai.runtime import (
    Batches,
    LossFunction,
    Pipeline,
    ShardedOptimizer,
    StepResult,
    Trainer,
    Training,
    add_losses,
    clip_gradients,
    divided,
    reduce_loss_and_norm,
    reduce_partial_gradients,
    token_cross_entropy,
    warmup_schedule,
)
from legoai.specs.models.configs import GPTConfig
from legoai.specs.models.gpt import GPT

PLAN = "gpt3_175b_384"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 384  # gpt3_175b_384.plan:8
STAGES = (
    ("tok_embeddings", "pos_embeddings", "layers.0", "layers.1", "layers.2", "layers.3"),
    ("layers.4", "layers.5", "layers.6", "layers.7"),
    ("layers.8", "layers.9", "layers.10", "layers.11"),
    ("layers.12", "layers.13", "layers.14", "layers.15"),
    ("layers.16", "layers.17", "layers.18", "layers.19"),
    ("layers.20", "layers.21", "layers.22", "layers.23"),
    ("layers.24", "layers.25", "layers.26", "layers.27"),
    ("layers.28", "layers.29", "layers.30", "layers.31"),
    ("layers.32", "layers.33", "layers.34", "layers.35"),
    ("layers.36", "layers.37", "layers.38", "layers.39"),
    ("layers.40", "layers.41", "layers.42", "layers.43"),
    ("layers.44", "layers.45", "layers.46", "layers.47"),
    ("layers.48", "layers.49", "layers.50", "layers.51"),
    ("layers.52", "layers.53", "layers.54", "layers.55"),
    ("layers.56", "layers.57", "layers.58", "layers.59"),
    ("layers.60", "layers.61", "layers.62", "layers.63"),
    ("layers.64", "layers.65", "layers.66", "layers.67"),
    ("layers.68", "layers.69", "layers.70", "layers.71"),
    ("layers.72", "layers.73", "layers.74", "layers.75"),
    ("layers.76", "layers.77", "layers.78", "layers.79"),
    ("layers.80", "layers.81", "layers.82", "layers.83"),
    ("layers.84", "layers.85", "layers.86", "layers.87"),
    ("layers.88", "layers.89", "layers.90", "layers.91"),
    ("layers.92", "layers.93", "layers.94", "layers.95", "norm", "output"),
)  # gpt3_175b_384.plan:18
STAGES_OF_RANK = (
    (0, 12),
    (1, 13),
    (2, 14),
    (3, 15),
    (4, 16),
    (5, 17),
    (6, 18),
    (7, 19),
    (8, 20),
    (9, 21),
    (10, 22),
    (11, 23),
)  # gpt3_175b_384.plan:18


def build_model() -> nn.Module:
    config = GPTConfig(
        dim=12288,
        n_layers=96,
        n_heads=96,
        hidden_dim=49152,
        vocab_size=51200,
        max_seq_len=2048,
        norm_eps=1e-5,
        bias=True,
        tie_embeddings=False,
    )  # gpt3_175b_384.plan:6
    return GPT(config)


def build_mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(
        device_type,
        (12, 4, 8),
        mesh_dim_names=("pp", "dp_replicate", "tp"),
    )  # gpt3_175b_384.plan:10


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    if model.tok_embeddings is not None:
        parallelize_module(
            model.tok_embeddings,
            mesh,
            RowwiseParallel(input_layouts=Replicate()),  # gpt3_175b_384.plan:12
        )  # gpt3_175b_384.plan:12
    if model.output is not None:
        parallelize_module(
            model.output,
            mesh,
            ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),  # gpt3_175b_384.plan:12
        )  # gpt3_175b_384.plan:12
    for layer in model.layers.values():
        parallelize_module(
            layer,
            mesh,
            {
                "attention.wq": ColwiseParallel(),  # gpt3_175b_384.plan:12
                "attention.wk": ColwiseParallel(),  # gpt3_175b_384.plan:12
                "attention.wv": ColwiseParallel(),  # gpt3_175b_384.plan:12
                "attention.wo": RowwiseParallel(),  # gpt3_175b_384.plan:12
                "mlp.up": ColwiseParallel(),  # gpt3_175b_384.plan:12
                "mlp.down": RowwiseParallel(),  # gpt3_175b_384.plan:12
            },
        )  # gpt3_175b_384.plan:12


def apply_checkpoint(model: nn.Module) -> None:
    for name, layer in model.layers.items():
        model.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=False)  # gpt3_175b_384.plan:20


def apply_replicate(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # gpt3_175b_384.plan:22
    for layer in model.layers.values():
        replicate(layer, mesh=mesh, mp_policy=policy)  # gpt3_175b_384.plan:14
    replicate(model, mesh=mesh, mp_policy=policy)  # gpt3_175b_384.plan:14


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Change the model in place, in this order:

    1. `apply_tensor_parallel`: on unsharded parameters under the model's own paths, before modules are wrapped.
    2. `apply_checkpoint`: before units are made, so that their hooks enclose the recomputation.
    3. `apply_replicate`: after all wrappers, so that the hooks that reduce gradients enclose them.
    """
    apply_tensor_parallel(model, mesh["tp"])  # gpt3_175b_384.plan:12
    apply_checkpoint(model)  # gpt3_175b_384.plan:20
    apply_replicate(model, mesh["dp_replicate"])  # gpt3_175b_384.plan:14
    return model


def build_stage(model: nn.Module, index: int, mesh: DeviceMesh, device: torch.device) -> PipelineStage:
    tokens = torch.empty((1, 2048), dtype=torch.int64, device="meta")  # gpt3_175b_384.plan:8
    hidden = torch.empty(
        (1, 2048, 12288),
        dtype=torch.bfloat16,
        device="meta",
        requires_grad=True,
    )  # gpt3_175b_384.plan:8
    logits = torch.empty(
        (1, 2048, 51200),
        dtype=torch.bfloat16,
        device="meta",
        requires_grad=True,
    )  # gpt3_175b_384.plan:8
    return PipelineStage(
        model,
        index,
        len(STAGES),
        device,
        input_args=tokens if index == 0 else hidden,
        output_args=logits if index == len(STAGES) - 1 else hidden,
        group=mesh.get_group("pp"),
    )  # gpt3_175b_384.plan:18


def build_schedule(stages: list[PipelineStage], loss: LossFunction) -> ScheduleInterleaved1F1B:
    share = divided(loss, by=MICRO_BATCHES)
    return ScheduleInterleaved1F1B(stages, n_microbatches=96, loss_fn=share, scale_grads=False)  # gpt3_175b_384.plan:18


def build_optimizer(parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return ShardedOptimizer(
        parameters,
        torch.optim.AdamW,
        axis="dp_replicate",  # gpt3_175b_384.plan:14
        lr=6e-5,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        fused=True,
    )  # gpt3_175b_384.plan:23


def build_lr_scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return warmup_schedule(optimizer, warmup=2000, steps=95000, decay="cosine", floor=0.1)  # gpt3_175b_384.plan:25


def build_loss() -> LossFunction:
    return token_cross_entropy  # default


def forward_backward(training: Training, batches: Batches) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=training.device)
    for batch in batches.take(MICRO_BATCHES, together=96):
        losses: list[torch.Tensor] = []
        with loss_parallel():  # gpt3_175b_384.plan:12
            training.schedule.step(*batch.inputs, target=batch.targets, losses=losses, return_outputs=False)
        add_losses(total, losses, scale=MICRO_BATCHES)
    return total / MICRO_BATCHES


def train_step(training: Training, batches: Batches) -> StepResult:
    mean_loss = forward_backward(training, batches)
    reduce_partial_gradients(training.optimizer.param_groups)  # gpt3_175b_384.plan:12
    result = reduce_loss_and_norm(training, mean_loss)
    if training.may_update(result):
        clip_gradients(training.optimizer.param_groups, max_norm=1.0, total_norm=result.norm)  # gpt3_175b_384.plan:24
        training.optimizer.step()
    training.optimizer.zero_grad()
    training.scheduler.step()  # gpt3_175b_384.plan:25
    return result


def trainer() -> Trainer:
    return Trainer(
        plan=PLAN,
        plan_hash=PLAN_HASH,
        device_type="cuda",  # gpt3_175b_384.plan:7
        build_model=build_model,
        build_mesh=build_mesh,
        parallelize=parallelize,
        pipeline=Pipeline(
            stages=STAGES,
            stages_of_rank=STAGES_OF_RANK,
            microbatches=96,
            build_stage=build_stage,
            build_schedule=build_schedule,
        ),  # gpt3_175b_384.plan:18
        build_optimizer=build_optimizer,
        build_lr_scheduler=build_lr_scheduler,
        build_loss=build_loss,
        train_step=train_step,
        data_axes=("dp_replicate",),  # gpt3_175b_384.plan:10
        global_batch=1536,  # gpt3_175b_384.plan:8
        micro_batch=1,  # gpt3_175b_384.plan:8
        seq_len=2048,  # gpt3_175b_384.plan:8
        vocab_size=51200,  # gpt3_175b_384.plan:6
        flops_per_token=1076442955776,  # gpt3_175b_384.plan:6
        peak_flops=312e12,  # gpt3_175b_384.plan:7
        master_dtype=torch.float32,  # gpt3_175b_384.plan:22
        param_dtype=torch.bfloat16,  # gpt3_175b_384.plan:22
        reduce_dtype=torch.float32,  # gpt3_175b_384.plan:22
        loss_parallel=True,  # gpt3_175b_384.plan:12
        clip_norm=1.0,  # gpt3_175b_384.plan:24
        steps=95000,  # gpt3_175b_384.plan:25
    )


if __name__ == "__main__":
    trainer().main()
