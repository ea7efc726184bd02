"""Styles chosen by the program of placements: legal by the layout analysis, and the best by brute force."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.placements import graph as placement_graph
from legoai.cost.search.placements.costs import PlacementCosts
from legoai.cost.search.placements.graph import GraphBuilder
from legoai.cost.search.placements.program import place
from legoai.cost.search.placements.styles import Placements
from legoai.dsl.analysis.layouts.propagation import Propagation
from legoai.dsl.frontend.paths import assign
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.dsl.open_rules import with_open_rules
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.shard import Unplaced
from legoai.specs.record import replace
from support.marks import NEEDS_SOLVER, slow_but, some_slow

pytestmark = NEEDS_SOLVER

HEAD = """\
plan test
model   {model}
cluster h100_sxm(hosts = 16, fabric = infiniband_ndr)
batch   (global = 64, micro = 1, seq_len = {length})
mesh    (dp_shard = rest, tp = {ranks})
fsdp blocks on dp_shard
precision (param = bf16, reduce = fp32)
"""


def opened(shard: str, *, model: str = 'llama3("8b")', length: int = 8192, ranks: int | str = 8) -> OpenPlan:
    text = HEAD.format(model=model, length=length, ranks=ranks) + shard + "\n"
    linted = with_open_rules(lint(text, "test.plan", directory=Path()), directory=Path())
    assert not linted.has_errors, linted.diagnostics
    return OpenPlan(linted, directory=Path())


class Model:
    """The open styles of a plan, in which each assignment can be looked at by itself."""

    def __init__(self, plan: OpenPlan) -> None:
        assert plan.analysis is not None
        self.plan = plan
        self.analysis = plan.analysis
        self.costs = PlacementCosts(self.analysis, BoundsOf().machine(self.analysis))
        self.rules = {hole: dict(enumerate(plan.rules_of(hole))) for hole in range(len(plan.holes))}
        [shard] = self.analysis.plan.shard
        lines = {hole.line: index for index, hole in enumerate(plan.holes)}
        winners = assign(shard.rules, self.analysis.paths_for(shard)).by_path
        self.decided = {path: rule for path, rule in winners.items() if not isinstance(rule.treatment, Hole)}
        self.open = {path: lines[rule.origin.span] for path, rule in winners.items() if path not in self.decided}

    def seconds(self, choices: dict[int, dict], *, followed: bool = True) -> float | None:
        """Seconds of the best of these styles; None if none agree."""
        manifest = self.analysis.manifest
        assert manifest is not None
        graph = GraphBuilder(manifest, self.decided, self.open, choices, self.costs, followed=followed).build()
        return place(graph).seconds

    def one(self, labels: tuple[int, ...]) -> dict[int, dict]:
        return {hole: {label: self.rules[hole][label]} for hole, label in enumerate(labels)}

    def is_legal(self, labels: tuple[int, ...]) -> bool:
        """Whether the layout analysis finds nothing in one forward of the model."""
        assert self.analysis.manifest is not None
        chosen = {path: self.rules[hole][labels[hole]] for path, hole in self.open.items()}
        styles = {path: rule for path, rule in chosen.items() if not isinstance(rule.treatment, Unplaced)}
        return not Propagation(self.analysis.manifest, {**self.decided, **styles}).run()


PARTS = {
    "attention": """shard on tp {{
      layers.*.attention              = auto
      layers.*.attention.{{wq, wk, wv}} = auto
      layers.*.attention.wo           = auto
      layers.*.attention_norm         = {norm}
      {rest}
    }}""",
    "feed_forward": """shard on tp {{
      layers.*.feed_forward          = auto
      layers.*.feed_forward.{{w1, w3}} = auto
      layers.*.feed_forward.w2       = auto
      layers.*.ffn_norm              = {norm}
      {rest}
    }}""",
    "ends": """shard standard on tp ({norm}) {{
      tok_embeddings = auto
      norm           = auto
      output         = auto
    }}""",
}
REST = {
    "attention": "tok_embeddings = rowwise(input = replicate, output = shard(1))\n"
    "      layers.*.ffn_norm = sequence\n"
    "      layers.*.feed_forward = inputs(from = shard(1), to = replicate)\n"
    "      layers.*.feed_forward.{w1, w3} = colwise\n"
    "      layers.*.feed_forward.w2 = rowwise(output = shard(1))\n"
    "      norm = sequence\n"
    "      output = colwise(input = shard(1), loss_parallel = true)",
    "feed_forward": "tok_embeddings = rowwise(input = replicate, output = shard(1))\n"
    "      layers.*.attention_norm = sequence\n"
    "      layers.*.attention = inputs(from = shard(1), to = replicate)\n"
    "      layers.*.attention.{wq, wk, wv} = colwise\n"
    "      layers.*.attention.wo = rowwise(output = shard(1))\n"
    "      norm = sequence\n"
    "      output = colwise(input = shard(1), loss_parallel = true)",
    "ends": "",
}


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("part", some_slow(PARTS, "feed_forward", "attention"))
def test_legal_assignments_equal_those_of_the_layout_analysis(
    part: str, sequence: bool, monkeypatch: pytest.MonkeyPatch
):
    """All styles of a part of a model: those with a solution are those without a mismatch, and the best is found."""
    norm = "sequence" if sequence else ("none" if part != "ends" else "loss_parallel")
    text = PARTS[part].format(norm=norm, rest=REST[part] if sequence else "")
    model = Model(opened(text, model='llama3("tiny", n_layers = 3)', length=256, ranks=4))
    sizes = [range(len(hole.choices)) for hole in model.plan.holes]
    legal = [labels for labels in itertools.product(*sizes) if model.is_legal(labels)]
    assert 4 < len(legal) < len(list(itertools.product(*sizes)))

    single = {labels: model.seconds(model.one(labels)) for labels in legal}
    best = min(seconds for seconds in single.values() if seconds is not None)
    assert model.seconds(model.rules) == pytest.approx(best, rel=1e-9)

    monkeypatch.setattr(placement_graph, "is_left_to_torch", lambda *_: False)
    for labels in itertools.product(*sizes):
        assert (model.seconds(model.one(labels), followed=False) is not None) == (labels in single), labels


STANDARD = ("", "loss_parallel", "sequence", "sequence, loss_parallel")
MODELS = ['llama3("8b")', 'llama3("70b")', 'gpt3("13b", vocab_size = 50304)', 'mixtral("8x7b")']


@pytest.mark.parametrize("model", slow_but(MODELS, MODELS[3]))
@pytest.mark.parametrize(("length", "ranks"), [pytest.param(512, 2, marks=pytest.mark.slow), (2048, 8)])
def test_chosen_styles_cost_no_more_than_standard_layouts(model: str, length: int, ranks: int):
    """The styles that are chosen are legal, and cost no more than those of the family's standard layouts."""
    plan = opened("shard auto on tp", model=model, length=length, ranks=ranks)
    found = Placements(plan, BoundsOf().machine).complete((None,) * len(plan.holes))
    assert found is not None
    assert not plan.candidate(found).errors
    all_open = Model(plan)
    best = all_open.seconds(all_open.one(found))
    assert best is not None
    for options in STANDARD:
        analysis = opened(f"shard standard on tp ({options})", model=model, length=length, ranks=ranks).analysis
        assert analysis is not None
        usual = analysis.assigned(analysis.plan.shard[0]).by_path
        styles = {hole: {0: usual.get(path, all_open.rules[hole][0])} for path, hole in all_open.open.items()}
        seconds = all_open.seconds(styles)
        assert seconds is not None
        assert best <= seconds * (1 + 1e-9), options


