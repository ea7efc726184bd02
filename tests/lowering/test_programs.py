"""Text of programs: golden texts, stable bytes, and lines mapped to their plan."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from legoai import api
from support import ROOT
from support.texts.plans import FULL, HEAD, SEQUENCE_PARALLEL, lowered, resolved

PLANS = {
    "one_device": f"{HEAD}batch (global = 8, micro = 2, seq_len = 64)",
    "fsdp_tensor_parallel": FULL,
    "overlapped_backward": f"""\
{HEAD}
batch (global = 8, micro = 2, seq_len = 64)
mesh  (tp = 4)
shard standard on tp (sequence, loss_parallel, overlap)
""",
    "hybrid": f"""\
{HEAD}
batch (global = 8, micro = 2, seq_len = 64)
mesh  (dp_replicate = 2, dp_shard = 2)

fsdp on dp_replicate, dp_shard {{
  layers.*                  = unit(reshard = after_backward)
  layers.3                  = unit(reshard = 2)
  layers.{{0..1}}.attention   = unit
  {{tok_embeddings, output}}  = unit(reshard = after_forward)
}}

checkpoint (preserve_rng = false) {{
  layers.*                = every(2)
  layers.0.feed_forward   = full
  layers.2                = full
}}

precision (master = fp64, param = fp64, reduce = fp64, output = fp64)
optimizer sgd(lr = 0.1, momentum = 0.9, nesterov = true, fused = false)
schedule  constant(warmup = 5)
""",
    "graph": """\
plan graph
model   llama3("8b")
cluster h100_sxm(hosts = 2, fabric = infiniband_ndr)
batch   (global = 64, micro = 2, seq_len = 8192)
mesh    (dp_shard = 16)

fsdp on dp_shard (backend = graph) {
  layers.* = unit
  root     = unit
}
comm (reorder = true, unshard = selective) { layers.{0..1} = bucket(group) }
checkpoint { layers.* = selective([attention, alternate_matmul]) }
precision (param = bf16, reduce = fp32)
offload   (activations = adaptive, optimizer = bytes(20GiB))
require   peak_memory <= 70GiB
optimizer adamw(lr = 3e-4)
clip      (norm = 1.0)
""",
    "graph_stages": f"""\
{HEAD}
batch    (global = 32, micro = 2, seq_len = 64)
mesh     (pp = 2, dp_shard = 2)
pipeline on pp (schedule = Interleaved1F1B, microbatches = 4)

fsdp on dp_shard (backend = graph) {{
  layers.* = unit(reshard = after_backward)
}}
comm (reorder = true)
checkpoint {{ layers.* = full }}
""",
    "replicas": """\
plan replicas
model   llama3("1b")
cluster h100_sxm(hosts = 2, fabric = infiniband_ndr)
batch   (global = 128, micro = 4, seq_len = 2048)
mesh    (dp_replicate = 16)

replicate on dp_replicate (bucket = 400MiB, optimizer = sharded)
comm      (reduce = last_micro_batch)
offload   (activations = all)
optimizer adamw(lr = 3e-4)
""",
    "parameter_groups": f"""\
{HEAD}
batch (global = 8, micro = 2, seq_len = 64)
mesh  (dp_shard = 4)

fsdp on dp_shard {{ layers.* = unit }}
optimizer adamw(lr = 3e-4, weight_decay = 0.1) {{
  norm                     = group(weight_decay = 0)
  layers.*.*_norm          = group(weight_decay = 0)
  {{tok_embeddings, output}} = group(lr_scale = 0.5)
  layers.{{0..1}}.attention  = group(lr = 1e-4, betas = [0.9, 0.99])
}}
schedule cosine(warmup = 20, steps = 300, floor = 0.1)
""",
    "muon": """\
plan muon
model   llama3("1b")
cluster h100_sxm
batch   (global = 64, micro = 1, seq_len = 8192)
mesh    (dp_replicate = 8)

