"""Output forms of an estimate: documented JSON, Chrome trace, self-contained page, and the plan lines behind them."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from legoai.cost.words import CATEGORIES
from support import ROOT
from support.simulation.reports import everything
from support.simulation.simulator import in_the_simulator

PLAN = """plan reported  # </script><b>

model   llama3("tiny")
cluster h100_sxm
batch   (global = 32, micro = 2, seq_len = 128)
mesh    (dp_shard = 4, tp = 2)

shard on tp {
  layers.*.attention.{wq, wk, wv} = colwise
  layers.*.attention.wo           = rowwise
  layers.*.feed_forward.{w1, w3}  = colwise
  layers.*.feed_forward.w2        = rowwise
}

fsdp on dp_shard {
  layers.* = unit
  root     = unit
}

checkpoint { layers.* = full }
attention  flash
optimizer  adamw(lr = 3e-4)
clip       (norm = 1.0)

require peak_memory <= 2500KiB
require mfu >= 90%
require exposed_comm <= 0.1%
require recompute <= 0.1%
require step_time <= 10min
"""

PIPELINE = """plan staged

model   llama3("tiny")
cluster h100_sxm
batch   (global = 64, micro = 1, seq_len = 128)
mesh    (pp = 2, dp_shard = 2)
fsdp on dp_shard { layers.* = unit(reshard = after_backward) }
pipeline on pp (schedule = 1F1B)

