"""Runs that go back, start with other weights or find damage, in a folder that one run holds at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from legoai.runtime import RunError, RunErrorCode, RunOptions
from legoai.runtime.data.corpus import open_corpus
from legoai.runtime.launching.lock import locked
from legoai.runtime.loss import token_cross_entropy
from legoai.runtime.offloading.offload import offload_optimizer_state
from legoai.runtime.optimizer.combined import CombinedOptimizer
from legoai.runtime.optimizer.muon import Muon
from legoai.runtime.training.resume import fresh_tensors
from support.marks import slow_but, some_slow
from support.training import corpus, programs

data, own_cache = corpus.data, corpus.own_cache

OPTIMIZERS = {
    "AdamW": None,
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "SGD twice": lambda parameters: CombinedOptimizer(
        torch.optim.SGD(parameters[0]["params"][:1], lr=1e-2), torch.optim.SGD(parameters[0]["params"][1:], lr=1e-2)
    ),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "SGD with all": lambda parameters: torch.optim.SGD(
        parameters, lr=1e-2, momentum=0.9, dampening=0.5, weight_decay=0.1
    ),
    "AdamW, not fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW, state on the host": lambda parameters: offload_optimizer_state(torch.optim.AdamW(parameters, lr=1e-2)),
    "Muon and AdamW": lambda parameters: CombinedOptimizer(
        Muon(parameters.take("layers.*.attention.*.weight"), lr=1e-2), torch.optim.AdamW(parameters.rest(), lr=1e-2)
    ),
}


def fit(optimizer: str = "AdamW", **options) -> tuple[int, list[float]]:
    """The step that a run continued from, and its losses."""
    program = programs.trainer(dtype=torch.float32)
    build = OPTIMIZERS[optimizer]
    if build is not None:
        program = dataclasses.replace(program, build_optimizer=build)
    history = program.fit(RunOptions(device="cpu", log_every=0, **options))
    return history.resumed_from, [record.loss for record in history.steps]


def saved(out: Path) -> set[str]:
    return {path.name for path in (out / "checkpoints").iterdir()}


def damage(out: Path, step: str) -> None:
    os.truncate(out / "checkpoints" / step / "__0_0.distcp", 50)


def test_resuming_an_earlier_step_creates_a_branch(gloo, data, tmp_path):
    [pool], out = [gloo(1)], tmp_path / "run"
    [(_, losses)] = pool(fit, steps=4, data=data, out=out, save_every=2)
    [(back, again)] = pool(fit, steps=3, data=data, out=out, resume=str(out / "checkpoints" / "step-2"), seed=7)
    assert back == 2 and again != losses[2:3]
    assert saved(out) == {"step-2", "step-4", "step-3-branch-1"}
    assert pool(fit, steps=4, data=data, out=out, seed=7)[0][0] == 3, "not step 4 of the past that was left"
    assert "step-4-branch-1" in saved(out)


def fit_and_list(**options) -> list[set[str]]:
    """The checkpoints at each step of a run."""
    seen: list[set[str]] = []
    program = programs.trainer(dtype=torch.float32)
    program.fit(RunOptions(device="cpu", log_every=0, **options), observe=lambda _: seen.append(saved(options["out"])))
    return seen


@pytest.mark.parametrize("beside", some_slow([False, True], False))
def test_keeping_fewer_takes_effect_before_the_next_checkpoint(gloo, data, tmp_path, beside):
    """A disk that is full of checkpoints could not take one more."""
    pool = gloo(1)
    pool(fit, steps=3, data=data, out=tmp_path, save_every=1, keep=0)
    [(first, *_)] = pool(fit_and_list, steps=5, data=data, out=tmp_path, keep=1, save_async=beside)
    assert first == {"step-3"} and saved(tmp_path) == {"step-5"}


def test_a_run_without_a_step_to_make_removes_nothing(gloo, data, tmp_path):
    pool = gloo(1)
    pool(fit, steps=3, data=data, out=tmp_path, save_every=1, keep=0)
    pool(fit, steps=3, data=data, out=tmp_path, keep=1)
    assert saved(tmp_path) == {"step-1", "step-2", "step-3"}


def fit_and_read(seq_len: int, **options) -> tuple[int, str]:
    """The step that a run of sequences of a length continued from, and what it said."""
    program = dataclasses.replace(programs.trainer(dtype=torch.float32), seq_len=seq_len)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        history = program.fit(RunOptions(device="cpu", log_every=0, **options))
    return history.resumed_from, said.getvalue()


@pytest.mark.slow
def test_a_run_notes_sequences_of_another_length(gloo, data, tmp_path):
    pool = gloo(1)
    pool(fit_and_read, 8, steps=1, data=data, out=tmp_path)
    [(same, said)] = pool(fit_and_read, 8, steps=2, data=data, out=tmp_path)
    assert same == 1 and "another position" not in said
    [(other, said)] = pool(fit_and_read, 4, steps=3, data=data, out=tmp_path)
    assert other == 2 and "sequences have 8 tokens" in said and "sequences of 4, which is another position" in said
    meta = tmp_path / "checkpoints" / "step-3" / "meta.json"  # as of an earlier version, which recorded less
    fields = json.loads(meta.read_text())
    del fields["seq_len"], fields["files"]["meta.sha256"]
    meta.write_text(json.dumps(fields))
    [(old, said)] = pool(fit_and_read, 8, steps=4, data=data, out=tmp_path)
    assert old == 3 and "another position" not in said


def test_a_run_notes_another_corpus_and_no_other_file(gloo, data, tmp_path):
    pool, text = gloo(1), tmp_path / "text.txt"
    shutil.copy(data, text)
    pool(fit_and_read, 8, steps=1, data=data, out=tmp_path)
    resume = {"steps": 2, "resume": str(tmp_path / "checkpoints" / "step-1")}
    assert "corpus" not in pool(fit_and_read, 8, data=str(text), **resume)[0][1], "a copy is the same"
    os.utime(text, ns=(1, 1))
    assert "corpus" not in pool(fit_and_read, 8, data=str(text), **resume)[0][1]
    text.write_text(f"another {text.read_text()}")
    assert "the checkpoint is of another corpus; " in pool(fit_and_read, 8, data=str(text), **resume)[0][1]
    meta = tmp_path / "checkpoints" / "step-1" / "meta.json"  # as of an earlier version
    fields = json.loads(meta.read_text())
    del fields["files"]["meta.sha256"]
    for key, notes in ((open_corpus(data).key, 0), ("0" * 64, 1)):
        meta.write_text(json.dumps(fields | {"corpus": key}))
        [(step, said)] = pool(fit_and_read, 8, data=data, **resume)
        assert step == 1 and said.count("of a corpus whose files had other names, sizes or times") == notes
        assert "another corpus" not in said


def test_a_run_notes_why_it_validates_the_step_of_its_checkpoint(gloo, data, tmp_path):
    pool, first, alone = gloo(1), tmp_path / "first", tmp_path / "elsewhere" / "step-2"
    pool(fit, steps=2, data=data, out=first)
    shutil.copytree(first / "checkpoints" / "step-2", alone)
    validating = {"steps": 2, "data": data, "evaluate_every": 2, "evaluate_batches": 1}
    notes = {
        alone: "note: no record says that step 2 was validated: it is now\n",
        first: "note: step 2 was not validated before the run ended, and is now\n",
    }
    for resume, note in notes.items():
        [(_, said)] = pool(fit_and_read, 8, resume=str(resume), **validating)
        assert note in said and "step 2: validation loss" in said


class WithUnusedLayer(programs.TinyLlama):
    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(8, 8)


def fit_with_unused_layer(**options) -> tuple[int, list[float], float]:
    program = dataclasses.replace(programs.trainer(dtype=torch.float32), build_model=WithUnusedLayer)
    history = program.fit(RunOptions(device="cpu", log_every=0, **options))
    spare = history.training.model.spare.weight
    return history.resumed_from, [record.loss for record in history.steps], float(spare.sum())


def test_parameter_without_gradients_does_not_prevent_resuming(gloo, data, tmp_path, capfd):
    [pool] = [gloo(1)]
    [(_, losses, spare)] = pool(fit_with_unused_layer, steps=4, data=data)
    pool(fit_with_unused_layer, steps=2, data=data, out=tmp_path)
    assert pool(fit_with_unused_layer, steps=4, data=data, out=tmp_path) == [(2, losses[2:], spare)]


def crash(**options) -> str:
    """The error of a run whose first step fails."""
    with mock.patch("legoai.runtime.training.loop.take_step", side_effect=ZeroDivisionError("a crash")):
        try:
            fit(**options)
        except (ZeroDivisionError, RunError) as error:
            return str(error)
    raise AssertionError("the step did not fail")


def test_crash_before_the_first_branch_save_keeps_the_branch(gloo, data, tmp_path):
    [pool], out = [gloo(1)], tmp_path / "run"
    pool(fit, steps=4, data=data, out=out, save_every=2)
    assert "a crash" in pool(crash, steps=3, data=data, out=out, resume=str(out / "checkpoints" / "step-2"))[0]
    assert saved(out) == {"step-2", "step-4"}, "nothing was saved on the branch"
    assert pool(fit, steps=3, data=data, out=out)[0][0] == 2
    assert saved(out) == {"step-2", "step-4", "step-3-branch-1"}
    other = tmp_path / "other"
    pool(crash, steps=3, data=data, out=other, resume=str(out / "checkpoints" / "step-2"))
    assert pool(fit, steps=3, data=data, out=other)[0][0] == 2, "a run in a folder of its own, too"
    assert saved(other) == {"step-3"}


def test_resuming_elsewhere_without_a_step_to_make_begins_no_branch(gloo, data, tmp_path):
    [pool], out, other = [gloo(1)], tmp_path / "run", tmp_path / "other"
    [(_, losses)] = pool(fit, steps=4, data=data, out=out, save_every=2)
    pool(fit, steps=2, data=data, out=other, seed=7)
    for folder, place in ((out, out), (out, other), (other, out)):
        assert pool(fit, steps=2, data=data, out=folder, resume=str(place / "checkpoints" / "step-2")) == [(2, [])]
    assert not [*tmp_path.rglob("branches.json")]
    assert pool(fit, steps=5, data=data, out=out)[0][0] == 4
    assert pool(fit, steps=3, data=data, out=other)[0] != (2, losses[2:3]), "its own history"
    assert saved(other) == {"step-2", "step-3"}


def test_damaged_branch_resumes_from_its_start(gloo, data, tmp_path):
    pool = gloo(1)
    pool(fit, steps=4, data=data, out=tmp_path, save_every=2)
    pool(fit, steps=3, data=data, out=tmp_path, resume=str(tmp_path / "checkpoints" / "step-2"))
    damage(tmp_path, "step-3-branch-1")
    assert pool(fit, steps=3, data=data, out=tmp_path)[0][0] == 2
    assert saved(tmp_path) == {"step-2", "step-4", "step-3-branch-1"}
    assert pool(fit, steps=3, data=data, out=tmp_path)[0][0] == 3, "it was saved again, and is good"


def fit_in_job(job: str, restarts: int, **options) -> int:
    """The step that a run continued from whose ranks torchrun has started again some times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", job)
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        return fit(**options)[0]


