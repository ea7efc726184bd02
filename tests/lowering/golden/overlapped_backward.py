"""tiny: lowered from tiny.plan by legoai 0.0.0.

Cluster: cpu, 1 host, 4 devices each; 4 processes.
Start it with: torchrun --nproc-per-node 4 tiny.py
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from legoai.runtime import (
    Batches,
    LossFunction,
    StepResult,
    Trainer,
    Training,
    local_value,
    reduce_loss_and_norm,
    reduce_partial_gradients,
    token_cross_entropy,
)
from legoai.runtime.parallelism.overlapped_backward import OverlappedColwise, OverlappedInput
from legoai.specs.models.configs import LlamaConfig
from legoai.specs.models.llama import Llama

PLAN = "tiny"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 4  # tiny.plan:6


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
    return init_device_mesh(device_type, (4,), mesh_dim_names=("tp",))  # tiny.plan:7


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),  # tiny.plan:8
            "norm": SequenceParallel(),  # tiny.plan:8
            "output": OverlappedColwise(
                input_layouts=Shard(1),
                output_layouts=Shard(-1),
                use_local_output=False,
            ),  # tiny.plan:8
        },
    )  # tiny.plan:8
    for layer in model.layers.values():
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),  # tiny.plan:8
                "attention": OverlappedInput("wq", "wk", "wv", input_layouts=(Shard(1), None)),  # tiny.plan:8
                "attention.wq": ColwiseParallel(),  # tiny.plan:8
                "attention.wk": ColwiseParallel(),  # tiny.plan:8
                "attention.wv": ColwiseParallel(),  # tiny.plan:8
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),  # tiny.plan:8
                "ffn_norm": SequenceParallel(),  # tiny.plan:8
                "feed_forward": OverlappedInput("w1", "w3", input_layouts=(Shard(1),)),  # tiny.plan:8
                "feed_forward.w1": ColwiseParallel(),  # tiny.plan:8
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),  # tiny.plan:8
                "feed_forward.w3": ColwiseParallel(),  # tiny.plan:8
            },
        )  # tiny.plan:8


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    apply_tensor_parallel(model, mesh["tp"])  # tiny.plan:8
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
        with loss_parallel():  # tiny.plan:8
            with torch.autocast(training.device.type, dtype=torch.bfloat16):  # default
                loss = training.loss(training.model(*batch.inputs), batch.targets)
            (loss / MICRO_BATCHES).backward()
        total += local_value(loss)
    return total / MICRO_BATCHES


def train_step(training: Training, batches: Batches) -> StepResult:
    mean_loss = forward_backward(training, batches)
    reduce_partial_gradients(training.optimizer.param_groups)  # tiny.plan:8
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
        data_axes=(),  # tiny.plan:7
        global_batch=8,  # tiny.plan:6
        micro_batch=2,  # tiny.plan:6
        seq_len=64,  # tiny.plan:6
        vocab_size=256,  # tiny.plan:3
        master_dtype=torch.float32,  # default
        param_dtype=torch.bfloat16,  # default
        autocast_dtype=torch.bfloat16,  # default
        loss_parallel=True,  # tiny.plan:8
    )


if __name__ == "__main__":
    trainer().main()
