"""Errors of other tools on the same rows, and explanations of rows with large errors.

Explanations name what the simulator, or a plan, does not state; none of them was used to change a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

PEERS: Final[Mapping[str, str]] = {
    "torchtitan": "llm-analysis, a closed form, is 41% off in memory.",
    "nanotron": "Calculon is 32.6% off in memory and 39% in step time; Megatron's own formula 45.5% in memory; "
    "llm-analysis 39.5% in memory.",
    "vtrain": "vTrain, with kernels profiled on the GPU, claims 8.4% on one host and 14.7% on several; Calculon is 39% "
    "and 15.4% off.",
    "mosaicml": "llm-analysis is 18% off in step time.",
    "simumax": "SimuMax, with operators measured on the GPU, claims 5.6% in step time, 0.46% in allocated and 1.7% in "
    "reserved memory, on runs of its authors' own.",
    "memory_single_gpu": "The dissertation claims 99%.",
    "runtime_single_gpu": "The dissertation claims 90% for its learned models, trained on kernels of such an H100.",
    "memory_distributed": "The dissertation claims at least 99%.",
    "runtime_distributed": "The dissertation claims 90%; its estimates are its measurements times a rounded accuracy, "
    "so that the two columns are not independent.",
}

EXPLAINED: Final[Mapping[str, Sequence[str]]] = {
    "torchtitan": (
        "0060 and 0061 (FSDP2 with two-way sequence parallelism, March 2024, said to checkpoint whole blocks) hold "
        "twice what recomputed blocks hold; 0062 and 0063, the same run with selective checkpointing, do not. What the "
        "code of that week kept is not known.",
        "0066 and 0067 name no settings but the defaults: one sequence on each of 8 GPUs. 0003, software of the next "
        "month with two sequences, holds 38.8 GiB more: twice that for two sequences is all that it holds, parameters "
        "and optimizer state included. The two rows do not belong to one configuration.",
        "0006 and 0007 (context parallel of 4 and 8): the measured throughput falls by more than the operations grow.",
        "405B runs with pipelines (0013 to 0018) hold 7 GiB less to 8 GiB more than predicted. What pipelines of "
        "December 2024 kept is not known.",
        "0047 to 0050 ran FSDP1, whose gathers lie in segments of another stream.",
        "Compiled runs of March 2024 (0055 to 0058) reuse buffers that today's inductor keeps.",
        "0012 to 0018 (AsyncTP with float8): inductor's pass of PyTorch 2.13 fuses the gathers of activations in "
        "float8 with the products that take them. 0012 is measured 15% slower here than as 0008 of the other table; of "
        "the same runs in 2025 (`async_tp`) the prediction is 2 to 5% off.",
        "Delayed scales (0067) are not computed.",
    ),
    "torchtitan_throughput": (
        "The same configurations as the first rows of the file above, measured at another time: the throughput of the "
        "two tables differs by up to 15%, by most for 0008.",
        "0009 and 0010 (405B on 16 pipeline ranks) do not state how many micro batches there were; as many as pipeline "
        "ranks were taken, TorchTitan's default, and larger ones hold more.",
        "0013 and 0014 are the runs with context parallelism of 4 and 8, and 0015 to 0018 those with pipelines and "
        "AsyncTP, of which is told above.",
    ),
    "simplefsdp": (
        "The traced plans run the built-in model: without rotations of complex numbers in fp32, which inductor does "
        "not compile, and without copies of repeated keys and values, both of which the runs kept for backward. All "
        "rows of SimpleFSDP without checkpointing hold more than their plan.",
        "0016, SimpleFSDP in eager mode without checkpointing: its own footnote says that this mode holds more by "
        "design of the frontend. The plan's graph holds what autograd keeps, and TorchTitan's model would "
        "add 11 GiB, as it does under FSDP2.",
        "0031 (64 GPUs, a collective for each parameter, nothing reordered): a step has 873 exposed collectives, each "
        "over 8 hosts. Against 105 that are merged for blocks (0039) the run lost 0.36 ms by each of the "
        "others, and the plan 0.08 ms. What a collective of few bytes takes between 8 hosts of that network is not "
        "published; the profile has it from another.",
        "0042 and 0044: merged and reordered, the plan frees a block's buffers as soon as it has computed, and "
        "inductor's memory of a bucket is not known.",
    ),
    "nanotron": (
        "Tensor parallelism of some rows may have been of the kind that reduces and does not scatter, which keeps "
        "more; the file does not say.",
        "The rows that miss by most have 16 or 32 tensor-parallel ranks, in both directions; at 8 and fewer the errors "
        "are a tenth.",
        "1204 holds 25.6 GiB, with 64 sequences of 4,096 on 32 tensor-parallel ranks. Without recomputation, which the "
        "sweep did not use, blocks that are parallel in the sequence keep 34 bytes for each element of their input "
        "(Korthikanti et al. 2022): 34 GiB of activations alone.",
        "nanotron's cross entropy works in place on one fp32 copy of the logits.",
    ),
    "nanotron_failed": (
        "Causes are not published: time-outs, hangs and killed jobs are among the failures, and 12 of the file's rows "
        "have figures although they failed. Recall is a lower bound.",
        "Only rows whose status says `failed` count; those with figures ran.",
    ),
    "runtime_distributed": (
        "Whether 64 or 128 GPUs ran, and how many ranks were tensor-parallel, is not stated; four were taken, as "
        "in the memory runs of that author.",
        "The text says InfiniBand and no more; the plan has an adapter of 400 Gb/s for each GPU. 0001 to 0003 and 0006 "
        "are bound by the network: their steps are about as long as its traffic takes at half of that rate. Those that "
        "compute for longer than they communicate (0004, 0005, 0007, 0008) do not miss.",
    ),
    "memory_single_gpu": (
        "T5 in half precision clamps what fp16 could not hold, and keeps masks of it; the plan says bf16, where "
        "`transformers` does not.",
    ),
    "vtrain": (
        "The misses are runs that the host bounds. Blocks of 1,024 features take 3.5 ms or more for each micro batch, "
        "however few tokens it has: Megatron's and DeepSpeed's Python, of which the plan has that of bare operators. "
        "Where the device has enough to do, steps are within a tenth.",
    ),
    "simumax": ("Transformer Engine fuses norms into the layers behind them and keeps other inputs than the plan's.",),
    "runtime_single_gpu": (
        "The rows in full precision are too long: the profile's rate for products in fp32 without TF32 rests on no "
        "measurement of an H100.",
    ),
    "mosaicml": ("Composer steps each parameter by itself, which the plan's optimizer does in lists.",),
}