def test_restarted_ranks_resume_from_the_last_checkpoint(gloo, data, tmp_path):
    [pool], out = [gloo(1)], tmp_path / "run"
    pool(fit, steps=4, data=data, out=out, save_every=2)
    back = {"data": data, "out": out, "resume": str(out / "checkpoints" / "step-2"), "save_every": 1}
    assert pool(fit_in_job, "a", 0, steps=2, **back) == [2], "and crashes before its first checkpoint"
    assert pool(fit_in_job, "a", 1, steps=3, **back) == [2]
    assert pool(fit_in_job, "a", 2, steps=5, **back) == [3]
    assert pool(fit_in_job, "a", 3, steps=5, **back) == [5]
    branch = {"step-3-branch-1", "step-4-branch-1", "step-5-branch-1"}
    assert saved(out) <= {"step-2", "step-4", *branch} and saved(out) >= branch
    assert pool(fit_in_job, "b", 1, steps=3, **{**back, "resume": str(out / "checkpoints" / "step-3-branch-1")}) == [3]
    assert pool(fit_in_job, "b", 2, steps=4, **{**back, "resume": str(out / "checkpoints" / "step-3-branch-1")}) == [3]
    assert "step-4-branch-2" in saved(out), "another job was asked to go back once more"
    new = {"data": data, "out": tmp_path / "new", "resume": "never"}
    assert [pool(fit_in_job, "c", restarts, steps=restarts + 1, **new) for restarts in (0, 1)] == [[0], [1]]


