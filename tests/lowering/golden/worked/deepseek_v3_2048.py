"""deepseek_v3_2048: lowered from deepseek_v3_2048.plan by legoai 0.0.0.

Cluster: h100_sxm, 256 hosts, infiniband_ndr; 2048 processes.
Start it with: torchrun --nnodes 256 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 deepseek_v3_2048.py
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend
from torch.optim.lr_scheduler import LambdaLR

from legoai.runtime import (
    Batches,
    LossFunction,
    Pipeline,
    StepResult,
    Trainer,
    Training,
    add_losses,
    clip_gradients,
    divided,
    reduce_loss_and_norm,
    token_cross_entropy,
    warmup_schedule,
)
from legoai.runtime.parallelism.experts import ExpertParallel
from legoai.runtime.parallelism.mesh import split_off_experts
from legoai.specs.models.configs import DeepSeekConfig
from legoai.specs.models.deepseek import DeepSeek

PLAN = "deepseek_v3_2048"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 32  # deepseek_v3_2048.plan:9
STAGES = (
    ("tok_embeddings", "layers.0"),
    ("layers.1",),
    ("layers.2", "layers.3"),
    ("layers.4", "layers.5"),
    ("layers.6", "layers.7"),
    ("layers.8", "layers.9"),
    ("layers.10", "layers.11"),
    ("layers.12", "layers.13"),
    ("layers.14", "layers.15"),
    ("layers.16", "layers.17"),
    ("layers.18", "layers.19"),
    ("layers.20", "layers.21"),
    ("layers.22", "layers.23"),
    ("layers.24", "layers.25"),
    ("layers.26", "layers.27"),
    ("layers.28", "layers.29"),
    ("layers.30", "layers.31"),
    ("layers.32", "layers.33"),
    ("layers.34", "layers.35"),
    ("layers.36", "layers.37"),
    ("layers.38", "layers.39"),
    ("layers.40", "layers.41"),
    ("layers.42", "layers.43"),
    ("layers.44", "layers.45"),
    ("layers.46", "layers.47"),
    ("layers.48", "layers.49"),
    ("layers.50", "layers.51"),
    ("layers.52", "layers.53"),
    ("layers.54", "layers.55"),
    ("layers.56", "layers.57"),
    ("layers.58", "layers.59"),
    ("layers.60", "norm", "output"),
)  # deepseek_v3_2048.plan:18
STAGES_OF_RANK = (
    (0, 16),
    (1, 17),
    (2, 18),
    (3, 19),
    (4, 20),
    (5, 21),
    (6, 22),
    (7, 23),
    (8, 24),
    (9, 25),
    (10, 26),
    (11, 27),
    (12, 28),
    (13, 29),
    (14, 30),
    (15, 31),
)  # deepseek_v3_2048.plan:18


def build_model() -> nn.Module:
    config = DeepSeekConfig(
        dim=7168,
        n_layers=61,
        n_dense_layers=3,
        n_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope_head_dim=128,
        rope_head_dim=64,
        v_head_dim=128,
        dense_hidden_dim=18432,
        hidden_dim=2048,
        n_experts=256,
        n_shared_experts=1,
        top_k=8,
        vocab_size=129280,
        max_seq_len=163840,
        n_groups=8,
        top_groups=4,
        scores="sigmoid",
        normalize_weights=True,
        routed_scaling=2.5,
        norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=40.0,
        rope_original_seq_len=4096,
        rope_mscale=1.0,
    )  # deepseek_v3_2048.plan:7
    return DeepSeek(config)


def build_mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (16, 128), mesh_dim_names=("pp", "dp_shard"))  # deepseek_v3_2048.plan:11


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    for index in range(3, 61):
        if str(index) in model.layers:
            parallelize_module(
                model.layers[str(index)].feed_forward.experts,
                mesh,
                ExpertParallel(),
            )  # deepseek_v3_2048.plan:13


def apply_checkpoint(model: nn.Module) -> None:
    for name, layer in model.layers.items():
        model.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=False)  # deepseek_v3_2048.plan:21


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # deepseek_v3_2048.plan:24
    for index in range(3):
        if str(index) in model.layers:
            fully_shard(
                model.layers[str(index)],
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=False,
            )  # deepseek_v3_2048.plan:16
    for index in range(3, 61):
        if str(index) in model.layers:
            layer = model.layers[str(index)]
            fully_shard(
                layer.feed_forward.experts,
                mesh=expert_mesh,
                mp_policy=policy,
                reshard_after_forward=False,
            )  # deepseek_v3_2048.plan:13
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # deepseek_v3_2048.plan:16
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # deepseek_v3_2048.plan:16


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Change the model in place, in this order:

    1. `apply_expert_parallel`: like tensor parallelism, before modules are wrapped.
    2. `apply_checkpoint`: before units are made, so that their hooks enclose the recomputation.
    3. `apply_fsdp`: after all wrappers, so that the hooks that gather parameters enclose them.
    """
    expert_mesh = split_off_experts(mesh["dp_shard"], ep=64)  # deepseek_v3_2048.plan:11
    apply_expert_parallel(model, expert_mesh["ep"])  # deepseek_v3_2048.plan:13
    apply_checkpoint(model)  # deepseek_v3_2048.plan:21
    apply_fsdp(model, mesh["dp_shard"], expert_mesh["dp_shard_mod_ep"])  # deepseek_v3_2048.plan:16
    return model


