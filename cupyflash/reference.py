# SPDX-License-Identifier: MIT
"""The oracle: softmax attention and its gradients in float64 numpy, to be checked by eye.

Nothing here is tiled and nothing is fast: the whole seqlen_q x seqlen_k matrix is held in memory,
and each line is one term of the definition. Everything else in the library is tested against it,
and shares with it checks of arguments alone.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyflash import _checks

__all__ = [
    "ReferenceGradients",
    "attention_reference",
    "attention_reference_grad",
    "visible",
]


class ReferenceGradients(NamedTuple):
    """Gradients in float64, each of its input's own shape.

    Attributes
    ----------
    dq, dk, dv : array
        Of the loss whose gradient by O was handed in.
    dbias : array or None
        None without a bias.

    Examples
    --------
    >>> attention_reference_grad([[1.0]], [[0.0]], [[1.0], [2.0]], [[3.0], [5.0]]).dbias is None
    True
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None


class _Evaluation(NamedTuple):
    """Every intermediate of one call, per query head: leading axes are (*batch, heads_q)."""

    q: np.ndarray  # (..., seqlen_q, head_dim); rows that see no key are 0
    k: np.ndarray  # (..., seqlen_k, head_dim); keys that no query sees are 0
    v: np.ndarray  # (..., seqlen_k, head_dim_v); likewise
    scale: float
    shown: np.ndarray  # bool, (..., seqlen_q, seqlen_k)
    product: np.ndarray  # scale * q k^T
    added: np.ndarray | float  # what bias and ALiBi add to the scores
    p: np.ndarray  # softmax of the scores, rows that see no key 0
    o: np.ndarray
    lse: np.ndarray


