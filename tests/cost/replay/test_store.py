"""The cache of pieces on disk, and its keys."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import legoai
from legoai.cost import capture as capturing
from legoai.cost.code_state import state_of_code
from legoai.cost.estimate import estimate
from legoai.cost.replay import store
from legoai.cost.replay.file import load, save
from legoai.cost.replay.key import Variation, variation_of
from legoai.cost.replay.piece import Piece
from legoai.cost.replay.store import cached_piece, keep_piece
from legoai.specs.cache import refreshed, with_digest
from legoai.specs.cluster import device
from support.simulation import simulated
from support.texts.plans import lowered, manifest_of, resolved

TEXT = """\
plan small
model     llama3("tiny", n_layers = 9, dim = 32, n_heads = 4, n_kv_heads = 4, hidden_dim = 64, vocab_size = 128)
cluster   h100_sxm(hosts = 1)
batch     (global = 32, micro = 1, seq_len = 32)
mesh      (dp_shard = 8)
fsdp      on dp_shard { layers.* = unit, root = unit }
optimizer adamw(lr = 1e-3)
clip      (norm = 1.0)
"""


def variation(text: str = TEXT, *, gpu: str = "h100_sxm", **options) -> Variation:
    """Return which piece the trace of a plan follows from."""
    plan = resolved(text)
    program, manifest = lowered(text), manifest_of(plan.model.source())
    arguments = {"world": plan.mesh.world_size, "rank": 0, "kind": "cuda", "gpu": device(gpu)} | options
    found = variation_of(program.text, program.block_classes, manifest.block_lists, **arguments)
    assert found is not None
    return found


def changed(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("n_layers = 9", "n_layers = 30"),
        ("global = 32", "global = 64"),
        ("plan small", "# a comment\n\nplan other"),
        ("plan small\n", "plan small\nrequire peak_memory <= 70GiB\n"),
        ("plan small\n", "plan small\nallocator (expandable_segments = true)\n"),
    ],
)
def test_depth_micro_batches_and_names_are_not_in_the_key(old, new):
    assert variation(changed(old, new)).key == variation().key


def test_key_reports_the_extracted_lengths():
    found = variation(changed("n_layers = 9", "n_layers = 30").replace("global = 32", "global = 64"))
    assert (found.lengths, found.micro_batches) == ({"layers": (30,)}, 8)


def mixed(rule: str, layers: int = 24) -> Variation:
    """Return which piece the trace of a plan follows from whose blocks are treated in two ways."""
    text = changed("n_layers = 9", f"n_layers = {layers}")
    return variation(f"{text}checkpoint {{ layers.* = {rule} }}\n")


def test_lengths_of_repeated_groups_are_not_in_the_key():
    found = mixed("first(9, none, others = full)")
    assert mixed("first(16, none, others = full)").key == found.key
    assert found.lengths == {"layers": (9, 15)} != mixed("first(16, none, others = full)").lengths


@pytest.mark.parametrize(
    ("rule", "layers"),
    [
        ("first(9, full, others = none)", 24),
        ("first(9, none, others = selective([matmul]))", 24),
        ("first(9, none, others = full)", 25),
        ("first(20, none, others = full)", 24),  # of the last four none is left out
        ("first(5, none, others = full)", 24),
        ("every(2)", 24),
    ],
)
def test_treatments_of_repeated_and_single_blocks_are_in_the_key(rule, layers):
    assert mixed(rule, layers).key != mixed("first(9, none, others = full)").key


def test_indices_of_single_blocks_are_in_the_key():
    four = mixed("first(20, none, others = full)")
    assert four.lengths == {"layers": (20,)}
    assert mixed("first(21, none, others = full)").key != four.key


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dim = 32", "dim = 64"),
        ("hidden_dim = 64", "hidden_dim = 128"),
        ("vocab_size = 128", "vocab_size = 256"),
        ("seq_len = 32", "seq_len = 64"),
        ("micro = 1", "micro = 2"),
        ("global = 32", "global = 16"),  # two micro batches: none is between two others
        ("global = 32", "global = 8"),
        ("n_layers = 9", "n_layers = 5"),  # too few to leave any out
        ("n_layers = 9", "n_layers = 4"),
        ("layers.* = unit,", "layers.* = unit(reshard = after_backward),"),
        ("layers.* = unit, ", ""),
        ("adamw(lr = 1e-3)", "adamw(lr = 1e-3, fused = false)"),
        ("adamw(lr = 1e-3)", "sgd(lr = 1e-3)"),
        ("clip      (norm = 1.0)\n", ""),
        ("clip      (norm = 1.0)\n", "clip      (norm = 1.0)\ncheckpoint { layers.* = full }\n"),
        ("clip      (norm = 1.0)\n", "clip      (norm = 1.0)\ncheckpoint { layers.* = selective([matmul]) }\n"),
        ("clip      (norm = 1.0)\n", "clip      (norm = 1.0)\nprecision (param = bf16, reduce = bf16)\n"),
        ("clip      (norm = 1.0)\n", "clip      (norm = 1.0)\ncompile { layers.* = inductor }\n"),
        ("clip      (norm = 1.0)\n", "clip      (norm = 1.0)\nattention math\n"),
    ],
)
def test_changes_of_a_block_are_in_the_key(old, new):
    assert variation(changed(old, new)).key != variation().key


def test_rank_world_and_what_kernels_depend_on_are_in_the_key():
    """Of eager programs the device's compute capability decides kernels: attention is another one on an A100."""
    assert len({variation(**one).key for one in ({}, {"rank": 1}, {"kind": "cpu"}, {"world": 16})}) == 4
    compiled = changed("clip      (norm = 1.0)\n", "compile { layers.* = inductor }\n")
    assert variation(gpu="h200").key == variation().key != variation(gpu="a100_sxm80").key
    assert variation(compiled, gpu="h200").key != variation(compiled).key


