"""Description of a training from a lowered program: the objects to build, and how to take a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend

from legoai.runtime.attention.blocks import Balance
from legoai.runtime.loss import LossFunction, token_cross_entropy
from legoai.runtime.optimizer.parameter_groups import ParameterGroups
from legoai.runtime.training.batches import Batch, Batches
from legoai.runtime.training.state import StepFunction, StepResult, Training
from legoai.specs.models.reads import Reads, Tokens

if TYPE_CHECKING:
    from legoai.runtime.parallelism.pipeline import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that a lowered program specifies.

    Attributes:
        plan: the plan's name.
        plan_hash: the plan's hash; in metrics and checkpoints.
        device_type: `cuda` or `cpu`, the device of the training unless the command line specifies one; None takes a GPU
            where there is one.
        build_model: makes the model; called under `torch.device("meta")`.
        factory: the `model` of the plan where a factory makes it, which has no config to compare; empty elsewhere.
        build_mesh: makes the device mesh from a device type.
        parallelize: applies tensor parallel, checkpointing, compile and data sharding to the model, and
            returns it.
        pipeline: how the model is split into stages, and their schedule; None keeps it whole. `parallelize` then
            gets each stage of a rank by itself.
        build_optimizer: makes the optimizer of all parameters.
        build_lr_scheduler: makes the schedule from the optimizer; None keeps the optimizer's learning rate.
        build_loss: makes the loss of one micro batch.
        build_model_loss: makes it from the parallelized model, of which the loss computes a part; None where
            `build_loss` does.
        build_graph: builds the graph of forward, loss and backward for micro batches like the given one; None where
            `train_step` calls the model.
        train_step: takes one optimizer step: forward and backward of all micro batches of this rank, and the update.
        data_axes: mesh axes whose ranks read different samples, outermost first.
        context_axis: mesh axis whose ranks read different tokens of the same samples, or None. The model's forward then
            has a parameter `positions`, the positions of its tokens in their sequence, int64 [tokens].
        context_balance: which tokens each rank of `context_axis` reads, as for `local_positions`.
        global_batch: samples in one optimizer step.
        ramp: stages of smaller batches before it: the step until which each lasts, and its samples.
        micro_batch: samples in one forward of one rank.
        seq_len: tokens in a sequence, and in each text of a sample; 0 where a sample has none.
        vocab_size: number of tokens that the model knows, where it reads text; None where that is not known.
        flops_per_token: floating-point operations of the model, without recomputation; 0 where that is not known.
        peak_flops: operations per second of the plan's device in products of its dtype; 0 where that is not known.
        reads: the model's inputs and outputs.
        master_dtype: in which parameters are stored.
        param_dtype: in which forward and backward compute. Checkpoints record it, the next and `clip_norm`, which the
            other functions here apply; None where it is not stated.
        reduce_dtype: in which the gradients of units are reduced.
        autocast_dtype: of matrix products where no FSDP unit carries the mixed precision policy; None for
            none. It is for validation and for the stages of a pipeline; `train_step` has its own.
        attention_kernel: the only kernel of scaled dot-product attention; None leaves the choice to PyTorch.
        loss_parallel: whether logits arrive as a DTensor sharded on the vocabulary. It is for validation; `train_step`
            has its own.
        offload_parameters: whether parameters, gradients and optimizer state are in host memory, from which
            `fully_shard` brings them; the optimizer then runs on the host.
        allocator_settings: of a GPU's allocator, as for `PYTORCH_ALLOC_CONF`; empty keeps the environment's.
        clip_norm: the bound to which `train_step` clips the gradient's norm; None for none.
        seed: of weights, data order and dropout.
        steps: of the whole training; this and the following are defaults of the command line.
        data: what is trained on: see `RunOptions`.
        data_field: the field of a JSONL object, or the column of a Parquet file, that holds the text.
        tokenizer: the file of a tokenizer, or its folder; empty trains on bytes.
        load_weights: the folder whose weights a new training starts with; empty draws them.
        save_every: steps between checkpoints; 0 saves only at the end.
        save_async: write checkpoints beside the training.
        keep: complete checkpoints kept; 0 keeps all.
        evaluate_every: steps between validations; 0 for none.
        evaluate_batches: micro batches per rank in one validation.
    """

    plan: str
    plan_hash: str
    device_type: str | None = None
    build_model: Callable[[], nn.Module]
    factory: str = ""
    build_mesh: Callable[[str], DeviceMesh]
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module]
    build_optimizer: Callable[[ParameterGroups], torch.optim.Optimizer]
    build_lr_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LambdaLR] | None = None
    build_loss: Callable[[], LossFunction] = lambda: token_cross_entropy
    build_model_loss: Callable[[nn.Module], LossFunction] | None = None
    build_graph: Callable[[nn.Module, LossFunction, Batch], StepFunction] | None = None
    train_step: Callable[[Training, Batches], StepResult]
    pipeline: Pipeline | None = None
    data_axes: tuple[str, ...] = ()
    context_axis: str | None = None
    context_balance: Balance = "head_tail"
    global_batch: int
    ramp: tuple[tuple[int, int], ...] = ()
    micro_batch: int
    seq_len: int = 0
    vocab_size: int | None = None
    flops_per_token: int = 0
    peak_flops: float = 0.0
    reads: Reads = field(default_factory=Tokens)
    master_dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    attention_kernel: SDPBackend | None = None
    loss_parallel: bool = False
    offload_parameters: bool = False
    allocator_settings: str = ""
    clip_norm: float | None = None
    seed: int = 0
    steps: int = 1000
    data: str = "python"
    data_field: str = "text"
    tokenizer: str = ""
    load_weights: str = ""
    save_every: int = 0
    save_async: bool = False
    keep: int = 3
    evaluate_every: int = 0
    evaluate_batches: int = 8

    def utilization(self, tokens_per_second: float) -> float | None:
        """Return the model FLOPs utilization (MFU) of a device for a rate of training; None where FLOPs are unknown."""
        known = self.flops_per_token and self.peak_flops
        return tokens_per_second * self.flops_per_token / self.peak_flops if known else None

    def global_batch_at(self, step: int) -> int:
        """Return the samples in an optimizer step, counted from 0."""
        return next((samples for until, samples in self.ramp if step < until), self.global_batch)
