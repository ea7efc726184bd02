"""`legoai completion`: a shell script that completes commands, options and their values."""

from __future__ import annotations

import sys
from argparse import Action, ArgumentParser, Namespace
from typing import Any, Final, cast

from legoai.commands import COMMANDS, command

_SHELLS: Final = ("bash", "zsh")
_FILES: Final = ("FILE", "OUT", "DEVICE")
"""What arguments are called that name files. A device has a file, or a name of the catalogue."""
_FOLDERS: Final = ("FOLDER", "DIR", "RUN", "PATH")

_DESCRIPTION = """\
Print a script with which a shell completes commands, options, files, and the words that `legoai explain` takes.
Print it again after an update of LegoAI.
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

    known = cast(Any, shtab)
    sys.stdout.write(shtab.complete(_whole(known.FILE, known.DIRECTORY), shell=arguments.shell).rstrip() + "\n")
    return 0


def _whole(file: Any, folder: Any) -> ArgumentParser:
    """All commands in one parser, with what completes a file and a folder."""
    from legoai.commands.explain import subjects

    whole = ArgumentParser(prog="legoai", allow_abbrev=False)
    whole.add_argument("-V", "--version", action="store_true", help="print the version")
    inside = whole.add_subparsers()
    for name, does in COMMANDS.items():
        parser = inside.add_parser(name, help=does, allow_abbrev=False)
        command(name).configure(parser)
        parser.description, parser.usage = does, None
        for action in parser._actions:
            if action.metavar in _FILES:
                cast(Any, action).complete = file
            elif action.metavar in _FOLDERS:
                cast(Any, action).complete = folder
            elif action.metavar == "SUBJECT":
                action.choices = subjects()
            _describe(action)
    return whole


def _describe(action: Action) -> None:
    """Leave a help text of one line, as shells show it."""
    if action.help is not None:
        action.help = action.help.partition(" (")[0].partition(";")[0]
