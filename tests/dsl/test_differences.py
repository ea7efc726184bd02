"""Differences of two plans: their lines, the plans in between, and the effects on numerics and checkpoints."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from legoai.dsl.differences.changes import Change, Key, applied, changes
from legoai.dsl.differences.checkpoints import loading, optimizer_state
from legoai.dsl.differences.comparison import Comparison, Side, legal_groups
from legoai.dsl.differences.numerics import EFFECTS, RULES, WHOLE, numerics
from legoai.dsl.differences.summary import summary
from legoai.dsl.formatting.expand import expand
from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.frontend.resolve import resolve
from legoai.dsl.lint import lint
from legoai.specs.directives import FAMILIES, family
from support import VALID_PLANS, WORKED_PLANS

BASE = """\
plan base
let ranks = 4
model   llama3("tiny")
cluster cpu(devices = ranks)
batch   (global = 32, micro = 8, seq_len = 128)
mesh    (dp_shard = 2, tp = 2)
shard standard on tp
fsdp on dp_shard { layers.* = unit, root = unit }
checkpoint { layers.{0..1} = full }
precision (param = fp32, reduce = fp32)
optimizer adamw(lr = 3e-3, weight_decay = 0.1)
schedule cosine(warmup = 20, steps = 200)
require step_time <= 1s
variant wide { batch (global = 64, micro = 8, seq_len = 128) }
"""


def side(text: str, name: str = "a.plan", *, directory: Path = Path(), files: dict[str, str] | None = None) -> Side:
    def read(path: Path) -> str:
        return (files or {})[path.name]

    linted = lint(text, name, directory=directory, read=read)
    assert not linted.has_errors, [item.message for item in linted.diagnostics]
    return Side(
        linted=linted,
        directory=directory,
        resolved=lambda variant: resolve(text, name, directory=directory, variant=variant, read=read),
    )


def compared(before: str, after: str, **options) -> Comparison:
    return Comparison(side(before, "a.plan", **options), side(after, "b.plan", **options))


def lines(comparison: Comparison) -> list[str]:
    return [item.line for item in (*comparison.changes, *comparison.in_variants)]


def edited(*edits: tuple[str, str]) -> str:
    text = BASE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


SAME = {
    "comments and blank lines": edited(("plan base", "# a comment\nplan base\n\n")),
    "the order of statements": edited(
        ("require step_time <= 1s\n", ""), ("checkpoint {", "require step_time <= 1s\ncheckpoint {")
    ),
    "the order of rules": edited(("layers.* = unit, root = unit", "root = unit, layers.* = unit")),
    "a value through `let`": edited(("devices = ranks", "devices = 2 * pairs"), ("let ranks = 4", "let pairs = 2")),
    "a default that is written out": edited(("steps = 200)", "steps = 200, floor = 0)")),
    "a layout that is written out": edited(("shard standard on tp", "shard standard on tp (loss_parallel = false)")),
    "a unit of measure": edited(("<= 1s", "<= 1000ms")),
    "an answered hole": edited(
        ("micro = 8, seq_len = 128)\nmesh", "micro = auto in [4, 8] -> 8, seq_len = 128)\nmesh")
    ),
    "the solver's line": f'{BASE}solved "sha256:{"0" * 64}" by legoai 0.1.0, device profile cpu@0123456789ab, gap 0%\n',
    "the rest of the devices": edited(("dp_shard = 2, tp", "dp_shard = rest, tp")),
}  # fmt: skip


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_equivalent_plans_have_no_difference(text: str):
    comparison = compared(BASE, text)
    assert lines(comparison) == []
    assert not comparison.differs


DIFFERENT = [
    ([("plan base", "plan other")], ["plan: base → other"], "none"),
    ([("let ranks = 4", "let ranks = 8"), ("tp = 2)", "tp = 4)")],
     ["cluster devices: 4 → 8", "mesh tp: 2 → 4"], "rounding"),
    ([("micro = 8, seq_len = 128)\nmesh", "micro = 4, seq_len = 128)\nmesh")], ["batch micro: 8 → 4"], "rounding"),
    ([('"tiny")', '"tiny", n_layers = 3)')], ["model n_layers: added, 3"], "training"),
    ([('llama3("tiny")', 'llama3("tiny", tie_embeddings = true)')], ["model tie_embeddings: added, true"], "training"),
    ([("layers.* = unit, root", "layers.* = unit(reshard = after_backward), root")],
     ["fsdp layers.*: unit → unit(reshard = after_backward)"], "none"),
    ([("layers.* = unit, root", "layers.* = first(1, unit, others = unit(reshard = never)), root")],
     ["fsdp layers.*: unit → first(n = 1, these = unit, others = unit(reshard = never))"], "none"),
    ([("layers.* = unit, root", "layers.* = first(1, none), root")],
     ["fsdp layers.*: unit → first(n = 1, these = none)"], "rounding"),
    ([("layers.* = unit, root", "{tok_embeddings, output} = unit, layers.* = unit, root")],
     ["fsdp {tok_embeddings, output}: added, unit"], "rounding"),
    ([("layers.{0..1} = full", "layers.{0..2} = full")],
     ["checkpoint layers.{0..1}: removed, full", "checkpoint layers.{0..2}: added, full"], "none"),
    ([("checkpoint { layers.{0..1} = full }\n", "")],
     ["checkpoint: removed, { layers.{0..1} = full }"], "none"),
    ([("param = fp32", "param = bf16")], ["precision param: fp32 → bf16"], "dtype"),
    ([("precision (param = fp32, reduce = fp32)\n", "")], ["precision param: fp32 → bf16"], "dtype"),
    ([("lr = 3e-3", "lr = 1e-3")], ["optimizer lr: 0.003 → 0.001"], "training"),
    ([("adamw(lr = 3e-3", "adamw(fused = false, lr = 3e-3")], ["optimizer fused: true → false"], "rounding"),
    ([("adamw(lr = 3e-3, weight_decay = 0.1)", "sgd(lr = 3e-3)")],
     ["optimizer: adamw(lr = 0.003, weight_decay = 0.1) → sgd(lr = 0.003)"], "training"),
    ([("warmup = 20, ", "warmup = 10, ")], ["schedule warmup: 20 → 10"], "training"),
    ([("<= 1s", "<= 2s")], ["require step_time: <= 1s → <= 2s"], "none"),
    ([("<= 1s", "<= 1.0000001s")], ["require step_time: <= 1s → <= 1.0000001s"], "none"),
    ([("require step_time <= 1s", "require exposed_comm <= 5%\nrequire exposed_comm <= 1ms")],
     ["require step_time: removed, <= 1s", "require exposed_comm: added, <= 5%",
      "require exposed_comm: added, <= 1ms"], "none"),
    ([("require step_time <= 1s", "minimize step_time")],
     ["require step_time: removed, <= 1s", "objective: added, minimize step_time"], "none"),
    ([("schedule cosine", "loss chunked(4)\nschedule cosine")], ["loss: eager → chunked(n = 4)"], "rounding"),
    ([("schedule cosine", "attention math\nschedule cosine")], ["attention: default → math"], "rounding"),
    ([("schedule cosine", "seed 7\nschedule cosine")], ["seed: added, 7"], "training"),
    ([("schedule cosine", "save (every = 10)\nschedule cosine")], ["save: added, (every = 10)"], "none"),
    ([("global = 64", "global = 96")], ["variant wide: batch global: 64 → 96"], "none"),
    ([("variant wide {", "variant wider {")], ["variant wide: removed", "variant wider: added"], "none"),
    ([("micro = 8, seq_len = 128)\nmesh", "micro = auto in [4, 8], seq_len = 128)\nmesh")],
     ["batch micro: 8 → auto in [4, 8]"], "rounding"),
]  # fmt: skip


@pytest.mark.parametrize(("edits", "expected", "effect"), DIFFERENT, ids=[case[1][0] for case in DIFFERENT])
def test_each_changed_value_is_a_line(edits: list[tuple[str, str]], expected: list[str], effect: str):
    comparison = compared(BASE, edited(*edits))
    assert lines(comparison) == [line.replace("(n = 4)", "(4)") for line in expected]
    assert summary(comparison).numerics == effect
    back = compared(edited(*edits), BASE)
    assert len(lines(back)) == len(expected)


MIXTURE = """\
plan m
model     mixtral("tiny")
cluster   cpu(devices = 4)
batch     (global = 32, micro = 2, seq_len = 128)
mesh      (dp_shard = 4, ep = 2)
fsdp blocks on dp_shard
precision (param = bf16, reduce = bf16)
shard on ep { layers.*.feed_forward.experts = experts(capacity_factor = 0.75) }
"""
ROOMY = MIXTURE.replace("(capacity_factor = 0.75)", "")
OPEN = (
    ROOMY.replace("experts = experts", "experts = auto in [experts, experts(capacity_factor = 2)]").replace(
        "reduce = bf16", "reduce = auto in [bf16, fp32]"
    )
    + "comm (reduce = auto in [every_micro_batch, last_micro_batch])\n"
)
WIDE = MIXTURE.replace("reduce = bf16", "reduce = fp32")
LAST = "comm (reduce = last_micro_batch)\n"
STAGED = BASE.replace("tp = 2)", "pp = 2)").replace("shard standard on tp", "pipeline on pp")
STAGED = STAGED.replace("reduce = fp32", "reduce = bf16").replace(
    "layers.* = unit", "layers.* = unit(reshard = after_backward)"
)
FLAT = STAGED.replace("dp_shard = 2, pp = 2)", "dp_shard = 4)").replace("pipeline on pp\n", "")
"""Reduced gradients accumulate in fp32, unreduced ones in the dtype in which they will be reduced."""


@pytest.mark.parametrize(
    ("before", "after", "effect"),
    [
        (MIXTURE, MIXTURE.replace("micro = 2", "micro = 1"), "training"),
        (ROOMY, ROOMY.replace("micro = 2", "micro = 1"), "rounding"),
        (MIXTURE, MIXTURE.replace("dp_shard = 4", "dp_shard = 2, cp = 2") + "context on cp\n", "training"),
        (MIXTURE, MIXTURE + LAST, "dtype"),
        (MIXTURE + LAST, MIXTURE, "dtype"),
        (MIXTURE.replace("global = 32", "global = 8"), MIXTURE.replace("global = 32", "global = 8") + LAST, "rounding"),
        (WIDE, WIDE + LAST, "rounding"),
        (FLAT, STAGED, "dtype"),
        (FLAT + LAST, STAGED, "rounding"),
        (OPEN, OPEN.replace("micro = 2", "micro = 1"), "rounding"),
        (OPEN, MIXTURE.replace("micro = 2", "micro = 1"), "training"),
    ],
)
def test_effect_on_numbers_depends_on_the_rest_of_the_plans(before: str, after: str, effect: str):
    assert summary(compared(before, after)).numerics == effect


def test_treatments_of_a_domain_are_shown_as_written():
    [experts] = [line for line in lines(compared(ROOMY, OPEN)) if "experts:" in line]
    assert experts.endswith("experts → auto in [experts, experts(capacity_factor = 2)]")


def test_change_records_both_spans_and_the_let():
    before, after = BASE, edited(("let ranks = 4", "\nlet ranks = 8"), ("tp = 2)", "tp = ranks / 2)"))
    comparison = compared(before, after)
    [devices, tp] = comparison.changes
    assert (devices.before_at.line, devices.after_at.line) == (2, 3)
    assert (tp.before_at.line, tp.after_at.line) == (6, 7)
    assert comparison.after.let_of(tp.after_at).name.text == "ranks"
    assert comparison.before.let_of(tp.before_at) is None


def test_base_plans_are_compared():
    text = 'plan derived\nextends "base.plan"\nsteps 5\n'
    base = BASE.replace("plan base", "plan b")
    changed = (
        base.replace("tp = 2)", "tp = 1)").replace("dp_shard = 2", "dp_shard = 4").replace("shard standard on tp\n", "")
    )
    old, new = side(text, files={"base.plan": base}), side(text, files={"base.plan": changed})
    found = Comparison(old, new).changes
    assert [item.line.partition(",")[0] for item in found] == [
        "mesh dp_shard: 2 → 4",
        "mesh tp: 2 → 1",
        "shard on tp: removed",
    ]
    assert {item.before_at.file for item in found} == {"base.plan"}


def test_contents_of_named_files_are_compared(tmp_path: Path):
    order = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    text = BASE.replace("(dp_shard = 2, tp = 2)", "(pp = 2, dp_shard = 2)").replace("shard standard on tp\n", "")
    text = text.replace("global = 64", "global = 32")
    text += 'pipeline on pp (schedule = csv("order.csv"), microbatches = 2)\n'
    sides = []
    for name, content in (("a", order), ("b", order.replace("0B0,0B1", "0B0, 0B1"))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "order.csv").write_text(content, encoding="utf-8")
        sides.append(side(text, "x.plan", directory=folder))
    comparison = Comparison(*sides)
    [change] = comparison.changes
    assert change.subject == 'file "order.csv"'
    assert change.before_at.line == text.count("\n")
    assert summary(comparison).numerics == "training"
    assert comparison.candidate([change]) is sides[1].analysis
    assert not Comparison(sides[0], sides[0]).differs


@pytest.mark.parametrize("path", [*WORKED_PLANS, *VALID_PLANS], ids=lambda path: path.stem)
def test_formatted_and_expanded_plans_have_no_difference(path: Path):
    text = path.read_text(encoding="utf-8")
    plan = resolve(text, path.name, directory=path.parent)
    assert plan.plan is not None
    for other in (text, format_text(text, path.name).text, expand(plan).text):
        found = resolve(other, path.name, directory=path.parent).plan
        assert changes(plan.plan, found) == ()


def test_memory_limit_that_passes_over_a_graph_observe_is_a_requirement_alone():
    graph = edited(("require step_time <= 1s", "comm (unshard = selective)\nrequire peak_memory <= 9GiB"))
    graph = graph.replace("fsdp on dp_shard {", "fsdp on dp_shard (backend = graph) {")
    comparison = compared(graph, graph.replace("9GiB", "8GiB"))
    assert lines(comparison) == ["require peak_memory: <= 9GiB → <= 8GiB"]
    assert summary(comparison).numerics == "none"
    assert comparison.before.plan.digest != comparison.after.plan.digest


def test_candidates_between_two_plans_combine_both():
    drawn = random.Random(0)
    plans = [
        lint(path.read_text(encoding="utf-8"), path.name, directory=path.parent, variants=False)
        for path in WORKED_PLANS
    ]
    for first, second in itertools.permutations((item.plan for item in plans), 2):
        found = changes(first, second)
        assert bool(found) == (first.canonical_json() != second.canonical_json())
        assert applied(first, second, []).canonical_json() == first.canonical_json()
        whole = applied(first, second, found)
        assert whole.canonical_json() == second.canonical_json()
        assert changes(whole, second) == ()
        some = [item for item in found if drawn.random() < 0.5]
        between = applied(first, second, some)
        assert {item.key for item in changes(first, between)} == {item.key for item in some}
        assert {item.key for item in changes(between, second)} == {item.key for item in found} - {
            item.key for item in some
        }


def test_change_groups_are_legal_and_minimal():
    after = edited(("let ranks = 4", "let ranks = 8"), ("tp = 2)", "tp = 4)"), ("param = fp32", "param = bf16"),
                   ("warmup = 20", "warmup = 30"))  # fmt: skip
    comparison = compared(BASE, after)
    groups = comparison.groups()
    assert [[item.subject for item in group] for group in groups] == [
        ["cluster devices", "mesh tp"],
        ["precision param"],
        ["schedule warmup"],
    ]
    assert comparison.candidate(groups[0][:1]) is None
    for group in groups:
        assert comparison.candidate(group) is not None


def item(index: int) -> Change:
    return Change(key=Key("option", str(index)), statement=str(index), kind="changed", before="0", after="1")


@pytest.mark.parametrize("seed", range(40))
def test_partition_into_legal_groups_is_minimal(seed: int):
    drawn = random.Random(seed)
    items = [item(index) for index in range(drawn.randint(1, 7))]
    # Some items need others: legal is what is closed under the needs.
    needs = {
        index: {other for other in range(len(items)) if other != index and drawn.random() < 0.2}
        for index in range(len(items))
    }

    def legal(chosen) -> bool:
        held = {items.index(one) for one in chosen}
        return all(needs[index] <= held for index in held)

    groups = legal_groups(items, legal)
    assert sorted(one.statement for group in groups for one in group) == [one.statement for one in items]
    for group in groups:
        assert legal(group)
    for one in items:
        if legal([one]) and not any(items.index(one) in needs[index] for index in needs):
            assert (one,) in groups


def test_every_option_states_its_effect_on_numerics():
    for keyword in FAMILIES:
        declared, effects = family(keyword), EFFECTS[keyword]
        options = {option.name for option in declared.options}
        expected = options | {WHOLE} | ({RULES} if declared.treatments else set())
        if (declared.axis_use is not None and declared.axis_use.maximum > 1) or keyword == "replicate":
            expected.add("axes")
        assert expected <= effects.keys() <= expected | {"axes"}, keyword
    assert EFFECTS.keys() == set(FAMILIES)


def test_summary_states_the_step_and_its_reasons():
    after = edited(
        ("global = 32", "global = 48"), ("tp = 2)", "tp = 1)"), ("let ranks = 4", "let ranks = 2"),
        ("shard standard on tp\n", ""),
    )  # fmt: skip
    comparison = compared(BASE, after)
    found = summary(comparison)
    before, after = found.steps
    assert (before.samples, before.tokens, before.micro_batches) == (32, 32 * 128, 2)
    assert (after.samples, after.tokens, after.micro_batches) == (48, 48 * 128, 3)
    assert found.reasons[0].change.subject == "batch global"
    assert {
        item.kind for item in numerics(comparison.changes, comparison.before.analysis, comparison.after.analysis)
    } == {"training", "rounding"}
    [shards, tensor] = found.communication
    assert (shards.name, shards.before.stride, shards.after.stride) == ("dp_shard", 2, 1)
    assert (tensor.name, tensor.before.ranks, tensor.after) == ("tp", 2, None)


LOADS = [
    ([("tp = 2)", "tp = 1)"), ("let ranks = 4", "let ranks = 2"), ("shard standard on tp\n", "")], "resumes", ""),
    ([("param = fp32", "param = bf16")], "resumes", ""),
    ([("precision (", "precision (master = bf16, ")], "resumes", "saved in fp32 are loaded as bf16"),
    ([("plan base", "plan other")], "resumes", "--resume runs/base"),
    ([("schedule cosine", "seed 7\nschedule cosine")], "resumes", "order of seed 7"),
    ([("seq_len = 128", "seq_len = 64")], "resumes", "in sequences of 64 tokens instead of 128"),
    ([("adamw", "adam")], "resumes", "`adam` goes on with the state of `adamw`"),
    ([("adamw(lr = 3e-3, weight_decay = 0.1)", "sgd(lr = 3e-3)")], "weights", "keeps nothing"),
    ([("weight_decay = 0.1)", "weight_decay = 0.1) { layers.** = muon(lr = 0.02) }")], "weights", "momentum_buffer"),
    ([('"tiny")', '"tiny", n_layers = 3)')], "partly", "is gone"),
    ([('"tiny")', '"tiny", hidden_dim = 256)')], "partly", "has another shape"),
    ([('"tiny")', '"tiny", n_heads = 4, n_kv_heads = 2)')], "partly", "num_attention_heads is another: 8 → 4"),
    ([('"tiny")', '"tiny", rope_theta = 1e4)')], "resumes", "rope_theta is another: 500000.0 → 10000.0"),
]


@pytest.mark.parametrize(("edits", "verdict", "words"), LOADS)
def test_checkpoint_compatibility_matches_resume(edits: list[tuple[str, str]], verdict: str, words: str):
    found = loading(side(BASE).analysis, side(edited(*edits)).analysis)
    assert found.verdict == verdict
    assert words in "\n".join((*found.reasons, *found.notes))


def test_another_argument_of_a_factory_is_noted():
    text = """plan one
