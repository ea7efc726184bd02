"""Rules about attention kernels agree with the kernels of this machine's processor."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from support.texts.rule_plans import codes, message

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def trains(kernel: str, dtype: torch.dtype) -> bool:
    """Whether forward and backward run with this kernel on a CPU."""
    query = torch.randn(1, 2, 16, 8, dtype=dtype, requires_grad=True)
    try:
        if kernel == "flex":
            flex_attention(query, query, query).sum().backward()
        else:
            with sdpa_kernel(BACKENDS[kernel]):
                torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kernel", [*BACKENDS, "flex"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_cpu_trains_with_every_accepted_kernel(kernel: str, dtype: str) -> None:
    names = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    refused = codes(f"cluster cpu(devices = 1)\nattention {kernel}\nprecision (param = {dtype})") & {"LP631", "LP632"}
    assert bool(refused) is not trains(kernel, names[dtype])


@pytest.mark.parametrize(
    ("kernel", "dtypes"),
    [("flash", "bf16 fp16"), ("cudnn", "bf16 fp16"), ("efficient", "fp32 bf16 fp16"), ("math", "fp64 fp32 bf16 fp16")],
)
def test_cuda_kernels_accept_only_their_dtypes(kernel: str, dtypes: str) -> None:
    for dtype in ("fp64", "fp32", "bf16", "fp16"):
        found = codes(f"attention {kernel}\nprecision (param = {dtype})")
        assert ("LP632" not in found) is (dtype in dtypes.split())


def test_kernels_for_the_dtype_are_named() -> None:
    assert "takes bf16 and fp16 on `h100_sxm`, and the plan computes in fp32" in message(
        "attention flash\nprecision (param = fp32)", "LP632"
    )


def test_heads_too_wide_for_flash_are_refused() -> None:
    plan = 'model gpt3("13b", n_layers = 1, dim = 5120, n_heads = {})\nattention {}'
    assert "`layers.0.attention` has 512" in message(plan.format(10, "flash"), "LP633")
    assert "LP633" not in codes(plan.format(20, "flash"))
    assert "LP633" not in codes(plan.format(10, "math"))


@pytest.mark.parametrize(
    ("device", "kernel", "width", "said"),
    [
        ("a100_sxm80", "cudnn", 128, None),
        ("a100_sxm80", "cudnn", 160, "of at most 128 features on `a100_sxm80`"),
        ("h100_sxm", "cudnn", 256, None),
        ("h100_sxm", "cudnn", 320, "of at most 256 features on `h100_sxm`"),
        ("b200", "cudnn", 192, "of at most 128 features on `b200`"),
        ("h100_sxm", "cudnn", 20, "whose features are a multiple of 8 in bf16"),
        ("h100_sxm", "efficient", 20, "whose features are a multiple of 8 in bf16"),
        ("h100_sxm", "efficient", 512, None),
        ("h100_sxm", "flash", 20, None),
        ("h100_sxm", "default", 20, None),
    ],
)
def test_cuda_kernels_take_heads_of_the_widths_that_pytorch_lets_them(device: str, kernel: str, width: int, said):
    # `check_cudnn_tensor_shapes`, `check_head_dim_size_flash` and `…_mem_efficient` of sdp_utils.cpp of torch 2.13.
    plan = (
        f'model gpt3("13b", n_layers = 1, dim = {4 * width}, n_heads = 4)\ncluster {device}(devices = 1)\n'
        f"attention {kernel}\nprecision (param = bf16)"
    )
    assert said in message(plan, "LP633") if said else "LP633" not in codes(plan)


def test_heads_in_fp32_are_multiples_of_four_for_the_efficient_kernel() -> None:
    plan = 'model gpt3("13b", n_layers = 1, dim = {}, n_heads = 4)\nattention efficient\nprecision (param = fp32)'
    assert "LP633" not in codes(plan.format(80))
    assert "a multiple of 4 in fp32" in message(plan.format(88), "LP633")


def test_memory_efficient_kernel_refuses_grouped_heads() -> None:
    plan = 'model llama3("8b", n_layers = 1, n_kv_heads = {})\nattention {}'
    assert "`layers.0.attention` has 8 for 32" in message(plan.format(8, "efficient"), "LP635")
    assert "LP635" not in codes(plan.format(32, "efficient"))
    for kernel in ("flash", "cudnn", "math", "default"):
        assert "LP635" not in codes(plan.format(8, kernel))


def test_a_kernel_for_a_model_without_attention_has_no_effect() -> None:
    bigrams = 'model python("torch.nn:Embedding", num_embeddings = 256, embedding_dim = 256)\n'
    assert "LP634" in codes(f"{bigrams}attention flash")
    assert "LP634" not in codes(f"{bigrams}attention default")
    assert "LP634" not in codes("attention flash")
