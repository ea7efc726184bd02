"""Every mistake of the corpus is reported with its golden text, and every valid plan is clean.

The mistakes are in `invalid/CODE/NAME.plan`, by the expected code, and the linter's output in
`invalid/CODE/NAME.txt`. A first line such as
`# legoai lint --variant NAME --set NAME=VALUE` gives options. `pytest tests/dsl --update-golden` rewrites the texts:
read the changes before you commit them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from legoai.dsl.lint import Linted, lint
from legoai.dsl.reporting.output import render_full
from legoai.dsl.rules import all_rules
from support import VALID_PLANS, WORKED_PLANS

HERE = Path(__file__).parent
INVALID = sorted(HERE.glob("invalid/LP*/*.plan"))

ELSEWHERE = {
    "LP001": "found when a file is read",
    "LP002": "found when a file is read",
    "LP011": "found when a plan is lowered",
    "LP013": "found when a plan is solved",
    "LP014": "found when the graph of a step is asked for",
    "LP015": "found when a picture of a pipeline is asked for",
    **dict.fromkeys(("LP021", "LP022", "LP023", "LP024", "LP025"), "found when a config is imported"),
    "LP711": "found when a plan is simulated",
    "LP712": "found when a plan is simulated",
    "LP716": "found when a plan is solved",
    "LP717": "every built-in model is simulated",
    "LP718": "found when a plan is costed",
    "LP828": "found when a plan is simulated",
    "LP838": "found when a plan is simulated",
    "LP108": "found when a file is read",
    "LP226": "found where factories are not run",
    "LP229": "every built-in model has first values",
    "LP230": "every built-in model returns what its loss takes",
    "LP231": "every built-in model takes its inputs",
    "LP311": "every built-in model takes positions",
    "LP317": "every built-in model computes with the positions that it is given",
    "LP318": "every built-in model combines tokens by attention alone",
    "LP313": "needs a device's file",
    "LP315": "found when a plan is costed",
    "LP319": "needs a device's file",
    "LP316": "every built-in model calls attention without mask and dropout",
    "LP418": "no built-in model has a fused layer",
    "LP425": "no built-in model counts positions itself",
    "LP519": "no built-in model has a parameter without dims",
    "LP523": "no built-in model has a parameter without elements",
    "LP524": "no built-in model has a parameter of complex numbers",
    "LP525": "every built-in model has contiguous parameters",
    "LP522": "no built-in model changes tensors in place",
    "LP518": "no built-in model needs placeholders",
    "LP634": "every built-in model calls the attention kernel",
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
    "LP621": "needs a config file",
}
"""Rules that no plan of the corpus can break, since linting one built-in model does not find them."""


def found_in(path: Path) -> Linted:
    text = path.read_text(encoding="utf-8")
    variant = None
    settings = {}
    first, _, _ = text.partition("\n")
    if first.startswith("# legoai lint "):
        words = iter(shlex.split(first.removeprefix("# legoai lint ")))
        for word in words:
            if word == "--variant":
                variant = next(words)
            else:
                assert word == "--set"
                name, _, value = next(words).partition("=")
                settings[name] = value
    return lint(text, path.name, directory=Path(), settings=settings, variant=variant)


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_invalid_plan_gives_its_golden_diagnostics(
    path: Path, golden: Callable[[Path, str], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(path.parent)
    found = found_in(path)
    assert found.diagnostics, "a plan without mistakes belongs into valid/"
    golden(path.with_suffix(".txt"), render_full(found.diagnostics, found.files))
    assert path.parent.name in {diagnostic.code for diagnostic in found.diagnostics}


@pytest.mark.parametrize("path", VALID_PLANS + WORKED_PLANS, ids=lambda path: path.stem)
def test_valid_plan_is_clean(path: Path):
    found = lint(path.read_text(encoding="utf-8"), path.name, directory=path.parent)
    assert render_full(found.diagnostics, found.files) == ""


def test_every_rule_has_an_invalid_plan():
    texts = "".join(path.with_suffix(".txt").read_text(encoding="utf-8") for path in INVALID)
    silent = {rule.code for rule in all_rules() if f"[{rule.code}]" not in texts}
    assert silent == set(ELSEWHERE)


def test_every_golden_text_has_its_plan():
    assert {path.with_suffix(".plan") for path in HERE.glob("invalid/**/*.txt")} == set(INVALID)
    assert set(HERE.glob("invalid/**/*.plan")) == set(INVALID)