model python("support.models.factories:build_random")
cluster cpu
batch (global = 8, micro = 8, seq_len = 32)
"""
    other = text.replace('build_random"', 'build_random", drop = 0.5')
    found = loading(side(text).analysis, side(other).analysis)
    assert found.verdict == "resumes"
    assert any(
        note.endswith('random", drop = 0.5)') and "the model's factory is another" in note for note in found.notes
    )
    assert not any("factory" in note for note in loading(side(text).analysis, side(text).analysis).notes)


@pytest.mark.parametrize(
    ("edit", "same"),
    [
        (("adamw", "adam"), True),
        (("seq_len = 128", "seq_len = 64"), False),
        (("schedule cosine", "seed 7\nschedule cosine"), False),
    ],
)
def test_a_position_in_the_data_is_kept_only_where_the_same_is_read_next(edit: tuple[str, str], same: bool):
    found = loading(side(BASE).analysis, side(edited(edit)).analysis)
    assert ("position in the data" in found.words) == same


@pytest.mark.parametrize("edits", [[], [('"tiny")', '"tiny", n_layers = 3)')]], ids=["weights", "another model"])
def test_state_that_does_not_load_is_not_said_to_go_on(edits: list[tuple[str, str]]):
    other = edited(("adamw(lr = 3e-3, weight_decay = 0.1)", "sgd(lr = 3e-3, momentum = 0.9)"), *edits)
    found = loading(side(BASE).analysis, side(other).analysis)
    assert found.verdict != "resumes"
    assert not any("goes on with the state" in note for note in found.notes)


def test_partial_optimizer_state_loads_weights_only():
    one = "layers.*.attention = muon(lr = 0.02)"
    two = f"{one}, layers.*.feed_forward.w1 = muon(lr = 0.02)"
    texts = [edited(("weight_decay = 0.1)", f"weight_decay = 0.1) {{ {rule} }}")) for rule in (one, two)]
    analyses = [side(text).analysis for text in texts]
    kinds = [set().union(*optimizer_state(one).values()) for one in analyses]
    assert kinds[0] == kinds[1]
    assert [loading(*pair).verdict for pair in (analyses, reversed(analyses))] == ["weights", "weights"]


@pytest.mark.parametrize(
    "other", ['data (source = "corpus", tokenizer = "b.json")', 'data (source = "corpus", field = "body")']
)
def test_another_tokenizer_or_field_is_another_corpus(other: str):
    pairs = [(f'{BASE}data (source = "corpus")\n', f"{BASE}{other}\n"), (f"{BASE}{other}\n", f"{BASE}{other}\n")]
    notes = [loading(*(side(text).analysis for text in pair)).notes for pair in pairs]
    assert [any("another corpus" in note for note in one) for one in notes] == [True, False]
