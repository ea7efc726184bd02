"""llama3_405b_512: lowered from llama3_405b_512.plan (variant long_context) by legoai 0.0.0.

Cluster: h100_sxm, 64 hosts, infiniband_ndr; 512 processes.
Start it with: torchrun --nnodes 64 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 llama3_405b_512.py
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
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
    reduce_partial_gradients,
    token_cross_entropy,
    warmup_schedule,
)
from legoai.runtime.attention.context import context_parallel_attention
from legoai.specs.models.configs import LlamaConfig
from legoai.specs.models.llama import Llama

PLAN = "llama3_405b_512"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 16  # llama3_405b_512.plan:33
STAGES = (
    ("tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "layers.5", "layers.6"),
    ("layers.7", "layers.8", "layers.9", "layers.10", "layers.11", "layers.12", "layers.13", "layers.14"),
    ("layers.15", "layers.16", "layers.17", "layers.18", "layers.19", "layers.20", "layers.21", "layers.22"),
    ("layers.23", "layers.24", "layers.25", "layers.26", "layers.27", "layers.28", "layers.29", "layers.30"),
    ("layers.31", "layers.32", "layers.33", "layers.34", "layers.35", "layers.36", "layers.37", "layers.38"),
    ("layers.39", "layers.40", "layers.41", "layers.42", "layers.43", "layers.44", "layers.45", "layers.46"),
    ("layers.47", "layers.48", "layers.49", "layers.50", "layers.51", "layers.52", "layers.53", "layers.54"),
    ("layers.55", "layers.56", "layers.57", "layers.58", "layers.59", "layers.60", "layers.61", "layers.62"),
    ("layers.63", "layers.64", "layers.65", "layers.66", "layers.67", "layers.68", "layers.69", "layers.70"),
    ("layers.71", "layers.72", "layers.73", "layers.74", "layers.75", "layers.76", "layers.77", "layers.78"),
    ("layers.79", "layers.80", "layers.81", "layers.82", "layers.83", "layers.84", "layers.85", "layers.86"),
    ("layers.87", "layers.88", "layers.89", "layers.90", "layers.91", "layers.92", "layers.93", "layers.94"),
    ("layers.95", "layers.96", "layers.97", "layers.98", "layers.99", "layers.100", "layers.101", "layers.102"),
    ("layers.103", "layers.104", "layers.105", "layers.106", "layers.107", "layers.108", "layers.109", "layers.110"),
    ("layers.111", "layers.112", "layers.113", "layers.114", "layers.115", "layers.116", "layers.117", "layers.118"),
    (
        "layers.119",
        "layers.120",
        "layers.121",
        "layers.122",
        "layers.123",
        "layers.124",
        "layers.125",
        "norm",
        "output",
    ),
)  # llama3_405b_512.plan:38
STAGES_OF_RANK = ((0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15))  # llama3_405b_512.plan:38


def build_model() -> nn.Module:
    config = LlamaConfig(
        dim=16384,
        n_layers=126,
        n_heads=128,
        n_kv_heads=8,
        hidden_dim=53248,
        vocab_size=128256,
        max_seq_len=131072,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=8.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_seq_len=8192,
        tie_embeddings=False,
    )  # llama3_405b_512.plan:4
    return Llama(config)


def build_mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (8, 8, 8), mesh_dim_names=("pp", "cp", "tp"))  # llama3_405b_512.plan:34


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    if model.tok_embeddings is not None:
        parallelize_module(
            model.tok_embeddings,
            mesh,
            RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),  # llama3_405b_512.plan:10
        )  # llama3_405b_512.plan:10
    if model.norm is not None:
        parallelize_module(
            model.norm,
            mesh,
            SequenceParallel(),  # llama3_405b_512.plan:10
        )  # llama3_405b_512.plan:10
    if model.output is not None:
        parallelize_module(
            model.output,
            mesh,
            ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1),
                use_local_output=False,
            ),  # llama3_405b_512.plan:10
        )  # llama3_405b_512.plan:10
    for layer in model.layers.values():
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),  # llama3_405b_512.plan:10
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None),
                    desired_input_layouts=(Replicate(), None),
                ),  # llama3_405b_512.plan:10
                "attention.wq": ColwiseParallel(),  # llama3_405b_512.plan:10
                "attention.wk": ColwiseParallel(),  # llama3_405b_512.plan:10
                "attention.wv": ColwiseParallel(),  # llama3_405b_512.plan:10
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),  # llama3_405b_512.plan:10
                "ffn_norm": SequenceParallel(),  # llama3_405b_512.plan:10
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),),
                    desired_input_layouts=(Replicate(),),
                ),  # llama3_405b_512.plan:10
                "feed_forward.w1": ColwiseParallel(),  # llama3_405b_512.plan:10
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),  # llama3_405b_512.plan:10
                "feed_forward.w3": ColwiseParallel(),  # llama3_405b_512.plan:10
            },
        )  # llama3_405b_512.plan:10


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.layers.values():
        context_parallel_attention(
            layer.attention,
            mesh,
            rotate="allgather",
            balance="head_tail",
        )  # llama3_405b_512.plan:41


def apply_checkpoint(model: nn.Module) -> None:
    for name, layer in model.layers.items():
        model.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=False)  # llama3_405b_512.plan:39


def apply_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # llama3_405b_512.plan:23
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # llama3_405b_512.plan:36
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # llama3_405b_512.plan:36


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Change the model in place, in this order:

    1. `apply_tensor_parallel`: on unsharded parameters under the model's own paths, before modules are wrapped.
    2. `apply_context_parallel`: puts collectives into attention, so that they are compiled and recomputed with it.
    3. `apply_checkpoint`: before units are made, so that their hooks enclose the recomputation.
    4. `apply_fsdp`: after all wrappers, so that the hooks that gather parameters enclose them.
    """
    apply_tensor_parallel(model, mesh["tp"])  # llama3_405b_512.plan:10
    apply_context_parallel(model, mesh["cp"])  # llama3_405b_512.plan:41
    apply_checkpoint(model)  # llama3_405b_512.plan:39
    apply_fsdp(model, mesh["cp"])  # llama3_405b_512.plan:36
    return model