def test_package_versions_and_sources_are_in_the_key(monkeypatch, tmp_path):
    found, whole = variation().key, state_of_code("cost")
    assert whole == state_of_code.__wrapped__("cost") != state_of_code.__wrapped__("cost", "specs")
    version = importlib.metadata.version
    for package in ("torch", "numpy"):
        other = {package: "0.0"}
        monkeypatch.setattr("importlib.metadata.version", lambda name, other=other: other.get(name) or version(name))
        assert state_of_code.__wrapped__("cost") != whole
    monkeypatch.setattr("legoai.cost.replay.key.state_of_code", lambda *folders: f"others of {folders}")
    assert variation().key != found


def test_folders_in_the_key_are_those_that_a_capture_imports(monkeypatch):
    code = "import sys, legoai.cost.capture; print(*{name.split('.')[1] for name in sys.modules if 'legoai.' in name})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "dsl" in done.stdout.split()
    asked = []
    monkeypatch.setattr("legoai.cost.replay.key.state_of_code", lambda *folders: asked.extend(folders) or "")
    variation()
    assert set(done.stdout.split()) <= set(asked)


def test_changed_file_changes_the_code_state(monkeypatch, tmp_path):
    (tmp_path / "cost").mkdir()
    (tmp_path / "cost/one.py").write_text("")
    monkeypatch.setattr(legoai, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "cost/one.json.gz").write_bytes(b"")
    before = state_of_code.__wrapped__("cost")
    (tmp_path / "cost/one.py").write_text("pass\n")
    after = state_of_code.__wrapped__("cost")
    (tmp_path / "cost/one.json.gz").write_bytes(b"figures")
    assert len({before, after, state_of_code.__wrapped__("cost")}) == 3


def of_text(text: str) -> Variation:
    found = variation_of(text, (), (), world=1, rank=0, kind="cuda", gpu=None)
    assert found is not None
    return found


ODD = '''"""Of a plan."""
MICRO_BATCHES = 8
LINES = """
first
second"""
VALUE = 1 + \\
2


@decorated
def step(
    batch,
):
    return batch
'''


def test_unsplittable_program_is_parsed_in_full():
    other = of_text(ODD.replace("Of a plan", "Of\nanother plan").replace("= 8", "= 16  # a comment"))
    assert (other.key, other.micro_batches) == (of_text(ODD).key, 16)
    for old, new in (("second", "third"), ("2\n", "3\n"), ("@decorated", "@otherwise"), ("return batch", "return 0")):
        assert of_text(ODD.replace(old, new)).key != of_text(ODD).key


def test_common_statements_are_parsed_once(monkeypatch):
    text = lowered(TEXT).text
    of_text(text)
    parsed = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda text: parsed.append(text.strip()) or parse(text))
    assert of_text(text.replace("MICRO_BATCHES = ", "MICRO_BATCHES = 1")).key == of_text(text).key
    assert len(parsed) == 1 and parsed[0].startswith("MICRO_BATCHES = 1")


def test_programs_without_the_constant_have_no_key():
    text = re.sub(r"^MICRO_BATCHES = .*$", "MICRO_BATCHES = 2 * 2", lowered(TEXT).text, flags=re.M)
    assert variation_of(text, (), (), world=8, rank=0, kind="cuda", gpu=None) is None


