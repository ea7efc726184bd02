"""An undecided value never makes a diagnostic, and never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.lint import lint
from support.texts.rule_plans import codes

PLAN = """
plan holes
model   llama3("8b")
cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
batch   (global = {global}, micro = {micro}, seq_len = {seq_len})
mesh    (pp = {pp}, dp_shard = {dp_shard}, tp = {tp})
shard on tp {{ output = {style} }}
fsdp on dp_shard (backend = {backend}) {{ layers.* = {unit}, layers.0 = unit(reshard = {reshard}) }}
pipeline on pp (schedule = {schedule}, stages = {stages}, split = {split}, microbatches = {microbatches})
checkpoint {{
  layers.*      = {treatment}
  layers.{{1..3}} = selective({keep})
  layers.4      = every({every})
  layers.5      = budget({budget})
}}
comm (reorder = {reorder}, prefetch = {prefetch}, unshard = {unshard}, reduce = {when}) {{
  layers.* = bucket({bucket})
}}
offload (optimizer = {state}, parameters = {parameters}, activations = {activations})
precision (master = {master}, param = {param}, reduce = {reduce}, output = {output}, gradient = {gradient}) {{
  layers.*.feed_forward.* = {float8}
}}
attention {attention}
loss {loss}
compile (async_tp = {async_tp}) {{ layers.* = inductor(mode = {mode}, fullgraph = {fullgraph}) }}
optimizer adamw(lr = {lr}, eps = {eps}, weight_decay = {weight_decay})
schedule cosine(warmup = {warmup}, steps = {steps}, floor = {floor})
require peak_memory <= 60GiB
"""

VALUES = {
    "global": "256", "micro": "1", "seq_len": "8192", "pp": "2", "dp_shard": "4", "tp": "4", "style": "colwise",
    "backend": "eager", "unit": "unit", "reshard": "after_forward", "schedule": "ZBVZeroBubble", "stages": "4",
    "split": "even", "microbatches": "64", "treatment": "full", "keep": "[matmul]", "every": "2", "budget": "50%",
    "reorder": "true", "prefetch": "units(forward = 1)", "unshard": "selective", "when": "last_micro_batch",
    "bucket": "module", "state": "adaptive", "parameters": "all", "activations": "none", "master": "fp16",
    "param": "fp16", "reduce": "fp16", "output": "fp32", "gradient": "fp32", "float8": "float8", "attention": "flash",
    "loss": "fused", "async_tp": "true", "mode": "default", "fullgraph": "true", "lr": "0.0", "eps": "1e-8",
    "weight_decay": "0.1", "warmup": "10", "steps": "100", "floor": "1.0",
}  # fmt: skip

FAMILIES = ("LP5", "LP6", "LP7", "LP82")


def found(**values: str) -> set[str]:
    diagnostics = lint(PLAN.format(**{**VALUES, **values}), "holes.plan", directory=Path()).diagnostics
    assert not [item for item in diagnostics if item.code.startswith(("LP1", "LP2"))]
    return {item.code for item in diagnostics if item.code.startswith(FAMILIES)}


def test_decided_plan_has_the_expected_diagnostics() -> None:
    assert {"LP516", "LP517", "LP614", "LP652", "LP673", "LP681", "LP683", "LP692", "LP823"} <= found()


@pytest.mark.parametrize("name", VALUES)
def test_hole_removes_diagnostics_and_adds_none(name: str) -> None:
    assert found(**{name: "auto"}) <= found()


def test_fully_undecided_plan_has_no_diagnostics() -> None:
    assert found(**dict.fromkeys(VALUES, "auto")) == set()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("LP333", "replicate on dp_replicate (bucket = 10MB)\npipeline on pp (schedule = 1F1B)"),
        ("LP664", "fsdp on dp_replicate { layers.* = unit }\npipeline on pp\ncomm (reduce = every_micro_batch)"),
        ("LP515", 'model gpt2("small")\nreplicate on dp_replicate\npipeline on pp (schedule = 1F1B, stages = 2)'),
        ("LP010", "replicate on dp_replicate\npipeline on pp\nbatch (global = 64, micro = 2, seq_len = 256, "
                  "ramp = stages(global = [32], until = [10]))"),
    ],
)  # fmt: skip
def test_pipeline_that_may_have_one_rank_is_none_yet(code: str, text: str) -> None:
    assert code in codes(f"mesh (pp = 2, dp_replicate = rest)\n{text}")
    for pp in ("auto in [1, 2]", "1"):
        assert code not in codes(f"mesh (pp = {pp}, dp_replicate = rest)\n{text}")
