# SPDX-License-Identifier: MIT
"""What compiling kernels for the CPU needs: g++, Boost.Context, CUDA's headers."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

INSTALL_COMPILER = "apt-get install g++ libboost-context-dev"
INSTALL_HEADERS = "pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl"


@dataclass(frozen=True)
class Toolchain:
    """A compiler, and the folders that hold CUDA's headers."""

    compiler: str
    version: str
    headers: tuple[Path, ...]


def _header_folders() -> tuple[Path, ...]:
    """The folders with ``cuda_fp16.h``, ``crt/host_defines.h`` and ``nv/target``, in this order.

    The wheels of CUDA 13 share one folder, those of CUDA 12 have one each.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    folders = []
    for header in ("cuda_fp16.h", "crt/host_defines.h", "nv/target"):
        patterns = (f"*/include/{header}", f"*/include/cccl/{header}")
        found = [p for root in roots for pattern in patterns for p in sorted(root.glob(pattern))]
        if not found:
            raise FileNotFoundError(header)
        folder = found[-1].parents[len(Path(header).parts) - 1]
        if folder not in folders:
            folders.append(folder)
    return tuple(folders)


@functools.cache
def _probe() -> Toolchain | str:
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("g++")
    if compiler is None:
        return f"g++ is not installed: {INSTALL_COMPILER}"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    program = "#include <boost/context/detail/fcontext.hpp>\n"
    probe = subprocess.run(
        [compiler, "-x", "c++", "-E", "-o", os.devnull, "-"],
        input=program,
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode:
        return f"the headers of Boost.Context are not installed: {INSTALL_COMPILER}"
    try:
        headers = _header_folders()
    except FileNotFoundError as missing:
        return f"CUDA's header {missing} is not installed: {INSTALL_HEADERS}"
    return Toolchain(compiler, version.stdout.splitlines()[0], headers)


def unavailable() -> str | None:
    """Why kernels can't be compiled for the CPU here, and what to install; None if they can."""
    probe = _probe()
    return probe if isinstance(probe, str) else None


def toolchain() -> Toolchain:
    """The compiler and headers.

    Raises
    ------
    RuntimeError
        If something is missing; the message says what, and how to install it.
    """
    probe = _probe()
    if isinstance(probe, str):
        raise RuntimeError(f"hostcuda: {probe}")
    return probe
