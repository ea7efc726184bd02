"""The command line: chooses the command, and turns whatever happens into an exit status."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from legoai import __version__
from legoai.commands import COMMANDS, WrongUsage, command, parse, parser_of

CLEAN, DIAGNOSTICS, FAILURE = 0, 1, 2
INTERRUPTED = 128 + 2
BROKEN_PIPE = 128 + 13

_PAGE = """\
A plan is a text file that states how a model is trained on a cluster. LegoAI checks it, predicts what it
costs, and turns it into a PyTorch program.

usage: legoai COMMAND [ARGUMENTS]

commands:
{commands}

A plan is named by its path; by plan.NAME, which means NAME.plan here or in plans/; or by -, which is
standard input.

examples:
  legoai lint plans/tiny.plan           find mistakes
  legoai lower plan.tiny                print the program that the plan becomes
  legoai cost plan.tiny                 predict its time and memory
  legoai run plan.tiny -- --steps 200   train it here, for 200 steps
  legoai explain LP401                  read about a diagnostic
  legoai explain fsdp                   read about a statement

`legoai COMMAND --help` describes a command. The exit status is 0 on success, 1 if a plan has
errors, and 2 if the command line is wrong or LegoAI itself failed.
"""


def entry() -> NoReturn:
    """Run the command line of this process, and end it.

    A search holds millions of objects, which Python would free one by one, in seconds: the process exits without that,
    after all output is written.
    """
    status = main()
    if sys.argv[1:2] == ["solve"]:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, by default the process's own; the result is the exit status."""
    _prepare_streams()
    try:
        try:
            status = _dispatch(list(sys.argv[1:] if argv is None else argv))
        except SystemExit as stop:  # after help, or a wrong command line
            status = stop.code if isinstance(stop.code, int) else FAILURE
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except OSError as error:
        from legoai.commands.failure import reason_of

        _fail(reason_of(error))
        _discard_output()
        return FAILURE
    except WrongUsage as error:
        _fail(str(error))
        return FAILURE
    except Exception as error:
        from legoai.commands.failure import internal_error

        print(internal_error(error), file=sys.stderr)
        return FAILURE
    return status


def _fail(reason: str) -> None:
    from legoai.commands.shared import announce

    announce(reason)


def help_page() -> str:
    """What `legoai --help` prints."""
    width = max(map(len, COMMANDS))
    return _PAGE.format(commands="\n".join(f"  {name:<{width}}  {does}" for name, does in COMMANDS.items()))


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else ""
    if first in COMMANDS:
        return command(first).run(parse(first, arguments[1:]))
    if first in ("-h", "--help", "help"):
        return _help(arguments[1:])
    if first in ("-V", "--version"):
        print(f"legoai {__version__}")
        return CLEAN
    if not first:
        sys.stderr.write(help_page())
        return FAILURE
    return _unknown(first)


def _unknown(first: str) -> int:
    from legoai.dsl.diagnostics.suggestion import suggestion

    what = "option" if first.startswith("-") else "command"
    hint = suggestion(first, tuple(COMMANDS)) or [f"commands are {', '.join(COMMANDS)}"]
    print(f"legoai: there is no {what} `{first}`; {hint[0]}\n`legoai --help` lists what there is", file=sys.stderr)
    return FAILURE


def _prepare_streams() -> None:
    """Make both output streams accept any text, and exist even in a process that was started without them.

    Messages show what a terminal's encoding lacks as escapes. Contents of files are written by `shared.put`.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115 - stays open to the end
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115 - stays open to the end
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Discard what is still buffered: writing it would fail again when Python exits."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return  # standard output is no file, or closed


def _help(arguments: list[str]) -> int:
    if not arguments:
        sys.stdout.write(help_page())
        return CLEAN
    if arguments[0] not in COMMANDS:
        return _unknown(arguments[0])
    parser_of(arguments[0]).print_help()
    return CLEAN
