"""The documents are current, and their examples and file names are right."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import legoai as legoai_package
from legoai.cli import main as legoai
from legoai.commands import COMMANDS, parser_of
from legoai.cost import words
from legoai.cost.trace.records import Phase
from legoai.dsl.analysis.domains import values_of
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.lint import lint
from legoai.dsl.reporting.reference import GROUPS, OWN_STATEMENTS, documents, keyword_page, main
from legoai.dsl.rules import all_rules
from legoai.specs.directives import FAMILIES, family
from legoai.specs.directives.checkpoint import Every
from legoai.specs.directives.kinds import Integer
from support import ROOT
from support.simulation.simulated import in_a_fork

DOCS = ROOT / "docs"
FENCE = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["language.md", "rules.md"])
def test_the_generated_documents_are_current(name: str):
    assert (DOCS / name).read_text(encoding="utf-8") == documents(DOCS)[DOCS / name], (
        "run: python -m legoai.dsl.reporting.reference --write"
    )


def test_check_reports_stale_documents_and_write_updates_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "_introduction.md").write_text("# Words\n", encoding="utf-8")
    assert main(["--check", "--docs", str(tmp_path)]) == 1
    assert "not current: " in capsys.readouterr().out
    assert main(["--write", "--docs", str(tmp_path)]) == 0
    assert main(["--check", "--docs", str(tmp_path)]) == 0


@pytest.mark.parametrize("keyword", FAMILIES)
def test_the_reference_names_every_option_and_treatment(keyword: str):
    page = keyword_page(keyword)
    declared = family(keyword)
    for option in declared.options:
        assert f"`{option.name}`: {option.doc}" in page
    for treatment in declared.treatments.treatments if declared.treatments else ():
        assert f"- `{treatment.signature()}`: " in page
        for option in treatment.options:
            assert f"  - `{option.name}`: {option.doc}" in page


@pytest.mark.parametrize("keyword", FAMILIES)
def test_the_reference_names_no_form_of_a_value_twice(keyword: str):
    assert re.findall(r"(`\w+`)(?:, `\w+`)*,? (?:or )?\1", keyword_page(keyword)) == []


def test_every_statement_and_rule_has_one_heading():
    language = (DOCS / "language.md").read_text(encoding="utf-8")
    for keyword in (*FAMILIES, *OWN_STATEMENTS):
        assert language.count(f"\n### `{keyword}`\n") == 1
    rules = (DOCS / "rules.md").read_text(encoding="utf-8")
    for rule in all_rules():
        assert rules.count(f"\n### {rule.code} ") == 1
        assert rule.code[:3] in GROUPS


def test_plans_of_the_introduction_are_valid():
    shown = FENCE.findall((DOCS / "_introduction.md").read_text(encoding="utf-8"))
    whole = [text for text in shown if "\nplan " in f"\n{text}" and "extends" not in text]
    assert whole
    for text in whole:
        assert [item.code for item in lint(text, "x.plan", directory=Path()).diagnostics] == []
    for text in shown:
        if not text.startswith("keyword"):
            assert parse(text, "x.plan").diagnostics == ()


@pytest.mark.parametrize("name", COMMANDS)
def test_manual_lists_exactly_the_options_of_a_command(name: str):
    manual = (DOCS / "command-line.md").read_text(encoding="utf-8")
    section = manual.split(f"\n## `legoai {name}`\n")[1].split("\n## ")[0]
    options = {word for action in parser_of(name)._actions for word in action.option_strings if word.startswith("--")}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", section.split("-- ARGUMENT")[0]))
    assert named | {"--help"} == options


def test_manual_has_exactly_one_section_per_command():
    manual = (DOCS / "command-line.md").read_text(encoding="utf-8")
    assert re.findall(r"^## `legoai (\w+)`$", manual, re.MULTILINE) == list(COMMANDS)


def test_cost_output_lists_the_kinds_and_phases_of_kernels():
    lines = (DOCS / "cost-output.md").read_text(encoding="utf-8").partition("- `compute_by_kind_s`")[2]
    kinds, _, phases = lines.partition("\n- ")[0].partition("; phases are ")
    assert re.findall(r"`([a-z ]+)`", kinds) == list(words.KINDS)
    assert re.findall(r"`([a-z ]+)`", phases) == list(get_args(Phase))


def python_example() -> str:
    """The example of the Python API."""
    manual = (DOCS / "command-line.md").read_text(encoding="utf-8")
    return manual.partition("\n## Python\n")[2].partition("```python\n")[2].partition("```")[0]


def python_examples() -> dict[str, str]:
    """The other examples of the Python API, by the function that each of them calls."""
    manual = (DOCS / "command-line.md").read_text(encoding="utf-8").partition("\n## Python\n")[2]
    codes = re.findall(r"^```python\n(.*?)^```", manual, re.MULTILINE | re.DOTALL)
    return {match[1]: code for code in codes[1:] if (match := re.search(r"legoai\.(\w+)\(", code))}


def run_example(code: str) -> list[str]:
    names: dict[str, object] = {}
    exec(code, names)
    return sorted(names)


def test_python_example_of_the_manual_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    without_torch, simulated, _ = python_example().partition("estimate = ")
    assert simulated
    assert {"plan", "diagnostics", "program"} <= set(run_example(without_torch))


@pytest.mark.slow
def test_whole_python_example_of_the_manual_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    assert "estimate" in in_a_fork(run_example, python_example())


SMALL = """plan small

