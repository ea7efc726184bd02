"""Plans for rows of published runs, and their predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.validation import __main__ as command
from benchmarks.validation import predict
from benchmarks.validation.predict import Prediction, shortened
from benchmarks.validation.rows import Row, UnstatedError, read
from benchmarks.validation.score import compare
from benchmarks.validation.sources import SOURCES, nanotron
from benchmarks.validation.statements import Stated

from legoai.dsl.lint import lint

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
LATENT = {
    **SIMUMAX, "model": "deepseekv2-4L", "arch": "DeepSeek-V2 MLA MoE 160 experts, 1 dense layer", "n_layers": "4",
    "hidden": "5120", "n_heads": "128", "n_kv_heads": "128", "ffn_hidden": "12288", "vocab": "102400", "tp": "1",
    "dp_replicate": "8", "ep": "8", "global_batch": "32",
}  # fmt: skip
SINGLE = {"model": "LLAMA_1B", "batch": "4", "seq_or_img": "64", "precision": "HP", "ac": "Yes", "actual_gib": "24.99"}
SEED = {"model": "Llama 3.1 8B", "gpus": "8", "ac": "selective", "local_batch": "2"}
SIMPLEFSDP = {
    "table": "5", "model": "Llama 3.1 8B", "gpus": "64", "batch_size": "1", "ac": "", "mode": "compile",
    "system": "SimpleFSDP", "setting": "vanilla", "metric": "peak_memory", "value": "56.42",
}  # fmt: skip


def convert(source: str, fields: dict[str, str], device: str | None = None) -> Stated:
    return SOURCES[source].convert(Row("row-1", fields), device)


def diagnostics(stated: Stated) -> list[str]:
    """Diagnostics of a row's plan, except for the uneven split of its framework, and for what dropout drops.

    Neither which blocks a stage has nor which elements are dropped (LP440) is a row's to decide.
    """
    linted = lint(stated.text, "row.plan", directory=Path(), variants=False)
    found = (item for item in linted.diagnostics if item.severity != "advice" and item.code not in {"LP440", "LP829"})
    return [f"{item.code} {item.message}" for item in found]


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
        ("torchtitan_2025", {**TORCHTITAN, "model": "Qwen3", "head_dim": "32", "date": "2025-09", "ac_mode": "full"}),
        (
            "torchtitan_2025",
            {**TORCHTITAN, "model": "Qwen3", "head_dim": "32", "tp": "2", "dp_shard": "4", "global_batch": "8"},
        ),
        ("nanotron", {**NANOTRON, "pp": "1", "dp_replicate": "8"}),
        ("nanotron", {**NANOTRON, "pp": "1", "dp_replicate": "8", "zero_stage": "0"}),
        ("nanotron", {**NANOTRON, "dp_replicate": "1", "tp": "8"}),
        ("nanotron", NANOTRON),
        ("simumax", SIMUMAX),
        ("simumax", {**SIMUMAX, "dp_replicate": "1", "tp": "8"}),
        ("simumax", {**SIMUMAX, "tp": "2", "pp": "2"}),
        ("simumax", {**SIMUMAX, "dp_replicate": "1", "tp": "2", "cp": "4"}),
        ("simumax", LATENT),
        ("simumax", {**LATENT, "pp": "2", "dp_replicate": "4", "ep": "4"}),
        ("simumax", {**LATENT, "tp": "2", "dp_replicate": "4", "ep": "8"}),
        ("simumax", {**LATENT, "pp": "2", "tp": "2", "dp_replicate": "2", "ep": "4"}),
        ("simumax", {**LATENT, "tp": "4", "dp_replicate": "2", "ep": "1"}),
    ],
)
def test_llama_row_gives_a_clean_plan(source, fields):
    stated = convert(source, fields)
    assert diagnostics(stated) == []
    if stated.for_memory:
        assert diagnostics(Stated(text=stated.for_memory)) == []


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
        ("simplefsdp", SIMPLEFSDP),
        ("simplefsdp", {**SIMPLEFSDP, "mode": "eager", "setting": "", "ac": "Full"}),
        ("memory_distributed", {**SEED, "gpus": "16", "gpus_per_node": "4", "seq_len": "256", "batch": "2"}),
        (
            "runtime_distributed",
            {**SEED, "gpus": "16", "gpus_per_node": "4", "seq_len": "256", "parallelism": "2D FSDP+TP"},
        ),
        ("fsdp_paper", {"metric": "tflops_per_gpu", "batch_size": "2", "seq_len": "2048"}),
        *(
            ("memory_single_gpu", {**SINGLE, "model": model, "precision": precision})
            for model, precision in (
                ("LLAMA_1B", "FP"),
                ("GEMMA_2B", "HP"),
                ("HF_GPT2", "MP"),
                ("HF_T5", "MP"),
                ("HF_CLIP", "FP"),
            )
        ),
    ],
)
def test_row_of_another_model_gives_a_clean_plan(source, fields):
    assert diagnostics(convert(source, fields)) == []


def test_simplefsdp_row_states_its_passes():
    by_setting = {
        setting: convert("simplefsdp", {**SIMPLEFSDP, "setting": setting}).text
        for setting in ("vanilla", "+ reorder", "+ bucket", "+ reorder & bucket")
    }
    for setting, text in by_setting.items():
        assert "backend = graph" in text
        assert "layers.* = inductor" in text
        assert ("comm (reorder = true)" in text) == ("reorder" in setting)
        assert ("layers.* = unit" in text) == ("bucket" in setting)
    eager = convert("simplefsdp", {**SIMPLEFSDP, "mode": "eager", "setting": "", "ac": "Full"}).text
    assert "inductor" not in eager
    assert "layers.* = full" in eager
    assert "feed_forward.{w1, w2, w3} = unit" in eager


def test_nanotron_plan_shards_optimizer_state_only():
    text = convert("nanotron", {**NANOTRON, "pp": "1", "dp_replicate": "8"}).text
    assert "reshard = never" in text
    assert "comm (reduce = last_micro_batch)" in text
    assert "fsdp on dp_replicate, dp_shard" in convert("nanotron", {**NANOTRON, "zero_stage": "0"}).text


def test_nanotron_splits_blocks_by_cost():
    """The published example of the framework's documentation: Llama 3 8B on 8 ranks, 5 blocks on the first."""
    row = Row("r", {"n_layers": "32", "hidden": "4096", "ffn_hidden": "14336", "vocab": "128256", "pp": "8"})
    ranks = nanotron.stage_of_blocks(row, 8)
    blocks = [ranks[1:-2].count(rank) for rank in range(8)]
    assert blocks[:2] == [5, 4]
    assert sum(blocks) == 32
    assert nanotron.stage_starts(row)[0] == "layers.5"


