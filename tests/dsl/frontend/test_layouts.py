"""Standard layouts expand to rules that fit the model, and rules of a block override single ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legoai.dsl.formatting.expand import expand
from legoai.dsl.frontend.resolve import Resolution, resolve
from legoai.dsl.lint import lint

HEAD = """plan a
model {model}
cluster cpu(devices = 2)
batch (global = 4, micro = 1{length})
"""
TP = "mesh (tp = 2)\n"


def head(model: str = 'llama3("tiny")', length: str = ", seq_len = 64") -> str:
    return HEAD.format(model=model, length=length)


def resolution(text: str, directory: Path = Path(), variant: str | None = None) -> Resolution:
    return resolve(text, "a.plan", directory=directory, variant=variant)


def rules(text: str, directory: Path = Path(), variant: str | None = None) -> dict[str, str]:
    found = resolution(text, directory, variant)
    assert found.diagnostics == []
    assert found.plan is not None
    [statement] = [*found.plan.shard, *([found.plan.fsdp] if found.plan.fsdp else [])]
    return {rule.path: rule.treatment.name for rule in statement.rules}


def codes(text: str, directory: Path = Path()) -> list[str]:
    return [item.code for item in resolution(text, directory).diagnostics]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *[(f'llama3("{size}")', options) for size in ("tiny", "8b") for options in
          ("", "(sequence)", "(loss_parallel)", "(sequence, loss_parallel)", "(sequence = true)")],
        ('llama3("1b")', ""),
        ('mixtral("tiny")', ""), ('mixtral("tiny")', "(sequence, loss_parallel)"),
        ('gpt3("125m", vocab_size = 50304, tie_embeddings = false)', "(loss_parallel)"),
        ('gpt3("125m", vocab_size = 50304)', ""),
        ('gpt2("small", vocab_size = 50304)', "(sequence)"),
        ('gpt3("125m", vocab_size = 50304, tie_embeddings = false)', "(sequence, loss_parallel)"),
        ('vit("tiny")', ""), ('vit("b16", patch_size = 32)', "(sequence)"),
        ('llama3("tiny", qk_norm = true)', ""), ('llama3("tiny", qk_norm = true)', "(sequence, loss_parallel)"),
        ('mixtral("tiny", qk_norm = true)', "(sequence)"),
    ],
)  # fmt: skip
def test_the_layout_on_tp_fits_every_family(model: str, options: str):
    text = head(model, "" if model.startswith("vit") else ", seq_len = 64") + f"{TP}shard standard on tp {options}\n"
    found = lint(text, "a.plan", directory=Path())
    assert [item.message for item in found.diagnostics if item.severity == "error"] == []
    assert found.analysis is not None
    assert found.analysis.assigned(found.analysis.plan.shard[0]).unmatched == []


def test_head_norms_have_a_rule_if_the_model_has_them():
    body = f"{TP}shard standard on tp (sequence)\n"
    assert rules(head('llama3("tiny", qk_norm = true)') + body)["layers.*.attention.{q_norm, k_norm}"] == "heads"
    assert "heads" not in rules(head() + body).values()


@pytest.mark.parametrize(("image_size", "fits"), [(24, True), (32, False)])
def test_image_tokens_are_sharded_if_tp_divides_them(image_size: int, fits: bool):
    model = f'vit("tiny", image_size = {image_size})'  # patches of 8, and the class token
    found = lint(head(model, "") + f"{TP}shard standard on tp (sequence)\n", "a.plan", directory=Path())
    assert [item.code for item in found.diagnostics if item.severity == "error"] == ([] if fits else ["LP404"])


@pytest.mark.parametrize(
    "body",
    [
        f"{TP}shard standard on tp (sequence, loss_parallel)\n",
        f"{TP}shard standard on tp (sequence) {{ layers.*.ffn_norm = unset, output = colwise(input = shard(1)) }}\n",
        "mesh (dp_shard = 2)\nfsdp blocks on dp_shard (backend = eager) {\n  layers.0 = none  # gathered late\n}\n",
        "mesh (dp_shard = 2)\nfsdp blocks on dp_shard\nvariant v { fsdp on dp_shard { root = unset } }\n",
    ],
)
def test_expansion_writes_every_rule_and_preserves_meaning(body: str):
    found = resolution(head() + body)
    text = expand(found).text
    again = resolution(text)
    assert found.plan is not None
    assert again.plan is not None
    assert (found.diagnostics, again.diagnostics) == ([], [])
    assert again.plan.digest == found.plan.digest
    assert " standard " not in text
    assert " blocks " not in text
    assert ("# gathered" in body) == ("# gathered" in text)


def test_explicit_rules_replace_single_rules_of_the_layout():
    body = f"{TP}shard standard on tp {{ layers.*.attention.wq = rowwise, output = unset }}\n"
    found = rules(head() + body)
    assert found["layers.*.attention.wq"] == "rowwise"
    assert (found["layers.*.attention.wk"], found["layers.*.attention.wv"]) == ("colwise", "colwise")
    assert "output" not in found
    assert "layers.*.attention.{wq, wk, wv}" not in found


def test_variant_changes_rules_and_options_of_the_layout():
    text = head() + f"{TP}shard standard on tp\nvariant v {{ shard on tp (sequence) {{ output = unset }} }}\n"
    assert "norm" not in rules(text)
    changed = rules(text, variant="v")
    assert changed["norm"] == "sequence"
    assert "output" not in changed


def test_position_of_the_model_statement_is_irrelevant():
    text = head().replace('model llama3("tiny")\n', "") + 'fsdp blocks on dp_shard\nmodel llama3("tiny")\n'
    assert rules(text) == {"layers.*": "unit", "root": "unit"}


def test_layout_rules_record_the_layout_as_their_origin():
    plan = resolution(head() + f"{TP}shard standard on tp {{ output = colwise }}\n").plan
    assert plan is not None
    assert {rule.origin.decider for rule in plan.shard[0].rules if rule.path != "output"} == {"standard layout"}
    assert {rule.origin.span.line for rule in plan.shard[0].rules if rule.origin.span} == {6}
    [own] = [rule for rule in plan.shard[0].rules if rule.path == "output"]
    assert own.origin.decider == "human"


@pytest.mark.parametrize(
    ("model", "body", "code"),
    [
        ('llama3("tiny")', "shard standard on ep", "LP227"),
        ('huggingface("config.json", model_type = "gpt2")', "shard standard on tp", "LP227"),
        ('huggingface("config.json", model_type = "gemma2")', "shard standard on tp (sequence)", "LP227"),
        ('huggingface("config.json", model_type = "granite")', "shard standard on tp (loss_parallel)", "LP227"),
        ('vit("tiny")', "shard standard on tp (loss_parallel)", "LP227"),
        ('python("support.models.factories:build")', "fsdp blocks on dp_shard", "LP227"),
        ('huggingface("config.json", model_type = "unheard_of")', "fsdp blocks on dp_shard", "LP227"),
        ('huggingface("missing.json")', "fsdp blocks on dp_shard", "LP213"),
        ('mixtral("tiny")', "shard standard on ep (sequence)", "LP227"),
        ('llama3("tiny")', "shard standard on tp (loss_paralel = true)", "LP204"),
        ('llama3("tiny")', "shard standard on tp (sequence = 2)", "LP207"),
        ('llama3("tiny")', "shard standard on tp { layers.9.x = unset }", "LP223"),
        ('llama3("tiny")', "shard standard", "LP218"),
        ('llama3("tiny")', "shard usual on tp", "LP218"),
    ],
)
def test_undeclared_layout_is_an_error(model: str, body: str, code: str):
    assert codes(head(model) + body + "\n") == [code]


@pytest.mark.parametrize("body", ["fsdp blocks on dp_shard", "fsdp on dp_shard { root = unit }"])
@pytest.mark.parametrize(
    ("config", "words"),
    [(None, "cannot read c.json"), ("{bad", "is not JSON: Expecting property name"), ('{"a": 1}', "has no model_type")],
)
def test_config_that_is_none_is_one_error_with_a_cure(config: str | None, words: str, body: str, tmp_path: Path):
    if config is not None:
        (tmp_path / "c.json").write_text(config, encoding="utf-8")
    text = head('huggingface("c.json")') + "mesh (dp_shard = 2)\n" + body
    [found] = lint(f"{text}\n", "t.plan", directory=tmp_path).diagnostics
    assert found.code == "LP213" and words in found.message
    assert "`config.json`" in found.help[0]
    assert config is None or "line 1 column 2" in found.message or "model_type" in found.message


@pytest.mark.parametrize("body", ["mesh (dp_shard = 2)\nfsdp blocks on dp_shard", f"{TP}shard standard on tp"])
@pytest.mark.parametrize(
    ("preset", "expected"),
    [("8b", ["LP105"]), ("8", ["LP207"]), ("size", ["LP207"]), ("[1]", ["LP207"]), ("auto", [])],
)
def test_a_preset_that_is_no_string_is_reported_once(preset: str, expected: list[str], body: str):
    assert codes(head(f"llama3({preset})") + f"let size = 8\n{body}\n") == expected


@pytest.mark.parametrize(
    ("model_type", "blocks"),
    [("llama", "model.layers.*"), ("gpt2", "transformer.h.*"), ("t5", "{encoder, decoder}.block.*")],
)
def test_hugging_face_models_declare_theirs_by_type(model_type: str, blocks: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    found = rules(head('huggingface("config.json")') + "fsdp blocks on dp_shard\n", tmp_path)
    assert found == {blocks: "unit", "root": "unit"}
