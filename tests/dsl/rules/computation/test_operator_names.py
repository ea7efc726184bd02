"""The linter knows the operators that a policy can keep, as torch has them."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import pytest
import torch

from legoai.runtime.errors import RunError
from legoai.runtime.recomputation.policies import operators
from legoai.specs.operators import COMPOSED, FILE, keepable_operators
from support.texts.rule_plans import diagnostics


def of_torch() -> dict[str, frozenset[str]]:
    """Overloads of each operator of `aten` that the runtime takes."""
    found = {}
    schemas = torch._C._jit_get_all_schemas()
    for name in sorted({schema.name.removeprefix("aten::") for schema in schemas if schema.name.startswith("aten::")}):
        try:
            found[name] = frozenset(item._overloadname for item in operators(f"aten.{name}"))
        except RunError:
            continue
    return found


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the list is of torch 2.13")
def test_operators_are_those_of_torch(golden):
    known = of_torch()
    lines = [" ".join([name, *sorted(overloads)]) for name, overloads in known.items()]
    with importlib.resources.as_file(importlib.resources.files("legoai.specs.catalogue").joinpath(FILE)) as path:
        golden(Path(path), "\n".join(lines) + "\n")
    assert keepable_operators() == known


def test_composed_operators_are_not_among_those_that_are_kept():
    assert not COMPOSED.keys() & keepable_operators().keys()
    named = {word.strip('"') for word in COMPOSED.values() if "." in word}
    assert named and all(keepable_operators()[name.removeprefix("aten.")] for name in named)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("aten.linear", "`matmul`"),
        ("aten.softmax", '`"aten._softmax"`'),
        ("aten.scaled_dot_product_attention", "`attention`"),
    ],
)
def test_names_of_composed_operators_are_refused_with_what_computes_them(name, instead):
    found = diagnostics(f'checkpoint {{ layers.* = selective(["{name}"]) }}')
    [item] = [item for item in found if item.code == "LP653"]
    assert list(item.help) == [f"torch computes it by other operators: write {instead}"]
