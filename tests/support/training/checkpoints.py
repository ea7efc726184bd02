"""Checkpoints of one tensor, and what is found in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from legoai.runtime.checkpoint.checkpoint import CheckpointMeta, checksum, load
from legoai.runtime.checkpoint.folder import Checkpoints

SIZE = 1000


def meta(step: int) -> CheckpointMeta:
    return CheckpointMeta(
        step=step, plan="p", plan_hash="h", model="m", seed=0, samples=8 * step, corpus="c", world=1, torch="2"
    )


def save(root: Path, *steps: int, keep: int = 0) -> None:
    for step in steps:
        Checkpoints(root, keep=keep).save({"model.w": torch.full((SIZE,), float(step))}, meta(step))


def newest(root: Path) -> tuple[int | None, list[str]]:
    warnings: list[str] = []
    found = Checkpoints(root).newest(warn=warnings.append)
    return (found[1].step if found else None), warnings


def loaded(path: Path) -> float:
    state = {"model.w": torch.zeros(SIZE)}
    load(path, state)
    assert len(set(state["model.w"].tolist())) == 1
    return float(state["model.w"][0])


def truncate(path: Path) -> None:
    """Damage a checkpoint, whose data are cut short."""
    os.truncate(path / "__0_0.distcp", 100)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def resume(root: Path, keep: int, name: str | None = None) -> list[str]:
    """The checkpoints that are left when a run has continued from the newest, or from a named one."""
    checkpoints = Checkpoints(root, keep=keep)
    found = None if name else checkpoints.newest(warn=lambda _: None)
    checkpoints.remove_before(root / name if name else found[0])
    return names(root)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit_meta(path: Path, *, digested: bool, **values: object) -> None:
    """Change fields of a checkpoint's `meta.json`, also as of an earlier version, which recorded no digest."""
    fields = json.loads((path / "meta.json").read_text()) | values
    if not digested:
        fields["files"].pop("meta.sha256", None)
    (path / "meta.json").write_text(json.dumps(fields))


def record(path: Path, name: str) -> None:
    """Record a changed file of a checkpoint as whoever changed it would."""
    files = json.loads((path / "meta.json").read_text())["files"]
    files[name] = [(path / name).stat().st_size, checksum(path / name)]
    edit_meta(path, digested=True, files=files)
    edit_meta(path, digested=False)
