"""Calibration from runs: a device file and a profile derived from the traces of training runs."""

from __future__ import annotations

import copy
import datetime
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from legoai.cost.calibration.observed.collectives import CollectiveTimes, StepCollectives, collective_times
from legoai.cost.calibration.observed.kernels import KernelTimes, kernel_times
from legoai.cost.calibration.observed.run_folder import RunFolder, RunFolderError, run_folder
from legoai.cost.calibration.observed.trace_files import TraceFile
from legoai.cost.calibration.output import check_output, write_output
from legoai.cost.calibration.update import Part, checked, update_kernels
from legoai.cost.calibration.update_links import update_links
from legoai.cost.machine.collective_time import Network, network_of
from legoai.cost.profiles import Profile, load, profile_names, shipped_file
from legoai.specs.cluster import CatalogueError, Cluster, Device, device, fabric, profile_path
from legoai.specs.device_file import load_device, text_of
from legoai.specs.profile_file import ProfileError, read_document
from legoai.specs.visible_text import visible_line

_SHOWN: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The device and the profile to update."""

    device: Device
    document: dict[str, Any]
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Result of a calibration from runs.

    Attributes:
        base: name of the profile that was updated.
        parts: result for each part of the profile.
        notes: further remarks, one per line.
    """

    base: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...]


def calibrate_from(
    path: Path, folders: Sequence[Path], *, base: str | None, progress: Callable[[str], None]
) -> Calibrated:
    """Write ``path`` and the profile beside it from the traces of runs.

    Args:
        path: the device file to write.
        folders: of the runs, of one kind of device.
        base: the device to update: a name of the catalogue, or a device file with its profile beside it. By default
            the one that the first run's plan names.
        progress: called with a description of what is being read.

    Raises:
        RunFolderError: a folder has nothing to calibrate from, or does not fit the base.
        ProfileError: the base has no readable profile.
        CatalogueError: the base is no device.
        OutputError: a file cannot be written.
    """
    check_output(path)
    runs = [run_folder(folder) for folder in folders]
    found = read_base(base or _named_base(runs[0]))
    kernels, collectives, seen = KernelTimes(), CollectiveTimes(), _Seen()
    observed: list[tuple[CollectiveTimes, Network]] = []
    for run in runs:
        network, of_run = _network(run, found), CollectiveTimes()
        for step, paths in run.traces.items():
            of_step, world = StepCollectives(), 0
            for trace in run.read(step):
                progress(f"{trace.path}: {len(trace.calls)} operators")
                _check(trace, found)
                kernels.add(kernel_times(trace, tf32="tf32" in found.profile.products))
                of_step.note(trace)
                seen.note(run, trace)
                world = max(world, trace.world)
            of_run.add(collective_times(of_step, devices_per_host=network.devices_per_host))
            seen.steps.append(f"{run.path}, step {step or '?'}, {len(paths)} of {world} ranks")
        collectives.add(of_run)
        observed.append((of_run, network))
    on_device = found.device.kind != "cpu"
    document = copy.deepcopy(found.document)
    parts = update_kernels(document, found.profile, kernels, on_device=on_device)
    parts += update_links(document, found.profile, observed, on_device=on_device)
    if not parts:
        raise RunFolderError(f"the traces of {runs[0].path} contain no operator that profiles cover")
    _sign(document, path.stem, found, parts, seen, collectives)
    checked(document)
    write_output(path, _device_text(path.stem, found.device, runs, seen), document)
    notes = (*_notes(kernels, collectives, seen), *_another(found, seen), *_untouched(found, document, parts))
    return Calibrated(base=found.profile.name, parts=tuple(parts), notes=notes)


def read_base(name: str) -> Base:
    """Return a device and its profile, by a name of the catalogue or by the path of a device file.

    Raises:
        CatalogueError: no such device.
        ProfileError: no such profile.
    """
    if name.endswith(".toml"):
        own = load_device(Path(name))
        beside = profile_path(Path(name))
        file = beside if beside.exists() else shipped_file(own.name)
    else:
        own, file = device(name), shipped_file(name)
    base, (document, _) = load(file), read_document(file)
    document.pop("format")
    return Base(device=own, document=document, profile=base)


def _named_base(run: RunFolder) -> str:
    """Return the device that the run's plan names."""
    file, name = run.cluster.get("profile"), run.cluster.get("device")
    if isinstance(file, str):
        if not Path(file).is_file():
            raise RunFolderError(
                f"{run.path} records {visible_line(file)} as the device file of its plan, which is not on this "
                f"machine; give --base DEVICE: {', '.join(profile_names())}, or a device file"
            )
        return file
    for found in (name, run.profile, run.start.get("device")):
        if isinstance(found, str) and found in profile_names():
            return found
    raise RunFolderError(
        f"{run.path} does not state which devices its plan is for, as its program was not started by `legoai run`; "
        f"give --base DEVICE: {', '.join(profile_names())}, or a device file"
    )


def _check(trace: TraceFile, base: Base) -> None:
    """Reject traces of another kind of device."""
    if trace.on_device and base.device.kind == "cpu":
        name = (trace.device or {}).get("name", "a GPU")
        raise RunFolderError(
            f"{trace.path} has kernels of {name}, and `{base.device.name}` is a CPU; --base names the GPU"
        )
    if not trace.on_device and base.device.kind != "cpu":
        raise RunFolderError(
            f"{trace.path} has no kernels of a GPU, and `{base.device.name}` is one: the run was on CPUs (--base cpu), "
            "or the profiler ran without CUPTI"
        )


