"""Rows of published runs become plans that say what their frameworks do, and comparisons count what they should."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from legoai.dsl.lint import lint

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.validation import __main__ as command
from benchmarks.validation import predict
from benchmarks.validation.predict import Prediction, shortened
from benchmarks.validation.rows import Row, UnstatedError, read
from benchmarks.validation.score import compare, errors, measured, out_of_memory
from benchmarks.validation.sources import SOURCES, nanotron
from benchmarks.validation.statements import Stated

# A small Llama, so that linting has one model to look at.
LLAMA = {
    "model": "Llama-3", "n_layers": "4", "hidden": "256", "n_heads": "8", "n_kv_heads": "8", "ffn_hidden": "512",
    "vocab": "1024", "seq_len": "128", "gpus_per_node": "8",
}  # fmt: skip
GPT = {**LLAMA, "model": "GPT", "arch": "GPT"}
TORCHTITAN = {
    **LLAMA, "gpu": "H100-96GB-HBM2e", "n_gpus": "8", "dp_shard": "8", "ac_mode": "selective_op", "precision": "bf16",
    "compile": "0", "micro_batch": "2", "global_batch": "16", "iter_time_s": "2.0", "mem_peak": "80.0",
    "mem_kind": "reserved", "status": "ok",
}  # fmt: skip
NANOTRON = {
    **LLAMA, "arch": "Llama, untied embeddings", "gpu": "H100-80GB", "n_gpus": "16", "dp_replicate": "4", "tp": "2",
    "pp": "2", "zero_stage": "1", "micro_batch": "2", "global_batch": "64", "mem_peak": "20", "mem_kind": "allocated",
    "status": "ok", "notes": "time_tier=A",
}  # fmt: skip
VTRAIN = {
    **GPT, "gpu": "A100", "n_gpus": "8", "dp_replicate": "2", "tp": "2", "pp": "2", "micro_batch": "2",
    "global_batch": "16", "ac_mode": "full", "iter_time_s": "0.2", "notes": "single-node",
}  # fmt: skip
MOSAICML = {
    **GPT, "gpu": "A100-80GB", "gpu_mem_gb": "80", "n_gpus": "16", "interconnect": "1600 Gbps/node RoCE",
    "dp_shard": "16", "zero_stage": "3", "ac_mode": "full", "precision": "amp_bf16", "micro_batch": "2",
    "global_batch": "64",
}  # fmt: skip
SIMUMAX = {
    **LLAMA, "arch": "Llama decoder", "gpu": "B200", "n_gpus": "8", "dp_replicate": "2", "tp": "4", "pp": "1",
    "micro_batch": "1", "global_batch": "8", "mem_peak": "39", "mem_kind": "max_allocated",
}  # fmt: skip
SEED = {"model": "Llama 3.1 8B", "gpus": "8", "ac": "selective", "local_batch": "2"}


def convert(source: str, fields: dict[str, str], device: str | None = None) -> Stated:
    return SOURCES[source].convert(Row("row-1", fields), device)


def findings(stated: Stated) -> list[str]:
    linted = lint(stated.text, "row.plan", directory=Path(), variants=False)
    return [f"{item.code} {item.message}" for item in linted.diagnostics if item.severity != "advice"]


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        ("torchtitan", TORCHTITAN),
        ("torchtitan", {**TORCHTITAN, "tp": "2", "dp_shard": "4", "global_batch": "8", "ac_mode": "full"}),
        ("torchtitan", {**TORCHTITAN, "cp": "2", "dp_shard": "4", "compile": "1", "global_batch": "8"}),
        (
            "torchtitan",
            {**TORCHTITAN, "pp": "2", "dp_shard": "4", "micro_batch": "4", "pp_schedule": "1F1B", "ac_mode": "full"},
        ),
        ("nanotron", {**NANOTRON, "pp": "1", "dp_replicate": "8"}),
        ("nanotron", {**NANOTRON, "pp": "1", "dp_replicate": "8", "zero_stage": "0"}),
        ("nanotron", {**NANOTRON, "dp_replicate": "1", "tp": "8"}),
        ("nanotron", NANOTRON),
        ("simumax", SIMUMAX),
        ("simumax", {**SIMUMAX, "dp_replicate": "1", "tp": "8"}),
        ("simumax", {**SIMUMAX, "tp": "2", "pp": "2"}),
        ("simumax", {**SIMUMAX, "dp_replicate": "1", "tp": "2", "cp": "4"}),
    ],
)
def test_a_row_of_a_llama_is_a_plan_without_findings(source, fields):
    assert findings(convert(source, fields)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "fields"),
    [
        ("vtrain", VTRAIN),
        ("vtrain", {**VTRAIN, "pp": "1", "dp_replicate": "4"}),
        ("vtrain", {**VTRAIN, "pp": "1", "dp_replicate": "1", "n_gpus": "2"}),
        ("mosaicml", MOSAICML),
        ("mosaicml", {**MOSAICML, "precision": "bf16 / FSDP mixed_precision=PURE", "zero_stage": "2"}),
        ("torchtitan_throughput", {**SEED, "fsdp": "8", "precision": "mixed", "compile": "no"}),
        ("simplefsdp", {**SEED, "metric": "peak_memory", "system": "FSDP2-eager", "batch_size": "1", "ac": "None"}),
        ("memory_distributed", {**SEED, "gpus": "16", "gpus_per_node": "4", "seq_len": "256", "batch": "2"}),
        (
            "runtime_distributed",
            {**SEED, "gpus": "16", "gpus_per_node": "4", "seq_len": "256", "parallelism": "2D FSDP+TP"},
        ),
    ],
)
def test_a_row_of_another_model_is_a_plan_without_findings(source, fields):
    assert findings(convert(source, fields)) == []


def test_nanotron_shards_only_what_zero_1_shards():
    text = convert("nanotron", {**NANOTRON, "pp": "1", "dp_replicate": "8"}).text
    assert "reshard = never" in text
    assert "comm (reduce = last_micro_batch)" in text
    assert "replicate on dp_replicate" in convert("nanotron", {**NANOTRON, "zero_stage": "0"}).text


def test_nanotron_gives_blocks_to_pipeline_ranks_by_their_cost():
    """The published example of the framework's documentation: Llama 3 8B on 8 ranks, 5 blocks on the first."""
    row = Row("r", {"n_layers": "32", "hidden": "4096", "ffn_hidden": "14336", "vocab": "128256", "pp": "8"})
    ranks = nanotron.stage_of_blocks(row, 8)
    blocks = [ranks[1:-2].count(rank) for rank in range(8)]
    assert blocks[:2] == [5, 4]
    assert sum(blocks) == 32
    assert nanotron.stage_starts(row)[0] == "layers.5"


