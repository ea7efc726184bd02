"""Rules about pipelines agree with PyTorch's schedule classes."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules

from legoai.dsl.analysis.model import without_tied_embeddings
from legoai.dsl.analysis.stages.orders import OrderError, order_faults, read_order
from legoai.dsl.lint import lint
from support.marks import slow_but
from support.texts.rule_plans import codes, diagnostics, message, place

SINGLE = {"GPipe": schedules.ScheduleGPipe, "1F1B": schedules.Schedule1F1B}
MULTI = {
    "Interleaved1F1B": schedules.ScheduleInterleaved1F1B,
    "LoopedBFS": schedules.ScheduleLoopedBFS,
    "InterleavedZeroBubble": schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": schedules.ScheduleZBVZeroBubble,
    "DualPipeV": schedules.ScheduleDualPipeV,
}


def stages_of_rank_0(ranks: int, each: int, submodule: nn.Module | None = None) -> list[Any]:
    """Stages of rank 0 with the attributes that a schedule's constructor reads, without process groups."""
    total = ranks * each
    return [
        SimpleNamespace(
            num_stages=total,
            group_size=ranks,
            group_rank=0,
            stage_index=index * ranks,
            submod=submodule,
            is_first=index == 0,
            is_last=index * ranks == total - 1,
            has_backward=True,
        )
        for index in range(each)
    ]


def schedule_of(name: str, ranks: int, each: int, micro_batches: int, submodule: nn.Module | None = None) -> Any:
    stages = stages_of_rank_0(ranks, each, submodule)
    if name in SINGLE:
        return SINGLE[name](stages[0], micro_batches, loss_fn=torch.sum)
    return MULTI[name](stages, micro_batches, loss_fn=torch.sum)


def accepted(name: str, ranks: int, each: int, micro_batches: int) -> bool:
    """Whether PyTorch makes the schedule."""
    try:
        schedule_of(name, ranks, each, micro_batches)
    except ValueError:
        return False
    return True


def pipeline(name: str, ranks: int, stages: int | None, micro_batches: int) -> str:
    """A plan whose data-parallel degree is 1, so that its global batch counts the micro batches."""
    given = f", stages = {stages}" if stages else ""
    return f"""
    model llama3("70b")
    batch (global = {micro_batches}, micro = 1, seq_len = 256)
    mesh (pp = {ranks})
    pipeline on pp (schedule = {name}{given})
    """


def test_schedule_name_1f1b_parses_as_a_name() -> None:
    assert codes(pipeline("1F1B", 2, None, 8)).isdisjoint({"LP102", "LP103", "LP207", "LP208"})


@pytest.mark.parametrize(
    ("path", "code", "kind"),
    [("1.1", "LP207", "reads as"), ("1.0", "LP207", "reads as"), ("1.1.0", "LP102", "begins with"),
     ("1.2.conv", "LP102", "begins with")],
)  # fmt: skip
def test_split_at_a_path_of_numbers_is_written_in_quotes(path: str, code: str, kind: str) -> None:
    def found(split: str) -> list[Any]:
        text = f'plan p\nmodel llama3("tiny")\nmesh (pp = 3)\npipeline on pp (split = [{split}])\n'
        return [item for item in lint(text, "p.plan", directory=Path()).diagnostics if item.code == code]

    assert found(f'"0.5", {path}')[0].help == (f'a path that {kind} a number stands in quotes: `"{path}"`',)
    assert not found(f'"0.5", "{path}"')


@pytest.mark.parametrize("name", slow_but([*SINGLE, *MULTI], "Interleaved1F1B", "DualPipeV"))
def test_micro_batches_are_refused_exactly_as_in_pytorch(name: str) -> None:
    each = 1 if name in SINGLE else 2
    for ranks in (2, 3, 4):
        for micro_batches in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 16, 18):
            refused = codes(pipeline(name, ranks, None, micro_batches)) & {"LP503", "LP504"}
            assert bool(refused) is not accepted(name, ranks, each, micro_batches), (name, ranks, micro_batches)


