# SPDX-License-Identifier: MIT
"""The validated, canonical description of one call: every refusal is raised here."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from cupyflash import _arrays

bfloat16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = tuple(map(np.dtype, ("float16", bfloat16, "float32", "float64")))
# The arguments that are arrays, in the order of the public signature.
ARRAYS = ("q", "k", "v", "bias", "mask", "alibi_slopes", "seqlens_k")
_DTYPE_NAMES = "float16, bfloat16, float32 or float64"


def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Dtype of scores, statistics and lse: float64 for float64 inputs, else float32."""
    return np.dtype("float64" if dtype == np.float64 else "float32")


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """Sizes and options of one call and, where it is a call and not a question, its arrays.

    Arrays are canonical views, none of them expanded in memory: ``q (*batch, heads_q, seqlen_q,
    head_dim)``, ``k``, ``v`` with the batch axes broadcast, ``bias`` and ``mask`` broadcast to
    ``(*batch, heads_q, seqlen_q, seqlen_k)``, ``alibi_slopes`` to ``(*batch, heads_q)`` and
    ``seqlens_k`` to ``batch_shape``. They take no part in comparison and hashing, so that plans
    can be cached by what a problem is and not by where it lies.

    Query i and key j see each other iff ``i + offset - window_left <= j <= i + offset +
    window_right``, where -1 is no limit and ``offset`` is ``seqlens_k - seqlen_q``, or 0 if
    ``top_left``.
    """

    dtype: np.dtype
    batch_shape: tuple[int, ...]
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    softcap: float = 0.0
    window_left: int = -1
    window_right: int = -1
    top_left: bool = False
    bias_dtype: np.dtype | None = None
    has_mask: bool = False
    has_alibi: bool = False
    has_seqlens: bool = False
    flat: bool = False  # q, k and v were 2-D: the result has no head axis
    q: Any = dataclasses.field(default=None, compare=False, repr=False)
    k: Any = dataclasses.field(default=None, compare=False, repr=False)
    v: Any = dataclasses.field(default=None, compare=False, repr=False)
    bias: Any = dataclasses.field(default=None, compare=False, repr=False)
    mask: Any = dataclasses.field(default=None, compare=False, repr=False)
    alibi_slopes: Any = dataclasses.field(default=None, compare=False, repr=False)
    seqlens_k: Any = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def batch(self) -> int:
        """Number of batch entries."""
        return math.prod(self.batch_shape)

    @property
    def group(self) -> int:
        """Query heads per key head: query head h reads key head ``h // group``."""
        return self.heads_q // self.heads_k if self.heads_k else 1

    @property
    def acc_dtype(self) -> np.dtype:
        """Dtype of scores, statistics and lse."""
        return accumulation_dtype(self.dtype)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output that the caller gets."""
        heads = () if self.flat else (self.heads_q,)
        return (*self.batch_shape, *heads, self.seqlen_q, self.head_dim_v)

    @property
    def general(self) -> bool:
        """Whether scores are changed or hidden by more than lengths, causal and window."""
        return bool(self.softcap or self.bias_dtype or self.has_mask or self.has_alibi)

    @property
    def diagonal_offset(self) -> int:
        """Key index at query 0's diagonal, for entries that use all of their keys."""
        return 0 if self.top_left else self.seqlen_k - self.seqlen_q

    @property
    def device(self) -> int | None:
        """Id of the CUDA device that holds the arrays; None for arrays on the host."""
        return self.q.device.id if _arrays.is_cupy(self.q) else None

    def without_arrays(self) -> AttentionProblem:
        """The same problem as a question: equal, hashable, and keeping no array alive."""
        return dataclasses.replace(self, **dict.fromkeys(ARRAYS))


