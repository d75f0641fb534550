# SPDX-License-Identifier: MIT
"""Arrays for tests: the same values lying differently in memory, poison, and guard bands."""

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyflash import _checks

# How an array lies in memory; `arrange` says what each means.
LAYOUTS = ("contiguous", "transposed", "sliced", "strided", "broadcast", "negative", "misaligned")


def arrange(values: np.ndarray, layout: str, *, axis: int = 0) -> np.ndarray:
    """The same values lying differently in memory; what lies between them is NaN.

    Parameters
    ----------
    values : numpy array (..., heads, seqlen, dim)
    layout : str
        "contiguous"; "transposed": the last but one axis and the one before it swapped in memory,
        as in (batch, seqlen, heads, dim), for a 2-D array its two axes; "sliced": rows of a wider
        array; "strided": every second element of a wider array, so that no axis is contiguous;
        "broadcast": stride 0 along `axis`, all of which takes the values at its index 0;
        "negative": the last but one axis runs backwards; "misaligned": contiguous, one element
        after an address divisible by 256.
    axis : int
        For "broadcast".

    Returns
    -------
    numpy array, a view of a new buffer

    Raises
    ------
    ValueError
        If the layout is another word.

    Examples
    --------
    >>> x = arrange(np.zeros((2, 3), np.float32), "sliced")
    >>> x.strides[0] // x.itemsize
    6
    """
    if layout == "contiguous" or values.ndim == 0:
        return values.copy()
    if layout == "broadcast":
        one = values.take([0], axis) if values.size else values
        return np.broadcast_to(one.copy(), values.shape)
    if layout == "transposed":
        if values.ndim == 1:
            return values.copy()
        axes = (-1, -2) if values.ndim == 2 else (-2, -3)
        return values.swapaxes(*axes).copy().swapaxes(*axes)
    if layout == "negative":
        axis = max(values.ndim - 2, 0)
        return np.flip(np.flip(values, axis).copy(), axis)

    *outer, dim = values.shape
    if layout == "sliced":
        view = poison(np.empty((*outer, dim + 3), values.dtype))[..., 1 : dim + 1]
    elif layout == "strided":
        view = poison(np.empty((*outer, 2 * dim), values.dtype))[..., ::2]
    elif layout == "misaligned":
        view = _buffer(values.nbytes, values.itemsize, np).view(values.dtype).reshape(values.shape)
    else:
        raise ValueError(f"arrange: layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")
    view[...] = values
    return view


def copy_with_layout(array: np.ndarray, xp=np):
    """A copy in numpy or CuPy with the array's strides and its address modulo 256.

    ``cupy.asarray`` makes views contiguous, so that a kernel would never see them.

    Parameters
    ----------
    array : numpy array
        Any strides, negative and 0 included.
    xp : module
        numpy or cupy.

    Returns
    -------
    array of xp
        What lies between the elements is copied too.

    Examples
    --------
    >>> copy_with_layout(np.broadcast_to(np.ones(3), (5, 3))).strides
    (0, 8)
    """
    if array.size == 0:
        return xp.empty(array.shape, array.dtype)
    reach = [stride * (n - 1) for stride, n in zip(array.strides, array.shape, strict=True)]
    before = -sum(r for r in reach if r < 0)
    extent = before + sum(r for r in reach if r > 0) + array.itemsize
    lowest = array.ctypes.data - before
    buffer = _buffer(extent, lowest % 256, xp)
    buffer[:] = xp.asarray(np.frombuffer((ctypes.c_char * extent).from_address(lowest), np.uint8))
    first = buffer[before : before + array.itemsize].view(array.dtype)
    return xp.lib.stride_tricks.as_strided(first, array.shape, array.strides)


def poison(array):
    """Fill with NaN, or with all bits set where the dtype has none; returns the array.

    Parameters
    ----------
    array : numpy or CuPy array

    Examples
    --------
    >>> poison(np.empty(2, np.int8))
    array([-1, -1], dtype=int8)
    """
    kind = array.dtype.kind
    if kind == "u":
        array[...] = np.iinfo(array.dtype).max
    else:
        array[...] = True if kind == "b" else array.dtype.type(-1 if kind == "i" else math.nan)
    return array


class Guarded(NamedTuple):
    """A poisoned array, and a look at what is around it.

    Attributes
    ----------
    array : numpy or CuPy array
        Every byte 0xFF.
    check : function
        Raises AssertionError if anything around the array has changed.

    Examples
    --------
    >>> guarded_empty(2, np.float32).array
    array([nan, nan], dtype=float32)
    """

    array: Any
    check: Callable[[], None]


def guarded_empty(shape, dtype, *, guard_bytes=4096, xp=np) -> Guarded:
    """An output array between two guard bands, to catch kernels that write outside it.

    Every byte of the bands, and of the array itself, is 0xFF, which is NaN in every floating
    dtype: an element that the kernel leaves out stays NaN.

    Parameters
    ----------
    shape, dtype
        Of the array, which is contiguous and at an address divisible by 256.
    guard_bytes : int, a multiple of 256
        Width of each band.
    xp : module
        numpy or cupy.

    Returns
    -------
    (array, check)
        check() raises AssertionError with the first byte that has changed.

    Raises
    ------
    ValueError
        If guard_bytes is not a positive multiple of 256 or an axis of shape is negative.
    TypeError
        If an axis of shape or guard_bytes is no integer.

    Examples
    --------
    >>> out, check = guarded_empty((2, 3), np.float32)
    >>> out[...] = 1
    >>> check()
    """
    guard_bytes = _checks.integer("guarded_empty", "guard_bytes", guard_bytes)
    if guard_bytes < 1 or guard_bytes % 256:
        raise ValueError(f"guarded_empty: guard_bytes is {guard_bytes}; expected 256, 512, ...")
    axes = shape if np.iterable(shape) else (shape,)
    shape = tuple(_checks.at_least("guarded_empty", "an axis of shape", n, 0) for n in axes)
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = _buffer(nbytes + 2 * guard_bytes, 0, xp)
    buffer[:] = 0xFF
    bands = {"before": buffer[:guard_bytes], "after": buffer[guard_bytes + nbytes :]}
    inside = buffer[guard_bytes : guard_bytes + nbytes].view(dtype).reshape(shape)

    def check() -> None:
        for side, band in bands.items():
            changed = np.flatnonzero(to_numpy(band) != 0xFF)
            if changed.size:
                nearest = changed[0] + 1 if side == "after" else guard_bytes - changed[-1]
                raise AssertionError(
                    f"{changed.size} bytes {side} the array were written, "
                    f"the nearest {nearest} bytes from it ({dtype}{tuple(inside.shape)})"
                )

    return Guarded(inside, check)


def describe(array) -> str:
    """dtype and shape, and what is unusual about the memory: strides in elements, the address."""
    text = f"{array.dtype}{array.shape}"
    if not array.flags.c_contiguous:
        text += f" strides {tuple(s // array.itemsize for s in array.strides)}"
    if array.size and _address(array) % 16:
        text += f" at 16n+{_address(array) % 16} bytes"
    return text


def to_numpy(array) -> np.ndarray:
    """A numpy array from a numpy or CuPy one."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def _address(array) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def _buffer(nbytes, offset, xp):
    """nbytes of uint8 that begin at this address modulo 256."""
    raw = xp.empty(nbytes + 512, np.uint8)
    skip = (offset - _address(raw)) % 256
    return raw[skip : skip + nbytes]