@pytest.mark.parametrize("name", [*SINGLE, *MULTI])
@pytest.mark.parametrize("each", [1, 2, 3, 4])
def test_stages_per_rank_must_fit_the_schedule(name: str, each: int) -> None:
    found = "LP502" in codes(pipeline(name, 4, 4 * each, 48))
    if name in SINGLE:
        assert found is (each != 1)  # its constructor takes one stage and could not be given more
    elif each == 1:
        assert found  # PyTorch would make it a slower 1F1B
    else:
        assert found is not accepted(name, 4, each, 48)


@pytest.mark.parametrize("name", ["LoopedBFS", "ZBVZeroBubble", "DualPipeV"])
def test_stages_must_be_a_multiple_of_the_ranks(name: str) -> None:
    for stages in range(1, 17):
        assert ("LP501" in codes(pipeline(name, 4, stages, 16))) is bool(stages % 4)


def test_messages_state_numbers_and_legal_values() -> None:
    text = pipeline("Interleaved1F1B", 4, 8, 11)
    found = next(item for item in diagnostics(text) if item.code == "LP504")
    assert "11 micro batches in 2 rounds" in found.message
    assert "a global batch of 10 gives 10" in found.help[0]
    assert "one of 12 gives 12" in found.help[0]
    assert place(text, "LP504") == "Interleaved1F1B"
    assert "needs exactly 2 stages on each rank" in message(pipeline("ZBVZeroBubble", 4, 12, 16), "LP502")
    assert "at least as many micro batches as stages: 8, not 7" in message(pipeline("DualPipeV", 4, 8, 7), "LP503")


def test_more_stages_than_blocks_are_refused() -> None:
    plan = "mesh (pp = 4)\npipeline on pp (schedule = LoopedBFS, stages = {})"
    assert "LP505" in codes(plan.format(8))
    assert "LP505" not in codes("mesh (pp = 4)\npipeline on pp (schedule = 1F1B)")


@pytest.mark.parametrize(
    ("split", "code"),
    [
        ("[layers.9, layers.2, layers.3]", "LP506"),
        ("[layers.1, layers.2.attention, layers.3]", "LP507"),
        ("[layers.1, layers, layers.3]", "LP507"),
        ("[layers.1, layers.3, layers.2]", "LP508"),
        ("[layers.1, layers.2, layers.2]", "LP508"),
        ("[layers.1, layers.2]", "LP509"),
        ("[tok_embeddings, layers.2, layers.3]", "LP510"),
        ("[layers.0, layers.2, layers.3]", None),
        ("[layers.1, layers.3, norm]", None),
        ("[layers.1, layers.3, output]", None),
    ],
)
def test_invalid_split_points_are_refused(split: str, code: str | None) -> None:
    found = codes(f"mesh (pp = 4)\npipeline on pp (schedule = 1F1B, split = {split})")
    assert found & {"LP506", "LP507", "LP508", "LP509", "LP510"} == ({code} if code else set())


def test_split_before_a_module_that_holds_others_is_refused() -> None:
    nested = 'model python("support.models.other_authors:build", kind = "nested")\nmesh (pp = 2)\n'
    found = message(f"{nested}pipeline on pp (schedule = 1F1B, split = [inner])", "LP507")
    assert found == "a stage cannot begin with `inner`, which holds several modules that one may begin with"
    found = message(f"{nested}pipeline on pp (schedule = 1F1B, split = [inner.blocks])", "LP507")
    assert found.endswith("is a list of modules")


def test_microbatches_must_divide_the_micro_batches_per_rank() -> None:
    plan = "mesh (pp = 2, dp_shard = 4)\npipeline on pp (microbatches = {})"
    assert "16 micro batches that the batch has for each rank are no multiple of 12" in message(
        plan.format(12), "LP511"
    )
    assert "LP511" not in codes(plan.format(16)) | codes(plan.format(8)) | codes(plan.format(1))


def test_schedule_limits_apply_to_micro_batches_per_pass():
    plan = "mesh (pp = 2, dp_shard = 4)\npipeline on pp (schedule = {}, microbatches = {})"
    assert "LP503" in codes(plan.format("DualPipeV", 2))
    assert "LP503" not in codes(plan.format("DualPipeV", 4))
    assert "LP504" not in codes(plan.format("Interleaved1F1B", 4))


