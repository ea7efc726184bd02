"""Place of the cursor and completion, in whole and in broken text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from legoai.dsl.lint import lint
from legoai.dsl.server.cursor import place_at, word_at
from legoai.dsl.server.documents import Checked, Checking, Document, check, uri_of
from legoai.dsl.server.requests.completion import completion
from legoai.dsl.server.requests.highlighting import LEGEND, semantic_tokens
from legoai.specs.directives import FAMILIES, family
from support import ROOT, TESTS, VALID_PLANS, WORKED_PLANS
from support.commands.command_line import GOOD

NOTHING = Checking({}, frozenset(), lambda message: None)


def document(text: str, name: str = "untitled:a") -> Document:
    return Document(name, 1, text, "utf-16", Path())


@pytest.fixture(scope="module")
def known() -> Checked:
    return check(document(GOOD), NOTHING)


def labels(marked: str, known: Checked | None = None) -> list[str]:
    text, _, rest = marked.partition("|")
    return [item.label for item in completion(document(text + rest), len(text), known).items]


@pytest.mark.parametrize(
    ("marked", "part", "written"),
    [
        ("|", "statement", ""),
        ("fs|", "statement", "fs"),
        ("fsdp on |", "axis", ""),
        ("fsdp on dp_shard (back|end", "argument", "back"),
        ("fsdp on dp_shard (backend = gr|", "value", "gr"),
        ("fsdp on dp_shard {\n  layers.{attention, ff|\n", "path", "layers.{attention, ff"),
        ("checkpoint { lay| }", "path", "lay"),
        ("checkpoint { layers.* = full, |", "path", ""),
        ("checkpoint { layers.* = selective([att|", "value", "att"),
        ("fsdp on dp_shard {\n  layers.* = unit\n}\n|", "statement", ""),
        ("variant v {\n  ba|", "statement", "ba"),
        ("variant v {\n  batch (global = 4)\n  fsdp on d|", "axis", "d"),
        ("require peak_memory <= 4|", "value", "4"),
        ('model llama3("8|b")', "text", "8"),
        ("batch (micro = 4)  # a wo|rd", "comment", "# a wo"),
        ("fsdp on dp_shard {\n  layers.* = unit(\nbatch (|global", "argument", ""),
    ],
)
def test_part_at_the_cursor_is_found(marked: str, part: str, written: str):
    text, _, rest = marked.partition("|")
    found = place_at(text + rest, len(text))
    assert (found.part, text[found.start :]) == (part, written)


def test_every_cursor_position_of_whole_and_cut_plans_works():
    for path in [*VALID_PLANS, *WORKED_PLANS, *sorted(TESTS.glob("dsl/invalid/LP1*/*.plan"))]:
        text = path.read_text(encoding="utf-8")[:4000]
        for offset in range(0, len(text), 7):
            place, end = word_at(text, offset)
            assert place.start <= offset <= end
            cut = place_at(text[:offset], offset)
            # Where brackets are open, the text in column 1 below shows where a statement ends.
            assert cut == place or "invalid" in path.parts


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("model |", ["llama3", "gpt2"]),
        ('model llama3("|', ["tiny", "8b"]),
        ('model llama3("tiny", n_l|', ["n_layers"]),
        ("cluster h100|", ["h100_sxm"]),
        ("cluster h100_sxm(hosts = 2, fabric = |", ["infiniband_ndr"]),
        ("mesh (|", ["pp", "dp_shard", "tp"]),
        ("fsdp |", ["blocks", "on"]),
        ("fsdp on |", ["dp_shard"]),
        ("fsdp on dp_shard (backend = |", ["eager", "graph", "auto"]),
        ("fsdp on dp_shard { layers.* = |", ["unit", "none", "auto"]),
        ("fsdp on dp_shard { layers.* = unit(reshard = |", ["after_backward", "never"]),
        ("pipeline on pp (schedule = |", ["1F1B", "GPipe", "csv(…)"]),
        ("allocator (expandable_segments = |", ["true", "false"]),
        ("require |", ["peak_memory", "step_time"]),
        ("minimize |", ["step_time"]),
        ("unset |", ["fsdp", "let", "variant"]),
        ("checkpoint {\n  |", ["layers", "norm", "root"]),
        ("checkpoint {\n  layers.|", ["*", "{0..3}", "0", "3"]),
        ("checkpoint {\n  layers.{|", ["0..3"]),
        ("shard on tp {\n  layers.*.attention.|", ["wq", "wo"]),
        ("shard on tp {\n  layers.*.attention.wq.|", ["weight"]),
        ("pipeline on pp (split = [layers.|", ["layers.2"]),
    ],
)
def test_valid_completions_are_offered(marked: str, expected: list[str], known: Checked):
    found = labels(GOOD + marked, known)
    assert [name for name in expected if name not in found] == []


def test_given_options_are_not_offered_again(known: Checked):
    assert labels("batch (global = 4, |", known) == ["micro", "seq_len", "ramp"]
    assert "dp_shard" not in labels("fsdp on dp_shard, |", known)


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("require peak_memory |", ["<=", "<", ">=", ">", "=="]),
        ("require mfu |", [">=", ">", "<=", "<", "=="]),
        ("require peak_memory <= |", []),
        ("minimize step_time |", []),
        ("mesh (tp = auto |", ["in", "->"]),
        ("mesh (tp = auto in |", ["[…]"]),
        ("mesh (tp = auto in [|", []),
        ("mesh (tp = auto in [1, 2] |", ["->"]),
        ("mesh (tp = auto in 1..2 |", ["->"]),
        ("mesh (tp = auto -> |", []),
        ("mesh (tp = auto in [1, 2], cp = |", ["rest", "auto"]),
        ("precision (param = auto in [bf16, |", ["fp64", "fp32", "bf16", "fp16"]),
        ("precision (param = auto -> |", ["bf16", "fp64", "fp32", "fp16"]),
        ("checkpoint { layers.* = selective(auto |", ["in", "->"]),
    ],
)
def test_only_what_is_legal_there_is_offered(marked: str, expected: list[str], known: Checked):
    assert labels(marked, known) == expected


ON_TP = GOOD.replace("dp_shard = 4)", "dp_shard = 2, tp = 2)") + "shard standard on tp { layers.*.attention.wq"


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("batch (global = |", []),
        ("batch (seq_len = |", []),
        ("batch (micro = |", ["auto"]),
        ("optimizer adamw(lr = |", []),
        ("optimizer adamw(betas = [|", []),
        ("clip (norm = |", []),
        ("schedule cosine(warmup = |", []),
        ("checkpoint (preserve_rng = |", []),
        ("checkpoint { layers.* = |", ["auto"]),
        ("checkpoint { layers.* = selective(keep = [|", ["auto"]),
        ("checkpoint { layers.* = auto in [selective(keep = [|", []),
        ("checkpoint { layers.* = auto -> selective(keep = [|", []),
        ("cluster h100_sxm(hosts = |", ["auto in […]"]),
        ("precision (param = |", ["auto in […]"]),
        ("mesh (tp = |", ["auto"]),
        ("shard standard on ep { layers.*.moe = |", ["auto in […]"]),
        ("shard |", ["auto"]),
        ("shard | on tp {}", ["auto"]),
        ("shard | on ep {}", []),
        (f"{ON_TP} = |", ["auto"]),
        (f"{ON_TP}.weight = |", ["auto in […]"]),
        (f"{ON_TP}.{{0.. = |", ["auto in […]"]),
    ],
)
def test_auto_is_offered_where_a_value_is_searched(marked: str, expected: list[str], known: Checked):
    found = labels(marked if marked.startswith(GOOD[:10]) else GOOD + marked, known)
    assert [name for name in found if name.startswith("auto")] == expected


def test_degrees_need_a_domain_where_the_number_of_devices_is_open():
    text = GOOD.replace("cpu(devices = 4)", "h100_sxm(hosts = auto in [1, 2], fabric = infiniband_ndr)")
    found = labels(text.replace("dp_shard = 4)", "dp_shard = |)"), check(document(text), NOTHING))
    assert "auto in […]" in found and "auto" not in found


@pytest.mark.parametrize(
    "name", ["tests/dsl/valid/every_form.plan", "plans/mixtral_8x7b_64_auto.plan", "plans/tiny.plan"]
)
def test_no_hole_that_is_offered_is_refused(name: str):
    """Each is written in place of a value of the plan: without a domain as it is, else with the value as domain."""
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    own = Document(uri_of(path), 1, text, "utf-16", ROOT)
    known, count = check(own, NOTHING), 0
    for value in re.finditer(r"(?:(?<== )|(?<=\[)|(?<=, ))[A-Za-z0-9][\w.%-]*(?:\([^()]*\))?(?=[,\])\n ])", text):
        for item in completion(own, value.start(), known).items:
            if item.label.startswith("auto"):
                hole = "auto" if item.label == "auto" else f"auto in [{value[0]}]"
                changed = text[: value.start()] + hole + text[value.end() :]
                found = lint(changed, name, directory=path.parent).diagnostics
                assert "LP012" not in {item.code for item in found}, changed[: value.end() + 10].rpartition("\n")[2]
                count += 1
    assert count > 5


def test_names_of_let_are_offered_as_values():
    assert "hosts" in labels("let hosts = 4\ncluster h100_sxm(hosts = |")


def test_strings_and_comments_have_no_completions():
    assert labels('data (source = "|') == []
    assert labels("batch (global = 4)  # some |") == []


@pytest.mark.parametrize("keyword", FAMILIES)
def test_every_option_and_treatment_of_the_language_is_offered(keyword: str):
    declared = family(keyword)
    axis = f" on {declared.axis_use.names[0]}" if declared.axis_use else ""
    subject = " llama3" if keyword == "model" else " h100_sxm" if declared.subject_holds_options else ""
    own = [item.name for item in declared.options if item.field != declared.subject]
    if own:
        found = labels(f"{keyword}{subject}{axis}{'' if subject else ' '}(|")
        assert [name for name in own if name not in found] == []
    if declared.treatments is not None:
        found = [name.removesuffix("(…)") for name in labels(f"{keyword}{axis} {{ layers.* = |")]
        assert [item.name for item in declared.treatments.treatments if item.name not in found] == []


def test_suppression_completes_codes_of_its_line():
    text = GOOD + "let hosts = 4"
    assert labels(f"{text}  # legoai: ignore[|", check(document(text), NOTHING)) == ["LP901"]


def coloured(text: str) -> list[tuple[str, str]]:
    """Words of a text with their token types, decoded from the protocol."""
    found = []
    line = character = 0
    lines = [row.encode("utf-16-le") for row in text.split("\n")]
    data = semantic_tokens(document(text)).data
    for down, right, length, sort, _ in zip(*(iter(data),) * 5, strict=True):
        line, character = line + down, right if down else character + right
        word = lines[line][2 * character : 2 * (character + length)].decode("utf-16-le")
        found.append((word, LEGEND[sort].value))
    return found


def test_semantic_tokens_classify_words():
    text = 'let n = 4\n# 🚀 two\ndata (source = "🚀", field = n)  # x\n'
    text += "optimizer adamw(lr = 3e-4)\ncheckpoint { layers.* = every(2) }\n"
    assert coloured(text) == [
        ("let", "keyword"), ("n", "variable"), ("4", "number"), ("# 🚀 two", "comment"), ("data", "keyword"),
        ("source", "property"), ('"🚀"', "string"), ("field", "property"), ("n", "variable"), ("# x", "comment"),
        ("optimizer", "keyword"), ("adamw", "enumMember"), ("lr", "property"), ("3e-4", "number"),
        ("checkpoint", "keyword"), ("layers.*", "namespace"), ("every", "function"), ("2", "number"),
    ]  # fmt: skip


def test_broken_text_has_semantic_tokens():
    assert ("fsdp", "keyword") in coloured("batch (global = [4\nfsdp on dp_shard {\n  layers.* = unit(\n")
