"""tied: lowered from tiny.plan by legoai 0.0.0.

Cluster: a100_sxm80, 2 hosts, 4 devices each, infiniband_ndr; 8 processes.
Start it with: torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 tied.py
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
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
from legoai.runtime.parallelism.styles import PlacedParameters
from legoai.specs.models.configs import GPTConfig
from legoai.specs.models.gpt import GPT

PLAN = "tied"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 1  # tiny.plan:4


def build_model() -> nn.Module:
    config = GPTConfig(
        dim=768,
        n_layers=12,
        n_heads=12,
        hidden_dim=3072,
        vocab_size=50257,
        max_seq_len=1024,
        norm_eps=1e-5,
        bias=True,
        tie_embeddings=True,
    )  # tiny.plan:2
    return GPT(config)


def build_mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (8,), mesh_dim_names=("tp",))  # tiny.plan:5


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),  # tiny.plan:8
            "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),  # tiny.plan:14
        },
    )  # tiny.plan:7
    for index in range(2):
        layer = model.layers[str(index)]
        parallelize_module(
            layer,
            mesh,
            {
                "mlp": PrepareModuleInput(
                    input_layouts=(Replicate(),),
                    desired_input_layouts=(Replicate(),),
                ),  # tiny.plan:9
                "mlp.down": PrepareModuleOutput(
                    output_layouts=(Partial(),),
                    desired_output_layouts=(Replicate(),),
                ),  # tiny.plan:13
            },
        )  # tiny.plan:7
    for index in range(2):
        layer = model.layers[str(index)]
        parallelize_module(
            layer,
            mesh,
            {
                "mlp.up": PlacedParameters(weight=Shard(0), bias=Shard(0)),  # tiny.plan:10
                "mlp.down": PlacedParameters(weight=Shard(1), bias=Replicate()),  # tiny.plan:11
            },
        )  # tiny.plan:7
    model.output.weight = model.tok_embeddings.weight  # tiny.plan:7


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    apply_tensor_parallel(model, mesh["tp"])  # tiny.plan:7
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
        with loss_parallel():  # tiny.plan:14
            with torch.autocast(training.device.type, dtype=torch.bfloat16):  # tiny.plan:16
                loss = training.loss(training.model(*batch.inputs), batch.targets)
            (loss / MICRO_BATCHES).backward()
        total += local_value(loss)
    return total / MICRO_BATCHES


def train_step(training: Training, batches: Batches) -> StepResult:
    mean_loss = forward_backward(training, batches)
    reduce_partial_gradients(training.optimizer.param_groups)  # tiny.plan:7
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
        data_axes=(),  # tiny.plan:5
        global_batch=8,  # tiny.plan:4
        micro_batch=8,  # tiny.plan:4
        seq_len=1024,  # tiny.plan:4
        vocab_size=50257,  # tiny.plan:2
        flops_per_token=854438400,  # tiny.plan:2
        peak_flops=312e12,  # tiny.plan:3
        master_dtype=torch.float32,  # tiny.plan:16
        param_dtype=torch.bfloat16,  # tiny.plan:16
        autocast_dtype=torch.bfloat16,  # tiny.plan:16
        loss_parallel=True,  # tiny.plan:14
    )


if __name__ == "__main__":
    trainer().main()
