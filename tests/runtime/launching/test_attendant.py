"""The thread of a rank that attends to its launcher ends before the interpreter does."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading

import pytest

from legoai.runtime.launching import attendant


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch):
    """The handlers that `attend` leaves for the exit, and the threads that it starts."""
    handlers: list = []
    monkeypatch.setattr(atexit, "register", handlers.append)
    monkeypatch.setattr(attendant, "end_with_parent", lambda *_: None)
    before = set(threading.enumerate())

    def start(store: object) -> tuple[list, list[threading.Thread]]:
        monkeypatch.setattr(attendant, "launcher_store", lambda: store)
        attendant.attend()
        return handlers, [thread for thread in threading.enumerate() if thread not in before]

    yield start
    for handler in handlers:
        handler()


class SlowStore:
    """A launcher's store that is asked, and answers later."""

    def __init__(self) -> None:
        self.asked, self.answers, self.left = threading.Event(), threading.Event(), False

    def check(self, _: list[str]) -> bool:
        self.asked.set()
        assert self.answers.wait(10)
        self.left = True
        return False


def test_exit_waits_for_a_pending_store_query(started, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    monkeypatch.setattr(attendant, "interval", lambda: 0.001)
    store = SlowStore()
    [leave], [thread] = started(store)
    assert store.asked.wait(10)
    threading.Timer(0.05, store.answers.set).start()
    leave()
    assert store.left and not thread.is_alive()


def test_exit_does_not_wait_for_the_next_poll(started, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    monkeypatch.setattr(attendant, "interval", lambda: 1000.0)
    [leave], [thread] = started(SlowStore())
    leave()
    assert not thread.is_alive()


LEAVING = """
import atexit, os, signal, time
from types import SimpleNamespace
from legoai.runtime import Trainer
from support.training import programs

def interrupted():
    print("leaves", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)

atexit.register(interrupted)
Trainer.fit = lambda trainer, options: SimpleNamespace(stopped_by=None)
programs.trainer().main(["--steps", "1"])
print("done", flush=True)
"""


def test_interruption_after_the_work_prints_nothing():
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "a run", "WORLD_SIZE": "1", "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", LEAVING], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done\nleaves\n", "", -signal.SIGINT)


def test_process_without_torchrun_has_no_thread(started, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert started(None) == ([], [])
