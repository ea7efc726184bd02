"""The step of a program: its text for each kind of plan, and its interface to the trainer."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from legoai.runtime.data.sequences import SequenceBatch
from legoai.runtime.device import Device
from legoai.runtime.errors import RunError
from legoai.runtime.launching.options import RunOptions
from legoai.runtime.training.batches import Batch, Batches
from legoai.runtime.training.state import StepControl, StepResult, Training
from legoai.runtime.training.step import take_step
from support.marks import slow_but
from support.texts.plans import HEAD, SEQUENCE_PARALLEL, lowered
from support.training.meshed import UNITS

BATCH = f"{HEAD}batch (global = 16, micro = 2, seq_len = 64)\n"
FSDP = f"mesh (dp_shard = 2)\nfsdp on dp_shard {UNITS}"


def text_of(body: str) -> str:
    """The program of a plan, without the numbers of the plan's lines."""
    return re.sub(r"# tiny\.plan:\d+", "# plan", lowered(f"{BATCH}{body}").text)


def step_of(body: str) -> str:
    """The two functions of the step of a plan."""
    text = text_of(body)
    return text[text.index("def forward_backward") : text.index("def trainer()")].rstrip()


def test_minimal_plan_has_the_shortest_step():
    assert (
        step_of("precision (param = fp32)")
        == """\
def forward_backward(training: Training, batches: Batches) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=training.device)
    for batch in batches.take(MICRO_BATCHES):
        loss = training.loss(training.model(*batch.inputs), batch.targets)
        (loss / MICRO_BATCHES).backward()
        total += local_value(loss)
    return total / MICRO_BATCHES


def train_step(training: Training, batches: Batches) -> StepResult:
    mean_loss = forward_backward(training, batches)
    result = reduce_loss_and_norm(training, mean_loss)
    if training.may_update(result):
        training.optimizer.step()
    training.optimizer.zero_grad()
    return result"""
    )


@pytest.mark.parametrize(
    ("body", "lines"),
    {
        "the count of micro batches": (FSDP, ["MICRO_BATCHES = 4  # plan"]),
        "gradients reduced once": (
            f"{FSDP}comm (reduce = last_micro_batch)",
            [
                "        training.model.set_requires_gradient_sync(batch.is_last)  # plan",
                "        training.model.set_is_last_backward(batch.is_last)  # plan",
            ],
        ),
        "units that stay unsharded": (
            "mesh (dp_shard = 2)\nfsdp on dp_shard {\n  layers.* = unit(reshard = never)\n  root = unit\n}",
            ["    reshard_units(training.model)  # plan"],
        ),
        "tensor parallel": (
            f"mesh (tp = 2)\n{SEQUENCE_PARALLEL}",
            [
                "        with loss_parallel():  # plan",
                "            loss = training.loss(training.model(*batch.inputs), batch.targets)",
                "    reduce_partial_gradients(training.optimizer.param_groups)  # plan",
            ],
        ),
        "autocast": (
            "precision (param = bf16)",
            [
                "        with torch.autocast(training.device.type, dtype=torch.bfloat16):  # plan",
                "            loss = training.loss(training.model(*batch.inputs), batch.targets)",
                "        (loss / MICRO_BATCHES).backward()",
            ],
        ),
        "context parallel": (
            f"mesh (dp_shard = 2, cp = 2)\nfsdp on dp_shard {UNITS}context on cp",
            ["training.loss(training.model(*batch.inputs, positions=batch.positions), batch.targets)"],
        ),
        "clipping": (
            "clip (norm = 0.5)",
            [
                "        clip_gradients(training.optimizer.param_groups, max_norm=0.5, total_norm=result.norm)"
                "  # plan\n        training.optimizer.step()"
            ],
        ),
        "a schedule": (
            "schedule cosine(steps = 10)",
            ["    training.optimizer.zero_grad()\n    training.scheduler.step()  # plan"],
        ),
        "a pipeline": (
            "mesh (pp = 2)\npipeline on pp (schedule = 1F1B, microbatches = 4)",
            [
                "    share = divided(loss, by=MICRO_BATCHES)\n    return Schedule1F1B(",
                "    for batch in batches.take(MICRO_BATCHES, together=4):",
                "training.schedule.step(*batch.inputs, target=batch.targets, losses=losses, return_outputs=False)",
                "        add_losses(total, losses, scale=MICRO_BATCHES)",
            ],
        ),
    }.values(),
)
def test_plan_options_appear_in_the_step(body: str, lines: list[str]):
    text = text_of(body)
    for line in lines:
        assert line in text


def executed(text: str):
    namespace: dict = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    return namespace["trainer"]()


TRAINED = f"{HEAD}batch (global = 2, micro = 1, seq_len = 16)\n"


