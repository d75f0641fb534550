# SPDX-License-Identifier: MIT
"""Run CUDA kernels on the CPU: compiled by g++, one fibre per thread, checked by sanitizers.

The driver takes a launch record as the GPU path does, with numpy arrays. See
``docs/host-execution.md``.
"""

from hostcuda.launch import HostFault, Schedule, empty, launches, run, run_schedules, zeros
from hostcuda.modules import compile_many
from hostcuda.toolchain import unavailable

__all__ = [
    "HostFault",
    "Schedule",
    "compile_many",
    "empty",
    "launches",
    "run",
    "run_schedules",
    "unavailable",
    "zeros",
]
