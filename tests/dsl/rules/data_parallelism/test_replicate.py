"""Rules about replicas: buckets, and the reduction of gradients."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import codes


@pytest.mark.parametrize(
    ("text", "reduced"),
    [
        ("mesh (cp = 8)\ncontext on cp", False),
        ("mesh (cp = 8)\ncontext on cp\nfsdp on cp { layers.* = unit }", True),
        ("mesh (dp_shard = 4, cp = 2)\ncontext on cp\nfsdp on dp_shard { layers.* = unit }", True),
        ("mesh (dp_replicate = 4, cp = 2)\ncontext on cp\nreplicate on dp_replicate", True),
    ],
)
def test_cp_gradients_require_a_reduction(text: str, reduced: bool) -> None:
    assert ("LP332" not in codes(text)) == reduced


@pytest.mark.parametrize(("bucket", "one"), [("25MB", False), ("1MiB", False), ("8GiB", True)])
def test_bucket_larger_than_all_gradients_is_reported(bucket: str, one: bool) -> None:
    text = f'model llama3("1b")\nmesh (dp_replicate = 8)\nreplicate on dp_replicate (bucket = {bucket})'
    assert ("LP805" in codes(text)) == one


def test_bucket_under_a_pipeline_has_no_effect_whatever_its_size() -> None:
    text = 'model llama3("1b")\nmesh (pp = 2, dp_replicate = 4)\npipeline on pp\n'
    found = codes(f"{text}replicate on dp_replicate (bucket = 8GiB)")
    assert "LP333" in found
    assert "LP805" not in found


def test_default_bucket_of_a_small_model_is_clean() -> None:
    assert "LP805" not in codes('model llama3("tiny")\nmesh (dp_replicate = 8)\nreplicate on dp_replicate')


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [("sgd(lr = 0.1)", True), ("sgd(lr = 0.1, momentum = 0.9)", False), ("adamw(lr = 1e-3)", False)],
)
def test_sharding_an_optimizer_without_state_is_reported(optimizer: str, found: bool) -> None:
    text = f"mesh (dp_replicate = 8)\nreplicate on dp_replicate (optimizer = sharded)\noptimizer {optimizer}"
    assert ("LP334" in codes(text)) is found
    assert "LP334" not in codes(text.replace("sharded", "replicated"))
