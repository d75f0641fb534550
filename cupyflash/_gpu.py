# SPDX-License-Identifier: MIT
"""Whether there is a GPU to use, and what is in the way."""

from __future__ import annotations

from cupyflash import _arrays
from cupyflash._messages import one_line

ROCM = (
    "this CuPy was built for AMD's ROCm; cupyflash needs an NVIDIA GPU and cupy-cuda12x or "
    "cupy-cuda13x"
)


def gpu_obstacle() -> str | None:
    """Why CuPy can't run anything here; None where it can.

    This imports CuPy, and whatever that raises is an answer and no failure: a broken installation
    fails in many ways (ImportError, OSError, AttributeError, its own CUDARuntimeError).
    """
    try:
        runtime = _arrays.import_cupy().cuda.runtime
        if runtime.is_hip:
            return ROCM
        if runtime.getDeviceCount() == 0:
            return "CuPy sees no GPU"
    except Exception as error:
        cause = error.__cause__
        if isinstance(cause, ImportError) and not isinstance(cause, ModuleNotFoundError):
            return f"CuPy can't be imported: {one_line(cause)}"
        return one_line(error)
    return None


def gpu_count() -> int:
    """GPUs that CuPy can run something on."""
    return 0 if gpu_obstacle() else _arrays.import_cupy().cuda.runtime.getDeviceCount()
