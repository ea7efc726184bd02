"""Tensors that a model changes in place are reported where recomputation or parallelism need them as they were."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import codes, diagnostics

CODES = {"LP442", "LP522", "LP642"}
FSDP = "mesh (dp_shard = 8)\nfsdp on dp_shard { blocks.* = unit }\n"
PIPELINE = "mesh (pp = 2, dp_replicate = 4)\nreplicate on dp_replicate\npipeline on pp (schedule = 1F1B)\n"
MESH = "mesh (tp = 2, dp_replicate = 4)\nreplicate on dp_replicate\n"


def found(kind: str, text: str) -> set[str]:
    return codes(f'model python("support.models.in_place_factories:build", kind = "{kind}")\n{text}') & CODES


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (FSDP, "LP642"),
        ("mesh (dp_shard = 8)\nfsdp on dp_shard { blocks.*.up = unit }\n", None),
        ("mesh (dp_replicate = 8)\nreplicate on dp_replicate\n", None),
        ("checkpoint { blocks.* = full }\n", "LP642"),
        ("checkpoint { blocks.* = selective([matmul]) }\n", "LP642"),
        ("checkpoint { blocks.* = budget(50%) }\n", "LP642"),
        ("checkpoint { blocks.* = budget(50%) }\ncompile { blocks.* = inductor }\n", None),
        ("checkpoint { blocks.*.norm = full }\n", None),
        (PIPELINE, "LP522"),
    ],
)
def test_modules_that_change_their_input_are_reported(text: str, code: str | None):
    assert found("inputs", text) == ({code} if code else set())
    assert not found("none", text)


@pytest.mark.parametrize(
    ("kind", "text", "code"),
    [
        ("constant", FSDP, None),
        ("constant", PIPELINE, None),
        ("constant", "checkpoint { blocks.* = full }\n", "LP642"),
        ("sums", FSDP, "LP642"),
        ("sums", PIPELINE, None),
        ("results", "mesh (dp_shard = 8)\nfsdp on dp_shard { blocks.*.act = unit }\n", None),
        (
            "inputs",
            "mesh (dp_shard = 8)\nfsdp on dp_shard { blocks.* = unit, blocks.*.{norm, up, down} = unit }\n",
            None,
        ),
    ],
)
def test_changes_that_work_are_not_reported(kind: str, text: str, code: str | None):
    assert found(kind, text) == ({code} if code else set())


@pytest.mark.parametrize(
    ("kind", "units", "is_refused"),
    [
        ("views", "blocks.*.up = unit", True),
        ("views", "blocks.*.{up, down} = unit(reshard = 2)", True),
        ("views", "blocks.*.up = unit(reshard = after_backward)", False),
        ("views", "blocks.*.act = unit", False),
        ("views", "blocks.* = unit", False),
        ("results", "blocks.*.up = unit", False),
        ("between", "blocks.* = unit", False),
    ],
)
def test_views_that_units_return_may_not_be_changed(kind: str, units: str, is_refused: bool):
    assert ("LP642" in found(kind, f"mesh (dp_shard = 8)\nfsdp on dp_shard {{ {units} }}\n")) is is_refused


@pytest.mark.parametrize(
    ("kind", "text", "code"),
    [("cast", FSDP, "LP642"), ("cast", PIPELINE, "LP522"), ("cast_between", PIPELINE, "LP522")],
)
def test_cast_is_a_copy_only_in_other_dtypes(kind: str, text: str, code: str):
    assert found(kind, f"{text}precision (param = fp32)\n") == {code}
    assert not found(kind, f"{text}precision (param = bf16)\n")


@pytest.mark.parametrize("param", ["fp32", "bf16"])
@pytest.mark.parametrize(("text", "code"), [(FSDP, "LP642"), (PIPELINE, "LP522"),
                                            ("checkpoint { blocks.* = full }\n", "LP642")])  # fmt: skip
def test_cast_to_the_dtype_of_parameters_is_no_copy(param: str, text: str, code: str):
    assert found("cast_as_weight", f"{text}precision (param = {param})\n") == {code}


@pytest.mark.parametrize(("param", "is_refused"), [("fp32", True), ("bf16", False)])
def test_plain_tensors_of_styles_may_be_cast_and_changed(param: str, is_refused: bool):
    text = f"{MESH}precision (param = {param})\nshard on tp {{ head = colwise(output = replicate) }}"
    assert ("LP442" in found("cast_between", text)) is is_refused


def test_autocast_passes_fp32_between_stages():
    text = "cluster h100_sxm(devices = 2)\nmesh (pp = 2)\npipeline on pp (schedule = 1F1B)\nprecision (param = bf16)\n"
    assert found("cast_between", text) == {"LP522"}


@pytest.mark.parametrize(
    ("kind", "treatment", "is_refused"),
    [
        ("used", "selective([matmul])", True),
        ("used", 'selective(["aten.mm.default"])', True),
        ("used", 'selective(["aten.mm"])', True),
        ("used", "budget(50%)", True),
        ("used", 'selective(["aten.sigmoid"])', False),
        ("used", "full", False),
        ("unused", "selective([matmul])", False),
    ],
)
def test_kept_outputs_may_not_be_changed(kind: str, treatment: str, is_refused: bool):
    assert ("LP642" in found(kind, f"checkpoint {{ blocks.*.router = {treatment} }}\n")) is is_refused
    assert not found(kind, f"checkpoint {{ blocks.* = {treatment} }}\n"), "the change is within what is recomputed"


def test_model_may_not_change_what_passes_between_stages():
    assert found("between", PIPELINE) == {"LP522"}
    assert not found("between", FSDP)
    assert not found("results", PIPELINE), "each change is within a stage"


@pytest.mark.parametrize(
    ("kind", "rules", "is_refused"),
    [
        ("results", "blocks.*.up = colwise, blocks.*.down = rowwise", True),
        ("none", "blocks.*.up = colwise, blocks.*.down = rowwise", False),
        ("results", "blocks.*.norm = sequence", False),
        ("results", "blocks.*.up = colwise(output = replicate)", True),
        ("between", "blocks.* = outputs(from = replicate, to = replicate)", True),
        ("inputs", "blocks.* = inputs(from = replicate, to = replicate, local = true)", True),
        ("none", "blocks.* = inputs(from = replicate, to = replicate, local = true)", False),
    ],
)
def test_plain_tensors_of_styles_may_not_be_changed(kind: str, rules: str, is_refused: bool):
    assert ("LP442" in found(kind, f"{MESH}shard on tp {{ {rules} }}")) is is_refused


def test_one_rank_of_tp_computes_on_plain_tensors():
    assert not found("results", "mesh (dp_replicate = 8)\nshard on tp { blocks.*.up = colwise }\n")


def test_message_names_the_modules_once():
    model = 'model python("support.models.in_place_factories:build", kind = "results")\n'
    text = f"{model}{MESH}shard on tp {{ blocks.*.{{up, down}} = colwise(output = replicate) }}"
    [message] = [item.message for item in diagnostics(text) if item.code == "LP442"]
    assert message.startswith("the result of `blocks.*.up` (and 1 more) is changed in place")