@pytest.mark.parametrize("model", some_slow(MODELS, MODELS[1], MODELS[2]))
def test_forms_of_standard_layouts_are_those_of_the_language(model: str):
    """With the styles of each form, a plan treats its modules as one that names the standard layout."""
    plan = opened("shard auto on tp", model=model)
    forms = Placements(plan, BoundsOf().machine).usual((None,) * len(plan.holes))
    assert len(forms) == len(STANDARD)
    for form, options in zip(forms, reversed(STANDARD), strict=True):
        assert form is not None
        written = opened(f"shard standard on tp ({options})", model=model).analysis
        own = plan.candidate(form).analysis
        treated = [
            {path: rule.treatment for path, rule in one.assigned(one.plan.shard[0]).by_path.items()}
            for one in (written, own)
            if one is not None
        ]
        none = {path for path, treatment in treated[1].items() if isinstance(treatment, Unplaced)}
        assert {path: str(style) for path, style in treated[1].items() if path not in none} == {
            path: str(style) for path, style in treated[0].items()
        }


def chosen(plan: OpenPlan) -> dict[str, str]:
    found = Placements(plan, BoundsOf().machine).complete((None,) * len(plan.holes))
    assert found is not None
    assert not plan.candidate(found).errors
    return {hole.what: hole.choices[index] for hole, index in zip(plan.holes, found, strict=True) if index is not None}


