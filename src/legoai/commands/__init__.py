"""The table of commands; each command's module is imported when it is used."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, cast

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

COMMANDS: Final[dict[str, str]] = {
    "new": "write a first plan of a model on a cluster, with holes that `solve` fills",
    "lint": "find mistakes in plans without running anything",
    "fmt": "lay plans out in the one canonical form",
    "explain": "explain any word of the language, or a plan's statements about one module",
    "lower": "print the PyTorch program that a plan becomes",
    "cost": "predict what a plan costs in time and memory, without a GPU",
    "check": "simulate plans, and enforce their `require` lines",
    "solve": "fill the holes of a plan with the values that make it fastest",
    "diff": "compare two plans, and show what each changed line costs",
    "graph": "draw a plan's mesh, pipeline or step",
    "verify": "run a shrunken copy of a plan here and compare it with one device",
    "run": "lower a plan and train it on this machine",
    "export": "write a checkpoint's weights as Hugging Face publishes them",
    "import": "make a plan of a TorchTitan config, and list what no plan says",
    "calibrate": "measure this machine, and write a device and its profile for plans to name",
    "lsp": "serve editors: diagnostics, fixes, hover, completion, formatting, and what each line costs",
    "completion": "print a script that completes these commands in a shell",
}
"""Name to what the command does, in the order in which help lists them."""

_PASSING_ON: Final = ("diff", "run")


class WrongUsage(Exception):  # noqa: N818 - the person's, not the program's
    """A command line that cannot be followed."""


class Command(Protocol):
    """The functions of a command's module."""

    def configure(self, parser: ArgumentParser) -> None:
        """Add the command's arguments, description and examples."""

    def run(self, arguments: Namespace) -> int:
        """Do it; the result is the exit status."""


class _Formatter(RawDescriptionHelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Fill the paragraphs that the terminal is too narrow for; examples stay lines."""
        from textwrap import fill

        def fitted(block: str) -> str:
            if "\n " in block or all(len(line) <= width for line in block.split("\n")):
                return block
            return fill(" ".join(block.split()), width, break_long_words=False, break_on_hyphens=False)

        return super()._fill_text("\n\n".join(map(fitted, text.strip().split("\n\n"))), width, indent)


_WRONG_CHOICE: Final = re.compile(r"argument .*: invalid choice: (['\"])(.*)\1 \(choose from (.*)\)", re.DOTALL)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report wrong usage, with the word that was most likely meant."""
        from legoai.dsl.diagnostics.suggestion import suggestion

        wrong = _WRONG_CHOICE.fullmatch(message)
        hint = [] if wrong is None else suggestion(wrong[2], re.findall(r"[\w-]+", wrong[3]))
        super().error("; ".join([message, *hint]))

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help; unlike argparse's own, fail where it cannot be written."""
        (file or sys.stdout).write(self.format_help())


def command(name: str) -> Command:
    """The command called ``name``, one of :data:`COMMANDS`."""
    return cast(Command, import_module(f"legoai.commands.{name}{'_' * iskeyword(name)}"))


def parse(name: str, arguments: Sequence[str]) -> Namespace:
    """The arguments of a command. Those after `--` are in ``arguments`` if the command passes them on."""
    rest: Sequence[str] = ()
    if name in _PASSING_ON and "--" in arguments:
        cut = arguments.index("--")
        arguments, rest = arguments[:cut], arguments[cut + 1 :]
    parser = parser_of(name)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        hint = _similar_option(parser, unknown)
        after = ["options of the trainer stand behind ` -- `"] if name == "run" else []
        parser.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *hint, *after]))
    if name in _PASSING_ON:
        parsed.arguments = list(rest)
    return parsed


def _similar_option(parser: ArgumentParser, unknown: Sequence[str]) -> list[str]:
    """Return help on the first of the unknown arguments that is an option."""
    from legoai.dsl.diagnostics.suggestion import closest

    known = [word[2:] for action in parser._actions for word in action.option_strings if word.startswith("--")]
    words = [word.lstrip("-").partition("=")[0] for word in unknown if word.startswith("-")]
    match = closest(words[0], known) if words else None
    return [f"did you mean `--{match}`?"] if match else []


def parser_of(name: str) -> ArgumentParser:
    """The parser of a command's arguments."""
    parser = _Parser(prog=f"legoai {name}", formatter_class=_Formatter, allow_abbrev=False)
    command(name).configure(parser)
    return parser
