"""Plans for rows of published runs, and the scores of predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.validation import __main__ as command
from benchmarks.validation import models, predict
from benchmarks.validation.predict import Prediction, shortened
from benchmarks.validation.rows import Row, UnstatedError, read
from benchmarks.validation.sample import drawn, stratum
from benchmarks.validation.score import compare, errors, measured, out_of_memory, peer, rank_memories
from benchmarks.validation.sources import SOURCES, nanotron
from benchmarks.validation.statements import Stated
from benchmarks.validation.table import table

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
SINGLE = {"model": "LLAMA_1B", "batch": "4", "seq_or_img": "64", "precision": "HP", "ac": "Yes", "actual_gib": "24.99"}
SEED = {"model": "Llama 3.1 8B", "gpus": "8", "ac": "selective", "local_batch": "2"}
SIMPLEFSDP = {
    "table": "5", "model": "Llama 3.1 8B", "gpus": "64", "batch_size": "1", "ac": "", "mode": "compile",
    "system": "SimpleFSDP", "setting": "vanilla", "metric": "peak_memory", "value": "56.42",
}  # fmt: skip


def convert(source: str, fields: dict[str, str], device: str | None = None) -> Stated:
    return SOURCES[source].convert(Row("row-1", fields), device)


def diagnostics(stated: Stated) -> list[str]:
    """What lint reports of a row, but for the uneven split that its framework chose (LP829)."""
    linted = lint(stated.text, "row.plan", directory=Path(), variants=False)
    found = (item for item in linted.diagnostics if item.severity != "advice" and item.code != "LP829")
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
def test_a_row_of_a_llama_is_a_plan_without_diagnostics(source, fields):
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
def test_a_row_of_another_model_is_a_plan_without_diagnostics(source, fields):
    assert diagnostics(convert(source, fields)) == []


def test_a_traced_run_merges_and_reorders_what_its_row_does():
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


def test_nanotron_shards_only_what_zero_1_shards():
    text = convert("nanotron", {**NANOTRON, "pp": "1", "dp_replicate": "8"}).text
    assert "reshard = never" in text
    assert "comm (reduce = last_micro_batch)" in text
    assert "fsdp on dp_replicate, dp_shard" in convert("nanotron", {**NANOTRON, "zero_stage": "0"}).text


def test_nanotron_gives_blocks_to_pipeline_ranks_by_their_cost():
    """The published example of the framework's documentation: Llama 3 8B on 8 ranks, 5 blocks on the first."""
    row = Row("r", {"n_layers": "32", "hidden": "4096", "ffn_hidden": "14336", "vocab": "128256", "pp": "8"})
    ranks = nanotron.stage_of_blocks(row, 8)
    blocks = [ranks[1:-2].count(rank) for rank in range(8)]
    assert blocks[:2] == [5, 4]
    assert sum(blocks) == 32
    assert nanotron.stage_starts(row)[0] == "layers.5"


@pytest.mark.parametrize("tp", ["1", "8"])
def test_a_rank_of_nanotron_may_have_the_output_layer_alone(tp: str):
    sizes = {
        "n_layers": "32", "hidden": "4096", "n_heads": "32", "n_kv_heads": "32", "ffn_hidden": "14336",
        "vocab": "131072", "pp": "16", "tp": tp,
    }  # fmt: skip
    assert nanotron.stage_starts(Row("r", sizes))[-2:] == ("layers.30", "output")
    text = convert("nanotron", {**NANOTRON, **sizes, "n_gpus": str(16 * int(tp)), "dp_replicate": "1"}).text
    assert ("= sequence(local = true)\n  output " in text) == (tp != "1")
    assert not lint(text, "row.plan", directory=Path()).has_errors


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
def test_what_no_plan_can_say_is_refused_with_the_reason(source, fields, reason):
    with pytest.raises(UnstatedError, match=reason):
        convert(source, fields)


def test_a_run_of_one_gpu_states_what_its_experiment_did():
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


def test_gradients_of_a_loss_in_the_model_are_those_of_the_loss_outside_of_it():
    """Against `transformers`' own attention and loss, in fp32 both, on a small Llama whose keys are shared."""
    transformers = pytest.importorskip("transformers")
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    ours = models._with_loss(
        models.transformers_model(fields, attn_implementation=models._registered()), models._NextToken
    ).double()
    ours.__dict__["loss_in_fp32"] = False
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).double()
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(64, (3, 12))
    losses = ours(tokens), theirs(tokens, labels=tokens).loss
    assert losses[0].shape == (3, 12, 1)
    for loss in (losses[0].mean(), losses[1]):
        loss.backward()
    assert losses[0].mean().item() == pytest.approx(losses[1].item(), rel=1e-6)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-7, msg=name)
    assert not any(models._CACHED in module.__dict__ for module in ours.modules())


def test_steps_that_torchtitan_takes_one_by_one_give_what_our_llama_gives():
    """The same function: with the features of queries and keys in the order that pairs of neighbours need."""
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 64, "vocab_size": 64}
    torch.manual_seed(0)
    theirs = models.torchtitan_llama("8b", **sizes, max_seq_len=16).double()
    ours = models.Llama(models.resolve_config("llama3", "8b", {**sizes, "max_seq_len": 16})).double()
    state = theirs.state_dict()
    for name, weight in state.items():
        if name.endswith(("wq.weight", "wk.weight")):  # neighbours (2i, 2i + 1) become (i, i + half)
            state[name] = weight.unflatten(0, (-1, 4, 2)).transpose(1, 2).flatten(0, 2)
    ours.load_state_dict(state)
    tokens = torch.randint(64, (2, 16))
    torch.testing.assert_close(theirs(tokens), ours(tokens), rtol=1e-5, atol=1e-6)  # theirs rotates in fp32


