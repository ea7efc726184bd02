"""A stop signal is recorded, and one that arrives while processes are forked is not lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from legoai.runtime.launching.signals import StopRequest

FORKING = """
import os, signal, time
from legoai.runtime.launching.signals import held_signals, release_signals

os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
reader, writer = os.pipe()
child = None
try:
    with held_signals():
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
            os.write(writer, b"x")
            release_signals()
            while True:
                time.sleep(0.01)
    heard = False
except KeyboardInterrupt:
    heard = True
os.read(reader, 1)
os.kill(child, signal.SIGTERM)
print(heard, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_interrupt_during_a_fork_is_not_lost():
    done = subprocess.run([sys.executable, "-c", FORKING], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "3"]


@pytest.mark.parametrize("number", StopRequest.SIGNALS)
def test_stop_signal_is_recorded(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), number)
            assert stop.signal == number
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_hangup_stays_ignored_as_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)
