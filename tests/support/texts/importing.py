"""Plans from the texts of TorchTitan configs."""

from __future__ import annotations

from legoai.dsl.importing.config import read_config
from legoai.dsl.importing.translation import Imported, translated


def import_config(source: str, name: str, *, plan: str, cluster: str, devices: int) -> Imported:
    """Translate the text of a TOML file to a plan."""
    return translated(read_config(source, name), plan=plan, cluster=cluster, devices=devices)
