"""`legoai solve`: answers in the plan's text, the table, the JSON, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import legoai
from legoai.api import solved
from legoai.commands import solve as solve_command
from legoai.cost.search.solve import Solution
from support.commands.command_line import called, here
from support.commands.forked_commands import forked
from support.marks import NEEDS_SOLVER

__all__ = ["here"]

OPEN = """\
plan small  # a plan with holes

model   llama3("tiny", n_layers = 1)
cluster cpu(devices = 2)
batch   (global = 8, micro = auto in [2, 4], seq_len = 64)  # of each rank
mesh    (dp_shard = 2)

fsdp on dp_shard { layers.* = unit }
checkpoint { layers.* = auto in [none, full] -> full }
require recompute <= 50%
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "solve"))


def test_a_plan_is_solved_in_place(capsys: pytest.CaptureFixture[str]):
    Path("open.plan").write_text(OPEN, encoding="utf-8")
    status, out, _ = called(capsys, "solve", "open.plan", "--in-place", "--top", "2")
    assert status == 0
    text = Path("open.plan").read_text(encoding="utf-8")
    before = OPEN.splitlines()
    for line, old in zip(text.splitlines(), before, strict=False):
        assert line.split(" ->")[0].startswith(old.split(" ->")[0].split(" auto")[0])
    assert "checkpoint { layers.* = auto in [none, full] -> none }" in text
    assert "# of each rank" in text
    assert text.splitlines()[-1].startswith('solved "sha256:')
    assert called(capsys, "lint", "open.plan")[0] == 0
    assert "present values" in out
    assert "rule of thumb" in out
    assert "more recomputation" in out

    # Solving again rests on the same simulations, and comes to the same bytes.
    first = called(capsys, "solve", "open.plan", "--json", "--all", "--in-place")[1]
    assert Path("open.plan").read_text(encoding="utf-8") == text
    second = called(capsys, "solve", "open.plan", "--json", "--all")[1]
    assert [line for line in first.splitlines() if "solve_time_s" not in line] == [
        line for line in second.splitlines() if "solve_time_s" not in line
    ]
    found, again = json.loads(first), json.loads(second)
    assert found.pop("solve_time_s") > 0.0
    assert again.pop("solve_time_s") > 0.0
    assert found == again
    assert (found["status"], found["gap"], found["objective"]["value"]) == ("optimal", 0.0, found["bound"])
    assert found["objective"]["value"] == found["estimate"]["step_time_s"] == found["all"][0]["step_time_s"]
    assert [item["value"] for item in found["choices"]] == ["4", "none"]
    assert [item["line"] for item in found["choices"]] == [5, 9]
    assert found["candidates"]["enumerated"] == len(found["all"]) + sum(
        [found["candidates"]["pruned"]["by_bound"], *found["candidates"]["pruned"]["by_rules"].values()]
    )

    best = json.loads(called(capsys, "solve", "open.plan", "--json", "--top", "2")[1])["top"]
    assert [{name: item[name] for name in item if name != "difference"} for item in best] == found["all"][:2]
    assert best[0]["difference"] == "the solution" and best[1]["difference"].endswith("more recomputation")
    assert "top" not in found

    # The figure equals that of `legoai cost` for the written plan.
    cost = json.loads(forked("cost", "open.plan", "--json").stdout)
    assert cost["step_time_s"] == found["objective"]["value"]
    assert cost["plan"]["hash"] == legoai.load("open.plan").digest

    assert called(capsys, "solve", "open.plan", "-o", "pinned.plan", "--pin")[0] == 0
    pinned = Path("pinned.plan").read_text(encoding="utf-8")
    status, alone, table = called(capsys, "solve", "open.plan", "-o", "-", "--pin")
    assert (status, alone) == (0, pinned)
    assert "present values" in table
    assert not Path("-").exists()
    assert "auto" not in pinned
    assert legoai.load("pinned.plan").digest == legoai.load("open.plan").digest
    solution = legoai.solve("open.plan")
    assert solution.text(solution.best.choices) == text


