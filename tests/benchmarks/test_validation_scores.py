"""Measurements and samples of published runs, and the scores of predictions."""

from __future__ import annotations

import pytest
from benchmarks.validation.predict import Prediction
from benchmarks.validation.rows import Row, UnstatedError, read
from benchmarks.validation.sample import drawn, stratum
from benchmarks.validation.score import compare, errors, measured, out_of_memory, peer, rank_memories
from benchmarks.validation.statements import Stated
from benchmarks.validation.table import table


def test_comments_are_skipped_and_suspect_rows_marked(tmp_path):
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


def test_rate_of_a_published_step_becomes_its_time():
    """Four times the forward's operations: twice in backward, and once more in the recomputation."""
    layers, width, vocabulary, tokens = 96, 12_288, 50_000, 2048
    block = tokens * (2 * 12 * width**2 + 4 * tokens * width)
    operations = 4 * layers * block + 3 * 2 * tokens * width * vocabulary
    row = Row("r", {"metric": "tflops_per_gpu", "value": "186", "batch_size": "2", "seq_len": "2048"})
    assert measured(row)[0] == pytest.approx(2 * operations / 186e12)


def test_peer_estimates_are_read_from_columns_and_notes():
    assert peer(Row("r", {"predicted_ms": "426.36"})) == (pytest.approx(0.42636), None)
    assert peer(Row("r", {"est_gib": "30.10"})) == (None, pytest.approx(30.1 * 2**30))
    notes = "peer SimuMax v1.2 prediction: 395.23 ms (-3.56%), alloc 38.94 GiB (-0.33%), reserved 41.43 GiB; case=a_b"
    assert peer(Row("r", {"notes": notes})) == (pytest.approx(0.39523), pytest.approx(38.94 * 2**30))
    assert peer(Row("r", {"notes": "", "iter_time_s": "1"})) == (None, None)


def test_rank_memory_is_compared_by_pipeline_coordinate():
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


def test_sample_is_seeded_and_stratified():
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


def test_errors_are_relative_to_the_measurement():
    known = errors([("a", (10.0, 12.0)), ("b", (10.0, 9.0)), ("c", (10.0, 10.0))])
    assert known is not None
    assert (known.rows, known.worst_id) == (3, "a")
    assert (known.mean, known.median, known.worst, known.bias) == pytest.approx((0.1, 0.1, 0.2, 0.1 / 3))
    assert errors([]) is None


@pytest.mark.parametrize(("rank", "predicted"), [(None, 7), (0, 3), (1, 7), (2, 5), (9, 5)])
def test_memory_is_compared_on_the_measured_rank(rank: int | None, predicted: int):
    row = Row("r", {"iter_time_s": "1", "mem_peak": "4", "mem_kind": "active"})
    found = compare(row, Stated(text="", rank=rank), Prediction(active=(3, 7, 5), reserved=(30, 70, 50)))
    assert found.memory == (4 * 2**30, predicted)


def test_out_of_memory_predictions_are_scored_as_a_classifier():
    gib = 2**30

    def compared(status: str, reserved: float, refused: str = ""):
        predicted = Prediction(reserved=(int(reserved * gib),), capacity=80 * gib, outside=gib, refused=refused)
        return compare(Row("r", {"status": status}), Stated(text="", beside={"more": 2.0 * gib}), predicted)

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
