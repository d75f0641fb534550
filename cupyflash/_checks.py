# SPDX-License-Identifier: MIT
"""What each argument of a call must be, in the words of the message that refuses it."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyflash import _arrays, _dtypes
from cupyflash._dtypes import DTYPES, accumulation_dtype


def named_dtype(asked: Any) -> np.dtype:
    """The dtype that was meant, or one that is not served where there is none of that name."""
    try:
        return _dtypes.named(asked)
    except (TypeError, ValueError):
        return np.dtype("V")


def bias_array(function: str, xp: Any, value: Any, q: Any, score_shape: tuple[int, ...]) -> Any:
    bias = _arrays.adopt(function, "bias", value)
    check_same_place(function, q, bias=bias)
    if bias.dtype not in (q.dtype, np.float32):
        raise TypeError(
            f"{function}: bias.dtype is {bias.dtype}; expected q's dtype {q.dtype} or float32"
        )
    return broadcast(function, xp, "bias", bias, score_shape)


def mask_array(function: str, xp: Any, value: Any, q: Any, score_shape: tuple[int, ...]) -> Any:
    mask = _arrays.adopt(function, "mask", value)
    check_same_place(function, q, mask=mask)
    if mask.dtype != np.bool_:
        raise TypeError(
            f"{function}: mask.dtype is {mask.dtype}; expected bool, True where a query sees "
            "a key (an additive mask is bias=)"
        )
    return broadcast(function, xp, "mask", mask, score_shape)


def slopes_array(function: str, xp: Any, value: Any, q: Any, shape: tuple[int, ...]) -> Any:
    acc_dtype = accumulation_dtype(q.dtype)
    slopes = _small_array(function, xp, "alibi_slopes", value, q, acc_dtype)
    if slopes.dtype not in (q.dtype, np.float32):
        raise TypeError(
            f"{function}: alibi_slopes.dtype is {slopes.dtype}; expected float32 or "
            f"q's dtype {q.dtype}"
        )
    return broadcast(function, xp, "alibi_slopes", slopes.astype(acc_dtype, copy=False), shape)


def check_same_place(function: str, first: Any, **others: Any) -> None:
    host = isinstance(first, np.ndarray)
    for name, x in others.items():
        if isinstance(x, np.ndarray) != host:
            kinds = ("numpy", "CuPy") if host else ("CuPy", "numpy")
            raise TypeError(
                f"{function}: q is a {kinds[0]} array but {name} is a {kinds[1]} array; expected "
                "all of them in one place (cupy.asarray or cupy.asnumpy moves one)"
            )
        if not host and x.device.id != first.device.id:
            raise ValueError(
                f"{function}: q is on device {first.device.id} but {name} is on device "
                f"{x.device.id}; expected one device"
            )


def check_dtypes(function: str, q: Any, k: Any, v: Any) -> np.dtype:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES or not x.dtype.isnative:
            raise TypeError(
                f"{function}: {name}.dtype is {x.dtype}; expected {_dtypes.NAMES_TEXT}, the same "
                "for q, k and v"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"{function}: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    return np.dtype(q.dtype)


def check_sizes(function: str, q: Any, k: Any, v: Any, shapes: str) -> None:
    if q.shape[-1] == 0:
        raise ValueError(f"{function}: q has head_dim 0; expected at least 1 ({shapes})")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{function}: k has head_dim {k.shape[-1]} but q has {q.shape[-1]}; q and k must "
            f"agree ({shapes})"
        )
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"{function}: v has seqlen_k {v.shape[-2]} but k has {k.shape[-2]}; k and v must "
            f"agree ({shapes})"
        )
    if v.shape[-3] != k.shape[-3]:
        raise ValueError(
            f"{function}: v has {v.shape[-3]} heads but k has {k.shape[-3]}; k and v must agree "
            f"({shapes})"
        )
    check_groups(function, q.shape[-3], k.shape[-3], shapes)


def check_groups(function: str, heads_q: int, heads_k: int, shapes: str) -> None:
    if heads_q % heads_k if heads_k else heads_q:
        raise ValueError(
            f"{function}: q has {heads_q} heads and k has {heads_k}; heads_q must be a multiple "
            f"of heads_k ({shapes})"
        )


def broadcast(function: str, xp: Any, name: str, array: Any, shape: tuple[int, ...]) -> Any:
    try:
        return xp.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"{function}: {name}.shape is {array.shape}; expected a shape that broadcasts to "
            f"{shape}"
        ) from None


def _is_listed(function: str, name: str, value: Any) -> bool:
    """Whether this is a number or a sequence of them; else it must be an array of some kind."""
    if _is_number(value) or (isinstance(value, Sequence) and not isinstance(value, (str, bytes))):
        return True
    if isinstance(value, np.ndarray) or _arrays.is_cupy(value):
        return False
    exports = ("__dlpack_device__", "__cuda_array_interface__")
    if isinstance(value, np.generic) or not any(hasattr(value, name) for name in exports):
        raise TypeError(
            f"{function}: {name} is {value!r}; expected a number, a sequence of numbers, or an "
            "array"
        )
    return False


def _listed(value: Any) -> np.ndarray:
    """A list as an array; a ragged one gives an object, which is refused by its dtype."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.asarray(None)


