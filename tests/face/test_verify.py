"""`legoai verify` finds and names differences from one device, nothing else, and leaves no process running."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from legoai.cli import main
from legoai.lowering.program import Program, lower
from legoai.lowering.verify import prepare as prepare_room
from legoai.lowering.verify.compare import TOLERANCES
from support import ROOT
from support.commands.verified import here, verified

__all__ = ["here"]

SHARDED = """plan small

model   llama3("tiny")
cluster cpu(devices = 2)
batch   (global = 16, micro = 4, seq_len = 64)
mesh    (dp_shard = 2)

fsdp on dp_shard {
  layers.* = unit
  root     = unit
}
clip (norm = 1.0)
"""
COMPILED_LOSS = """plan loss

model   llama3("tiny", n_layers = 2)
cluster cpu(devices = 4)
batch   (global = 8, micro = 2, seq_len = 32)
mesh    (dp_shard = 2)

fsdp blocks on dp_shard
loss fused
"""
UNEVEN = """plan uneven

model   llama3("tiny")
cluster cpu(devices = 2)
batch   (global = 3, micro = 1, seq_len = 64)
mesh    (pp = 2)

pipeline on pp (schedule = Interleaved1F1B, stages = 4)
"""
COMPILED = """plan compiled

model   llama3("tiny")
cluster cpu(devices = 4)
batch   (global = 16, micro = 2, seq_len = 64)
mesh    (dp_shard = 2, tp = 2)

shard on tp {
  tok_embeddings                  = rowwise(output = shard(1))
  layers.*.{attention, ffn}_norm  = sequence
  layers.*.attention              = inputs(from = shard(1), to = replicate)
  layers.*.attention.{wq, wk, wv} = colwise
  layers.*.attention.wo           = rowwise(output = shard(1))
  layers.*.feed_forward           = inputs(from = shard(1), to = replicate)
  layers.*.feed_forward.{w1, w3}  = colwise
  layers.*.feed_forward.w2        = rowwise(output = shard(1))
  norm                            = sequence
  output                          = colwise(input = shard(1), loss_parallel = true)
}

fsdp on dp_shard {
  layers.* = unit
  root     = unit
}
compile { layers.* = inductor }
"""
ZERO_BUBBLE = """plan bubbles

model   llama3("tiny")
cluster cpu(devices = 4)
batch   (global = 16, micro = 1, seq_len = 64)
mesh    (pp = 2, dp_shard = 2)

