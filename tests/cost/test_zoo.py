"""Captures of `transformers` models, against the kernels and the tracked memory of a real step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from legoai.cost.capture import capture
from legoai.cost.memory.storages import memory
from legoai.cost.trace.records import Kernel, Mark
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from legoai.runtime.data.samples import open_data
from legoai.runtime.data.sequences import SampleBatch
from legoai.runtime.device import Device
from legoai.runtime.process_group import process_group
from legoai.runtime.training.batches import Batches
from legoai.runtime.training.step import take_step
from legoai.specs.models.reads import SYNTHETIC
from support.marks import slow_but
from support.models import zoo
from support.simulation import simulated
from support.simulation.memory_peaks import exact_peak, tracked_peak_of
from support.simulation.simulator import in_the_simulator
from support.training.real_memory import real_peak_of

MODELS = tuple(zoo.CONFIGS)


def peaks(name: str, precision: str, checkpointed: bool) -> tuple[int, int]:
    trainer = zoo.trainer_of(name, precision, checkpointed=checkpointed)
    return exact_peak(capture(trainer, world=1)), tracked_peak_of(trainer)


@pytest.mark.parametrize(
    ("precision", "checkpointed"),
    [
        ("mixed", False),
        *(
            pytest.param(precision, checkpointed, marks=pytest.mark.slow)
            for precision in zoo.PRECISIONS
            for checkpointed in (False, True)
            if (precision, checkpointed) != ("mixed", False)
        ),
    ],
)
@pytest.mark.parametrize("name", slow_but(MODELS, "gpt2"))
def test_peak_equals_the_torch_memory_tracker(name: str, precision: str, checkpointed: bool) -> None:
    ours, theirs = in_the_simulator(peaks, name, precision, checkpointed)
    assert ours == theirs


def real_kernels(name: str) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    trainer = zoo.trainer_of(name)
    device = Device(type="cpu")
    with process_group(device, timeout_seconds=60):
        training = trainer.prepare(device, seed=0)
        batches = Batches(training, _Same(trainer))
        take_step(trainer, training, batches, step=0)
        with simulated.Seen() as seen:
            take_step(trainer, training, batches, step=1)
    return seen.kernels


class _Same:
    """A repeated micro batch."""

    def __init__(self, trainer) -> None:
        reads, size = trainer.reads, (trainer.micro_batch, trainer.seq_len)
        if reads.kind in ("tokens", "two_texts"):
            inputs = tuple(torch.ones(item.shape, dtype=torch.int64) for item in reads.inputs(*size))
            self.batch = SampleBatch(inputs=inputs, targets=torch.ones(reads.targets(*size).shape, dtype=torch.int64))
        else:
            data = open_data(SYNTHETIC, reads, seq_len=trainer.seq_len)
            self.batch = data.stream(validation=False, micro_batch=size[0], rank=0, degree=1, seed=0).next()

    def next(self):
        return self.batch

    def skip(self, batches: int) -> None:
        pass


def captured_kernels(name: str) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    trace = capture(zoo.trainer_of(name), world=1, kind="cpu")
    begin = trace.records.index(Mark("step 2"))
    return [
        (record.op, tuple(item.shape for item in record.inputs))
        for record in trace.records[begin:]
        if isinstance(record, Kernel)
    ]


ELSEWHERE = ("aten.copy_", "aten.clone", "aten.scalar_tensor", "aten._foreach_add_")
"""What is not compared: copies to the memory format that a convolution chooses for itself, and the optimizer's counts
of steps, which are in host memory where a step is real."""


def compared(kernels: list[tuple[str, tuple[tuple[int, ...], ...]]]) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    return [item for item in kernels if item[0] not in ELSEWHERE]


@pytest.mark.parametrize("name", slow_but(MODELS, "bart"))
def test_kernels_equal_a_real_step(name: str) -> None:
    real = compared(in_the_simulator(real_kernels, name))
    assert compared(in_the_simulator(captured_kernels, name)) == real
    assert len(real) > 80


BART = """\
plan bart
model huggingface("config.json")
cluster cpu(devices = 1)
batch (global = 2, micro = 2, seq_len = 64)
optimizer adamw(lr = 1e-3)
"""


def predicted_peak(text: str) -> int:
    return memory(capture(text, world=1, kind="cpu")).peak


def counted_peak(text: str) -> int:
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    trainer = namespace["trainer"]()
    with process_group(Device(type="cpu"), timeout_seconds=60):
        return real_peak_of(trainer, _Same(trainer))


@pytest.mark.slow
def test_memory_of_a_decoder_that_masks_nothing_equals_a_real_step(tmp_path: Path) -> None:
    """BART's decoder makes a mask of ones, which `transformers` leaves out where tensors have values."""
    (tmp_path / "config.json").write_text(json.dumps(zoo.CONFIGS["bart"]))
    linted = lint(BART, "bart.plan", directory=tmp_path)
    assert linted.analysis is not None
    text = lower(linted.analysis).text
    assert in_the_simulator(predicted_peak, text) == in_the_simulator(counted_peak, text)


def attention_of(name: str) -> set[str]:
    trace = capture(zoo.trainer_of(name, "half", **ATTENTION.get(name, {})), world=1)
    return {record.op for record in trace.records if isinstance(record, Kernel) and "attention" in record.op}


ATTENTION = {"t5": {"dropout_rate": 0.0}}


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("llama", "cudnn"),
        pytest.param("gpt2", "cudnn", marks=pytest.mark.slow),
        pytest.param("vit", "cudnn", marks=pytest.mark.slow),
        # A learned bias by distance is a mask for which cuDNN has no gradient; other layers have no such mask.
        pytest.param("t5", "efficient cudnn", marks=pytest.mark.slow),
    ],
)
def test_attention_kernels_are_those_of_an_h100(name: str, kernels: str) -> None:
    found = in_the_simulator(attention_of, name)
    assert found == {
        f"aten._scaled_dot_product_{kernel}_attention{direction}"
        for kernel in kernels.split()
        for direction in ("", "_backward")
    }