require bubble <= 1%
"""


def line_of(text: str, plan: str = PLAN) -> int:
    return next(number for number, line in enumerate(plan.split("\n"), 1) if line.startswith(text))


@pytest.fixture(scope="module")
def reported() -> dict:
    return in_the_simulator(everything, PLAN)


@pytest.fixture(scope="module")
def staged() -> dict:
    return in_the_simulator(everything, PIPELINE, "<!--<script>.plan")


# JSON


def test_costs_by_line_sum_to_the_step(reported: dict):
    """Kernels, exposed communication and memory are shared out among lines; nothing counts twice."""
    lines, document = reported["lines"], reported["document"]
    assert [item["line"] for item in lines] == sorted({item["line"] for item in lines})
    kernels = sum(item["compute_s"] + item["recompute_s"] for item in lines)
    assert kernels == pytest.approx(document["compute_s"])
    assert sum(item["recompute_s"] for item in lines) == pytest.approx(document["recompute_s"])
    assert sum(item["exposed_s"] for item in lines) == pytest.approx(document["exposed_communication_s"])
    memory: dict[str, int] = {}
    for item in lines:
        for category, size in item["memory_bytes"].items():
            memory[category] = memory.get(category, 0) + size
    assert memory == document["memory"]["by_category"]
    assert all(item["text"] and item["file"] == "reported.plan" for item in lines)
    requirement = document["requirements"][0]
    of_requirement = next(item for item in lines if item["line"] == requirement["line"])
    assert of_requirement["text"].endswith(", violated") is not requirement["ok"]
    assert reported["summary"].startswith(reported["terminal"].partition("step time")[2].split("  ")[2].strip())


def test_images_are_not_called_tokens(reported: dict):
    pictures = 'plan a\nmodel vit("tiny")\ncluster h100_sxm(devices = 1)\nbatch (global = 2, micro = 2)\n'
    for found, unit in ((in_the_simulator(everything, pictures), "samples"), (reported, "tokens")):
        shown = found["page"].partition("<h2")[0]
        assert f" {unit}/s/device" in found["terminal"]
        assert f"{unit} per second and device" in shown
        assert ("10^12 tokens" in found["terminal"]) is ("10¹² tokens" in shown) is (unit == "tokens")
        assert "tokens_per_s_per_device" in found["document"]


def test_document_has_the_promised_fields(reported: dict):
    document = reported["document"]
    assert document["format_version"] == 2
    assert document["plan"]["name"] == "reported" and document["plan"]["hash"].startswith("sha256:")
    for name in ("step_time_s", "tokens_per_s_per_device", "mfu", "exposed_communication_s", "recompute_s"):
        assert document[name] > 0
    assert document["bubble_fraction"] == 0
    shares = [item["share"] for item in document["exposed_communication_by_axis"].values()]
    assert sum(shares) == pytest.approx(1)
    memory = document["memory"]
    assert memory["peak_active_bytes"] == sum(memory["by_category"].values()) <= memory["peak_reserved_bytes"]
    assert [item["rank"] for item in memory["by_rank"]] == [0]


def test_modules_hold_the_memory_of_the_peak(reported: dict):
    memory, text, html = reported["document"]["memory"], reported["terminal"], reported["page"]
    rows = memory["by_module"]
    assert len(rows) < 20  # all of them are listed
    assert sum(row["bytes"] for row in rows) == memory["peak_active_bytes"]
    assert [row["bytes"] for row in rows] == sorted((row["bytes"] for row in rows), reverse=True)
    categories: Counter[str] = Counter()
    for row in rows:
        assert sum(row["by_category"].values()) == row["bytes"] and len(row["causes"]) == len(row["by_category"])
        categories.update(row["by_category"])
    assert categories == memory["by_category"]
    [layer] = [row for row in rows if row["module"] == "layers.*"]
    assert layer["modules"] > 1 and {"unsharded_parameter", "sharded_gradient"} <= layer["by_category"].keys()
    block = text.partition("modules with the most memory at the peak\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in block] == [row["module"] or "root" for row in rows[:5]]
    assert "<h2>Modules with the most memory at the peak</h2>" in html


def test_categories_name_the_line_that_causes_most_of_them(reported: dict):
    """Of parameters and gradients this is the line of the layers, and not that of the root."""
    text, html = (
        reported["terminal"].partition("memory of rank 0\n")[2].partition("\n\n")[0],
        reported["page"].partition("<h2>Memory at the peak")[2].partition("</table>")[0],
    )
    for category in ("unsharded_parameter", "sharded_parameter", "sharded_gradient"):
        sizes = {item["line"]: size for item in reported["lines"] if (size := item["memory_bytes"].get(category))}
        most = max(sizes, key=lambda line: sizes[line])
        assert len(sizes) == 2 and most == line_of("  layers.* = unit")
        [row] = [line for line in text.splitlines() if line.startswith(f"    {CATEGORIES[category]}")]
        [cells] = [line for line in html.split("<tr>") if f">{CATEGORIES[category]}</td>" in line]
        assert row.endswith(f"reported.plan:{most}") and f'"#reported.plan:{most}"' in cells


def test_operators_of_checkpointed_modules_are_saved_or_recomputed(reported: dict):
    document = reported["document"]
    saved, recomputed = document["memory"]["saved"], document["recomputed"]
    assert saved, "full checkpointing saves the inputs of blocks"
    assert {row["cause"]["line"] for row in (*saved, *recomputed)} == {line_of("checkpoint")}
    assert not any(row["operator"] == "aten.mm" for row in saved)
    products = [row for row in recomputed if row["operator"] == "aten.mm"]
    # Of a block under full checkpointing nothing behind the last product's input is needed again.
    assert {row["module"].rpartition(".")[2] for row in products} == {"wq", "wk", "wv", "wo", "w1", "w3"}
    assert all(row["calls"] == row["forward_calls"] for row in products)
    assert [row["seconds"] for row in recomputed] == sorted((row["seconds"] for row in recomputed), reverse=True)
    of_modules = {row["module"]: row["recompute_s"] for row in document["modules"]}
    for row in recomputed:
        assert 0 < row["seconds"] <= of_modules[row["module"]] * (1 + 1e-9)


def test_selective_checkpointing_saves_the_operators_that_it_names():
    kept = 'selective([matmul, attention, "aten.mul.Tensor", "aten.addmm", "aten.view"])'
    found = in_the_simulator(everything, PLAN.replace("layers.* = full", f"layers.* = {kept}"))
    document = found["document"]
    saved, recomputed = document["memory"]["saved"], document["recomputed"]
    tokens, width, hidden = 2 * 128, 128, 384  # of a micro batch, and of `llama3("tiny")`
    sizes = {row["module"].rpartition(".")[2]: row for row in saved if row["operator"] == "aten.mm"}
    assert set(sizes) == {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}
    # The last block's backward has begun at the peak, and freed a part of what the block saved.
    for name, columns in {"w1": hidden // 2, "w3": hidden // 2, "wq": width // 2, "wo": width, "w2": width}.items():
        assert sizes[name]["modules"] in {3, 4}
        assert sizes[name]["bytes"] == sizes[name]["modules"] * tokens * columns * 2, name  # two bytes each
    assert recomputed and not any(row["operator"] == "aten.mm" for row in recomputed)
    assert not any("attention" in row["operator"] for row in recomputed)
    [unused] = found["never called"]
    assert (unused.code, unused.severity, unused.label.span.line) == ("LP838", "warning", line_of("checkpoint"))
    assert unused.message == "`aten.addmm` keeps nothing: no module of `layers.*` calls it"
    for title, rows in (
        ("most memory of saved outputs at the peak", saved),
        ("most expensive recomputation", recomputed),
    ):
        block = found["terminal"].partition(f"{title}\n")[2].partition("\n\n")[0].splitlines()
        assert [line.split()[0] for line in block] == [row["module"] for row in rows[:5]]
        assert f"<h2>{title.capitalize()}</h2>" in found["page"]


@pytest.mark.slow
def test_plans_without_checkpointing_have_no_tables_of_it(staged: dict):
    assert staged["never called"] == []
    assert staged["document"]["memory"]["saved"] == staged["document"]["recomputed"] == []
    assert "saved outputs" not in staged["terminal"] + staged["page"]
    assert "most expensive recomputation" not in staged["terminal"]


def test_every_document_field_is_documented(reported: dict):
    manual = (ROOT / "docs" / "cost-output.md").read_text(encoding="utf-8")
    named = {part for span in re.findall(r"`([^`]+)`", manual) for part in span.split(".")}
    document = reported["document"]
    lists = (document[name][0] for name in ("modules", "recomputed", "collectives", "requirements"))
    memory = document["memory"]
    nested = [memory, memory["by_rank"][0], memory["by_module"][0], memory["saved"][0]]
    nested += [*map(document.get, ("cluster", "profile", "plan")), *lists]
    assert {name for part in (document, *nested) for name in part} - named == set()


def test_requirements_are_listed_with_their_lines(reported: dict):
    found = {item["metric"]: (item["ok"], item["line"]) for item in reported["document"]["requirements"]}
    assert found["peak_memory"] == (False, line_of("require peak_memory"))
    assert found["step_time"] == (True, line_of("require step_time"))


# Causes


def test_collectives_name_their_line(reported: dict):
    found = {
        (item["axis"], item["kind"], item["module"]): (item["cause"] or {}).get("line")
        for item in reported["document"]["collectives"]
    }
    assert found["dp_shard", "all_gather", "layers.*"] == line_of("  layers.* = unit")
    assert found["dp_shard", "all_gather", ""] == line_of("  root     = unit")
    tensor = {line for (axis, _, _), line in found.items() if axis == "tp"}
    assert tensor <= set(range(line_of("shard on tp"), line_of("  layers.*.feed_forward.w2") + 1))


def test_modules_name_their_lines(reported: dict):
    found = {item["module"]: [cause["line"] for cause in item["causes"]] for item in reported["document"]["modules"]}
    again = line_of("checkpoint")
    assert found["layers.*.attention"][-1] == again
    assert found["layers.*.feed_forward.w1"] == [line_of("  layers.*.feed_forward.{w1, w3}"), again]
    assert found["output"] == [line_of("model")]
    assert reported["attention"] == f"reported.plan:{line_of('attention')}"


# Budgets


def test_violated_requirement_names_line_excess_and_main_cause(reported: dict):
    found = {item.label.span.line: item for item in reported["violations"]}
    assert {item.code for item in found.values()} == {"LP711"}
    lines = {metric: line_of(f"require {metric}") for metric in ("peak_memory", "mfu", "exposed_comm", "recompute")}
    assert set(found) == set(lines.values())
    memory = found[lines["peak_memory"]]
    assert re.fullmatch(
        r"`peak_memory` is [\d.]+ MiB, [\d.]+ [MK]iB more than the 2.44 MiB of the budget", memory.message
    )
    assert memory.others and "largest contributor: " in memory.help[0]
    assert "less than the 90.0% of the budget" in found[lines["mfu"]].message
    assert found[lines["recompute"]].others[0].span.line == line_of("checkpoint")
    assert found[lines["exposed_comm"]].others[0].text.endswith("exposed")


def test_largest_contributor_to_speed_may_be_no_module(reported: dict):
    found = reported["contributors"]
    assert all(len(set(names)) == 1 for names in found.values())
    assert found["host is slow"][0] == "waiting for the host to launch, 1.00 s"
    assert found["other stages"][0] == "pipeline bubble, 1.00 s"
    assert found["copies"][0] == "exposed copies to and from the host, 1.00 s"
    assert found["offloaded"][0] == "computation on the host, 1.00 s"
    assert found["communication"][0].endswith("exposed")
    assert found["module"][0].endswith(", 1.50 s")


def test_out_of_memory_is_reported_at_the_cluster(reported: dict):
    found = reported["short of memory"]
    assert (found.code, found.label.span.line) == ("LP712", line_of("cluster"))
    assert re.fullmatch(
        r"rank 0 needs [\d.]+ MiB and [\d.]+ GiB outside of PyTorch, and `h100_sxm` has 1.00 GiB", found.message
    )


def test_out_of_memory_names_the_rank_that_is_short_of_most(reported: dict):
    one, both = reported["short of memory"], reported["short of memory on two ranks"]
    assert both.message.startswith("rank 1 needs") and both.label.text != one.label.text
    assert both.help[0].startswith("largest contributor: activations, 1.50 GiB")


def test_expandable_segments_are_advised_if_active_memory_fits(reported: dict):
    found = reported["segments"]
    assert [len(found[case]) for case in ("active fits", "active does not", "they grow", "all fits")] == [1, 0, 0, 0]
    assert "allocator (expandable_segments = true)" in found["active fits"][0]


@pytest.mark.slow
def test_full_recomputation_with_free_memory_gets_advice(reported: dict, staged: dict):
    found = reported["advice"]
    assert {case: len(items) for case, items in found.items()} == {"free": 1, "filled": 0, "cheap": 0, "unknown": 0}
    (item,) = found["free"]
    assert (item.code, item.severity, item.label.span.line) == ("LP828", "advice", line_of("checkpoint"))
    assert item.message == "20.0% of the step is recomputation, and the fullest rank leaves 50.0 GiB of 80.0 GiB free"
    assert "`layers.* = selective([attention, matmul])`" in item.help[0]
    assert not any(staged["advice"].values())  # nothing is recomputed there


# Chrome trace


def test_trace_has_a_track_per_stream_and_each_operation_once(reported: dict):
    events = reported["trace"]["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    operations = [event for event in events if event["ph"] == "X"]
    assert len(operations) == reported["intervals"][0]
    assert {event["tid"] for event in operations} == set(names)
    assert {"communicator dp_shard", "communicator tp"} <= set(names.values())
    for tid in names:
        ends = 0.0
        for event in sorted((e for e in operations if e["tid"] == tid), key=lambda e: e["ts"]):
            assert event["ts"] >= ends - 0.01  # a queue does one thing at a time; times are rounded to a nanosecond
            ends = event["ts"] + event["dur"]
    assert any(event["args"]["plan"] == f"reported.plan:{line_of('  layers.* = unit')}" for event in operations)


# Memory over time


def test_memory_curve_reaches_the_peak_by_category(reported: dict):
    times = [at for at, _, _ in reported["curve"]]
    assert times == sorted(times)
    highest = max(reported["curve"], key=lambda point: point[1])
    assert highest[1] == reported["peak"]
    assert {name: size for name, size in highest[2].items() if size} == reported["peak categories"]


@pytest.mark.slow
def test_thinned_memory_curve_keeps_the_peak(reported: dict, staged: dict):
    for found in (reported, staged):
        assert len(found["short curve"]) <= 50 + 3
        assert max(point.total for point in found["short curve"]) == found["peak"]
        assert found["short curve"][-1].total == found["curve"][-1][1]


def test_memory_curve_reads_each_segment_once(staged: dict):
    # About two calls for each record that the trace stands for. Renumbering one by one took forty.
    assert staged["calls of a curve"] < 4 * staged["records"]


# Page and pictures


def test_number_of_bars_is_bounded(reported: dict, staged: dict):
    for found in (reported, staged):
        tracks = found["few bars"]
        assert found["intervals"][0] > 10 * 20
        assert sum(map(len, tracks)) <= 20 + len(tracks)
        for bars in tracks:
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(bars))


def test_page_is_self_contained_and_links_to_plan_lines(reported: dict):
    text = reported["page"]
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", text) and "url(" not in text and "@import" not in text
    targets = set(re.findall(r'href="#([^"]+)"', text))
    assert targets and targets <= set(re.findall(r'id="([^"]+)"', text))
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    bars = sum(len(track["bars"]) for track in data["ranks"][0]["tracks"])
    assert bars == 7 * reported["intervals"][0]
    assert max(data["ranks"][0]["memory"]["total"]) == reported["peak"]


def test_plan_text_is_escaped(reported: dict):
    assert "</script><b>" not in reported["page"] and "&lt;/script&gt;&lt;b&gt;" in reported["page"]


def test_names_of_files_leave_the_data_of_a_page_whole(staged: dict):
    """`<!--<script` in a script makes a parser look for another end of it (WHATWG HTML, section 4.12.1.3)."""
    [text] = re.findall(r'id="data">(.*?)</script>', staged["page"], re.DOTALL)
    assert "<" not in text
    assert f"<!--<script>.plan:{line_of('fsdp', PIPELINE)}" in json.loads(text)["texts"]


@pytest.mark.parametrize("name", ["mesh", "timeline"])
def test_figures_are_svg(reported: dict, name: str):
    root = ElementTree.fromstring(reported[name])
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) > 8


def test_mesh_figure_lists_the_ranks_of_each_axis(reported: dict):
    assert "dp_shard = 4: rank 0 is joined with 0, 2, 4, 6, on one host" in reported["mesh"]
    assert "tp = 2: rank 0 is joined with 0, 1, on one host" in reported["mesh"]


def test_terminal_output_has_figures_and_lines(reported: dict):
    text = reported["terminal"]
    assert f"reported.plan:{line_of('checkpoint')}" in text
    for words in (
        "step time",
        "recomputation (included)",
        "recomputed",
        "CUDA context",
        "exposed communication",
        "peak active",
        "fits",
        "violated",
        "time models",
    ):
        assert words in text
    assert max(map(len, text.split("\n"))) <= 160


def test_pipeline_is_reported_by_rank_and_micro_batch(staged: dict):
    document = staged["document"]
    assert [(item["rank"], item["stage"]) for item in document["memory"]["by_rank"]] == [(0, 0), (2, 1)]
    assert 0 < document["bubble_fraction"] < 1
    micro_batches = 64 // 2
    assert all(count >= 2 * micro_batches for count in staged["actions"])
    titles = re.findall(r"<title>(\d)([FB])(\d+): ", staged["pipeline"])
    assert len(titles) == 2 * 2 * micro_batches
    assert {event["pid"] for event in staged["trace"]["traceEvents"]} == {0, 2}
    diagnostic = staged["violations"][0]
    assert diagnostic.label.span.line == line_of("require bubble", PIPELINE)
    assert diagnostic.others[0].span.line == line_of("pipeline on", PIPELINE)