def test_tied_parameters_must_share_a_stage() -> None:
    plan = 'model gpt2("small"{})\nmesh (pp = 4)\npipeline on pp (schedule = 1F1B)'
    assert "`tok_embeddings.weight` and `output.weight` are one parameter" in message(plan.format(""), "LP515")
    [tied] = [item for item in diagnostics(plan.format("")) if item.code == "LP515"]
    assert tied.help == ("give each place a parameter of its own: `tie_embeddings = false`",)
    for family, cure in (("python", "in the factory"), ("huggingface", "`tie_word_embeddings = false`")):
        analysis: Any = SimpleNamespace(plan=SimpleNamespace(model=SimpleNamespace(family=family)))
        assert without_tied_embeddings(analysis) == cure
    assert "LP515" not in codes(plan.format(", tie_embeddings = false"))
    assert "LP515" not in codes('model gpt2("small")\nmesh (pp = 1)\npipeline on pp (stages = 1)')


def test_open_split_parts_the_first_and_the_last_module() -> None:
    plan = 'model gpt2("small"{})\nmesh (pp = {}, dp_shard = rest)\npipeline on pp (schedule = 1F1B, split = auto)'
    assert "LP515" in codes(plan.format("", "4"))
    assert "LP515" not in codes(plan.format("", "auto in [1, 4]"))
    assert "LP515" not in codes(plan.format(", tie_embeddings = false", "4"))


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize(
    ("unit", "wrong"),
    [
        ("unit", True),
        ("unit(reshard = after_forward)", True),
        ("unit(reshard = 2)", True),
        ("unit(reshard = after_backward)", False),
        ("unit(reshard = never)", False),
        ("none", False),
    ],
)
def test_reshard_after_forward_with_split_backward_is_refused(schedule: str, unit: str, wrong: bool) -> None:
    plan = """
    mesh (pp = 2, dp_shard = 4)
    fsdp on dp_shard {{ layers.* = {} }}
    pipeline on pp (schedule = {})
    """
    assert ("LP516" in codes(plan.format(unit, schedule))) is wrong
    assert "LP516" not in codes(plan.format(unit, "Interleaved1F1B"))


@pytest.mark.parametrize("name", [*SINGLE, *MULTI])
def test_compiled_stages_are_refused_as_in_pytorch(name: str) -> None:
    compiled = nn.Sequential(torch.compile(nn.Linear(2, 2)))  # type: ignore[arg-type]
    try:
        schedule_of(name, 2, 1 if name in SINGLE else 2, 8, compiled)
        legal = True
    except RuntimeError:
        legal = False
    plan = f"mesh (pp = 2)\npipeline on pp (schedule = {name})\ncompile {{ layers.* = inductor }}"
    assert ("LP517" in codes(plan)) is not legal


def test_large_pipeline_bubble_is_reported() -> None:
    few = pipeline("1F1B", 8, None, 16)
    assert "with equal stages, each rank waits for 30% of the forward and backward" in message(
        few, "LP820"
    )  # 7 / (16 + 7)
    assert "LP820" not in codes(pipeline("1F1B", 8, None, 21))  # 7 / 28 is a quarter
    assert "LP820" not in codes(pipeline("Interleaved1F1B", 8, 16, 16))
    assert "LP820" not in codes(pipeline("ZBVZeroBubble", 8, 16, 16))


def in_passes(batch: int, microbatches: int, schedule: str = "1F1B", ranks: int = 2) -> str:
    return f"""
    model llama3("tiny", n_layers = 8)
    cluster cpu(devices = {ranks})
    batch (global = {batch}, micro = 2, seq_len = 256)
    mesh (pp = {ranks})
    pipeline on pp (schedule = {schedule}, microbatches = {microbatches})
    """


