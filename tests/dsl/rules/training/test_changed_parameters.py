"""Parameters that forward changes are reported where units compute with copies, and where they would change twice."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import codes, diagnostics

SHARDS = "mesh (dp_shard = 8)\nfsdp on dp_shard { blocks.* = unit }\n"
REPLICAS = "mesh (dp_replicate = 8)\nreplicate on dp_replicate\n"
ONE_RANK = "cluster cpu(devices = 1)\n"
FULL = "checkpoint { blocks.* = full }\n"


def model(kind: str, options: str = "") -> str:
    return f'model python("support.models.read_weights:build", kind = "{kind}"{options})\n'


def messages(text: str) -> list[str]:
    return [item.message for item in diagnostics(text) if item.code == "LP643"]


@pytest.mark.parametrize("kind", ["in_place", "data"])
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (SHARDS, "and 1 more, of which units compute with a copy: the change is lost"),
        (f"{ONE_RANK}fsdp on dp_shard {{ blocks.* = unit }}\n", "and 1 more, of which units compute with a copy"),
        (REPLICAS, "and 1 more, of which units compute with a copy"),
        (f"{ONE_RANK}{FULL}", "once more when it is recomputed"),
    ],
)
def test_changed_parameters_are_reported(kind: str, plan: str, message: str):
    [found] = messages(model(kind) + plan)
    assert found.startswith("forward changes `blocks.0.slow.weight`")
    assert message in found


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("in_place", ONE_RANK),
        ("in_place", f"{ONE_RANK}checkpoint {{ blocks.*.slow = full }}\n"),
        ("in_place", "cluster cpu(devices = 2)\nmesh (tp = 2)\nshard on tp { blocks.*.slow = colwise }\n"),
        ("same", SHARDS),
        ("same", REPLICAS),
        ("none", f"{SHARDS}{FULL}"),
    ],
)
def test_parameters_that_are_right_are_not_reported(kind: str, plan: str):
    assert not messages(model(kind) + plan)


def test_rescaled_rows_of_embeddings_are_reported():
    scaled = model("none", ", max_norm = 0.3")
    ranks = "cluster cpu(devices = 2)\nmesh (tp = 2)\n"
    assert messages(scaled + SHARDS) and messages(scaled + REPLICAS)
    [found] = messages(f"{scaled}{ranks}shard on tp {{ embeddings = colwise(output = replicate) }}\n")
    assert "rescales rows of its weight" in found
    assert messages(f"{scaled}{ranks}shard on tp {{ embeddings.weight = shard(0) }}\n")
    assert not messages(f"{scaled}{ranks}shard on tp {{ blocks.*.up = colwise(output = replicate) }}\n")
    assert not messages(scaled + ONE_RANK)


def test_sparse_gradients_are_refused():
    with pytest.raises(AssertionError, match=r"LP232 `embeddings` has a sparse gradient"):
        codes(model("none", ", sparse = true") + ONE_RANK)


def test_frequencies_of_tokens_are_not_counted_on_pieces():
    counted = model("attending", ", scale_grad_by_freq = true")
    assert "LP320" in codes(
        f"{counted}mesh (cp = 2, dp_shard = 4)\ncontext on cp\nfsdp on dp_shard {{ root = unit }}\n"
    )
    assert "LP320" not in codes(counted + SHARDS)


@pytest.mark.parametrize(("rows", "named"), [("sparse_bag", "embedding"), ("sparse_function", "embedding.weight")])
def test_sparse_gradients_of_bags_and_functions_are_refused(rows: str, named: str):
    given = f'model python("support.models.untraced:build", rows = "{rows}")\n'
    with pytest.raises(AssertionError, match=f"LP232 `{named}` has a sparse gradient"):
        codes(given)
    assert codes(given.replace(rows, ""))