def test_run_with_only_damaged_checkpoints_requires_restart(gloo, data, tmp_path):
    pool = gloo(1)
    [(_, losses)] = pool(fit, steps=2, data=data, out=tmp_path, save_every=1)
    for step in ("step-1", "step-2"):
        damage(tmp_path, step)
    with pytest.raises(RunError, match="each of the 2 checkpoints") as caught:
        pool(fit, steps=2, data=data, out=tmp_path)
    assert "--restart" in caught.value.help
    assert pool(fit, steps=2, data=data, out=tmp_path, restart=True) == [(0, losses)]
    assert pool(fit, steps=2, data=data, out=tmp_path, restart=True) == [(2, [])], "it has what is good"


def test_loaded_weights_start_a_new_training(gloo, data, tmp_path):
    pool, first, second = gloo(1), tmp_path / "first", tmp_path / "second"
    [(_, losses)] = pool(fit, steps=5, data=data, out=first)
    for optimizer, place in (("SGD", first), ("AdamW", first / "checkpoints" / "step-5")):
        [(begun, after)] = pool(fit, optimizer, steps=1, data=data, out=second / optimizer, load_weights=place)
        assert begun == 0 and after[0] < losses[0] - 0.5, "the same samples as in the first step, and trained weights"
    [(resumed, after)] = pool(fit, steps=2, data=data, out=second / "AdamW", load_weights=first)
    assert resumed == 1, "what was begun goes on"
    with pytest.raises(RunError, match=r"--load-weights .*: no complete checkpoint"):
        pool(fit, steps=1, data=data, load_weights=tmp_path)


