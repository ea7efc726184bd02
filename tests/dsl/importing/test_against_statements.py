"""An imported config lowers to the same program as the plan that `benchmarks/validation` states for its run.

`benchmarks/validation` states published rows of TorchTitan as plans, from their fields and TorchTitan's source of
December 2024. An equivalent config, in the format of that time, lowers to the same program. Three lines are
copied from the statement: the statement's model computes norms as TorchTitan did, and it has no learning-rate schedule.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.validation.rows import Row
from benchmarks.validation.sources import torchtitan

from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.texts.importing import import_config

LLAMA3_8B = {
    "model": "Llama-3-8B", "n_layers": "32", "hidden": "4096", "n_heads": "32", "n_kv_heads": "8",
    "ffn_hidden": "14336", "vocab": "128256", "seq_len": "8192", "gpu": "H100-80GB", "gpus_per_node": "8",
    "interconnect": "InfiniBand", "date": "2024-12", "precision": "bf16", "compile": "0", "notes": "",
}  # fmt: skip
CONFIG = """\
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 3e-4
{optimizer}
[training]
seq_len = 8192
steps = 1000
warmup_steps = 200
batch_size = {micro_batch}
data_parallel_replicate_degree = {dp_replicate}
tensor_parallel_degree = {tp}
compile = {compiled}
[experimental]
pipeline_parallel_degree = {pp}
context_parallel_degree = {cp}
{experimental}
[activation_checkpoint]
{checkpoint}
[float8]
{float8}
"""
CHECKPOINT = {
    "none": 'mode = "none"',
    "full": 'mode = "full"',
    "selective_op": 'mode = "selective"\nselective_ac_option = "op"',
    "selective_layer": 'mode = "selective"\nselective_ac_option = "2"',
}
ROWS = {
    "1D": {"n_gpus": "64", "dp_shard": "64", "ac_mode": "selective_op", "micro_batch": "2", "global_batch": "128"},
    "1D, every second layer": {"n_gpus": "8", "dp_shard": "8", "ac_mode": "selective_layer", "global_batch": "8"},
    "1D, compiled": {"n_gpus": "64", "dp_shard": "64", "ac_mode": "selective_op", "compile": "1", "global_batch": "64"},
    "1D, float8": {
        "n_gpus": "64", "dp_shard": "64", "ac_mode": "full", "compile": "1", "precision": "float8",
        "global_batch": "64",
    },
    "1D, float8, chosen operators": {
        "n_gpus": "8", "dp_shard": "8", "ac_mode": "selective_op", "compile": "1", "precision": "float8",
        "global_batch": "8",
    },
    "hybrid": {"n_gpus": "64", "dp_replicate": "2", "dp_shard": "32", "ac_mode": "full", "global_batch": "64"},
    "2D": {"n_gpus": "64", "dp_shard": "8", "tp": "8", "ac_mode": "full", "micro_batch": "4", "global_batch": "32"},
    "2D, AsyncTP": {
        "n_gpus": "64", "dp_shard": "8", "tp": "8", "ac_mode": "selective_op", "compile": "1", "notes": "AsyncTP",
        "global_batch": "8",
    },
    "2D, float8": {
        "n_gpus": "64", "dp_shard": "8", "tp": "8", "ac_mode": "full", "compile": "1", "precision": "float8",
        "global_batch": "8",
    },
    "fused": {"n_gpus": "8", "dp_shard": "8", "ac_mode": "full", "notes": "fused=True", "global_batch": "8"},
    "context parallel": {"n_gpus": "64", "dp_shard": "16", "cp": "4", "ac_mode": "full", "global_batch": "16"},
    "pipeline": {
        "n_gpus": "64", "dp_shard": "16", "pp": "4", "ac_mode": "full", "pp_schedule": "1F1B", "micro_batch": "8",
        "global_batch": "128",
    },
    "3D": {
        "n_gpus": "64", "dp_shard": "8", "tp": "2", "pp": "4", "ac_mode": "full", "pp_schedule": "Interleaved 1F1B",
        "micro_batch": "8", "global_batch": "64",
    },
}  # fmt: skip
"""Rows as the published tables have them, by what is in them."""


def config_of(row: dict[str, str]) -> str:
    """The config with which such a row was run."""
    float8 = ["enable_float8_linear = true"] if row["precision"] == "float8" else []
    experimental = (
        [f'pipeline_parallel_schedule = "{row["pp_schedule"].replace(" ", "")}"'] if "pp_schedule" in row else []
    )
    experimental += ["enable_async_tensor_parallel = true"] if row["notes"] == "AsyncTP" else []
    return CONFIG.format(
        **{"dp_replicate": "1", "tp": "1", "pp": "1", "cp": "1", **row},
        optimizer="fused = true" if row["notes"] == "fused=True" else "",
        compiled="true" if row["compile"] == "1" else "false",
        checkpoint=CHECKPOINT[row["ac_mode"]],
        float8="\n".join(float8),
        experimental="\n".join(experimental),
    )


def program(text: str) -> str:
    """The lowered program without its head and the numbers of the plan's lines."""
    linted = lint(text, "row.plan", directory=Path())
    assert [item.message for item in linted.diagnostics if item.severity == "error"] == []
    found = re.sub(r"  # \S*row\.plan:\d+$", "", lower(linted.analysis).text, flags=re.MULTILINE)
    return re.sub(r'\A""".*?"""\n|^PLAN(_HASH)? = .*\n', "", found, flags=re.DOTALL | re.MULTILINE)


def line(text: str, keyword: str) -> str:
    return re.search(rf"^{keyword} .*$", text, re.MULTILINE)[0]


@pytest.mark.parametrize("name", ROWS)
def test_imported_config_equals_the_published_row_program(name: str):
    row = {**LLAMA3_8B, "micro_batch": "1", **ROWS[name]}
    stated = torchtitan.convert(Row("row-1", row)).text
    hosts = int(row["n_gpus"]) // 8
    cluster = "h100_sxm" if hosts == 1 else f"h100_sxm(hosts = {hosts}, fabric = infiniband_ndr)"
    found = import_config(config_of(row), "row.toml", plan="row_1", cluster=cluster, devices=8 * hosts)
    assert found.diagnostics == ()
    assert found.text is not None
    imported = found.text.replace(line(found.text, "model"), 'model llama3("8b", max_seq_len = 8192)')
    imported = imported.replace(line(imported, "schedule"), "steps 1000")
    stated = stated.replace(line(stated, "model"), 'model llama3("8b", max_seq_len = 8192)') + "steps 1000\n"
    assert program(imported) == program(stated)
