"""Files of a calibration: a device file and its profile, which belong together."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from legoai.cost.calibration import output
from legoai.specs.cluster import profile_path
from legoai.specs.profile_file import read_document


def test_two_calibrations_of_one_name_leave_the_files_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, is_between, other_is_done = tmp_path / "a.toml", threading.Event(), threading.Event()
    really = output.write_document

    def write_document(target: Path, document: Any) -> None:
        really(target, document)
        if document["made"] == "first":
            is_between.set()
            other_is_done.wait(0.5)  # which it is not, as it waits too

    monkeypatch.setattr(output, "write_document", write_document)

    def second() -> None:
        is_between.wait(5)
        output.write_output(path, "second", {"made": "second"})
        other_is_done.set()

    other = threading.Thread(target=second)
    other.start()
    output.write_output(path, "first", {"made": "first"})
    other.join()
    document, _ = read_document(profile_path(path))
    assert (path.read_text(encoding="utf-8"), document["made"]) == ("second", "second")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.json.gz", "a.toml"]
