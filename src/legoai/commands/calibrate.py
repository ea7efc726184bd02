"""`legoai calibrate`: measures this machine, or reads runs, and writes a device and its profile for plans to name."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legoai.commands import WrongUsage
from legoai.commands.cost import device_or_file
from legoai.commands.shared import announce, output_file
from legoai.specs.cluster import CatalogueError

if TYPE_CHECKING:
    from legoai.cost.calibration.update import Part

_DESCRIPTION = """\
Measure the kernels of this machine, and with --processes the collectives among processes on it. Two files are
written beside each other: NAME.toml, which describes the device, so that a plan can say
`cluster profile("NAME.toml")`, and NAME.json.gz, its profile: what was measured, with date, machine, torch
version, and the error on measurements that were not used.

Other work on the machine disturbs a calibration. Of repeated measurements the median counts.

With --from nothing is measured here: the profiled steps of runs on your own cluster update the profile of the
plan's device. A part of it changes only if the new one has a smaller median error on held-out measurements.
"""

_EXAMPLES = """\
examples:
  legoai calibrate                                  the gpu, or without one the cpu, into calibrated.toml
  legoai calibrate --device cpu --processes 2       and the collectives of two processes over gloo
  legoai calibrate -o our_gpu.toml --seconds 600    more measurements
  legoai calibrate --from runs/llama -o ours.toml   from a run with `legoai run FILE -- --profile-step 20`
"""
_SECONDS = 120.0


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai calibrate`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("-o", "--output", metavar="FILE", type=output_file, default=Path("calibrated.toml"),
                        help="the device file; its profile is written beside it (default: %(default)s)")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what to measure (default: cuda where there is one)")
    parser.add_argument("--seconds", type=_seconds, metavar="S",
                        help="how long to measure, about; on a CPU, allocating operands takes up to a minute more "
                        f"(default: {_SECONDS:g})")  # fmt: skip
    parser.add_argument("--processes", type=_processes, metavar="N",
                        help="processes among which collectives are measured (default: none are)")  # fmt: skip
    parser.add_argument("--from", dest="runs", metavar="RUN", action="append", type=Path, default=[],
                        help="a run's folder, with the profile of a step; may be given several times")  # fmt: skip
    parser.add_argument("--base", metavar="DEVICE", type=device_or_file,
                        help="with --from, the device to update: a name of the catalogue, or a device file with its "
                        "profile beside it (default: that of the run's plan)")  # fmt: skip


def run(arguments: Namespace) -> int:
    """Measure and write; returns 0."""
    path: Path = arguments.output
    if path.suffix != ".toml":
        raise WrongUsage(f"--output names the device file, which ends in .toml, not `{path}`")
    if not path.stem.isprintable():
        raise WrongUsage(f"{str(path)!r} has characters that the name of a device cannot have: choose another name")
    if arguments.runs:
        return _from_runs(path, arguments)
    if arguments.base is not None:
        raise WrongUsage("--base names what --from RUN updates, and there is no --from")
    from legoai.cost.calibration.output import OutputError
    from legoai.cost.calibration.runs import NoDeviceError, calibrate_machine

    try:
        errors = calibrate_machine(
            path,
            device=arguments.device,
            seconds=arguments.seconds or _SECONDS,
            processes=arguments.processes or 1,
            progress=announce,
        )
    except (NoDeviceError, OutputError) as error:
        raise WrongUsage(str(error)) from error
    for label, left_out in errors.items():
        if left_out.get("rows"):
            print(f"{label:24} {left_out['median']:6.1%} median error on {left_out['rows']} measurements held out")
    print(f"wrote {path} and {path.with_suffix('.json.gz')}")
    sys.stdout.flush()
    return 0


def _from_runs(path: Path, arguments: Namespace) -> int:
    """Update a profile from runs, and report the result for each part."""
    for option in ("device", "seconds", "processes"):
        if getattr(arguments, option) is not None:
            raise WrongUsage(f"--{option} says how to measure this machine, and --from measures nothing here")
    from legoai.cost.calibration.from_run import calibrate_from
    from legoai.cost.calibration.observed.run_folder import RunFolderError
    from legoai.cost.calibration.output import OutputError
    from legoai.cost.profiles import ProfileError

    try:
        found = calibrate_from(path, arguments.runs, base=arguments.base, progress=announce)
    except (RunFolderError, ProfileError, CatalogueError, OutputError) as error:
        raise WrongUsage(str(error)) from error
    print(f"{'':48} {'seen':>4} {'held out':>8} {f'error of {found.base}':>20} {'new':>7}")
    for part in found.parts:
        print(_line(part))
    for note in found.notes:
        print(note)
    print(f"wrote {path} and {path.with_suffix('.json.gz')}")
    sys.stdout.flush()
    return 0


def _line(part: Part) -> str:
    """A part of the profile, with the median errors on held-out measurements."""
    rows, before, after = "", "", ""
    if part.trial is not None and part.trial.after["rows"]:
        rows = str(part.trial.after["rows"])
        before, after = _median(part.trial.before), _median(part.trial.after)
    return f"{part.name:48} {part.seen:4} {rows:>8} {before:>20} {after:>7}  {part.result}: {part.how}"


def _median(error: Mapping[str, Any]) -> str:
    return f"{error['median']:.1%}"


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86_400:
        raise ArgumentTypeError(f"expected seconds, from 1 to 86400, not {text!r}")
    return seconds


def _processes(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise ArgumentTypeError(f"expected a number of processes, from 1 to 64, not {text!r}")
    return int(text)