replicate on dp_replicate (optimizer = sharded)
optimizer adamw(lr = 3e-4, weight_decay = 0.1) {
  norm                 = group(weight_decay = 0)
  layers.**            = muon(lr = 3e-4, adjust_lr = match_rms_adamw)
  layers.0.**          = muon(lr = 1e-4, momentum = 0.9, ns_steps = 6, nesterov = false)
  layers.*.attention.wo = group
}
""",
    "ramp": f"""\
{HEAD}
batch (
  global = 64
  micro = 2
  seq_len = 64
  ramp = stages(global = [16, 32], until = [100, 500])
)
mesh (dp_shard = 4)
fsdp on dp_shard {{ layers.* = unit }}
""",
    "buckets": """\
plan buckets
model   llama3("8b")
cluster h100_sxm(hosts = 2, fabric = infiniband_ndr)
batch   (global = 32, micro = 1, seq_len = 8192)
mesh    (dp_shard = 16)

fsdp on dp_shard {
  tok_embeddings = unit
  layers.*       = unit
  {norm, output} = unit(reshard = never)
  root           = unit
}

comm (prefetch = units(forward = 2, backward = 1)) {
  layers.*       = bucket(bytes(1.5GiB))
  {norm, output} = bucket(group)
}

offload (parameters = all)
""",
    "context_parallel": f"""\
{HEAD}
batch (global = 8, micro = 2, seq_len = 64)
mesh  (dp_shard = 2, cp = 2)

context on cp (rotate = alltoall)
fsdp on dp_shard, cp {{
  layers.* = unit
  root     = unit
}}
checkpoint {{ layers.* = full }}
""",
    "experts": """\
plan sparse

model   mixtral("8x7b", n_layers = 4, hidden_dim = 4096)
cluster h100_sxm
batch   (global = 64, micro = 1, seq_len = 4096)
mesh    (dp_shard = 8, ep = 4)

shard on ep {
  layers.*.feed_forward.experts = experts(capacity_factor = 1.25)
  layers.0.feed_forward.experts = experts
}

fsdp on dp_shard {
  layers.* = unit
  layers.0 = unit(reshard = after_backward)
  root     = unit
}
""",
    "pipeline": f"""\
{HEAD.replace('"tiny"', '"tiny", n_layers = 6')}
batch (global = 32, micro = 1, seq_len = 256)
mesh  (pp = 2, dp_shard = 2, tp = 2)

{SEQUENCE_PARALLEL}
fsdp on dp_shard {{
  layers.*                 = unit(reshard = after_backward)
  layers.{{0..1}}.attention  = unit(reshard = after_backward)
  {{tok_embeddings, output}} = unit(reshard = after_backward)
}}

pipeline on pp (
  schedule     = ZBVZeroBubble
  split        = [layers.1, layers.3, layers.5]
  microbatches = 8
)

checkpoint {{
  layers.* = every(2)
  norm     = full
}}
precision (param = bf16, reduce = fp32)
""",
    "selective_compile_flash": f"""\
{HEAD}
batch (global = 8, micro = 2, seq_len = 64)
mesh  (dp_shard = 2, tp = 2)

{SEQUENCE_PARALLEL}
fsdp on dp_shard {{
  layers.* = unit
  root     = unit
}}

checkpoint {{
  layers.*      = selective([attention, alternate_matmul])
  layers.{{0..1}} = full
}}
attention flash
loss      chunked(4)
compile   {{ layers.* = inductor }}
""",
    "last_layer": f"""\
{HEAD}
batch (global = 16, micro = 2, seq_len = 64)
mesh  (pp = 2, tp = 2)

{SEQUENCE_PARALLEL}
pipeline on pp (schedule = 1F1B)
loss     chunked(4, last_layer = true)
""",
    "tied_raw_placements": """\
plan tied
model   gpt2("small")
cluster a100_sxm80(hosts = 2, devices = 4, fabric = infiniband_ndr)
batch   (global = 8, micro = 8, seq_len = 1024)
mesh    (tp = 8)

