"""`legoai calibrate`: measures this machine, and writes a device and its profile that a plan can name."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from legoai.commands import WrongUsage
from legoai.commands.shared import announce, output_file

_DESCRIPTION = """\
Measure the kernels of this machine, and with --processes the collectives among processes on it. Two files are
written beside each other: NAME.toml, which describes the device, so that a plan can say
`cluster profile("NAME.toml")`, and NAME.json.gz, its profile: what was measured, with date, machine, torch
version, and the error on measurements that were not used.

Other work on the machine disturbs a calibration. Of repeated measurements the least counts.
"""

_EXAMPLES = """\
examples:
  legoai calibrate                                  the gpu, or without one the cpu, into calibrated.toml
  legoai calibrate --device cpu --processes 2       and the collectives of two processes over gloo
  legoai calibrate -o our_gpu.toml --seconds 600    more measurements
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai calibrate`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("-o", "--output", metavar="FILE", type=output_file, default=Path("calibrated.toml"),
                        help="the device file; its profile is written beside it (default: %(default)s)")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what to measure (default: cuda where there is one)")
    parser.add_argument("--seconds", type=_seconds, default=120.0, metavar="S",
                        help="time to take, about (default: %(default)g)")  # fmt: skip
    parser.add_argument("--processes", type=_processes, default=1, metavar="N",
                        help="processes among which collectives are measured (default: none are)")  # fmt: skip


def run(arguments: Namespace) -> int:
    """Measure and write; returns 0."""
    path: Path = arguments.output
    if path.suffix != ".toml":
        raise WrongUsage(f"--output names the device file, which ends in .toml, not `{path}`")
    from legoai.cost.calibration.runs import NoDeviceError, calibrate_machine

    try:
        errors = calibrate_machine(
            path, device=arguments.device, seconds=arguments.seconds, processes=arguments.processes, progress=announce
        )
    except NoDeviceError as error:
        raise WrongUsage(str(error)) from error
    for label, left_out in errors.items():
        if left_out.get("rows"):
            print(f"{label:24} {left_out['median']:6.1%} median error on {left_out['rows']} measurements held out")
    print(f"wrote {path} and {path.with_suffix('.json.gz')}")
    sys.stdout.flush()
    return 0


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