def visible(seqlen_q, seqlen_k, *, causal=False, window=None, seqlens_k=None) -> np.ndarray:
    """Which keys each query may see by position alone.

    Key j is visible to query i iff ``i + offset - left <= j <= i + offset + right`` and
    ``j < length``, where offset is ``length - seqlen_q``: the last query is level with the last
    key (the bottom right corner). ``causal="top_left"`` sets the offset to 0. ::

        causal=True, 2 x 4    causal=True, 4 x 2    causal="top_left", 2 x 4    window=(1, 0), 3 x 3
            1 1 1 0               0 0                   1 0 0 0                     1 0 0
            1 1 1 1               0 0                   1 1 0 0                     1 1 0
                                  1 0                                               0 1 1
                                  1 1

    Parameters
    ----------
    seqlen_q, seqlen_k : int
        Numbers of queries and keys.
    causal : bool or "top_left"
        True or "top_left" means right = 0.
    window : (left, right), optional
        How many keys before and after its own position a query sees; None or -1 = unlimited.
    seqlens_k : int or integer array (*batch), optional
        Keys in use, ``length`` above; seqlen_k by default.

    Returns
    -------
    numpy.ndarray of bool, (*batch, seqlen_q, seqlen_k)

    Raises
    ------
    ValueError
        If a length is negative, if causal is another value, if a window entry is below -1, or if
        seqlens_k is outside 0 .. seqlen_k.
    TypeError
        If a length, a window entry or seqlens_k is no integer, or if window is no pair.

    Examples
    --------
    >>> visible(2, 3, causal=True).astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    seqlen_q = _checks.at_least("visible", "seqlen_q", seqlen_q, 0)
    seqlen_k = _checks.at_least("visible", "seqlen_k", seqlen_k, 0)
    if not (isinstance(causal, bool | np.bool_) or causal == "top_left"):
        raise ValueError(f'visible: causal is {causal!r}; expected False, True or "top_left"')
    window = (None, None) if window is None else window
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"visible: window is {window!r}; expected (left, right)")
    left, right = (
        -1 if end is None else _checks.integer("visible", "an entry of window", end)
        for end in window
    )
    if min(left, right) < -1:
        raise ValueError(f"visible: window is {window!r}; entries are >= 0, or None or -1")
    # Past both lengths a window is no limit; numpy's integers wrap around for larger numbers.
    left, right = (min(end, seqlen_q + seqlen_k) for end in (left, right))
    if causal:
        right = 0

    length = np.asarray(seqlen_k if seqlens_k is None else seqlens_k)
    if length.dtype.kind not in "iu" and length.size:
        raise TypeError(f"visible: seqlens_k is {seqlens_k!r}; expected 64-bit integers")
    if np.any((length < 0) | (length > seqlen_k)):
        raise ValueError(f"visible: seqlens_k is {seqlens_k!r}; expected 0 .. {seqlen_k}")
    length = length.astype(np.int64)[..., None, None]

    i = np.arange(seqlen_q)[:, None]
    j = np.arange(seqlen_k)[None, :]
    diagonal = i if causal == "top_left" else i + length - seqlen_q
    shown = np.broadcast_to(j < length, (*length.shape[:-2], seqlen_q, seqlen_k))
    if left != -1:
        shown = shown & (diagonal - left <= j)
    if right != -1:
        shown = shown & (j <= diagonal + right)
    return shown


def attention_reference(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    softmax_scale=None,
    softcap=None,
    bias=None,
    mask=None,
    alibi_slopes=None,
    seqlens_k=None,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention by its definition, in float64.

    ``o = softmax(s) v`` and ``lse = ln(sum_j exp(s_j))`` per row (Dao et al. 2022, equation of
    section 2.2), with ``s = scale * q k^T -> softcap * tanh(s / softcap) -> + bias, ALiBi ->
    -inf where hidden``.

    Parameters
    ----------
    q : array (..., heads_q, seqlen_q, head_dim)
        numpy or ml_dtypes, any real dtype. A 2-D array is one head, and leading axes broadcast.
    k : array (..., heads_k, seqlen_k, head_dim)
        heads_q is a multiple of heads_k; query head h reads key head h // (heads_q // heads_k).
    v : array (..., heads_k, seqlen_k, head_dim_v)
    causal, window, seqlens_k
        As in `visible`; seqlens_k broadcasts to the batch shape.
    softmax_scale : float, default 1 / sqrt(head_dim)
        Not 0; may be negative.
    softcap : float, optional
        Above 0.
    bias : array broadcasting to (..., heads_q, seqlen_q, seqlen_k), optional
        Added to the scores; -inf hides exactly as mask does, whatever the score.
    mask : bool array broadcasting likewise, optional
        True = visible.
    alibi_slopes : array broadcasting to (..., heads_q), optional
        Adds ``-slope * |i + offset - j|``, the offset being that of `visible`.

    Returns
    -------
    o : float64 (..., heads_q, seqlen_q, head_dim_v), 2-D if q, k and v all are
    lse : float64, o's shape without the last axis
        Nats. A row that sees no key has o = 0 and lse = -inf.

    Raises
    ------
    ValueError
        If shapes do not fit, if heads_q is not a multiple of heads_k, if softmax_scale is 0 or
        softcap not positive, if either is not finite, or as `visible` raises.
    TypeError
        If mask is not boolean or a number no real one, or as `visible` raises.

    Notes
    -----
    Keys that no query of a head may see are zeroed before the products, so a NaN there cannot
    leak. A NaN in a row of v that only some queries see reaches the others as ``0 * NaN``.

    Examples
    --------
    >>> o, lse = attention_reference([[0.0]], [[1.0], [2.0]], [[3.0], [5.0]])
    >>> o, lse.round(4)
    (array([[4.]]), array([0.6931]))
    """
    e = _evaluate(
        q,
        k,
        v,
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        bias=bias,
        mask=mask,
        alibi_slopes=alibi_slopes,
        seqlens_k=seqlens_k,
    )
    one_head = np.ndim(q) == np.ndim(k) == np.ndim(v) == 2
    return (e.o[0], e.lse[0]) if one_head else (e.o, e.lse)


