# SPDX-License-Identifier: MIT
"""The command line: ``python -m cupyflash COMMAND``.

::

    python -m cupyflash info     versions, devices, cache, what is missing and how to install it
    python -m cupyflash plan     how a call would run: tiles, grid, HBM traffic; needs no GPU
    python -m cupyflash run      attention over arrays in .npy or .npz files
    python -m cupyflash demo     denoise a photograph by attention
    python -m cupyflash bench    time attention against cuDNN, FlashAttention and plain CuPy

    python -m cupyflash plan --seqlen 4096 --head-dim 64 --dtype float32 --device H200
    python -m cupyflash run q.npy k.npy v.npy --causal -o o.npy

``COMMAND --help`` lists the options. The exit code is 0, 2 for what the user has to change (said
on one line of stderr), and 130 after Ctrl-C. A command whose reader goes away (``| head``) still
does its work and writes its files.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from cupyflash import __version__, _cli_bench, _cli_info, _cli_plan, _cli_run, demo
from cupyflash._cli_common import CommandError
from cupyflash._messages import one_line

_COMMANDS = {
    "info": (_cli_info, "versions, devices, cache, and what is missing"),
    "plan": (_cli_plan, "how a call would run: tiles, grid, HBM traffic; needs no GPU"),
    "run": (_cli_run, "attention over arrays in .npy or .npz files"),
    "demo": (demo, "denoise a photograph by attention"),
    "bench": (_cli_bench, "time attention against cuDNN, FlashAttention and plain CuPy"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        Default: the arguments of this process.

    Returns
    -------
    int
        The exit code.

    Raises
    ------
    SystemExit
        From argparse, after ``--help`` (code 0) or for an option that it refuses (code 2).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file's name may have any characters
            stream.reconfigure(errors="backslashreplace")
    args = _parser().parse_args(_attached(sys.argv[1:] if argv is None else argv))
    module, _ = _COMMANDS[args.command]
    stdout = None if sys.stdout is None else _Output(sys.stdout)  # None: closed before the start
    try:
        with contextlib.redirect_stdout(stdout):
            module.command(args)
            if stdout is not None:
                stdout.flush()
    except CommandError as error:
        print(f"cupyflash {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ncupyflash {args.command}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if stdout is not None:
            stdout.discard()
        print(f"cupyflash {args.command}: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


class _Output:
    """stdout, which falls silent when its reader (head, a pager) has gone."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop what nobody reads."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self.discard()
            return len(text)

    def flush(self) -> None:
        """Flush, or drop what nobody reads."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self.discard()

    def discard(self) -> None:
        """Write to nowhere from now on: nothing must be flushed into the stream at exit."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class _Parser(argparse.ArgumentParser):
    """One that says what is wrong on one line, as the commands do."""

    def error(self, message: str) -> NoReturn:
        """Leave with exit code 2."""
        name = self.prog.removeprefix("python -m ")
        self.exit(2, f"{name}: {message}; {self.prog} --help lists what there is\n")


def _attached(argv: Sequence[str]) -> list[str]:
    """``--window -1,0`` as ``--window=-1,0``: argparse would take -1,0 for an option."""
    attached: list[str] = []
    for argument in argv:
        if attached and attached[-1] == "--window" and re.match(r"-\d", argument):
            attached[-1] += f"={argument}"
        else:
            attached.append(argument)
    return attached


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m cupyflash",
        description="Exact attention for CuPy and numpy arrays, without the N x N score matrix.",
    )
    parser.add_argument("--version", action="version", version=f"cupyflash {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in _COMMANDS.items():
        module.add_arguments(
            commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
