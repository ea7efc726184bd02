"""tiny: lowered from tiny.plan by legoai 0.0.0.

Cluster: cpu, 1 host, 4 devices each; 4 processes.
Start it with: torchrun --nproc-per-node 4 tiny.py
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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

from legoai.runtime import (
    Batches,
    LossFunction,
    StepResult,
    Trainer,
    Training,
    chunked_cross_entropy,
    keep_outputs,
    local_value,
    reduce_loss_and_norm,
    reduce_partial_gradients,
    wait_for_output,
)
from legoai.specs.models.configs import LlamaConfig
from legoai.specs.models.llama import Llama

PLAN = "tiny"
PLAN_HASH = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
MICRO_BATCHES = 2  # tiny.plan:6


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
    return init_device_mesh(device_type, (2, 2), mesh_dim_names=("dp_shard", "tp"))  # tiny.plan:7


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),  # tiny.plan:10
            "norm": SequenceParallel(),  # tiny.plan:18
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1),
                use_local_output=False,
            ),  # tiny.plan:19
        },
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


def apply_compile(model: nn.Module) -> None:
    wait_for_output(model.tok_embeddings)  # tiny.plan:10
    for index in range(2):
        model.layers[str(index)].compile(fullgraph=True, dynamic=False)  # tiny.plan:33


def apply_checkpoint(model: nn.Module) -> None:
    for index in range(2):
        model.layers[str(index)] = checkpoint_wrapper(
            model.layers[str(index)],
            preserve_rng_state=False,
        )  # tiny.plan:29
    for index in range(2, 4):
        model.layers[str(index)] = checkpoint_wrapper(
            model.layers[str(index)],
            context_fn=keep_outputs("attention", "alternate_matmul"),
            preserve_rng_state=False,
        )  # tiny.plan:28


def apply_compile_after_checkpoint(model: nn.Module) -> None:
    for index in range(2, 4):
        model.layers[str(index)].compile(fullgraph=True, dynamic=False)  # tiny.plan:33


def apply_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # default
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # tiny.plan:23
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # tiny.plan:24


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Change the model in place, in this order:

    1. `apply_tensor_parallel`: on unsharded parameters under the model's own paths, before modules are wrapped.
    2. `apply_compile`: before checkpointing: compiled graphs cannot contain the recomputation of DTensors.
    3. `apply_checkpoint`: before units are made, so that their hooks enclose the recomputation.
    4. `apply_compile_after_checkpoint`: after selective checkpointing, whose operators compiled graphs no longer have.
    5. `apply_fsdp`: after all wrappers, so that the hooks that gather parameters enclose them.
    """
    apply_tensor_parallel(model, mesh["tp"])  # tiny.plan:9
    apply_compile(model)  # tiny.plan:33
    apply_checkpoint(model)  # tiny.plan:27
    apply_compile_after_checkpoint(model)  # tiny.plan:33
    apply_fsdp(model, mesh["dp_shard"])  # tiny.plan:22
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
    return functools.partial(chunked_cross_entropy, pieces=4)  # tiny.plan:32


def forward_backward(training: Training, batches: Batches) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=training.device)
    for batch in batches.take(MICRO_BATCHES):
        with loss_parallel():  # tiny.plan:19
            loss = training.loss(training.model(*batch.inputs), batch.targets)
            (loss / MICRO_BATCHES).backward()
        total += local_value(loss)
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
        build_optimizer=build_optimizer,
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
        attention_kernel=SDPBackend.FLASH_ATTENTION,  # tiny.plan:31
        loss_parallel=True,  # tiny.plan:19
    )


if __name__ == "__main__":
    trainer().main()
