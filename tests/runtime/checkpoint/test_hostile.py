"""No checkpoint can run code or name files outside of its folder, whoever wrote it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from legoai.runtime.checkpoint.checkpoint import checksum
from legoai.runtime.errors import RunError, RunErrorCode
from support.checkpoints import loaded, newest, save


class Malice:
    """Unpickling this writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


def forge(path: Path, change) -> None:
    """Replace a checkpoint's metadata, with the checksum that an attacker would also write."""
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    forged = change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata if forged is None else forged))
    recorded = json.loads((path / "meta.json").read_text())
    content = path / ".metadata"
    recorded["files"][".metadata"] = [content.stat().st_size, checksum(content)]
    del recorded["files"]["meta.sha256"]
    (path / "meta.json").write_text(json.dumps(recorded))


def declare_bytes(metadata) -> None:
    metadata.state_dict_metadata["model.w"] = BytesStorageMetadata()


def point_outside(metadata) -> None:
    for storage in metadata.storage_data.values():
        storage.relative_path = "../outside"


def ask_for_a_transform(metadata) -> None:
    for storage in metadata.storage_data.values():
        storage.transform_descriptors = ["zstd"]


@pytest.mark.parametrize("change", [declare_bytes, point_outside, ask_for_a_transform])
def test_metadata_with_outside_paths_is_refused(gloo, tmp_path, change):
    gloo(1)(save, tmp_path, 1)
    forge(tmp_path / "step-1", change)
    for use in (newest, loaded):
        with pytest.raises(RunError) as caught:
            gloo(1)(use, tmp_path if use is newest else tmp_path / "step-1")
        assert caught.value.code == RunErrorCode.CHECKPOINT_UNSAFE


@pytest.mark.parametrize("where", ["whole", "inside"])
def test_malicious_pickle_is_refused_and_not_executed(gloo, tmp_path, where):
    mark = tmp_path / "ran"
    gloo(1)(save, tmp_path / "run", 1)

    def change(metadata):
        if where == "whole":
            return Malice(mark)
        metadata.planner_data = {"x": Malice(mark)}
        return metadata

    forge(tmp_path / "run" / "step-1", change)
    for use, path in ((newest, tmp_path / "run"), (loaded, tmp_path / "run" / "step-1")):
        with pytest.raises(RunError, match="may run code"):
            gloo(1)(use, path)
    assert not mark.exists()


def test_malicious_tensor_is_refused_and_not_executed(gloo, tmp_path):
    gloo(1)(save, tmp_path, 1)
    mark = tmp_path / "ran"
    torch.save(Malice(mark), tmp_path / "step-1" / "__0_0.distcp")

    def cover_the_file(metadata) -> None:
        for storage in metadata.storage_data.values():
            storage.offset, storage.length = 0, (tmp_path / "step-1" / "__0_0.distcp").stat().st_size

    forge(tmp_path / "step-1", cover_the_file)
    with pytest.raises(RunError, match="could not be read"):
        gloo(1)(loaded, tmp_path / "step-1")
    assert not mark.exists()
