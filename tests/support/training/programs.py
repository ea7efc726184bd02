"""A small Llama-shaped model and trainers for it on several meshes, in the form of a lowered program."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from legoai.runtime import Trainer, local_value, reduce_loss_and_norm, warmup_schedule
from legoai.runtime.loss import loss_context
from legoai.runtime.optimizer.clip import clip_gradients, reduce_partial_gradients
from legoai.runtime.parallelism.overlapped_backward import OverlappedColwise, OverlappedInput
from legoai.runtime.parallelism.units import reshard_units

DIM, HEADS, HIDDEN, VOCABULARY, LAYERS = 32, 4, 64, 256, 2


def rotary(positions: int, head_dim: int) -> torch.Tensor:
    frequencies = 1.0 / 10000 ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (w(x).view(batch, sequence, -1, DIM // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = self._rotate(q, table), self._rotate(k, table)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, sequence, -1))

    def _rotate(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        cos, sin = table[:, : x.shape[2]].to(x.dtype)
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.ffn_norm(x))


class TinyLlama(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(LAYERS)})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("table", torch.empty(2, 64, DIM // HEADS // 2, dtype=torch.float64), persistent=False)

    def init_buffers(self) -> None:
        self.table.copy_(rotary(64, DIM // HEADS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.table)
        return self.output(self.norm(x))


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, overlap: bool = False) -> None:
    if overlap:
        output = OverlappedColwise(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        attention = OverlappedInput("wq", "wk", "wv", input_layouts=(Shard(1), None))
        feed_forward = OverlappedInput("w1", "w3", input_layouts=(Shard(1),))
    else:
        output = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        attention = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
        feed_forward = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": output,
        },
    )
    for layer in model.layers.values():
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": attention,
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": feed_forward,
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def apply_plain_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Without sequence parallel: the norms stay plain tensors beside DTensors."""
    for layer in model.layers.values():
        parallelize_module(
            layer,
            mesh,
            {
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(),
            },
        )


def apply_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def step_of(
    micro_batches: int,
    *,
    clip_norm: float | None = None,
    loss_parallel: bool = False,
    reduce_last: bool = False,
    autocast_dtype: torch.dtype | None = None,
):
    """Return the step of a model that is no pipeline, as a lowered program writes it for a plan."""

    def forward_backward(training, batches):
        total = torch.zeros((), dtype=torch.float64, device=training.device)
        for batch in batches.take(micro_batches):
            if reduce_last:
                training.model.set_requires_gradient_sync(batch.is_last)
                training.model.set_is_last_backward(batch.is_last)
            with loss_context(parallel=loss_parallel):
                casts = torch.autocast(training.device.type, dtype=autocast_dtype) if autocast_dtype else nullcontext()
                with casts:
                    loss = training.loss(training.model(*batch.inputs), batch.targets)
                (loss / micro_batches).backward()
            total += local_value(loss)
        return total / micro_batches

    def train_step(training, batches):
        mean_loss = forward_backward(training, batches)
        groups = training.optimizer.param_groups
        reduce_partial_gradients(groups)
        result = reduce_loss_and_norm(training, mean_loss)
        reshard_units(training.model)
        if training.may_update(result):
            if clip_norm is not None:
                clip_gradients(groups, max_norm=clip_norm, total_norm=result.norm)
            training.optimizer.step()
        training.optimizer.zero_grad()
        if training.scheduler is not None:
            training.scheduler.step()
        return result

    return train_step


def trainer(
    *,
    dp_shard: int = 1,
    tp: int = 1,
    sequence_parallel: bool = True,
    overlap: bool = False,
    checkpoint: bool = False,
    dtype: torch.dtype = torch.float64,
    global_batch: int = 8,
    micro_batch: int = 2,
    lr: float = 1e-2,
    fused: bool = True,
    plan: str = "tiny",
    plan_hash: str = "sha256:test",
    tied: bool = False,
    reduce_last: bool = False,
    replicas: int = 1,
) -> Trainer:
    """Return a trainer on a (dp_shard, tp) mesh; an axis of size 1 is left out, as lowering leaves it out."""
    loss_parallel = tp > 1 and sequence_parallel
    axes = {name: size for name, size in {"dp_shard": dp_shard, "tp": tp}.items() if size > 1} or {"dp_shard": 1}

    def build_mesh(device_type: str) -> DeviceMesh:
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if tp > 1:
            if sequence_parallel:
                apply_tensor_parallel(model, mesh["tp"], overlap=overlap)
            else:
                apply_plain_tensor_parallel(model, mesh["tp"])
        if checkpoint:
            for name, layer in model.layers.items():
                model.layers[name] = checkpoint_wrapper(layer)
        if dp_shard > 1:
            apply_fsdp(model, mesh["dp_shard"])
        return model

    return Trainer(
        plan=plan,
        plan_hash=plan_hash,
        build_model=lambda: TinyLlama(tied=tied),
        build_mesh=build_mesh,
        parallelize=parallelize,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), fused=fused),
        build_lr_scheduler=lambda optimizer: warmup_schedule(optimizer, warmup=2, steps=10, floor=0.1),
        train_step=step_of(
            global_batch // (micro_batch * dp_shard * replicas),
            clip_norm=1.0,
            loss_parallel=loss_parallel,
            reduce_last=reduce_last,
        ),
        data_axes=("dp_shard",) if "dp_shard" in axes else (),
        global_batch=global_batch,
        micro_batch=micro_batch,
        seq_len=32,
        master_dtype=dtype,
        loss_parallel=loss_parallel,
        seed=0,
    )