shard on tp {
  tok_embeddings                     = rowwise
  layers.{0..1}.mlp                  = inputs(from = replicate, to = replicate)
  layers.{0..1}.mlp.up.{weight, bias} = shard(0)
  layers.{0..1}.mlp.down.weight      = shard(1)
  layers.{0..1}.mlp.down.bias        = replicate
  layers.{0..1}.mlp.down             = outputs(from = partial, to = replicate)
  output                             = colwise(loss_parallel = true)
}
precision (master = fp32, param = bf16)
""",
}


@pytest.mark.parametrize("name", PLANS)
def test_plan_lowers_to_its_golden_program(name: str, golden):
    golden(name, lowered(PLANS[name]))


@pytest.mark.parametrize("name", PLANS)
def test_program_is_formatted_and_passes_ruff(name: str, tmp_path: Path):
    check_format(lowered(PLANS[name]).text, tmp_path)


@pytest.mark.parametrize(
    "name", ['q""";import os;os.system("x");""".plan', "a\\user.plan", "a\nimport os\n#.plan", "ä.plan"]
)
def test_name_of_the_plans_file_stays_in_docstring_and_comments(name: str, tmp_path: Path):
    path = tmp_path / name
    path.write_text(PLANS["hybrid"])
    text = api.lower(path).text
    first, second = text.partition("\n\n")[0], ast.get_docstring(ast.parse(text), clean=False)
    assert name in second and first.count('"""') == 1
    assert ast.dump(ast.parse(text).body[1]) == ast.dump(ast.parse(lowered(PLANS["hybrid"]).text).body[1])
    check_format(text, tmp_path)


