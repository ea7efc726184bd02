"""Training of programs with stages: its statements, the run of a rank, and comparison of the ranks' results."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.distributed.tensor import DTensor

from legoai.runtime import RunOptions
from support.texts.plans import HEAD, lowered

STEPS = 2
TOLERANCE = 1e-10
DOUBLE = "precision (master = fp64, param = fp64, reduce = fp64)\n"
PLAIN_DOUBLE = "precision (master = fp64, param = fp64)\n"
TRAINING = """\
batch     (global = 16, micro = 2, seq_len = 16)
optimizer adamw(lr = 1e-2, betas = [0.9, 0.95], weight_decay = 0.1)
clip      (norm = 1.0)
schedule  cosine(warmup = 1, steps = 10, floor = 0.1)
"""
SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
KEPT = "fsdp on dp_shard { layers.* = unit(reshard = after_backward), root = unit }\n"


def text_of(body: str, head: str = HEAD) -> str:
    return lowered(f"{head}{with_fewer_passes(TRAINING, body)}{body}").text


def with_fewer_passes(training: str, body: str) -> str:
    """Double the micro batch where all ranks read the same samples.

    The samples of a step stay the same. How long a small model takes depends on how often it is called.
    """
    replicas = math.prod(int(size) for size in re.findall(r"\bdp_\w+ = (\d+)", body))
    return training if replicas > 1 else training.replace("micro = 2", "micro = 4")


def train(text: str, data: str, **options) -> dict:
    """Run a program on this rank's part; losses, gradient norms, validations and the parameters of this rank, whole."""
    namespace: dict = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    history = namespace["trainer"]().fit(
        RunOptions(**{"device": "cpu", "log_every": 0, "steps": STEPS, "data": data, **options})
    )
    model = history.training.model
    return {
        "loss": [record.loss for record in history.steps],
        "norm": [record.grad_norm for record in history.steps],
        "validations": history.validations,
        "resumed_from": history.resumed_from,
        "parameters": {
            name.replace("_checkpoint_wrapped_module.", ""): (p.full_tensor() if isinstance(p, DTensor) else p)
            .detach()
            .clone()
            for name, p in model.named_parameters()
        },
        "dtypes": {p.dtype for p in model.parameters()},
        "frozen": [p.grad is None for p in model.parameters() if not p.requires_grad],
    }


def together(results: list[dict]) -> dict:
    """Joined results of the ranks: equal losses and norms, and each parameter equal on all its ranks."""
    first = results[0]
    parameters: dict = {}
    for result in results:
        assert (result["loss"], result["norm"]) == (first["loss"], first["norm"])
        assert result["validations"] == first["validations"]
        for name, parameter in result["parameters"].items():
            assert torch.equal(parameters.setdefault(name, parameter), parameter), name
    return {**first, "parameters": parameters}


def assert_close(one: dict, other: dict, tolerance: float) -> None:
    assert one["loss"] == pytest.approx(other["loss"], abs=tolerance)
    assert one["norm"] == pytest.approx(other["norm"], abs=tolerance)
    for ours, theirs in zip(one["validations"], other["validations"], strict=True):
        assert ours == pytest.approx(theirs, abs=tolerance)
    assert one["parameters"].keys() == other["parameters"].keys()
    for name, parameter in one["parameters"].items():
        torch.testing.assert_close(parameter, other["parameters"][name], rtol=0, atol=tolerance, msg=name)
