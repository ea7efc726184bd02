"""Writing of profile files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legoai.specs.files import replace_file
from legoai.specs.profile_file import FORMAT


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a profile atomically, compressed where the name ends in `.gz`, and deterministically.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps({"format": FORMAT, **document}, sort_keys=True, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