def build_stage(model: nn.Module, index: int, mesh: DeviceMesh, device: torch.device) -> PipelineStage:
    tokens = torch.empty((1, 16384), dtype=torch.int64, device="meta")  # llama3_405b_512.plan:33
    hidden = torch.empty(
        (1, 2048, 16384),
        dtype=torch.bfloat16,
        device="meta",
        requires_grad=True,
    )  # llama3_405b_512.plan:33
    logits = torch.empty(
        (1, 16384, 128256),
        dtype=torch.bfloat16,
        device="meta",
        requires_grad=True,
    )  # llama3_405b_512.plan:33
    return PipelineStage(
        model,
        index,
        len(STAGES),
        device,
        input_args=tokens if index == 0 else hidden,
        output_args=logits if index == len(STAGES) - 1 else hidden,
        group=mesh.get_group("pp"),
    )  # llama3_405b_512.plan:38


def build_schedule(stages: list[PipelineStage], loss: LossFunction) -> ScheduleInterleaved1F1B:
    share = divided(loss, by=MICRO_BATCHES)
    return ScheduleInterleaved1F1B(
        stages,
        n_microbatches=16,
        loss_fn=share,
        scale_grads=False,
    )  # llama3_405b_512.plan:38


def build_optimizer(parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=8e-5,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        fused=True,
    )  # llama3_405b_512.plan:24


def build_lr_scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return warmup_schedule(optimizer, warmup=8000, steps=1200000, decay="cosine", floor=0.01)  # llama3_405b_512.plan:26


def build_loss() -> LossFunction:
    return token_cross_entropy  # default


def forward_backward(training: Training, batches: Batches) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=training.device)
    for batch in batches.take(MICRO_BATCHES, together=16):
        losses: list[torch.Tensor] = []
        with loss_parallel():  # llama3_405b_512.plan:10
            training.schedule.step(*batch.inputs, target=batch.targets, losses=losses, return_outputs=False)
        add_losses(total, losses, scale=MICRO_BATCHES)
    return total / MICRO_BATCHES


def train_step(training: Training, batches: Batches) -> StepResult:
    mean_loss = forward_backward(training, batches)
    reduce_partial_gradients(training.optimizer.param_groups)  # llama3_405b_512.plan:10
    result = reduce_loss_and_norm(training, mean_loss)
    if training.may_update(result):
        clip_gradients(training.optimizer.param_groups, max_norm=1.0, total_norm=result.norm)  # llama3_405b_512.plan:25
        training.optimizer.step()
    training.optimizer.zero_grad()
    training.scheduler.step()  # llama3_405b_512.plan:26
    return result


def trainer() -> Trainer:
    return Trainer(
        plan=PLAN,
        plan_hash=PLAN_HASH,
        device_type="cuda",  # llama3_405b_512.plan:5
        build_model=build_model,
        build_mesh=build_mesh,
        parallelize=parallelize,
        pipeline=Pipeline(
            stages=STAGES,
            stages_of_rank=STAGES_OF_RANK,
            microbatches=16,
            build_stage=build_stage,
            build_schedule=build_schedule,
        ),  # llama3_405b_512.plan:38
        build_optimizer=build_optimizer,
        build_lr_scheduler=build_lr_scheduler,
        build_loss=build_loss,
        train_step=train_step,
        data_axes=(),  # llama3_405b_512.plan:34
        context_axis="cp",  # llama3_405b_512.plan:41
        context_balance="head_tail",  # llama3_405b_512.plan:41
        global_batch=16,  # llama3_405b_512.plan:33
        micro_batch=1,  # llama3_405b_512.plan:33
        seq_len=131072,  # llama3_405b_512.plan:33
        vocab_size=128256,  # llama3_405b_512.plan:4
        flops_per_token=5669482659840,  # llama3_405b_512.plan:4
        peak_flops=989.4e12,  # llama3_405b_512.plan:5
        master_dtype=torch.float32,  # llama3_405b_512.plan:23
        param_dtype=torch.bfloat16,  # llama3_405b_512.plan:23
        reduce_dtype=torch.float32,  # llama3_405b_512.plan:23
        attention_kernel=SDPBackend.FLASH_ATTENTION,  # llama3_405b_512.plan:21
        loss_parallel=True,  # llama3_405b_512.plan:10
        clip_norm=1.0,  # llama3_405b_512.plan:25
        steps=1200000,  # llama3_405b_512.plan:26
    )


if __name__ == "__main__":
    trainer().main()
