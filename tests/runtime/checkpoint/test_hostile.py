"""No checkpoint can run code or name files outside of its folder, whoever wrote it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from legoai.runtime.checkpoint.checkpoint import checksum
from legoai.runtime.checkpoint.safe_metadata import problem_of_tensor
from legoai.runtime.errors import RunError, RunErrorCode
from support.training.checkpoints import SIZE, edit_meta, loaded, newest, save


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


def first(metadata):
    return next(iter(metadata.state_dict_metadata.values()))


def with_parts(*boxes: tuple[int, int]):
    def change(metadata) -> None:
        [(name, tensor)] = metadata.state_dict_metadata.items()
        [place] = metadata.storage_data.values()
        tensor.chunks = [ChunkStorageMetadata(torch.Size([begin]), torch.Size([length])) for begin, length in boxes]
        metadata.storage_data = {MetadataIndex(name, chunk.offsets): place for chunk in tensor.chunks}

    return change


def assigned(holder, name: str, value: object):
    return lambda metadata: setattr(holder(metadata), name, value)


def whole(metadata):
    return metadata


def place(metadata):
    return next(iter(metadata.storage_data.values()))


DAMAGES = {
    "tensors in a list": assigned(whole, "state_dict_metadata", [1]),
    "no tensors": assigned(whole, "state_dict_metadata", None),
    "places of another kind": assigned(whole, "storage_data", {1: 2}),
    "no places": assigned(whole, "storage_data", {}),
    "a source that is a text": assigned(whole, "storage_meta", "x"),
    "a name that is a number": lambda metadata: metadata.state_dict_metadata.update({5: first(metadata)}),
    "a tuple as shape": assigned(first, "size", (SIZE,)),
    "no shape": assigned(first, "size", None),
    "no dtype": lambda metadata: setattr(first(metadata).properties, "dtype", None),
    "no parts at all": assigned(first, "chunks", None),
    "no part": with_parts(),
    "a part of other axes": lambda metadata: setattr(first(metadata).chunks[0], "sizes", torch.Size([SIZE, 1])),
    "a part too small": with_parts((0, SIZE - 1)),
    "parts with a gap": with_parts((0, 400), (500, SIZE - 500)),
    "a part that begins before": with_parts((-1, SIZE)),
    "a part that ends behind": with_parts((0, 500), (501, 500)),
    "parts with common elements": with_parts((0, 500), (499, 500), (999, 1), (0, 0)),
    "a file that is a number": assigned(place, "relative_path", 5),
    "a place before its file": assigned(place, "offset", -5),
    "a length that is a text": assigned(place, "length", "5"),
}


@pytest.mark.parametrize("change", DAMAGES.values(), ids=DAMAGES)
def test_metadata_that_do_not_describe_tensors_are_damage(gloo, tmp_path, change):
    gloo(1)(save, tmp_path, 1, 2)
    forge(tmp_path / "step-2", change)
    [(step, [warning])] = gloo(1)(newest, tmp_path)
    assert step == 1 and "step-2: .metadata is damaged: " in warning
    with pytest.raises(RunError, match=r"\.metadata is damaged") as caught:
        gloo(1)(loaded, tmp_path / "step-2")
    assert caught.value.code == RunErrorCode.CHECKPOINT_CORRUPT and caught.value.help


@pytest.mark.parametrize("axis", [0, 1])
def test_boxes_are_compared_along_every_axis(axis: int):
    def tensor(*boxes: tuple[int, int, int, int]) -> TensorStorageMetadata:
        bounds = [(box, (box[2:] + box[:2])) for box in boxes]
        parts = [
            ChunkStorageMetadata(torch.Size(one[::2]), torch.Size(one[1::2])) for pair in bounds for one in [pair[axis]]
        ]
        return TensorStorageMetadata(TensorProperties(), torch.Size([4, 4]), parts)

    grid = [(row, 2, column, 2) for row in (0, 2) for column in (0, 2)]
    assert not problem_of_tensor(tensor(*grid)) and not problem_of_tensor(tensor((0, 3, 0, 4), (3, 1, 0, 4)))
    assert problem_of_tensor(tensor(*grid[:3], (1, 2, 1, 2)))
    assert problem_of_tensor(tensor((0, 2, 0, 4), (1, 2, 0, 4)))


def test_text_of_a_checkpoint_cannot_steer_the_terminal(gloo, tmp_path):
    gloo(1)(save, tmp_path, 1, 2)
    edit_meta(tmp_path / "step-2", digested=False, samples="x\n\x1b[31merror[RUN001]: fake")
    [(_, [warning])] = gloo(1)(newest, tmp_path)
    assert warning.isprintable()
    edit_meta(tmp_path / "step-2", digested=False, samples=16, files={"\x1b[2J": [1, 1]})
    [(_, [warning])] = gloo(1)(newest, tmp_path)
    assert warning.isprintable() and "is missing" in warning


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