def attention_reference_grad(dout, q, k, v, **options: Any) -> ReferenceGradients:
    """Exact gradients of ``sum(dout * o)`` in float64.

    With P the softmax and D = rowsum(dout * o) (Dao et al. 2022, appendix B.2)::

        dV = P^T dO     dP = dO V^T     dS = P * (dP - D)     dbias = dS
        dQ = scale (dS * cap') K        dK = scale (dS * cap')^T Q        cap' = 1 - tanh^2

    Heads that share a key head, and axes along which an input was broadcast, are summed.

    Parameters
    ----------
    dout : array of o's shape
    q, k, v, **options
        As in `attention_reference`.

    Returns
    -------
    ReferenceGradients
        (dq, dk, dv, dbias), each of its input's shape. Rows that see no key contribute nothing,
        keys that no query sees have gradient 0.

    Raises
    ------
    ValueError, TypeError
        As `attention_reference`.

    Examples
    --------
    >>> attention_reference_grad([[1.0]], [[0.0]], [[1.0], [2.0]], [[3.0], [5.0]]).dv
    array([[0.5],
           [0.5]])
    """
    e = _evaluate(q, k, v, **options)
    do = _broadcast("dout", _float64(dout), e.o.shape)
    do = np.where(e.shown.any(-1, keepdims=True), do, 0.0)
    with np.errstate(invalid="ignore", over="ignore"):
        dp = do @ e.v.swapaxes(-1, -2)
        ds = e.p * (dp - np.sum(do * e.o, axis=-1, keepdims=True))
        ds = np.where(e.shown, ds, 0.0)
        dv = e.p.swapaxes(-1, -2) @ do
        dproduct = ds
        if (softcap := options.get("softcap")) is not None:
            dproduct = np.where(e.shown, ds * (1.0 - np.tanh(e.product / float(softcap)) ** 2), 0.0)
        dq = e.scale * (dproduct @ e.k)
        dk = e.scale * (dproduct.swapaxes(-1, -2) @ e.q)
    bias = options.get("bias")
    return ReferenceGradients(
        dq=_sum_to(dq, np.shape(q)),
        dk=_sum_to(_sum_groups(dk, k), np.shape(k)),
        dv=_sum_to(_sum_groups(dv, v), np.shape(v)),
        dbias=None if bias is None else _sum_to(ds, np.shape(bias)),
    )


def _evaluate(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    softmax_scale=None,
    softcap=None,
    bias=None,
    mask=None,
    alibi_slopes=None,
    seqlens_k=None,
) -> _Evaluation:
    q, k, v = _per_query_head(_float64(q), _float64(k), _float64(v))
    *batch, heads_q, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[-2]
    full_shape = (*batch, heads_q, seqlen_q, seqlen_k)

    # Positions first, then the two ways of hiding single pairs.
    shown = visible(seqlen_q, seqlen_k, causal=causal, window=window, seqlens_k=seqlens_k)
    if seqlens_k is not None:
        _broadcast("seqlens_k", np.asarray(seqlens_k), tuple(batch))
    shown = np.broadcast_to(shown[..., None, :, :], full_shape)  # the head axis
    if mask is not None:
        if np.asarray(mask).dtype != np.bool_:
            raise TypeError(f"attention_reference: mask is {np.asarray(mask).dtype}; expected bool")
        shown = shown & _broadcast("mask", np.asarray(mask), full_shape)
    added = 0.0
    if bias is not None:
        added = _broadcast("bias", _float64(bias), full_shape)
        shown = shown & (added != -np.inf)
    if alibi_slopes is not None:
        length = np.asarray(seqlen_k if seqlens_k is None else seqlens_k, np.int64)
        length = length[..., None, None, None]
        offset = 0 if causal == "top_left" else length - seqlen_q
        distance = np.abs(np.arange(seqlen_q)[:, None] + offset - np.arange(seqlen_k))
        slopes = _broadcast("alibi_slopes", _float64(alibi_slopes), full_shape[:-2])
        added = added - slopes[..., None, None] * distance

    # What takes part in no visible pair must not be multiplied: 0 * NaN is NaN.
    q = np.where(shown.any(-1)[..., None], q, 0.0)
    k = np.where(shown.any(-2)[..., None], k, 0.0)
    v = np.where(shown.any(-2)[..., None], v, 0.0)

    # An empty product is 0 at any scale.
    scale = max(head_dim, 1) ** -0.5
    if softmax_scale is not None:
        scale = _finite("softmax_scale", softmax_scale)
    if softcap is not None:
        softcap = _finite("softcap", softcap, positive=True)
    with np.errstate(invalid="ignore", over="ignore"):  # a visible NaN or Inf is the caller's
        product = scale * (q @ k.swapaxes(-1, -2))
        s = product if softcap is None else softcap * np.tanh(product / softcap)
        s = np.where(shown, s + added, -np.inf)

        m = s.max(axis=-1, keepdims=True, initial=-np.inf)
        e = np.exp(s - np.where(m == -np.inf, 0.0, m))
        l = e.sum(axis=-1, keepdims=True)
        empty = l == 0.0
        p = e / np.where(empty, 1.0, l)
        lse = np.where(empty, -np.inf, m + np.log(np.where(empty, 1.0, l)))[..., 0]
        o = p @ v
    return _Evaluation(q, k, v, scale, shown, product, added, p, o, lse)


