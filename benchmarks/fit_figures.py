"""Figures that the shipped profiles take unchanged, each with its source: published, or host times measured here."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.cost.timing.timeline import call_constant
from legoai.cost.trace.records import Call

AZURE = "https://github.com/Azure/AI-benchmarking-guide, Azure_Results"
XLA = "xla_gemm_perf_table.csv: default matrix product table of XLA:GPU, https://github.com/openxla/xla (August 2026)"
SIMUMAX = "simumax_op_efficiency.csv: operator efficiencies of https://github.com/MooreThreads/SimuMax @4dcaae5"
FLASH = "kernels_gemm_attention.csv: figures of https://github.com/Dao-AILab/flash-attention and the FA3 paper"

TORCHAO = (
    "https://github.com/pytorch/ao, torchao/testing/float8/roofline_utils.py of 2024, on Meta's variant of the H100 "
    "with 2.4 TB/s"
)
TRITON_ON_META = "https://github.com/pytorch/benchmark/pull/2296 (June 2024), on an H100 of Meta's"

AZURE_A100 = (
    (1024, 1024, 1024, 119.4), (2048, 2048, 2048, 221.8), (4096, 4096, 4096, 228.0), (8192, 8192, 8192, 253.7),
    (16384, 16384, 16384, 256.5), (1024, 2145, 1024, 132.8), (6144, 12288, 12288, 250.8), (802816, 192, 768, 157.8),
)  # fmt: skip
"""m, n, k and TFLOP/s of cuBLASLt on an A100 SXM 80 GB, fp16, after 10,000 warm-up iterations."""

AZURE_H100 = (
    (1024, 1024, 1024, 274.1), (2048, 2048, 2048, 1011.3), (4096, 4096, 4096, 1216.9), (8192, 8192, 8192, 1290.1),
    (16384, 16384, 16384, 1377.3), (32768, 32768, 32768, 1382.2), (1024, 2145, 1024, 410.7),
    (6144, 12288, 12288, 1351.4), (802816, 192, 768, 663.8),
)  # fmt: skip
"""The same of an H100 SXM, fp8."""

STREAM = {
    # Copy, add and dot of BabelStream, in bytes per second.
    "a100_sxm80": (1.61e12, 1.70e12, 1.75e12, f"{AZURE}/ND_A100_v4_results.md"),
    "h100_sxm": (2.90e12, 2.97e12, 3.18e12, f"{AZURE}/ND_H100_v5_results.md (read in a fork)"),
    "h200": (4.01e12, 4.15e12, 4.48e12, f"{AZURE}/ND_H200_v5_results.md"),
}

SUSTAINED = {
    # Share of the datasheet's peak that large products hold when run for long.
    ("h100_sxm", "fp8"): (1382.2 / 1978.9, f"{AZURE}/ND_H100_v5_results.md: 1382.2 TFLOP/s at 32768 cubed"),
    ("a100_sxm80", "bf16"): (256.5 / 312, f"{AZURE}/ND_A100_v4_results.md: 256.5 TFLOP/s at 16384 cubed, fp16"),
    ("h100_sxm96", "bf16"): (0.60, f"{TORCHAO}: H100_PCT_ACHIEVABLE_GEMM_TOPS, of its peak"),
    ("h100_sxm96", "fp8"): (0.60, f"{TORCHAO}: H100_PCT_ACHIEVABLE_GEMM_TOPS, of either peak"),
    ("b200", "fp8"): (2906.9 / 5000, f"{AZURE}/ND_GB200_v6_results.md: GB200's share of its own peak"),
    ("b200", "bf16"): (0.6466, f"{SIMUMAX}: the best of its training shapes"),
}

ON_XEON = (
    "On the host of an H100, a Xeon, with torch 2.11: benchmarks/results/gpu_host.json. The hosts of other devices are "
    "not measured"
)
ON_EPYC = "on an EPYC: benchmarks/results/host_time.json"
FUNCTION_ON_XEON = (52.35 - 14.64 + 42.94 - 20.20) / 3 * 1e-6
"""Seconds of a Python autograd function that issues nothing, forward and backward: a third of what three add to a link
of a chain (`gpu_host.json`)."""
RECOMPUTE_ON_XEON = 195.31e-6
"""Seconds of a kernel that the checkpoints of a GPT run again, with their hooks (`gpu_host.json`)."""

# Seconds on an EPYC, all of one run of `host_time.py`.
GPT, LLAMA = 9.89e-6, 7.22e-6
"""A kernel in forward."""
HOOKS = {"GPT": 6.43, "Llama": 3.45}
"""Time of the hooks of checkpoints for a kernel that runs again, over that of a kernel in forward."""
UNDER_POLICY = (5.87, 8.91)
"""Time of a Llama's kernel that a policy sees, once and where it runs again, over that of a kernel in forward."""
CALLS: dict[Call, tuple[float, str]] = {
    "function": (5.57e-6, "a Python autograd function that issues nothing"),
    "function backward": (3.28e-6, "the backward of a Python autograd function that issues nothing"),
    "dtensor": (30.5e-6, "an operator on DTensors in tensor parallel layers"),
    "listed dtensor": (2.8e-6, "a DTensor in a list of an optimizer's update"),
    "conversion": (13.6e-6, "a function that converts or redistributes a DTensor"),
    "conversion backward": (18.9e-6, "the backward of a function that converts or redistributes a DTensor"),
    "functional collective": (128.1e-6, "a functional collective of DTensor, beside the operation"),
    "unit": (103.1e-6, "the forward of an FSDP unit"),
    "gather": (151.9e-6, "the gather of an FSDP unit's parameters, beside the operations"),
    "gathered parameter": (11.3e-6, "a parameter of a unit that is gathered"),
    "reduction": (172.8e-6, "the reduction of an FSDP unit's gradients, beside the operations"),
    "reduced parameter": (2.1e-6, "a gradient of a unit that is reduced"),
}
"""Calls that issue nothing themselves."""