def _small_array(function: str, xp: Any, name: str, value: Any, q: Any, dtype: Any) -> Any:
    """``value`` as an array beside q; numbers and sequences of numbers are moved there."""
    if _is_listed(function, name, value):
        numbers_given = _listed(value)
        if numbers_given.dtype.kind not in "iuf" and numbers_given.size:
            raise TypeError(f"{function}: {name} is {value!r}; expected numbers or an array")
        with np.errstate(over="ignore", under="ignore"):
            rounded = numbers_given.astype(dtype)
        if not np.isfinite(rounded).all():
            raise ValueError(
                f"{function}: {name} is {value!r}; expected finite numbers of {np.dtype(dtype)}"
            )
        return xp.asarray(rounded)
    array = _arrays.adopt(function, name, value)
    check_same_place(function, q, **{name: array})
    return array


def seqlens_array(
    function: str, xp: Any, value: Any, q: Any, batch_shape: tuple[int, ...], seqlen_k: int
) -> Any:
    if _is_listed(function, "seqlens_k", value):
        host = _listed(value)
        if host.dtype.kind not in "iu" and host.size:
            raise TypeError(
                f"{function}: seqlens_k is {value!r}; expected integers, of 64 bits at most"
            )
    else:
        array = _arrays.adopt(function, "seqlens_k", value)
        check_same_place(function, q, seqlens_k=array)
        if array.dtype.kind not in "iu":
            raise TypeError(
                f"{function}: seqlens_k.dtype is {array.dtype}; expected an integer dtype"
            )
        host = array if isinstance(array, np.ndarray) else None
    if host is not None:
        # A length on the device is clamped by the kernels instead: looking at it would wait.
        bad = host[(host < 0) | (host > seqlen_k)]
        if bad.size:
            raise ValueError(
                f"{function}: seqlens_k holds {bad.flat[0]}; expected lengths from 0 to k's "
                f"seqlen {seqlen_k}"
            )
        array = xp.asarray(host)
    if array.dtype not in (np.int32, np.int64):
        array = array.astype(np.int64)
    return broadcast(function, xp, "seqlens_k", array, batch_shape)


def window_limits(
    function: str, causal: bool | str, window: Sequence[int | None] | None, unlimited: int
) -> tuple[int, int, bool]:
    if not isinstance(causal, (bool, np.bool_)) and not (
        isinstance(causal, str) and causal == "top_left"
    ):
        wrong = ValueError if isinstance(causal, str) else TypeError
        raise wrong(f"{function}: causal is {causal!r}; expected True, False or 'top_left'")
    if window is None:
        window = (-1, -1)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(
            f"{function}: window is {window!r}; expected (left, right), each an integer, or None "
            "or -1 for no limit"
        )
    sides = []
    for name, side in zip(("left", "right"), window, strict=True):
        side = -1 if side is None else integer(function, f"window {name}", side)
        if side < -1:
            raise ValueError(
                f"{function}: window {name} is {side}; expected 0 or more, or None or -1 for no "
                "limit"
            )
        # A side that reaches past every key is no limit, and stays small enough for any integer.
        sides.append(-1 if side >= unlimited else side)
    left, right = sides
    return left, 0 if causal else right, isinstance(causal, str)


def scale_number(
    function: str, softmax_scale: float | None, head_dim: int, dtype: np.dtype
) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    scale = real(function, "softmax_scale", softmax_scale)
    if not _fits(scale, dtype) or scale == 0.0:
        raise ValueError(
            f"{function}: softmax_scale is {scale}; expected a finite non-zero number (of "
            f"{accumulation_dtype(dtype)}, the dtype of the scores)"
        )
    return scale


def _fits(value: float, dtype: np.dtype) -> bool:
    """Whether a number stays what it is, finite or non-zero, in the accumulation dtype."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = accumulation_dtype(dtype).type(value)
    return bool(np.isfinite(rounded)) and (value == 0.0) == (rounded == 0.0)


def softcap_number(function: str, softcap: float | None, dtype: np.dtype) -> float:
    if softcap is None:
        return 0.0
    cap = real(function, "softcap", softcap)
    if not _fits(cap, dtype) or cap <= 0.0:
        raise ValueError(
            f"{function}: softcap is {cap}; expected a finite positive number (of "
            f"{accumulation_dtype(dtype)}, the dtype of the scores) or None"
        )
    # Beyond these limits its reciprocal leaves the range, and nothing in a result changes: below
    # them all scores are 0 to precision, above them c tanh(s / c) is s.
    low, high = (1e-30, 1e150) if dtype == np.float64 else (1e-12, 1e34)
    return max(cap, low) if cap < high else 0.0


def takes_tf32(function: str, precision: str | None, dtype: np.dtype) -> bool:
    if precision is None or (isinstance(precision, str) and precision == "full"):
        return False
    wanted = "expected 'full', 'tf32' or None"
    if not isinstance(precision, str):
        raise TypeError(f"{function}: precision is a {type(precision).__name__}; {wanted}")
    if precision != "tf32":
        raise ValueError(f"{function}: precision is {precision!r}; {wanted}")
    if dtype != np.float32:
        raise ValueError(
            f"{function}: precision 'tf32' is for float32, q.dtype is {dtype}; leave precision=None"
        )
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def real(function: str, name: str, value: Any) -> float:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not _is_number(value):
        raise TypeError(
            f"{function}: {name} is a {type(value).__name__}; expected a real number on the host"
        )
    try:
        return float(value)
    except OverflowError:  # an integer or a fraction out of float's range
        return math.inf if value > 0 else -math.inf


def integer(function: str, name: str, value: Any) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{function}: {name} is {value!r}; expected an integer") from None


def at_least(function: str, name: str, value: Any, least: int) -> int:
    number = integer(function, name, value)
    if number < least:
        raise ValueError(f"{function}: {name} is {number}; expected {least} or more")
    return number