VARIANTS = f"""{OPEN.replace("global = 8", "global = samples")}
let samples = 8
variant small {{ minimize peak_memory }}
variant own {{ checkpoint {{ layers.* = auto in [none, full] -> none }} }}
"""


@pytest.mark.slow
def test_line_is_removed_where_a_variant_replaces_shared_answers(capsys: pytest.CaptureFixture[str]):
    plan = Path("open.plan")
    plan.write_text(VARIANTS, encoding="utf-8")
    assert called(capsys, "solve", "open.plan", "--in-place")[0] == 0
    solved = plan.read_text(encoding="utf-8")
    assert "solved" in solved

    # The same answers under a setting, and others in the variant alone, leave the plan's own solution.
    assert called(capsys, "solve", "open.plan", "--in-place", "--set", "samples=16")[::2] == (0, "wrote open.plan\n")
    assert plan.read_text(encoding="utf-8") == solved
    said = called(capsys, "solve", "open.plan", "--in-place", "--variant", "own")[2]
    assert said == "wrote open.plan\n"
    assert plan.read_text(encoding="utf-8") == solved

    said = called(capsys, "solve", "open.plan", "--in-place", "--variant", "small")[2]
    shared = plan.read_text(encoding="utf-8")
    assert "open.plan has these answers without `--variant small` too, in place of its own: batch micro: 4 → 2" in said
    assert "the `solved` line of open.plan, which was of other answers, is removed" in said
    assert "solved" not in shared
    assert "LP904" not in called(capsys, "lint", "open.plan")[1]
    solution = legoai.solve("open.plan", variant="small")
    assert "solved" not in solution.text(solution.best.choices)


@pytest.mark.slow
def test_output_is_flushed_before_the_fast_exit():
    """The process exits without waiting for Python to free the search's memory."""
    Path("open.plan").write_text(OPEN, encoding="utf-8")
    command = [sys.executable, "-m", "legoai", "solve", "open.plan"]
    done = subprocess.run([*command, "--json", "--all"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and json.loads(done.stdout)["status"] == "optimal"
    Path("open.plan").write_text(OPEN.replace("recompute <= 50%", "peak_memory <= 1KiB"), encoding="utf-8")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "error[LP" in done.stderr and done.stderr.endswith("\n")


def test_hole_that_blocks_resolution_is_solved(capsys: pytest.CaptureFixture[str]):
    text = (
        OPEN.replace("(dp_shard = 2)", "(tp = 2)")
        .replace("auto in [2, 4]", "8")
        .replace("auto in [none, full] -> ", "")
    )
    text = text.replace("fsdp on dp_shard { layers.* = unit }", "shard standard on tp (loss_parallel = auto)")
    Path("open.plan").write_text(text, encoding="utf-8")
    assert called(capsys, "solve", "open.plan", "--in-place")[0] == 0
    solved = Path("open.plan").read_text(encoding="utf-8")
    assert "(loss_parallel = auto -> " in solved
    assert called(capsys, "solve", "open.plan", "--in-place")[0] == 0
    assert Path("open.plan").read_text(encoding="utf-8") == solved


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        pytest.param("global = 8", "global = 4", "LP601", id="illegal"),
        pytest.param("[2, 4] -> 4", "[1, 2] -> 4", "LP220", id="outside of the domain", marks=pytest.mark.slow),
    ],
)
def test_answers_that_an_edit_made_illegal_are_searched_again(
    old: str, new: str, code: str, capsys: pytest.CaptureFixture[str]
):
    text = OPEN.replace("auto in [2, 4]", "auto in [2, 4] -> 4").replace(old, new)
    Path("edited.plan").write_text(text, encoding="utf-8")
    status, out, _ = called(capsys, "lint", "edited.plan")
    assert (status, out.count("error[")) == (1, 1)
    assert f"error[{code}]" in out
    assert "solve the plan again" in out
    Path("elsewhere").mkdir()
    status, out, _ = called(capsys, "solve", "edited.plan", "-o", "elsewhere/solved.plan")
    assert status == 0
    assert out.count("the answers are not legal") == 1
    found = Path("elsewhere/solved.plan").read_text(encoding="utf-8")
    assert "] -> 2," in found
    assert called(capsys, "lint", "elsewhere/solved.plan")[0] == 0
    solution = legoai.solve("edited.plan")
    assert solution.text(solution.best.choices) == found
    # What follows from no answer is refused still.
    Path("edited.plan").write_text(text.replace("{ layers.* = unit }", "{ blocks.* = unit }"), encoding="utf-8")
    status, _, err = called(capsys, "solve", "edited.plan")
    assert (status, err.count("error[")) == (1, 1)
    assert err.endswith("legoai: edited.plan is not solved: 1 error\n")


