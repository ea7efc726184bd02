"""Errors of other tools on the same rows, and explanations of rows with large errors.

Explanations name what the simulator or a plan does not model; none of them was used to change a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

PEERS: Final[Mapping[str, str]] = {
    "torchtitan": "llm-analysis, a closed form, has an error of 41% in memory.",
    "nanotron": "Errors: Calculon 32.6% in memory and 39% in step time, Megatron's own formula 45.5% in memory, "
    "llm-analysis 39.5% in memory.",
    "vtrain": "vTrain, with kernels profiled on the GPU, states errors of 8.4% on one host and 14.7% on several; "
    "Calculon has 39% and 15.4%.",
    "mosaicml": "llm-analysis has an error of 18% in step time.",
    "simumax": "SimuMax, with operators measured on the GPU, states errors of 5.6% in step time, 0.46% in allocated "
    "and 1.7% in reserved memory, on runs of its authors.",
    "memory_single_gpu": "The dissertation states an accuracy of 99%.",
    "runtime_single_gpu": "The dissertation states an accuracy of 90% for its learned models, trained on kernels "
    "of an H100.",
    "memory_distributed": "The dissertation states an accuracy of at least 99%.",
    "runtime_distributed": "The dissertation states an accuracy of 90%; its estimates are its measurements times "
    "a rounded accuracy, so that the two columns are not independent.",
}

EXPLAINED: Final[Mapping[str, Sequence[str]]] = {
    "torchtitan": (
        "0060 and 0061 (FSDP2 with two-way sequence parallelism, March 2024, published as checkpointing whole blocks) "
        "hold twice the memory of recomputed blocks; 0062 and 0063, the same run with selective checkpointing, hold "
        "10 GiB more than predicted. It is not known which tensors the code of that week saved. Until 30 November 2026 "
        "the plans of 0062 and 0063 kept all collectives, where TorchTitan names reduce-scatter alone.",
        "0066 and 0067 (November 2024) compiled the loss, which holds no copy of the logits in fp32; until 30 November "
        "2026 their plans computed it eagerly, and held 28% more than the runs.",
        "0006 and 0007 (context parallel of 4 and 8): the measured throughput falls by more than the operations grow.",
        "405B runs with pipelines (0013 to 0018) hold 4 to 15 GiB more than predicted. It is not known which tensors "
        "pipelines of December 2024 saved, nor what launched these runs on 64 hosts.",
        "0047 to 0050 ran FSDP1, whose all-gathers use memory segments of another stream.",
        "Compiled runs of March 2024 (0055 to 0058) reuse buffers that today's inductor keeps.",
        "Runs since November 2024 (0001 to 0018, 0066 and 0067) are assumed to have had expandable segments, which "
        "TorchTitan's script sets. Without them 0012, of which AsyncTP's pieces leave gaps in the segments, would be "
        "predicted to reserve 21% more than it did. The first tables of `torchtitan_throughput` came before the script "
        "set them; where the configurations are equal they reserved as much, to 2.3%, so that their authors may have "
        "set them too.",
        "0012 to 0018 (AsyncTP with float8): inductor's pass of PyTorch 2.13 fuses the gathers of activations in "
        "float8 with the products that read them. 0012 is measured 15% slower here than as 0008 of the other table.",
        "Delayed scales (0067) are not modelled.",
    ),
    "torchtitan_throughput": (
        "The same configurations as the first rows of the file above, measured at another time: the throughput of the "
        "two tables differs by up to 15%, most for 0008.",
        "0001 to 0010 came before TorchTitan's script set expandable segments, and their plans state none. 0008 "
        "reserved what 0012 of the file above did, to 0.1 GiB, and is predicted to reserve 21% more: its authors may "
        "have set them.",
        "0009 and 0010 (405B on 16 pipeline ranks) do not state the number of micro batches. The plans have as many as "
        "pipeline ranks, TorchTitan's default; with fewer, larger ones the runs would hold more.",
        "0013 and 0014 are the runs with context parallelism of 4 and 8, and 0015 to 0018 those with pipelines and "
        "AsyncTP, described above.",
    ),
    "async_tp": (
        "0009, 0010, 0015 and 0016 (float8 with scales of rows): CUTLASS's kernels of 2025 are slower than cuBLAS's "
        "for scales of tensors, whose times the plans have; pytorch/torchtitan#1207 is about them.",
        "0013 and 0014 (8B in float8 on eight ranks of tensor parallelism) take 12 and 14% longer than predicted, the "
        "same runs in bf16 (0011 and 0012) 2 and 6%. It is not known which kernels take the difference.",
    ),
    "torchtitan_2025": (
        "0001 to 0003 and 0013 to 0015 are three plans, each published twice, in February and March 2025: the same "
        "memory to 0.5 GiB, and throughput that differs by 5 to 7%. H100s of 96 GB are not one machine.",
        "0003, 0007 and 0014 have float8 with scales of rows, whose kernels of 2025 are slower than those for scales "
        "of tensors.",
        "0008 (Qwen3 32B on one host) ran a quarter faster than predicted with the power limit of 500 W, which is "
        "assumed. With `h100_sxm`, of 700 W, its step is predicted 1.8% too short.",
        "0009 to 0011 (Qwen3 32B under tensor parallelism, not compiled) gathered queries and keys of all ranks for "
        "their norms (`NoParallel`); a plan's ranks compute those of their own heads.",
    ),
    "simplefsdp": (
        "The graph backend casts gradients where it fills the buffer of their reduction. SimpleFSDP's program had an "
        "operation for that: some 2.5% of a step.",
        "The traced plans run the built-in model: without rotations of complex numbers in fp32, which inductor does "
        "not compile, and without copies of repeated keys and values, both of which the runs saved for backward. All "
        "rows of SimpleFSDP without checkpointing hold more than their plan.",
        "0016, SimpleFSDP in eager mode without checkpointing: the paper's footnote states that this mode holds more "
        "by design of the frontend. The plan's graph holds the tensors that autograd keeps, and TorchTitan's model "
        "would add 11 GiB, as it does under FSDP2.",
        "0031 (64 GPUs, a collective for each parameter, nothing reordered): a step has 873 exposed collectives, each "
        "over 8 hosts. Compared with 105 merged ones, one for each block (0039), each additional collective costs the "
        "run 0.36 ms, and the plan 0.08 ms. The time of small collectives between 8 hosts of that network is not "
        "published; the profile has that of another network.",
        "0042 and 0044: merged and reordered, the plan frees a block's buffers as soon as it has computed, and "
        "inductor's memory of a bucket is not known.",
    ),
    "nanotron": (
        "Some rows may have used tensor parallelism with all-reduces instead of reduce-scatters, which saves more "
        "activations; the file does not state it.",
        "The rows with the largest errors have 16 or 32 tensor-parallel ranks, in both directions; at 8 and fewer the "
        "errors are about 10%.",
        "1204 holds 25.6 GiB, with 64 sequences of 4,096 on 32 tensor-parallel ranks. Without recomputation, which the "
        "sweep did not use, blocks under sequence parallelism save 34 bytes for each element of their input "
        "(Korthikanti et al. 2022): 34 GiB of activations alone.",
        "nanotron's cross entropy works in place on one fp32 copy of the logits.",
    ),
    "nanotron_failed": (
        "Causes are not published: time-outs, hangs and killed jobs are among the failures, and 12 of the file's rows "
        "have figures although they failed. Recall is a lower bound.",
        "Only rows with the status `failed` count; those with figures ran.",
    ),
    "runtime_distributed": (
        "Whether 64 or 128 GPUs ran, and how many ranks were tensor-parallel, is not stated; the plans assume four, as "
        "in the memory runs of that author.",
        "The text states InfiniBand and no rate; the plan has an adapter of 400 Gb/s for each GPU. 0001 to 0003 and "
        "0006 are bound by the network: their steps take about as long as their traffic at half of that rate. Rows "
        "that compute for longer than they communicate (0004, 0005, 0007, 0008) have small errors.",
    ),
    "memory_single_gpu": (
        "T5 in half precision clamps values beyond the range of fp16, and saves the masks; the plan states bf16, where "
        "`transformers` does not clamp.",
    ),
    "vtrain": (
        "The rows with large errors are host-bound. Blocks of 1,024 features take 3.5 ms or more for each micro batch, "
        "however few tokens it has: this is host time of Megatron and DeepSpeed, and the plan has that of its own "
        "kernels and of torch's checkpoints. Predictions of device-bound rows are 11% too short to 18% too long; with "
        "micro batches of 2,048 to 4,096 tokens they are too long.",
    ),
    "simumax": (
        "Transformer Engine fuses norms into the layers after them and saves other inputs than the plan.",
        "Steps of DeepSeek-V2 (0005, 0006, 0013 and 0021) are predicted 6 to 10% too short, those of DeepSeek-V3 2 to "
        "7%, but in two stages (0024) 3% too long. The experts of V2 are the smallest products of the file. Whether "
        "products or permutations of rows take the difference is not known; tokens are assumed to be routed evenly.",
        "0024 (DeepSeek-V3 in two stages) holds 6 GiB less than predicted. Megatron's kernels around experts save "
        "their inputs alone, and a first stage keeps the activations of two micro batches.",
    ),
    "runtime_single_gpu": (
        "Under autocast, steps are predicted 1 to 13% too short, most for ViT-H (0021, 0024) and sequences of 8,192 "
        "tokens and more (0033, 0036). Neither the power limit of that H100 nor its attention kernels are stated.",
    ),
    "fsdp_paper": (
        "The paper states rates, more than which its runs reached, and not what it counts as an operation: with the "
        "recomputation, as by Narayanan et al. (2021), they are the shares of the hardware's use that it states.",
        "FSDP1 gathers into and reduces from flat parameters; FSDP2's copies take 1.4 s of the plans' steps.",
    ),
    "mosaicml": (
        "Composer steps one parameter at a time; the plan's optimizer steps lists of parameters.",
        "0209 to 0216 (MPT 125M on A100s of 40 GB) have 25 GiB active and are predicted to reserve more than there is: "
        "PyTorch then frees reserved memory that is not in use, and continues.",
    ),
}
