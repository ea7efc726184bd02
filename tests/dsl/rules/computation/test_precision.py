"""Rules about dtypes, against the behaviour and the errors of PyTorch."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.frontend.resolve import resolve
from legoai.dsl.rules.computation.precision import DtypeOfConfig
from legoai.specs.cluster import catalogue
from support.texts.rule_plans import codes, message

BLOCK = "layers.*.feed_forward.*"


def multiplies_in_float8(rows: int, inner: int, columns: int) -> bool:
    """Whether `torch._scaled_mm` takes a product of these sizes on a CUDA device."""
    logging.disable(logging.ERROR)
    try:
        with FakeTensorMode():
            left = torch.empty(rows, inner, device="cuda", dtype=torch.float8_e4m3fn)
            right = torch.empty(columns, inner, device="cuda", dtype=torch.float8_e4m3fn).t()
            scale = torch.ones((), device="cuda")
            torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    finally:
        logging.disable(logging.NOTSET)
    return True


@pytest.mark.parametrize("tokens", [256, 264])
@pytest.mark.parametrize(("dim", "hidden"), [(128, 384), (128, 392), (136, 384)])
@pytest.mark.parametrize(("style", "ranks"), [("colwise", 1), ("colwise", 2), ("rowwise", 2), ("colwise", 8)])
def test_float8_sizes_must_fit_scaled_mm(tokens: int, dim: int, hidden: int, style: str, ranks: int) -> None:
    inputs = dim // ranks if style == "rowwise" else dim
    outputs = hidden // ranks if style == "colwise" else hidden
    legal = (
        multiplies_in_float8(tokens, inputs, outputs)  # forward
        and multiplies_in_float8(tokens, outputs, inputs)  # gradient of the input
        and multiplies_in_float8(outputs, tokens, inputs)  # gradient of the weight
    )
    plan = f"""
    model llama3("70b", n_layers = 1, dim = {dim}, hidden_dim = {hidden}, n_heads = 4, n_kv_heads = 4)
    batch (global = 64, micro = 1, seq_len = {tokens})
    mesh (tp = {ranks})
    shard on tp {{ layers.0.feed_forward.w1 = {style} }}
    precision {{ layers.0.feed_forward.w1 = float8 }}
    """
    assert ("LP613" not in codes(plan)) is legal


def test_mxfp8_needs_whole_blocks_of_32() -> None:
    plan = """
    cluster b200
    batch (global = 64, micro = 1, seq_len = {})
    precision {{ layers.*.feed_forward.* = {} }}
    """
    assert "LP613" not in codes(plan.format(272, "float8"))
    assert "multiple of 32 tokens, not a micro batch of 272" in message(plan.format(272, "mxfp8"), "LP613")


@pytest.mark.parametrize(
    ("device", "treatment", "legal"),
    [
        ("h100_sxm", "float8", True),
        ("h100_sxm", "mxfp8", False),
        ("b200", "mxfp8", True),
        ("a100_sxm80", "float8", False),
        ("cpu", "float8", False),
    ],
)
def test_float8_requires_device_support(device: str, treatment: str, legal: bool) -> None:
    found = codes(f"cluster {device}\nprecision {{ {BLOCK} = {treatment} }}")
    assert ("LP611" not in found) is legal


def test_emulated_bf16_is_reported(tmp_path: Path) -> None:
    profile = (catalogue() / "a100_sxm80.toml").read_text()
    assert 'compute_capability = "8.0"' in profile
    (tmp_path / "old.toml").write_text(profile.replace('compute_capability = "8.0"', 'compute_capability = "7.0"'))
    plan = 'cluster profile("old.toml")\nprecision (param = {})'
    assert "capability 7.0 and no bf16 units" in message(plan.format("bf16"), "LP617", tmp_path)
    assert "LP617" not in codes(plan.format("fp16"), tmp_path)
    assert "LP617" not in codes("cluster a100_sxm80")


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype_among_the_arguments_of_a_config_is_reported(field: str) -> None:
    def found(model: str) -> list[str]:
        plan = resolve(f"{_HEAD}model {model}", "hf.plan", directory=Path()).plan
        assert plan is not None
        return [item.message for item in DtypeOfConfig().check(Analysis(plan, None))]

    assert found(f'huggingface("config.json", {field} = "bfloat16")') == [
        f"`{field}` has no effect: `precision` decides the dtypes of a training"
    ]
    assert not found('huggingface("config.json", n_layer = 2)')
    assert not found(f'python("package:model", {field} = "bfloat16")')


_HEAD = "plan hf\ncluster h100_sxm\nbatch (global = 8, micro = 1, seq_len = 64)\n"


def test_float8_on_nonlinear_modules_has_no_effect() -> None:
    assert "LP612" in codes("precision { layers.*.attention_norm = float8 }")
    assert "LP612" in codes("precision { layers.* = float8 }")
    assert "LP612" not in codes("precision { layers.** = float8 }")


def test_fp16_gradients_vanish_and_bf16_gradients_do_not() -> None:
    small = torch.tensor(2e-8)
    assert small.half() == 0
    assert small.bfloat16() != 0
    assert "LP614" in codes("precision (param = fp16)")
    assert "LP614" in codes("precision (master = fp16)")
    assert "LP614" not in codes("precision (param = bf16)")


def test_dtype_options_without_fsdp_units_are_reported() -> None:
    fsdp = "mesh (dp_shard = 8)\nfsdp on dp_shard { layers.* = unit }\n"
    replicate = "mesh (dp_replicate = 8)\nreplicate on dp_replicate\n"
    for field in ("output", "gradient", "reduce"):
        assert "LP615" in codes(f"precision ({field} = fp32)")
        assert "LP615" not in codes(f"{fsdp}precision ({field} = fp32)")
    assert "LP615" not in codes(f"{replicate}precision (reduce = fp32)")
    assert "LP615" not in codes(f"{replicate}precision (output = fp32)")
    assert "LP615" not in codes("precision (param = bf16)")


def test_a_dtype_for_accumulated_gradients_needs_accumulation() -> None:
    plan = "mesh (dp_shard = 8)\nfsdp on dp_shard {{ layers.* = unit }}\nprecision (gradient = fp32)\n{}"
    assert "LP616" not in codes(plan.format(""))
    assert "LP616" in codes(plan.format("batch (global = 8, micro = 1, seq_len = 256)"))


@pytest.mark.parametrize(
    ("statements", "backend", "dtype"),
    [
        ("mesh (dp_shard = 4)", "eager", "fp32"),
        ("mesh (dp_shard = 4)", "graph", "fp32"),
        ("mesh (dp_shard = 4)\ncomm (reduce = last_micro_batch)", "eager", "bf16"),
        ("mesh (pp = 2, dp_shard = 2)\npipeline on pp", "eager", "bf16"),
        ("mesh (pp = 2, dp_shard = 2)\npipeline on pp", "graph", "bf16"),
        ("mesh (pp = 2, dp_shard = 2)\npipeline on pp (microbatches = 1, schedule = GPipe)", "eager", "fp32"),
    ],
)
def test_gradients_reduced_once_accumulate_in_the_dtype_of_their_reduction(
    statements: str, backend: str, dtype: str
) -> None:
    units = f"fsdp on dp_shard (backend = {backend}) {{ layers.* = unit(reshard = after_backward) }}"
    plan = f"{statements}\n{units}\nprecision (reduce = bf16, gradient = {dtype})\n"
    other = "fp32" if dtype == "bf16" else "bf16"
    assert "LP010" not in codes(plan)
    assert "LP010" in codes(plan.replace(f"gradient = {dtype}", f"gradient = {other}"))


def test_narrow_dtypes_get_advice() -> None:
    assert "LP822" in codes("mesh (dp_shard = 8)\nfsdp on dp_shard\nprecision (param = fp32, reduce = bf16)")
    assert "LP822" not in codes("precision (param = bf16, reduce = bf16)")
    assert "LP822" not in codes("precision (master = fp64, param = fp64)"), "nothing is reduced without units"
    assert "LP823" in codes("precision (master = bf16)")
    parameter = torch.tensor(1.0, dtype=torch.bfloat16)
    assert parameter + parameter / 300 == parameter  # the update that LP823 speaks of
    half = torch.tensor(1.0, dtype=torch.float16)
    assert half + half / 2500 == half


def test_float8_without_compile_is_slow() -> None:
    float8 = f"precision {{ {BLOCK} = float8 }}\n"
    assert "LP821" in codes(float8)
    assert "LP821" not in codes(float8 + "compile { layers.* = inductor }")
    assert "LP821" in codes(float8 + "compile { layers.{0..1} = inductor }")
    assert "LP821" not in codes(float8 + "mesh (dp_shard = 8)\nfsdp on dp_shard (backend = graph)")