@pytest.fixture(scope="module")
def written() -> str:
    """A serialised capture."""
    return simulated.in_a_fork(captured)


def captured() -> str:
    piece = capturing.capture_piece(lowered(TEXT), world=8)
    assert isinstance(piece, Piece)
    text = save(piece)
    again = load(text)
    assert save(again) == text
    for depths, micro_batches in (({}, None), ({"layers": 5}, 3), ({"layers": 12}, 9)):
        assert again.trace(depths, micro_batches) == piece.trace(depths, micro_batches)
    return text


def test_capture_survives_serialisation(written):
    assert load(written).depths == {"layers": 9} and load(written).repeats


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the cache, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "legoai" / "pieces"


def test_cached_capture_is_found_under_its_key_only(written, folder):
    assert cached_piece("a") is None
    keep_piece("a", load(written))
    found = cached_piece("a")
    assert found is not None and found.trace() == load(written).trace()
    assert cached_piece("b") is None
    assert [file.name for file in folder.iterdir()] == ["a.json"]


@pytest.mark.parametrize("how", ["half", "empty", "bytes", "other", "older", "digit"])
def test_damaged_file_is_ignored_and_rewritten(written, folder, how):
    keep_piece("a", load(written))
    whole = (folder / "a.json").read_text()
    assert '["bfloat16",1,32,32]' in written
    damaged = {
        "half": whole[: len(whole) // 2].encode(),
        "empty": b"",
        "bytes": b"\xff\x00\x80",
        "other": b"[1, 2]",
        "older": written.encode(),  # without a digest
        "digit": whole.replace('["bfloat16",1,32,32]', '["bfloat16",1,32,92]', 1).encode(),
    }
    (folder / "a.json").write_bytes(damaged[how])
    assert cached_piece("a") is None
    keep_piece("a", load(written))
    assert (folder / "a.json").read_text() == whole


def test_cached_capture_is_ignored_in_a_refresh_that_did_not_write_it(written, folder):
    keep_piece("a", load(written))
    with refreshed():
        assert cached_piece("a") is None
        keep_piece("a", load(written))
        assert cached_piece("a") is not None
    assert cached_piece("a") is not None


@pytest.mark.parametrize("how", ["half", "other", "table", "version"])
def test_text_that_is_no_piece_is_refused(written, folder, how):
    """A piece of another format has a digest too."""
    parts = json.loads(written)
    texts = {
        "half": written[: len(written) // 2],
        "other": "[1, 2]",
        "table": json.dumps(parts | {"records": parts["records"][:3]}),
        "version": json.dumps(parts | {"format": 0}),
    }
    with pytest.raises(ValueError):
        load(texts[how])
    store.keep_bytes("pieces", "a.json", texts[how].encode())
    assert cached_piece("a") is None


def test_least_recently_used_entries_are_removed(written, folder, monkeypatch):
    monkeypatch.setattr(store, "MOST_BYTES", 3 * len(with_digest(written.encode())) + 10)
    for age, key in enumerate("abc"):
        keep_piece(key, load(written))
        os.utime(folder / f"{key}.json", (1000 + age, 1000 + age))
    assert cached_piece("a") is not None
    keep_piece("d", load(written))
    assert sorted(file.stem for file in folder.iterdir()) == ["a", "c", "d"]


def test_world_writable_folder_is_not_read(written, folder):
    keep_piece("a", load(written))
    folder.chmod(0o777)
    assert cached_piece("a") is None
    keep_piece("b", load(written))
    assert not (folder / "b.json").exists()


def step_times(*texts: str) -> list[float]:
    """Seconds of the steps of plans, which are simulated one after the other."""
    found = []
    for text in texts:
        plan = resolved(text)
        found.append(estimate(lowered(text), plan, manifest_of(plan.model.source()), directory=Path()).step_time)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param("", id="few blocks"),
        pytest.param("comm (prefetch = units(2, 2))\n", id="all blocks"),
    ],
)
def test_computation_over_all_blocks_is_not_replayed_to_other_depths(more, tmp_path, monkeypatch):
    plans = [changed("n_layers = 9", f"n_layers = {depth}") + more for depth in (6, 9, 6)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "together"))
    together = simulated.in_a_fork(step_times, *plans)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "alone"))
    assert together == [together[0], *simulated.in_a_fork(step_times, plans[1]), together[0]]
    assert together[0] < together[1]
