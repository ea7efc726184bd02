"""Autocast on the simulated device: the same casts as in PyTorch, cached for the same time."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from legoai.cost.capture import capture
from legoai.cost.memory.storages import memory
from legoai.cost.simulated.device import SimulationError
from legoai.cost.simulated.operators.autocast import autocast_rules, rules
from legoai.cost.simulated.operators.properties import operator
from legoai.cost.trace.records import Allocate, Kernel
from legoai.cost.trace.trace import Trace
from legoai.runtime.device import Device
from legoai.runtime.torch_internals.operators import OpOverload
from legoai.runtime.training.batches import Batches
from legoai.runtime.training.step import take_step
from support.simulation import simulated
from support.training import programs
from support.training.watching import Watching


def trainer(*, checkpoint: bool = False):
    made = programs.trainer(dtype=torch.float32, global_batch=2, checkpoint=checkpoint)
    step = programs.step_of(1, clip_norm=1.0, autocast_dtype=torch.bfloat16)
    return dataclasses.replace(made, autocast_dtype=torch.bfloat16, train_step=step)


@functools.cache
def traced(kind: str, **options) -> Trace:
    return simulated.in_a_fork(_traced, kind, options)


def _traced(kind: str, options) -> Trace:
    return capture(trainer(**options), world=1, kind=kind)


class Ops(Watching):
    """Notes each operator with the dtypes that it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[str, ...]]] = []

    def saw(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        known = operator(func)
        if known.treatment in ("kernel", "copy") and "profiler" not in known.name:
            dtypes = tuple(str(item.dtype).removeprefix("torch.") for item in simulated.flat(args))
            self.seen.append((known.name, dtypes))


def real_step(options) -> list[tuple[str, tuple[str, ...]]]:
    made = trainer(**options)
    device = Device(type="cpu")
    training = made.prepare(device, seed=0)
    batches = Batches(training, simulated.Zeros(made))
    take_step(made, training, batches, step=0)
    with Ops() as ops:
        take_step(made, training, batches, step=1)
    return ops.seen


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="plain", marks=pytest.mark.slow), pytest.param({"checkpoint": True}, id="checkpointed")],
)
def test_autocast_operators_and_dtypes_equal_a_real_run(options, gloo):
    real = gloo(1)(real_step, options)[0]
    trace = traced("cpu", **options)
    span = trace.steps[-1]
    found = [
        (item.op, tuple(tensor.dtype for tensor in item.inputs))
        for item in trace.records[span.start : span.stop]
        if isinstance(item, Kernel) and item.op != "aten.scalar_tensor"
    ]
    assert found == [item for item in real if item[0] != "aten.scalar_tensor"]
    assert ("aten.mm", ("bfloat16", "bfloat16")) in found


@pytest.mark.slow
def test_gpu_autocast_rules_equal_the_torch_header():
    text = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()

    def listed(macro: str) -> set[str]:
        found = re.search(rf"#define {macro}\(_\)(.*?)\n\n", text, re.DOTALL)
        assert found is not None
        return {".".join(part.strip() for part in item.split(",")) for item in re.findall(r"_\(([^()]*)\)", found[1])}

    by_rule = {
        rule: {name for name, found in rules("cuda").items() if found == rule} for rule in rules("cuda").values()
    }
    # The two of cuDNN are registered beside the list.
    assert by_rule["lower"] - {"cudnn_convolution", "cudnn_convolution_transpose"} == listed(
        "AT_FORALL_LOWER_PRECISION_FP"
    )
    assert by_rule["fp32"] == listed("AT_FORALL_FP32")
    assert by_rule["set_dtype"] == listed("AT_FORALL_FP32_SET_OPT_DTYPE")
    assert by_rule["promote"] == listed("AT_FORALL_PROMOTE")


def test_parameter_casts_are_cached_until_their_last_use():
    trace = traced("cuda")
    span = trace.steps[-1]
    records = trace.records[span.start : span.stop]
    matrices = 2 * 7 + 1
    casts = [
        item
        for item in records
        if isinstance(item, Kernel) and item.op == "aten._to_copy" and item.phase == "forward"
        and item.outputs[0].dtype == "bfloat16" and len(item.inputs[0].shape) == 2
    ]  # fmt: skip
    assert len(casts) == matrices
    assert all(item.bytes_read == 2 * item.bytes_written for item in casts)


def test_gpu_autocast_uses_fp32_norms_and_bf16_products():
    kernels = [item for item in traced("cuda").records if isinstance(item, Kernel)]
    norms = [item for item in kernels if item.op == "aten._fused_rms_norm"]
    assert norms and all(item.inputs[0].dtype == "float32" for item in norms)
    assert all(item.inputs[0].dtype == "bfloat16" for item in kernels if item.op == "aten.mm")
    assert all(item.inputs[0].dtype == "bfloat16" for item in kernels if "flash_attention" in item.op)


def test_autocast_memory_includes_weight_casts():
    mixed = memory(traced("cuda"))
    assert mixed.by_category["activation"] > 0
    made = {item.bytes for item in traced("cuda").records if isinstance(item, Allocate) and item.phase == "forward"}
    assert 2 * programs.DIM * programs.VOCABULARY in made  # the cast of the output's weight


def test_operators_refused_by_autocast_are_refused():
    with pytest.raises(SimulationError, match="binary_cross_entropy"):
        simulated.in_a_fork(_refused)


def _refused() -> None:
    from legoai.cost.simulated.device import Recorder
    from legoai.cost.simulated.process import simulated_device

    class Nothing(Recorder):
        def record(self, record) -> None: ...

    with simulated_device(Nothing(), rank=0, world=1, kind="cuda") as fake, autocast_rules("cuda"), fake:
        x = torch.empty(4, device="sim")
        with torch.autocast("sim", dtype=torch.bfloat16):
            torch.nn.functional.binary_cross_entropy(x, x)
