# SPDX-License-Identifier: MIT
"""Take arrays of any library without a copy, and tell what memory they cover.

numpy and CuPy arrays are used as they are. Everything else comes in through DLPack, which carries
bfloat16 and the producer's stream without a synchronisation, or, failing that, through
``__cuda_array_interface__``, for which CuPy has to synchronise the producer's stream.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

from cupyflash._messages import INSTALL_GPU

# DLDeviceType of the DLPack ABI: memory that the host can read, and memory of a CUDA device.
_DLPACK_HOST = (1, 3)  # kDLCPU, kDLCUDAHost
_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def is_cupy(array: Any) -> bool:
    """Whether ``array`` is a CuPy array, found out without importing CuPy."""
    ndarray = getattr(sys.modules.get("cupy"), "ndarray", None)
    return ndarray is not None and isinstance(array, ndarray)


def import_cupy() -> Any:
    """Import CuPy, or say what to install.

    CuPy creates a folder in the home directory when it is imported, and fails where it can't.
    """
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"cupyflash needs CuPy for arrays on a GPU: {INSTALL_GPU}") from error
    except OSError as error:
        raise OSError(
            f"CuPy could not be imported ({error}); it creates a folder in the home directory: "
            "point CUPY_CACHE_DIR at a folder that can be written"
        ) from error
    return cupy


def adopt(function: str, name: str, array: Any) -> Any:
    """Return ``array`` as a numpy or a CuPy array that shares its memory.

    Raises
    ------
    TypeError
        If ``array`` is none of: a numpy or CuPy array, an object with ``__dlpack__`` on a CPU or
        a CUDA device, an object with ``__cuda_array_interface__``; or if it is a masked array.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{function}: {name} is a masked array, whose mask would be ignored; pass its data "
            "(and what to hide as mask=)"
        )
    if isinstance(array, np.ndarray) or is_cupy(array):
        return array
    if hasattr(array, "__dlpack_device__"):
        try:
            kind, _ = array.__dlpack_device__()
        except Exception as error:  # whatever goes wrong in an object of somebody else's
            raise TypeError(
                f"{function}: {name} is a {_type_name(array)} whose __dlpack_device__ does not "
                f"tell (type, id) ({error!r}); pass a numpy or CuPy array"
            ) from error
        if kind in _DLPACK_CUDA:
            return import_cupy().from_dlpack(array)
        if kind in _DLPACK_HOST:
            try:
                return np.from_dlpack(array)
            except Exception as error:
                # numpy's DLPack knows no bfloat16; the buffer behind __array__ (jax) may.
                if type(array).__module__.split(".")[0] in ("jax", "jaxlib"):
                    return np.asarray(array)
                raise TypeError(
                    f"{function}: {name} is a {_type_name(array)} whose DLPack export numpy "
                    f"can't read ({error}); pass a numpy array (bfloat16: ml_dtypes.bfloat16)"
                ) from error
        raise TypeError(
            f"{function}: {name} is on DLPack device type {kind}; expected a CPU or a CUDA device"
        )
    if hasattr(array, "__cuda_array_interface__"):
        return import_cupy().asarray(array)
    raise TypeError(
        f"{function}: {name} is a {_type_name(array)}; expected a numpy or CuPy array, or an "
        "object with __dlpack__ or __cuda_array_interface__"
    )


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def address(array: Any) -> int:
    """Address of the first element (not of the lowest one: strides may be negative)."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]
    return array.data.ptr


def on_device_of(array: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which CuPy makes new arrays where ``array`` is."""
    return array.device if is_cupy(array) else contextlib.nullcontext()


def is_aligned(array: Any) -> bool:
    """Whether all elements lie at multiples of their size, as kernels read them."""
    itemsize = array.dtype.itemsize
    steps = (s for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    return not (address(array) % itemsize or any(step % itemsize for step in steps))


def aligned(array: Any) -> Any:
    """``array``, or a copy of it if its elements lie anywhere in memory."""
    if is_aligned(array):
        return array
    if not is_cupy(array):
        return array.copy()
    # No kernel of CuPy's may read such elements either, but bytes it may.
    cupy = import_cupy()
    shape, strides = (*array.shape, array.dtype.itemsize), (*array.strides, 1)
    with array.device:
        every_byte = cupy.ndarray(shape, np.uint8, memptr=array.data, strides=strides)
        return every_byte.copy().view(array.dtype)[..., 0]


class _Addresses:
    """Only the addresses of an array, in the form that numpy takes; nothing is ever read there."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
            "data": (address(array), False),
        }


def bounds(array: Any) -> tuple[int, int]:
    """Addresses of the first byte of a non-empty array and of the one behind its last."""
    first = end = address(array)
    for stride, n in zip(array.strides, array.shape, strict=True):
        if stride < 0:
            first += stride * (n - 1)
        else:
            end += stride * (n - 1)
    return first, end + array.dtype.itemsize


def overlap(a: Any, b: Any) -> bool:
    """Whether two arrays share an element; True where finding out would take too long."""
    if a.size == 0 or b.size == 0:
        return False
    (a_first, a_end), (b_first, b_end) = bounds(a), bounds(b)
    if a_end <= b_first or b_end <= a_first:
        return False
    a, b = np.asarray(_Addresses(a)), np.asarray(_Addresses(b))
    try:
        return np.shares_memory(a, b, max_work=10_000)
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(array: Any) -> bool:
    """Whether two indices of ``array`` may lead to one element (as after ``broadcast_to``)."""
    extent = array.dtype.itemsize
    axes = [(abs(stride), n) for stride, n in zip(array.strides, array.shape, strict=True) if n > 1]
    for stride, n in sorted(axes):
        if stride < extent:
            return array.size > 0
        extent = stride * (n - 1) + extent
    return False