@pytest.mark.parametrize(
    ("code", "wrong", "cure", "repaired"),
    [
        ("LP820", (16, 2), "`microbatches = 4` brings", (16, 4)),
        ("LP820", (14, 1), "`microbatches = 7` brings", (14, 7)),
        ("LP820", (4, 2), "`microbatches = 3` with a global batch of 6 brings", (6, 3)),
        ("LP820", (36, 3, "Interleaved1F1B, stages = 8", 4), "`microbatches = 6` brings", (36, 6)),
        # 9 and 27 do not come out even in rounds
        ("LP820", (54, 3, "Interleaved1F1B, stages = 8", 4), "`microbatches = 5` with a global batch of 60", (60, 5)),
        ("LP503", (32, 2, "1F1B", 3), "`microbatches = 4` gives enough", (32, 4)),
        ("LP503", (4, 2, "1F1B", 3), "`microbatches = 3` with a global batch of 6 gives enough", (6, 3)),
    ],
)
def test_more_micro_batches_of_a_pass_divide_those_of_a_step(
    code: str, wrong: tuple[Any, ...], cure: str, repaired: tuple[int, int]
) -> None:
    [found] = [item for item in diagnostics(in_passes(*wrong)) if item.code == code]
    assert any(line.startswith(cure) for line in found.help)
    assert codes(in_passes(*repaired, *wrong[2:])).isdisjoint({"LP504", "LP511", code})


def order_text(name: str, ranks: int, each: int, micro_batches: int, *, communication: bool = False) -> str:
    """The order of one of PyTorch's schedules, as its `_dump_csv` writes it."""
    schedule = schedule_of(name, ranks, each, micro_batches)
    order = schedule.pipeline_order_with_comms if communication else schedule.pipeline_order
    return "".join(",".join("" if cell is None else str(cell) for cell in order[rank]) + "\n" for rank in sorted(order))


def loads(path: Path, ranks: int, each: int, micro_batches: int) -> bool:
    """Whether PyTorch's runtime takes the file."""
    runtime = schedules._PipelineScheduleRuntime(stages_of_rank_0(ranks, each), micro_batches, loss_fn=torch.sum)
    try:
        runtime._load_csv(str(path))
    except (AssertionError, RuntimeError, ValueError, KeyError):
        return False
    return True


@pytest.mark.parametrize("communication", [False, True])
@pytest.mark.parametrize("name", MULTI)
def test_pytorch_order_files_have_no_faults(name: str, communication: bool) -> None:
    order = read_order(order_text(name, 4, 2, 16, communication=communication))
    assert (len(order.ranks), order.stages, order.micro_batches) == (4, 8, 16)
    assert order.with_communication is communication
    assert order.splits_backward is (name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"))
    assert list(order_faults(order)) == []


@pytest.mark.parametrize("name", MULTI)
def test_damaged_orders_are_refused_as_in_pytorch(name: str, tmp_path: Path) -> None:
    random.seed(name)
    rows = [row.split(",") for row in order_text(name, 3, 2, 6).splitlines()]
    verdicts = []
    for _ in range(60):
        damaged = [list(row) for row in rows]
        row = random.choice(damaged)
        filled = [index for index, cell in enumerate(row) if cell]
        first, second = random.sample(filled, 2)
        match random.choice(("swap", "drop", "move")):
            case "swap":
                row[first], row[second] = row[second], row[first]
            case "drop":
                row[first] = ""
            case "move":
                row.insert(second, row.pop(first))
        text = "".join(",".join(cells) + "\n" for cells in damaged)
        (tmp_path / "order.csv").write_text(text)
        runs = not list(order_faults(read_order(text)))
        assert runs is loads(tmp_path / "order.csv", 3, 2, 6), text
        verdicts.append(runs)
    assert len(set(verdicts)) == 2, "the damage was always or never harmful"


def test_open_pipeline_may_come_to_have_one_rank() -> None:
    plan = "batch (global = 32, micro = 1)\nmesh (pp = {}, tp = 8)\nshard standard on tp\npipeline on pp ({})"
    for options, code in (("microbatches = 3", "LP511"), ("stages = 2, schedule = 1F1B, microbatches = 1", "LP503")):
        assert code in codes(plan.format(2, options))
        assert code not in codes(plan.format("auto in [1, 2]", options))


def test_receive_without_send_is_a_fault() -> None:
    text = order_text("LoopedBFS", 2, 2, 2, communication=True).replace("0SEND_F1,", "")
    assert "waits for ever before `1F1`" in next(order_faults(read_order(text)))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0F0,0B0,0B0\n", "`0B0` stands twice"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 is on rank 0 and, by `0F1`, on rank 1"),
        ("0F0,0I0\n", "stage 0 does `F` and `I` of micro batch 0"),
        ("0B0,0F0\n", "rank 0 waits for ever before `0B0`: `0F0` never comes before it"),
        ("0F0,0UNSHARD,,0B0\n", "empty cells"),
    ],
)
def test_order_faults_are_listed(text: str, fault: str) -> None:
    assert fault in next(order_faults(read_order(text)))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("0F0,hello\n", (1, 2)),
        ("0F0\n0F0x\n", (2, 1)),
        ("\n", (1, 1)),
        ("0F\n", (1, 1)),
        ("(0F0)OVERLAP_F_B\n", (1, 1)),
    ],
)
def test_invalid_order_text_reports_line_and_column(text: str, where: tuple[int, int]) -> None:
    with pytest.raises(OrderError) as caught:
        read_order(text)
    assert (caught.value.line, caught.value.column) == where