def test_nanotron_refuses_pipelines_in_which_a_rank_gets_nothing():
    with pytest.raises(UnstatedError, match="do not give each of 64 pipeline ranks one"):
        convert("nanotron", {**NANOTRON, "pp": "64"})


def test_the_reducers_buckets_of_nanotron_are_two_bytes_for_each_parameter_of_the_rank():
    stated = convert("nanotron", {**NANOTRON, "pp": "1", "tp": "1"})
    block = 4 * 256 * 256 + 3 * 256 * 512
    assert sum(stated.beside.values()) == 2 * (4 * block + 2 * 1024 * 256)
    assert stated.rank == 0


def test_early_runs_of_torchtitan_held_the_logits_and_a_buffer_of_another_stream():
    early = convert("torchtitan", {**TORCHTITAN, "date": "2024-04"})
    assert sum(early.beside.values()) == 4 * 2 * 128 * 1024
    assert sum(early.beside_reserved.values()) == 4 * 2 * 1024 * 256
    late = convert("torchtitan", {**TORCHTITAN, "date": "2024-12"})
    assert not late.beside
    assert not late.beside_reserved
    said = Prediction(active=(100,), reserved=(200,), capacity=10**12)
    active = compare(Row("r", {"mem_peak": "1", "mem_kind": "active"}), early, said).memory
    reserved = compare(Row("r", {"mem_peak": "1", "mem_kind": "reserved"}), early, said).memory
    assert active is not None
    assert reserved is not None
    assert reserved[1] - active[1] == 100 + 4 * 2 * 1024 * 256


@pytest.mark.parametrize(
    ("source", "fields", "reason"),
    [
        ("torchtitan", {**TORCHTITAN, "seq_len": ""}, "`seq_len` is not stated"),
        ("torchtitan", {**TORCHTITAN, "ac_mode": "odd"}, "checkpointing is odd"),
        ("torchtitan", {**TORCHTITAN, "gpu": "MI300X"}, "no device of the catalogue is a MI300X"),
        ("torchtitan", {**TORCHTITAN, "micro_batch": "two"}, "`micro_batch` is no whole number: two"),
        ("simumax", {**SIMUMAX, "arch": "MLA MoE"}, "multi-head latent attention"),
        ("simplefsdp", {"metric": "peak_memory", "system": "SimpleFSDP"}, "traced graph"),
        ("simplefsdp", {"metric": "count"}, "no figure of one run"),
    ],
)
def test_what_no_plan_can_say_is_refused_with_the_reason(source, fields, reason):
    with pytest.raises(UnstatedError, match=reason):
        convert(source, fields)


def test_a_device_may_be_named_in_place_of_the_rows_own():
    assert "cluster h200" in convert("torchtitan", TORCHTITAN, "h200").text
    assert "cluster h100_sxm96" in convert("torchtitan", TORCHTITAN).text