def test_what_megatron_holds_is_stated_apart_from_what_it_sends():
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


def test_swiglu_in_one_kernel_computes_what_ours_computes():
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "hidden_dim": 32, "vocab_size": 16}
    config = models.resolve_config("llama3", "8b", {**sizes, "max_seq_len": 8})
    one, ours = models.llama_with_swiglu_in_one_kernel("8b", **sizes, max_seq_len=8).double(), models.Llama(config)
    ours.double().load_state_dict(one.state_dict())
    tokens = torch.randint(16, (2, 8))
    torch.testing.assert_close(one(tokens), ours(tokens))
    for model in (one, ours):
        model(tokens).square().sum().backward()
    for mine, other in zip(one.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_prediction_may_take_its_memory_from_another_plan():
    said, held = Prediction(seconds=2.0, active=(1,), took=3.0), Prediction(active=(7, 8), capacity=9, took=1.0)
    both = predict.with_memory_of(said, held)
    assert (both.seconds, both.active, both.capacity, both.took) == (2.0, (7, 8), 9, 4.0)


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


def test_what_a_source_estimated_itself_is_read_from_its_columns_and_notes():
    assert peer(Row("r", {"predicted_ms": "426.36"})) == (pytest.approx(0.42636), None)
    assert peer(Row("r", {"est_gib": "30.10"})) == (None, pytest.approx(30.1 * 2**30))
    notes = "peer SimuMax v1.2 prediction: 395.23 ms (-3.56%), alloc 38.94 GiB (-0.33%), reserved 41.43 GiB; case=a_b"
    assert peer(Row("r", {"notes": notes})) == (pytest.approx(0.39523), pytest.approx(38.94 * 2**30))
    assert peer(Row("r", {"notes": "", "iter_time_s": "1"})) == (None, None)


def test_memory_of_every_rank_is_that_of_its_place_in_the_pipeline():
    row = Row("r", {"notes": "mock data; case=llama_tp1_pp2", "n_gpus": "4"})
    fields = {"case": "llama_tp1_pp2", "memory_source_case": "llama_tp1_pp2", "max_reserved_mb": "30"}
    rows = [Row("m", {**fields, "rank": str(rank), "max_allocated_mb": str(10 + rank)}) for rank in range(4)]
    repeated = Row("m", {**fields, "rank": "0", "max_allocated_mb": "1", "memory_source_case": "another"})
    other = Row("m", {**fields, "rank": "0", "max_allocated_mb": "1", "case": "another"})
    found = rank_memories(row, [*rows, repeated, other], Prediction(active=(100, 200), reserved=(300, 400)))
    assert [(item.rank, item.active) for item in found] == [
        (0, (10 * 2**20, 100)), (1, (11 * 2**20, 100)), (2, (12 * 2**20, 200)), (3, (13 * 2**20, 200)),
    ]  # fmt: skip
    assert {item.reserved for item in found} == {(30 * 2**20, 300), (30 * 2**20, 400)}
    assert rank_memories(row, rows, Prediction(refused="no answer")) == ()


def test_a_sample_is_drawn_by_a_seed_from_each_kind_in_turn():
    rows = [
        Row(f"row-{index:03}", {"model": "a" if index < 90 else "b", "pp": "2" if index % 30 == 0 else "1"})
        for index in range(100)
    ]
    taken = drawn(rows, 8)
    assert taken == drawn(list(reversed(rows)), 8)[::-1]
    assert [row.id for row in taken] == sorted(row.id for row in taken)
    assert {stratum(row) for row in taken} == {stratum(row) for row in rows}
    assert {row.id for row in taken} < {row.id for row in drawn(rows, 20)}
    assert drawn(rows, None) == rows
    assert len(drawn(rows, 1000)) == 100


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
    page = table({"source": "runs", "summary": {"out of memory": counted, "refused": {}}})
    assert "| ran, predicted to run out of memory | 1 |" in page
    assert "| of the rows that ran, predicted to fit | 50.0% |" in page


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


def test_memory_is_asked_of_twice_as_many_micro_batches_as_a_pipeline_holds():
    staged = convert("nanotron", {**NANOTRON, "global_batch": "256"})
    plan = lint(staged.text, "row.plan", directory=Path(), variants=False).plan
    assert plan is not None
    assert "global = 40, micro = 2" in predict.for_memory(staged.text, plan)
    few = convert("nanotron", {**NANOTRON, "global_batch": "24"})
    plan = lint(few.text, "row.plan", directory=Path(), variants=False).plan
    assert plan is not None
    assert predict.for_memory(few.text, plan) == few.text


def test_the_command_writes_results_and_keeps_them(tmp_path, monkeypatch, capsys):
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


def test_a_missing_file_is_said_and_not_raised(tmp_path, capsys):
    assert command.main([str(tmp_path), "--source", "vtrain"]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{**NANOTRON, "global_batch": "256"}, {**NANOTRON, "pp": "1", "dp_replicate": "8"}])
def test_memory_alone_is_that_of_the_whole_estimate(fields):
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
def test_a_shortened_step_takes_as_long_as_the_whole_one(monkeypatch):
    stated = convert("nanotron", {**NANOTRON, "pp": "1", "dp_replicate": "8", "global_batch": "128"})
    short = predict.predict(stated.text)
    monkeypatch.setattr(predict, "_SHORT", 99)
    whole = predict.predict(stated.text)
    assert not short.refused
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert short.active == whole.active
