"""Rules about models."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.lint import lint
from support.texts.rule_plans import codes

GPU = "cluster h100_sxm\nmesh (dp_shard = 8)\nbatch (global = 8, micro = 1, seq_len = 1024)\n"
SPLIT = GPU.replace("dp_shard = 8", "dp_shard = 4, tp = 2") + "shard on tp { output = colwise(output = replicate) }\n"


@pytest.mark.parametrize(
    ("plan", "wrong"),
    [
        (f'model llama3("tiny", vocab_size = 50257)\n{GPU}', True),
        (f'model llama3("tiny", vocab_size = 50264)\n{GPU}', False),
        (f'model llama3("tiny", vocab_size = 50264)\n{SPLIT}', True),
        (f'model llama3("tiny", vocab_size = 50272)\n{SPLIT}', False),
        (f'model llama3("tiny", vocab_size = 50264)\n{SPLIT.replace("output =", "layers.*.attention.wq =", 1)}', False),
        (f'model llama3("tiny", vocab_size = 50257)\n{SPLIT}', False),  # `uneven-shards` says it
        (f'model llama3("tiny", vocab_size = 50257)\n{GPU}precision (param = fp32)\n', False),
        (f'model llama3("tiny", vocab_size = 50257)\n{GPU.replace("h100_sxm", "cpu(devices = 8)")}', False),
        (f'model vit("b16")\n{GPU.replace(", seq_len = 1024", "")}', False),
    ],
)
def test_vocabularies_in_half_precision_are_multiples_of_eight(plan: str, wrong: bool):
    assert ("LP836" in codes(plan)) == wrong


@pytest.mark.parametrize(
    ("kind", "cure"), [("compiled", "compile { "), ("checkpointed", "checkpoint { "), ("compiled_in_place", None)]
)
def test_modules_that_the_model_wraps_itself_are_refused(kind: str, cure: str | None):
    plan = f'plan test\nmodel python("support.models.other_authors:build", kind = "{kind}")\ncluster cpu\n'
    plan += "batch (global = 8, micro = 8, seq_len = 8)\noptimizer adamw(lr = 1e-3)\n"
    found = [item for item in lint(plan, "test.plan", directory=Path()).diagnostics if item.code == "LP233"]
    assert [item.label.span.line for item in found] == ([2] if cure else [])
    assert all(f"{cure}blocks.*.layer = " in item.help[0] for item in found)


def of_factory(kind: str) -> list[Diagnostic]:
    plan = f'plan test\nmodel python("support.models.left_on_meta:build", kind = "{kind}")\ncluster cpu\n'
    plan += "batch (global = 8, micro = 8, seq_len = 8)\noptimizer adamw(lr = 1e-3)\n"
    found = lint(plan, "test.plan", directory=Path()).diagnostics
    return [item for item in found if item.code.startswith("LP2")]


@pytest.mark.parametrize(("kind", "refused"), [("hook", True), ("accumulated", True), ("module_hook", False)])
def test_hooks_of_parameters_are_refused(kind: str, refused: bool):
    found = of_factory(kind)
    assert [item.code for item in found] == (["LP234"] if refused else [])
    assert all("`head.weight`" in item.message for item in found)


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [
        ("plain", "table"),
        ("list", "tables"),
        ("dictionary", "tables"),
        ("parameter", "tables"),
        ("moved", "table"),
        ("object", "holder"),
        ("slots", "holder"),
        ("function", "look_up"),
        ("class", "table"),
        ("registered", None),
        ("buffer", None),
        ("alias", None),
        ("host", None),
        ("computed_again", None),
        ("shape", None),
        ("unread", None),
    ],
)
def test_tensors_that_stay_on_the_meta_device_are_refused(kind: str, attribute: str | None):
    found = of_factory(kind)
    assert [item.code for item in found] == ([] if attribute is None else ["LP235"])
    assert all(f"`{attribute}` of `Holding`" in item.message for item in found)
    assert all(f'self.register_buffer("{attribute}"' in item.help[0] for item in found)


def test_modules_that_are_not_registered_are_refused():
    [found] = of_factory("modules")
    assert found.code == "LP235"
    assert "`layers` of `Holding` (and " not in found.message
    assert "`layers` of `Holding` has a `Linear` that is not registered" in found.message
    assert "`nn.ModuleList`" in found.help[0]