def test_trainer_runs_the_step_of_the_program(tmp_path):
    """An edited step is the one that runs."""
    text = lowered(f"{TRAINED}clip (norm = 1.0)").text
    idle = text.replace("        training.optimizer.step()\n", "        pass\n")
    data = tmp_path / "text.txt"
    data.write_text("All work and no play makes Jack a dull boy. " * 50)
    options = RunOptions(device="cpu", steps=2, data=str(data), log_every=0)
    weights = []
    for program in (text, idle):
        history = executed(program).fit(options)
        weights.append({name: value.detach().clone() for name, value in history.training.model.named_parameters()})
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_inconsistent_number_of_micro_batches_is_an_error(tmp_path):
    text = lowered(TRAINED).text.replace("MICRO_BATCHES = 2 ", "MICRO_BATCHES = 1 ")
    data = tmp_path / "text.txt"
    data.write_text("All work and no play makes Jack a dull boy. " * 50)
    with pytest.raises(RunError, match="takes 1 micro batches of a rank, and a global batch of 2 samples has 2"):
        executed(text).fit(RunOptions(device="cpu", steps=1, data=str(data), log_every=0))


class _Ones:
    def next(self) -> SequenceBatch:
        ones = torch.ones(2, 64, dtype=torch.int64)
        return SequenceBatch(tokens=ones, targets=ones)

    def skip(self, batches: int) -> None:
        pass


def unsharded_after_a_step(text: str) -> int:
    """Units that hold unsharded parameters when the step is over."""
    trainer = executed(text)
    training = trainer.prepare(Device(type="cpu"), seed=0)
    take_step(trainer, training, Batches(training, _Ones()), step=0)
    units = [module for module in training.model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    assert groups
    return sum(not group.is_sharded for group in groups)


RESHARDED = {
    "as the default is": FSDP,
    "after backward": "mesh (dp_shard = 2)\nfsdp on dp_shard {\n  layers.* = unit(reshard = after_backward)\n}\n",
    "never": "mesh (dp_shard = 2)\nfsdp on dp_shard {\n  layers.* = unit(reshard = never)\n}\n",
    "reduced once": f"{FSDP}comm (reduce = last_micro_batch)",
    "stages": "mesh (pp = 2)\nfsdp on dp_shard {\n  layers.* = unit(reshard = after_backward)\n}\n"
    "pipeline on pp (schedule = 1F1B)\n",
    "two stages of a rank": f"mesh (pp = 2)\nfsdp on dp_shard {UNITS}pipeline on pp (schedule = Interleaved1F1B)\n",
    "zero bubble": f"mesh (pp = 2)\nfsdp on dp_shard {UNITS}pipeline on pp (schedule = ZBVZeroBubble)\n",
}


@pytest.mark.parametrize("name", slow_but(RESHARDED, "zero bubble"))
def test_parameters_are_resharded_after_the_optimizer_step(name: str, gloo):
    """Remaining unsharded parameters would be those of the previous step; the program frees them."""
    assert gloo(2)(unsharded_after_a_step, lowered(f"{BATCH}{RESHARDED[name]}").text) == [0, 0]


def test_non_finite_step_changes_only_the_learning_rate():
    """The update is skipped for good where the run says so; the schedule goes on."""
    trainer = executed(lowered(f"{BATCH}schedule cosine(steps = 10)").text)
    calls = []

    class Optimizer:
        param_groups: tuple = ()

        def step(self):
            calls.append("step")

        def zero_grad(self):
            calls.append("zero_grad")

    class Scheduler:
        def step(self):
            calls.append("schedule")

    @dataclasses.dataclass
    class Fake:
        optimizer: object = dataclasses.field(default_factory=Optimizer)
        scheduler: object = dataclasses.field(default_factory=Scheduler)
        may_update: object = Training.may_update

    step = trainer.train_step
    namespace = dict(step.__globals__)
    namespace["forward_backward"] = lambda *_: torch.zeros(())
    for norm, expected in ((float("nan"), ["zero_grad", "schedule"]), (1.0, ["step", "zero_grad", "schedule"])):
        result = StepResult(loss=0.0, norm=norm, stops=False)
        namespace["reduce_loss_and_norm"] = lambda *_, result=result: result
        changed = type(step)(step.__code__, namespace)
        training = Fake(may_update=lambda result: result.finite)
        calls.clear()
        assert changed(training, None) is result
        assert calls == expected


def test_last_micro_batch_of_a_step_is_marked():
    source = _Ones()
    training = SimpleNamespace(staged=None, positions=None, device=torch.device("cpu"), control=StepControl())
    batches = Batches(training, source)  # type: ignore[arg-type]
    found = list(batches.take(3))
    assert [batch.is_last for batch in found] == [False, False, True]
    assert all(isinstance(batch, Batch) for batch in found)
    assert batches.taken == 3