model   llama3("tiny")
cluster cpu
batch   (global = 2, micro = 2, seq_len = 16)
mesh    (dp_shard = 1)
"""


def test_manual_shows_each_function_of_the_python_api():
    shown = python_example() + "".join(python_examples().values())
    functions = {name for name in legoai_package.__all__ if inspect.isfunction(getattr(legoai_package, name))}
    assert functions == set(re.findall(r"legoai\.(\w+)\(", shown))


@pytest.mark.slow
@pytest.mark.parametrize(("function", "names"), [("solve", {"text"}), ("run", {"status"}), ("verify", {"verdict"})])
def test_other_python_examples_of_the_manual_run(
    function: str, names: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("small.plan").write_text(SMALL, encoding="utf-8")
    text = SMALL.replace("cluster cpu", "cluster h100_sxm(hosts = 1, devices = 1)").replace(
        "micro = 2", "micro = auto in [1, 2]"
    )
    Path("open.plan").write_text(text, encoding="utf-8")
    code = f"{python_examples()[function]}print(*globals())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200)
    assert names <= set(done.stdout.split()), done.stderr


NAMED = re.compile(r"`((?:specs|dsl|lowering|cost|runtime|tests|docs|plans|benchmarks|src|\.ci)/[\w./-]*)`")


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_file_named_in_a_guide_exists(name: str):
    named = {
        path for path in NAMED.findall((ROOT / name).read_text(encoding="utf-8")) if not re.search("[A-Z]{3}", path)
    }
    assert len(named) > 5
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_packages_named_in_the_architecture_exist():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/` \| (.*) \|$", text.partition("\n## Rooms\n")[2], re.MULTILINE)
    assert len(rows) == 5
    for folder, rooms in rows:
        named = set(re.findall(r"`([\w]+)/`", rooms))
        packages = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
        assert named == packages, folder
        for file in re.findall(r"`(\w+\.py)`", rooms):
            assert (ROOT / folder / file).exists(), file


def test_manual_names_the_strides_that_solve_tries():
    *first, last = values_of((Every(n=2), "n"), Integer(), None)
    row = "| amounts of `budget`, strides of `every`, lists of `selective` | 10% to 90%; "
    assert f"{row}{', '.join(first)} and {last};" in (DOCS / "solve-output.md").read_text(encoding="utf-8")


def test_floors_of_the_architecture_name_the_packages_that_import_torch():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    [last] = re.findall(r"^\| 3 \| `lowering/` \|.*\| (.*) \|$", text, re.MULTILINE)
    importing = {
        path.relative_to(ROOT / "lowering").parts[0]
        for path in (ROOT / "lowering").rglob("*.py")
        if re.search(r"^(?:import|from) torch\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert set(re.findall(r"`(\w+)/`", last)) == importing


def test_suppression_example_of_the_introduction_works():
    text = (DOCS / "_introduction.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if "# legoai: ignore[" in line)
    code = line.partition("ignore[")[2].partition("]")[0]
    head = 'plan x\nmodel llama3("8b")\nbatch (global = 256, micro = 1, seq_len = 8192)\n'
    head += "cluster h100_sxm(hosts = 8, fabric = infiniband_ndr)\n"

    def codes(statement: str) -> set[str]:
        return {item.code for item in lint(f"{head}{statement}\n", "x.plan", directory=Path()).diagnostics}

    assert code in codes(line.partition("#")[0])
    assert not codes(line) & {code, "LP903", "LP905"}


def test_example_of_a_factory_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = (DOCS / "factories.md").read_text(encoding="utf-8")
    for name in ("nano.py", "nano.plan"):
        [code] = re.findall(rf"^`{name}`[^\n]*:\n\n```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert legoai(["lint", "nano.plan"]) == 0
    assert legoai(["verify", "nano.plan"]) == 0, capsys.readouterr().out
    assert re.search(r"first values +53 alike", capsys.readouterr().out)