def test_conflicting_requirements_are_reported_with_their_lines(capsys: pytest.CaptureFixture[str]):
    text = OPEN.replace("auto in [2, 4]", "8").replace("global = 8", "global = 16").replace("= 64", "= 128")
    text = text.replace("n_layers = 1", "n_layers = 2").replace("<= 50%", "<= 5%\nrequire peak_memory <= 16MiB")
    Path("open.plan").write_text(text, encoding="utf-8")
    status, out, err = called(capsys, "solve", "open.plan")
    assert status == 1
    assert "LP716" in err
    assert "require recompute <= 5%" in err
    assert "require peak_memory <= 16MiB" in err
    assert "no solution" in out


def test_unsearchable_hole_is_refused_before_simulation(capsys: pytest.CaptureFixture[str]):
    Path("open.plan").write_text(OPEN + "optimizer adamw(lr = auto in [1e-3, 1e-4])\n", encoding="utf-8")
    status, out, err = called(capsys, "solve", "open.plan")
    assert (status, out) == (1, "")
    assert "LP012" in err


def test_a_plan_without_holes_is_not_solved(capsys: pytest.CaptureFixture[str]):
    status, _, err = called(capsys, "solve", "good.plan")
    assert status == 2
    assert "has no holes" in err


def test_a_plan_with_errors_is_not_solved(capsys: pytest.CaptureFixture[str]):
    status, _, err = called(capsys, "solve", "bad.plan")
    assert status == 1
    assert "LP2" in err


@pytest.mark.slow
def test_a_refresh_writes_everything_anew(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Each cached file is computed again, though it is whole: also pieces, which worker processes read and write."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("open.plan").write_text(OPEN.replace("n_layers = 1", "n_layers = 8"), encoding="utf-8")

    def written() -> dict[str, object]:
        # A piece that is read has another time too, and one that a refresh writes another first line.
        files = [file for file in (tmp_path / "cache").glob("legoai/*/*") if file.parent.name != "grammar"]
        return {
            str(file): file.read_bytes().partition(b"\n")[0]
            if file.parent.name == "pieces"
            else file.stat().st_mtime_ns
            for file in files
        }

    first = called(capsys, "solve", "open.plan", "--json", "--all")[1]
    before = written()
    assert {Path(name).parent.name for name in before} >= {"pieces", "figures", "estimates"}
    second = called(capsys, "solve", "open.plan", "--json", "--all", "--refresh")[1]
    after = written()
    assert after.keys() == before.keys() and all(after[name] != before[name] for name in before)
    documents = [json.loads(text) for text in (first, second)]
    for part in ("status", "choices", "estimate"):
        assert documents[0][part] == documents[1][part]


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]):
    Path("open.plan").write_text(OPEN, encoding="utf-8")
    for wrong in (
        ["--all"],
        ["--time-limit", "0"],
        ["--gap", "100%"],
        ["--gap", "-0.1"],
        ["--gap", "small"],
        ["--top", "0"],
        ["--in-place", "-o", "x.plan"],
        ["-o", "missing/x"],
        ["-o", "-", "--json"],
    ):
        assert called(capsys, "solve", "open.plan", *wrong)[0] == 2, wrong