def test_order_file_errors_are_reported_in_a_plan(tmp_path: Path) -> None:
    plan = """
    batch (global = {}, micro = 1, seq_len = 256)
    mesh (pp = 2)
    pipeline on pp (schedule = csv("order.csv"){})
    """
    order_codes = {"LP512", "LP513", "LP514"}
    assert codes(plan.format(4, ""), tmp_path) & order_codes == {"LP512"}
    file = tmp_path / "order.csv"
    file.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in message(plan.format(4, ""), "LP512", tmp_path)
    file.write_text("0F0,what\n")
    assert "line 1, cell 2: `what` is no action" in message(plan.format(4, ""), "LP512", tmp_path)
    file.write_text(order_text("Interleaved1F1B", 2, 2, 4))
    assert not codes(plan.format(4, ""), tmp_path) & order_codes
    assert "orders 4 micro batches, and the plan has 8" in message(plan.format(8, ""), "LP513", tmp_path)
    assert "orders 4 stages, and the plan has 6" in message(plan.format(4, ", stages = 6"), "LP513", tmp_path)
    assert "orders 4 stages, and the plan has 2" in message(plan.format(4, ", stages = 2"), "LP513", tmp_path)
    file.write_text("\n".join(reversed(file.read_text().splitlines())).replace("0F0,", "", 1))
    assert "cannot run" in message(plan.format(4, ""), "LP514", tmp_path)


def test_order_with_communication_must_gather_and_reduce_shards(tmp_path: Path) -> None:
    plan = """
    batch (global = 16, micro = 1, seq_len = 256)
    mesh (pp = 2, dp_shard = 4)
    fsdp on dp_shard { layers.* = unit(reshard = after_backward) }
    pipeline on pp (schedule = csv("order.csv"))
    """
    text = order_text("Interleaved1F1B", 2, 2, 4, communication=True)
    (tmp_path / "order.csv").write_text(text)
    assert "LP514" not in codes(plan, tmp_path)
    (tmp_path / "order.csv").write_text(text.replace("0REDUCE_GRAD,", ""))
    assert "no `0REDUCE_GRAD`, which `fsdp` needs" in message(plan, "LP514", tmp_path)


def test_order_file_with_split_backward_is_a_split_schedule(tmp_path: Path) -> None:
    plan = """
    batch (global = 16, micro = 1, seq_len = 256)
    mesh (pp = 2, dp_shard = 4)
    fsdp on dp_shard { layers.* = unit }
    pipeline on pp (schedule = csv("order.csv"))
    """
    (tmp_path / "order.csv").write_text(order_text("ZBVZeroBubble", 2, 2, 4))
    assert "LP516" in codes(plan, tmp_path)
    (tmp_path / "order.csv").write_text(order_text("Interleaved1F1B", 2, 2, 4))
    assert "LP516" not in codes(plan, tmp_path)


def test_order_file_splits_no_backward_of_one_rank(tmp_path: Path) -> None:
    plan = """
    mesh (pp = {}, dp_shard = rest)
    fsdp on dp_shard {{ layers.* = unit }}
    pipeline on pp (schedule = csv("order.csv"))
    """
    (tmp_path / "order.csv").write_text(order_text("ZBVZeroBubble", 2, 2, 16))
    assert "LP516" in codes(plan.format(2), tmp_path)
    assert not codes(plan.format("auto in [1, 2]"), tmp_path) & {"LP513", "LP516"}
