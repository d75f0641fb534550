# SPDX-License-Identifier: MIT
"""Attention on numpy arrays: tiled, products through BLAS, never an N x N array.

The order is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691, Algorithm 1): a block of query
rows walks over the tiles of keys that it may see and carries the running maximum m, the running sum
l and the unnormalised output along. Blocks never meet, so they are shared out among threads; the
BLAS is held to one thread meanwhile, or its threads would compete with ours.

Every result is a function of its own head alone, bit for bit. BLAS may round differently for
another shape or another number of threads, so block and tile edges come from the sizes of one head,
heads are multiplied one by one even where they share a call, and the BLAS is held to one thread in
small calls too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from cupyflash._host_schedule import (
    Schedule,
    Task,
    Workspace,
    blas_takes,
    share_out,
    single_threaded_blas,
)
from cupyflash._problem import AttentionProblem

# m starts at 0, which need not be subtracted, and moves to the maximum of a tile where rowsum(P) is
# out of this range (too small a sum matters in a row's first tile alone). Values up to 1e30 stay
# finite under weights as large as this.
_SMALLEST_SUM, _LARGEST_SUM = 2.0**-6, 2.0**21

# Keys in one product with V.
_SUMMANDS = 128

# Q times a larger factor may overflow where the scores don't: these are multiplied by it instead.
_LARGEST_FACTOR_OF_Q = 2.0**32


def run(
    problem: AttentionProblem,
    out: np.ndarray | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of a problem that holds numpy arrays.

    ``O = softmax(softmax_scale * Q K^T + bias) V`` by running statistics (Milakov and Gimelshein
    2018, arXiv:1805.02867): a tile of scores S moves m to m', if it must, and with P = exp(S - m')
    makes l = exp(m - m') l + rowsum(P) and O = exp(m - m') O + P V; at the end O is divided by l.
    Any m' will do under which nothing overflows or vanishes, and most tiles leave m as it is.

    Parameters
    ----------
    problem : AttentionProblem
        From :func:`cupyflash._problem.from_arrays`.
    out : numpy array of ``problem.out_shape`` and ``problem.dtype``, optional
        Where O is written; any strides.
    progress : callable, optional
        Called as ``progress(done, total)`` after each of ``total`` pieces of work. Calls never
        overlap and ``done`` only grows, but they come from several threads. An exception that it
        raises ends the call.

    Returns
    -------
    o : numpy array of ``problem.out_shape`` and ``problem.dtype``
        ``out`` itself if that was given. 0 in a row that sees no key.
    lse : numpy array of ``problem.out_shape[:-1]`` and ``problem.acc_dtype``
        Natural logarithm of the row's sum; -inf in a row that sees no key.

    Notes
    -----
    float16 and bfloat16 are computed in float32, which is rounded once, at the end; float32 and
    float64 in their own precision. Apart from ``o`` and ``lse`` a call uses at most 64 MiB, however
    long the sequences are. It uses as many threads as numpy's BLAS may (``OPENBLAS_NUM_THREADS``
    or a threadpoolctl limit hold for both), and may be called from several threads at once.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import _problem, host
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64), np.float32)
    >>> o, lse = host.run(_problem.from_arrays("attention", q, k, v))
    >>> o.shape, lse.shape
    ((8, 100, 64), (8, 100))
    """
    if out is None:
        out = np.empty(problem.out_shape, problem.dtype)
    lse = np.empty(problem.out_shape[:-1], problem.acc_dtype)
    with single_threaded_blas as allowed_threads:
        schedule = Schedule.of(problem, allowed_threads)
        head = _Operands.of(problem, np.asarray(out), lse)  # a matrix would stay 2-D

        def work(task: Task, workspace: Workspace) -> None:
            _attend(problem, schedule, head.at(task), task, workspace)

        share_out(schedule, work, progress)
    return out, lse


