"""Holes of a plan: which there are, the values that each may take, and the plans that answers make."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.domains import values_of
from legoai.dsl.analysis.magnitudes.state import state_bytes
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units
from legoai.dsl.analysis.parallelism.mesh import mesh_axes
from legoai.dsl.analysis.parallelism.styles import style_of
from legoai.dsl.analysis.question import solved_digest
from legoai.dsl.analysis.stages.pipeline import stage_count
from legoai.dsl.formatting import edit
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import Candidate, OpenPlan
from legoai.dsl.open_rules import with_open_rules
from legoai.specs.directives import kinds
from legoai.specs.directives.base import has_hole
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.precision import Float8

HEAD = """\
plan test
model   llama3("tiny")
cluster cpu(devices = 4)
precision (param = fp32, reduce = fp32)
"""
PIPELINED = """\
batch (global = 32, micro = auto, seq_len = 128)
mesh (pp = auto, dp_replicate = auto, dp_shard = rest, tp = auto)
shard standard on tp (sequence = auto, loss_parallel)
pipeline on pp (schedule = auto in [1F1B, GPipe, Interleaved1F1B])
fsdp blocks on dp_replicate, dp_shard { layers.* = unit(reshard = auto) }
checkpoint { layers.* = auto in [none, full, every(2)] }
loss auto in [eager, chunked(2)]
"""
FACTS = (state_bytes, fsdp_units, mesh_axes, stage_count, lambda analysis: list(recomputed_modules(analysis)))
BATCH = "batch (global = 32, micro = 8, seq_len = 128)\n"
STAGED = BATCH + "mesh (pp = 2, dp_shard = 2)\nfsdp blocks on dp_shard\n"
MESH = "mesh (dp_shard = 4)\nfsdp blocks on dp_shard\n"
SEARCHED = """\
batch (global = 32, micro = auto, seq_len = 128)
mesh (dp_shard = rest, tp = auto)
shard standard on tp (sequence = auto, loss_parallel)
fsdp blocks on dp_shard { layers.* = unit(reshard = auto in [after_forward, after_backward]) }
checkpoint { layers.* = auto in [none, full, every(2)] }
loss auto in [eager, chunked(2)]
"""


def opened(text: str, **options) -> OpenPlan:
    linted = lint(HEAD + text, "test.plan", directory=Path(), **options)
    assert not linted.has_errors, [item.message for item in linted.diagnostics]
    return OpenPlan(linted, directory=Path(), read=options.get("read"))


def choices(text: str) -> list[tuple[str, ...]]:
    plan = opened(text)
    assert not plan.refused, plan.refused
    return [hole.choices for hole in plan.holes]


LEGAL = [
    ("batch (global = 12, micro = auto, seq_len = 128)\n" + MESH, ("1", "2", "3", "4", "6", "12")),
    (BATCH + "mesh (dp_shard = rest, tp = auto)\nshard standard on tp\nfsdp blocks on dp_shard", ("1", "2", "4")),
    (BATCH + MESH + "attention auto", ("default", "flash", "efficient", "cudnn", "math", "flex")),
    (BATCH + MESH + "comm (reorder = auto)", ("false", "true", "by_time")),
    (BATCH + "mesh (dp_shard = 4)\nfsdp blocks on dp_shard { layers.* = unit(reshard = auto) }",
     ("after_forward", "after_backward", "never")),
    (BATCH + MESH + "loss chunked(auto in 2..4)", ("2", "3", "4")),
    (BATCH + MESH + "checkpoint { layers.* = selective([attention, auto]) }",
     ("attention", "matmul", "alternate_matmul", "collective")),
    ("let kept = auto\n" + BATCH + MESH + "checkpoint { layers.* = selective([kept]) }",
     ("attention", "matmul", "alternate_matmul", "collective")),
    (STAGED + "pipeline on pp (schedule = 1F1B)\ncheckpoint { layers.* = stages([full, auto]) }", ("none", "full")),
    (STAGED + "pipeline on pp (schedule = 1F1B, split = [auto in 1..3, 2])", ("1", "2", "3")),
    ("let n = auto in [1, 2]\n" + BATCH + "mesh (dp_shard = rest, tp = n)\nshard standard on tp\n"
     "fsdp blocks on dp_shard", ("1", "2")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "legal"), LEGAL)
def test_a_hole_has_its_legal_values(text: str, legal: tuple[str, ...]):
    assert choices(text) == [legal]


def test_a_pipeline_is_searched_by_degree_schedule_and_stages():
    text = (
        "batch (global = 32, micro = 1, seq_len = 128)\nmesh (pp = auto, dp_shard = rest)\nfsdp blocks on dp_shard\n"
        "pipeline on pp (schedule = auto, stages = auto, microbatches = auto)\n"
    )
    degrees, schedules, stages, micro_batches = choices(text)
    assert degrees == ("1", "2", "4")
    assert {"1F1B", "GPipe", "ZBVZeroBubble"} <= set(schedules)
    assert stages == ("1", "2", "3", "4")  # no more than the model has blocks
    assert micro_batches == ("1", "2", "4", "8", "16", "32")


RAMPED = "batch (global = 32, micro = 4, seq_len = 128, ramp = stages(global = [16], until = [auto in [10, 20]]))\n"
REFUSED = [
    (BATCH + MESH + "optimizer adamw(lr = auto in [3e-4, 1e-3])", "what is learned"),
    (BATCH + MESH + "optimizer adamw(lr = 3e-4, betas = [auto, 0.9])", "what is learned"),
    *(
        (f"let x = auto in {domain}\n{BATCH}{MESH}{use}", "what is learned")
        for domain, use in (
            ("[3e-4, 1e-3]", "optimizer adamw(lr = x)"),
            ("[[0.9, 0.95], [0.9, 0.99]]", "optimizer adamw(lr = 3e-4, betas = x)"),
            ("[0.0, 0.1]", "optimizer adamw(lr = 3e-4) { layers.* = group(weight_decay = x) }"),
            ("[10, 20]", "schedule cosine(warmup = x, steps = 100)"),
            ("[0.5, 1.0]", "clip (norm = x)"),
        )
    ),
    ("batch (global = auto in [32, 64], micro = 8, seq_len = 128)\n" + MESH, "what is learned"),
    (RAMPED + MESH, "what is learned"),
    (STAGED + "pipeline on pp (schedule = 1F1B, split = [auto])", "without a domain"),
    (BATCH + MESH + "comm { layers.* = bucket([auto, 2]) }", "without a domain"),
    (BATCH + "mesh (tp = 4)\nshard standard on tp { norm.weight = auto }", "without a domain"),
    (BATCH + "mesh (dp_shard = 4)\nfsdp blocks on dp_shard\ncheckpoint (preserve_rng = auto) { layers.* = full }",
     "what is learned"),
    (BATCH + MESH + "loss chunked(auto in 2..100000)", "more values than"),
    (BATCH + MESH + "checkpoint { layers.* = auto in [none, selective([attention, auto])] }", "cannot have holes"),
    (BATCH + MESH + "loss chunked(auto in [2, auto])", "cannot have holes"),
    ("let k = auto in [1, 2]\n" + BATCH + "mesh (dp_shard = rest, tp = auto in [4, k])\nshard standard on tp\n"
     "fsdp blocks on dp_shard", "cannot have holes"),
]  # fmt: skip


@pytest.mark.parametrize("statement", ["shard on tp { head = auto }", "shard auto on tp"])
def test_styles_of_a_model_without_tokens_need_a_domain(statement: str):
    text = 'plan test\nmodel vit("tiny")\ncluster cpu(devices = 4)\nbatch (global = 8, micro = 2)\nmesh (tp = 4)\n'
    linted = lint(text + statement, "test.plan", directory=Path())
    [refused] = linted.diagnostics
    assert refused.code == "LP012"
    assert "the model reads none" in refused.message
    assert refused.help == ("name the values to choose from: `auto in [a, b]`",)
    assert OpenPlan(with_open_rules(linted, directory=Path()), directory=Path()).refused == [refused]
    of_domain = text + "shard on tp { head = auto in [none, colwise(input = replicate, output = replicate)] }"
    assert not lint(of_domain, "test.plan", directory=Path()).diagnostics


@pytest.mark.parametrize(("text", "why"), REFUSED)
def test_lint_refuses_a_hole_that_is_not_searched(text: str, why: str):
    linted = lint(HEAD + text, "test.plan", directory=Path())
    [refused] = [item for item in linted.diagnostics if item.severity == "error"]
    assert refused.code == "LP012"
    assert why in refused.message
    assert (HEAD + text)[refused.label.span.start :].startswith("auto")
    assert OpenPlan(linted, directory=Path()).refused == [refused]


@pytest.mark.parametrize(
    ("open_ones", "decide"),
    [
        ("hosts = auto in [1, 2]", ["hosts"]),
        ("hosts = 2, devices = auto in [4, 8]", ["devices"]),
        ("hosts = auto in [1, 2], devices = auto in [4, 8]", ["hosts", "devices"]),
    ],
)
def test_degree_without_a_domain_needs_the_number_of_devices(open_ones: str, decide: list[str]):
    text = f'plan test\nmodel llama3("tiny")\ncluster h100_sxm({open_ones}, fabric = infiniband_ndr)\n{BATCH}'
    text += "mesh (dp_shard = rest, tp = auto)\nshard standard on tp\nfsdp blocks on dp_shard\n"
    [refused] = lint(text, "test.plan", directory=Path()).diagnostics
    names = " and ".join(f"`{name}`" for name in decide)
    assert refused.message == f"the number of devices is open: give `tp` a domain, or decide {names}"
    assert [label.text for label in refused.others] == [f"`{name}` is open" for name in decide]
    assert not lint(text.replace("tp = auto", "tp = auto in [1, 2]"), "test.plan", directory=Path()).diagnostics


def test_lint_refuses_it_with_an_answer_too():
    text = f"{HEAD}{BATCH}mesh (dp_shard = auto -> 4)\nfsdp blocks on dp_shard\noptimizer adamw(lr = auto -> 3e-4)"
    [refused] = lint(text, "test.plan", directory=Path()).diagnostics
    assert (refused.code, text[refused.label.span.start :]) == ("LP012", "auto -> 3e-4)")


def test_nothing_is_said_of_holes_whose_values_depend_on_an_error():
    text = f"{HEAD}{BATCH}mesh (dp_shard = 4)\ncheckpoint {{ nothing.* = auto }}\nfsdp blocks on dp_shard\n"
    text += "shard standard on tp { norm.weight = auto }\nmodel gpt2(auto)"
    codes = {item.code for item in lint(text, "test.plan", directory=Path()).diagnostics}
    assert codes
    assert "LP012" not in codes


def test_numerics_are_not_searched_without_a_domain_in_a_list_either():
    use = Float8(gather=(Hole(),)), "gather"
    assert values_of(use, kinds.Choice(("weights", "activations")), None) == []


@pytest.mark.parametrize("learned", [False, True])
def test_a_hole_of_a_base_plan_is_refused(learned: bool):
    base = HEAD + BATCH + f"mesh (dp_shard = {'4' if learned else 'auto in [2, 4]'})\nfsdp blocks on dp_shard\n"
    base += "optimizer adamw(lr = auto)\n" if learned else ""
    linted = lint('plan derived\nextends "base.plan"\n', "t.plan", directory=Path(), read=lambda _: base)
    [refused] = [item for item in linted.diagnostics if item.severity == "error"]
    assert "base plan" in refused.message
    assert OpenPlan(linted, directory=Path(), read=lambda _: base).refused == [refused]


@pytest.mark.parametrize("hole", ["auto", "auto in [2, 4]"])
def test_a_hole_of_the_command_line_is_refused(hole: str):
    text = f"{HEAD}let d = 4\n{BATCH}mesh (dp_shard = d)\nfsdp blocks on dp_shard\n"
    linted = lint(text, "t.plan", directory=Path(), settings={"d": hole})
    [refused] = [item for item in linted.diagnostics if item.severity == "error"]
    assert refused.code == "LP012"
    assert refused.message == "`--set` gives a value: write `auto` in the plan to have it searched"


def test_a_hole_of_a_solved_base_plan_keeps_its_answer():
    base = HEAD + BATCH + "mesh (dp_shard = auto in [2, 4] -> 4)\nfsdp blocks on dp_shard\n"
    text = 'plan derived\nextends "base.plan"\nloss auto\n'
    linted = lint(text, "t.plan", directory=Path(), read=lambda _: base)
    assert not linted.diagnostics
    plan = OpenPlan(linted, directory=Path(), read=lambda _: base)
    assert not plan.refused
    assert [hole.what for hole in plan.holes] == ["loss form"]
    assert plan.candidate((0,)).plan.mesh.dp_shard == 4


def test_value_of_several_lines_is_an_answer_on_one_line():
    domain = "[\n    full  # all\n    selective([\n      attention  # dear\n      matmul\n    ])\n  ]"
    text = f"{BATCH}{MESH}checkpoint {{\n  layers.* = auto in {domain}\n}}\n"
    plan = opened(text)
    assert plan.holes[0].choices == ("full", "selective([attention, matmul])")
    written = edit.write_answers(plan.resolution.file, {plan.holes[0].span: plan.holes[0].choices[1]})
    assert f"auto in {domain} -> selective([attention, matmul])" in written
    assert plan.candidate((1,)).plan.digest == opened(written.removeprefix(HEAD)).resolution.plan.digest


def test_existing_answers_are_searched_again():
    answered = opened(BATCH + "mesh (dp_shard = auto -> 4)\nfsdp blocks on dp_shard\n")
    [hole] = answered.holes
    assert (hole.answer, hole.choices) == ("4", ("1", "2", "4"))
    assert answered.candidate([0]).plan is not None
    assert answered.candidate([2]).plan.mesh.dp_shard == 4
    assert [item.code for item in answered.candidate([1]).errors] == ["LP301"]


def test_a_hole_that_a_name_holds_matters_wherever_the_name_is_used():
    plan = opened(
        "let treatment = auto in [full, none]\nlet operator = auto in [matmul, attention]\n"
        "batch (global = 32, micro = 1, seq_len = 128)\nmesh (pp = auto in [1, 2], dp_shard = rest)\n"
        "pipeline on pp (schedule = GPipe)\nfsdp blocks on dp_shard\n"
        "checkpoint { layers.0 = treatment\n layers.1 = selective([operator]) }\n"
    )
    assert [hole.what for hole in plan.holes] == ["checkpoint layers.0", "keep", "mesh pp"]
    without_pipeline = plan.candidate([None, None, 0])
    assert without_pipeline.plan.idle
    assert all(plan.matters(hole, without_pipeline) for hole in range(2))


def test_candidate_equals_the_plan_with_written_answers():
    """Every candidate has the errors and the identity of the text with its answers."""
    text = HEAD + SEARCHED
    plan = opened(SEARCHED)
    file = plan.resolution.file
    every = list(itertools.product(*(range(len(hole.choices)) for hole in plan.holes)))
    for chosen in random.Random(7).sample(every, 40):
        answers = {hole.span: hole.choices[index] for hole, index in zip(plan.holes, chosen, strict=True)}
        written = edit.write_answers(file, answers)
        assert len(written) > len(text)
        linted = lint(written, "test.plan", directory=Path())
        candidate = plan.candidate(chosen)
        assert [item.code for item in candidate.errors] == [
            item.code for item in linted.diagnostics if item.severity == "error"
        ]
        if not candidate.errors:
            assert candidate.plan.digest == linted.plan.digest


def test_errors_of_a_partial_answer_hold_for_all_completions():
    """Early pruning is valid: no completion of refused answers is legal."""
    plan = opened(SEARCHED.replace("sequence = auto", "sequence"))
    sizes = [len(hole.choices) for hole in plan.holes]
    pruned = 0
    for depth in (1, 2):
        for first in itertools.product(*(range(size) for size in sizes[:depth])):
            if not plan.candidate([*first, *[None] * (len(sizes) - depth)]).errors:
                continue
            pruned += 1
            for rest in itertools.product(*(range(size) for size in sizes[depth:])):
                assert plan.candidate([*first, *rest]).errors
    assert pruned


def test_suppressed_errors_do_not_prune():
    text = BATCH + "mesh (dp_shard = auto in [4, 2]){}\nfsdp blocks on dp_shard"
    assert [bool(opened(text.format("")).candidate([index]).errors) for index in range(2)] == [False, True]
    accepted = opened(text.format("  # legoai: ignore[LP301]"))
    assert [bool(accepted.candidate([index]).errors) for index in range(2)] == [False, False]


def test_model_rules_run_while_a_layout_is_open():
    """A statement that is not read before its hole is answered does not keep the model from being looked at."""
    text = "batch (global = 32, micro = 8, seq_len = 128)\nmesh (tp = auto in [2, 4], dp_shard = rest)\n"
    text += "shard standard on tp (sequence = auto)\nfsdp blocks on dp_shard\n"
    heads = opened(text.replace("sequence = auto", "sequence")).candidate([1]).analysis.manifest
    plan = opened(text)
    assert plan.candidate([1, 1]).analysis.manifest == heads
    odd = plan.resolution.file.text.replace('llama3("tiny")', 'llama3("tiny", n_heads = 2, n_kv_heads = 2)')
    narrow = OpenPlan(lint(odd, "test.plan", directory=Path()), directory=Path())
    assert [bool(narrow.candidate([index, 1]).errors) for index in range(2)] == [False, True]


def signed(text: str, directory: Path = Path()) -> str:
    """A plan with the line of a solver whose answers it has."""
    digest = solved_digest(lint(text, "test.plan", directory=directory).resolution)
    return text + f'solved "{digest}" by legoai 0.1.0, device profile cpu@0123456789ab, gap 0%\n'


GOALS = "require peak_memory <= 1GiB\nrequire recompute <= 50%"
ANSWERED = f"""\
{HEAD}let most = 4
batch (global = 32, micro = auto in [1, 2, most] -> 4, seq_len = 128)
mesh (dp_shard = auto in 2..most -> 4)
fsdp blocks on dp_shard
minimize step_time
{GOALS}
"""


@pytest.mark.parametrize(
    ("old", "new", "is_stale"),
    [
        ("minimize step_time", "minimize peak_memory", True),
        ("[1, 2, most]", "[1, 2, most, 8]", True),
        ("[1, 2, most]", "[1, 2, 4]", False),
        ("<= 1GiB", "<= 9MiB", True),
        ("<= 1GiB", "<= 1024MiB", False),
        ("in 2..most", "in 1..most", True),
        ("most = 4", "most = 5", True),
        (GOALS, "\n".join(reversed(GOALS.splitlines())), False),
        ("batch (global", "batch  # of all ranks\n  (global", False),
    ],
)  # fmt: skip
def test_a_solution_is_stale_where_its_question_was_changed(old: str, new: str, is_stale: bool):
    text = signed(ANSWERED)
    assert old in text
    found = lint(text.replace(old, new), "test.plan", directory=Path()).diagnostics
    assert ("LP904" in [item.code for item in found]) is is_stale


def test_a_solution_of_the_plan_is_not_stale_for_its_variants():
    text = HEAD + BATCH + "mesh (dp_shard = auto in [2, 4] -> 4)\nfsdp blocks on dp_shard\n"
    text = signed(text)
    longer = text + "\nvariant long { batch (global = 32, micro = 4, seq_len = 256) }\n"
    for plan in (text, longer):
        assert [item.code for item in lint(plan, "test.plan", directory=Path()).diagnostics] == []
    changed = longer.replace("global = 32, micro = 8", "global = 64, micro = 8")
    [stale] = lint(changed, "test.plan", directory=Path()).diagnostics
    assert stale.code == "LP904"


def test_a_solution_of_a_base_is_not_stale_for_plans_that_extend_it(tmp_path: Path):
    (tmp_path / "base.plan").write_text(signed(ANSWERED))
    for changed in ("require step_time <= 1s", "optimizer adamw(lr = 2e-3)", "variant long { clip (norm = 1) }"):
        child = f'plan child\nextends "base.plan"\n{changed}\n'
        for variant in (None, "long")[: 1 + changed.startswith("variant")]:
            found = lint(child, str(tmp_path / "child.plan"), directory=tmp_path, variant=variant).diagnostics
            assert "LP904" not in [item.code for item in found] and all(item.severity != "error" for item in found)
    own = signed('plan child\nextends "base.plan"\noptimizer adamw(lr = 2e-3)\n', tmp_path)
    assert "LP904" not in [item.code for item in lint(own, "child.plan", directory=tmp_path).diagnostics]
    changed = lint(own.replace("2e-3", "3e-3"), "child.plan", directory=tmp_path).diagnostics
    assert "LP904" in [item.code for item in changed]


def test_candidates_are_independent_of_earlier_candidates():
    """Only facts that are independent of the answers are cached."""
    text = HEAD + PIPELINED
    linted = lint(text, "test.plan", directory=Path())
    plan, chance, legal = OpenPlan(linted, directory=Path()), random.Random(0), 0
    for _ in range(80):
        chosen = [chance.choice([None, *range(hole.listed)]) for hole in plan.holes]
        one, other = plan.candidate(chosen), OpenPlan(linted, directory=Path()).candidate(chosen)
        assert [(item.code, item.message, item.help) for item in one.errors] == [
            (item.code, item.message, item.help) for item in other.errors
        ]
        if not one.errors and one.analysis is not None:
            legal += 1
            assert one.plan.canonical() == other.plan.canonical()
            assert [_found(fact, one) for fact in FACTS] == [_found(fact, other) for fact in FACTS]
    assert 10 < legal < 70


def test_statement_with_an_open_part_is_open():
    text = PIPELINED.replace("sequence = auto", "sequence").replace("[none, full, every(2)]", "[none, full]")
    analysis = lint(HEAD + text, "test.plan", directory=Path()).analysis
    assert analysis is not None
    held = {directive.keyword for directive in analysis.plan.directives() if has_hole(directive)}
    assert held == {"batch", "mesh", "pipeline", "fsdp", "checkpoint", "loss"}


def _found(compute: Callable[[Analysis], object], candidate: Candidate) -> str:
    assert candidate.analysis is not None
    try:
        return repr(compute(candidate.analysis))  # holes are not compared
    except Undecided:
        return "undecided"


def test_listed_style_is_parsed_as_in_a_plan():
    text = (
        'plan test\nmodel llama3("tiny")\ncluster cpu(devices = 4)\nbatch (global = 32, micro = 2, seq_len = 128)\n'
        "mesh (dp_shard = 2, tp = 2)\nfsdp blocks on dp_shard\nshard on tp {\n  tok_embeddings = auto\n"
        "  layers.*.attention_norm = auto\n  layers.*.attention = auto\n  layers.*.attention.wq = auto\n"
        "  output = auto\n}\n"
    )
    plan = OpenPlan(lint(text, "test.plan", directory=Path()), directory=Path())
    assert len(plan.holes) == 5
    for index, hole in enumerate(plan.holes):
        assert list(map(style_of, hole.choices)) == [rule.treatment for rule in plan.rules_of(index)]