def test_time_limit_returns_the_best_so_far(capsys: pytest.CaptureFixture[str]):
    Path("open.plan").write_text(OPEN.replace("seq_len = 64", "seq_len = 65"), encoding="utf-8")
    status, out, _ = called(capsys, "solve", "open.plan", "--time-limit", "0.0001", "--json")
    found = json.loads(out)
    assert (status, found["status"], found["choices"]) == (1, "time_limit", [])
    status, out, err = called(capsys, "solve", "open.plan", "--time-limit", "0.0001")
    assert (status, out.splitlines()[0]) == (1, "no solution: stopped at the time limit")
    assert "open.plan is not solved: no candidate is feasible of those evaluated within the time limit" in err


def test_an_interrupt_before_any_solution_is_status_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    Path("open.plan").write_text(OPEN.replace("seq_len = 64", "seq_len = 66"), encoding="utf-8")

    def interrupted(*given: Any, **named: Any) -> Solution:
        found = solved(*given, **named | {"time_limit": 0.0001})
        found.result.status = "interrupted"
        return found

    monkeypatch.setattr("legoai.commands.solve.solved", interrupted)
    status, out, err = called(capsys, "solve", "open.plan", "--json")
    assert (status, json.loads(out)["status"]) == (130, "interrupted")
    assert "open.plan is not solved: interrupted" in err


