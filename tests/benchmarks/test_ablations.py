"""Published ablations of three papers, and the pairs of plans whose ratios are compared with them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks.ablations import __main__ as command
from benchmarks.ablations import deepcompile, fsdp_paper, simplefsdp
from benchmarks.ablations.claims import Claim, Filled, Pair, Unstated, agrees, compared
from benchmarks.validation.predict import Prediction
from benchmarks.validation.rows import Row

from legoai.dsl.lint import lint

TABLE_5 = {
    "table": "5", "model": "Llama 3.1 8B", "parallelism": "FSDP", "gpus": "8", "batch_size": "1", "mode": "compile",
    "system": "SimpleFSDP", "metric": "throughput_total",
}  # fmt: skip
TEXT = {
    "table": "text", "model": "Llama 3.1 70B", "parallelism": "FSDP+TP", "batch_size": "8", "mode": "compile",
    "system": "SimpleFSDP", "baseline": "FSDP2-compile", "metric": "peak_memory_reduction", "value": "11.40",
    "unit": "%", "tp": "8", "pp": "",
}  # fmt: skip
SPEEDUP = {
    "section": "5.2", "model": "Llama-3 70B", "seq_len": "", "grad_accum": "1", "system": "DeepCompile (P+S)",
    "baseline": "ZeRO-3", "metric": "speedup", "value": "1.14", "unit": "x", "qualifier": "range low",
}  # fmt: skip


def rows(*fields: dict[str, str]) -> list[Row]:
    return [Row(f"row-{index}", item) for index, item in enumerate(fields, 1)]


def prediction(seconds: float, gib: float) -> Prediction:
    return Prediction(seconds=seconds, active=(int(gib * 2**30),), reserved=(int(gib * 2**30),), capacity=80 * 2**30)


def test_table_row_is_compared_with_its_baseline():
    base, reordered = {**TABLE_5, "setting": "vanilla", "value": "50976"}, {**TABLE_5, "setting": "+ reorder"}
    other = {**base, "gpus": "64", "value": "333440"}
    [claim] = list(simplefsdp.claims(rows(other, base, {**reordered, "value": "54544"})))
    assert isinstance(claim, Claim)
    assert claim.published == (pytest.approx(54544 / 50976),)
    assert claim.rows == ("row-3", "row-2")
    [pair] = claim.pairs
    assert "reorder = true" in str(pair.changed)
    assert "reorder" not in str(pair.baseline)


def test_ratio_in_the_text_gives_one_pair_per_gpu_count():
    [claim] = simplefsdp.claims(rows(TEXT))
    assert isinstance(claim, Claim)
    assert claim.published == (pytest.approx(0.886),)
    assert [pair.settings.split(",")[0] for pair in claim.pairs] == ["32 GPUs", "64 GPUs", "128 GPUs"]
    assert all("inductor" in str(pair.baseline) for pair in claim.pairs)
    assert all("async_tp" not in str(pair.baseline) for pair in claim.pairs)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallelism": "FSDP+TP+PP", "pp": "8", "unit": "GiB"}, "no peak of which it is one"),
        ({"parallelism": "FSDP+TP+PP", "pp": "16"}, "no rank is left to shard over"),
        ({"system": "SimpleFSDP-Auto"}, "AsyncTP"),
        ({"model": ""}, "stated by themselves"),
    ],
)
def test_unstatable_ratio_is_listed_with_the_reason(changes, why):
    [item] = simplefsdp.claims(rows({**TEXT, **changes}))
    assert isinstance(item, Unstated)
    assert why in item.why


def test_scaling_is_compared_on_the_most_and_on_the_fewest_devices():
    regression = {"metric": "per_gpu_tflops_regression", "value": "7", "unit": "%"}
    [linear, lost] = fsdp_paper.claims(rows({"metric": "scalability", "value": "linear"}, regression))
    assert isinstance(linear, Claim) and isinstance(lost, Claim)
    assert (linear.published, lost.published) == ((1.0,), (pytest.approx(0.93),))
    assert [pair.settings for pair in lost.pairs] == ["batch 8 of each", "batch 16 of each"]
    for pair, fewest in ((linear.pairs[0], 128), (lost.pairs[0], 8)):
        assert "dp_shard = 512" in str(pair.changed) and f"dp_shard = {fewest}" in str(pair.baseline)
    assert list(fsdp_paper.claims(rows({"metric": "vocab_size", "value": "50000"}))) == []


def test_range_rows_form_one_claim():
    [claim] = deepcompile.claims(rows(SPEEDUP, {**SPEEDUP, "qualifier": "range high, approx", "value": "1.18"}))
    assert isinstance(claim, Claim)
    assert claim.rows == ("row-1", "row-2")
    assert claim.published == (1.14, 1.18)


def test_unsharded_blocks_are_limited_by_memory():
    [claim] = deepcompile.claims(rows({**SPEEDUP, "qualifier": ""}))
    assert isinstance(claim, Claim)
    changed = claim.pairs[0].changed
    assert isinstance(changed, Filled)
    block = 2 * 855_638_016
    text = changed.then(prediction(1.0, (deepcompile.LIMIT - 3.5 * block) / 2**30))
    assert "first(308, unit, others = unit(reshard = after_backward))" in text  # 4 layers of 77 blocks
    assert "first(231, unit, others = unit(reshard = after_backward))" in text
    assert not lint(text, "kept.plan", directory=Path(), variants=False).has_errors
    assert "first" not in changed.then(prediction(1.0, 79.0))


MIXTRAL = {**SPEEDUP, "model": "Mixtral 8x7B", "qualifier": "", "value": "1.35"}


def test_experts_are_split_so_that_all_ranks_hold_some():
    [claim] = deepcompile.claims(rows(MIXTRAL))
    assert isinstance(claim, Claim)
    assert [pair.settings for pair in claim.pairs] == [
        "32 GPUs, batch 1, 512 tokens", "32 GPUs, batch 1, 1024 tokens", "32 GPUs, batch 1, 2048 tokens",
        "32 GPUs, batch 4, 1024 tokens",
    ]  # fmt: skip
    assert any("rows are copied" in item for item in claim.differs)
    changed, baseline = claim.pairs[0].changed, str(claim.pairs[0].baseline)
    assert isinstance(changed, Filled)
    block = 2 * 1_451_229_184
    text = changed.then(prediction(1.0, (deepcompile.LIMIT - 3.5 * block) / 2**30))
    assert "layers.*.feed_forward.experts = first(29, unit, others = unit(reshard = after_backward))" in text
    for plan in (text, baseline):
        assert not {item.code for item in lint(plan, "mixtral.plan", directory=Path(), variants=False).diagnostics} & {
            "LP835"
        }
    [count] = re.findall(r"n_experts = (\d+)", text)
    [chosen], [width] = re.findall(r"top_k = (\d+)", text), re.findall(r"hidden_dim = (\d+)", text)
    assert (int(count) * int(width), int(chosen) * int(width)) == (8 * 14_336, 2 * 14_336)


def test_peak_memory_and_accumulation_of_experts_are_stated():
    memory, several = deepcompile.claims(
        rows(
            {**MIXTRAL, "section": "5.3", "metric": "peak_memory", "value": "30", "unit": "GB"},
            {**MIXTRAL, "grad_accum": "16", "qualifier": "up to", "value": "1.54"},
        )
    )
    assert (memory.metric, memory.published) == ("allocated", (pytest.approx(65 / 30),))
    assert [pair.settings[-2:] for pair in several.pairs] == [" 4", "16"]
    assert "reshard = never" in several.pairs[0].changed.then(prediction(1.0, 30))


def test_rows_of_a_host_optimizer_are_not_stated():
    host, described = deepcompile.claims(
        rows(
            {**SPEEDUP, "section": "5.4", "baseline": "ZeRO3 (Offload optimizer)", "qualifier": ""},
            {**SPEEDUP, "metric": "gpus", "unit": "GPUs", "qualifier": ""},
            {**SPEEDUP, "section": "5.4", "baseline": "DeepCompile (Sync)", "qualifier": ""},
        )
    )
    assert "with its step" in host.why
    assert "adaptive" in described.pairs[0].changed


def test_directions_agree_within_one_percent():
    assert agrees((1.1, 1.2), 1.02)
    assert not agrees((1.1,), 0.98)
    assert agrees((0.997,), 1.004)
    assert not agrees((0.997,), 1.05)


def test_claim_is_compared_with_the_mean_or_largest_ratio():
    pairs = (Pair("8", "a", "b"), Pair("16", "c", "d"))
    answers = {"a": prediction(1.0, 10), "b": prediction(2.0, 20), "c": prediction(1.0, 30), "d": prediction(4.0, 30)}
    claim = Claim(rows=("1",), of="", what="", metric="throughput", published=(1.5,), pairs=pairs)
    assert compared(claim, answers)["predicted"] == 3.0
    largest = Claim(rows=("1",), of="", what="", metric="throughput", published=(1.5,), pairs=pairs, qualifier="up to")
    assert compared(largest, answers)["predicted"] == 4.0
    memory = Claim(rows=("1",), of="", what="", metric="memory", published=(1.5,), pairs=pairs)
    found = compared(memory, answers)
    assert (found["predicted"], found["direction"]) == (0.75, False)
    refused = compared(memory, {**answers, "a": Prediction(refused="lint: no")})
    assert refused["predicted"] is None
    assert refused["simulated"][0]["refused"] == "lint: no"


def test_interrupted_run_continues(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "seeds"
    folder.mkdir()
    papers = {"simplefsdp": TEXT, "deepcompile": {**SPEEDUP, "qualifier": ""}, "fsdp_paper": {"metric": "gpus_used"}}
    for name, fields in papers.items():
        (folder / f"{name}.csv").write_text(f"{','.join(fields)}\n{','.join(fields.values())}\n")
    asked: list[str] = []

    def answer(text: str, *, seconds: float) -> Prediction:
        asked.append(text)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return prediction(1.0 + len(asked), 40)

    monkeypatch.setattr(command, "predict", answer)
    monkeypatch.setattr(command, "RESULTS", tmp_path / "ablations.json")
    monkeypatch.setattr(command, "ROWS", tmp_path / "rows.json")
    with pytest.raises(KeyboardInterrupt):
        command.main([str(tmp_path), "--write"])
    assert command.main([str(tmp_path), "--write"]) == 0
    assert len(asked) == len(set(asked)) + 1  # the one that was interrupted
    assert command.main([str(tmp_path), "--write"]) == 0
    assert len(asked) == len(set(asked)) + 1
    found = json.loads((tmp_path / "ablations.json").read_text())
    assert [item["published"] for item in found["comparisons"]] == [[0.886], [1.14]]
    assert len(found["plans"]) == len(set(asked))
    assert "of 2 directions" in capsys.readouterr().out
    assert command.main([str(tmp_path / "none")]) == 2
