"""Unusual settings of a run are reported before the start, and every failure is one message with a code."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from legoai.runtime import RunError, RunErrorCode
from legoai.runtime.data.corpus import open_corpus
from legoai.runtime.device import Device
from legoai.runtime.launching.failures import explained
from legoai.runtime.launching.options import parse_options
from legoai.runtime.optimizer.schedule import warmup_schedule
from legoai.runtime.training.trainer import Trainer
from support.training import programs


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n} of a corpus that says {n * n % 97}\n" for n in range(30)))
    return path


def run(capsys, program: Trainer, *arguments: object) -> tuple[object, str]:
    """Exit status and output of a program in this process."""
    status: object = 0
    try:
        program.main([*map(str, arguments), "--log-every", "0"])
    except SystemExit as stop:
        status = stop.code
    return status, capsys.readouterr().err


def program(**fields: object) -> Trainer:
    return dataclasses.replace(programs.trainer(dtype=torch.float32), **fields)


def on_cpu(text: Path) -> tuple[object, ...]:
    return ("--data", text, "--device", "cpu", "--out", text.parent / "out", "--steps", 1)


def test_run_beyond_the_schedule_gets_a_warning(capsys, text):
    status, output = run(capsys, program(), *on_cpu(text)[:-1], 12)
    assert status == 0
    assert "warning: the plan's schedule ends at step 10, and this run at step 12" in output
    assert "after step 10 the learning rate stays at 1.00e-03" in output
    records = [json.loads(line) for line in (text.parent / "out" / "metrics.jsonl").read_text().splitlines()]
    rates = {record["step"]: record["lr"] for record in records if record["event"] == "step"}
    assert rates[10] > rates[11] == rates[12] == pytest.approx(1e-3)
    none = program(build_lr_scheduler=lambda optimizer: warmup_schedule(optimizer, warmup=0, steps=1))
    _, output = run(capsys, none, "--data", text, "--device", "cpu", "--out", text.parent / "b", "--steps", 2)
    assert "after step 1 the learning rate is 0, and nothing more is learnt" in output
    _, output = run(capsys, none, "--data", text, "--device", "cpu", "--out", text.parent / "c", "--steps", 1)
    assert "warning" not in output


def test_validation_that_reads_its_part_twice_gets_a_warning(capsys, text):
    text.write_text(text.read_text() * 10)
    every = ("--evaluate-every", 1, "--evaluate-batches")
    status, output = run(capsys, program(), *on_cpu(text), *every, 90)
    assert status == 0
    assert "warning: a validation of 90 micro batches of each rank reads the validation part " in output
    _, output = run(capsys, program(), *on_cpu(text)[:-1], 2, *every, 1)
    assert "reads the validation part" not in output


def test_files_of_the_data_that_are_not_read_get_a_warning(capsys, text):
    folder = text.parent / "texts"
    folder.mkdir()
    text.rename(folder / "a.txt")
    for name in ("b.jsonl.gz", "c.png"):
        (folder / name).write_text("")
    for _ in ("built", "in the cache"):
        _, output = run(
            capsys, program(), "--data", folder, "--device", "cpu", "--out", text.parent / "out", "--steps", 1
        )
        assert (
            f"warning: {folder} has what is not read, as it is no file of text by its name: b.jsonl.gz, c.png" in output
        )


def test_step_that_is_not_profiled_is_reported(capsys, text):
    _, output = run(capsys, program(), *on_cpu(text), "--profile-step", 3)
    assert "warning: --profile-step 3: the run ends at step 1, and none is profiled" in output
    _, output = run(capsys, program(), *on_cpu(text)[:-1], 2, "--profile-step", 1)
    assert "note: step 1 is done already, and no step is profiled" in output
    assert not (text.parent / "out" / "profile").exists()


@pytest.mark.parametrize(
    ("content", "what", "cure"),
    [
        (bytes(range(1, 200)), "is no UTF-8 at offset 127", "iconv -f latin1"),
        (torch.arange(300, 900, dtype=torch.int16).numpy().tobytes(), "has a zero byte at offset", "tr -d"),
        (b"text and then \x00", "has a zero byte at offset 14", r"tr -d '\0'"),
        ("caf\u00e9".encode("latin1"), "is no UTF-8 at offset 3", "iconv -f latin1"),
        ("text".encode("utf-16"), "is UTF-16", "iconv -f utf-16"),
    ],
)
def test_binary_file_is_refused(tmp_path, content, what, cure):
    (tmp_path / "folder").mkdir()
    for name in ("tokens.bin", "folder/a.txt"):
        (tmp_path / name).write_bytes(content)
    for source in ("tokens.bin", "folder"):
        with pytest.raises(RunError, match=f"is not text: it {what}") as caught:
            open_corpus(str(tmp_path / source))
        assert caught.value.code == RunErrorCode.DATA_FORMAT
        assert cure in caught.value.help


def test_vocabulary_unfit_for_bytes_is_reported(capsys, text):
    status, output = run(capsys, program(vocab_size=128256), *on_cpu(text))
    assert status == 0
    assert "warning: the data are bytes, 256 different tokens, and the model's vocabulary has 128,256" in output
    status, output = run(capsys, program(vocab_size=100), *on_cpu(text))
    assert status == 1
    assert (
        output.count("error[RUN015]: ") == 1 and "has the byte 121, and the model's vocabulary has 100 tokens" in output
    )
    assert "warning" not in run(capsys, program(vocab_size=122), *on_cpu(text))[1], "it has no larger byte"


def test_a_plan_for_gpus_does_not_start_on_a_cpu_unless_asked(capsys, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for_gpus = program(device_type="cuda")
    status, output = run(capsys, for_gpus, "--data", text, "--out", text.parent / "out", "--steps", 1)
    assert status == 1
    assert output == (
        "error[RUN003]: the plan is for GPUs, and this torch finds none\n"
        "  help: pass --device cpu to run it on the CPU all the same\n"
    )
    assert not (text.parent / "out").exists()
    assert run(capsys, for_gpus, *on_cpu(text))[0] == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Device.choose("auto", planned="cpu").type == "cpu", "a plan for a CPU is run on it"


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("foo", "--device foo: torch has no such device\n  help: use auto, cpu or cuda\n"),
        ("meta", "--device meta: torch has no such device\n  help: use auto, cpu or cuda\n"),
        ("cuda:0", "--device cuda:0 names one device, and each rank has its own\n  help: use --device cuda\n"),
        ("mtia", "--device mtia: this torch finds none\n  help: use --device cpu\n"),
    ],
)
def test_device_that_this_torch_has_not_is_refused(capsys, text, device, message):
    status, output = run(capsys, program(), *on_cpu(text), "--device", device)
    assert (status, output) == (1, f"error[RUN003]: {message}")


def no_memory(model, mesh):
    torch.empty(1 << 50)
    return model


def a_mistake(model, mesh):
    return model.no_such_layer


def ends_the_process(model, mesh):
    sys.exit()


def ends_the_process_with_a_word(model, mesh):
    raise SystemExit("enough")


@pytest.mark.parametrize(
    ("parallelize", "call"), [(ends_the_process, "sys.exit()"), (ends_the_process_with_a_word, "sys.exit('enough')")]
)
def test_model_that_ends_the_process_fails(capsys, text, parallelize, call: str):
    status, output = run(capsys, program(parallelize=parallelize), *on_cpu(text))
    assert status == 1 and output.count("error[") == 1
    assert output.endswith(f"error[RUN069]: rank 0 failed: the model's code called {call}\n"), output


def test_every_run_failure_is_one_error_with_a_code(capsys, text):
    status, output = run(capsys, program(parallelize=no_memory), *on_cpu(text))
    assert status == 1 and "error[RUN060]: rank 0 has no memory left" in output and "Traceback" not in output
    status, output = run(capsys, program(parallelize=a_mistake), *on_cpu(text))
    assert status == 1 and output.count("error[") == 1
    assert "error[RUN069]: rank 0 failed: AttributeError: 'TinyLlama' object has no attribute 'no_such_layer'" in output
    assert "return model.no_such_layer" in output, "where it was, once"
    (text.parent / "file").write_text("")
    status, output = run(capsys, program(), "--data", text, "--device", "cpu", "--out", text.parent / "file" / "x")
    assert status == 1 and output.startswith("error[RUN006]: --out ") and len(output.splitlines()) == 2
    (text.parent / "other" / "metrics.jsonl").mkdir(parents=True)
    status, output = run(capsys, program(parallelize=a_mistake), *on_cpu(text), "--out", text.parent / "other")
    assert status == 1 and output.startswith("error[RUN006]: ") and "metrics.jsonl takes no records" in output


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4242", RunErrorCode.LOST_RANK),
        ("[gloo/transport/tcp/buffer.cc:83] Read error: Connection reset by peer", RunErrorCode.LOST_RANK),
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv", RunErrorCode.NO_ANSWER),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB", RunErrorCode.NO_MEMORY),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", RunErrorCode.NO_MEMORY),
        ("CUDA error: the launch timed out and was terminated", RunErrorCode.FAILED),
        ("mat1 and mat2 shapes cannot be multiplied", RunErrorCode.FAILED),
    ],
)
def test_torch_errors_are_distinguished(text, code):
    assert explained(RuntimeError(text)).code == code


SYSTEM = (
    "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: System call "
    "(e.g. socket, malloc) or external library call failed or device error. "
)
REMOTE = (
    "remote process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly "
    "due to a network error or a remote process exiting prematurely."
)
NO_SPACE = (
    "Error while creating shared memory segment /dev/shm/nccl-7 (size 9637888), error: No space left on device (28)"
)
REFUSED = "socketPollConnect: connect to 10.0.0.1<4242> returned Connection refused, exceeded error retry count (35)"
LAUNCH = "Cuda failure 702 'the launch timed out and was terminated'"


@pytest.mark.parametrize(
    ("told", "last", "code", "quoted"),
    [
        (SYSTEM, NO_SPACE, RunErrorCode.FAILED, f"ncclSystemError: {NO_SPACE}"),
        (SYSTEM, "", RunErrorCode.FAILED, "ncclSystemError: System call or external library call failed"),
        (SYSTEM, REFUSED, RunErrorCode.LOST_RANK, f"ncclSystemError: {REFUSED}"),
        (REMOTE, "", RunErrorCode.LOST_RANK, "ncclRemoteError"),
        (REMOTE, "NET/IB: Got completion with error 12", RunErrorCode.LOST_RANK, "completion with error 12"),
        ("ncclUnhandledCudaError: Call to CUDA function failed.", LAUNCH, RunErrorCode.FAILED, LAUNCH),
    ],
)
def test_errors_of_nccl_are_distinguished_by_what_it_says_of_them(told, last, code, quoted):
    place = "/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690"
    found = explained(torch.distributed.DistBackendError(f"NCCL error in: {place}, {told}\nLast error:\n{last}"))
    assert found.code == code and quoted in found.message


class Failing(torch.nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), RunErrorCode.NO_MEMORY),
        (RunError(RunErrorCode.ATTENTION, "no kernel"), RunErrorCode.ATTENTION),
        (ValueError("a value"), RunErrorCode.FAILED),
    ],
)
def test_errors_within_a_stage_keep_their_code(gloo, error: Exception, code: RunErrorCode):
    """torch's stages wrap what a module raises in an error that shows arguments, and not why."""
    assert gloo(1)(failed_in_a_stage, error) == [(code, True)]