def test_long_sequences_choose_the_megatron_layout():
    """Tensor and sequence parallel, with the loss on shards of the vocabulary (Korthikanti et al. 2022)."""
    styles = chosen(opened("shard auto on tp", length=8192))
    block = {path.removeprefix("shard layers.*."): style for path, style in styles.items() if "layers" in path}
    gathered = "inputs(from = shard(1), to = replicate)"
    assert block == {
        "attention_norm": "sequence", "attention": gathered,
        "attention.wq": "colwise", "attention.wk": "colwise", "attention.wv": "colwise",
        "attention.wo": "rowwise(output = shard(1))",
        "ffn_norm": "sequence", "feed_forward": gathered,
        "feed_forward.w1": "colwise", "feed_forward.w3": "colwise", "feed_forward.w2": "rowwise(output = shard(1))",
    }  # fmt: skip
    assert styles["shard output"] == "colwise(input = shard(1), loss_parallel = true)"


@pytest.mark.slow
def test_undivisible_dims_are_left_unsharded():
    """Heads that eight ranks cannot share stay together, and a sequence that they cannot share stays whole."""
    styles = chosen(opened("shard auto on tp", model='llama3("8b", n_heads = 12, n_kv_heads = 12, dim = 3072)'))
    assert "colwise" not in styles["shard layers.*.attention.wq"]
    assert styles["shard layers.*.feed_forward.w1"].startswith("colwise")
    styles = chosen(opened("shard auto on tp", length=8190))
    assert not any("shard(1)" in style or style == "sequence" for style in styles.values())
    assert styles["shard layers.*.attention.wq"] == "colwise"


def test_decided_rules_and_requirements_hold():
    plan = opened("shard auto on tp { layers.*.{attention, ffn}_norm = none }")
    assert "sequence" not in chosen(plan).values()
    whole = "shard auto on tp { layers.*.feed_forward.{w1, w2, w3} = none }\nrequire peak_memory <= 1.1GiB"
    tight = opened(whole, ranks=2, length=512)
    assert Placements(tight, BoundsOf().machine).complete((None,) * len(tight.holes)) is None


def test_memory_limit_changes_the_styles():
    """Replicated layers cost memory: under a limit that they exceed, layers are sharded."""
    shard = "shard on tp { output = auto, norm = auto }\noptimizer adamw(lr = 3e-4)"
    shapes = {"length": 64, "ranks": 8}
    free = opened(shard, **shapes)
    model = Model(free)
    assert model.analysis.manifest is not None
    graph = GraphBuilder(model.analysis.manifest, model.decided, model.open, model.rules, model.costs).build()
    found = place(graph)
    whole = place(graph, forbidden=[{(0, label)} for label in range(1, len(model.rules[0]))])
    assert whole.bytes > found.bytes
    assert place(graph, most_bytes=whole.bytes - 1.0).labels[0] != 0


@pytest.mark.parametrize(("beside", "fits"), [(0, False), (8 * 2**30, True)])
def test_styles_leave_room_for_what_is_beside_tensors(beside: int, fits: bool):
    """The context of CUDA, workspaces and communication buffers are in the device's memory too."""
    plan = opened("shard on tp { norm = auto }")
    model = Model(plan)
    assert model.analysis.manifest is not None
    graph = GraphBuilder(model.analysis.manifest, model.decided, model.open, model.rules, model.costs).build()
    known, capacity = model.costs.machine, int(place(graph).bytes) + 2**20 + beside
    assert known.device.memory is not None
    device = replace(known.device, memory=replace(known.device.memory, capacity_bytes=capacity))
    machine = dataclasses.replace(known, cluster=replace(known.cluster, device=device))
    assert (Placements(plan, lambda analysis: machine).complete((None,)) is not None) is fits


def test_one_rank_needs_no_styles():
    plan = opened("shard auto on tp", ranks="auto in [1, 2]")
    tp = next(index for index, hole in enumerate(plan.holes) if hole.what == "mesh tp")
    choices = tuple(0 if index == tp else None for index in range(len(plan.holes)))
    found = Placements(plan, BoundsOf().machine).complete(choices)
    assert found is not None
    assert set(found) == {0}


def test_hidden_reductions_cost_nothing():
    found = {}
    for option in ("", ", overlap"):
        open_rules = "layers.*.attention.wo = auto, layers.*.feed_forward.w2 = auto, norm = auto"
        one = Model(opened(f"shard standard on tp (sequence, loss_parallel{option}) {{ {open_rules} }}"))
        found[option] = one.seconds(dict(enumerate(map(dict.copy, one.rules.values()))))
    hidden = one.costs._seconds("reduce_scatter", one.costs._whole(4096))
    assert found[""] - found[", overlap"] == pytest.approx((2 * 32 + 1) * hidden)
