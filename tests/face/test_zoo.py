"""`verify` and `run` of `transformers` models: images, two texts, and images with texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legoai.cli import main
from support.models.zoo import CONFIGS

BLOCKS = {
    "t5": "{encoder, decoder}.block.*",
    "convnextv2": "convnextv2.encoder.stages.*",
    "vit": "vit.layers.*",
}
ON_TWO = """plan theirs

model   huggingface("config.json")
cluster cpu(devices = 2)
batch   (global = 8, micro = 2{length})
mesh    (dp_shard = 2)

fsdp on dp_shard {{ {blocks} = unit }}
checkpoint {{ {blocks} = full }}
"""
ON_ONE = """plan theirs

model     huggingface("config.json")
cluster   cpu(devices = 1)
batch     (global = 8, micro = 4{length})
precision (param = fp32)
optimizer adamw(lr = 0.003)
"""
TINY_VISION = """plan images

model     vit("tiny")
cluster   cpu(devices = 1)
batch     (global = 32, micro = 16)
precision (param = fp32)
optimizer adamw(lr = 0.003)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def verified(capsys: pytest.CaptureFixture[str], name: str, plan: str) -> str:
    Path("config.json").write_text(json.dumps(CONFIGS[name]))
    Path("a.plan").write_text(plan)
    status = main(["verify", "a.plan"])
    said = capsys.readouterr()
    assert status == 0, said.out + said.err
    return said.out


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_model_on_two_ranks_equals_one_device(capsys: pytest.CaptureFixture[str], name: str):
    length = ", seq_len = 16" if name == "t5" else ""
    out = verified(capsys, name, ON_TWO.format(blocks=BLOCKS[name], length=length))
    assert "2 ranks compute what one device computes" in out


@pytest.mark.slow
def test_contrastive_loss_matches_within_a_micro_batch(capsys: pytest.CaptureFixture[str]):
    out = verified(capsys, "clip", ON_ONE.format(length=", seq_len = 16"))
    assert "1 rank compute what one device computes" in out


@pytest.mark.slow
def test_image_model_trains_on_synthetic_images():
    Path("a.plan").write_text(TINY_VISION)
    assert main(["run", "a.plan", "--", "--steps", "2", "--device", "cpu"]) == 1, "there are no images in text"
    assert main(["run", "a.plan", "--", "--steps", "20", "--device", "cpu", "--data", "synthetic", "--out", "out"]) == 0
    records = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    assert "tokens_per_second_per_device" not in steps[0]
    assert steps[0]["samples_per_second_per_device"] > 0