def _on_xeon(seconds: float, what: str) -> tuple[float, str]:
    """Seconds for a kernel that were measured."""
    return seconds, f"{what}. {ON_XEON}"


def _scaled(on_epyc: float, what: str, *, like: float, ratio: str) -> tuple[float, str]:
    """Seconds that were measured on an EPYC, scaled like others that were measured on both."""
    text = f"{what}: {on_epyc * 1e6:.1f} microseconds {ON_EPYC}; times {like:.2f}, the ratio of {ratio}. {ON_XEON}"
    return on_epyc * like, text


def _recomputed(on_epyc: float, what: str) -> tuple[float, str]:
    like = RECOMPUTE_ON_XEON / (GPT * (1 + HOOKS["GPT"]))
    return _scaled(on_epyc, what, like=like, ratio="what checkpoints of a GPT take for a kernel")


def _calls() -> Iterator[tuple[str, tuple[float, str]]]:
    like = FUNCTION_ON_XEON / (CALLS["function"][0] + CALLS["function backward"][0])
    for call, (seconds, what) in CALLS.items():
        text = f"The host's work for {what}"
        yield call_constant(call), _scaled(seconds, text, like=like, ratio="functions that issue nothing")


CONSTANTS: dict[str, tuple[float, str]] = {
    "kernel_gap_seconds": (
        0.9e-6,
        "Between two queued kernels, 3.8 less 2.9 microseconds on a V100: "
        "https://developer.nvidia.com/blog/cuda-graphs/ (not re-read)",
    ),
    "dispatch_seconds": _on_xeon(28.53e-6, "A kernel in backward of a small GPT"),
    "python_seconds": _on_xeon(21.62e-6, "A kernel in forward of a small GPT, with autograd's records"),
    "function_seconds": _on_xeon(22.62e-6, "A kernel in backward of a chain of Python autograd functions"),
    "recompute_seconds": _recomputed(
        LLAMA * (1 + HOOKS["Llama"]), "A kernel that a checkpoint runs again in a Llama, with its hooks"
    ),
    "policy_seconds": _recomputed(
        LLAMA * UNDER_POLICY[0], "A kernel in forward that a policy of selective checkpointing sees, in a Llama"
    ),
    "policy_recompute_seconds": _recomputed(
        LLAMA * UNDER_POLICY[1], "A kernel that runs again under such a policy, with its hooks, in a Llama"
    ),
    **dict(_calls()),
    "nccl_connection_bytes": (
        10_485_760,
        "Buffers of one connection of one channel: https://github.com/NVIDIA/nccl/issues/1685",
    ),
    "cublas_workspace_bytes": (
        33_554_432,
        "PyTorch's default on Hopper and newer, 8 of 4096 KiB; 8.1 MiB before: aten/src/ATen/cuda/CublasHandlePool.cpp "
        "(not re-read)",
    ),
    "compute_slowdown": (
        1.189,
        "Mean over GPT and LLaMA training on 4 A100s, H100s, MI250s and MI210s, at most 1.4: "
        "https://arxiv.org/abs/2507.03114, abstract. Of the whole computation there; here of what runs beside a "
        "collective and is of no class whose slowdown is known",
    ),
    "collective_processors": (
        24,
        "Multiprocessors that a collective on one host occupies, one for each channel: 24 blocks of NCCL's all-gather "
        "on an H100, https://forums.developer.nvidia.com/t/337991; 24 channels on an HGX A100, "
        "https://github.com/NVIDIA/nccl-tests/issues/100. Not measured on others",
    ),
    "peer_copy_share": (
        round(394.967 / 450, 4),
        "Of the link's bandwidth, what a copy engine reads from a peer: nvbandwidth's device_to_device_memcpy_read_ce "
        "on 8 H100s, slowest pair, 394.967 of 450 GB/s: https://github.com/Azure/cluster-health-monitor, "
        "pkg/checker/gpu. Not measured on others",
    ),
    "context_bytes": (
        987_842_478,
        "0.92 GiB with all of torch 2.1's kernels loaded, 0.47 GiB with none, on an A100; the upper end: "
        "https://github.com/stas00/ml-engineering, training/performance/README.md",
    ),
    "nccl_communicator_bytes": (
        721_420_288,
        "688 MiB for each communicator of 3 or 4 A100s on NVLink after an all-reduce: "
        "https://github.com/NVIDIA/nccl/issues/964",
    ),
    "nccl_pair_bytes": (
        570_425_344,
        "544 MiB for each communicator of 2 A100s on NVLink after an all-reduce: "
        "https://github.com/NVIDIA/nccl/issues/964",
    ),
    "nccl_all_to_all_peer_bytes": (
        468_571_429,
        "3.28 GB more after the first all-to-all of 8 H100s, for each of 7 peers: "
        "https://github.com/NVIDIA/nccl/issues/1685",
    ),
}

