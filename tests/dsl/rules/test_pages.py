"""Pages of the rules: the rule reports the example, and does not report the fix.

An example is a whole plan, or statements that override those of `BASE`, as in a plan that extends it. Write into the
example whatever the diagnostic needs beyond the base, such as the mesh.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from legoai.dsl.diagnostics.examples import EXAMPLES
from legoai.dsl.diagnostics.rule import Rule
from legoai.dsl.lint import Linted, lint
from legoai.dsl.reporting.reference import OWN_STATEMENTS
from legoai.dsl.rules import all_rules
from legoai.dsl.rules.base import Check
from legoai.lowering.program import lower
from legoai.specs.directives import FAMILIES

BASE = """
plan base

model   llama3("8b")
cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
batch   (global = 256, micro = 1, seq_len = 8192)
"""

WITHOUT_EXAMPLE = {
    "LP313": "needs a device's file",
    "LP319": "needs a device's file",
    "LP316": "every built-in model calls attention without mask and dropout",
    "LP317": "every built-in model computes with the positions that it is given",
    "LP318": "every built-in model combines tokens by attention alone",
    "LP418": "no built-in model has a fused layer",
    "LP425": "needs a config file",
    "LP621": "needs a config file",
    "LP519": "no built-in model has a parameter without dims",
    "LP523": "no built-in model has a parameter without elements",
    "LP524": "no built-in model has a parameter of complex numbers",
    "LP525": "every built-in model has contiguous parameters",
    "LP522": "no built-in model changes tensors in place",
    "LP229": "every built-in model has first values",
    "LP518": "needs a model of somebody else's",
    "LP617": "no device of the catalogue is older than Ampere",
    "LP440": "no built-in model draws random numbers",
    "LP441": "every built-in model is followed",
    "LP442": "no built-in model changes tensors in place",
    "LP639": "no built-in model draws random numbers",
    "LP642": "no built-in model changes tensors in place",
    "LP659": "no built-in model draws random numbers",
    "LP232": "no built-in model has sparse gradients",
    "LP233": "no built-in model wraps modules",
    "LP234": "no built-in model has hooks",
    "LP235": "every built-in model keeps its tensors in buffers",
    "LP645": "no built-in model is recurrent",
    "LP646": "no built-in model has hooks",
    "LP647": "no built-in model assigns attributes in forward",
    "LP648": "no built-in model that compiles as one graph reads values",
    "LP649": "no built-in model normalises by the samples of all ranks",
    "LP678": "no built-in model has a parameter of complex numbers",
    "LP320": "no built-in model scales gradients by how often tokens occur",
    "LP335": "no built-in model reads the weights of a module that it does not call",
    "LP336": "every built-in model is followed",
    "LP643": "no built-in model changes parameters",
    "LP644": "every built-in model computes in one dtype",
    "LP660": "no built-in model updates its buffers",
    "LP717": "every built-in model is simulated",
    "LP904": "needs a solver's line whose digest belongs to another text",
}

_SECTION = re.compile(r"^## (?P<title>[^\n]+)\n(?P<body>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^```\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
_WHOLE = re.compile(r"(\s|#[^\n]*\n)*plan\s")


def sections(rule: type[Rule], title: str) -> list[str]:
    """The code blocks under ``title`` on the rule's page."""
    page = inspect.cleandoc(rule.__doc__ or "")
    bodies = [match["body"] for match in _SECTION.finditer(page) if match["title"] == title]
    return [match["text"] for body in bodies for match in _FENCE.finditer(body)]


def lint_example(text: str, beside: str = "") -> Linted:
    """Lint a whole plan, or statements over those ``beside`` them, which are over :data:`BASE`."""
    lower_plan = beside if _WHOLE.match(beside) else f'plan beside\nextends "base.plan"\n{beside}'
    files = {"base.plan": BASE, "beside.plan": lower_plan}

    def read(path: Path) -> str:
        if path.name not in files:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return files[path.name]

    whole = text if _WHOLE.match(text) else f'plan example\nextends "beside.plan"\n{text}'
    return lint(whole, "example.plan", directory=Path(), read=read)


