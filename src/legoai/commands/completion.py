"""`legoai completion`: a shell script that completes commands, options and their values."""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace
from typing import Any, Final, cast

from legoai.commands import COMMANDS, command
from legoai.commands.shared import put
from legoai.specs.cluster import device_names

_SHELLS: Final = ("bash", "zsh")
_FILES: Final = ("FILE", "OUT")
"""What arguments are called that name files."""
_PLANS: Final = ("file", "files", "plan", "plans")
"""Destinations of arguments that name a plan."""
_FOLDERS: Final = ("FOLDER", "DIR", "RUN", "PATH")

_FUNCTIONS: Final = {
    "bash": """\
_legoai_files() {
  compgen -f -- "$1"
}

_legoai_dirs() {
  compgen -d -- "$1"
}

_legoai_plan_files() {
  local plan
  for plan in *.plan plans/*.plan; do
    plan=${plan##*/}
    [[ $plan =~ ^[A-Za-z_][A-Za-z0-9_]*\\.plan$ ]] && compgen -W "plan.${plan%.plan}" -- "$1"
  done
  compgen -f -- "$1"
}

_legoai_device_files() {
  compgen -W "DEVICES" -- "$1"
  compgen -f -- "$1"
}
""",
    "zsh": """\
_legoai_plan_files() {
  local -a names
  names=(*.plan(N:t:r) plans/*.plan(N:t:r))
  compadd -- plan.${^names}
  _files
}

_legoai_device_files() {
  compadd -- DEVICES
  _files
}
""",
}
"""Shell functions that complete a plan, by its file or as `plan.NAME`, and a device, by its name or its file; for
bash also files and folders, as shtab's own functions split a path at its blanks.

shtab has bash quote blanks in what a function with `_file` or `_dir` in its name returns.
"""
_FILE: Final = {"bash": "_legoai_files", "zsh": "_files"}
_FOLDER: Final = {"bash": "_legoai_dirs", "zsh": "_files -/"}

_DESCRIPTION = """\
Print a script with which a shell completes commands, options, files, plans, devices, and the words that
`legoai explain` takes. Print it again after an update of LegoAI.
"""

_EXAMPLES = """\
examples:
  legoai completion bash    into ~/.local/share/bash-completion/completions/legoai
  legoai completion zsh     into a file called _legoai in a folder of $fpath
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `legoai completion`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=f"{' or '.join(_SHELLS)}")


def run(arguments: Namespace) -> int:
    """Print the script."""
    import shtab

    shell = arguments.shell
    functions = _FUNCTIONS[shell].replace("DEVICES", " ".join(device_names()))
    script = cast(Any, shtab).complete(_whole(), shell=shell, preamble=functions)
    put(script.rstrip() + "\n")
    return 0


def _whole() -> ArgumentParser:
    """All commands in one parser, with what completes their arguments."""
    from legoai.commands.explain import subjects

    whole = ArgumentParser(prog="legoai", allow_abbrev=False)
    whole.add_argument("-V", "--version", action="store_true", help="print the version")
    inside = whole.add_subparsers()
    for name, does in COMMANDS.items():
        parser = inside.add_parser(name, help=does, allow_abbrev=False)
        command(name).configure(parser)
        parser.description, parser.usage = does, None
        for action in parser._actions:
            if action.dest in _PLANS and name != "import":
                cast(Any, action).complete = dict.fromkeys(_SHELLS, "_legoai_plan_files")
            elif action.metavar == "DEVICE":
                cast(Any, action).complete = dict.fromkeys(_SHELLS, "_legoai_device_files")
            elif action.metavar in _FILES:
                cast(Any, action).complete = _FILE
            elif action.metavar in _FOLDERS:
                cast(Any, action).complete = _FOLDER
            elif action.metavar == "SUBJECT":
                action.choices = subjects()
            _describe(action)
    return whole


def _describe(action: Action) -> None:
    """Leave a help text of one line, as shells show it."""
    if action.help is not None:
        action.help = action.help.partition(" (")[0].partition(";")[0]
