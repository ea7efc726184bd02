"""Training on any mesh is the training of one process, and a resumed one is the one that was not stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from legoai.runtime import History, RunError, RunErrorCode, RunOptions
from legoai.runtime.training import loop
from legoai.runtime.training.batches import Batches
from support.marks import some_slow
from support.training import corpus, programs

data, own_cache = corpus.data, corpus.own_cache

STEPS = 4


def outcome(history: History) -> dict:
    """Result of a run in plain values: losses, gradient norms and whole parameters by name."""
    model = history.training.model
    parameters = {
        name.replace("_checkpoint_wrapped_module.", ""): (p.full_tensor() if isinstance(p, DTensor) else p)
        .detach()
        .clone()
        for name, p in model.named_parameters()
    }
    return {
        "loss": [record.loss for record in history.steps],
        "norm": [record.grad_norm for record in history.steps],
        "lr": [record.lr for record in history.steps],
        "parameters": parameters,
        "validations": history.validations,
        "resumed_from": history.resumed_from,
    }


def fit(program: dict, options: dict) -> dict:
    history = programs.trainer(**program).fit(RunOptions(device="cpu", log_every=0, **options))
    return outcome(history)


def assert_close(one: dict, other: dict, tolerance: float) -> None:
    assert one["loss"] == pytest.approx(other["loss"], abs=tolerance)
    assert one["norm"] == pytest.approx(other["norm"], abs=tolerance)
    assert one["lr"] == other["lr"]
    assert one["parameters"].keys() == other["parameters"].keys()
    for name, parameter in one["parameters"].items():
        torch.testing.assert_close(parameter, other["parameters"][name], rtol=0, atol=tolerance, msg=name)


def assert_equal(one: dict, other: dict) -> None:
    assert one["loss"] == other["loss"]
    assert one["norm"] == other["norm"]
    for name, parameter in one["parameters"].items():
        assert torch.equal(parameter, other["parameters"][name]), name


@pytest.fixture(scope="module")
def alone(gloo, data) -> dict:
    return gloo(1)(fit, {}, {"steps": STEPS, "data": data})[0]


MESHES = {
    "fsdp4": {"dp_shard": 4, "micro_batch": 1},
    "fsdp4, checkpointed": {"dp_shard": 4, "checkpoint": True},
    "tp4 with sequence parallel": {"tp": 4},
    "tp4 without sequence parallel": {"tp": 4, "sequence_parallel": False},
    "fsdp2 x tp2": {"dp_shard": 2, "tp": 2},
    "fsdp2 x tp2, checkpointed": {"dp_shard": 2, "tp": 2, "checkpoint": True},
    "fsdp2 x tp2 without sequence parallel": {"dp_shard": 2, "tp": 2, "sequence_parallel": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_training_on_a_mesh_equals_one_process(gloo, alone, data, name):
    ranks = gloo(4)(fit, MESHES[name], {"steps": STEPS, "data": data})
    for rank in ranks:
        assert_close(rank, alone, 1e-10)
        assert rank["norm"] == ranks[0]["norm"], "every rank has the same bits"


def test_gradients_of_the_reference_run_are_clipped(alone):
    assert max(alone["norm"]) > 1.0


def test_accumulation_does_not_change_the_gradient(gloo, alone, data):
    whole = gloo(1)(fit, {"micro_batch": 8}, {"steps": STEPS, "data": data})[0]
    assert_close(whole, alone, 1e-10)


@pytest.mark.slow
def test_two_runs_are_equal_bitwise(gloo, data):
    mesh = {"dp_shard": 2, "tp": 2, "dtype": torch.float32}
    first, second = (gloo(4)(fit, mesh, {"steps": 2, "data": data}) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("tp", some_slow([1, 2], 2))
def test_resumed_run_equals_an_uninterrupted_one_bitwise(gloo, data, tmp_path, tp):
    mesh = {"dp_shard": 2, "tp": tp, "dtype": torch.float32, "checkpoint": True}
    whole = gloo(2 * tp)(fit, mesh, {"steps": 4, "data": data})[0]
    first = gloo(2 * tp)(fit, mesh, {"steps": 2, "data": data, "out": tmp_path})[0]
    rest = gloo(2 * tp)(fit, mesh, {"steps": 4, "data": data, "out": tmp_path})[0]
    assert rest["resumed_from"] == 2
    assert first["loss"] + rest["loss"] == whole["loss"]
    assert first["norm"] + rest["norm"] == whole["norm"]
    assert first["lr"] + rest["lr"] == whole["lr"]
    for name, parameter in whole["parameters"].items():
        assert torch.equal(parameter, rest["parameters"][name]), name


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param(
            {"dp_shard": 4, "micro_batch": 1},
            {"dp_shard": 2, "tp": 2},
            id="fsdp4 to fsdp2 x tp2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"dp_shard": 2, "tp": 2},
            {"tp": 4, "sequence_parallel": False},
            id="fsdp2 x tp2 to tp4",
            marks=pytest.mark.slow,
        ),
        pytest.param({"dp_shard": 2}, {"tp": 2}, id="fsdp2 to tp2"),
        pytest.param({"tp": 4}, {"dp_shard": 4, "checkpoint": True}, id="tp4 to fsdp4", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_on_another_mesh(gloo, alone, data, tmp_path, saved, resumed):
    ranks = gloo(saved.get("dp_shard", 1) * saved.get("tp", 1))
    first = ranks(fit, saved, {"steps": 2, "data": data, "out": tmp_path})[0]
    rest = ranks(fit, {**resumed, "plan_hash": "sha256:other"}, {"steps": STEPS, "data": data, "out": tmp_path})[0]
    assert rest["resumed_from"] == 2
    joined = {**rest, **{key: first[key] + rest[key] for key in ("loss", "norm", "lr")}}
    assert_close(joined, alone, 1e-10)


def test_validation_is_equal_on_every_mesh_and_does_not_affect_training(gloo, alone, data):
    options = {"steps": STEPS, "data": data, "evaluate_every": 2}
    one = gloo(1)(fit, {}, {**options, "evaluate_batches": 2})[0]
    two = gloo(2)(fit, {"dp_shard": 2}, {**options, "evaluate_batches": 1})[0]
    assert [step for step, _ in one["validations"]] == [2, 4]
    assert [loss for _, loss in one["validations"]] == pytest.approx(
        [loss for _, loss in two["validations"]], abs=1e-10
    )
    assert_equal(one, alone)
    assert_close(two, alone, 1e-10)


def modes_after(options: dict) -> list[str]:
    """Train a model that has a module in evaluation mode, and return the modules in that mode then."""
    trainer = programs.trainer()

    def build() -> torch.nn.Module:
        model = trainer.build_model()
        model.layers["1"].eval()
        return model

    history = dataclasses.replace(trainer, build_model=build).fit(RunOptions(device="cpu", log_every=0, **options))
    return [path for path, module in history.training.model.named_modules() if not module.training]


def test_validation_leaves_modules_in_their_mode(gloo, data):
    options = {"steps": 2, "data": data}
    before = gloo(1)(modes_after, options)[0]
    assert before[0] == "layers.1"
    assert gloo(1)(modes_after, {**options, "evaluate_every": 1, "evaluate_batches": 1})[0] == before


@pytest.mark.parametrize(
    ("flops", "peak", "expected"), [(6e6, 1e12, 0.006), (0, 1e12, None), (6e6, 0.0, None), (0, 0.0, None)]
)
def test_utilization_is_unknown_without_flops_of_model_or_device(flops, peak, expected):
    recipe = dataclasses.replace(programs.trainer(), flops_per_token=flops, peak_flops=peak)
    assert recipe.utilization(1000.0) == expected


def test_too_little_data_for_validation_is_reported_before_the_first_step(gloo, data, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(corpus.TEXT[:600])
    options = {"steps": STEPS, "data": str(short), "out": tmp_path}
    gloo(1)(fit, {}, {**options, "steps": 1})
    with pytest.raises(RunError, match=r"the validation part of .*short.txt has \d+ tokens") as refused:
        gloo(1)(fit, {}, {**options, "evaluate_every": 3})
    assert refused.value.code == RunErrorCode.DATA_TOO_SHORT
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(item["event"] == "start" for item in records) == 1


def fit_with_a_signal_in_validation(data: str, out: Path) -> tuple[int | None, tuple, int]:
    taken = []

    def take(self, count: int, *, together: int = 1):
        for batch in original(self, count, together=together):
            taken.append(count)
            if count == 50 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    original = Batches.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "take", take)
        options = RunOptions(
            device="cpu", log_every=0, steps=9, data=data, out=out, evaluate_every=2, save_every=2, evaluate_batches=50
        )
        history = programs.trainer(dp_shard=2).fit(options)
    return history.stopped_by, history.validations, taken.count(50)


def test_signal_ends_a_validation_on_all_ranks(gloo, data, tmp_path):
    assert gloo(2)(fit_with_a_signal_in_validation, data, tmp_path) == [(signal.SIGTERM, (), 1)] * 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]
    resumed = {"steps": 3, "data": data, "evaluate_every": 2, "evaluate_batches": 2}
    runs = [gloo(2)(fit, {"dp_shard": 2}, resumed | {"out": tmp_path})[0]["validations"] for _ in range(2)]
    assert [[step for step, _ in run] for run in runs] == [[2], []]


def fit_with_a_signal(at: int, options: dict) -> dict:
    """Train where a signal arrives during a step."""

    def take(recipe, training, batches, *, step: int):
        if step + 1 == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(recipe, training, batches, step=step)

    original = loop.take_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "take_step", take)
        return fit({}, options)


@pytest.mark.parametrize("at", some_slow([2, 3, STEPS], 2, STEPS))
def test_interrupted_run_has_the_validations_of_an_undisturbed_one(gloo, data, tmp_path, at):
    options = {"steps": STEPS, "data": data, "evaluate_every": 2, "evaluate_batches": 2}
    whole = gloo(1)(fit, {}, options)[0]
    first = gloo(1)(fit_with_a_signal, at, options | {"out": tmp_path})[0]
    rest = gloo(1)(fit, {}, options | {"out": tmp_path})[0]
    assert rest["resumed_from"] == at
    assert first["validations"] + rest["validations"] == whole["validations"]
    assert first["loss"] + rest["loss"] == whole["loss"]
    assert not gloo(1)(fit, {}, options | {"out": tmp_path})[0]["validations"], "all is done"


@pytest.mark.slow
def test_validating_and_saving_in_one_step_keeps_the_run_equal(gloo, data, tmp_path):
    mesh = {"dp_shard": 4, "micro_batch": 1}
    plain = gloo(4)(fit, mesh, {"steps": STEPS, "data": data})[0]
    busy = gloo(4)(fit, mesh, {"steps": STEPS, "data": data, "out": tmp_path, "evaluate_every": 1, "save_every": 1})[0]
    assert_equal(plain, busy)


def test_seed_changes_weights_and_order(gloo, alone, data):
    other = gloo(1)(fit, {}, {"steps": STEPS, "data": data, "seed": 1})[0]
    assert other["loss"][0] != alone["loss"][0]


def test_the_built_in_corpus_is_learnt(gloo):
    run = gloo(1)(fit, {"dtype": torch.float32}, {"steps": 10})[0]
    assert run["loss"][0] == pytest.approx(5.6, abs=0.5)
    assert run["loss"][-1] < run["loss"][0] - 1.0


def test_tied_weights_stay_tied(gloo, data):
    one = gloo(1)(fit, {"tied": True}, {"steps": STEPS, "data": data})[0]
    assert "output.weight" not in one["parameters"]
    many = gloo(4)(fit, {"tied": True, "dp_shard": 4}, {"steps": STEPS, "data": data})[0]
    assert_close(many, one, 1e-10)


def test_metrics_are_written_once_per_step_with_the_plan_first(gloo, data, tmp_path):
    run = gloo(4)(fit, {"dp_shard": 4}, {"steps": STEPS, "data": data, "out": tmp_path})[0]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["event"] == "start"
    assert (records[0]["plan"], records[0]["plan_hash"], records[0]["world"]) == ("tiny", "sha256:test", 4)
    steps = [record for record in records if record["event"] == "step"]
    assert [record["loss"] for record in steps] == run["loss"]
    assert all(record["peak_memory"] > 0 and record["seconds"] > record["data_seconds"] > 0 for record in steps)
    assert [record["event"] for record in records[-2:]] == ["checkpoint", "end"]


def explode(on_nan: str, data: str, out: Path | None = None) -> dict:
    options = {"steps": STEPS, "data": data, "on_nan": on_nan}
    return fit({"dp_shard": 2, "tp": 2, "lr": 1e300}, options if out is None else options | {"out": out})


def test_non_finite_loss_stops_the_run(gloo, data, tmp_path):
    with pytest.raises(RunError, match=r"step \d: loss .*not made, nothing was saved") as caught:
        gloo(4)(explode, "stop", data, tmp_path / "run")
    assert caught.value.code == RunErrorCode.NOT_FINITE


@pytest.mark.slow
def test_non_finite_update_can_be_skipped(gloo, data):
    run = gloo(4)(explode, "skip", data)[0]
    assert len(run["loss"]) == STEPS
    assert any(loss != loss or norm != norm for loss, norm in zip(run["loss"], run["norm"], strict=True))


def test_mesh_of_another_world_size_is_refused_with_both_sizes(gloo, data):
    with pytest.raises(RunError, match=r"needs 2 processes, and 4 were started") as caught:
        gloo(4)(fit, {"dp_shard": 2}, {"steps": 1, "data": data})
    assert "dp_shard = 2" in caught.value.message and "--nproc-per-node 2" in caught.value.help
    with pytest.raises(RunError, match=r"needs 4 processes, and 1 was started") as caught:
        gloo(1)(fit, {"dp_shard": 4}, {"steps": 1, "data": data})
    assert caught.value.code == RunErrorCode.WORLD_SIZE


def test_undivisible_batch_is_refused(gloo, data):
    with pytest.raises(RunError, match=r"global batch of 8 .* micro batch 3") as caught:
        gloo(1)(fit, {"micro_batch": 3}, {"steps": 1, "data": data})
    assert caught.value.code == RunErrorCode.BATCH


def test_other_model_is_refused_and_can_be_loaded_partially(gloo, data, tmp_path):
    gloo(1)(fit, {"tied": True}, {"steps": 1, "data": data, "out": tmp_path})
    with pytest.raises(RunError, match="of another model") as caught:
        gloo(1)(fit_deeper, {"steps": 2, "data": data, "out": tmp_path})
    assert "--resume-other-plan" in caught.value.help
    run = gloo(1)(fit_deeper, {"steps": 2, "data": data, "out": tmp_path, "resume_other_plan": True})[0]
    assert run["resumed_from"] == 1 and len(run["loss"]) == 1


def fit_deeper(options: dict) -> dict:
    kept = programs.LAYERS
    programs.LAYERS = 3
    try:
        return fit({}, options)
    finally:
        programs.LAYERS = kept


def test_resume_never_does_not_mix_two_runs(gloo, data, tmp_path):
    gloo(1)(fit, {}, {"steps": 1, "data": data, "out": tmp_path})
    with pytest.raises(RunError, match="already has checkpoints, up to step-1"):
        gloo(1)(fit, {}, {"steps": 2, "data": data, "out": tmp_path, "resume": "never"})


def test_file_in_the_place_of_the_checkpoints_is_refused_before_training(gloo, data, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("x")
    with pytest.raises(RunError, match="checkpoints is no folder") as caught:
        gloo(1)(fit, {}, {"steps": 2, "data": data, "out": tmp_path / "run"})
    assert caught.value.code == RunErrorCode.FOLDER_NOT_WRITABLE
    assert '"step"' not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_resume_accepts_a_run_or_checkpoint_path(gloo, alone, data, tmp_path):
    gloo(1)(fit, {}, {"steps": STEPS, "data": data, "out": tmp_path / "a", "save_every": 1})
    for path in (tmp_path / "a" / "checkpoints" / "step-3", tmp_path / "a"):
        run = gloo(1)(fit, {}, {"steps": STEPS, "data": data, "out": tmp_path / "b", "resume": str(path)})[0]
        assert run["loss"] == alone["loss"][run["resumed_from"] :]
    with pytest.raises(RunError, match="no complete checkpoint"):
        gloo(1)(fit, {}, {"steps": 1, "data": data, "resume": str(tmp_path / "nothing")})


def fit_with_an_undeterministic_kernel(data: str, deterministic: bool) -> None:
    def parallelize(model, mesh):
        model.output.register_forward_hook(
            lambda *_: torch.empty(4).put_(torch.zeros(1, dtype=torch.long), torch.ones(1))
        )
        return model

    program = dataclasses.replace(programs.trainer(), parallelize=parallelize)
    try:
        program.fit(RunOptions(steps=1, data=data, device="cpu", log_every=0, deterministic=deterministic))
    except RuntimeError as error:
        assert not torch.are_deterministic_algorithms_enabled()
        raise RuntimeError(str(error)) from None
    except IndexError:
        pass  # the hook's output is no logits


def test_deterministic_mode_refuses_nondeterministic_kernels(gloo, data):
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        gloo(1)(fit_with_an_undeterministic_kernel, data, True)
    gloo(1)(fit_with_an_undeterministic_kernel, data, False)


def fit_keeping_two_records(data: str, out: Path) -> tuple[list[int], int]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "KEPT_RECORDS", 2)
        history = programs.trainer().fit(RunOptions(device="cpu", log_every=0, steps=STEPS, data=data, out=out))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record.step for record in history.steps], sum(line["event"] == "step" for line in lines)


def test_a_long_run_keeps_its_last_records(gloo, data, tmp_path):
    assert gloo(1)(fit_keeping_two_records, data, tmp_path) == [([3, 4], STEPS)]


def world() -> int:
    return dist.get_world_size()


def test_fit_keeps_the_callers_process_group(gloo, data):
    gloo(4)(fit, {"dp_shard": 4}, {"steps": 1, "data": data})
    assert gloo(4)(world) == [4] * 4


def test_program_without_torchrun_trains_on_one_process(data, tmp_path: Path):
    programs.trainer(dtype=torch.float32).main(
        ["--steps", "2", "--data", data, "--out", str(tmp_path), "--device", "cpu"]
    )
    assert not dist.is_initialized()
    assert (tmp_path / "checkpoints" / "step-2" / "meta.json").exists()


def test_finished_run_reports_no_remaining_steps(data, tmp_path: Path, capsys):
    program = programs.trainer(dtype=torch.float32)
    for _ in range(2):
        program.main(["--steps", "1", "--data", data, "--out", str(tmp_path), "--device", "cpu"])
    printed = capsys.readouterr().err
    assert printed.count("step 1/1") == 1
    assert "resumed from" in printed and "nothing is left; raise --steps" in printed
