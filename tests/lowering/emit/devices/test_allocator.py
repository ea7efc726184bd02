"""Settings of the allocator: in the program, and applied before the device allocates memory."""

from __future__ import annotations

import pytest
import torch

from legoai.runtime.device import Device
from support.texts.plans import FULL, lowered


@pytest.mark.parametrize(("said", "value"), [("true", "True"), ("false", "False")])
def test_trainer_receives_the_allocator_settings(said: str, value: str):
    text = lowered(f"{FULL}\nallocator (expandable_segments = {said})\n").text
    assert f'allocator_settings="expandable_segments:{value}"' in text
    assert "allocator_settings" not in lowered(FULL).text


def test_allocator_is_configured_before_the_gpu_is_used(monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", done.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: done.append(f"device {index}"))
    Device(type="cpu").activate(allocator_settings="expandable_segments:True")
    assert not done
    Device(type="cuda", index=1).activate(allocator_settings="expandable_segments:True")
    assert done == ["expandable_segments:True", "device 1"]
    Device(type="cuda").activate()
    assert done[2:] == ["device 0"]


def test_torch_accepts_the_settings():
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        assert "expandable_segments:True" in torch._C._accelerator_getAllocatorSettings()
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")
