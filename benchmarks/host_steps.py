"""Host time of small steps, measured and modelled: `python -m benchmarks.host_steps [--write]`.

Programs of a Llama with 16 features are lowered for a CPU, and take steps on one thread as one rank of a group without
other processes, so that only the host's work takes time. The model is that of the simulator, with the host times of
kernels and calls measured on this machine in the same run, as `legoai calibrate` measures them beside a GPU: chains and
passes of small modules, never a step. Each step's operations and calls are those that the simulator records; the last
figure is of operations alone.

What remains is mostly that a loop over one module finds its code in the caches, and a step does not.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.machine import ask
from benchmarks.real_run import RandomBatches

from legoai.api import lower
from legoai.cost.calibration.calls import CallTimer
from legoai.cost.calibration.host import SMALL, HostTimer, chain, python_function
from legoai.cost.capture import capture
from legoai.cost.timing.timeline import Host
from legoai.cost.trace.garbage import uncollected
from legoai.cost.trace.records import Collective, Copy, Kernel
from legoai.runtime.attention.kernel_choice import attention_kernel
from legoai.runtime.device import Device
from legoai.runtime.torch_internals.distributed.fake_world import FakeStore
from legoai.runtime.training.batches import Batches
from legoai.runtime.training.step import take_step
from legoai.specs.models.families import resolve_config
from legoai.specs.models.llama import Llama

RESULTS = Path(__file__).parent / "results" / "host_steps.json"
WARM_UP, STEPS = 3, 25
SIZES = {**SMALL, "n_kv_heads": 4}
PLAN = """plan small
model llama3("8b", {sizes})
cluster cpu(devices = {ranks})
batch (global = {sequences}, micro = 1, seq_len = 8)
optimizer adamw(lr = 1e-4)
precision (param = fp32)
{parallel}"""
UNITS = "fsdp on dp_shard { layers.* = unit, root = unit }\n"
KEPT = "fsdp on dp_shard { layers.* = unit(reshard = never), root = unit }\n"
TENSOR = "shard standard on tp\n"
CHECKPOINTS = "checkpoint { layers.* = full }\n"
PLANS: dict[str, tuple[dict[str, int], str]] = {
    "one rank": ({}, ""),
    "checkpointed": ({}, CHECKPOINTS),
    "selectively checkpointed": ({}, "checkpoint { layers.* = selective([matmul]) }\n"),
    "units": ({"dp_shard": 4}, UNITS),
    "units that keep their parameters": ({"dp_shard": 4}, KEPT),
    "tensor parallel": ({"tp": 4}, TENSOR),
    "units, tensor parallel": ({"dp_shard": 2, "tp": 4}, TENSOR + UNITS),
    "units, tensor parallel, checkpointed": ({"dp_shard": 2, "tp": 4}, TENSOR + UNITS + CHECKPOINTS),
}


def program(axes: dict[str, int], body: str) -> tuple[str, int]:
    """Text of a plan's program, and its ranks."""
    ranks = 1
    for size in axes.values():
        ranks *= size
    mesh = f"mesh ({', '.join(f'{name} = {size}' for name, size in axes.items())})\n" if axes else ""
    sizes = ", ".join(f"{name} = {value}" for name, value in SIZES.items() if name != "max_seq_len")
    text = PLAN.format(sizes=sizes, ranks=ranks, sequences=axes.get("dp_shard", 1), parallel=mesh + body)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.plan"
        path.write_text(text, encoding="utf-8")
        return lower(path).text, ranks


def host() -> Host:
    """The host of this machine."""
    torch.set_num_threads(1)
    timer = HostTimer(clock=time.process_time)
    tokens = torch.zeros(1, SIZES["max_seq_len"], dtype=torch.int64)
    decoder = Llama(resolve_config("llama3", "8b", SIZES))  # type: ignore[arg-type]
    with uncollected():
        python = timer.forward(decoder, tokens)
        policy, again = timer.under_policy(decoder, tokens)
        return Host(
            python_seconds=python,
            dispatch_seconds=timer.backward(decoder, tokens),
            function_seconds=timer.backward(chain(python_function), torch.ones(1, 16, requires_grad=True)),
            recompute_seconds=timer.recomputation(decoder, tokens),
            policy_seconds=policy,
            policy_recompute_seconds=again,
            calls=CallTimer(timer, "cpu", python).seconds(),
        )


def measured(text: str, ranks: int) -> float:
    """Least processor seconds of a step of a program's first rank."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    trainer, device = namespace["trainer"](), Device(type="cpu")
    device.activate()
    seconds = []
    with attention_kernel(trainer.attention_kernel), uncollected():
        training = trainer.prepare(device, seed=0)
        batches = Batches(training, RandomBatches((trainer.micro_batch, trainer.seq_len), SIZES["vocab_size"], 0))
        for step in range(STEPS):
            begin = time.process_time()
            take_step(trainer, training, batches, step=step)
            seconds.append(time.process_time() - begin)
    return min(seconds[WARM_UP:])


def issued(text: str, ranks: int) -> list[Kernel | Collective | Copy]:
    """Operations of the step, as the simulator records them."""
    trace = capture(text, world=ranks, kind="cpu")
    span = trace.steps[-1]
    return [one for one in trace.records[span.start : span.stop] if isinstance(one, Kernel | Collective | Copy)]


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> int:
    asked = ask(__doc__, RESULTS)
    found = _apart(host)
    by_kernels = replace(found, calls={})
    rows = []
    print(f"{'':36} {'measured':>9} {'modelled':>9} {'':6} {'by kernels':>11}   ms")
    for name, (axes, body) in PLANS.items():
        if not asked.has(name):
            continue
        text, ranks = program(axes, body)
        took, records = _apart(measured, text, ranks), _apart(issued, text, ranks)
        modelled, before = (sum(map(one.dispatch, records)) for one in (found, by_kernels))
        print(
            f"{name:36} {took * 1e3:9.2f} {modelled * 1e3:9.2f} {modelled / took - 1:+6.0%} {before * 1e3:11.2f} "
            f"{before / took - 1:+6.0%}"
        )
        rows.append({"plan": name, "measured_s": took, "modelled_s": modelled, "by_kernels_s": before})
    asked.save(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
