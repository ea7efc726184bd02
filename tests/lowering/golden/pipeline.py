"""tiny: lowered from tiny.plan by legoai 0.0.0.

Cluster: cpu, 1 host, 4 devices each; 8 processes.
Start it with: torchrun --nproc-per-node 8 tiny.py
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from legoai.runtime import (
    Batches,
    LossFunction,
    Pipeline,
    RecomputingStage,
    StepResult,
    Trainer,
    Training,
    add_losses,
    divided,
    reduce_loss_and_norm,
    reduce_partial_gradients,
    token_cross_entropy,
)
from legoai.specs.models.configs import LlamaConfig
from legoai.specs.models.llama import Llama

PLAN = "tiny"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 16  # tiny.plan:6
STAGES = (
    ("tok_embeddings", "layers.0"),
    ("layers.1", "layers.2"),
    ("layers.3", "layers.4"),
    ("layers.5", "norm", "output"),
)  # tiny.plan:30
STAGES_OF_RANK = ((0, 3), (1, 2))  # tiny.plan:29


def build_model() -> nn.Module:
    config = LlamaConfig(
        dim=128,
        n_layers=6,
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
    return init_device_mesh(device_type, (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))  # tiny.plan:7


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    if model.tok_embeddings is not None:
        parallelize_module(
            model.tok_embeddings,
            mesh,
            RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),  # tiny.plan:10
        )  # tiny.plan:9
    if model.norm is not None:
        parallelize_module(
            model.norm,
            mesh,
            SequenceParallel(),  # tiny.plan:18
        )  # tiny.plan:9
    if model.output is not None:
        parallelize_module(
            model.output,
            mesh,
            ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),  # tiny.plan:19
        )  # tiny.plan:9
    for layer in model.layers.values():
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),  # tiny.plan:11
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None),
                    desired_input_layouts=(Replicate(), None),
                ),  # tiny.plan:12
                "attention.wq": ColwiseParallel(),  # tiny.plan:13
                "attention.wk": ColwiseParallel(),  # tiny.plan:13
                "attention.wv": ColwiseParallel(),  # tiny.plan:13
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),  # tiny.plan:14
                "ffn_norm": SequenceParallel(),  # tiny.plan:11
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),),
                    desired_input_layouts=(Replicate(),),
                ),  # tiny.plan:15
                "feed_forward.w1": ColwiseParallel(),  # tiny.plan:16
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),  # tiny.plan:17
                "feed_forward.w3": ColwiseParallel(),  # tiny.plan:16
            },
        )  # tiny.plan:9


def apply_checkpoint(model: nn.Module) -> None:
    for index in range(1, 6, 2):
        if str(index) in model.layers:
            model.layers[str(index)] = checkpoint_wrapper(
                model.layers[str(index)],
                preserve_rng_state=False,
            )  # tiny.plan:35
    if model.norm is not None:
        model.norm = checkpoint_wrapper(model.norm, preserve_rng_state=False)  # tiny.plan:36


def apply_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # tiny.plan:38
    for index in range(2):
        if str(index) in model.layers:
            layer = model.layers[str(index)]
            fully_shard(layer.attention, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # tiny.plan:24
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # tiny.plan:23
    for index in range(2, 6):
        if str(index) in model.layers:
            fully_shard(
                model.layers[str(index)],
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=False,
            )  # tiny.plan:23
    if model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # tiny.plan:25
    if model.output is not None:
        fully_shard(model.output, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # tiny.plan:25
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # tiny.plan:22


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Change the model in place, in this order:

    1. `apply_tensor_parallel`: on unsharded parameters under the model's own paths, before modules are wrapped.
    2. `apply_checkpoint`: before units are made, so that their hooks enclose the recomputation.
    3. `apply_fsdp`: after all wrappers, so that the hooks that gather parameters enclose them.
    """
    apply_tensor_parallel(model, mesh["tp"])  # tiny.plan:9
    apply_checkpoint(model)  # tiny.plan:34
    apply_fsdp(model, mesh["dp_shard"])  # tiny.plan:22
    return model


def build_stage(model: nn.Module, index: int, mesh: DeviceMesh, device: torch.device) -> PipelineStage:
    tokens = torch.empty((1, 256), dtype=torch.int64, device="meta")  # tiny.plan:6
    hidden = torch.empty((1, 128, 128), dtype=torch.bfloat16, device="meta", requires_grad=True)  # tiny.plan:6
    logits = torch.empty((1, 256, 256), dtype=torch.bfloat16, device="meta", requires_grad=True)  # tiny.plan:6
    return RecomputingStage(
        model,
        index,
        len(STAGES),
        device,
        input_args=tokens if index == 0 else hidden,
        output_args=logits if index == len(STAGES) - 1 else hidden,
        group=mesh.get_group("pp"),
    )  # tiny.plan:28


def build_schedule(stages: list[PipelineStage], loss: LossFunction) -> ScheduleZBVZeroBubble:
    share = divided(loss, by=MICRO_BATCHES)
    return ScheduleZBVZeroBubble(stages, n_microbatches=8, loss_fn=share, scale_grads=False)  # tiny.plan:29


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
    for batch in batches.take(MICRO_BATCHES, together=8):
        losses: list[torch.Tensor] = []
        with loss_parallel():  # tiny.plan:19
            training.schedule.step(*batch.inputs, target=batch.targets, losses=losses, return_outputs=False)
        add_losses(total, losses, scale=MICRO_BATCHES)
    return total / MICRO_BATCHES


def train_step(training: Training, batches: Batches) -> StepResult:
    mean_loss = forward_backward(training, batches)
    reduce_partial_gradients(training.optimizer.param_groups)  # tiny.plan:9
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
        pipeline=Pipeline(
            stages=STAGES,
            stages_of_rank=STAGES_OF_RANK,
            microbatches=8,
            build_stage=build_stage,
            build_schedule=build_schedule,
        ),  # tiny.plan:28
        build_optimizer=build_optimizer,
        build_loss=build_loss,
        train_step=train_step,
        data_axes=("dp_shard",),  # tiny.plan:7
        global_batch=32,  # tiny.plan:6
        micro_batch=1,  # tiny.plan:6
        seq_len=256,  # tiny.plan:6
        vocab_size=256,  # tiny.plan:3
        master_dtype=torch.float32,  # tiny.plan:38
        param_dtype=torch.bfloat16,  # tiny.plan:38
        reduce_dtype=torch.float32,  # tiny.plan:38
        loss_parallel=True,  # tiny.plan:19
    )


if __name__ == "__main__":
    trainer().main()
