"""Settings of torch's Flight Recorder, which it reads where a group over NCCL is made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from legoai.runtime.device import Device
from legoai.runtime.process_group import record_collectives

NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")
GPU = Device(type="cuda")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without these settings, which is restored after each test."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def said() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


def test_gpu_run_records_into_its_folder(tmp_path: Path):
    record_collectives(GPU, tmp_path / "run" / "flights", entries=500)
    assert said() == ["500", "1", str(tmp_path / "run" / "flights" / "rank_")]
    assert (tmp_path / "run" / "flights").is_dir()


def test_environment_settings_take_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/elsewhere/rank_")
    record_collectives(GPU, tmp_path / "flights", entries=500)
    assert said() == ["7", "1", "/elsewhere/rank_"]
    assert not (tmp_path / "flights").exists()


@pytest.mark.parametrize(
    ("device", "entries", "named"), [(Device(type="cpu"), 500, True), (GPU, 0, True), (GPU, 500, False)]
)
def test_disabled_recording_sets_nothing(device: Device, entries: int, named: bool, tmp_path: Path):
    record_collectives(device, tmp_path / "flights" if named else None, entries=entries)
    assert said() == [None, None, None]
