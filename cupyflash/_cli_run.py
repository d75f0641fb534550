# SPDX-License-Identifier: MIT
"""python -m cupyflash run: attention over arrays in files."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import numpy as np

from cupyflash import _dtypes, _problem
from cupyflash._cli_common import (
    CommandError,
    add_device_option,
    add_mask_options,
    add_split_option,
    check_target,
    pick_device,
    plan_line,
    write_files,
)
from cupyflash._cli_files import as_dtype, npy_writer, read_array
from cupyflash._messages import one_line
from cupyflash.attention import attention
from cupyflash.plan import make_plan

# Options that name a file, and the argument of attention() that its array becomes.
_FILE_OPTIONS = {
    "bias": ("bias", "added to the scores; broadcasts to (..., heads_q, seqlen_q, seqlen_k)"),
    "mask": ("mask", "bool, True where a query sees a key; broadcasts as the bias does"),
    "alibi": ("alibi_slopes", "ALiBi slope of each query head"),
    "seqlens": ("seqlens_k", "integers: how many keys of each batch entry are in use"),
}
_NUMBERS = ("bias", "alibi_slopes")  # converted by --dtype as q, k and v are


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files and the options, which are those of :func:`cupyflash.attention`."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="q, k and v as three .npy or .npz files, or one .npz that holds q, k and v; a .npz "
        "given for one array holds only it, or has it under its name. Files are mapped, not read",
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="O.npy", help="where to write the output"
    )
    parser.add_argument("--lse", metavar="LSE.npy", help="where to write the log-sum-exp, in nats")
    parser.add_argument(
        "--dtype",
        choices=_dtypes.NAMES,
        help="convert q, k and v (and bias and slopes, unless they are float32) first. numpy's "
        "files hold bfloat16 as two raw bytes: bfloat16 reads such files, and writes the output so",
    )
    add_mask_options(parser)
    parser.add_argument(
        "--scale", type=float, metavar="S", help="softmax_scale (default: 1/sqrt(head_dim))"
    )
    for option, (_, text) in _FILE_OPTIONS.items():
        parser.add_argument(f"--{option}", metavar="FILE", help=text)
    add_device_option(parser)
    add_split_option(parser)
    parser.add_argument("--kernel", metavar="NAME", help="(default: the plan's choice)")


def command(args: argparse.Namespace) -> None:
    """Compute, say what was computed, and write the result.

    Raises
    ------
    CommandError
        A file can't be read or written, or ``attention`` refuses its arguments. Nothing has been
        written then.
    """
    check_target("-o", args.output)
    given = [*args.files, *(getattr(args, option) for option in _FILE_OPTIONS)]
    inputs = {os.path.realpath(path) for path in given if path is not None}
    for option, path in (("-o", args.output), ("--lse", args.lse)):
        if path is not None and os.path.realpath(path) in inputs:
            raise CommandError(f"{option} {path}: is an input too; expected another file")
    if args.lse is not None:
        check_target("--lse", args.lse)
        if os.path.realpath(args.lse) == os.path.realpath(args.output):
            raise CommandError(f"--lse and -o are both {args.output}; expected two files")
    arrays = _read(args)
    for name, array in arrays.items():
        print(f"{name:<13}{array.shape} {array.dtype}")
    cupy, where = pick_device(args.device)
    print(f"{'device':<13}{where}")
    options = {
        "causal": args.causal,
        "window": args.window,
        "softmax_scale": args.scale,
        "softcap": args.softcap,
        "precision": args.precision,
    }
    try:
        if cupy:
            arrays = {name: cupy.asarray(array) for name, array in arrays.items()}
        problem = _problem.from_arrays("attention", **arrays, **options)
        how = {"num_splits": args.num_splits, "kernel": args.kernel}
        print(f"{'plan':<13}{plan_line(make_plan('attention', problem, **how))}")
        start = time.perf_counter()
        o, lse = attention(**arrays, **options, **how, return_lse=True)
        if cupy:
            o, lse = cupy.asnumpy(o), cupy.asnumpy(lse)
        seconds = time.perf_counter() - start
    except (TypeError, ValueError, ImportError, OSError, MemoryError) as error:
        raise CommandError(one_line(error)) from error
    writers = {args.output: npy_writer(o)}
    if args.lse is not None:
        writers[args.lse] = npy_writer(lse)
    write_files(writers)
    print(f"{'time':<13}{seconds:.3f} s")
    for path, array in zip(writers, (o, lse), strict=False):
        print(f"{'written':<13}{path}: {array.shape} {array.dtype}")


def _read(args: argparse.Namespace) -> dict[str, Any]:
    if len(args.files) not in (1, 3):
        raise CommandError(
            f"{len(args.files)} input files; expected three (q, k and v) or one .npz that holds "
            "q, k and v"
        )
    paths = dict(zip("qkv", args.files * (3 // len(args.files)), strict=True))
    for option, (name, _) in _FILE_OPTIONS.items():
        if getattr(args, option) is not None:
            paths[name] = getattr(args, option)
    arrays: dict[str, np.ndarray] = {}
    for name, path in paths.items():
        array = read_array(path, name, shared=len(args.files) == 1 and name in "qkv")
        if name in "qkv" or (name in _NUMBERS and array.dtype != np.float32):
            array = as_dtype(array, args.dtype, path)
        arrays[name] = array
    return arrays
