"""Stages and learning rates of imported configs, against TorchTitan's own rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legoai.dsl.importing.pipelines import _weighted
from legoai.dsl.lint import lint
from legoai.runtime.optimizer.schedule import warmup_schedule
from support.texts.importing import import_config

PIPELINE = """\
[model]
flavor = "{flavor}"
[training]
local_batch_size = 16
[parallelism]
pipeline_parallel_degree = {pp}
{more}
"""


def statement_of(text: str, keyword: str) -> str:
    """A statement in one line, however the formatter broke it."""
    statement = next(item for item in re.split(r"\n(?=\w)", text) if item.startswith(keyword))
    first, *rest = [line.strip() for line in statement.strip().splitlines()]
    return re.sub(r" +=", " =", first + ", ".join(rest).replace(", )", ")")) if rest else first


def statement(flavor: str, pp: int, more: str = "", keyword: str = "pipeline") -> str:
    devices = 8 * pp
    text = PIPELINE.format(flavor=flavor, pp=pp, more=more)
    cluster = f"h100_sxm(hosts = {pp}, fabric = infiniband_ndr)"
    found = import_config(text, "x.toml", plan="x", cluster=cluster, devices=devices)
    assert found.text is not None, found.diagnostics
    linted = lint(found.text, "x.plan", directory=Path())
    assert [item.message for item in linted.diagnostics if item.severity == "error"] == []
    return statement_of(found.text, keyword)


@pytest.mark.parametrize(
    ("flavor", "pp", "more", "wanted"),
    [
        ("8B", 2, "", "pipeline on pp (schedule = 1F1B)"),
        ("8B", 4, "", "pipeline on pp (schedule = 1F1B, split = [8, 9, 8, 7])"),
        ("405B", 16, "", "pipeline on pp (schedule = 1F1B, split = [7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7])"),
        ("8B", 4, "pipeline_parallel_first_stage_less_layers = 0\npipeline_parallel_last_stage_less_layers = 0",
         "pipeline on pp (schedule = 1F1B)"),
        ("8B", 2, 'pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 6',
         "pipeline on pp (schedule = Interleaved1F1B, stages = 6, split = [5, 6, 6, 6, 5, 4])"),
        ("debugmodel", 2, 'pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 1',
         "pipeline on pp (schedule = Interleaved1F1B, stages = 8, split = "
         "[layers.0, layers.1, layers.2, layers.3, layers.4, layers.5, norm])"),
        ("8B", 2, 'pipeline_parallel_schedule = "gpipe"\npipeline_parallel_split_points = ["layers.20"]',
         "pipeline on pp (schedule = GPipe, split = [layers.20])"),
    ],
)  # fmt: skip
def test_stages_equal_torchtitan_stages(flavor: str, pp: int, more: str, wanted: str):
    assert statement(flavor, pp, more) == wanted


def parts(*ranges: tuple[int, int], first: str = "tok_embeddings", last: str = "norm, output") -> str:
    """Modules of each part, blocks by ranges, in any order within a part."""
    made = [[f"layers.{number}" for number in reversed(range(*one))] for one in ranges]
    made[0] += [first]
    made[-1] = [*last.split(", "), *made[-1]]
    return f"module_fqns_per_model_part = {made}".replace("'", '"')


@pytest.mark.parametrize(
    ("text", "split"),
    [
        (parts((0, 16), (16, 32)), "[layers.16]"),
        (parts((0, 5), (5, 32)), "[layers.5]"),
        (parts((0, 32), (0, 0)), "[norm]"),
        (parts((0, 0), (0, 32)), "[layers.0]"),
        ('module_fqns_per_model_part = [["tok_embeddings", "norm", ' + ", ".join(
            f'"layers.{number}"' for number in range(32)) + '], ["output"]]', "[output]"),
    ],
    ids=["halves", "uneven", "all blocks first", "all blocks last", "norm first"],
)  # fmt: skip
def test_a_part_is_a_set_of_modules_that_begins_with_the_first_of_the_model(text: str, split: str):
    assert statement("8B", 2, text) == f"pipeline on pp (schedule = 1F1B, split = {split})"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (parts((0, 8), (0, 0)), "no part has `layers.8`"),
        (parts((0, 16), (16, 32), first=""), "`` is no module of this model"),
        (parts((0, 16), (16, 32), last="norm"), "no part has `output`"),
        (parts((0, 16), (16, 32), last="norm, lm_head"), "`lm_head` is no module of this model"),
        (parts((0, 16), (16, 33)), "`layers.32` is no module of this model"),
        (parts((0, 17), (16, 32)), "parts are not the modules in their order, each in one part"),
        (parts((16, 32), (0, 16)), "parts are not the modules in their order, each in one part"),
        (parts((0, 16), (16, 16), (16, 32)), "a part has no modules"),
        ("module_fqns_per_model_part = []", "no part has `tok_embeddings`"),
    ],
)
def test_parts_that_do_not_divide_the_model_in_its_order_are_reported(text: str, problem: str):
    config = PIPELINE.format(flavor="8B", pp=2, more=text)
    [found] = import_config(config, "x.toml", plan="x", cluster="h100_sxm(hosts = 2)", devices=16).diagnostics
    assert (found.code, found.message) == ("LP023", problem)


@pytest.mark.parametrize(
    ("schedule", "per_stage", "first", "problem", "near"),
    [
        ("Interleaved1F1B", 10, 2, "count as 83: 10 on a stage make 9 stages, no multiple of 4 ranks", 11),
        ("1F1B", 10, 2, "count as 83: 10 on a stage make 9 stages, no multiple of 4 ranks", 21),
        ("Interleaved1F1B", 8, 8, "make 12 stages, of which one would have no blocks, or the first or last fewer", 12),
    ],
)
def test_blocks_that_make_no_stages_are_counted_and_the_nearest_number_makes_some(
    schedule: str, per_stage: int, first: int, problem: str, near: int
):
    def options(per_stage: int) -> str:
        return (
            f'pipeline_parallel_schedule = "{schedule}"\npipeline_parallel_layers_per_stage = {per_stage}\n'
            f"pipeline_parallel_first_stage_less_layers = {first}"
        )

    text = PIPELINE.format(flavor="70B", pp=4, more=options(per_stage))
    [found] = import_config(text, "x.toml", plan="x", cluster="h100_sxm(hosts = 4)", devices=32).diagnostics
    assert f"80 blocks, with {first} and 1 for embedding and output" in found.message
    assert problem in found.message
    assert found.help == (f"the nearest number with as many stages on every rank is {near}",)
    assert statement("70B", 4, options(near))


@given(st.integers(1, 130), st.integers(2, 20), st.integers(0, 3), st.integers(0, 3))
def test_embedding_and_output_count_as_blocks_in_the_split(layers: int, stages: int, first: int, last: int):
    """Places for all are dealt out in rounds; the embedding takes the first ones, the output the last ones."""
    found = _weighted(layers, stages, first, last)
    places = [0] * stages
    for number in range(layers + first + last):
        places[number % stages] += 1
    wanted = [places[0] - first, *places[1:-1], places[-1] - last]
    if min(places) >= max(first, last) and min(wanted) >= 0 and all(wanted[1:-1]):
        assert found == wanted
    else:
        assert found is None


def test_passes_of_a_pipeline_add_up():
    assert statement("8B", 2, "pipeline_parallel_microbatch_size = 2", "batch") == (
        "batch   (global = 128, micro = 2, seq_len = 2048)"
    )
    text = PIPELINE.format(flavor="8B", pp=2, more="").replace("= 16\n", "= 16\nglobal_batch_size = 256\n")
    found = import_config(text, "x.toml", plan="x", cluster="h100_sxm(hosts = 2, fabric = infiniband_ndr)", devices=16)
    assert "pipeline on pp (schedule = 1F1B, microbatches = 16)" in found.text


def torchtitan_rate(step: int, *, steps: int, warmup: int, ratio: float | None, form: str, floor: float) -> float:
    """The factor of `components/lr_scheduler.py`: warm-up, a stable phase of at least one step, decay."""
    warmup = min(warmup, steps)
    decay = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)
    stable = steps + 1 - warmup - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < warmup + stable:
        return 1.0
    progress = (step + 1 - warmup - stable) / decay
    shape = {
        "linear": 1 - progress,
        "sqrt": 1 - progress**0.5,
        "cosine": 0.5 * (1 + torch.cos(torch.tensor(torch.pi * progress, dtype=torch.float64)).item()),
    }[form]
    return floor + (1 - floor) * shape


@pytest.mark.parametrize("form", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("ratio", [None, 0.3, 1.0])
@pytest.mark.parametrize(("steps", "warmup"), [(20, 5), (20, 0), (10, 30)])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_learning_rates_equal_torchtitan_learning_rates(
    form: str, ratio: float | None, steps: int, warmup: int, floor: float
):
    more = "" if ratio is None else f"decay_ratio = {ratio}\n"
    text = f'[training]\nsteps = {steps}\n[lr_scheduler]\nwarmup_steps = {warmup}\ndecay_type = "{form}"\n'
    text += f"min_lr_factor = {floor}\n{more}"
    found = import_config(text, "x.toml", plan="x", cluster="h100_sxm", devices=8)
    analysis = lint(found.text, "x.plan", directory=Path()).analysis
    said = analysis.plan.schedule.form
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    length = getattr(said, "steps", steps)
    decay = getattr(said, "decay", length - said.warmup)
    shape = getattr(said, "shape", said.name)
    scheduler = warmup_schedule(
        optimizer, warmup=said.warmup, steps=length, decay=shape, floor=getattr(said, "floor", 0.0),
        stable=0 if said.name == "constant" else length - said.warmup - decay,
    )  # fmt: skip
    for step in range(steps):
        wanted = torchtitan_rate(step, steps=steps, warmup=warmup, ratio=ratio, form=form, floor=floor)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(wanted)
        optimizer.step()
        scheduler.step()


def test_the_warm_up_of_2024_differs_by_a_step_which_is_noted():
    """`linear_warmup_linear_decay` of December 2024 divides by a step more than that of 2026."""
    texts = ("[training]\nwarmup_steps = 5\nsteps = 20\n", "[lr_scheduler]\nwarmup_steps = 5\n[training]\nsteps = 20\n")
    old, new = (import_config(text, "x.toml", plan="x", cluster="h100_sxm", devices=8) for text in texts)
    [said] = [note for note in old.notes if "warms up" in note]
    assert "by (step + 1) / 6, " in said
    assert said.endswith("here by (step + 1) / 5")
    assert not [note for note in new.notes if "warms up" in note]
    without = import_config(texts[0].replace("= 5", "= 0"), "x.toml", plan="x", cluster="h100_sxm", devices=8)
    assert not [note for note in without.notes if "warms up" in note]
