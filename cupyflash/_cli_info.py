# SPDX-License-Identifier: MIT
"""python -m cupyflash info: what is installed, what the machine has, and what is missing.

Nothing here may fail: on the machine where this command is needed, something is broken.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cupyflash import __version__, _cache, _compile
from cupyflash._cli_common import bytes_text
from cupyflash._gpu import gpu_obstacle
from cupyflash._messages import install_command, one_line

_CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")

_DRIVER_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

# CUdevice_attribute of cuda.h.
_MULTIPROCESSORS = 16
_COMPUTE_CAPABILITY = (75, 76)
_SMEM_BLOCK_OPTIN = 97


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``info`` takes no options."""


def command(args: argparse.Namespace) -> None:
    """Print the report."""
    driver = query_driver()
    for name, text in (*_versions(driver), *_machine(driver), *_missing(driver)):
        print(f"{name:<14} {text}")


@dataclass
class Driver:
    """What the NVIDIA driver says; ``problem`` where it says nothing, or not all."""

    cuda_version: tuple[int, int] | None = None
    devices: list[str] = field(default_factory=list)
    problem: str = ""


def query_driver() -> Driver:
    """Ask the driver itself, which needs no Python package and opens no context on a device."""
    try:
        cuda = _load_driver()
    except OSError:
        return Driver(problem=f"none found ({_DRIVER_LIBRARY} can't be loaded)")
    driver = Driver()
    try:
        version = ctypes.c_int()
        _check(cuda, cuda.cuDriverGetVersion(ctypes.byref(version)))
        driver.cuda_version = (version.value // 1000, version.value % 1000 // 10)
        _check(cuda, cuda.cuInit(0))
        count = ctypes.c_int()
        _check(cuda, cuda.cuDeviceGetCount(ctypes.byref(count)))
        driver.devices = [_describe_device(cuda, ordinal) for ordinal in range(count.value)]
    except (RuntimeError, AttributeError) as error:
        driver.problem = one_line(error)
    return driver


def _load_driver() -> Any:
    return ctypes.CDLL(_DRIVER_LIBRARY)


def _check(cuda: Any, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise RuntimeError(f"error {status} from the driver: {reason}")


def _describe_device(cuda: Any, ordinal: int) -> str:
    device = ctypes.c_int()
    _check(cuda, cuda.cuDeviceGet(ctypes.byref(device), ordinal))
    name = ctypes.create_string_buffer(256)
    _check(cuda, cuda.cuDeviceGetName(name, len(name), device))
    memory = ctypes.c_size_t()
    _check(cuda, cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device))

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _check(cuda, cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device))
        return value.value

    major, minor = map(attribute, _COMPUTE_CAPABILITY)
    return (
        f"{name.value.decode()}, compute capability {major}.{minor}, "
        f"{attribute(_MULTIPROCESSORS)} multiprocessors, "
        f"{bytes_text(attribute(_SMEM_BLOCK_OPTIN))} opt-in shared memory a block, "
        f"{bytes_text(memory.value)} memory"
    )


def _versions(driver: Driver) -> Iterable[tuple[str, str]]:
    yield "cupyflash", f"{__version__}, in {Path(__file__).parent}"
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    yield "numpy", np.__version__
    yield "ml_dtypes", ml_dtypes.__version__
    for package in ("threadpoolctl", "scikit-image", "cuda-bindings"):
        yield package, _installed(package) or "not installed"
    yield "NVRTC", _nvrtc_state()[1]
    yield "cupy", _cupy_state()
    if driver.cuda_version:
        major, minor = driver.cuda_version
        yield (
            "driver",
            f"for CUDA up to {major}.{minor}" + (f"; {driver.problem}" if driver.problem else ""),
        )
    else:
        yield "driver", driver.problem


def _machine(driver: Driver) -> Iterable[tuple[str, str]]:
    for ordinal, description in enumerate(driver.devices):
        yield f"device {ordinal}", description
    if not driver.devices:
        yield "device", "no GPU: numpy arrays are computed on the CPU"
    yield "CPU", f"{os.cpu_count()} logical processors, {_blas_threads()}"
    yield "kernel cache", _cache_state()


def _missing(driver: Driver) -> Iterable[tuple[str, str]]:
    """A line for each thing that isn't there, ending in the command that installs it."""
    packages = _cupy_packages()
    old_driver = driver.cuda_version is not None and driver.cuda_version < (13, 0)
    old_cupy = any("cuda12x" in package for package in packages)
    gpu = install_command("cuda12" if old_driver or old_cupy else "cuda13")
    wanted = []
    if not packages:
        wanted.append(("CuPy, for arrays on a GPU", gpu))
    if not _nvrtc_state()[0]:
        wanted.append(("NVRTC, which builds the kernels", gpu))
    if not _installed("scikit-image"):
        wanted.append(("scikit-image, for the demo", install_command("demo")))
    for what, how in wanted:
        yield "missing", f"{what}: {how}"
    if not driver.cuda_version:
        yield "missing", "an NVIDIA driver, for a GPU: https://www.nvidia.com/drivers"
    elif not wanted:
        yield "missing", "nothing"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cupy_packages() -> list[str]:
    found = ((package, _installed(package)) for package in _CUPY_PACKAGES)
    packages = [f"{package} {version}" for package, version in found if version]
    if not packages and importlib.util.find_spec("cupy"):
        packages = ["of a package unknown here"]  # built from source, or for ROCm
    return packages


def _cupy_state() -> str:
    packages = _cupy_packages()
    if not packages:
        return "not installed"
    names = " and ".join(packages)
    if len(packages) > 1:
        return f"{names}: they overwrite each other; uninstall all but one"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        obstacle = gpu_obstacle()
    if obstacle is None and caught:
        obstacle = one_line(caught[0].message)
    return f"{names}; {obstacle}" if obstacle else names


def _nvrtc_state() -> tuple[bool, str]:
    try:
        return True, "{}.{}".format(*_compile.nvrtc_version())
    except Exception as error:  # ImportError names what is missing; a broken one may raise anything
        return False, one_line(error)


def _blas_threads() -> str:
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return "BLAS threads unknown (threadpoolctl is not installed)"
    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return (
        ", ".join(
            f"{pool['internal_api']} {pool['version'] or ''} with {pool['num_threads']} threads"
            for pool in pools
        )
        or "no BLAS that threadpoolctl knows"
    )


def _cache_state() -> str:
    try:
        folder = _cache.folder()
        if folder is None:
            return "none: kernels are kept in memory only"
        if not folder.is_dir():
            return f"{folder} (nothing built yet)"
        sizes = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
    except (OSError, ValueError) as error:
        return one_line(error)
    return f"{folder}, {len(sizes)} files, {bytes_text(sum(sizes))}"
