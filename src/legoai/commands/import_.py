"""`legoai import`: a plan from a TorchTitan config."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from legoai.commands import WrongUsage
from legoai.commands.making import add_place, check_place, cluster_named, plan_name
from legoai.commands.shared import (
    STANDARD_OUTPUT,
    add_output,
    announce,
    check_outputs,
    files_of,
    say,
    show,
    summary,
    write,
)
from legoai.dsl.diagnostics.diagnostic import Diagnostic, errors_of
from legoai.dsl.frontend.files.sources import Source, UnreadableError, read_source
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.lint import lint
from legoai.dsl.reporting.output import render
from legoai.specs.units import counted

if TYPE_CHECKING:
    from legoai.dsl.importing.config import Config
    from legoai.dsl.importing.translation import Imported

_DESCRIPTION = """\
Convert a config of TorchTitan into a plan: a function of a Python file (since February 2026), which is read and
never run, or a TOML file (before). A config does not contain the devices: name them with --cluster, as in a plan.
Every option is translated, or listed on standard error with the reason: those that do not affect the schedule, and
those that change what is trained and that no plan can state, which are diagnostics too.

The exit status is 1 if no plan can be made, if an option that changes something is not translated, or if the
plan has errors.
"""

_EXAMPLES = """\
examples:
  legoai import torchtitan/models/llama3/config_registry.py --config llama3_8b --cluster h100_sxm
  legoai import my_runs.py --config llama3_70b_tp8 --set training.steps=3000 -o llama3_70b.plan
  legoai import llama3_8b.toml --cluster h100_sxm                      to standard output
  legoai import llama3_8b.toml --cluster h100_sxm -o llama3_8b.plan    into a file
  legoai import llama3_70b.toml --cluster 'h100_sxm(hosts=8,fabric=infiniband_ndr)'
  legoai import debug_model.toml --cluster 'cpu(devices=8)' --json     the plan and all reasons, for a program
"""

_PER_HOST: Final = 8


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai import`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("file", metavar="FILE", help="a TorchTitan config, in TOML or Python, or - for one in TOML")
    parser.add_argument("--config", metavar="NAME", help="the function of a Python file that makes the config")
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="OPTION=VALUE",
        type=_setting,
        action="append",
        default=[],
        help="what TorchTitan's command line gives an option, such as training.steps=3000; may be repeated",
    )
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help="the devices, as a plan's `cluster` says them (default: H100s, as many as the degrees make, or 8)",
    )
    add_place(parser)
    parser.add_argument("--json", action="store_true", help="print the plan and all that is said of it as JSON")
    add_output(parser)


def run(arguments: Namespace) -> int:
    """Import; returns 1 where no plan is made, or it does not state all of the config, or has errors."""
    output: Path = arguments.output
    check_place(arguments)
    try:
        source = read_source(arguments.file)
    except UnreadableError as error:
        if arguments.json:
            _print_json(None, [error.diagnostic], files_of(error))
        else:
            show([error.diagnostic], files_of(error), stream=sys.stderr, color=arguments.color)
        return 1
    is_python = source.path is not None and source.path.suffix == ".py"
    if arguments.config is not None and not is_python:
        raise WrongUsage("--config names a function of a Python file")
    name = plan_name(arguments.name, output, arguments.config or (source.path or Path("imported")).stem)
    cluster, devices = _cluster(arguments.cluster, lambda: _read(source, arguments))
    from legoai.dsl.importing.translation import translated

    config = _read(source, arguments)
    check_outputs([output], ((Path(name), "the config that is read") for name in (source.name, *config.files)))
    found = translated(config, plan=name, cluster=cluster, devices=devices)
    texts = {source.name: source.text, **config.files, **config.settings}
    files = {name: PlanFile(name, text, (), ()) for name, text in texts.items()}
    diagnostics = [*found.diagnostics]
    if found.text is not None:
        linted, of_plan = _linted(found.text, f"{name}.plan" if output == STANDARD_OUTPUT else str(output))
        diagnostics += linted
        files |= of_plan
    _report(found, diagnostics, files, arguments, assumed=None if arguments.cluster else cluster)
    _put(found, diagnostics, files, arguments)
    complete = found.text is not None and not any(item.changes for item in found.unused)
    return int(not complete or len(errors_of(diagnostics)) > 0)


def _setting(text: str) -> tuple[str, str]:
    name, sign, value = text.removeprefix("--").partition("=")
    if not sign or not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
        raise ArgumentTypeError(f"expected OPTION=VALUE, such as training.steps=3000, not {text!r}")
    return name.replace("-", "_"), value.strip()


def _read(source: Source, arguments: Namespace) -> Config:
    """The options of the config, in the format that the file's name tells."""
    settings = dict(arguments.settings)
    if source.path is not None and source.path.suffix == ".py":
        from legoai.dsl.importing.python_config import read_python

        return read_python(source.text, source.name, source.path, arguments.config, settings)
    from legoai.dsl.importing.config import read_config

    return read_config(source.text, source.name, settings)