HOPPER_PRODUCTS = (
    0.80 / 0.47,
    "A large bf16 product reaches 80% of an H100's peak alone and 47% beside an all-gather under FSDP, whose 24 blocks "
    "leave 108 multiprocessors to a kernel of 132 blocks: https://forums.developer.nvidia.com/t/337991",
)
"""The time of a matrix product of Hopper's library beside a collective over its time alone."""

SMALL_WORKSPACE = 8_519_680
"""cuBLAS's workspace before Hopper, 2 of 4096 KiB and 8 of 16 KiB."""

HOST_LINK = {
    # Host to device and back, bytes per second.
    "a100_sxm80": (26.28e9, 26.28e9, f"{AZURE}/ND_A100_v4_results.md; its 6.27 GB/s to the host is held for a mistake"),
    "a100_sxm40": (26.28e9, 26.28e9, f"of the 80 GB card: {AZURE}/ND_A100_v4_results.md"),
    "h100_sxm": (51e9, 52e9, f"{AZURE}/ND_H100_v5_results.md (read in a fork)"),
    "h200": (52e9, 52e9, f"{AZURE}/ND_H200_v5_results.md"),
}


GB200_FLASH2 = 373.9 / 2500
"""Share of the peak: 373.9 TFLOP/s, heads 128 wide, batch 2, sequence 8192; of both directions, as on the H200."""

AZURE_SOURCE = {"what": "memory bandwidth, large products, host link", "from": AZURE, "dated": "2024-2025"}
XLA_SOURCE = {"what": "matrix products", "from": XLA, "dated": "2026-08", "torch": None}
GROUPED_PRODUCTS = (
    "benchmarks/results/grouped_products.json: published in issues of PyTorch, torchao, Transformer Engine"
)
H100_SOURCES = [
    XLA_SOURCE,
    {"what": "fp8 products of training shapes, on an H800 of the same processor", "dated": "2025",
     "from": "kernels_gemm_attention.csv: https://github.com/deepseek-ai/DeepGEMM, history of README.md"},
    {"what": "attention", "from": FLASH, "dated": "2023-2024"},
    {"what": "products by groups", "from": GROUPED_PRODUCTS, "dated": "2025"},
    AZURE_SOURCE,
]  # fmt: skip
A100_SOURCES = [
    {"what": "matrix products and attention, on the PCIe card", "from": SIMUMAX, "dated": "2025"},
    {"what": "attention", "from": FLASH, "dated": "2023"},
    AZURE_SOURCE,
]
H100_96_SOURCES = [
    *H100_SOURCES,
    {"what": "share of the peak of large products, on the device", "from": TORCHAO, "dated": "2024"},
    {"what": "attention of torch, on the device", "from": TRITON_ON_META, "dated": "2024-06"},
]
B200_SOURCES = [
    XLA_SOURCE,
    {"what": "products and attention of training shapes", "from": SIMUMAX, "dated": "2025"},
    {"what": "products by groups of torch", "from": GROUPED_PRODUCTS, "dated": "2025"},
    AZURE_SOURCE,
]

META_FLASH2 = {1024: 287.457, 2048: 293.208, 4096: 298.428, 8192: 287.696, 16384: 304.199}
"""TFLOP/s by sequence of torch's FlashAttention-2 forward, no mask, 8 heads of 128, batch 128: `TRITON_ON_META`."""