def check_format(text: str, folder: Path) -> None:
    path = folder / "program.py"
    path.write_text(text)
    compile(path.read_text(), str(path), "exec")
    options = ["--isolated", "--line-length", "120", str(path)]
    rules = ["--select", "E,F,W,I,N,UP,B,C4,SIM,RET,PTH,PIE,RUF", "--config", 'lint.isort.known-first-party=["legoai"]']
    for command in (["format", "--diff", *options], ["check", *rules, *options]):
        done = subprocess.run([_ruff(), *command], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def _ruff() -> str:
    return str(Path(sys.executable).parent / "ruff")


_CHILD = """
import json, sys
from support.texts.plans import lowered
sys.stdout.write("\\f".join(lowered(plan).text for plan in json.load(sys.stdin)))
"""


def test_program_text_is_deterministic_across_processes():
    texts = set()
    for seed in ("0", "4711"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", _CHILD], input=json.dumps([PLANS[name] for name in sorted(PLANS)]),
            env=environment, capture_output=True, text=True, check=True, timeout=120, cwd=ROOT,
        )  # fmt: skip
        texts.add(done.stdout)
    assert texts == {"\f".join(lowered(PLANS[name]).text for name in sorted(PLANS))}


@pytest.mark.parametrize("name", PLANS)
def test_every_planned_call_names_its_line(name: str):
    program = lowered(PLANS[name])
    lines = program.text.splitlines()
    decided = {
        "parallelize_module", "fully_shard", "checkpoint_wrapper", "MixedPrecisionPolicy", "PlacedParameters",
        "init_device_mesh", "warmup_schedule", "LlamaConfig", "GPTConfig", "ColwiseParallel", "RowwiseParallel",
        "SequenceParallel", "PrepareModuleInput", "PrepareModuleOutput", "AdamW", "SGD", "replicate",
        "ShardedOptimizer", "CPUOffloadPolicy", "offload_activations", "set_reshard_after_backward",
        "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch", "context_parallel_attention",
    }  # fmt: skip
    seen = 0
    for node in ast.walk(ast.parse(program.text)):
        if isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in decided:
                seen += 1
                assert re.search(r"  # (tiny\.plan:\d+|default)$", lines[node.end_lineno - 1]), lines[node.lineno - 1]
    assert seen >= 2


@pytest.mark.parametrize("name", PLANS)
def test_line_map_equals_the_comments(name: str):
    program = lowered(PLANS[name])
    plan = PLANS[name].splitlines()
    for number, line in enumerate(program.text.splitlines(), 1):
        cited = re.search(r"  # tiny\.plan:(\d+)$", line)
        if cited is not None:
            assert program.lines[number].line == int(cited[1])
    for number, span in program.lines.items():
        assert plan[span.line - 1].strip(), f"line {number} comes from an empty line"


def test_line_comments_have_no_folder():
    text = lowered(FULL, name="some/where/tiny.plan").text
    assert "# tiny.plan:" in text
    assert "some" not in text


def test_header_has_the_torchrun_command_and_cluster():
    assert "torchrun --nproc-per-node 4 tiny.py" in lowered(FULL).text
    text = lowered(PLANS["tied_raw_placements"]).text
    assert "torchrun --nnodes 2 --nproc-per-node 4 " in text
    assert "Cluster: a100_sxm80, 2 hosts, 4 devices each, infiniband_ndr; 8 processes." in text


def test_header_names_the_variant():
    plan = resolved(FULL)
    from dataclasses import replace

    assert "(variant small)" in lowered(replace(plan, variant="small")).text


def test_data_axes_are_the_axes_that_divide_samples():
    assert 'data_axes=("dp_replicate", "dp_shard")' in lowered(PLANS["hybrid"]).text
    assert 'data_axes=("dp_shard",)' in lowered(FULL).text
    sharded = f"{HEAD}batch (global = 8, micro = 2, seq_len = 64)\nmesh (tp = 4)\n{SEQUENCE_PARALLEL}"
    assert "data_axes=()" in lowered(sharded).text


ALL_AT_ONCE = f"""\
{HEAD.replace("cpu(devices = 4)", "h100_sxm")}
batch (global = 8, micro = 2, seq_len = 64)
mesh  (dp_shard = 2, cp = 2, tp = 2)
{SEQUENCE_PARALLEL}
context on cp
fsdp on dp_shard, cp {{ layers.* = unit, root = unit }}
comm (prefetch = units(forward = 1, backward = 1))
offload (activations = all)
checkpoint {{ layers.* = full, layers.0 = selective([matmul]) }}
compile {{ layers.* = inductor }}
"""


@pytest.mark.parametrize("plan", [*PLANS.values(), ALL_AT_ONCE], ids=[*PLANS, "all at once"])
def test_program_lists_model_changes_in_order(plan: str):
    tree = ast.parse(lowered(plan).text)
    [function] = [node for node in tree.body if getattr(node, "name", None) == "parallelize"]
    calls = [node.value.func.id for node in function.body if isinstance(node, ast.Expr) and hasattr(node.value, "func")]
    stated = re.findall(r"^(\d+)\. `(\w+)`: \w", ast.get_docstring(function) or "", re.MULTILINE)
    assert stated == ([(str(place), name) for place, name in enumerate(calls, 1)] if len(calls) > 1 else [])


def test_all_model_changes_are_applied_in_the_documented_order():
    text = lowered(ALL_AT_ONCE).text
    assert re.findall(r"^\d+\. `(\w+)`", text.replace("    ", ""), re.MULTILINE) == [
        "apply_tensor_parallel",
        "apply_context_parallel",
        "apply_compile",
        "apply_checkpoint",
        "apply_compile_after_checkpoint",
        "apply_fsdp",
        "apply_prefetch",
        "offload_activations",
    ]


def test_numbers_keep_the_notation_of_the_plan():
    plan = f"""\
{HEAD}
let rate = 2.50e-4
batch (global = 8, micro = 2, seq_len = 64)
optimizer adamw(lr = rate, weight_decay = 0.10)
clip (norm = 5e-1)
schedule cosine(steps = 10, floor = 0.05)
"""
    text = lowered(plan).text
    for written in ("lr=2.50e-4,", "weight_decay=0.10,", "max_norm=5e-1,", "floor=0.05)"):
        assert written in text
    assert "eps=1e-8," in text, "a default is written as short as in a plan"
