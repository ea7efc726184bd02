"""Host time of layers of Megatron-DeepSpeed: `python -m benchmarks.megatron_host FOLDER`.

FOLDER is a checkout of https://github.com/microsoft/Megatron-DeepSpeed at `f01c9e6`, of June 2023, as it trained when
vTrain's runs were measured. Its own `ParallelTransformer` runs on the CPU with its own checkpoints, one rank of a group
without other processes, so small that only the host's work takes time. Stand-ins replace what needs a GPU: the fused
norm and softmax are the same autograd functions around torch's kernels, and the accelerator of DeepSpeed is the
processor, with its random generator.

`forward_ratio` is the time of a layer in forward over that of its kernels, each with the time of a kernel in forward of
our GPT; `backward_ratio` is the same of its backward, recomputation included. Only these ratios are used, for plans of
Megatron-DeepSpeed's runs (`validation/predict.py`). TorchScript's functions are not fused on a CPU: their kernels count
one by one on both sides.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.machine import about_machine, write_rows
from benchmarks.validation.megatron_models import Norm

from legoai.cost.calibration.host import SMALL, HostTimer, issued_kernels
from legoai.cost.trace.garbage import uncollected
from legoai.runtime.torch_internals.distributed.fake_world import FakeStore
from legoai.specs.models.families import resolve_config
from legoai.specs.models.gpt import GPT

RESULTS = Path(__file__).parent / "results" / "megatron_host.json"
RANKS = (1, 2, 8)
LAYERS = 8
HEADS, WIDTH, TOKENS = 4, 4, 20
"""Heads of a rank, the features of each, and tokens: the fewest with which Megatron uses its fused softmax."""


class _Accelerator:
    """DeepSpeed's accelerator, of the processor."""

    FloatTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor

    def device_name(self, _: Any = None) -> str:
        return "cpu"

    def current_device_name(self) -> str:
        return "cpu"

    def current_device(self) -> int:
        return 0

    def default_generator(self, _: int) -> torch.Generator:
        return torch.default_generator

    def get_rng_state(self) -> torch.Tensor:
        device = torch.device("cpu")
        index = self.current_device() if device.index is None else device.index
        return self.default_generator(index).get_state()

    def lazy_call(self, call: Any) -> None:
        call()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)


def _module(name: str, **names: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(names)
    sys.modules.update({name: made})
    return made


def _transformer(folder: Path, ranks: int) -> torch.nn.Module:
    """Megatron's transformer of one rank."""
    accelerator = _Accelerator()
    off = {"is_configured": lambda: False}
    _module("deepspeed.accelerator", get_accelerator=lambda: accelerator)
    _module("deepspeed.moe")
    _module("deepspeed.moe.layer", MoE=object)
    _module("deepspeed.runtime")
    inner = _module("deepspeed.runtime.activation_checkpointing.checkpointing", **off)
    _module("deepspeed.runtime.activation_checkpointing", checkpointing=inner)
    _module("deepspeed", checkpointing=_module("deepspeed.checkpointing", **off))
    width = HEADS * WIDTH * ranks
    arguments = types.SimpleNamespace(
        hidden_size=width, ffn_hidden_size=2 * width, kv_channels=WIDTH, num_attention_heads=HEADS * ranks,
        num_layers=LAYERS, bias_gelu_fusion=True, openai_gelu=False, onnx_safe=False, fp16=True, bf16=False,
        apply_query_key_layer_scaling=False, attention_softmax_in_fp32=False, masked_softmax_fusion=True,
        attention_dropout=0.1, hidden_dropout=0.1, bias_dropout_fusion=True, layernorm_epsilon=1e-5,
        apply_residual_connection_post_layernorm=False, fp32_residual_connection=False, checkpoint_activations=True,
        checkpoint_num_layers=1, ds_inference=False, virtual_pipeline_model_parallel_size=None, expert_interval=2,
        params_dtype=torch.float32, use_cpu_initialization=True,
    )  # fmt: skip
    _module("megatron", get_args=lambda: arguments).__path__ = [str(folder / "megatron")]
    _module("megatron.model", LayerNorm=Norm).__path__ = [str(folder / "megatron" / "model")]
    _module(
        "scaled_upper_triang_masked_softmax_cuda",
        forward=lambda x, _: torch.ops.aten._softmax(x, -1, False),
        backward=lambda grad, shares, _: torch.ops.aten._softmax_backward_data(grad, shares, -1, shares.dtype),
    )
    mpu = importlib.import_module("megatron.mpu")
    mpu.initialize_model_parallel(ranks, 1)
    names = ("utils", "enums", "transformer")
    utils, enums, layers = (importlib.import_module(f"megatron.model.{name}") for name in names)
    initialize = utils.init_method_normal(0.02)
    made: torch.nn.Module = layers.ParallelTransformer(
        initialize, initialize, layer_type=enums.LayerType.encoder, self_attn_mask_type=enums.AttnMaskType.causal
    )
    mpu.model_parallel_cuda_manual_seed(1)
    return made


class _Hidden(torch.nn.Module):
    """A transformer of hidden states, which returns nothing else."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers, each in a checkpoint."""
        mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool)
        hidden: torch.Tensor = self.transformer(x, mask)[0]
        return hidden


def measured(folder: Path, ranks: int) -> dict[str, Any]:
    """Times of a layer on one of some tensor parallel ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    model, timer = _Hidden(_transformer(folder, ranks)), HostTimer(clock=time.process_time)
    x = torch.randn(1, TOKENS, HEADS * WIDTH * ranks, requires_grad=True)
    own = GPT(resolve_config("gpt3", "1.3b", SMALL))  # type: ignore[arg-type]
    tokens = torch.zeros(1, SMALL["max_seq_len"], dtype=torch.int64)
    with uncollected():
        model(x).sum().backward()
        model.zero_grad()
        loss = model(x).sum()
        first, second = issued_kernels(lambda: model(x)), issued_kernels(loss.backward)
        forward, backward = timer.forward(model, x) * first, timer.backward(model, x) * second
        python, node = timer.forward(own, tokens), timer.backward(own, tokens)
    again = second - first
    return {
        "ranks": ranks,
        "forward_us": forward / LAYERS * 1e6,
        "backward_us": backward / LAYERS * 1e6,
        "kernels": first / LAYERS,
        "kernels_in_backward": again / LAYERS,
        "python_us": python * 1e6,
        "node_us": node * 1e6,
        "forward_ratio": forward / (first * python),
        "backward_ratio": backward / (first * python + again * node),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.megatron_host", description=description)
    parser.add_argument("folder", type=Path, help="checkout of Megatron-DeepSpeed")
    parser.add_argument("--write", action="store_true", help="update the results")
    options = parser.parse_args(arguments)
    about, rows = about_machine(), []
    for ranks in RANKS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(measured, (options.folder, ranks))
        print(", ".join(f"{name} {value:.2f}" for name, value in row.items()), flush=True)
        rows.append(row)
    if options.write:
        write_rows(RESULTS, about, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