def fit_after_nans(optimizer: str, nans: int, ranks: int, **options) -> tuple[int, list[float], str]:
    """As :func:`fit`, where the loss of some first micro batches is not a number; and what the run said."""
    program = programs.trainer(dtype=torch.float32, dp_shard=ranks)
    batches = count()

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return token_cross_entropy(logits, targets) * (float("nan") if next(batches) < nans else 1.0)

    build = OPTIMIZERS[optimizer] or program.build_optimizer
    program = dataclasses.replace(program, build_optimizer=build, build_loss=lambda: loss)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        history = program.fit(RunOptions(device="cpu", log_every=0, on_nan="skip", **options))
    return history.resumed_from, [record.loss for record in history.steps], said.getvalue()


@pytest.mark.parametrize(
    "optimizer",
    slow_but([one for one in OPTIMIZERS if one != "SGD twice"], "SGD with all", "Muon and AdamW"),
)
def test_saving_before_the_first_update_does_not_change_the_training(gloo, data, tmp_path, optimizer):
    saving_before_the_first_update(gloo, data, tmp_path, optimizer, 1)


@pytest.mark.slow
def test_saving_before_the_first_update_on_two_ranks_does_not_change_the_training(gloo, data, tmp_path):
    saving_before_the_first_update(gloo, data, tmp_path, "AdamW", 2)