def test_interrupted_estimate_leaves_the_solution(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(solve_command, "_estimate", interrupted)
    Path("open.plan").write_text(OPEN, encoding="utf-8")
    status, out, _ = called(capsys, "solve", "open.plan", "--json", "-o", "solved.plan")
    assert (status, json.loads(out)["status"], json.loads(out)["estimate"]) == (0, "optimal", None)
    assert "-> none }" in Path("solved.plan").read_text(encoding="utf-8")


@pytest.mark.slow
def test_searches_that_explain_a_conflict_are_not_counted(capsys: pytest.CaptureFixture[str]):
    text = OPEN + "require step_time <= 10us\nrequire peak_memory <= 100MiB\n"
    Path("open.plan").write_text(text, encoding="utf-8")
    status, out, _ = called(capsys, "solve", "open.plan", "--json")
    counted = json.loads(out)["candidates"]
    assert status == 1
    assert counted["simulated"] <= counted["evaluated"] + counted["failed"]


STYLES = """\
plan styles

model   llama3("tiny", n_layers = 2)
cluster cpu(devices = 2)
batch   (global = 4, micro = 4, seq_len = 64)
mesh    (tp = 2)

shard auto on tp  # found
"""


@pytest.mark.slow
@NEEDS_SOLVER
def test_lines_of_styles_are_those_of_the_plan_that_was_read(capsys: pytest.CaptureFixture[str]):
    """The rules that `shard auto` stands for have its line, and what follows has the line that a person sees."""
    text = STYLES.replace("n_layers = 2", "n_layers = 1") + "\nloss auto in [eager]\nrequire bubble >= 50%\n"
    Path("styles.plan").write_text(text, encoding="utf-8")
    _, out, err = called(capsys, "solve", "styles.plan", "--json", "--all")
    statement, form, required = (text[: text.index(word)].count("\n") + 1 for word in ("shard", "loss", "require"))
    assert f"--> styles.plan:{required}:1\n" in err
    assert f"{required} | require bubble >= 50%\n" in err
    for candidate in json.loads(out)["all"]:
        assert [item["line"] for item in candidate["choices"]] == [statement] * 14 + [form]


@pytest.mark.slow
@NEEDS_SOLVER
def test_solved_styles_are_written_as_rules(capsys: pytest.CaptureFixture[str]):
    Path("styles.plan").write_text(STYLES, encoding="utf-8")
    status, out, _ = called(capsys, "solve", "styles.plan", "--in-place")
    assert status == 0
    assert "other styles than those that were tried" in out
    text = Path("styles.plan").read_text(encoding="utf-8")
    assert "shard on tp {\n  tok_embeddings           = auto -> " in text
    assert "  layers.*.attention.wo    = auto -> rowwise" in text
    assert "}  # found\n" in text
    assert called(capsys, "lint", "styles.plan")[0] == 0
    assert called(capsys, "lower", "styles.plan")[0] == 0

    # Rules and answers stay, and solving again comes to the same bytes.
    found = json.loads(called(capsys, "solve", "styles.plan", "--json", "--in-place")[1])
    assert Path("styles.plan").read_text(encoding="utf-8") == text
    assert len(found["choices"]) == 14
    counted = found["candidates"]
    assert counted["enumerated"] == counted["pruned"]["by_placements"] + counted["evaluated"] > 1e9
    assert found["bound"] < found["objective"]["value"]
    assert called(capsys, "solve", "styles.plan", "-o", "pinned.plan", "--pin")[0] == 0
    assert "auto" not in Path("pinned.plan").read_text(encoding="utf-8")
    assert legoai.load("pinned.plan").digest == legoai.load("styles.plan").digest


LIMITED = """\
plan limited
model   llama3("8b", n_layers = 2, dim = 512, n_heads = 8, n_kv_heads = 8, hidden_dim = 2048, vocab_size = 64000)
cluster h100_sxm(hosts = 2, devices = 1, fabric = ethernet_100)
batch   (global = 2, micro = 2, seq_len = 4096)
mesh    (tp = 2)
shard   auto on tp
precision (param = bf16)
require peak_memory <= 4.9GiB
"""


@pytest.mark.slow
@NEEDS_SOLVER
def test_limit_that_standard_layouts_meet_is_met(capsys: pytest.CaptureFixture[str]):
    """The logits, which the program does not count, exceed it with the first styles; the solution is no slower."""
    Path("limited.plan").write_text(LIMITED, encoding="utf-8")
    found = json.loads(called(capsys, "solve", "limited.plan", "--json", "--in-place")[1])
    written = LIMITED.replace("auto on tp", "standard on tp (sequence, loss_parallel)")
    Path("standard.plan").write_text(written, encoding="utf-8")
    command = [sys.executable, "-m", "legoai", "cost", "standard.plan", "--json"]
    usual = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["status"] == "bounded"
    assert found["objective"]["value"] <= usual["step_time_s"]
    assert called(capsys, "lint", "limited.plan")[0] == 0


BASE = OPEN.replace("plan small", "plan base").replace("auto in [2, 4]", "2").replace("auto in [none, full] -> ", "")
CHILD = 'plan child\nextends "base.plan"\ncheckpoint { layers.* = auto in [none, full] }\n'
FACTORY = OPEN.replace('llama3("tiny", n_layers = 1)', 'python("factory_beside:build")').replace("layers.", "blocks.")


@pytest.mark.parametrize(
    ("text", "there"),
    [(CHILD, {}), (CHILD, {"base.plan": BASE.replace("micro = 2", "micro = 4")}), (FACTORY, {})],
    ids=["no base", "another base", "no factory"],
)
def test_solution_in_a_folder_where_the_plan_is_another_is_refused_before_the_search(
    text: str, there: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    Path("base.plan").write_text(BASE, encoding="utf-8")
    Path("factory_beside.py").write_text("from support.models.factories import build\n", encoding="utf-8")
    Path("one.plan").write_text(text, encoding="utf-8")
    Path("elsewhere").mkdir()
    for name, content in there.items():
        Path("elsewhere", name).write_text(content, encoding="utf-8")
    monkeypatch.setattr(solve_command, "_solved", lambda *_: pytest.fail("it is searched"))
    status, _, err = called(capsys, "solve", "one.plan", "-o", "elsewhere/two.plan")
    assert status == 2
    assert "elsewhere/two.plan would not be the same plan" in err
