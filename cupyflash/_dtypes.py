# SPDX-License-Identifier: MIT
"""The dtypes of q, k and v, and their names."""

from __future__ import annotations

import ml_dtypes
import numpy as np

NAMES = ("float16", "bfloat16", "float32", "float64")
NAMES_TEXT = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}"
bfloat16 = np.dtype(ml_dtypes.bfloat16)


def named(name: str) -> np.dtype:
    """The dtype of one of the names, or what numpy makes of another."""
    return bfloat16 if name == "bfloat16" else np.dtype(name)


DTYPES = tuple(map(named, NAMES))


def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Dtype of scores, statistics and lse: float64 for float64 inputs, else float32."""
    return np.dtype("float64" if dtype == np.float64 else "float32")