def from_arrays(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: Sequence[int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    seqlens_k: Any = None,
) -> AttentionProblem:
    """Validate the arguments of ``function`` (a public name, for messages) and canonicalise them.

    Raises
    ------
    TypeError
        An argument is of a type or dtype that is not served, or numpy is mixed with CuPy.
    ValueError
        Shapes, devices or numbers don't fit each other.
    """
    q, k, v = (_arrays.adopt(function, n, x) for n, x in (("q", q), ("k", k), ("v", v)))
    _check_same_place(function, q, k=k, v=v)
    dtype = _check_dtypes(function, q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 2:
            raise ValueError(
                f"{function}: {name} has shape {x.shape}; expected (..., heads, seqlen, head_dim) "
                "or (seqlen, head_dim)"
            )
    flat = q.ndim == k.ndim == v.ndim == 2
    shapes = f"q.shape={q.shape}, k.shape={k.shape}, v.shape={v.shape}"
    q, k, v = (x[None] if x.ndim == 2 else x for x in (q, k, v))
    heads_q, seqlen_q, head_dim = q.shape[-3:]
    heads_k, seqlen_k, head_dim_v = *k.shape[-3:-1], v.shape[-1]
    _check_sizes(function, q, k, v, shapes)
    try:
        batch_shape = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise ValueError(
            f"{function}: the leading axes of q, k and v must broadcast to each other ({shapes})"
        ) from None
    xp = np if isinstance(q, np.ndarray) else _arrays.import_cupy()
    q, k, v = (xp.broadcast_to(x, (*batch_shape, *x.shape[-3:])) for x in (q, k, v))

    window_left, window_right, top_left = _window(function, causal, window, seqlen_q + seqlen_k)
    score_shape = (*batch_shape, heads_q, seqlen_q, seqlen_k)
    if bias is not None:
        bias = _arrays.adopt(function, "bias", bias)
        _check_same_place(function, q, bias=bias)
        if bias.dtype not in (dtype, np.float32):
            raise TypeError(
                f"{function}: bias.dtype is {bias.dtype}; expected q's dtype {dtype} or float32"
            )
        bias = _broadcast(function, xp, "bias", bias, score_shape)
    if mask is not None:
        mask = _arrays.adopt(function, "mask", mask)
        _check_same_place(function, q, mask=mask)
        if mask.dtype != np.bool_:
            raise TypeError(
                f"{function}: mask.dtype is {mask.dtype}; expected bool, True where a query sees "
                "a key (an additive mask is bias=)"
            )
        mask = _broadcast(function, xp, "mask", mask, score_shape)
    if alibi_slopes is not None:
        alibi_slopes = _small_array(
            function, xp, "alibi_slopes", alibi_slopes, q, accumulation_dtype(dtype)
        )
        if alibi_slopes.dtype not in (dtype, np.float32):
            raise TypeError(
                f"{function}: alibi_slopes.dtype is {alibi_slopes.dtype}; expected float32 or "
                f"q's dtype {dtype}"
            )
        alibi_slopes = alibi_slopes.astype(accumulation_dtype(dtype), copy=False)
        alibi_slopes = _broadcast(
            function, xp, "alibi_slopes", alibi_slopes, (*batch_shape, heads_q)
        )
    if seqlens_k is not None:
        seqlens_k = _seqlens(function, xp, seqlens_k, q, batch_shape, seqlen_k)
    return AttentionProblem(
        dtype=dtype,
        batch_shape=batch_shape,
        heads_q=heads_q,
        heads_k=heads_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        softmax_scale=_scale(function, softmax_scale, head_dim, dtype),
        softcap=_softcap(function, softcap, dtype),
        window_left=window_left,
        window_right=window_right,
        top_left=top_left,
        bias_dtype=None if bias is None else bias.dtype,
        has_mask=mask is not None,
        has_alibi=alibi_slopes is not None,
        has_seqlens=seqlens_k is not None,
        flat=flat,
        q=q,
        k=k,
        v=v,
        bias=bias,
        mask=mask,
        alibi_slopes=alibi_slopes,
        seqlens_k=seqlens_k,
    )


def from_sizes(
    function: str,
    *,
    seqlen_q: int,
    head_dim: int,
    seqlen_k: int | None = None,
    head_dim_v: int | None = None,
    batch: int = 1,
    heads_q: int = 1,
    heads_k: int | None = None,
    dtype: Any = "float16",
    causal: bool | str = False,
    window: Sequence[int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    bias_dtype: Any = None,
    mask: bool = False,
    alibi: bool = False,
    seqlens: bool = False,
) -> AttentionProblem:
    """The problem that arrays of these sizes would pose; for questions without arrays."""
    asked = dtype
    dtype = _named_dtype(asked)
    if asked is None or dtype not in DTYPES:  # None is numpy's name of float64
        raise TypeError(f"{function}: dtype is {asked!r}; expected {_DTYPE_NAMES}")
    sizes = {
        "batch": batch,
        "heads_q": heads_q,
        "heads_k": heads_q if heads_k is None else heads_k,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_q if seqlen_k is None else seqlen_k,
        "head_dim": head_dim,
        "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
    }
    for name, value in sizes.items():
        sizes[name] = _integer(function, name, value)
        if sizes[name] < (1 if name == "head_dim" else 0):
            wanted = "a positive number" if name == "head_dim" else "0 or more"
            raise ValueError(f"{function}: {name} is {value}; expected {wanted}")
        if sizes[name] >= 2**31:
            raise ValueError(f"{function}: {name} is {value}; expected a number below 2^31")
    _check_groups(function, sizes["heads_q"], sizes["heads_k"], "as given")
    for name, given in (("mask", mask), ("alibi", alibi), ("seqlens", seqlens)):
        if not isinstance(given, (bool, np.bool_)):
            raise TypeError(
                f"{function}: {name} is a {type(given).__name__}; expected True or False"
            )
    if bias_dtype is not None:
        asked = bias_dtype
        bias_dtype = _named_dtype(asked)
        if bias_dtype not in (dtype, np.float32):
            raise TypeError(
                f"{function}: bias_dtype is {asked!r}; expected q's dtype {dtype} or float32"
            )
    window_left, window_right, top_left = _window(
        function, causal, window, sizes["seqlen_q"] + sizes["seqlen_k"]
    )
    return AttentionProblem(
        dtype=dtype,
        batch_shape=(sizes.pop("batch"),),
        **sizes,
        softmax_scale=_scale(function, softmax_scale, sizes["head_dim"], dtype),
        softcap=_softcap(function, softcap, dtype),
        window_left=window_left,
        window_right=window_right,
        top_left=top_left,
        bias_dtype=bias_dtype,
        has_mask=mask,
        has_alibi=alibi,
        has_seqlens=seqlens,
    )


def _named_dtype(asked: Any) -> np.dtype:
    """The dtype that was meant, or one that is not served where there is none of that name."""
    try:
        return np.dtype(bfloat16 if asked == "bfloat16" else asked)
    except (TypeError, ValueError):
        return np.dtype("V")


def check_out(function: str, problem: AttentionProblem, out: Any) -> None:
    """Refuse an ``out`` that can't take the result, or that the kernels would read as they write.

    Raises
    ------
    TypeError
        ``out`` is no array of the inputs' kind, or of another dtype.
    ValueError
        ``out`` has another shape, lies on another device, is read-only, or shares memory with an
        input or with itself.
    """
    host = isinstance(out, np.ndarray) and not isinstance(out, np.ma.MaskedArray)
    if not (host or _arrays.is_cupy(out)):
        raise TypeError(
            f"{function}: out is a {type(out).__name__}; expected a "
            f"{'numpy' if problem.device is None else 'CuPy'} array"
        )
    _check_same_place(function, problem.q, out=out)
    if out.shape != problem.out_shape:
        raise ValueError(f"{function}: out.shape is {out.shape}; expected {problem.out_shape}")
    if out.dtype != problem.dtype:
        raise TypeError(f"{function}: out.dtype is {out.dtype}; expected {problem.dtype}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError(f"{function}: out is read-only; expected an array that can be written")
    if _arrays.overlaps_itself(out):
        raise ValueError(
            f"{function}: out overlaps itself (strides {out.strides}); expected distinct elements"
        )
    check_separate(function, out, [getattr(problem, name) for name in ARRAYS])


def check_separate(function: str, out: Any, arrays: Sequence[Any]) -> None:
    """Refuse an ``out`` that shares memory with one of ``arrays``, which are those of ``ARRAYS``.

    Raises
    ------
    ValueError
        If it does.
    """
    for name, array in zip(ARRAYS, arrays, strict=True):
        if array is not None and _arrays.overlap(out, array):
            raise ValueError(f"{function}: out shares memory with {name}; expected separate memory")


def _check_same_place(function: str, first: Any, **others: Any) -> None:
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


def _check_dtypes(function: str, q: Any, k: Any, v: Any) -> np.dtype:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES or not x.dtype.isnative:
            raise TypeError(
                f"{function}: {name}.dtype is {x.dtype}; expected {_DTYPE_NAMES}, the same for q, "
                "k and v"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"{function}: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    return np.dtype(q.dtype)


def _check_sizes(function: str, q: Any, k: Any, v: Any, shapes: str) -> None:
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
    _check_groups(function, q.shape[-3], k.shape[-3], shapes)


def _check_groups(function: str, heads_q: int, heads_k: int, shapes: str) -> None:
    if heads_q % heads_k if heads_k else heads_q:
        raise ValueError(
            f"{function}: q has {heads_q} heads and k has {heads_k}; heads_q must be a multiple "
            f"of heads_k ({shapes})"
        )


def _broadcast(function: str, xp: Any, name: str, array: Any, shape: tuple[int, ...]) -> Any:
    try:
        return xp.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"{function}: {name}.shape is {array.shape}; expected a shape that broadcasts to "
            f"{shape}"
        ) from None


def _small_array(function: str, xp: Any, name: str, value: Any, q: Any, dtype: Any) -> Any:
    """``value`` as an array beside q; numbers and sequences of numbers are moved there."""
    if isinstance(value, (list, tuple)) or _is_number(value):
        try:
            return xp.asarray(np.asarray(value, dtype))
        except (TypeError, ValueError, OverflowError):
            raise TypeError(
                f"{function}: {name} is {value!r}; expected numbers or an array"
            ) from None
    array = _arrays.adopt(function, name, value)
    _check_same_place(function, q, **{name: array})
    return array


def _seqlens(
    function: str, xp: Any, value: Any, q: Any, batch_shape: tuple[int, ...], seqlen_k: int
) -> Any:
    if isinstance(value, (list, tuple)) or _is_number(value):
        try:
            host = np.asarray(value)
        except ValueError:  # a ragged list
            host = np.asarray(None)
        if host.dtype.kind not in "iu" and host.size:
            raise TypeError(
                f"{function}: seqlens_k is {value!r}; expected integers, of 64 bits at most"
            )
    else:
        array = _arrays.adopt(function, "seqlens_k", value)
        _check_same_place(function, q, seqlens_k=array)
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
    return _broadcast(function, xp, "seqlens_k", array, batch_shape)


def _window(
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
        side = -1 if side is None else _integer(function, f"window {name}", side)
        if side < -1:
            raise ValueError(
                f"{function}: window {name} is {side}; expected 0 or more, or None or -1 for no "
                "limit"
            )
        # A side that reaches past every key is no limit, and stays small enough for any integer.
        sides.append(-1 if side >= unlimited else side)
    left, right = sides
    return left, 0 if causal else right, isinstance(causal, str)


def _scale(function: str, softmax_scale: float | None, head_dim: int, dtype: np.dtype) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    scale = _real(function, "softmax_scale", softmax_scale)
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


def _softcap(function: str, softcap: float | None, dtype: np.dtype) -> float:
    if softcap is None:
        return 0.0
    cap = _real(function, "softcap", softcap)
    if not _fits(cap, dtype) or cap <= 0.0:
        raise ValueError(
            f"{function}: softcap is {cap}; expected a finite positive number (of "
            f"{accumulation_dtype(dtype)}, the dtype of the scores) or None"
        )
    return cap


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def _real(function: str, name: str, value: Any) -> float:
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


def _integer(function: str, name: str, value: Any) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{function}: {name} is {value!r}; expected an integer") from None
