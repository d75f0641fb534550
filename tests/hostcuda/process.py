# SPDX-License-Identifier: MIT
"""A module's process: it serves one launch after another until a fault ends it."""

from __future__ import annotations

import atexit
import os
import select
import subprocess
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

_KEPT = 16
_SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:exitcode=66:quarantine_size_mb=16",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:history_size=7",
}
_servers: OrderedDict[Path, Server] = OrderedDict()


class ServerDied(Exception):
    """The process has ended, or was ended for not answering; the message is what it printed."""


class Server:
    """One process of a module.

    Parameters
    ----------
    program : Path
        The module.
    """

    def __init__(self, program: Path) -> None:
        request, self._request = os.pipe()
        self._answer, answer = os.pipe()
        # A file, since nobody would read a pipe while the launch runs.
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                [program, str(request), str(answer)],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                pass_fds=(request, answer),
                env={**os.environ, **_SANITIZER_OPTIONS},
            )
        finally:
            os.close(request)
            os.close(answer)

    def close(self) -> None:
        """End the process, and give back what belonged to it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if not self._printed.closed:
            self._printed.close()
            os.close(self._request)
            os.close(self._answer)

    def launch(self, request: list[bytes | memoryview], sizes: list[int], timeout: float):
        """Send one request and wait for the answer.

        Parameters
        ----------
        request : list of bytes
            As ``runtime/server.cpp`` describes it.
        sizes : list of int
            Bytes of each array in the answer.
        timeout : float
            Seconds.

        Returns
        -------
        arrays : list of bytearray
        printed : str
            What the kernel printed.

        Raises
        ------
        ServerDied
            With the report, if the process ended before it answered.
        """
        self._printed.seek(0)
        self._printed.truncate()
        deadline = time.monotonic() + timeout
        try:
            for part in request:
                view = memoryview(part).cast("B")
                while view:
                    view = view[os.write(self._request, view) :]
            self._read(8, deadline)
            arrays = [self._read(size, deadline) for size in sizes]
        except (BrokenPipeError, EOFError):
            self._process.wait()
            raise ServerDied(self._text()) from None
        except TimeoutError:
            self._process.kill()
            self._process.wait()
            raise ServerDied(
                f"{self._text()}hostcuda: no answer within {timeout:g} s; a thread loops without "
                "reaching a barrier, a wait or its end"
            ) from None
        return arrays, self._text()

    def _text(self) -> str:
        self._printed.seek(0)
        return self._printed.read().decode(errors="replace")

    def _read(self, size: int, deadline: float) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answer], [], [], left)[0]:
                raise TimeoutError
            got = os.readv(self._answer, [view])
            if got == 0:
                raise EOFError
            view = view[got:]
        return data


def server(program: Path) -> Server:
    """The process of a module: the one that served the last launch, or a new one."""
    found = _servers.pop(program, None) or Server(program)
    _servers[program] = found
    while len(_servers) > _KEPT:
        _servers.popitem(last=False)[1].close()
    return found


def forget(program: Path) -> None:
    """After a fault: the next launch starts a new process."""
    if found := _servers.pop(program, None):
        found.close()


@atexit.register
def _close_all() -> None:
    while _servers:
        _servers.popitem()[1].close()
