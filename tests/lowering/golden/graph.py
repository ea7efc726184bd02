"""graph: lowered from tiny.plan by legoai 0.0.0.

Cluster: h100_sxm, 2 hosts, infiniband_ndr; 16 processes.
Start it with: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 graph.py
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from legoai.lowering.graph import (
    StepGraph,
    bucket_units,
    deduplicate_unshards,
    keep_activations,
    keep_unsharded,
    offload_activations,
    offload_optimizer_state,
    overlap_communication,
    reshard_after_forward,
    rewritten,
    shard_unit,
    trace_step,
    unshard_selectively,
)
from legoai.runtime import (
    Batch,
    Batches,
    LossFunction,
    StepResult,
    Trainer,
    Training,
    clip_gradients,
    keep_outputs,
    reduce_loss_and_norm,
    token_cross_entropy,
)
from legoai.specs.models.configs import LlamaConfig
from legoai.specs.models.llama import Llama

PLAN = "graph"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 2  # tiny.plan:4
PASSES = (
    deduplicate_unshards,  # tiny.plan:7
    keep_activations,  # tiny.plan:12
    reshard_after_forward,  # tiny.plan:8
    bucket_units,  # tiny.plan:11
    overlap_communication,  # tiny.plan:11
    partial(offload_optimizer_state, most=21474836480, moments=2),  # tiny.plan:14
    partial(offload_activations, limit=75161927680, moments=2),  # tiny.plan:14
    partial(unshard_selectively, limit=75161927680, moments=2),  # tiny.plan:11
    keep_unsharded,  # tiny.plan:11
)


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


def apply_checkpoint(model: nn.Module) -> None:
    for name, layer in model.layers.items():
        model.layers[name] = checkpoint_wrapper(
            layer,
            context_fn=keep_outputs("attention", "alternate_matmul"),
            preserve_rng_state=False,
        )  # tiny.plan:12


def apply_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # tiny.plan:13
    for index in range(2, 32):
        shard_unit(model.layers[str(index)], mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # tiny.plan:8
    shard_unit(
        [model.layers[str(index)] for index in range(2)],
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=True,
    )  # tiny.plan:11
    shard_unit(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # tiny.plan:9


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Change the model in place, in this order:

    1. `apply_checkpoint`: before units are made, so that their hooks enclose the recomputation.
    2. `apply_fsdp`: after all wrappers, so that the hooks that gather parameters enclose them.
    """
    apply_checkpoint(model)  # tiny.plan:12
    apply_fsdp(model, mesh["dp_shard"])  # tiny.plan:7
    return model


def build_optimizer(parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=3e-4,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.01,
        fused=True,
    )  # tiny.plan:16


def build_loss() -> LossFunction:
    return token_cross_entropy  # default


def build_graph(model: nn.Module, loss: LossFunction, batch: Batch) -> StepGraph:
    graph = trace_step(model, loss, batch.inputs, batch.targets, micro_batches=MICRO_BATCHES)  # tiny.plan:7
    return rewritten(graph, PASSES)


def forward_backward(training: Training, batches: Batches) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=training.device)
    for batch in batches.take(MICRO_BATCHES):
        total += training.step_graph(
            batch.inputs,
            batch.targets,
            optimizer=training.optimizer,  # tiny.plan:14
            is_last=batch.is_last,
        )
    return total / MICRO_BATCHES


def train_step(training: Training, batches: Batches) -> StepResult:
    mean_loss = forward_backward(training, batches)
    result = reduce_loss_and_norm(training, mean_loss)
    training.step_graph.reshard()  # tiny.plan:11
    if training.may_update(result):
        clip_gradients(training.optimizer.param_groups, max_norm=1.0, total_norm=result.norm)  # tiny.plan:17
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
        build_graph=build_graph,
        train_step=train_step,
        data_axes=("dp_shard",),  # tiny.plan:5
        global_batch=64,  # tiny.plan:4
        micro_batch=2,  # tiny.plan:4
        seq_len=8192,  # tiny.plan:4
        vocab_size=128256,  # tiny.plan:2
        flops_per_token=57912852480,  # tiny.plan:2
        peak_flops=989.4e12,  # tiny.plan:3
        master_dtype=torch.float32,  # tiny.plan:13
        param_dtype=torch.bfloat16,  # tiny.plan:13
        reduce_dtype=torch.float32,  # tiny.plan:13
        clip_norm=1.0,  # tiny.plan:17
    )


if __name__ == "__main__":
    trainer().main()
