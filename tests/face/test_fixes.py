"""`legoai lint --fix --unsafe-fixes` fixes causes before consequences, and makes the choices that the plan implies."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_cli import called, here  # noqa: F401

HEAD = 'plan p\nmodel llama3("tiny")\nbatch (global = 64, micro = 1, seq_len = 256)\n'
CPU = "cluster cpu(devices = 8)\n"
FSDP = "fsdp on dp_shard { layers.* = unit }\n"
TP = "shard on tp { layers.*.feed_forward.{w1, w3} = colwise, layers.*.feed_forward.w2 = rowwise }\n"


def fixed(text: str, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    path = Path("p.plan")
    path.write_text(HEAD + text, encoding="utf-8")
    called(capsys, "lint", "p.plan", "--fix", "--unsafe-fixes", *options)
    after = path.read_text(encoding="utf-8")
    assert after.startswith(HEAD)
    return after.removeprefix(HEAD)


CAUSES = [
    (CPU + "mesh (dp = 4, tp = 2)\n" + FSDP + TP, ("dp =", "dp_shard =")),
    (CPU + "mesh (dp_shrd = 4, tp = 2)\n" + FSDP + TP, ("dp_shrd", "dp_shard")),
    (CPU + "mesh (dp_shard = 8)\nfsdp on dp_shard { layers.0-3 = unit }\n", ("0-3", "{0..3}")),
    (CPU + "mesh (dp_shard = 8)\nfsdp on dp_shard { layers.{0..9} = unit }\n", ("0..9", "0..3")),
    (CPU + "mesh (dp_shard = 8)\nfsdp on dp_shard { layers.* = unit(reshrd = never) }\n", ("reshrd", "reshard")),
    (CPU + "mesh (dp_shard = 8)\n" + FSDP + "attention flsh\n", ("flsh", "flash")),
    ("cluster cpu(devicess = 8)\nmesh (dp_shard = 8)\n" + FSDP, ("devicess", "devices")),
]


@pytest.mark.parametrize(("text", "change"), CAUSES)
def test_misspelt_name_is_fixed_without_its_consequences(
    text: str, change: tuple[str, str], capsys: pytest.CaptureFixture[str]
):
    assert fixed(text, capsys) == text.replace(*change)


KEPT = [
    "let hosts = 2\n" + CPU + "mesh (dp_shard = hosts * 8)\n" + FSDP,
    "let n = 4\n" + CPU + "mesh (dp_shard = n)\n" + FSDP,
    CPU + "mesh (dp_shard = 2 * 2)\n" + FSDP,
    CPU + "mesh (dp_shard = max(2, 4))\n" + FSDP,
    'let kernel = flex\n' + CPU + "mesh (dp_shard = 8)\n" + FSDP + "attention kernel\n",
    'let dtype = "bf16"\n' + CPU + "mesh (dp_shard = 8)\n" + FSDP + "precision (param = dtype)\n",
    "let yes = on\n" + CPU + "mesh (dp_shard = 8)\n" + FSDP + "comm (reorder = yes)\n",
    "let first = layers.3\n" + CPU + "mesh (pp = 2, dp_shard = 4)\n"
    + FSDP.replace("unit", "unit(reshard = after_backward)")
    + "pipeline on pp (schedule = Interleaved1F1B, split = [first, layers.2, layers.1])\n",
]  # fmt: skip


@pytest.mark.parametrize("text", KEPT)
def test_computed_and_let_values_are_not_fixed(text: str, capsys: pytest.CaptureFixture[str]):
    assert fixed(text, capsys) == text


def test_literal_is_fixed_beside_a_let(capsys: pytest.CaptureFixture[str]):
    text = "let n = 4\n" + CPU + "mesh (dp_shard = n, tp = 4)\n" + FSDP + TP
    assert fixed(text, capsys) == text.replace("tp = 4", "tp = 2")


def test_command_line_settings_are_not_written(capsys: pytest.CaptureFixture[str]):
    text = "let n = 8\ncluster cpu(devices = n)\nmesh (dp_shard = 8)\n" + FSDP
    assert fixed(text, capsys, "--set", "n=4") == text
    other = "let n = 8\ncluster cpu(devices = n)\nmesh (dp_shard = 4)\n" + FSDP
    assert fixed(other, capsys) == other.replace("dp_shard = 4", "dp_shard = 8")


VARIANTS = [
    "variant v { cluster cpu(devices = 4) }\n",
    'variant v { model llama3("tiny", n_layers = 2) }\n',
    "variant v { batch (global = 64, micro = 1, seq_len = 100000) }\n",
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("options", [(), ("--variant", "v")])
def test_variant_values_are_not_written_into_the_plan(
    variant: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    text = CPU + "mesh (dp_shard = 8)\nfsdp on dp_shard { layers.{0..3} = unit }\n"
    after = fixed(text + variant, capsys, *options)
    assert after.startswith(text)


def test_text_of_a_variant_is_fixed(capsys: pytest.CaptureFixture[str]):
    text = CPU + "mesh (dp_shard = 8)\n" + FSDP + "variant v { mesh (dp_shard = 4) }\n"
    assert fixed(text, capsys) == text.replace("4) }", "8) }")


def test_one_cause_is_fixed_once(capsys: pytest.CaptureFixture[str]):
    """Mesh and batch are both wrong for 16 devices; after the first fix the batch is checked again."""
    text = CPU + "mesh (dp_shard = 16)\n" + FSDP
    assert fixed(text, capsys) == text.replace("16", "8")