def _cluster(given: str | None, read: Callable[[], Config]) -> tuple[str, int]:
    """The value of the plan's `cluster`, and its devices.

    Raises:
        WrongUsage: what is given is no cluster.
    """
    if given is None:
        from legoai.dsl.importing.translation import devices_of

        config = read()
        devices = (None if config.has_errors else devices_of(config)) or _PER_HOST
        return _usual(devices), devices
    return cluster_named(given)


def _usual(devices: int) -> str:
    """So many H100s, on hosts of eight where they are more."""
    if devices == _PER_HOST:
        return "h100_sxm"
    if devices < _PER_HOST:
        return f"h100_sxm(devices = {devices})"
    if devices % _PER_HOST:
        raise WrongUsage(
            f"the degrees make {devices} devices, which fill no hosts of {_PER_HOST}: name them by --cluster"
        )
    return f"h100_sxm(hosts = {devices // _PER_HOST}, fabric = infiniband_ndr)"


def _linted(text: str, name: str) -> tuple[Sequence[Diagnostic], dict[str, PlanFile]]:
    """Errors and warnings of the plan; advice is left to `legoai lint`."""
    linted = lint(text, name, directory=Path(name).parent)
    return [item for item in linted.diagnostics if item.severity != "advice"], dict(linted.files)


def _report(
    found: Imported,
    diagnostics: Sequence[Diagnostic],
    files: dict[str, PlanFile],
    arguments: Namespace,
    *,
    assumed: str | None,
) -> None:
    """Report on standard error what is wrong, what was assumed, and which options became no statement."""
    if arguments.json:
        return
    show(diagnostics, files, stream=sys.stderr, color=arguments.color)
    if arguments.quiet:
        return
    if assumed is not None and found.text is not None:
        announce(f"a config does not say its devices, taken to be `{assumed}`; name them with --cluster")
    for note in found.notes:
        announce(note)
    reasons: dict[str, list[str]] = {}
    for item in found.unused:
        if not item.changes:
            reasons.setdefault(item.why, []).append(item.name)
    for why, names in reasons.items():
        announce(f"not translated, without effect on the plan: {', '.join(names)}: {why}")
    if diagnostics:
        say(f"{arguments.file}: {summary(diagnostics)}")
    count = len(found.unused)
    if found.text is not None:
        print(f"read as a config {found.version}; {counted(count, 'option')} became no statement", file=sys.stderr)


def _put(found: Imported, diagnostics: Sequence[Diagnostic], files: dict[str, PlanFile], arguments: Namespace) -> None:
    """Write the plan where it belongs.

    Raises:
        WrongUsage: it cannot be written.
    """
    if arguments.json:
        _print_json(found, diagnostics, files)
    if found.text is None:
        return
    if arguments.output != STANDARD_OUTPUT or not arguments.json:
        write(arguments.output, found.text)


def _print_json(found: Imported | None, diagnostics: Sequence[Diagnostic], files: dict[str, PlanFile]) -> None:
    """Print diagnostics as `legoai lint` does, the plan, and the options that became no statement.

    ``found`` is None where the config cannot be read.
    """
    document: dict[str, Any] = json.loads(render("json", diagnostics, files))
    document |= {
        "plan": found and found.text,
        "version": found and found.version,
        "notes": list(found.notes) if found else [],
        "untranslated": [
            {"option": item.name, "value": item.value, "reason": item.why, "changes": item.changes}
            for item in (found.unused if found else ())
        ],
    }
    sys.stdout.write(json.dumps(document, indent=2, default=str) + "\n")
