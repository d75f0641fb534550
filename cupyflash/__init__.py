# SPDX-License-Identifier: MIT
"""Exact softmax attention for CuPy and numpy arrays, without the N x N score matrix.

``attention`` is the function; ``plan`` explains a call of it and ``warmup`` builds its kernels
ahead. ``cupyflash.online_softmax`` has the
running statistics (m, l), ``cupyflash.reference`` the float64 oracle, ``cupyflash.testing`` the
hypothesis strategies. Importing compiles nothing, opens no CUDA context and needs no CuPy.
"""

from __future__ import annotations

from cupyflash._call import clear_cache
from cupyflash._warmup import warmup
from cupyflash.attention import attention
from cupyflash.plan import Algorithm1, Plan, plan

__version__ = "0.1.0"
__all__ = ["Algorithm1", "Plan", "attention", "clear_cache", "plan", "warmup"]