def failed_in_a_stage(error: Exception) -> tuple[RunErrorCode, bool]:
    stage = PipelineStage(Failing(error), 0, 1, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="failed to run forward") as caught:
        stage.forward_one_chunk(0, (torch.ones(1),), {})
    found = explained(caught.value)
    return found.code, str(error.args[0]) in found.message


def test_failure_names_the_last_user_line(tmp_path):
    (tmp_path / "mine.py").write_text("from legoai.specs.units import format_bytes\n\nformat_bytes(None)\n")
    with pytest.raises(TypeError) as caught:
        runpy.run_path(str(tmp_path / "mine.py"))
    assert explained(caught.value).message.endswith(" (mine.py:3)")


def test_full_disk_is_reported_for_any_file():
    error = explained(OSError(28, os.strerror(28), "out/metrics.jsonl"))
    assert error.code == RunErrorCode.FOLDER_NOT_WRITABLE and "the disk is full for out/metrics.jsonl" in error.message


def test_limit_of_file_sizes_is_named_for_any_file():
    error = explained(OSError(27, os.strerror(27), "out/metrics.jsonl"))
    assert error.code == RunErrorCode.FOLDER_NOT_WRITABLE and "ulimit -f" in error.help
    assert "a file may not be as large as it needs to be for out/metrics.jsonl" in error.message


def test_wrong_usage_is_printed_by_rank_0_only(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, times in ((1, 0), (0, 1)):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as stop:
            parse_options(["--stepz"], plan="p", steps=1)
        assert stop.value.code == 2
        assert capsys.readouterr().err.count("usage:") == times