def saving_before_the_first_update(gloo, data, tmp_path, optimizer: str, ranks: int) -> None:
    pool, skipped = gloo(ranks), 2 * 4 // ranks  # two steps of all ranks
    usual = {"steps": 5, "data": data}
    [(_, losses, _), *_] = pool(fit_after_nans, optimizer, skipped, ranks, **usual)
    out = tmp_path / "run"
    [(_, saved_losses, _), *_] = pool(fit_after_nans, optimizer, skipped, ranks, out=out, save_every=1, keep=0, **usual)
    assert saved_losses[2:] == losses[2:]
    for step in (2, 3):
        place = str(out / "checkpoints" / f"step-{step}")
        [(begun, resumed, said), *_] = pool(fit_after_nans, optimizer, 0, ranks, resume=place, **usual)
        assert (begun, resumed) == (step, losses[step:])
        assert "note" not in said, "it goes on exactly as it was"
    if optimizer == "AdamW":
        [(begun, *_), *_] = pool(fit_after_nans, "SGD", 0, ranks, resume=str(out / "checkpoints" / "step-2"), **usual)
        assert begun == 2, "no state of another optimizer is lost"


class OtherNames(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = programs.TinyLlama()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens)


def fit_other_model(model: type[torch.nn.Module], **options) -> str:
    """What a run of another model says."""
    program = dataclasses.replace(programs.trainer(dtype=torch.float32), build_model=model)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        program.fit(RunOptions(**{"device": "cpu", "log_every": 0, "resume_other_plan": True} | options))
    return said.getvalue()


def test_checkpoint_without_any_tensor_of_the_model_is_refused(gloo, data, tmp_path):
    pool, first = gloo(1), tmp_path / "first"
    pool(fit, steps=1, data=data, out=first)
    for given, otherwise in (
        ({"load_weights": first}, "leave --load-weights out"),
        ({"resume": str(first)}, "choose another --out to start afresh"),
    ):
        with pytest.raises(RunError, match="none of the tensors of the plan's model by name and shape") as caught:
            pool(fit_other_model, OtherNames, steps=2, data=data, **given)
        assert caught.value.code == RunErrorCode.CHECKPOINT_OTHER_MODEL
        assert caught.value.help == f"take a checkpoint of such a model, or {otherwise}"
        with pytest.raises(RunError, match="is of another model") as caught:
            pool(fit_other_model, OtherNames, steps=2, data=data, resume_other_plan=False, **given)
        assert caught.value.help.endswith(f"has the same name and shape, or {otherwise}")


def test_tensors_that_start_afresh_are_counted_and_named(gloo, data, tmp_path):
    pool, first = gloo(1), tmp_path / "first"
    pool(fit, steps=1, data=data, out=first)
    [said] = pool(fit_other_model, WithUnusedLayer, steps=2, data=data, load_weights=first)
    assert "note: 2 tensors are not among them and start afresh: model.spare.bias, model.spare.weight\n" in said
    assert fresh_tensors(["a"], lacking="there") == "1 tensor is not there and starts afresh: a"
    assert fresh_tensors(list("abcd"), lacking="there").endswith(
        "4 tensors are not there and start afresh: a, b, c and 1 more"
    )


