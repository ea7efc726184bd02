"""Names that a `let` must not define, because they are values of the language."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.frontend.reserved import reserved_names
from legoai.dsl.frontend.resolve import resolve
from support.plans import HEAD

BATCH = "batch (global = 16, micro = 4, seq_len = 256)\n"


def codes(text: str) -> list[str]:
    return [item.code for item in resolve(HEAD + BATCH + text, "tiny.plan", directory=Path()).diagnostics]


@pytest.mark.parametrize(
    "name",
    ["flash", "full", "none", "default", "bf16", "adamw", "sgd", "unit", "colwise", "replicate", "even", "GPipe",
     "inductor", "h100_sxm", "infiniband_ndr", "llama3", "after_forward", "all", "min", "floor", "root", "cosine"],
)  # fmt: skip
def test_language_names_are_reserved(name: str):
    assert codes(f"let {name} = 2\n") == ["LP228"]


@pytest.mark.parametrize("name", ["hosts", "batch", "seq_len", "tp", "steps", "warmup", "kernel", "our_flash", "mesh"])
def test_names_of_options_and_statements_are_free(name: str):
    assert codes(f"let {name} = 2\n") == []


def test_every_choice_of_every_statement_is_known():
    assert {"shard": "colwise", "attention": "flash", "cluster": "cpu"}.items() <= {
        keyword: name for name, keyword in reserved_names().items() if name in ("colwise", "flash", "cpu")
    }.items()
