"""Machine on which a benchmark ran, and the file that its rows are written to."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def about_machine() -> dict[str, str | float]:
    """Date, processor, versions and the load before a measurement, in words that are printed and written."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_average": round(os.getloadavg()[0], 1),
    }


def write_rows(path: Path, about: Mapping[str, object], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write what was measured, as a whole or not at all."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
