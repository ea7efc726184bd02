"""Folder of a run: its traces, the devices of its plan, and the times of its steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from legoai.cost.calibration.observed.trace_files import TraceError, TraceFile, read_trace
from legoai.runtime.metrics.log import METRICS
from legoai.runtime.metrics.records import read_records

_STEP: Final = re.compile(r"step-(\d+)-rank-\d+")
_PROFILE: Final = "`legoai run FILE -- --profile-step N`"


class RunFolderError(ValueError):
    """A folder is unsuitable for calibration; the message gives the reason, and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Files of a run.

    Attributes:
        path: of the folder.
        start: the last run's first record; empty where there are no metrics.
        cluster: the plan's devices as recorded by `legoai run`; empty where the program was started otherwise.
        profile: name of the profile with which the run was predicted; empty where it was not.
        traces: paths of traces by their step.
    """

    path: Path
    start: Mapping[str, Any]
    cluster: Mapping[str, Any]
    profile: str
    traces: Mapping[str, tuple[Path, ...]]

    @property
    def ranks_per_host(self) -> int | None:
        """Ranks on one host; None where the run does not record it."""
        for found in (self.start.get("local_world"), self.cluster.get("devices")):
            if isinstance(found, int) and found > 0:
                return found
        return None

    def read(self, step: str) -> Iterator[TraceFile]:
        """Yield the traces of one step one by one, since those of many ranks are large.

        Raises:
            RunFolderError: a trace is not readable, or belongs to another run.
        """
        world, ranks = self.start.get("world"), set[int]()
        for path in self.traces[step]:
            try:
                trace = read_trace(path)
            except TraceError as error:
                raise RunFolderError(str(error)) from error
            if trace.rank in ranks:
                folder = self.path / "profile"
                raise RunFolderError(f"{folder} has two traces of one rank of step {step or '?'}; remove one")
            if isinstance(world, int) and trace.world not in (world, trace.rank + 1):
                raise RunFolderError(
                    f"{trace.path} is a trace of {trace.world} ranks, and the run had {world}: it is of another "
                    "program; remove it, or profile a step again"
                )
            ranks.add(trace.rank)
            yield trace


def run_folder(path: Path) -> RunFolder:
    """Read a run's folder.

    Raises:
        RunFolderError: the folder is missing, or holds no trace.
    """
    if not path.is_dir():
        raise RunFolderError(f"there is no folder {path}; a run is kept in runs/NAME")
    folder = path / "profile"
    found = sorted(folder.glob("*.json")) if folder.is_dir() else []
    found += [one for one in sorted(folder.glob("*.json.gz")) if one.with_suffix("") not in found]
    if not found:
        raise RunFolderError(f"{path} has no profile of a step, in {folder.name}/; {_PROFILE} writes one of each rank")
    traces: dict[str, tuple[Path, ...]] = {}
    for one in found:
        match = _STEP.match(one.name)
        step = match[1] if match is not None else ""
        traces[step] = (*traces.get(step, ()), one)
    start: Mapping[str, Any] = {}
    cluster: Mapping[str, Any] = {}
    profile = ""
    for event in read_records(path / METRICS):
        match event.get("event"):
            case "start":
                start = event
            case "cluster":
                cluster = event
            case "prediction":
                said = event.get("predicted")
                profile = str(said.get("profile", "")) if isinstance(said, dict) else ""
    return RunFolder(path=path, start=start, cluster=cluster, profile=profile, traces=traces)