fsdp on dp_shard {
  layers.* = unit(reshard = after_forward)  # legoai: ignore[LP516]
  root     = unit
}
pipeline on pp (schedule = InterleavedZeroBubble, stages = 4)
"""


def with_program(monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    """Let lowering make a mistake."""

    def wrong(*args: object, **kwargs: object) -> Program:
        program = lower(*args, **kwargs)  # type: ignore[arg-type]
        assert before in program.text
        return dataclasses.replace(program, text=program.text.replace(before, after))

    monkeypatch.setattr(prepare_room, "lower", wrong)


def children() -> set[int]:
    """The processes that this one has started and that still run."""
    command = ["ps", "-o", "pid=,stat=", "--ppid", str(os.getpid())]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    return {int(line.split()[0]) for line in found.stdout.splitlines() if "Z" not in line.split()[1]}


def test_sharded_plan_equals_one_device(capsys: pytest.CaptureFixture[str]):
    before = children()
    status, out, err = verified(capsys, SHARDED, "--save-program", "small.py")
    assert status == 0, out
    assert "wrote small.py; start it with: torchrun --nproc-per-node 2 small.py --device cpu" in err
    assert "torchrun --nproc-per-node 2 " in Path("small.py").read_text(encoding="utf-8")
    assert "a.plan: 2 ranks compute what one device computes" in out
    assert "precision: fp64 throughout" in out
    for kind in ("loss", "gradient norm", "gradients", "updates"):
        [line] = [line for line in out.splitlines() if line.startswith(f"  {kind} ")]
        assert "equal" in line
    assert "clip: norm 0.01, not 1, so that it acts" in out
    assert re.search(r"samples +16 read by their ranks\n  reductions +24 as planned .*float64\n  clipping +acted", out)
    assert len(children() - before) <= 1, "at most ps itself"
    own = Path("small.py").read_text(encoding="utf-8")
    Path("small.py").write_text(own.replace("max_norm=0.01", "max_norm=0.02"), encoding="utf-8")
    status, out, _ = verified(capsys, SHARDED, "--program", "small.py")
    assert status == 1, "Adam's updates do not tell one bound from another, gradients do"
    assert "  gradients      21 equal" in out and "  clipped        21 of 21 differ" in out
    assert "the clipped gradient of tok_embeddings.weight" in out


@pytest.mark.slow
def test_stage_graphs_equal_one_device(capsys: pytest.CaptureFixture[str]):
    stages = SHARDED.replace("devices = 2", "devices = 4").replace("mesh    (", "pipeline on pp\nmesh    (pp = 2, ")
    units = stages.replace("on dp_shard {", "on dp_shard (backend = graph) {").replace(
        "layers.* = unit", "layers.* = unit(reshard = after_backward)"
    )
    status, out, _ = verified(capsys, units)
    assert status == 0, out
    assert "a.plan: 4 ranks compute what one device computes" in out
    assert re.search(r"reductions +\d+ as planned .*float64\n", out), out


@pytest.mark.slow
def test_compiled_loss_equals_one_device(capsys: pytest.CaptureFixture[str]):
    status, out, _ = verified(capsys, COMPILED_LOSS.replace("devices = 4", "devices = 2"))
    assert status == 0, out
    assert re.search(r"reductions +\d+ as planned .*float64\n", out), out


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp = 2, cp = 2", "dp_shard = 2, tp = 2"])
def test_compiled_loss_of_other_meshes_equals_one_device(capsys: pytest.CaptureFixture[str], mesh: str):
    axis, more = "dp_shard", "shard standard on tp (sequence, loss_parallel)"
    if "pp" in mesh:
        axis, more = "cp", "pipeline on pp\ncontext on cp"
    plan = COMPILED_LOSS.replace("dp_shard = 2", mesh).replace("on dp_shard", f"on {axis}")
    status, out, _ = verified(capsys, f"{plan}{more}\n")
    assert status == 0, out
    assert re.search(r"reductions +\d+ as planned .*float64\n", out), out


def test_program_of_another_plan_is_refused(capsys: pytest.CaptureFixture[str]):
    Path("other.py").write_text("PLAN_HASH = 'sha256:other'\n")
    status, _, err = verified(capsys, SHARDED, "--program", "other.py")
    assert status == 2 and "other.py is the program of another plan: its PLAN_HASH is sha256:other" in err
    for text in ("this is no program", "PLAN_HASH = f()\n"):
        Path("other.py").write_text(text)
        status, _, err = verified(capsys, SHARDED, "--program", "other.py")
        assert status == 2 and "other.py cannot be read as a program" in err
    large = SHARDED.replace('"tiny"', '"1b"')
    Path("a.plan").write_text(large, encoding="utf-8")
    assert main(["lower", "a.plan", "-o", "other.py"]) == 0
    status, _, err = verified(capsys, large, "--program", "other.py")
    assert status == 2 and "too large to be run here" in err


@pytest.mark.slow
def test_edited_program_of_a_small_plan_is_verified(capsys: pytest.CaptureFixture[str]):
    small = SHARDED.replace("seq_len = 64", "seq_len = 16").replace("global = 16, micro = 4", "global = 4, micro = 2")
    Path("a.plan").write_text(small, encoding="utf-8")
    assert main(["lower", "a.plan", "-o", "whole.py"]) == 0
    status, out, _ = verified(capsys, small, "--program", "whole.py", "--steps", "1")
    assert status == 0, out
    assert "the plan as it is" in out


@pytest.mark.parametrize(
    "mistake",
    [
        ("cosine", "linear"),
        pytest.param(("steps=40", "steps=4"), marks=pytest.mark.slow),
        pytest.param(("training.scheduler.step()", "pass"), marks=pytest.mark.slow),
    ],
)
def test_another_schedule_is_found_beyond_the_trained_steps(
    mistake: tuple[str, str], capsys: pytest.CaptureFixture[str]
):
    small = SHARDED.replace("seq_len = 64", "seq_len = 16").replace("global = 16, micro = 4", "global = 4, micro = 2")
    small += "schedule cosine(steps = 40, warmup = 4)\n"
    Path("a.plan").write_text(small, encoding="utf-8")
    assert main(["lower", "a.plan", "-o", "whole.py"]) == 0
    program = Path("whole.py").read_text(encoding="utf-8")
    Path("whole.py").write_text(program.replace(*mistake), encoding="utf-8")
    status, out, _ = verified(capsys, small, "--program", "whole.py")
    assert status == 1
    assert re.search(r"learning rate +\d+ of 81 differ ", out), out
    assert re.search(r"updates +\d+ equal", out), "in the plan's dtypes, which hide a wrong rate of a trained step too"


def test_gradient_reduction_in_another_dtype_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with_program(monkeypatch, "reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16")
    status, out, _ = verified(capsys, SHARDED, "--dtype", "plan", "--steps", "1")
    assert status == 1
    assert re.search(r"reductions +(\d+) in bfloat16 of \1  of gradients, in float32", out), out
    assert "gradients      21 equal" in out, "they are within the tolerance of bf16"


def test_plan_dtypes_use_looser_tolerances(capsys: pytest.CaptureFixture[str]):
    status, out, _ = verified(capsys, SHARDED, "--dtype", "plan", "--steps", "1")
    assert status == 0, out
    assert "fp64" not in out
    assert f"(allowed {TOLERANCES['bf16'].loss:.0e})" in out


def test_wrong_update_names_the_first_module(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    with_program(monkeypatch, "weight_decay=0.01", "weight_decay=0.9")
    status, out, _ = verified(capsys, SHARDED)
    assert status == 1
    assert "2 ranks do not compute what one device computes" in out
    assert "  gradients      21 equal" in out
    assert "the first that differs, in the model's order: after step 1 tok_embeddings.weight" in out


def test_wrong_gradient_names_the_plan_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    wrong = "fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)"
    with_program(monkeypatch, wrong, f'{wrong}\n    model.layers["1"].set_reduce_scatter_divide_factor(1.0)')
    status, out, _ = verified(capsys, SHARDED)
    assert status == 1
    assert (
        "the gradient of layers.3.attention_norm.weight (layers.1.attention_norm.weight of the shrunken model)" in out
    )
    assert "what the plan says about layers.3.attention_norm:" in out
    assert "in the unit layers.3" in out
    assert "a.plan:9" in out


def test_failing_program_names_the_rank_and_leaves_no_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    before = children()
    with_program(monkeypatch, "    policy = ", "    assert mesh.get_local_rank() == 0, 'not me'\n    policy = ")
    status, out, err = verified(capsys, SHARDED)
    assert status == 1
    assert "the program of the shrunken plan fails: rank 1: AssertionError: not me" in out
    assert "LEGOAI_DEBUG=1 shows where" in err
    assert len(children() - before) <= 1


def test_plan_errors_are_shown_without_running(capsys: pytest.CaptureFixture[str]):
    status, out, err = verified(capsys, SHARDED + "checkpoint { layrs.* = full }\n")
    assert (status, out) == (1, "")
    assert "layrs" in err
    assert "not verified" in err
    status, out, err = verified(capsys, SHARDED + "comm (reorder = true)\n")
    assert (status, out) == (1, "")
    assert "LP010" in err
    status, out, err = verified(capsys, SHARDED.replace("micro = 4", "micro = auto"))
    assert (status, out) == (1, "")
    assert "LP011" in err


@pytest.mark.parametrize("options", [("--ranks", "0"), ("--ranks", "17"), ("--steps", "none"), ("--dtype", "fp8")])
def test_options_out_of_range_are_wrong_usage(options: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    assert verified(capsys, SHARDED, *options)[0] == 2


@pytest.mark.slow
def test_suppressed_rule_for_a_torch_bug_is_caught(
    capsys: pytest.CaptureFixture[str],
):
    status, out, _ = verified(capsys, ZERO_BUBBLE)
    assert status == 1
    assert "do not compute what one device computes" in out
    assert "reshard = after_forward" in out
    status, out, _ = verified(capsys, ZERO_BUBBLE.replace("after_forward)  # legoai: ignore[LP516]", "after_backward)"))
    assert status == 0, out


@pytest.mark.slow
def test_compiled_blocks_with_a_missing_wait_are_caught(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    status, out, _ = verified(capsys, COMPILED)
    assert status == 0, out
    assert "`aot_eager` for `inductor`" in out
    with_program(monkeypatch, "    wait_for_output(model.tok_embeddings)", "    pass")
    status, out, _ = verified(capsys, COMPILED)
    assert status == 1
    assert "the gradient of tok_embeddings.weight" in out


def test_micro_batches_not_divisible_by_ranks_equal_one_device(capsys: pytest.CaptureFixture[str]):
    status, out, _ = verified(capsys, UNEVEN)
    assert status == 0, out


@pytest.mark.slow
def test_interrupt_stops_every_process(here: Path):
    Path("a.plan").write_text(SHARDED, encoding="utf-8")
    command = [sys.executable, "-m", "legoai", "verify", "a.plan", "--steps", "100"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 90
    running: list[int] = []
    while len(running) < 4:  # itself, one device and two ranks
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
        running = session(process.pid)
        if len(running) > 2:  # stopped, they cannot be done before they are interrupted
            for child in set(running) - {process.pid}:
                os.kill(child, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert session(process.pid) == []


def session(leader: int) -> list[int]:
    command = ["ps", "-o", "pid=", "--sid", str(leader)]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    return [int(number) for number in found.stdout.split()]


def test_manual_states_the_tolerances():
    rows = {
        "fp64": "fp64",
        "fp64, a factory's or Hugging Face model": "fp64, partly fp32",
        "fp32": "fp32",
        "bf16": "bf16",
    }
    manual = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    table = manual.partition("| dtype | loss and norm | gradient | parameter |\n|---|---|---|---|\n")[2].partition(
        "\n\n"
    )[0]
    stated = dict(line.strip("| ").split(" | ", 1) for line in table.splitlines())
    assert stated.keys() == rows.keys() and set(rows.values()) == TOLERANCES.keys()
    for row, dtype in rows.items():
        limits = TOLERANCES[dtype]
        loss, gradient, update = stated[row].split(" | ")
        first, _, after = loss.partition(", after an update ")
        assert [float(text) for text in (first, after or first, gradient, update)] == [
            limits.loss, limits.after, limits.gradient, limits.update,
        ]  # fmt: skip