def _network(run: RunFolder, base: Base) -> Network:
    """The network of a run's cluster as the base predicts it, with the fabric that its plan names."""
    per_host, name = run.ranks_per_host or base.device.devices_per_host, run.cluster.get("fabric")
    if isinstance(name, str):
        try:  # two hosts: a network is the same between any number of them
            cluster = Cluster(device=base.device, hosts=2, devices_per_host=per_host, fabric=fabric(name))
            return network_of(cluster, profile=base.profile)
        except (CatalogueError, ProfileError):
            pass
    return Network(devices_per_host=per_host, bandwidth=0.0, fabric=None)


class _Seen:
    """Summary of the traces that were read, for the sources of figures."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.torch: set[str] = set()
        self.processors: Counter[str] = Counter()
        self.capacity = 0

    def note(self, run: RunFolder, trace: TraceFile) -> None:
        """Add one trace of a run."""
        said = trace.device or {}
        self.torch.add(str(run.start.get("torch", "")))
        self.processors[str(said.get("name") or run.start.get("processor") or "")] += 1
        total = said.get("totalGlobalMem")
        self.capacity = total if isinstance(total, int) else self.capacity

    @property
    def processor(self) -> str:
        """The device of most of the traces."""
        return next((name for name, _ in self.processors.most_common() if name), "a processor without a name")


def _sign(  # noqa: PLR0917
    document: dict[str, Any], name: str, base: Base, parts: Sequence[Part], seen: _Seen, collectives: CollectiveTimes
) -> None:
    """Record in the document what its figures are based on."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    of_base = f"of the base, {base.profile.name}"
    for error in document["held_out"].values():
        error["note"] = "; ".join(filter(None, [str(error.get("note", "")), of_base]))
    for part in parts:
        if part.trial is not None and part.trial.after["rows"] and part.result != "kept":
            before = {f"base_{key}": value for key, value in part.trial.before.items() if key != "rows"}
            document["held_out"][part.name] = {**part.trial.after, **before}
    said = [f"{part.name}: {part.result}, {part.how}" for part in parts]
    source = {
        "what": f"an update of the profile {base.profile.name}, whose figures hold for all that is not named here",
        "from": f"legoai calibrate --from on {seen.processor}: {'; '.join(seen.steps)}",
        "dated": today,
        "torch": ", ".join(sorted(filter(None, seen.torch))) or None,
        "parts": said,
        "collectives": _of_collectives(collectives),
    }
    document.update(device=name, made=today, sources=[source, *document["sources"]])


def _of_collectives(found: CollectiveTimes) -> str:
    together, alone = (sum(map(len, seen.values())) for seen in (found.seconds, found.waited))
    if not together and not alone:
        return "none were seen"
    said = []
    if together:
        said.append(
            f"{together} that several ranks' traces show, each with the least of their times, as the last rank "
            "to arrive does not wait"
        )
    if alone:
        said.append(
            f"{alone} that one trace alone shows, as sends, or whose group is not known, whose times include waiting "
            "for others, so that the least of equal ones is used"
        )
    return "; ".join(said)


def _device_text(name: str, base: Device, runs: Sequence[RunFolder], seen: _Seen) -> str:
    """Return the base's device file with the new name, and the ranks per host and memory of the runs."""
    per_host = next((run.ranks_per_host for run in runs if run.ranks_per_host), base.devices_per_host)
    return text_of(
        base, name=name, description=f"{seen.processor}, calibrated from {base.name}", devices_per_host=per_host,
        capacity_bytes=seen.capacity or None,
    )  # fmt: skip


def _notes(kernels: KernelTimes, collectives: CollectiveTimes, seen: _Seen) -> Sequence[str]:
    notes = [f"read {step}" for step in seen.steps]
    if collectives.seconds or collectives.waited:
        notes.append(f"collectives: {_of_collectives(collectives)}")
    beside = set(kernels.beside) - set(kernels.seconds)
    if beside:
        notes.append(f"not used: {len(beside)} kinds of kernels that ran beside a collective each time")
    known = sum(map(sum, kernels.seconds.values())) + sum(map(sum, kernels.beside.values()))
    total = known + sum(kernels.unknown.values())
    if kernels.unknown:
        names = ", ".join(name for name in sorted(kernels.unknown, key=lambda name: -kernels.unknown[name])[:_SHOWN])
        more = " and others" if len(kernels.unknown) > _SHOWN else ""
        share = (total - known) / total if total else 0.0
        notes.append(f"not used: {share:.0%} of the kernels' time, for which the traces lack details: {names}{more}")
    for reason, count in collectives.unknown.most_common():
        notes.append(f"not used: {count} collectives: {reason}")
    return notes


def _another(base: Base, seen: _Seen) -> Sequence[str]:
    """Return a warning where the traces are of another device than the catalogue's device that is updated."""
    name, maker = base.device.name, seen.processor
    if base.device.kind == "cpu" or name not in profile_names() or name.partition("_")[0] in maker.lower():
        return []
    return [f"warning: the traces are of {maker}, which does not look like `{name}`; --base names another device"]


def _untouched(base: Base, document: Mapping[str, Any], parts: Sequence[Part]) -> Sequence[str]:
    """Return notes on parts that keep the base's figures because no trace shows them."""
    named = {part.name.partition(",")[0] for part in parts}
    kinds: dict[str, list[str]] = {}
    for kind in ("products", "attention", "movement"):
        kinds[kind] = [name for name in document[kind] if f"{kind} {name}" not in named]
    for kind, curves in document["links"].items():
        kinds[f"links {kind} of"] = [ranks for ranks in curves if f"links {kind} of {ranks}" not in named]
    changed = {f"{part.name.removeprefix('host ').replace(' ', '_')}_seconds" for part in parts}
    kinds["constants"] = [name for name in document["constants"] if name not in changed]
    return [
        f"untouched, as in {base.profile.name}: {kind} {', '.join(names)}" for kind, names in kinds.items() if names
    ]
