"""The one writer of files: links and permissions stay, and failures leave nothing behind."""

from __future__ import annotations

import json

import pytest

from legoai.cost.measurements.file import write_document
from legoai.specs.files import replace_file
from legoai.specs.profile_file import read_document


def test_a_link_to_a_profile_stays_a_link(tmp_path):
    behind, link = tmp_path / "store/a.json.gz", tmp_path / "a.json.gz"
    write_document(behind, {"name": "first"})
    behind.chmod(0o640)
    link.symlink_to(behind)
    write_document(link, {"name": "second"})
    assert link.is_symlink() and read_document(behind)[0]["name"] == "second"
    assert behind.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("write", [replace_file, lambda path, text: write_document(path, {"text": text})])
def test_a_failure_leaves_the_file_and_nothing_besides(tmp_path, monkeypatch, write):
    path = tmp_path / "a.json"
    path.write_text("before", encoding="utf-8")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="No space"):
        write(path, json.dumps("after"))
    assert path.read_text(encoding="utf-8") == "before" and [*tmp_path.iterdir()] == [path]