@pytest.mark.parametrize("tp", ["1", "8"])
def test_nanotron_rank_may_hold_the_output_layer_alone(tp: str):
    sizes = {
        "n_layers": "32", "hidden": "4096", "n_heads": "32", "n_kv_heads": "32", "ffn_hidden": "14336",
        "vocab": "131072", "pp": "16", "tp": tp,
    }  # fmt: skip
    assert nanotron.stage_starts(Row("r", sizes))[-2:] == ("layers.30", "output")
    text = convert("nanotron", {**NANOTRON, **sizes, "n_gpus": str(16 * int(tp)), "dp_replicate": "1"}).text
    assert ("= sequence(local = true)\n  output " in text) == (tp != "1")
    assert not lint(text, "row.plan", directory=Path()).has_errors


def test_nanotron_refuses_empty_pipeline_ranks():
    with pytest.raises(UnstatedError, match="do not give each of 64 pipeline ranks one"):
        convert("nanotron", {**NANOTRON, "pp": "64"})


def test_nanotron_reducer_buckets_are_two_bytes_per_parameter():
    stated = convert("nanotron", {**NANOTRON, "pp": "1", "tp": "1"})
    block = 4 * 256 * 256 + 3 * 256 * 512
    assert sum(stated.beside.values()) == 2 * (4 * block + 2 * 1024 * 256)
    assert stated.rank == 0


def test_early_torchtitan_rows_add_logits_and_side_stream_buffer():
    early = convert("torchtitan", {**TORCHTITAN, "date": "2024-04"})
    assert sum(early.beside.values()) == 4 * 2 * 128 * 1024
    assert sum(early.beside_reserved.values()) == 4 * 2 * 1024 * 256
    late = convert("torchtitan", {**TORCHTITAN, "date": "2024-12"})
    assert not late.beside
    assert not late.beside_reserved
    predicted = Prediction(active=(100,), reserved=(200,), capacity=10**12)
    active = compare(Row("r", {"mem_peak": "1", "mem_kind": "active"}), early, predicted).memory
    reserved = compare(Row("r", {"mem_peak": "1", "mem_kind": "reserved"}), early, predicted).memory
    assert active is not None
    assert reserved is not None
    assert reserved[1] - active[1] == 100 + 4 * 2 * 1024 * 256


@pytest.mark.parametrize(
    ("date", "expandable", "fused_loss", "fused_optimizer"),
    [
        ("2024-10", False, False, False),  # of these runs it is not known whether they came before the commits
        ("2024-11", True, True, False),
        ("2024-12", True, False, False),
        ("2025-03", True, False, True),
        ("2025-06", True, True, True),
        ("", False, False, False),
    ],
)
def test_torchtitan_row_states_the_defaults_of_its_month(
    date: str, expandable: bool, fused_loss: bool, fused_optimizer: bool
):
    text = convert("torchtitan", {**TORCHTITAN, "compile": "1", "date": date}).text
    assert ("allocator (expandable_segments = true)" in text) == expandable
    assert ("loss fused" in text) == fused_loss
    assert ("fused = true" in text) == fused_optimizer


