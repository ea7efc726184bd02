"""Rules about batches report configurations for which the runtime or the models would raise."""

from __future__ import annotations

import pytest
import torch

from support.texts.rule_plans import codes, diagnostics, message


@pytest.mark.parametrize(
    ("global_batch", "micro", "legal"), [(64, 2, True), (48, 3, True), (60, 2, False), (4, 1, False)]
)
def test_global_batch_must_be_a_multiple_of_micro_batch_and_ranks(global_batch: int, micro: int, legal: bool) -> None:
    plan = f"batch (global = {global_batch}, micro = {micro}, seq_len = 256)\nmesh (dp_replicate = 2, dp_shard = 4)"
    assert (global_batch % (micro * 8) == 0) is legal
    assert ("LP601" not in codes(plan)) is legal


def test_legal_batches_nearby_are_named() -> None:
    found = diagnostics("batch (global = 60, micro = 2, seq_len = 256)\nmesh (dp_shard = 4)")
    [diagnostic] = [item for item in found if item.code == "LP601"]
    assert "60 sequences" in diagnostic.message
    assert "legal global batches are 56 and 64" in diagnostic.help[0]
    assert "legal micro batches are 1, 3, 5, 15" in diagnostic.help[1]
    assert [diagnostic.label.span.line, diagnostic.others[1].span.line] == [3, 4]
    first = diagnostics("batch (global = 2, micro = 1, seq_len = 256)\nmesh (dp_shard = 4)")
    assert any("smallest legal global batch is 4" in help for item in first for help in item.help)


def test_sequence_length_is_limited_by_positions() -> None:
    batch = "batch (global = 64, micro = 1, seq_len = {})"
    assert "1024" in message('model gpt2("small")\n' + batch.format(1025), "LP602")
    assert "LP602" not in codes('model gpt2("small")\n' + batch.format(1024))
    positions = torch.nn.Embedding(1024, 4)
    with pytest.raises(IndexError):
        positions(torch.arange(1025))


def test_image_model_refuses_seq_len() -> None:
    batch = 'model vit("b16")\nbatch (global = 64, micro = 1{})'
    assert "images of 224 by 224" in message(batch.format(", seq_len = 197"), "LP603")
    assert not {"LP603", "LP604"} & codes(batch.format(""))


def test_text_model_requires_seq_len() -> None:
    batch = 'model gpt2("small")\nbatch (global = 64, micro = 1{})'
    assert "does not say how long" in message(batch.format(""), "LP604")
    assert "LP604" not in codes(batch.format(", seq_len = 512"))


def test_missing_seq_len_is_the_only_length_diagnostic() -> None:
    sharded = "mesh (cp = 2, tp = 2)\nshard on tp { tok_embeddings = rowwise(input = replicate, output = shard(1)) }"
    found = codes(f"{sharded}\ncontext on cp\nloss chunked(4)\nbatch (global = 64, micro = 1)")
    assert "LP604" in found
    assert not {"LP404", "LP405", "LP602", "LP641"} & found


def ramped(stages: str, rest: str = "") -> set[str]:
    batch = f"batch (global = 64, micro = 2, seq_len = 256, ramp = stages({stages}))"
    mesh = "cluster h100_sxm(devices = 4)\nmesh (dp_shard = 4)\nfsdp on dp_shard { layers.* = unit }"
    return {"LP010", "LP605", "LP606", "LP607"} & codes(f"{batch}\n{mesh}\n{rest}")


def test_every_batch_of_a_ramp_must_divide() -> None:
    assert not ramped("global = [8, 16], until = [10, 20]")
    assert ramped("global = [8, 12], until = [10, 20]") == {"LP605"}
    assert ramped("global = [4], until = [10]") == {"LP605"}


@pytest.mark.parametrize(
    "stages",
    [
        "global = [16, 8], until = [10, 20]",
        "global = [8, 8], until = [10, 20]",
        "global = [8, 64], until = [10, 20]",
        "global = [8, 16], until = [20, 10]",
        "global = [8, 16], until = [10, 10]",
        "global = [8, 16], until = [10]",
        "global = [8], until = [10, 20]",
    ],
)
def test_ramp_batches_and_steps_must_increase(stages: str) -> None:
    assert ramped(stages) == {"LP606"}


def test_ramp_must_end_before_the_last_step() -> None:
    stages = "global = [8], until = [100]"
    assert ramped(stages, "steps 100") == {"LP607"}
    assert not ramped(stages, "steps 101")
    assert ramped(stages, "schedule cosine(steps = 100, warmup = 10)") == {"LP607"}
    assert not ramped(stages, "schedule cosine(steps = 100, warmup = 10)\nsteps 200")


def test_a_ramp_under_a_pipeline_is_refused() -> None:
    batch = "batch (global = 64, micro = 2, seq_len = 256, ramp = stages(global = [32], until = [10]))"
    mesh = "cluster h100_sxm(devices = 2)\nmesh (pp = 2)\npipeline on pp"
    assert "LP010" in codes(f"{batch}\n{mesh}")