@dataclasses.dataclass(frozen=True)
class _Operands:
    """All arrays of a call, or of one task, with heads split as (heads_k, group)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    o: np.ndarray
    lse: np.ndarray
    bias: np.ndarray | None
    mask: np.ndarray | None
    alibi_slopes: np.ndarray | None
    seqlens_k: np.ndarray | None

    @classmethod
    def of(cls, problem: AttentionProblem, o: np.ndarray, lse: np.ndarray) -> _Operands:
        heads = (*problem.batch_shape, problem.heads_k, problem.group)
        rows = (*heads, problem.seqlen_q)

        def split(x: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray | None:
            # Splitting an axis (or adding one of length 1) is always a view, whatever the strides.
            return None if x is None else x.reshape(shape)

        return cls(
            q=split(problem.q, (*rows, problem.head_dim)),
            k=problem.k[..., None, :, :],
            v=problem.v[..., None, :, :],
            o=split(o, (*rows, problem.head_dim_v)),
            lse=split(lse, rows),
            bias=split(problem.bias, (*rows, problem.seqlen_k)),
            mask=split(problem.mask, (*rows, problem.seqlen_k)),
            alibi_slopes=split(problem.alibi_slopes, (*heads, 1, 1)),
            seqlens_k=problem.seqlens_k,
        )

    def at(self, task: Task) -> _Operands:
        """The four-dimensional views that a task works on, keys cut to those in use."""
        entry, heads = task.entry, (task.heads_k, task.group)
        seqlen_k = self.k.shape[-2] if self.seqlens_k is None else int(self.seqlens_k[entry])

        def cut(x: np.ndarray | None, *where: slice) -> np.ndarray | None:
            return None if x is None else x[entry][(*heads, *where)]

        keys = slice(0, seqlen_k)
        return _Operands(
            q=cut(self.q),
            k=self.k[entry][task.heads_k, :, keys],
            v=self.v[entry][task.heads_k, :, keys],
            o=cut(self.o),
            lse=cut(self.lse),
            bias=_collapse(cut(self.bias, slice(None), keys)),
            mask=_collapse(cut(self.mask, slice(None), keys)),
            alibi_slopes=cut(self.alibi_slopes),
            seqlens_k=None,
        )


@dataclasses.dataclass
class _Block:
    """Query rows ``start`` to ``stop``, the keys that any of them may see, and (m, l, O).

    m is what the exponents are taken against. It need not be the running maximum, as long as no
    sum overflows or vanishes, and a row keeps it until then; l is 0 until a row has seen a key.
    """

    start: int
    stop: int
    first_key: int
    last_key: int  # exclusive
    Q: np.ndarray
    O: np.ndarray
    m: np.ndarray
    l: np.ndarray
    started: bool = False


def _attend(
    problem: AttentionProblem,
    schedule: Schedule,
    head: _Operands,
    task: Task,
    workspace: Workspace,
) -> None:
    """All keys for the rows of one task."""
    tile = _Tile(problem, head, workspace)
    blocks = [
        tile.start_block(start, min(start + schedule.Br, task.stop))
        for start in range(task.start, task.stop, schedule.Br)
    ]
    seeing = [block for block in blocks if block.first_key < block.last_key]
    if seeing:
        first = min(block.first_key for block in seeing)
        last = max(block.last_key for block in seeing)
        # The edges don't depend on which rows come together in a task.
        for edge in range(first - first % schedule.Bc, last, schedule.Bc):
            start, stop = max(edge, first), min(edge + schedule.Bc, last)
            K = _operand(head.k[..., start:stop, :], problem.acc_dtype, "K", workspace)
            V = _operand(head.v[..., start:stop, :], problem.acc_dtype, "V", workspace)
            for block in seeing:
                a, b = max(start, block.first_key), min(stop, block.last_key)
                if a < b:
                    keys = slice(a - start, b - start)
                    tile.fold(block, K[..., keys, :], V[..., keys, :], a, b)
    for block in blocks:
        tile.finish_block(block)


class _Tile:
    """What happens to one tile of scores: the scores themselves, what is hidden, the fold."""

    def __init__(self, problem: AttentionProblem, head: _Operands, workspace: Workspace):
        self.problem = problem
        self.head = head
        self.workspace = workspace
        seqlen_k = head.k.shape[-2]
        self.offset = 0 if problem.top_left else seqlen_k - problem.seqlen_q
        # numpy's exp2 is twice as fast as its exp; log2(e) goes into the scale. With terms that are
        # added in nats the scores stay in nats.
        adds = problem.softcap or problem.bias_dtype or problem.has_alibi
        scale = problem.softmax_scale
        late = abs(scale) > _LARGEST_FACTOR_OF_Q
        self.exp, self.nats = (np.exp, 1.0) if adds or late else (np.exp2, math.log(2.0))
        self.Q_factor, self.S_factor = (1.0, scale) if late else (scale / self.nats, 1.0)
        self.cap = problem.softcap

    def start_block(self, start: int, stop: int) -> _Block:
        problem, head = self.problem, self.head
        left, right = problem.window_left, problem.window_right
        seqlen_k = head.k.shape[-2]
        Q = head.q[..., start:stop, :]
        rows = Q.shape[:-1]

        def array(name: str, *last: int) -> np.ndarray:
            return self.workspace.array((name, start), (*rows, *last), problem.acc_dtype)

        block = _Block(
            start=start,
            stop=stop,
            first_key=0 if left < 0 else max(0, start + self.offset - left),
            last_key=seqlen_k if right < 0 else min(seqlen_k, stop + self.offset + right),
            Q=array("Q", problem.head_dim),
            O=array("O", problem.head_dim_v),
            m=array("m", 1),
            l=array("l", 1),
        )
        # In float64, so that a scale below float32's range still meets q before it rounds.
        factor = np.float64(self.Q_factor)
        np.multiply(Q, factor, out=block.Q, dtype=np.float64, casting="unsafe")
        block.m.fill(0)
        block.l.fill(0)
        return block

    def fold(self, block: _Block, K: np.ndarray, V: np.ndarray, start: int, stop: int) -> None:
        """Fold keys ``start`` to ``stop`` into the block's (m, l, O)."""
        bias = self._part(self.head.bias, block, start, stop)
        hidden, wholly = self._hidden(block, bias, start, stop)
        if wholly:
            return
        if hidden is not None:
            V = self._without_hidden(V, hidden)

        S = self._scores(block, K, bias, hidden, start, stop)
        P, rowsum = self._weights(block, S)
        far = (rowsum > _LARGEST_SUM) | ((rowsum < _SMALLEST_SUM) & (block.l == 0))
        if hidden is not None:
            far &= ~hidden.all(axis=-1, keepdims=True)
        if far.any():
            S = self._scores(block, K, bias, hidden, start, stop)
            top = S.max(axis=-1, keepdims=True)
            self._move(block, np.where(far & (top > -np.inf), top, block.m))
            P, rowsum = self._weights(block, S)
        O = self._sum_with(block, P, V)
        if not math.isfinite(O.sum()):
            # Weights above 1 may be what made it overflow: with this m they and l are 1 at most.
            lost = ~np.isfinite(O).all(axis=-1, keepdims=True)
            S = self._scores(block, K, bias, hidden, start, stop)
            m = np.maximum(S.max(axis=-1, keepdims=True), block.m + np.log(block.l) / self.nats)
            self._move(block, np.where(lost & (m > -np.inf), m, block.m))
            P, rowsum = self._weights(block, S)
            O = self._sum_with(block, P, V)
        block.started = True
        block.O[...] = O
        block.l += rowsum

    def _move(self, block: _Block, m: np.ndarray) -> None:
        """Let O and l be relative to another m."""
        rescale = np.where(block.l == 0, 1, self.exp(block.m - m))  # not 0 * inf
        block.O *= rescale
        block.l *= rescale
        block.m = m

    def _sum_with(self, block: _Block, P: np.ndarray, V: np.ndarray) -> np.ndarray:
        """O + P V, beside the block's O."""
        O = self._weighted_sum(P, V)
        if block.started:
            O += block.O
        return O

    def finish_block(self, block: _Block) -> None:
        o = self.head.o[..., block.start : block.stop, :]
        lse = self.head.lse[..., block.start : block.stop]
        np.add(block.m[..., 0] * self.nats, np.log(block.l[..., 0]), out=lse)
        if not block.started:
            block.O.fill(0)
        block.l[block.l == 0] = 1  # no key seen: 0 / 1
        np.divide(block.O, block.l, out=o, casting="unsafe")

    def _weights(self, block: _Block, S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """P = exp(S - m), in the memory of S, and rowsum(P)."""
        if block.m.any():
            S -= block.m
        P = self.exp(S, out=S)
        # As a product with ones: four times as fast as numpy's sum over the last axis.
        ones = self._array("ones", (S.shape[-1], 1))
        ones.fill(1)
        return P, np.matmul(P, ones)

    def _weighted_sum(self, P: np.ndarray, V: np.ndarray) -> np.ndarray:
        """P V, from sums of few terms: BLAS adds one by one, and equal terms err to one side."""
        PV = self._array("PV", (*P.shape[:-1], V.shape[-1]))
        part = self._array("part of PV", PV.shape)
        np.matmul(P[..., :_SUMMANDS], V[..., :_SUMMANDS, :], out=PV)
        for start in range(_SUMMANDS, P.shape[-1], _SUMMANDS):
            keys = slice(start, start + _SUMMANDS)
            PV += np.matmul(P[..., keys], V[..., keys, :], out=part)
        return PV

    def _scores(
        self,
        block: _Block,
        K: np.ndarray,
        bias: np.ndarray | None,
        hidden: np.ndarray | None,
        start: int,
        stop: int,
    ) -> np.ndarray:
        """Q K^T, softcap, bias and ALiBi, in this order; -inf where hidden."""
        S = self._array("S", (*block.Q.shape[:-1], stop - start))
        np.matmul(block.Q, K.swapaxes(-1, -2), out=S)
        if self.S_factor != 1.0:
            S *= S.dtype.type(self.S_factor)
        if self.cap:
            S *= S.dtype.type(1.0 / self.cap)
            np.tanh(S, out=S)
            S *= S.dtype.type(self.cap)
        if bias is not None:
            np.add(S, bias, out=S, casting="unsafe")
        if self.problem.has_alibi:
            lag = self._lag(block, start, stop).astype(S.dtype)
            distance = _toeplitz(np.abs(lag), stop - start)
            term = self._array("ALiBi", S.shape)
            np.multiply(self.head.alibi_slopes, distance, out=term, casting="unsafe")
            S -= term
        if hidden is not None:
            np.copyto(S, -np.inf, where=hidden)
        return S

    def _hidden(
        self, block: _Block, bias: np.ndarray | None, start: int, stop: int
    ) -> tuple[np.ndarray | None, bool]:
        """Which scores are hidden (None: none), broadcastable to S; and whether all of them are."""
        hidden = self._outside_window(block, start, stop)
        shown = self._part(self.head.mask, block, start, stop)
        parts = [] if shown is None else [~shown]
        if bias is not None:
            parts.append(np.equal(bias, -np.inf))
        for part in parts:
            if part.any():
                hidden = part if hidden is None else hidden | part
        # The window alone never hides a whole tile: the tile was cut to it.
        return hidden, bool(parts) and hidden is not None and bool(hidden.all())

    def _outside_window(self, block: _Block, start: int, stop: int) -> np.ndarray | None:
        left, right = self.problem.window_left, self.problem.window_right
        lag = self._lag(block, start, stop)  # from the block's last row down to its first
        below = left >= 0 and lag[0] < -left
        above = right >= 0 and lag[-1] > right
        if not (below or above):
            return None
        outside = np.zeros(lag.shape, np.bool_)
        if below:
            outside |= lag < -left
        if above:
            outside |= lag > right
        return _toeplitz(outside, stop - start)

    def _lag(self, block: _Block, start: int, stop: int) -> np.ndarray:
        """``j - (i + offset)`` on every diagonal of the tile, growing."""
        last_row, first_row = block.stop - 1 + self.offset, block.start + self.offset
        return np.arange(start - last_row, stop - first_row)

    def _without_hidden(self, V: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        """V with zeros in the keys that no row of a head sees, since 0 * NaN is NaN."""
        columns = hidden.all(axis=-2)
        if not columns.any():
            return V
        columns = columns.reshape(*(1,) * (3 - columns.ndim), *columns.shape, 1)
        shape = np.broadcast_shapes(V.shape, columns.shape)
        clean = self._array("clean V", shape)
        clean[...] = V
        np.copyto(clean, 0, where=columns)
        return clean

    @staticmethod
    def _part(x: np.ndarray | None, block: _Block, start: int, stop: int) -> np.ndarray | None:
        """A tile of a bias or mask, whose axes may have been collapsed to length 1."""
        if x is None:
            return None
        rows = slice(block.start, block.stop) if x.shape[-2] > 1 else slice(None)
        return x[..., rows, slice(start, stop) if x.shape[-1] > 1 else slice(None)]

    def _array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return self.workspace.array(name, shape, self.problem.acc_dtype)


def _toeplitz(diagonals: np.ndarray, columns: int) -> np.ndarray:
    """The matrix that is constant along its diagonals, as a view; the last row's come first."""
    return np.lib.stride_tricks.sliding_window_view(diagonals, columns)[::-1]


def _collapse(x: np.ndarray | None) -> np.ndarray | None:
    """Broadcast axes back to length 1: no work is repeated along them."""
    if x is None or 0 not in x.strides or x.size == 0:
        return x
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.strides)]


def _operand(x: np.ndarray, acc_dtype: np.dtype, name: str, workspace: Workspace) -> np.ndarray:
    if blas_takes(x, acc_dtype):
        return x
    copy = workspace.array(name, x.shape, acc_dtype)
    copy[...] = x
    return copy