def test_torchtitan_row_keeps_what_is_reduced_but_not_what_is_gathered():
    text = convert("torchtitan", {**TORCHTITAN, "tp": "2", "dp_shard": "4", "global_batch": "8"}).text
    assert 'selective([attention, alternate_matmul, "_c10d_functional.reduce_scatter_tensor.default"])' in text


def test_torchtitan_row_of_another_launcher_states_no_allocator():
    assert (
        "allocator"
        not in convert("torchtitan", {**TORCHTITAN, "date": "2025-06", "notes": "launched by torchrun"}).text
    )


def test_throughput_tables_before_the_commit_state_no_allocator():
    rows = {**SEED, "fsdp": "8", "precision": "mixed", "compile": "no"}
    stated = {table: convert("torchtitan_throughput", {**rows, "table": table}).text for table in ("3.4", "3.5")}
    assert ["allocator" in text for text in stated.values()] == [False, True]


@pytest.mark.parametrize(
    ("precision", "notes", "tp", "stated"),
    [
        ("bf16+float8 tensorwise (linears)", "", "1", "float8(tensorwise)"),
        ("bf16+float8 tensorwise (linears)", "", "2", "float8(gather = [activations])"),
        ("bf16+float8 tensorwise (linears)", "FSDP gathers in float8", "1", "float8(gather = [weights])"),
        ("bf16+float8 rowwise (linears)", "", "2", "float8(rowwise)"),
    ],
)
def test_torchtitan_row_states_its_scales_and_gathers(precision: str, notes: str, tp: str, stated: str):
    fields = {**TORCHTITAN, "precision": precision, "notes": notes, "tp": tp, "dp_shard": str(8 // int(tp))}
    assert f"{{wq, wk, wv, wo}} = {stated}\n" in convert("torchtitan", {**fields, "global_batch": "8"}).text


def test_rows_beside_the_package_are_stated_with_their_assumptions():
    for source in ("async_tp", "torchtitan_2025"):
        rows = read(Path(SOURCES[source].file))
        assert len({row.id for row in rows}) == len(rows)
        for row in rows:
            stated = SOURCES[source].convert(row, None)
            assert set(row.text("assumed").split("; ")) - {""} <= set(stated.assumed)


@pytest.mark.parametrize(
    ("source", "fields", "reason"),
    [
        ("torchtitan", {**TORCHTITAN, "seq_len": ""}, "`seq_len` is not stated"),
        ("torchtitan", {**TORCHTITAN, "ac_mode": "odd"}, "checkpointing is odd"),
        ("torchtitan", {**TORCHTITAN, "gpu": "MI300X"}, "no device of the catalogue is a MI300X"),
        ("torchtitan", {**TORCHTITAN, "micro_batch": "two"}, "`micro_batch` is no whole number: two"),
        ("simumax", {**SIMUMAX, "ep": "2"}, "experts of a model that is not DeepSeek's"),
        ("simumax", {**SIMUMAX, "arch": "MLA MoE"}, "how many blocks have no experts is not stated"),
        ("simumax", {**SIMUMAX, "arch": "MLA, 1 dense layer"}, "no DeepSeek of the presets is named"),
        ("simumax", {**LATENT, "hidden": "4096"}, "DeepSeek-V2 with hidden = 4096, not 5120"),
        (
            "simplefsdp",
            {**SIMPLEFSDP, "setting": "AG placed fwd=after bwd=after last all-gather-wait"},
            "other places of gathers",
        ),
        ("simplefsdp", {**SIMPLEFSDP, "setting": "auto"}, "no plan says auto"),
        ("simplefsdp", {**SIMPLEFSDP, "model": "GPT"}, "no Llama 3.1 is named: GPT"),
        ("simplefsdp", {"metric": "count"}, "no figure of one run"),
        ("memory_single_gpu", {**SINGLE, "model": "HF_BERT"}, "no model of the tables is HF BERT"),
        ("runtime_single_gpu", {**SINGLE, "estimator": "BENCHMARK"}, "the same run as the row of the learned model"),
    ],
)
def test_unstatable_row_is_refused_with_the_reason(source, fields, reason):
    with pytest.raises(UnstatedError, match=reason):
        convert(source, fields)


def test_single_gpu_row_states_its_experiment():
    text = convert("memory_single_gpu", SINGLE).text
    assert 'python("benchmarks.validation.models:causal", config = "llama3_1b")' in text
    assert "model.layers.*.mlp = full" in text
    assert "precision (master = bf16, param = bf16)" in text
    assert "adam(lr = 1e-4, weight_decay = 0.0001, fused = false)" in text
    clip = convert("runtime_single_gpu", {**SINGLE, "model": "HF CLIP", "seq_or_img": "20/336", "estimator": "LEARNED"})
    assert "seq_len = 20" in clip.text
    image = convert("memory_single_gpu", {**SINGLE, "model": "TIMM_VIT", "ac": "No"}).text
    assert "seq_len" not in image
    assert "checkpoint" not in image
    assert "weight_decay = 0.0," in image


def test_megatron_memory_has_a_separate_plan():
    for source, fields in (("nanotron", NANOTRON), ("simumax", SIMUMAX)):
        stated = convert(source, fields)
        overlap = ", overlap = backward" if source == "nanotron" else ""
        assert f"layers.*.attention              = inputs(from = shard(1), to = replicate{overlap})" in stated.text
        assert "inputs(" not in stated.for_memory
        assert "overlap =" not in stated.for_memory
        assert "layers.*.feed_forward.{w1, w3}  = colwise(input = shard(1))" in stated.for_memory
        assert stated.for_memory.count("selective([matmul])") == 3
    assert "swiglu_in_one_kernel" in convert("simumax", {**SIMUMAX, "tp": "1", "dp_replicate": "8"}).for_memory
    assert not convert("nanotron", {**NANOTRON, "tp": "1", "dp_replicate": "8"}).for_memory


def test_prediction_takes_memory_from_another_plan():
    predicted, held = Prediction(seconds=2.0, active=(1,), took=3.0), Prediction(active=(7, 8), capacity=9, took=1.0)
    both = predict.with_memory_of(predicted, held)
    assert (both.seconds, both.active, both.capacity, both.took) == (2.0, (7, 8), 9, 4.0)


def test_named_device_replaces_the_device_of_the_row():
    assert "cluster h200" in convert("torchtitan", TORCHTITAN, "h200").text
    assert "cluster h100_sxm96" in convert("torchtitan", TORCHTITAN).text


def test_plan_without_pipeline_is_shortened_to_few_micro_batches():
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


def test_memory_plan_has_twice_the_micro_batches_in_flight():
    staged = convert("nanotron", {**NANOTRON, "global_batch": "256"})
    plan = lint(staged.text, "row.plan", directory=Path(), variants=False).plan
    assert plan is not None
    assert "global = 40, micro = 2" in predict.for_memory(staged.text, plan)
    few = convert("nanotron", {**NANOTRON, "global_batch": "24"})
    plan = lint(few.text, "row.plan", directory=Path(), variants=False).plan
    assert plan is not None
    assert predict.for_memory(few.text, plan) == few.text


def test_command_writes_and_reuses_results(tmp_path, monkeypatch, capsys):
    path = tmp_path / "runs.csv"
    rows = [TORCHTITAN, {**TORCHTITAN, "ac_mode": "odd"}, {**TORCHTITAN, "notes": "DUPLICATE"}]
    names = ["id", *TORCHTITAN, "notes"]
    lines = [",".join([f"row-{index}", *(row.get(name, "") for name in names[1:])]) for index, row in enumerate(rows)]
    path.write_text("\n".join([",".join(names), *lines]) + "\n")
    calls = []

    def answer(text, **_):
        calls.append(text)
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


def test_missing_file_is_reported(tmp_path, capsys):
    assert command.main([str(tmp_path), "--source", "vtrain"]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{**NANOTRON, "global_batch": "256"}, {**NANOTRON, "pp": "1", "dp_replicate": "8"}])
def test_memory_alone_equals_the_full_estimate(fields):
    stated = convert("nanotron", fields)
    plan = lint(stated.text, "row.plan", directory=Path(), variants=False).plan
    assert plan is not None
    alone = predict.predict(stated.text, memory_only=True)
    whole = predict.predict(predict.for_memory(stated.text, plan))
    assert not alone.refused
    assert alone.active == (whole.active[0], whole.active[-1])[: len(whole.active)]
    assert alone.reserved == (whole.reserved[0], whole.reserved[-1])[: len(whole.reserved)]
    assert (alone.outside, alone.capacity) == (whole.outside, whole.capacity)


@pytest.mark.slow
def test_shortened_step_equals_full_simulation(monkeypatch):
    stated = convert("nanotron", {**NANOTRON, "pp": "1", "dp_replicate": "8", "global_batch": "128"})
    short = predict.predict(stated.text)
    monkeypatch.setattr(predict, "_SHORT", 99)
    whole = predict.predict(stated.text)
    assert not short.refused
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert short.active == whole.active
