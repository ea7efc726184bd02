"""Weights that a forward reads without a call of their module: units, styles and compilers of that module."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.analysis.parallelism.replicate import gradient_buckets
from legoai.dsl.lint import lint
from support.texts.rule_plans import codes, diagnostics

BATCH = "batch (global = 8, micro = 2, seq_len = 16)\n"
SHARDS = "mesh (dp_shard = 8)\nfsdp on dp_shard "
TENSOR = "cluster cpu(devices = 2)\nmesh (tp = 2)\nshard on tp "


def found(kind: str, text: str) -> set[str]:
    read = {"LP335", "LP420", "LP651"}
    return codes(f'model python("support.models.read_weights:build", kind = "{kind}")\n{text}\n') & read


@pytest.mark.parametrize(
    ("kind", "units", "is_refused"),
    [
        ("direct", "blocks.*.down = unit", True),
        ("direct", "blocks.*.down = unit(reshard = after_backward)", True),
        ("direct", "blocks.* = unit", False),
        ("direct", "root = unit", False),
        ("none", "blocks.*.down = unit", False),
        ("attending", "blocks.*.attention.out_proj = unit", True),
        ("attending", "blocks.*.attention = unit", False),
        ("tied", "embeddings = unit", True),
        ("tied", "embeddings = unit(reshard = after_backward)", False),
        ("tied", "blocks.* = unit", False),
        ("only_dtype", "blocks.*.unused = unit", False),
        ("in_place", "blocks.*.slow = unit", False),
    ],
)
def test_units_whose_weights_are_read_while_they_are_sharded(kind: str, units: str, is_refused: bool):
    assert ("LP335" in found(kind, f"{SHARDS}{{ {units} }}")) is is_refused


@pytest.mark.parametrize(
    ("kind", "styles", "is_refused"),
    [
        ("direct", "blocks.*.down = rowwise", True),
        ("direct", "blocks.*.down.weight = shard(1)", True),
        ("direct", "blocks.*.up = colwise, blocks.*.down = rowwise", True),
        ("direct", "blocks.*.up = colwise(output = replicate)", False),
        ("none", "blocks.*.up = colwise, blocks.*.down = rowwise", False),
        ("attending", "blocks.*.attention.out_proj = rowwise", True),
        ("attending", "blocks.*.attention.out_proj.weight = shard(1)", True),
        ("only_dtype", "blocks.*.unused = colwise", False),
        ("tied", "embeddings = rowwise(input = replicate)", True),
    ],
)
def test_styles_of_weights_that_meet_plain_tensors(kind: str, styles: str, is_refused: bool):
    assert ("LP420" in found(kind, f"{TENSOR}{{ {styles} }}")) is is_refused


def test_weights_may_meet_dtensors():
    placed = ", ".join(f"blocks.*.{name}.{{weight, bias}} = replicate" for name in ("norm", "up", "down"))
    whole = "from = replicate, to = replicate"
    styles = f"{placed}, blocks.* = inputs({whole}, then = outputs({whole}))"
    assert "LP420" not in found("direct", f"{TENSOR}{{ {styles} }}")
    assert "LP420" in found("direct", f"{TENSOR}{{ {styles.replace('down', 'up')} }}"), "weights of `down` are plain"


@pytest.mark.parametrize(
    ("kind", "path", "is_refused"),
    [
        ("direct", "blocks.*.down", True),
        ("direct", "blocks.*.{up, down}", False),
        ("none", "blocks.*.down", False),
        ("only_dtype", "blocks.*.unused", False),
        ("attending", "blocks.*.attention.out_proj", True),
        ("attending", "blocks.*.attention", False),
    ],
)
def test_modules_that_are_never_called_are_not_compiled(kind: str, path: str, is_refused: bool):
    assert ("LP651" in found(kind, f"compile {{ {path} = inductor }}")) is is_refused


def bypassed(kind: str, text: str) -> set[str]:
    return codes(f'model python("support.models.bypassing:build", kind = "{kind}")\n{text}\n') & {
        "LP335",
        "LP651",
        "LP407",
    }


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        (SHARDS + "{ blocks.* = unit }", "LP335"),
        (SHARDS + "{ blocks.* = unit(reshard = never) }", "LP335"),
        ("checkpoint { blocks.* = full }", "LP651"),
        ("checkpoint { blocks.* = selective([matmul]) }", "LP651"),
        ("compile { blocks.* = inductor }", "LP651"),
        (TENSOR + "{ blocks.* = inputs(from = replicate, to = replicate) }", "LP407"),
    ],
)
@pytest.mark.parametrize("kind", ["forward", "method", "inside"])
def test_modules_whose_call_is_bypassed_are_refused(kind: str, statement: str, code: str):
    assert bypassed(kind, statement) == {code}
    assert not bypassed("call", statement)


@pytest.mark.parametrize("kind", ["forward", "method", "inside"])
def test_units_inside_of_bypassed_modules_are_called(kind: str):
    inside = "blocks.*.0" if kind == "inside" else "blocks.*.{norm, up, down}"
    assert not bypassed(kind, f"{SHARDS}{{ {inside} = unit }}")


def test_bypassed_blocks_are_in_no_bucket_of_their_own():
    names = {}
    for kind in ("call", "method"):
        model = f'model python("support.models.bypassing:build", kind = "{kind}")'
        text = f"plan test\n{model}\ncluster cpu(devices = 2)\n{BATCH}"
        text += "mesh (dp_replicate = 2)\nreplicate on dp_replicate (bucket = 1KiB)\n"
        linted = lint(text, "test.plan", directory=Path())
        names[kind] = {path for bucket in gradient_buckets(linted.analysis) for path in bucket.paths}
    assert names["call"] - names["method"] == {"blocks.0", "blocks.1"}


def test_message_names_the_module_that_reads():
    text = f'model python("support.models.read_weights:build", kind = "direct")\n{SHARDS}{{ blocks.*.down = unit }}\n'
    [item] = [item for item in diagnostics(text) if item.code == "LP335"]
    assert item.message == (
        "`blocks.0` reads `blocks.0.down.weight` without a call of the unit `blocks.0.down`: it is sharded then"
    )


def test_buckets_of_replicas_leave_weights_that_the_model_reads():
    for kind, expected in (("tied", set()), ("none", {"embeddings"})):
        model = f'model python("support.models.read_weights:build", kind = "{kind}")'
        plan = f"plan p\n{model}\ncluster cpu(devices = 2)\nmesh (dp_replicate = 2)\n{BATCH}"
        found = lint(f"{plan}replicate on dp_replicate (bucket = 1KB)\n", "p.plan", directory=Path())
        assert found.analysis is not None
        buckets = {path for bucket in gradient_buckets(found.analysis) for path in bucket.paths}
        assert buckets & {"embeddings"} == expected
        assert "blocks.0" in buckets
