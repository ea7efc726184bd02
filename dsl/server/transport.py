"""Transport of the protocol over standard input and output."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from typing import Final

from lsprotocol import types
from pygls.exceptions import JsonRpcException
from pygls.io_ import run_async
from pygls.protocol import json_rpc

from legoai.dsl.server.server import PlanServer

TERMINATED: Final = 128 + signal.SIGTERM
_CHUNK: Final = 2**16
_NO_CLIENT: Final = (BrokenPipeError, asyncio.IncompleteReadError)


class _Output:
    """Writes messages to a file of its own: whatever else is printed goes to standard error."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Write a message as a whole."""
        with self._lock:
            while data:
                data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        """Nothing: the process ends right after, and closes it."""


def serve(server: PlanServer) -> int:
    """Serve the client on standard input and output until it leaves; the result is the exit status.

    Raises:
        KeyboardInterrupt: the process was interrupted.
    """
    logging.getLogger("pygls").setLevel(logging.ERROR)  # of requests that were cancelled too late, and the like
    json_rpc.logger.addFilter(_is_failure)
    output = os.dup(1)
    with contextlib.suppress(OSError):  # there may be no standard error
        os.dup2(2, 1)
    try:
        asyncio.run(_serve(server, output))
    except SystemExit as stop:  # `exit`: 0 where `shutdown` came before
        return stop.code if isinstance(stop.code, int) else 1
    except _NO_CLIENT:
        return 0
    except asyncio.CancelledError:
        return TERMINATED
    finally:
        server.stop()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            os.dup2(output, 1)
        os.close(output)
    return 0


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether a record is not about a request that a handler refused: its client has the reason as the answer."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, JsonRpcException) and error.code == types.LSPErrorCodes.RequestFailed)


async def _serve(server: PlanServer, output: int) -> None:
    server.protocol.set_writer(_Output(output))
    reader = asyncio.StreamReader()
    # A thread that never keeps the process from ending, since nothing can end a read of standard input; the reading
    # that asyncio offers is of pipes alone.
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "this runs in a task"
    # What was started ends with the server, also where an editor does not wait for it to take its leave.
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    threading.Thread(target=_feed, args=(reader, loop), name="standard input", daemon=True).start()
    await run_async(
        stop_event=threading.Event(),
        reader=reader,
        protocol=server.protocol,
        error_handler=server.report_server_error,
    )


def _feed(reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        while True:
            try:
                data = os.read(0, _CHUNK)
            except OSError:
                data = b""
            if not data:
                loop.call_soon_threadsafe(reader.feed_eof)
                return
            loop.call_soon_threadsafe(reader.feed_data, data)