@pytest.mark.parametrize(
    ("optimizer", "keeps"),
    [("SGD", "SGD keeps"), ("SGD with momentum", "SGD keeps"), ("SGD twice", "SGD and SGD keep")],
)
def test_other_optimizer_is_refused_in_one_line(gloo, data, tmp_path, optimizer, keeps):
    pool = gloo(1)
    pool(fit, steps=1, data=data, out=tmp_path)
    with pytest.raises(
        RunError, match=rf"of another optimizer: it keeps exp_avg, exp_avg_sq, step .*, and {keeps} "
    ) as error:
        pool(fit, optimizer, steps=2, data=data, out=tmp_path)
    assert error.value.code == RunErrorCode.CHECKPOINT_OTHER_OPTIMIZER
    assert "--load-weights" in error.value.help
    [(resumed, losses)] = pool(fit, optimizer, steps=2, data=data, out=tmp_path, resume_other_plan=True)
    assert resumed == 1 and len(losses) == 1


def test_optimizer_with_equal_state_resumes(gloo, data, tmp_path):
    gloo(1)(fit, steps=1, data=data, out=tmp_path)
    assert gloo(1)(fit, "Adam", steps=2, data=data, out=tmp_path)[0][0] == 1


HOLDER = """
import pathlib, sys, time
from legoai.runtime.data.corpus import open_corpus
from legoai.runtime.launching.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_run_folder_lock_is_released_when_its_holder_is_killed(gloo, data, tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        (tmp_path / "checkpoints" / "step-1.tmp").mkdir(parents=True)
        with pytest.raises(RunError, match=rf"another run \(process {holder.pid} on .*\) writes into") as caught:
            gloo(1)(fit, steps=1, data=data, out=tmp_path)
        assert caught.value.code == RunErrorCode.FOLDER_IN_USE
        assert saved(tmp_path) == {"step-1.tmp"}, "it may be what the other run is writing"
        holder.send_signal(signal.SIGKILL)
    assert gloo(1)(fit, steps=1, data=data, out=tmp_path)[0][0] == 0
    assert saved(tmp_path) == {"step-1"}


def fit_and_lose_folder(out: Path, *, taken: bool, **options) -> None:
    """Train while the folder is moved away in the second step, and perhaps locked by another run."""
    program, steps = programs.trainer(dtype=torch.float32, dp_shard=dist.get_world_size()), count(1)
    with contextlib.ExitStack() as other:

        def lose(_: object) -> None:
            if next(steps) == 2 and dist.get_rank() == 0:
                out.rename(out.with_name("moved"))
                if taken:
                    other.enter_context(locked(out))

        program.fit(RunOptions(device="cpu", log_every=0, out=out, **options), observe=lose)


@pytest.mark.parametrize(
    "options",
    slow_but([{"save_every": 1}, {"save_every": 1, "save_async": True}, {"save_every": 9}], {"save_every": 9}),
)
@pytest.mark.parametrize("taken", some_slow([False, True], False))
def test_run_ends_where_its_folder_is_removed(gloo, data, tmp_path, taken, options):
    out, steps = tmp_path / "run", 4 if options["save_every"] == 1 else 3
    code = RunErrorCode.FOLDER_IN_USE if taken else RunErrorCode.FOLDER_GONE
    with pytest.raises(RunError, match="removed or moved while this run wrote there") as caught:
        gloo(2)(fit_and_lose_folder, out, taken=taken, steps=steps, data=data, **options)
    assert caught.value.code == code
    kept = {"step-2"} if options["save_every"] == 1 else {"step-3"}
    assert not (out / "checkpoints").exists() if taken else saved(out) == kept, "of the other run nothing is touched"
    if not taken:
        assert gloo(1)(fit, steps=steps, data=data, out=out)[0][0] == int(max(kept)[-1]), "it goes on from there"


def test_unwritable_folder_is_reported_before_construction(gloo, data, tmp_path):
    (tmp_path / "file").write_text("")
    started = time.monotonic()
    with pytest.raises(RunError, match=r"--out .*file/run: nothing can be written there") as caught:
        gloo(1)(fit, steps=1, data=data, out=tmp_path / "file" / "run")
    assert caught.value.code == RunErrorCode.FOLDER_NOT_WRITABLE
    assert time.monotonic() - started < 10