def examples(title: str) -> list[object]:
    return [
        pytest.param(rule, text, id=f"{rule.code}-{index}")
        for rule in all_rules()
        if not rule.code.startswith("LP0") and not rule.simulated  # reported by reading, lowering and simulating
        for index, text in enumerate(sections(rule, title))
    ]


@pytest.mark.parametrize(("rule", "text"), examples("Example"))
def test_the_example_is_found(rule: type[Rule], text: str) -> None:
    found = lint_example(text).diagnostics
    assert rule.code in {item.code for item in found}, [f"{item.code} {item.message}" for item in found]


UNITS = "fsdp on dp_shard { layers.* = unit(reshard = after_backward) }\n"
BESIDE = (
    "",
    "mesh (dp_shard = rest)\nfsdp on dp_shard { root = unit }\n",
    f"mesh (dp_shard = rest)\n{UNITS}",
    UNITS,
    "shard standard on tp\n",
    f"{UNITS}shard standard on tp\n",
    'model llama3("1b")\nreplicate on dp_replicate\n',
)
"""What stands beside a cure, which is a part of a plan: what uses its mesh, or the mesh that it does not speak of."""


@pytest.mark.parametrize(("rule", "text"), examples("Use instead"))
def test_fixed_example_lints_and_lowers_without_the_diagnostic(rule: type[Rule], text: str) -> None:
    """The fix replaces statements of the page's example, or of the base and BESIDE."""
    found = []
    for beside in (*sections(rule, "Example")[:1], *BESIDE):
        linted = lint_example(text, beside)
        wrong = [item for item in linted.diagnostics if item.severity == "error" or item.code == rule.code]
        if not wrong:
            assert linted.analysis is not None
            assert lower(linted.analysis).text
            return
        found.append([f"{item.code} {item.message}" for item in wrong])
    raise AssertionError(found)


IN_A_MESH = (
    *BESIDE,
    "mesh (pp = 4, dp_shard = 8)\n" + UNITS,
    "mesh (dp_shard = 8, cp = 4)\n" + UNITS,
    f"mesh (dp_shard = rest, tp = 8)\n{UNITS}",
    'model llama3("1b")\nmesh (dp_replicate = 32)\n',
    f"mesh (dp_shard = rest)\n{UNITS}clip (norm = 2.0)\n",
)


@pytest.mark.parametrize("keyword", [keyword for keyword in EXAMPLES if keyword not in ("plan", "extends")])
def test_the_example_of_a_statement_lints_and_lowers(keyword: str) -> None:
    found = []
    for beside in IN_A_MESH:
        linted = lint_example(EXAMPLES[keyword] + "\n", beside)
        wrong = [f"{item.code} {item.message}" for item in linted.diagnostics if item.severity == "error"]
        if not wrong:
            assert linted.analysis is not None
            assert lower(linted.analysis).text
            return
        found.append(wrong)
    raise AssertionError(found)


def test_every_statement_has_an_example() -> None:
    assert {*OWN_STATEMENTS, *FAMILIES} - set(EXAMPLES) == {"solved"}


@pytest.mark.parametrize("rule", [rule for rule in all_rules() if issubclass(rule, Check)], ids=lambda rule: rule.code)
def test_rules_have_an_example_and_a_fix(rule: type[Rule]) -> None:
    page = next((base for base in rule.__mro__ if issubclass(base, Rule) and sections(base, "Example")), None)
    if rule.code in WITHOUT_EXAMPLE:
        return
    assert page is not None
    assert "## Use instead" in (page.__doc__ or "")


def test_codes_and_slugs_name_one_page_each() -> None:
    pages: dict[str, set[str]] = {}
    for rule in all_rules():
        assert re.fullmatch(r"LP[0-9]{3}", rule.code), rule
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.slug), rule
        pages.setdefault(rule.code, set()).add(rule.slug)
        pages.setdefault(rule.slug, set()).add(rule.code)
    assert {name: held for name, held in pages.items() if len(held) > 1} == {}


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: f"{rule.code}-{rule.__name__}")
def test_page_starts_with_one_sentence(rule: type[Rule]) -> None:
    assert rule.__doc__ is not None
    first = inspect.cleandoc(rule.__doc__).partition("\n")[0]
    assert first.endswith("."), first
