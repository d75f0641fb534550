# SPDX-License-Identifier: MIT
"""The algebra of (m, l): a softmax that never sees the whole row.

For scores x in blocks, each block is known by its max and by the sum of its exponents against that
max, ``m(x) = max_i x_i`` and ``l(x) = sum_i exp(x_i - m(x))``. Two blocks merge into one by one
scalar each, because ``exp(x - m_a) * exp(m_a - m) = exp(x - m)``: the local max cancels. The third
part of the state, O, is kept *normalised*, as Algorithm 1 of Dao et al. 2022 (arXiv:2205.14135)
keeps it: after every step O is the exact attention over the keys folded in so far, and line 12
undoes the division by l before it adds and divides again.

The state of no keys is m = -inf, l = 0, O = 0; it, and scores of -inf, are safe in every
combination. Scores are finite or -inf: +inf and NaN give NaN. All functions take numpy or CuPy
arrays and answer in kind.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cupyflash import _arrays, _checks
from cupyflash.reference import visible

__all__ = [
    "OutputState",
    "Statistics",
    "Step",
    "algorithm1_steps",
    "finish",
    "fold",
    "logsumexp",
    "merge",
    "resume",
    "start",
]


class Statistics(NamedTuple):
    """Running max m and sum l of each row.

    Attributes
    ----------
    m, l : array (*rows)
        -inf and 0 before any key has been seen.

    Examples
    --------
    >>> fold(start(1), np.array([[1.0, 1.0, 1.0]]))
    Statistics(m=array([1.]), l=array([3.]))
    """

    m: Any
    l: Any


class OutputState(NamedTuple):
    """Statistics, with the attention over the keys so far.

    Attributes
    ----------
    m, l : array (*rows)
        As in `Statistics`.
    O : array (*rows, head_dim_v)
        Divided by l.

    Examples
    --------
    >>> fold(start(1, head_dim_v=1), np.zeros((1, 2)), np.array([[1.0], [3.0]]))
    OutputState(m=array([0.]), l=array([2.]), O=array([[2.]]))
    """

    m: Any
    l: Any
    O: Any


class Step(NamedTuple):
    """What HBM holds after one inner step of Algorithm 1.

    Attributes
    ----------
    j, i : int
        The blocks of keys and of queries of the step, counted from 1 as the paper's.
    O : array (seqlen_q, head_dim_v)
        Attention over the keys of the blocks so far, divided by l.
    l, m : array (seqlen_q,)
        As in `Statistics`.

    Examples
    --------
    >>> q, k, v = np.zeros((1, 1)), np.zeros((2, 1)), np.array([[1.0], [3.0]])
    >>> next(algorithm1_steps(q, k, v, Br=1, Bc=1))
    Step(j=1, i=1, O=array([[1.]]), l=array([1.]), m=array([0.]))
    """

    j: int
    i: int
    O: Any
    l: Any
    m: Any


State = TypeVar("State", Statistics, OutputState)


def start(shape, head_dim_v=None, *, dtype=np.float64, like=None) -> Statistics | OutputState:
    """The state of no keys: m = -inf, l = 0, O = 0 (Algorithm 1, line 2).

    Parameters
    ----------
    shape : int or tuple of int
        Shape of the rows.
    head_dim_v : int, optional
        With it the state carries O, of shape (*shape, head_dim_v); without it only (m, l).
    dtype : dtype, default float64
        In which everything is accumulated: float32 or float64.
    like : array, optional
        A CuPy array here makes a state of CuPy arrays.

    Returns
    -------
    Statistics or OutputState

    Raises
    ------
    TypeError
        If dtype is neither float32 nor float64.

    Examples
    --------
    >>> start(2)
    Statistics(m=array([-inf, -inf]), l=array([0., 0.]))
    """
    if dtype is None or _checks.named_dtype(dtype) not in (np.float32, np.float64):
        raise TypeError(f"start: dtype is {dtype!r}; expected float32 or float64")
    xp = _namespace(like)
    m, l = xp.full(shape, -math.inf, dtype), xp.zeros(shape, dtype)
    if head_dim_v is None:
        return Statistics(m, l)
    return OutputState(m, l, xp.zeros((*m.shape, head_dim_v), dtype))


def fold(state: State, scores, values=None) -> State:
    """Fold one more block of keys into a state (Algorithm 1, lines 10 to 12).

    ``m_new = max(m, m_ij)``, ``l_new = e^(m - m_new) l + e^(m_ij - m_new) l_ij`` and
    ``O_new = (l e^(m - m_new) O + e^(m_ij - m_new) P_ij V_j) / l_new``.

    Parameters
    ----------
    state : Statistics or OutputState
    scores : array (*rows, keys)
        Scaled and masked; -inf = hidden, no keys at all is fine. Computed in the state's dtype.
    values : array (*batch, keys, head_dim_v)
        Where the state carries O; rows are (*batch, seqlen).

    Returns
    -------
    The new state, of the same kind; the old one is left as it was.

    Raises
    ------
    TypeError
        If values are missing where the state carries O, or given where it does not.

    Examples
    --------
    >>> state = fold(start(1), np.array([[0.0, 0.0]]))
    >>> fold(state, np.array([[0.0, 0.0]]))
    Statistics(m=array([0.]), l=array([4.]))
    """
    if isinstance(state, OutputState) is (values is None):
        raise TypeError(
            f"fold: the state is {type(state).__name__} and values are "
            f"{'missing' if values is None else 'given'}; values belong to an OutputState alone"
        )
    if scores.shape[-1] == 0:
        return state
    xp = _namespace(scores)
    scores = scores.astype(state.m.dtype)
    m_ij = scores.max(axis=-1)
    P_ij = _exp_below(scores, m_ij[..., None])
    l_ij = P_ij.sum(axis=-1)

    m_new = xp.maximum(state.m, m_ij)
    old, new = _exp_below(state.m, m_new), _exp_below(m_ij, m_new)
    l_new = old * state.l + new * l_ij
    if values is None:
        return Statistics(m_new, l_new)
    numerator = (old * state.l)[..., None] * state.O  # undo the old division, re-base
    numerator = numerator + new[..., None] * (P_ij @ values.astype(state.m.dtype))
    return OutputState(m_new, l_new, _divide(numerator, l_new[..., None]))


def merge(a: State, b: State) -> State:
    """The state of two disjoint sets of keys from the state of each.

    ``m = max(m_a, m_b)``, ``l = e^(m_a - m) l_a + e^(m_b - m) l_b``, and O the average of O_a and
    O_b with these two terms as weights. Associative and commutative, with `start` as its neutral
    element, so that parts of a row may be computed anywhere and merged in any order.

    Parameters
    ----------
    a, b : Statistics or OutputState
        Both of one kind.

    Returns
    -------
    A state of the same kind.

    Raises
    ------
    TypeError
        If the kinds differ.

    Examples
    --------
    >>> merge(resume(np.ones((1, 1)), np.zeros(1)), resume(np.full((1, 1), 3.0), np.zeros(1)))
    OutputState(m=array([0.]), l=array([2.]), O=array([[2.]]))
    """
    if type(a) is not type(b):
        raise TypeError(f"merge: a is {type(a).__name__} but b is {type(b).__name__}")
    m = _namespace(a.m).maximum(a.m, b.m)
    weight_a, weight_b = _exp_below(a.m, m) * a.l, _exp_below(b.m, m) * b.l
    l = weight_a + weight_b
    if isinstance(a, Statistics):
        return Statistics(m, l)
    share_a, share_b = _divide(weight_a, l)[..., None], _divide(weight_b, l)[..., None]
    return OutputState(m, l, share_a * a.O + share_b * b.O)


def finish(state: Statistics | OutputState):
    """What a state amounts to: lse, or (o, lse).

    Parameters
    ----------
    state : Statistics or OutputState

    Returns
    -------
    lse : array of the rows' shape
        ``m + ln(l)``, nats; -inf for a row without a visible key.
    (o, lse)
        For an OutputState; such a row has o = 0.

    Examples
    --------
    >>> finish(Statistics(m=np.array([2.0, -np.inf]), l=np.array([1.0, 0.0])))
    array([  2., -inf])
    """
    xp = _namespace(state.m)
    lse = state.m + xp.log(xp.where(state.l == 0, state.l.dtype.type(1), state.l))
    return lse if isinstance(state, Statistics) else (state.O, lse)


def resume(o, lse) -> OutputState:
    """The state that `finish` made (o, lse) of, up to the choice of m: m = lse, l = 1.

    With it the results of attention over separate sets of keys are merged:
    ``finish(merge(resume(o_a, lse_a), resume(o_b, lse_b)))``.

    Parameters
    ----------
    o : array (*rows, head_dim_v)
        Widened to the dtype of lse. Partial results kept in 16 bits cost a rounding each.
    lse : array (*rows), float32 or float64
        Nats; -inf for a row without a visible key.

    Returns
    -------
    OutputState

    Examples
    --------
    >>> resume(np.ones((1, 1), np.float16), np.array([3.0], np.float32)).O.dtype
    dtype('float32')
    """
    return OutputState(lse, (lse != -math.inf).astype(lse.dtype), o.astype(lse.dtype))


def logsumexp(blocks: Iterable):
    """Streaming ``ln(sum_j exp(x_j))`` over the last axis of the blocks, one block at a time.

    Parameters
    ----------
    blocks : iterable of arrays (*rows, any)
        Floating point; accumulated in float64 if the first block is, else in float32.

    Returns
    -------
    array of the rows' shape
        Nats; -inf where there was nothing but -inf.

    Raises
    ------
    ValueError
        If there is no block at all, whose shape would be the result's.

    Examples
    --------
    >>> print(f"{logsumexp(np.zeros(400) for _ in range(4)):.3f}")  # ln(1600)
    7.378
    """
    state = None
    for block in blocks:
        if state is None:
            state = start(block.shape[:-1], dtype=_accumulator(block.dtype), like=block)
        state = fold(state, block)
    if state is None:
        raise ValueError("logsumexp: no blocks; expected at least one array, if an empty one")
    return finish(state)


def algorithm1_steps(
    q, k, v, *, Br, Bc, softmax_scale=None, causal=False, window=None, bias=None, mask=None
) -> Iterator[Step]:
    """Walk FlashAttention's Algorithm 1 line by line, and show HBM after every inner step.

    ``O = softmax(scale * Q K^T + bias) V`` (Dao et al. 2022, Algorithm 1; scale and mask as in
    its Algorithm 2). After the step (j, i) the rows ``(i-1)*Br : i*Br`` of O are the exact
    attention over the keys ``: j*Bc``.

    Parameters
    ----------
    q : array (seqlen_q, head_dim)
        float16 and bfloat16 are computed in float32, as is float32; float64 in float64.
    k : array (seqlen_k, head_dim)
    v : array (seqlen_k, head_dim_v)
    Br, Bc : int
        Rows of a query block and of a key block, at least 1; the last blocks may be ragged.
    softmax_scale : float, default 1 / sqrt(head_dim)
    causal, window
        As in `cupyflash.reference.visible`.
    bias : array broadcasting to (seqlen_q, seqlen_k), optional
        Added to the scaled scores; -inf hides.
    mask : bool array broadcasting likewise, optional
        True = visible.

    Yields
    ------
    Step
        (j, i, O, l, m). The arrays are copies: they may be kept and changed.

    Raises
    ------
    ValueError
        If an array is not 2-D or shapes do not fit, if Br or Bc is below 1, if softmax_scale is
        0 or not finite, or if causal or a window entry is none of its values.
    TypeError
        If q, k, v, bias or mask is no array or not beside q, if mask is not boolean, or if Br, Bc,
        softmax_scale, causal or window is of another type.

    All of them are raised by the call, before the first step is asked for.

    Examples
    --------
    >>> q, k, v = np.zeros((1, 1)), np.zeros((2, 1)), np.array([[1.0], [3.0]])
    >>> [float(step.O[0, 0]) for step in algorithm1_steps(q, k, v, Br=1, Bc=1)]
    [1.0, 2.0]
    """
    function = "algorithm1_steps"
    q, k, v = (_arrays.adopt(function, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    _checks.check_same_place(function, q, k=k, v=v)
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 2:
            raise ValueError(f"{function}: {name} has shape {array.shape}; expected 2-D")
    if q.shape[1] != k.shape[1] or k.shape[0] != v.shape[0]:
        raise ValueError(
            f"{function}: q and k must agree in head_dim and k and v in seqlen "
            f"(q.shape={q.shape}, k.shape={k.shape}, v.shape={v.shape})"
        )
    Br, Bc = (_checks.at_least(function, name, x, 1) for name, x in (("Br", Br), ("Bc", Bc)))
    (N, d), keys, xp = q.shape, k.shape[0], _namespace(q)
    scale = max(d, 1) ** -0.5
    if softmax_scale is not None:
        scale = _checks.scale_number(function, softmax_scale, d, q.dtype)
    _checks.window_limits(function, causal, window, N + keys)
    if bias is not None:
        bias = _arrays.adopt(function, "bias", bias)
        _checks.check_same_place(function, q, bias=bias)
        bias = _checks.broadcast(function, xp, "bias", bias, (N, keys))
    if mask is not None:
        mask = _checks.mask_array(function, xp, mask, q, (N, keys))
    return _walk(q, k, v, Br, Bc, scale, causal, window, bias, mask)


def _walk(q, k, v, Br, Bc, scale, causal, window, bias, mask) -> Iterator[Step]:
    xp = _namespace(q)
    N, (keys, d_v) = q.shape[0], v.shape
    dtype = _accumulator(q.dtype)
    Q, K, V = (x.astype(dtype) for x in (q, k, v))
    shown = xp.asarray(visible(N, keys, causal=causal, window=window))
    if mask is not None:
        shown = shown & mask
    if bias is not None:
        bias = bias.astype(dtype)

    m, l, O = start(N, d_v, dtype=dtype, like=q)  # line 2
    Tr, Tc = -(-N // Br), -(-keys // Bc)  # lines 3 and 4
    for j in range(1, Tc + 1):  # line 5
        cols = slice((j - 1) * Bc, j * Bc)
        K_j, V_j = K[cols], V[cols]  # line 6: to SRAM
        for i in range(1, Tr + 1):  # line 7
            rows = slice((i - 1) * Br, i * Br)
            Q_i, O_i, l_i, m_i = Q[rows], O[rows], l[rows], m[rows]  # line 8: to SRAM

            S_ij = scale * (Q_i @ K_j.T)  # line 9
            if bias is not None:
                S_ij = S_ij + bias[rows, cols]
            S_ij = xp.where(shown[rows, cols], S_ij, dtype(-math.inf))

            m_ij = S_ij.max(axis=1)  # line 10
            P_ij = _exp_below(S_ij, m_ij[:, None])
            l_ij = P_ij.sum(axis=1)

            m_new = xp.maximum(m_i, m_ij)  # line 11
            old, new = _exp_below(m_i, m_new), _exp_below(m_ij, m_new)
            l_new = old * l_i + new * l_ij

            green = (l_i * old)[:, None] * O_i  # line 12: the keys of blocks 1 .. j-1
            yellow = new[:, None] * (P_ij @ V_j)  # and those of block j
            O[rows] = _divide(green + yellow, l_new[:, None])
            l[rows], m[rows] = l_new, m_new  # line 13

            yield Step(j, i, O.copy(), l.copy(), m.copy())


def _namespace(array):
    """The module that the array belongs to; CuPy is never imported for it."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else np


def _accumulator(dtype) -> type:
    """In which type statistics of this dtype are held."""
    return np.float64 if dtype == np.float64 else np.float32


def _exp_below(x, m):
    """exp(x - m) for x <= m, and 0 where m = -inf: nothing seen weighs nothing."""
    xp = _namespace(m)
    with np.errstate(over="ignore"):  # x - m may fall to -inf, whose exponential is right
        return xp.exp(x - xp.where(m == -math.inf, m.dtype.type(0), m))


def _divide(numerator, l):
    """numerator / l, where l = 0 (no key seen, the numerator is 0) divided by 1."""
    return numerator / _namespace(l).where(l == 0, l.dtype.type(1), l)
