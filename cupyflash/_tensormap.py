# SPDX-License-Identifier: MIT
"""Tensor maps: what the tensor memory accelerator of sm_90 and newer knows of an array.

A :class:`TensorMap` is geometry and needs no CUDA; a host harness interprets it as it is.
:func:`encode` makes the driver's 128 bytes of it, in which the address can be replaced.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from cupyflash._messages import INSTALL_GPU
from cupyflash._params import Pointer

BYTES = 128
RANK = 5
_ALIGNMENT = 16  # of the address and of all strides (CUDA driver API, cuTensorMapEncodeTiled)
_MAX_STRIDE = 2**40
_MAX_SIZE = 2**31  # coordinates are 32-bit and signed


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A box that TMA copies out of an array of five axes, the contiguous one first.

    ``pointer`` says where in the parameter struct the map's 128 bytes stand, and in which array its
    element 0 lies. ``strides`` are those of all axes but the first, in bytes. ``box`` counts
    elements; its first axis is ``swizzle`` bytes long.
    """

    pointer: Pointer
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


def takes(array: Any, address: int) -> bool:
    """Whether TMA can read a canonical array (..., rows, columns), none of it copied.

    Columns must be contiguous, the address and all other strides multiples of 16 bytes, strides not
    negative. Strides of axes of size 1 don't matter.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.zeros((2, 8, 100, 64), np.float16)
    >>> takes(x, 0), takes(x.swapaxes(1, 2), 0), takes(x[..., ::-1, :], 0), takes(x[..., :60], 0)
    (True, True, False, True)
    >>> takes(np.zeros((8, 60), np.float16), 0)
    False
    """
    *strides, column = array.strides
    *sizes, columns = array.shape
    if address % _ALIGNMENT or (columns > 1 and column != array.dtype.itemsize):
        return False
    if not all(0 < size < _MAX_SIZE for size in array.shape):
        return False
    return all(
        size == 1 or (0 <= stride < _MAX_STRIDE and stride % _ALIGNMENT == 0)
        for size, stride in zip(sizes, strides, strict=True)
    )


def encode(tensor_map: TensorMap, address: int) -> Any:
    """The driver's ``CUtensorMap`` of ``tensor_map`` for the array at ``address``.

    Raises
    ------
    ImportError
        If cuda-bindings is missing.
    RuntimeError
        If the driver refuses.
    """
    driver = cuda_driver()
    types = driver.CUtensorMapDataType
    element = {
        "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "bool": types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[tensor_map.dtype]
    status, encoded = driver.cuTensorMapEncodeTiled(
        element,
        RANK,
        address,
        [driver.cuuint64_t(size) for size in tensor_map.sizes],
        [driver.cuuint64_t(stride) for stride in tensor_map.strides],
        [driver.cuuint32_t(n) for n in tensor_map.box],
        [driver.cuuint32_t(1)] * RANK,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{tensor_map.swizzle}B"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    _check(status, tensor_map)
    return encoded


def replace_address(encoded: Any, address: int) -> None:
    """Let a ``CUtensorMap`` describe the like array at another address."""
    (status,) = cuda_driver().cuTensorMapReplaceAddress(encoded, address)
    _check(status, address)


@functools.cache
def cuda_driver() -> Any:
    """cuda-bindings' module of the driver API.

    Raises
    ------
    ImportError
        If it is missing.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError(f"cupyflash: cuda-bindings is missing: {INSTALL_GPU}") from error
    return driver


def _check(status: Any, what: Any) -> None:
    if status:
        raise RuntimeError(f"cupyflash: the driver refuses a tensor map ({status.name}): {what}")
