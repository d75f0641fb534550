# SPDX-License-Identifier: MIT
"""What the commands share: their one-line errors, the choice of a device, options, file outputs,
progress."""

from __future__ import annotations

import argparse
import os
import stat
import time
from collections.abc import Callable
from typing import Any, BinaryIO, TextIO

from cupyflash import _arrays
from cupyflash._gpu import gpu_obstacle
from cupyflash._messages import one_line
from cupyflash.plan import Plan


class CommandError(Exception):
    """What the user has to change; shown on one line, with exit code 2."""


def pick_device(asked: str) -> tuple[Any, str]:
    """Turn ``--device`` into CuPy, or None for the CPU, and a line that says what was chosen.

    Raises
    ------
    CommandError
        A GPU was asked for and none can be used.
    """
    obstacle = "as asked" if asked == "cpu" else gpu_obstacle()
    if obstacle is None:
        cupy = _arrays.import_cupy()
        device = cupy.cuda.Device()
        name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        return cupy, f"GPU {device.id}, {name}"
    if asked == "gpu":
        raise CommandError(f"--device gpu: {obstacle}")
    return None, f"CPU ({obstacle})"


def plan_line(plan: Plan) -> str:
    """A plan in few words; printing it gives the table."""
    line = f"{plan.kernel}, {plan.flops:.3g} FLOPs"
    if plan.tiling is not None:
        tiling, gigabytes = plan.tiling, (plan.hbm_bytes or 0) / 1e9
        line += f", B_r x B_c {tiling.Br} x {tiling.Bc}, grid {plan.grid}, HBM {gigabytes:.3g} GB"
    return line


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--device auto|cpu|gpu``, for :func:`pick_device`."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="where to compute; auto takes a GPU if one can be used (default: auto)",
    )


def add_split_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--num-splits``."""
    parser.add_argument(
        "--num-splits",
        type=int,
        metavar="N",
        help="parts to divide the keys in; 1 is never (default: the plan's choice)",
    )


def add_mask_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that plan and run share: causal, window, softcap and precision."""
    causal = parser.add_mutually_exclusive_group()
    causal.add_argument(
        "--causal",
        action="store_const",
        const=True,
        default=False,
        help="query i sees the keys j <= i + seqlen_k - seqlen_q (bottom right)",
    )
    causal.add_argument(
        "--causal-top-left",
        dest="causal",
        action="store_const",
        const="top_left",
        help="query i sees the keys j <= i",
    )
    parser.add_argument(
        "--window",
        type=window,
        metavar="L,R",
        help="keys that a query sees to its left and right; 'none' is no limit, as in 128,none",
    )
    parser.add_argument("--softcap", type=float, metavar="C", help="C * tanh(s / C) of each score")
    parser.add_argument(
        "--precision",
        choices=("full", "tf32"),
        help="tf32: faster products of float32, with an error of about 5e-4",
    )


def window(text: str) -> tuple[int | None, int | None]:
    """Parse ``L,R``."""
    sides = [side.strip().lower() for side in text.split(",")]
    if len(sides) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not L,R, such as 128,0 or 128,none")
    try:
        left, right = (None if side == "none" else int(side) for side in sides)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not L,R, two integers or 'none', such as 128,0 or 128,none"
        ) from None
    return left, right


def check_target(option: str, path: str) -> None:
    """Refuse an output that can't be written, before the work that would be lost.

    Raises
    ------
    CommandError
        The folder is missing or read-only, or ``path`` is something other than a regular file.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise CommandError(f"{option} {path}: there is no folder {folder}")
    if os.path.lexists(target) and not stat.S_ISREG(os.stat(target).st_mode):
        raise CommandError(f"{option} {path}: this exists and is not a regular file")
    if not os.access(folder, os.W_OK):
        raise CommandError(f"{option} {path}: the folder {folder} can't be written")


def write_files(writers: dict[str, Callable[[BinaryIO], None]]) -> None:
    """Write every file, or none: all are complete beside their targets before the first is moved.

    Raises
    ------
    CommandError
        A file can't be written (a full disk, a folder that vanished).
    """
    pending = {}
    path = ""
    try:
        for path, write in writers.items():
            # Created by open, so that the permissions are those of any new file of this user.
            temporary = f"{os.path.realpath(path)}.{os.getpid()}.tmp"
            with open(temporary, "xb") as stream:
                pending[path] = temporary
                write(stream)
        for path in writers:
            os.replace(pending[path], os.path.realpath(path))
            del pending[path]
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or one_line(error)}") from error
    finally:
        for temporary in pending.values():
            os.remove(temporary)


def bytes_text(count: int) -> str:
    """``count`` bytes in the unit that a person reads (powers of 1024)."""
    if count < 1024:
        return f"{count} bytes"
    size, unit = float(count), 0
    while size >= 1024:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {('', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit]}"


class Progress:
    """A bar that is redrawn on a terminal; elsewhere, a line at each quarter of the work."""

    _WIDTH = 40

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._start = time.perf_counter()
        self._shown = 0
        self._open = False  # a bar without the end of its line

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` parts are finished."""
        steps = self._WIDTH if self._terminal else 4
        reached = done * steps // total
        if reached == self._shown:
            return
        self._shown = reached
        state = f"{100 * reached // steps:3d} %  {time.perf_counter() - self._start:.1f} s"
        if self._terminal:
            bar = "#" * reached + "." * (steps - reached)
            self._open = done != total
            self._stream.write(f"\r[{bar}] {state}" + ("\n" if done == total else ""))
        else:
            self._stream.write(f"{state}\n")
        self._stream.flush()

    def close(self) -> None:
        """End the line of a bar that has not reached its end."""
        if self._open:
            self._stream.write("\n")
            self._stream.flush()
            self._open = False