def _finite(name, value, *, positive=False) -> float:
    number = _checks.real("attention_reference", name, value)
    if not math.isfinite(number) or number == 0.0 or (positive and number < 0.0):
        wanted = "positive" if positive else "non-zero"
        raise ValueError(
            f"attention_reference: {name} is {number}; expected a finite {wanted} number"
        )
    return number


def _broadcast(name, array, shape) -> np.ndarray:
    return _checks.broadcast("attention_reference", np, name, array, shape)


def _float64(array) -> npt.NDArray[np.float64]:
    return np.asarray(array).astype(np.float64)


def _per_query_head(q, k, v):
    """q, k and v with one common (*batch, heads_q) in front; key heads are repeated."""
    shapes = f"q.shape={q.shape}, k.shape={k.shape}, v.shape={v.shape}"
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ValueError(f"attention_reference: q, k and v have at least 2 axes ({shapes})")
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            "attention_reference: q and k must agree in head_dim and k and v in seqlen_k "
            f"({shapes})"
        )
    q, k, v = (x[None] if x.ndim == 2 else x for x in (q, k, v))
    heads_q, heads_k = q.shape[-3], k.shape[-3]
    if heads_q % max(heads_k, 1) or (heads_q and not heads_k) or v.shape[-3] != heads_k:
        raise ValueError(
            f"attention_reference: q has {heads_q} heads, k has {heads_k} and v has "
            f"{v.shape[-3]}; k and v must agree, and q have a multiple of theirs"
        )
    group = heads_q // max(heads_k, 1)
    k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    try:
        batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise ValueError(
            f"attention_reference: the leading axes of q, k and v must broadcast ({shapes})"
        ) from None
    return (np.broadcast_to(x, (*batch, *x.shape[-3:])) for x in (q, k, v))


def _sum_groups(grad, key) -> np.ndarray:
    """(..., heads_q, n, d) -> (..., heads_k, n, d): the inverse of repeating key heads."""
    heads_k = 1 if np.ndim(key) == 2 else np.shape(key)[-3]
    *batch, heads_q, n, d = grad.shape
    return grad.reshape(*batch, heads_k, heads_q // max(heads_k, 1), n, d).sum(axis=-3)


def _sum_to(grad, shape) -> np.ndarray:
    """Sum over the axes along which an array of this shape was broadcast to grad's shape."""
    grad = grad.sum(axis=tuple(range(grad.ndim - len(shape))))
    stretched = tuple(a for a, n in enumerate(shape) if n == 1 and grad.shape[a] != 1)
    return grad.sum(axis=stretched, keepdims=True)
