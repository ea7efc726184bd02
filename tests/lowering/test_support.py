"""Unsupported configurations of a family: LP010 from lint at their lines, and the same from lowering."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from legoai.dsl.lint import lint
from legoai.dsl.rules import rule_of
from legoai.lowering.program import LoweringError
from support.texts.plans import HEAD, SEQUENCE_PARALLEL, lowered, refusals

BATCH = "batch (global = 8, micro = 2, seq_len = 32)\n"
FLEX = "attention flex"

CASES = {
    "flex": ("attention flex", {1: "has no such kernel"}),
    "comm of a graph": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard\ncomm (reorder = true,\n  prefetch = proactive(limit = 1GiB),\n"
        "  unshard = selective)",
        {3: "one traced graph", 4: "`units(…)` is lowered", 5: "one traced graph"},
    ),
    "a measured profile without a graph": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard { layers.* = unit }\ncomm (profile = measured)",
        {3: "`profile = measured` is not lowered: it is of the nodes of one traced graph"},
    ),
    "a measured profile that no pass reads": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph) { layers.* = unit }\n"
        "comm (reorder = true,\n  prefetch = proactive(limit = 1GiB),\n  profile = measured)",
        {5: "no pass over this graph decides by times or by memory"},
    ),
    "a measured profile with stages": (
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = 1F1B)\n"
        "fsdp on dp_shard (backend = graph) { layers.* = unit(reshard = after_backward) }\n"
        "comm (reorder = true,\n  profile = measured)",
        {5: "no pass over this graph decides"},
    ),
    "torch's scheduler without a graph": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard { layers.* = unit }\ncomm {\n  layers.* = bucket(compiler)\n}",
        {4: "the eager backend has none"},
    ),
    "torch's scheduler beside our own passes": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph) {\n  layers.* = unit\n}\ncomm (reorder = true,\n"
        "  prefetch = proactive(limit = 1GiB),\n  unshard = selective) {\n"
        "  layers.{0..2} = bucket(compiler)\n  layers.3 = bucket(module)\n}\nrequire peak_memory <= 1GiB\n"
        "offload (optimizer = all,\n  activations = all)",
        {
            5: "places every gather and reduction itself",
            6: "by limits of its own",
            7: "would share buckets with what does not",
            9: "a rule beside `bucket(compiler)`",
            12: "counts no copies to the host",
            13: "counts no copies to the host",
        },
    ),
    "torch's scheduler of some units": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph) {\n  layers.* = unit\n}\n"
        "comm { layers.{0..2} = bucket(compiler) }",
        {5: "does not name the unit `layers.3`"},
    ),
    "torch's scheduler of units that stay gathered": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph) {\n  layers.* = unit(reshard = never)\n}\n"
        "comm { layers.* = bucket(compiler) }",
        {5: "stays gathered for a whole step"},
    ),
    "torch's scheduler beside context parallelism": (
        "mesh (dp_shard = 2,\n  cp = 2)\ncontext on cp\nfsdp on dp_shard, cp (backend = graph) { layers.* = unit }\n"
        "comm { layers.* = bucket(compiler) }",
        {2: "added up in place"},
    ),
    "torch's scheduler with stages": (
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = 1F1B)\n"
        "fsdp on dp_shard (backend = graph) { layers.* = unit(reshard = after_backward) }\n"
        "comm { layers.* = bucket(compiler) }",
        {4: "of all micro batches in flight"},
    ),
    "times beside other orders": (
        "mesh (dp_shard = 2,\n  cp = 2)\ncontext on cp\nfsdp on dp_shard, cp (backend = graph) { layers.* = unit }\n"
        "comm (reorder = by_time,\n  prefetch = proactive(limit = 1GiB))",
        {2: "take different times", 6: "how far ahead units are gathered"},
    ),
    "times of stages": (
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = 1F1B)\n"
        "fsdp on dp_shard (backend = graph) { layers.* = unit(reshard = after_backward) }\n"
        "comm (reorder = by_time)",
        {4: "the times are of one"},
    ),
    "buckets of no units": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard {\n  layers.* = unit\n  layers.1.attention = unit\n}\n"
        "comm {\n  root = bucket(group)\n  layers.{0, 1} = bucket(module)\n}",
        {7: "shares no bucket", 8: "is a unit inside of `layers.1`"},
    ),
    "buckets of unlike units": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard {\n  layers.* = unit\n  layers.3 = unit(reshard = never)\n}\n"
        "comm {\n  layers.{1..3} = bucket(group)\n  layers.0 = bucket([1])\n}",
        {7: "reshard differently"},
    ),
    "prefetching of units in units": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard {\n  layers.* = unit\n  layers.1.attention = unit\n}\n"
        "comm (prefetch = units(forward = 1))",
        {6: "`layers.1.attention` lies inside of another"},
    ),
    "one reduction of several passes": (
        "mesh (pp = 2, dp_shard = 2)\nfsdp on dp_shard { layers.* = unit }\n"
        "pipeline on pp (schedule = GPipe, microbatches = 1)\ncomm (reduce = last_micro_batch)",
        {4: "a pipeline reduces after each of its 2 passes in a step"},
    ),
    "prefetching none": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard { layers.* = unit }\ncomm (prefetch = units(backward = 0))",
        {3: "at least one unit ahead"},
    ),
    "offload of a graph": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph)\noffload (optimizer = adaptive,\n"
        "  activations = adaptive)",
        {3: "without a limit of active memory", 4: "without a limit of active memory"},
    ),
    "parameters of a graph on the host": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph)\noffload (parameters = all)",
        {3: "the optimizer updates shards where they are"},
    ),
    "offload of no state": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph)\noffload (optimizer = all)\noptimizer sgd(lr = 0.1)",
        {3: "keeps no state"},
    ),
    "a part of the state of a graph beside muon": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph)\noffload (optimizer = bytes(1MiB))\n"
        "optimizer adamw(lr = 1e-3) { layers.*.attention.wq.weight = muon(lr = 0.02) }",
        {3: "beside `muon`"},
    ),
    "a part of the activations without a graph": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard\noffload (activations = bytes(1GiB))",
        {3: "which the eager backend does not have"},
    ),
    "autocast to fp32": ("precision (master = fp64, param = fp32)", {1: "autocast computes in bf16"}),
    "gradient dtype": (
        "mesh (dp_shard = 2)\nfsdp on dp_shard { layers.* = unit }\nprecision (param = fp32,\n  gradient = bf16)",
        {4: "gradients accumulate in fp32, the dtype of the stored parameters"},
    ),
    "gradient dtype of stages": (
        "mesh (pp = 2, dp_shard = 2)\npipeline on pp\nfsdp on dp_shard { layers.* = unit(reshard = after_backward) }\n"
        "precision (reduce = bf16,\n  gradient = fp32)",
        {5: "accumulate in bf16, the dtype in which they are reduced after each pass of the pipeline"},
    ),
    "mxfp8": ("precision { layers.*.feed_forward.* = mxfp8 }", {1: "`mxfp8` is not lowered yet"}),
    "a style of every stage's root": (
        "mesh (pp = 2, tp = 2)\npipeline on pp\nshard on tp {\n  root = inputs(from = replicate, to = replicate)\n}",
        {4: "cannot hold for every stage"},
    ),
    "budgets beside ranks of cp": (
        "mesh (cp = 4)\nfsdp on cp { layers.* = unit }\ncontext on cp\ncheckpoint {\n  layers.* = budget(50%)\n}",
        {5: "beside ranks of `cp`"},
    ),
    "stages beside a graph": (
        "mesh (dp_shard = 2, pp = 2,\n  cp = 2)\npipeline on pp (\n  schedule = 1F1B)\ncontext on cp\n"
        "fsdp on dp_shard (backend = graph) {\n  layers.* = unit(reshard = 2)\n}\n"
        "comm (reorder = true,\n  prefetch = proactive(limit = 1GiB))\n"
        "offload (activations = all,\n  optimizer = all)\nrequire peak_memory <= 70GiB",
        {
            7: "each micro batch in flight would hold parts of its own",
            10: "how many micro batches are in flight",
            11: "`activations` of `offload` with stages",
            12: "`optimizer` of `offload` with stages",
        },
    ),
    "a graph without ranks": ("fsdp on dp_shard (backend = graph)", {1: "one rank"}),
    "parameters that tensor parallelism cuts unevenly in a graph": (
        "mesh (dp_shard = 2,\n  tp = 3)\nfsdp on dp_shard (backend = graph)\nshard on tp { tok_embeddings = rowwise }",
        {2: "`tp = 3` is not lowered beside `backend = graph`: it does not divide dim 0 of `tok_embeddings.weight`"},
    ),
    "units of a graph that stay in parts": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph) {\n  layers.* = unit(reshard = 2)\n}\n"
        "comm (unshard = selective)\nrequire peak_memory <= 70GiB",
        {5: "a unit that reshards to some of its ranks is gathered again"},
    ),
    "statements beside a graph": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph)\nloss chunked(2)",
        {3: "`loss chunked`"},
    ),
    "a compiled model around the last layer": (
        "compile {\n  root = inductor\n}\nloss chunked(2,\n  last_layer = true)",
        {5: "the loss cannot compute `output`: `root` is compiled"},
    ),
    "a last layer that is recomputed": (
        "checkpoint { output = full }\nloss chunked(2, last_layer = true)",
        {2: "`output` is recomputed"},
    ),
    "a last layer in float8": (
        "precision { output = float8 }\nloss chunked(2, last_layer = true)",
        {2: "it is converted to float8"},
    ),
    "a last layer that the model's unit frees": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard { root = unit(reshard = after_forward) }\n"
        "loss chunked(2, last_layer = true)",
        {3: "the unit `root` frees its parameters after the model's forward"},
    ),
    "a last layer that is given another dtype": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard\nprecision (output = fp32)\nloss chunked(2, last_layer = true)",
        {4: "the model would give it fp32"},
    ),
    "a last layer under a split backward": (
        "mesh (pp = 4)\npipeline on pp (schedule = InterleavedZeroBubble, stages = 4)\n"
        "loss chunked(2, last_layer = true)",
        {3: "later than those of inputs"},
    ),
    "a last layer of whose result a style changes the layout": (
        "mesh (tp = 4)\nshard on tp { output = outputs(from = replicate, to = replicate) }\n"
        "loss chunked(2, last_layer = true)",
        {3: "`outputs` lays out what `output` takes or gives"},
    ),
    "prefetching where one graph is not reordered": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph)\ncomm (prefetch = proactive(limit = 1GiB))\n",
        {3: "where `reorder = true` does"},
    ),
    "comm of one graph": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph) { layers.* = unit }\n"
        "comm (prefetch = units(forward = 2),\n  unshard = selective,\n  reduce = last_micro_batch)",
        {3: "gathers ahead by memory", 4: "without a limit of active memory", 5: "reduces its gradients"},
    ),
    "precision of a graph": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph)\nprecision (reduce = fp16)",
        {3: "could overflow"},
    ),
}


@pytest.mark.parametrize(
    "read",
    [
        "comm (profile = measured) { layers.* = bucket(compiler) }",
        "comm (profile = measured, unshard = selective)\nrequire peak_memory <= 70GiB",
        "comm (profile = measured, reorder = true, prefetch = proactive(limit = 1GiB))\nrequire peak_memory <= 70GiB",
        "comm (profile = measured)\noffload (activations = adaptive)\nrequire peak_memory <= 70GiB",
        "comm (profile = measured)\noffload (optimizer = adaptive)\nrequire peak_memory <= 70GiB",
    ],
)
def test_profile_is_measured_if_a_pass_reads_it(read: str):
    body = f"{BATCH}mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph) {{ layers.* = unit }}\n{read}\n"
    assert not refusals(HEAD + body)
    assert "return rewritten(graph, PASSES, profile=PROFILE)" in lowered(HEAD + body).text
    [found] = refusals((HEAD + body).replace("cpu(devices", 'profile("a.toml", devices'))
    assert "a profile beside" in found.message


def test_selective_unshard_requires_a_known_memory_curve():
    selective = "comm (unshard = selective)\nrequire peak_memory <= 70GiB\n"
    graph = f"{BATCH}fsdp on dp_shard (backend = graph) {{ layers.* = unit(reshard = after_backward) }}\n{selective}"
    assert not refusals(f"{HEAD}mesh (dp_shard = 4)\n{graph}")
    staged = "mesh (pp = 2, dp_shard = 2)\npipeline on pp (schedule = 1F1B)\n"
    [found] = refusals(f"{HEAD}{staged}{graph}")
    assert "`unshard = selective` with stages is not lowered" in found.message
    sparse = HEAD.replace('llama3("tiny")', 'mixtral("tiny", n_experts = 4)')
    assert not refusals(f"{sparse}mesh (dp_shard = 4)\n{graph}")
    [found] = refusals(f"{sparse}mesh (dp_shard = 4)\n{graph.replace('(unshard', '(reorder = by_time, unshard')}")
    assert "`reorder = by_time` with experts is not lowered" in found.message
    experts = "mesh (dp_shard = 4, ep = 2)\nshard on ep { layers.*.feed_forward.experts = experts }\n"
    parts = graph.replace("after_backward", "2").replace(selective, "")
    assert not refusals(f"{HEAD}mesh (dp_shard = 4)\n{parts}")
    [found] = refusals(f"{HEAD}mesh (dp_shard = 4)\n{parts}comm {{ layers.* = bucket(compiler) }}")
    assert "`layers.0` is gathered again of parts" in found.message
    [found] = refusals(f"{sparse}{experts}{parts}")
    assert "`reshard = 2` of `layers.0` with experts on `ep`" in found.message
    [found] = refusals(f"{sparse}{experts}{graph}")
    assert "how many rows experts on `ep` take is only known in a step" in found.message


def test_graph_experts_require_dim_0_without_budget_or_regions():
    head = HEAD.replace('llama3("tiny")', 'mixtral("tiny", n_experts = 2)').replace("devices = 4", "devices = 8")
    body = (
        "mesh (dp_shard = 4, ep = 2)\nshard on ep { layers.*.feed_forward.experts = experts }\n"
        "fsdp on dp_shard (backend = graph)\nbatch (global = 8, micro = 2, seq_len = 16)\n"
    )
    [found] = refusals(head + body)
    assert "`layers.0.feed_forward.experts` in shards of dim 1" in found.message
    head = head.replace("n_experts = 2", "n_experts = 4")
    assert not refusals(head + body)
    [found] = refusals(f"{head}{body}compile {{ layers.*.feed_forward.experts = aot_eager }}")
    assert "`aot_eager` of `layers.0.feed_forward.experts` is not lowered beside `backend = graph`" in found.message
    assert not refusals(f"{head}{body}compile {{ layers.* = inductor }}")
    assert not refusals(
        f"{head}{body}checkpoint {{ layers.* = selective([matmul]), layers.0.attention = budget(50%) }}"
    )
    [found] = refusals(f"{head}{body}checkpoint {{ layers.* = budget(50%) }}")
    assert "`budget` of `layers.0`" in found.message


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("plain", "", None),
        ("hooked", "", None),
        ("dropping", "", None),
        (
            "dropping",
            "checkpoint { blocks.1 = full }",
            "`full` of `blocks.1` is not lowered beside `backend = graph`: `b",
        ),
        ("compiled_in_place", "", "it cannot be traced"),
        ("normalised", "precision (param = fp32)", "batch normalisation (`blocks.0.layer.2`) is not lowered"),
        ("shared", "", "one module with parameters at `blocks.0.layer` and `blocks.0.again` is not lowered"),
        ("made", "", "no gradient reaches `blocks.0.norm.weight`"),
    ],
)
def test_step_of_other_models_is_one_graph_if_all_steps_are_alike(kind: str, more: str, why: str | None, tmp_path):
    head = HEAD.replace('llama3("tiny")', f'python("support.models.other_authors:build", kind = "{kind}")')
    body = f"{BATCH}mesh (dp_shard = 2)\nfsdp on dp_shard (backend = graph) {{ blocks.* = unit }}\n{more}"
    found = {
        item.message for item in lint(head + body, "t.plan", directory=tmp_path).diagnostics if item.code == "LP010"
    }
    assert len(found) == (why is not None)
    assert all(str(why) in message for message in found)


def test_experts_of_other_models_have_no_graph_on_ep():
    config = Path(__file__).parents[1] / "support" / "huggingface" / "mixtral.json"
    head = HEAD.replace('llama3("tiny")', f'huggingface("{config}")')
    body = (
        f"{BATCH}mesh (dp_shard = 2, ep = 2)\nshard on ep {{ model.layers.*.mlp.experts = experts }}\n"
        "fsdp on dp_shard (backend = graph) { model.layers.* = unit }"
    )
    [found] = refusals(head + body)
    assert "`model.layers.0.mlp.experts` on `ep` is not lowered beside `backend = graph`" in found.message
    assert not refusals(head + body.replace(" (backend = graph)", ""))


def test_steps_are_looked_at_if_a_variant_alone_traces_them(tmp_path):
    head = HEAD.replace('llama3("tiny")', 'python("support.models.other_authors:build", kind = "compiled_in_place")')
    body = f"{BATCH}mesh (dp_shard = 2)\nfsdp on dp_shard {{ blocks.* = unit }}\n"
    traced = "variant traced { fsdp on dp_shard (backend = graph) { blocks.* = unit } }\n"
    assert not [item for item in lint(head + body, "t.plan", directory=tmp_path).diagnostics if item.code == "LP010"]
    [found] = [
        item for item in lint(head + body + traced, "t.plan", directory=tmp_path).diagnostics if item.code == "LP010"
    ]
    assert "it cannot be traced" in found.message


def test_last_layer_gives_the_result_of_the_model_as_it_is():
    body = f"{BATCH}loss chunked(2, last_layer = true)"
    assert not refusals(HEAD + body)
    for kind in ("plain", "bias", "reading", "dims"):
        assert not refusals(
            HEAD.replace('llama3("tiny")', f'python("support.models.heads:build", kind = "{kind}")') + body
        )
    for kind in ("scaled", "hook", "hook_before", "hook_of_weight", "weight_norm", "subclass", "twice"):
        model = f'python("support.models.heads:build", kind = "{kind}")'
        [found] = refusals(HEAD.replace('llama3("tiny")', model) + body)
        assert "does not return the result of a linear layer as it is" in found.message, kind


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        ("shape", "calls `shape` of it"),
        ("largest", "calls `detach` of it"),
        ("kept", "keeps it"),
        ("detached", "calls `detach` of it"),
        ("reentrant", "calls it within a function of autograd"),
        ("evaluation", "calls `softmax` of it in evaluation mode"),
    ],
)
def test_last_layer_gives_its_result_to_nothing_else(kind: str, use: str):
    head = HEAD.replace('llama3("tiny")', f'python("support.models.heads:build", kind = "{kind}")')
    [found] = refusals(f"{head}{BATCH}loss chunked(2, last_layer = true)")
    assert found.message.endswith(f"`head`: the model's forward takes its result, and {use}")


def test_torch_scheduler_requires_known_clusters_and_sizes():
    body = (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph) { layers.* = unit }\n"
        "batch (global = 8, micro = 2, seq_len = 16)\ncomm { layers.* = bucket(compiler) }\n"
    )
    sparse = HEAD.replace('llama3("tiny")', 'mixtral("tiny")')
    unknown = HEAD.replace("devices = 4", "hosts = 2, devices = 2, fabric = loopback")
    for head, why in ((sparse, "known only when it runs"), (unknown, "nothing is known of its speed")):
        [found] = refusals(head + body)
        assert why in found.message
    known = HEAD.replace("cpu(devices = 4)", "h100_sxm(hosts = 2, devices = 2, fabric = infiniband_ndr)")
    assert 'NodeTimes("h100_sxm", devices=2, hosts=2, fabric="infiniband_ndr")' in lowered(known + body).text


@pytest.mark.parametrize("name", CASES)
def test_lint_and_lowering_report_equal_diagnostics(name: str):
    body, expected = CASES[name]
    head = HEAD + BATCH
    linted = lint(head + body, "tiny.plan", directory=Path())
    found = [item for item in linted.diagnostics if item.code == "LP010"]
    offset = head.count("\n")
    assert {item.label.span.line - offset for item in found} == set(expected)
    for item in found:
        assert expected[item.label.span.line - offset] in item.message
        assert item.label.text or item.help
    assert refusals(head + body) == found


def test_all_unsupported_options_are_reported_in_text_order():
    found = refusals(f"{HEAD}{BATCH}{FLEX}\nprecision {{ layers.*.feed_forward.* = mxfp8 }}")
    assert [item.label.span.line for item in found] == [6, 7]


def test_open_holes_have_their_own_code():
    body = "mesh (tp = auto in [2, 4])\nfsdp on dp_shard {\n  layers.* = auto\n}\noptimizer adamw(betas = [0.9, auto])"
    found = refusals(HEAD + BATCH + body)
    assert [(item.code, item.label.span.line) for item in found] == [("LP011", 6), ("LP011", 8), ("LP011", 10)]


def test_a_style_on_an_axis_of_one_rank_changes_nothing():
    alone = f"{HEAD}{BATCH}precision (param = fp32)\n"
    program = lowered(f"{alone}{SEQUENCE_PARALLEL}")
    assert program.text.partition("PLAN_HASH")[2][80:] == lowered(alone).text.partition("PLAN_HASH")[2][80:]


def test_error_message_names_line_and_code():
    with pytest.raises(LoweringError, match=r"^tiny\.plan:6:.*: LP010 .*\(and 1 more\)$"):
        lowered(f"{HEAD}{BATCH}{FLEX}\nprecision {{ layers.*.feed_forward.* = mxfp8 }}")


@pytest.mark.parametrize("code", ["LP010", "LP011"])
def test_codes_have_pages(code: str):
    rule = rule_of(code)
    assert rule is not None
    assert "## Use instead" in (rule.__doc__ or "")


IDLE = {
    "LP661": "comm (prefetch = units(forward = 2), reduce = last_micro_batch) { layers.* = bucket(module) }",
    "LP662": "mesh (dp_shard = 4)\nfsdp on dp_shard { layers.* = unit }\ncomm { layers.0.attention = bucket(module) }",
    "LP612": "precision { layers.*.feed_forward = float8 }",
    "LP615": "precision (param = fp32, reduce = bf16, gradient = bf16)",
    "LP307": "mesh (dp_shard = 4)\nfsdp on dp_shard { output = unit }\nreplicate on dp_replicate (optimizer = sharded)",
}


@pytest.mark.parametrize("code", IDLE)
def test_options_without_effect_warn_and_change_no_program(code: str):
    *others, idle = IDLE[code].split("\n")
    plan = HEAD + BATCH + "\n".join(others)
    linted = lint(f"{plan}\n{idle}", "tiny.plan", directory=Path())
    assert {item.severity for item in linted.diagnostics if item.code == code} == {"warning"}
    if code == "LP615":
        plan = f"{plan}\nprecision (param = fp32)"

    def body(text: str) -> str:
        return re.sub(r"  # .*", "", text.partition("PLAN_HASH")[2][80:])

    assert body(lowered(f"{HEAD}{BATCH}{IDLE[code]}").text) == body(lowered(plan).text)