def build_stage(model: nn.Module, index: int, mesh: DeviceMesh, device: torch.device) -> PipelineStage:
    tokens = torch.empty((1, 4096), dtype=torch.int64, device="meta")  # deepseek_v3_2048.plan:9
    hidden = torch.empty(
        (1, 4096, 7168),
        dtype=torch.bfloat16,
        device="meta",
        requires_grad=True,
    )  # deepseek_v3_2048.plan:9
    logits = torch.empty(
        (1, 4096, 129280),
        dtype=torch.bfloat16,
        device="meta",
        requires_grad=True,
    )  # deepseek_v3_2048.plan:9
    return PipelineStage(
        model,
        index,
        len(STAGES),
        device,
        input_args=tokens if index == 0 else hidden,
        output_args=logits if index == len(STAGES) - 1 else hidden,
        group=mesh.get_group("pp"),
    )  # deepseek_v3_2048.plan:18


def build_schedule(stages: list[PipelineStage], loss: LossFunction) -> ScheduleInterleaved1F1B:
    share = divided(loss, by=MICRO_BATCHES)
    return ScheduleInterleaved1F1B(
        stages,
        n_microbatches=32,
        loss_fn=share,
        scale_grads=False,
    )  # deepseek_v3_2048.plan:18


def build_optimizer(parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=2.2e-4,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        fused=True,
    )  # deepseek_v3_2048.plan:25


def build_lr_scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return warmup_schedule(optimizer, warmup=2000, steps=250000, decay="cosine", floor=0.1)  # deepseek_v3_2048.plan:27


def build_loss() -> LossFunction:
    return token_cross_entropy  # default


def forward_backward(training: Training, batches: Batches) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=training.device)
    for batch in batches.take(MICRO_BATCHES, together=32):
        losses: list[torch.Tensor] = []
        training.schedule.step(*batch.inputs, target=batch.targets, losses=losses, return_outputs=False)
        add_losses(total, losses, scale=MICRO_BATCHES)
    return total / MICRO_BATCHES


def train_step(training: Training, batches: Batches) -> StepResult:
    mean_loss = forward_backward(training, batches)
    result = reduce_loss_and_norm(training, mean_loss)
    if training.may_update(result):
        clip_gradients(
            training.optimizer.param_groups,
            max_norm=1.0,
            total_norm=result.norm,
        )  # deepseek_v3_2048.plan:26
        training.optimizer.step()
    training.optimizer.zero_grad()
    training.scheduler.step()  # deepseek_v3_2048.plan:27
    return result


def trainer() -> Trainer:
    return Trainer(
        plan=PLAN,
        plan_hash=PLAN_HASH,
        device_type="cuda",  # deepseek_v3_2048.plan:8
        build_model=build_model,
        build_mesh=build_mesh,
        parallelize=parallelize,
        pipeline=Pipeline(
            stages=STAGES,
            stages_of_rank=STAGES_OF_RANK,
            microbatches=32,
            build_stage=build_stage,
            build_schedule=build_schedule,
        ),  # deepseek_v3_2048.plan:18
        build_optimizer=build_optimizer,
        build_lr_scheduler=build_lr_scheduler,
        build_loss=build_loss,
        train_step=train_step,
        data_axes=("dp_shard",),  # deepseek_v3_2048.plan:11
        global_batch=4096,  # deepseek_v3_2048.plan:9
        micro_batch=1,  # deepseek_v3_2048.plan:9
        seq_len=4096,  # deepseek_v3_2048.plan:9
        vocab_size=129280,  # deepseek_v3_2048.plan:7
        flops_per_token=281152192512,  # deepseek_v3_2048.plan:7
        peak_flops=989.4e12,  # deepseek_v3_2048.plan:8
        master_dtype=torch.float32,  # deepseek_v3_2048.plan:24
        param_dtype=torch.bfloat16,  # deepseek_v3_2048.plan:24
        reduce_dtype=torch.float32,  # deepseek_v3_2048.plan:24
        attention_kernel=SDPBackend.CUDNN_ATTENTION,  # deepseek_v3_2048.plan:22
        clip_norm=1.0,  # deepseek_v3_2048.plan:26
        steps=250000,  # deepseek_v3_2048.plan:27
    )


if __name__ == "__main__":
    trainer().main()
