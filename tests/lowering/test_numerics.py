"""A lowered program on any mesh trains as the same plan does on one process."""

from __future__ import annotations

import pytest
import torch

from support.marks import slow_but
from support.texts.plans import HEAD, SEQUENCE_PARALLEL
from support.training.meshed import UNITS, text_of
from support.training.staged import DOUBLE, PLAIN_DOUBLE, TOLERANCE, assert_close, train

ATTENTION_ONLY = """\
shard on tp {
  layers.*.attention.{wq, wk, wv} = colwise
  layers.*.attention.wo           = rowwise
}
"""
FEED_FORWARD_ONLY = """\
shard on tp {
  layers.*.feed_forward.{w1, w3} = colwise
  layers.*.feed_forward.w2       = rowwise
}
"""
RAW_PLACEMENTS = """\
shard on tp {
  layers.*.feed_forward                     = inputs(from = replicate, to = replicate)
  layers.*.feed_forward.{w1, w3}.weight     = shard(0)
  layers.*.feed_forward.w2.weight           = shard(1)
  layers.*.feed_forward.w2                  = outputs(from = partial, to = replicate)
  layers.{1, 3}.attention.{wq, wk, wv}      = colwise
  layers.{1, 3}.attention.wo                = rowwise
}
"""
VOCABULARY_PARALLEL = """\
shard on tp {
  tok_embeddings = rowwise
  output         = colwise(loss_parallel = true)
}
"""

PLANS = {
    "fsdp": f"mesh (dp_shard = 4)\nfsdp on dp_shard {UNITS}{DOUBLE}",
    "fsdp, kept after forward": f"""
mesh (dp_shard = 4)
fsdp on dp_shard {{ layers.* = unit(reshard = after_backward), root = unit(reshard = after_forward) }}
{DOUBLE}""",
    "fsdp, two ranks after forward, blocks unlike each other": f"""
mesh (dp_shard = 4)
fsdp on dp_shard {{
  layers.*                 = unit(reshard = 2)
  layers.2                 = none
  layers.{{0..1}}.attention = unit
  {{tok_embeddings, output}} = unit
}}
{DOUBLE}""",
    "tensor and sequence parallel": f"mesh (tp = 4)\n{SEQUENCE_PARALLEL}{PLAIN_DOUBLE}",
    "fsdp and tensor parallel": f"""
mesh (dp_shard = 2, tp = 2)
{SEQUENCE_PARALLEL}
fsdp on dp_shard {UNITS}
{DOUBLE}""",
    "fsdp, tensor parallel and checkpointing": f"""
mesh (dp_shard = 2, tp = 2)
{SEQUENCE_PARALLEL}
fsdp on dp_shard {UNITS}
checkpoint {{ layers.* = full }}
{DOUBLE}""",
    "the first blocks treated otherwise": f"""
mesh (dp_shard = 2, tp = 2)
{SEQUENCE_PARALLEL}
fsdp on dp_shard {{
  layers.* = first(3, unit, others = unit(reshard = after_backward))
  root     = unit
}}
checkpoint {{ layers.* = first(1, full, others = selective([attention])) }}
{DOUBLE}""",
    "hybrid sharding": f"mesh (dp_replicate = 2, dp_shard = 2)\nfsdp on dp_replicate, dp_shard {UNITS}{DOUBLE}",
    "replicas alone": f"mesh (dp_replicate = 4)\nfsdp on dp_replicate, dp_shard {UNITS}{DOUBLE}",
    "checkpointing of some": f"""
mesh (dp_shard = 4)
fsdp on dp_shard {UNITS}
checkpoint (preserve_rng = false) {{
  layers.*                 = every(2)
  layers.{{0, 2}}.attention = full
  layers.1.feed_forward    = full
  output                   = full
}}
{DOUBLE}""",
    "tensor parallel feed-forward with fsdp": f"""
mesh (dp_shard = 2, tp = 2)
{FEED_FORWARD_ONLY}
fsdp on dp_shard {UNITS}
{DOUBLE}""",
    "tensor parallel attention alone": f"mesh (tp = 4)\n{ATTENTION_ONLY}{PLAIN_DOUBLE}",
    "placements of parameters": f"mesh (tp = 4)\n{RAW_PLACEMENTS}{PLAIN_DOUBLE}",
    "vocabulary parallel": f"mesh (tp = 4)\n{VOCABULARY_PARALLEL}{PLAIN_DOUBLE}",
    "three axes": f"""
mesh (dp_replicate = 2, dp_shard = 1, tp = 2)
{SEQUENCE_PARALLEL}
fsdp on dp_replicate, dp_shard {UNITS}
{DOUBLE}""",
}


@pytest.mark.parametrize(
    "name",
    slow_but(PLANS, "three axes"),
)
def test_program_on_a_mesh_equals_one_process(name: str, gloo, data, alone):
    for result in gloo(4)(train, text_of(PLANS[name]), data):
        assert_close(result, alone, TOLERANCE)


def test_tied_embeddings_stay_one_parameter_under_tensor_parallel(gloo, data):
    head = HEAD.replace('llama3("tiny")', 'llama3("tiny", tie_embeddings = true)')
    [one] = gloo(1)(train, text_of(PLAIN_DOUBLE, head), data)
    for result in gloo(4)(train, text_of(f"mesh (tp = 4)\n{VOCABULARY_PARALLEL}{PLAIN_DOUBLE}", head), data):
        assert "output.weight" not in result["parameters"]
        assert_close(result, one, TOLERANCE)


@pytest.mark.slow
def test_mixed_precision_trains_close_to_full_precision(gloo, data):
    [single] = gloo(1)(train, text_of("precision (param = fp32)"), data)
    units = f"mesh (dp_shard = 4)\nfsdp on dp_shard {UNITS}precision (param = bf16, reduce = fp32)"
    autocast = f"mesh (tp = 4)\n{SEQUENCE_PARALLEL}precision (param = bf16)"
    for body in (units, autocast):
        result = gloo(4)(train, text_of(body), data)[0]
        assert result["dtypes"] == {torch.float32}
        assert result["loss"] == pytest.approx(single["loss"], rel=1e-2)
        assert result["loss"] != pytest.approx(single["loss"], rel=1e-6)
