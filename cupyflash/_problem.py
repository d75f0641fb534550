# SPDX-License-Identifier: MIT
"""The validated, canonical description of one call: every refusal is raised here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyflash import _arrays, _checks, _dtypes
from cupyflash._dtypes import DTYPES, accumulation_dtype

# The arguments that are arrays, in the order of the public signature.
ARRAYS = ("q", "k", "v", "bias", "mask", "alibi_slopes", "seqlens_k")
_MAX_AXES = 32


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
    tf32: bool = False  # products of float32 may be TF32 ones
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

    def aligned(self) -> AttentionProblem:
        """The problem with copies of those arrays whose elements no kernel can read in place."""
        arrays = {name: getattr(self, name) for name in ARRAYS}
        odd = {n: x for n, x in arrays.items() if x is not None and not _arrays.is_aligned(x)}
        if not odd:
            return self
        return dataclasses.replace(self, **{n: _arrays.aligned(x) for n, x in odd.items()})


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
    precision: str | None = None,
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
    _checks.check_same_place(function, q, k=k, v=v)
    dtype = _checks.check_dtypes(function, q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 2:
            raise ValueError(
                f"{function}: {name} has shape {x.shape}; expected (..., heads, seqlen, head_dim) "
                "or (seqlen, head_dim)"
            )
        if x.ndim > _MAX_AXES:
            raise ValueError(
                f"{function}: {name} has {x.ndim} axes; expected at most {_MAX_AXES}, which are as "
                "many as numpy and CuPy broadcast"
            )
    flat = q.ndim == k.ndim == v.ndim == 2
    shapes = f"q.shape={q.shape}, k.shape={k.shape}, v.shape={v.shape}"
    q, k, v = (x[None] if x.ndim == 2 else x for x in (q, k, v))
    heads_q, seqlen_q, head_dim = q.shape[-3:]
    heads_k, seqlen_k, head_dim_v = *k.shape[-3:-1], v.shape[-1]
    _checks.check_sizes(function, q, k, v, shapes)
    try:
        batch_shape = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise ValueError(
            f"{function}: the leading axes of q, k and v must broadcast to each other ({shapes})"
        ) from None
    xp = np if isinstance(q, np.ndarray) else _arrays.import_cupy()
    q, k, v = (xp.broadcast_to(x, (*batch_shape, *x.shape[-3:])) for x in (q, k, v))
    window_left, window_right, top_left = _checks.window_limits(
        function, causal, window, seqlen_q + seqlen_k
    )
    score_shape = (*batch_shape, heads_q, seqlen_q, seqlen_k)
    with _arrays.on_device_of(q):
        if bias is not None:
            bias = _checks.bias_array(function, xp, bias, q, score_shape)
        if mask is not None:
            mask = _checks.mask_array(function, xp, mask, q, score_shape)
        if alibi_slopes is not None:
            alibi_slopes = _checks.slopes_array(
                function, xp, alibi_slopes, q, (*batch_shape, heads_q)
            )
        if seqlens_k is not None:
            seqlens_k = _checks.seqlens_array(function, xp, seqlens_k, q, batch_shape, seqlen_k)
    return AttentionProblem(
        dtype=dtype,
        batch_shape=batch_shape,
        heads_q=heads_q,
        heads_k=heads_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        softmax_scale=_checks.scale_number(function, softmax_scale, head_dim, dtype),
        softcap=_checks.softcap_number(function, softcap, dtype),
        tf32=_checks.takes_tf32(function, precision, dtype),
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
    precision: str | None = None,
) -> AttentionProblem:
    """The problem that arrays of these sizes would pose; for questions without arrays."""
    asked = dtype
    dtype = _checks.named_dtype(asked)
    if asked is None or dtype not in DTYPES:  # None is numpy's name of float64
        raise TypeError(f"{function}: dtype is {asked!r}; expected {_dtypes.NAMES_TEXT}")
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
        sizes[name] = _checks.integer(function, name, value)
        if sizes[name] < (1 if name == "head_dim" else 0):
            wanted = "a positive number" if name == "head_dim" else "0 or more"
            raise ValueError(f"{function}: {name} is {value}; expected {wanted}")
        if sizes[name] >= 2**31:
            raise ValueError(f"{function}: {name} is {value}; expected a number below 2^31")
    _checks.check_groups(function, sizes["heads_q"], sizes["heads_k"], "as given")
    for name, given in (("mask", mask), ("alibi", alibi), ("seqlens", seqlens)):
        if not isinstance(given, (bool, np.bool_)):
            raise TypeError(
                f"{function}: {name} is a {type(given).__name__}; expected True or False"
            )
    if bias_dtype is not None:
        asked = bias_dtype
        bias_dtype = _checks.named_dtype(asked)
        if bias_dtype not in (dtype, np.float32):
            raise TypeError(
                f"{function}: bias_dtype is {asked!r}; expected q's dtype {dtype} or float32"
            )
    window_left, window_right, top_left = _checks.window_limits(
        function, causal, window, sizes["seqlen_q"] + sizes["seqlen_k"]
    )
    return AttentionProblem(
        dtype=dtype,
        batch_shape=(sizes.pop("batch"),),
        **sizes,
        softmax_scale=_checks.scale_number(function, softmax_scale, sizes["head_dim"], dtype),
        softcap=_checks.softcap_number(function, softcap, dtype),
        tf32=_checks.takes_tf32(function, precision, dtype),
        window_left=window_left,
        window_right=window_right,
        top_left=top_left,
        bias_dtype=bias_dtype,
        has_mask=mask,
        has_alibi=alibi,
        has_seqlens=seqlens,
    )


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
    _checks.check_same_place(function, problem.q, out=out)
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
