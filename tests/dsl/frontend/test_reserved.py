"""Names that a `let` must not define, because they are values of the language."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from legoai.dsl.frontend.resolve import resolve
from legoai.dsl.frontend.values.reserved import reserved_names
from legoai.specs.directives import kinds
from legoai.specs.directives.base import Declared
from support.texts.plans import HEAD

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


def declarations(base: type[Declared] = Declared) -> Iterator[type[Declared]]:
    for item in base.__subclasses__():
        yield item
        yield from declarations(item)


def test_every_option_of_truth_is_reserved_as_its_bare_name_sets_it():
    flags = {
        item.name for declared in declarations() for item in declared.options if isinstance(item.kind, kinds.Boolean)
    }
    assert {"loss_parallel", "asynchronous", "nesterov", "overlap"} <= flags
    assert flags <= reserved_names().keys()


def test_let_named_like_a_flag_is_reported_and_leaves_the_flag_alone():
    text = "let {0} = false\nlet {1} = 1\nsave (every = 10, {0})\noptimizer sgd(momentum = 0.9, {1})\n"
    found = resolve(HEAD + BATCH + text.format("asynchronous", "nesterov"), "tiny.plan", directory=Path())
    assert [item.code for item in found.diagnostics] == ["LP228", "LP228"]
    assert "`save`" in found.diagnostics[0].message
    assert codes("save (every = 10, asynchronous)\noptimizer sgd(momentum = 0.9, nesterov)\n") == []


def test_every_choice_of_every_statement_is_known():
    assert {"shard": "colwise", "attention": "flash", "cluster": "cpu"}.items() <= {
        keyword: name for name, keyword in reserved_names().items() if name in ("colwise", "flash", "cpu")
    }.items()
