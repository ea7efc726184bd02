"""Commands in forks of the test process, which has imported what a process of their own would import anew.

A process that is started imports torch for seconds before it simulates. Tests whose subject is what a command says and
writes need none, but where nothing else may stand on standard error: `support.commands.command_line.started` sets what
torch reads when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from legoai.cli import main
from support.simulation.simulated import in_a_fork


def forked(*argv: str) -> subprocess.CompletedProcess[str]:
    """A command in a fork: a simulation leaves threads behind, after which a process cannot be forked."""
    status, out, err = in_a_fork(_outputs, argv)
    return subprocess.CompletedProcess(argv, status, out, err)


def _outputs(argv: tuple[str, ...]) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command, those of its own child processes among them."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        for number, file in ((1, out), (2, err)):
            os.dup2(file.fileno(), number)
        streams = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115 - of the fork
        sys.stdout, sys.stderr = streams
        status = main(argv)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for file in (out, err):
            file.seek(0)
        return status, out.read().decode("utf-8"), err.read().decode("utf-8")