def test_remarks_are_no_rows_and_suspect_rows_are_known(tmp_path):
    path = tmp_path / "some.csv"
    path.write_text('# a remark\nid,model,notes\na,Llama,\nb,Llama,"SUSPECT: two digits"\n')
    rows = read(path)
    assert [row.id for row in rows] == ["a", "b"]
    assert [row.dropped for row in rows] == [None, "SUSPECT"]
    path.write_text("# nothing\n")
    with pytest.raises(UnstatedError, match="has no rows"):
        read(path)


def test_measurements_are_read_from_the_columns_of_every_source():
    assert measured(Row("r", {"iter_time_s": "2.5", "mem_peak": "4", "mem_kind": "reserved"})) == (
        2.5, 4 * 2**30, "reserved",
    )  # fmt: skip
    assert measured(Row("r", {"actual_ms": "1500", "actual_gib": ""})) == (1.5, None, "active")
    row = Row("r", {"tok_s_per_gpu": "6,258", "gpus": "8", "global_batch": "16", "memory_gib": "81.9"})
    assert measured(row)[0] == pytest.approx(16 * 8192 / (6258 * 8))
    assert measured(row)[2] == "reserved"


def test_errors_are_relative_to_what_was_measured():
    known = errors([("a", (10.0, 12.0)), ("b", (10.0, 9.0)), ("c", (10.0, 10.0))])
    assert known is not None
    assert (known.rows, known.worst_id) == (3, "a")
    assert (known.mean, known.median, known.worst, known.bias) == pytest.approx((0.1, 0.1, 0.2, 0.1 / 3))
    assert errors([]) is None


def test_what_does_not_fit_is_counted_as_a_classifier_counts():
    gib = 2**30

    def compared(status: str, reserved: float, refused: str = ""):
        said = Prediction(reserved=(int(reserved * gib),), capacity=80 * gib, outside=gib, refused=refused)
        return compare(Row("r", {"status": status}), Stated(text="", beside={"more": 2.0 * gib}), said)

    found = [
        compared("ok", 40), compared("ok", 78), compared("failed", 90), compared("failed", 20),
        compared("failed", 0, "lint: LP704 the model cannot be trained on this mesh"),
    ]  # fmt: skip
    counted = out_of_memory(found)
    assert counted["ran and said not to fit"] == 1
    assert counted["precision"] == pytest.approx(2 / 3)
    assert counted["recall"] == pytest.approx(2 / 3)


def test_a_plan_with_many_micro_batches_is_shortened_and_a_pipeline_is_not():
    stated = convert("nanotron", {**NANOTRON, "pp": "1", "dp_replicate": "8", "global_batch": "256"})
    plan = lint(stated.text, "row.plan", directory=Path(), variants=False).plan
    assert plan is not None
    short = shortened(stated.text, plan)
    assert short is not None
    assert short[1] == 16
    assert "global = 80, micro = 2" in short[0]
    staged = convert("nanotron", {**NANOTRON, "global_batch": "256"})
    plan = lint(staged.text, "row.plan", directory=Path(), variants=False).plan
    assert plan is not None
    assert shortened(staged.text, plan) is None


def test_the_command_writes_results_and_keeps_them(tmp_path, monkeypatch, capsys):
    path = tmp_path / "runs.csv"
    rows = [TORCHTITAN, {**TORCHTITAN, "ac_mode": "odd"}, {**TORCHTITAN, "notes": "DUPLICATE"}]
    names = ["id", *TORCHTITAN, "notes"]
    lines = [",".join([f"row-{index}", *(row.get(name, "") for name in names[1:])]) for index, row in enumerate(rows)]
    path.write_text("\n".join([",".join(names), *lines]) + "\n")
    calls = []

    def answer(stated, **_):
        calls.append(stated)
        return Prediction(seconds=2.2, active=(70 * 2**30,), reserved=(76 * 2**30,), capacity=95 * 2**30)

    monkeypatch.setattr(command, "predict", answer)
    arguments = [str(tmp_path), "--source", "torchtitan", "--file", str(path), "-o", str(tmp_path / "out.json")]
    assert command.main(arguments) == 0
    assert command.main([*arguments, "--resume"]) == 0
    assert len(calls) == 1
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["dropped"] == {"DUPLICATE": 1}
    assert document["summary"]["step time"]["all"]["mean"] == pytest.approx(0.1)
    assert document["summary"]["memory"]["all reserved"]["bias"] == pytest.approx(-0.05)
    assert "| step time, all | 1 | 10.0% |" in capsys.readouterr().out
    assert document["results"][0]["plan"].startswith("# Llama-3")


def test_a_missing_file_is_said_and_not_raised(tmp_path, capsys):
    assert command.main([str(tmp_path), "--source", "vtrain"]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_shortened_step_takes_as_long_as_the_whole_one(monkeypatch):
    stated = convert("nanotron", {**NANOTRON, "pp": "1", "dp_replicate": "8", "global_batch": "128"})
    short = predict.predict(stated)
    monkeypatch.setattr(predict, "_SHORT", 99)
    whole = predict.predict(stated)
    assert not short.refused
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert short.active == whole.active
