# SPDX-License-Identifier: MIT
"""HBM traffic, counted (page 4 of the notes): exact numbers beside the notes' estimate.

A count is of elements that a kernel reads from and writes to HBM if no cache helps. Real DRAM
traffic is lower where what is read again is still in the L2; ``docs/io.md`` compares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from cupyflash import _checks
from cupyflash._problem import AttentionProblem
from cupyflash.tiling import ceil_div


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Elements read and written per array, with the bytes of one element of each.

    Attributes
    ----------
    reads, writes : mapping of str to int
        Elements by array: "Q", "K", "V", "S", "P", "O", "l", "m", "out", "lse", "bias", "mask".
    itemsize : mapping of str to int
        Bytes of one element of each array that there may be.

    Examples
    --------
    >>> Traffic({"Q": 100, "K": 50}, {"out": 100}, {"Q": 2, "K": 2, "out": 4}).bytes
    700
    """

    reads: Mapping[str, int]
    writes: Mapping[str, int]
    itemsize: Mapping[str, int]

    @property
    def elements_read(self) -> int:
        """Sum over all arrays."""
        return sum(self.reads.values())

    @property
    def elements_written(self) -> int:
        """Sum over all arrays."""
        return sum(self.writes.values())

    @property
    def bytes_read(self) -> int:
        """Sum over all arrays."""
        return sum(n * self.itemsize[name] for name, n in self.reads.items())

    @property
    def bytes_written(self) -> int:
        """Sum over all arrays."""
        return sum(n * self.itemsize[name] for name, n in self.writes.items())

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self.bytes_read + self.bytes_written


def notes_estimate(problem: AttentionProblem, M: int) -> float:
    """The notes' ``16 N^2 d^2 / M`` elements a head: T_r T_c steps that move M elements each.

    Where the lengths or the head dims differ, N^2 is ``seqlen_q seqlen_k`` and 4d is
    ``2 (head_dim + head_dim_v)``.

    Parameters
    ----------
    problem : AttentionProblem
        Sizes; ``plan(...).problem`` is one.
    M : int
        SRAM size in elements.

    Returns
    -------
    float
        Elements, of all heads of the batch.

    Raises
    ------
    TypeError
        If problem is no `AttentionProblem` or M no integer.
    ValueError
        If M is below 1.

    Examples
    --------
    >>> from cupyflash import plan
    >>> notes_estimate(plan(seqlen_q=4096, head_dim=64, device="H200").problem, M=65536)
    16777216.0
    """
    _check_problem("notes_estimate", problem, M=M)
    four_d = 2 * (problem.head_dim + problem.head_dim_v)
    steps = problem.seqlen_q * four_d / M * problem.seqlen_k * four_d / M
    return problem.batch * problem.heads_q * steps * M


def standard_attention(problem: AttentionProblem) -> Traffic:
    """Three passes over an N x N matrix: S = Q K^T, P = softmax(S), O = P V.

    Per head: ``4 N^2 + 4 N d`` elements. S and P have the accumulation dtype.

    Parameters
    ----------
    problem : AttentionProblem
        Sizes, dtype, and whether there are a bias and a mask.

    Returns
    -------
    Traffic

    Raises
    ------
    TypeError
        If problem is no `AttentionProblem`.

    Examples
    --------
    >>> from cupyflash import plan
    >>> traffic = standard_attention(plan(seqlen_q=1000, head_dim=64, device="H200").problem)
    >>> traffic.elements_read + traffic.elements_written == 4 * 1000**2 + 4 * 1000 * 64
    True
    """
    _check_problem("standard_attention", problem)
    n_q, n_k = problem.seqlen_q, problem.seqlen_k
    heads = problem.batch * problem.heads_q
    scores = heads * n_q * n_k
    reads = {
        "Q": heads * n_q * problem.head_dim,
        "K": heads * n_k * problem.head_dim,
        "S": scores,
        "P": scores,
        "V": heads * n_k * problem.head_dim_v,
    } | _modifier_reads(problem, scores)
    writes = {"S": scores, "P": scores, "out": heads * n_q * problem.head_dim_v}
    return Traffic(reads, writes, _itemsizes(problem))


def algorithm1(
    problem: AttentionProblem, Br: int, Bc: int, chunks: int = 1, return_lse: bool = False
) -> Traffic:
    """Algorithm 1 as ``fa1_forward`` runs it: K/V outer, O, l and m in HBM.

    Every visited step (i, j) reads Q_i, O_i, l_i, m_i and writes O_i, l_i, m_i; each of the
    ``chunks`` thread blocks that share a head loads the K_j and V_j that it visits once. Tiles
    hidden by causal or window are not visited. Line 2's initialisation is counted. With 16-bit
    inputs O is float32 until its last step, which writes the 16-bit output in its place. Bias and
    mask are read for the pairs that see each other by position.

    Parameters
    ----------
    problem : AttentionProblem
        Sizes and options.
    Br, Bc : int
        Rows of a block of queries and of a block of keys.
    chunks : int
        Thread blocks that share a head.
    return_lse : bool
        Count lse too.

    Returns
    -------
    Traffic

    Raises
    ------
    TypeError
        If problem is no `AttentionProblem` or a size no integer.
    ValueError
        If Br, Bc or chunks is below 1.

    Examples
    --------
    >>> from cupyflash import plan
    >>> p = plan(seqlen_q=128, head_dim=64, dtype="float32", device="H200").problem
    >>> algorithm1(p, Br=64, Bc=32).reads["K"], algorithm1(p, Br=64, Bc=32).reads["Q"]
    (8192, 32768)
    """
    _check_problem("algorithm1", problem, Br=Br, Bc=Bc, chunks=chunks)
    blocks = _QueryBlocks(problem, Br, Bc)
    heads = problem.batch * problem.heads_q
    visits = blocks.ends - blocks.begins
    row_visits = int((blocks.rows * visits).sum())
    rounded = problem.dtype.itemsize == 2
    # The rows whose last step writes the 16-bit output, or that no step comes to.
    last_rows = int(blocks.rows[visits > 0].sum()) if rounded else 0
    never_rows = int(blocks.rows[visits == 0].sum()) if rounded else 0
    key_loads = blocks.key_rows_loaded(chunks)
    reads = {
        "Q": heads * row_visits * problem.head_dim,
        "K": heads * key_loads * problem.head_dim,
        "V": heads * key_loads * problem.head_dim_v,
        "O": heads * row_visits * problem.head_dim_v,
        "l": heads * row_visits,
        "m": heads * row_visits,
    } | _modifier_reads(problem, heads * visible_pairs(problem))
    rows = heads * (row_visits + problem.seqlen_q)
    writes = {
        "O": (rows - heads * last_rows) * problem.head_dim_v,
        "l": rows,
        "m": rows,
    }
    if rounded:
        writes["out"] = heads * (last_rows + never_rows) * problem.head_dim_v
    if return_lse:
        writes["lse"] = heads * problem.seqlen_q
    return Traffic(reads, writes, _itemsizes(problem))


def q_outer(
    problem: AttentionProblem,
    Br: int,
    Bc: int,
    return_lse: bool = False,
    *,
    pack: int = 1,
    splits: int = 1,
    slices: int = 1,
    streams_q: bool = False,
) -> Traffic:
    """The order of FlashAttention-2: Q outer, O in registers, K and V read once a query block.

    What is found in the L2 cache is counted as if it came from HBM, so this is an upper bound.

    Parameters
    ----------
    problem : AttentionProblem
        Sizes and options.
    Br, Bc : int
        Rows of a tile of queries (``pack`` heads of ``Br / pack`` queries each) and of keys.
    return_lse : bool
        Count lse too.
    pack : int
        Query heads of a group that share a tile, and so one reading of K and V.
    splits : int
        Parts of the keys; each writes its O and lse in the accumulation dtype, to be merged.
    slices : int
        Parts of head_dim_v, each of which reads Q and K.
    streams_q : bool
        Q passes by anew for each tile of keys.

    Returns
    -------
    Traffic

    Raises
    ------
    TypeError
        If problem is no `AttentionProblem` or a size no integer.
    ValueError
        If Br, Bc, pack, splits or slices is below 1.

    Examples
    --------
    Two blocks of 64 queries read K twice, and Q once:

    >>> from cupyflash import plan
    >>> p = plan(seqlen_q=128, head_dim=64, dtype="float32", device="H200").problem
    >>> q_outer(p, Br=64, Bc=32).reads["K"], q_outer(p, Br=64, Bc=32).reads["Q"]
    (16384, 8192)
    """
    _check_problem("q_outer", problem, Br=Br, Bc=Bc, pack=pack, splits=splits, slices=slices)
    blocks = _QueryBlocks(problem, max(1, Br // pack), Bc)
    heads = problem.batch * problem.heads_q
    key_loads = heads // pack * int(blocks.keys_visited().sum())
    scores = int((blocks.rows * blocks.keys_visited()).sum())
    rows = heads * problem.seqlen_q
    q_loads = rows * splits
    if streams_q:
        q_loads = heads * int((blocks.rows * (blocks.ends - blocks.begins)).sum())
    reads = {
        "Q": q_loads * problem.head_dim * slices,
        "K": key_loads * problem.head_dim * slices,
        "V": key_loads * problem.head_dim_v,
    } | _modifier_reads(problem, heads * scores * slices)
    writes = {"out": rows * problem.head_dim_v}
    if splits > 1:
        partial = {"O": rows * problem.head_dim_v * splits, "l": rows * splits}
        reads |= partial
        writes |= partial
    if return_lse:
        writes["lse"] = rows
    return Traffic(reads, writes, _itemsizes(problem))


def visible_pairs(problem: AttentionProblem) -> int:
    """Pairs (query, key) of one head that see each other by position, all keys being in use.

    Parameters
    ----------
    problem : AttentionProblem
        Lengths, causal and window.

    Returns
    -------
    int

    Raises
    ------
    TypeError
        If problem is no `AttentionProblem`.

    Examples
    --------
    >>> from cupyflash import plan
    >>> visible_pairs(plan(seqlen_q=4, head_dim=8, causal=True, device="cpu").problem)
    10
    """
    _check_problem("visible_pairs", problem)
    n_q, n_k, offset = problem.seqlen_q, problem.seqlen_k, problem.diagonal_offset

    def below(diagonal: int) -> int:
        """Pairs with ``j - i <= diagonal``: each row has ``i + diagonal + 1`` of them, 0 to n_k."""
        return _clipped_sum(diagonal + n_q, n_k) - _clipped_sum(diagonal, n_k)

    to_the_right = n_q * n_k
    if problem.window_right >= 0:
        to_the_right = below(offset + problem.window_right)
    hidden_left = below(offset - problem.window_left - 1) if problem.window_left >= 0 else 0
    return to_the_right - hidden_left


def _check_problem(function: str, problem: AttentionProblem, **sizes: int) -> None:
    if not isinstance(problem, AttentionProblem):
        raise TypeError(
            f"{function}: problem is a {type(problem).__name__}; expected an AttentionProblem, as "
            "plan(...).problem is"
        )
    for name, size in sizes.items():
        _checks.at_least(function, name, size, 1)


def _clipped_sum(n: int, most: int) -> int:
    """Sum of ``min(x, most)`` over x = 1 .. n, 0 for a negative n."""
    rising = max(0, min(n, most))
    return rising * (rising + 1) // 2 + max(0, n - most) * most


def _band(problem: AttentionProblem, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The keys first <= j < end that queries ``i`` see; end may lie below first."""
    diagonal = i + problem.diagonal_offset
    first = np.zeros_like(diagonal)
    end = np.full_like(diagonal, problem.seqlen_k)
    if problem.window_left >= 0:
        first = np.maximum(diagonal - problem.window_left, 0)
    if problem.window_right >= 0:
        end = np.minimum(diagonal + problem.window_right + 1, problem.seqlen_k)
    return first, end


class _QueryBlocks:
    """The query blocks of one head and the key blocks [begins, ends) that each visits."""

    def __init__(self, problem: AttentionProblem, Br: int, Bc: int) -> None:
        self.problem, self.Bc = problem, Bc
        i0 = np.arange(ceil_div(problem.seqlen_q, Br), dtype=np.int64) * Br
        i1 = np.minimum(i0 + Br, problem.seqlen_q)
        first, _ = _band(problem, i0)
        _, end = _band(problem, i1 - 1)
        seen = first < end
        self.rows = i1 - i0
        self.begins = np.where(seen, first // Bc, 0)
        self.ends = np.where(seen, -(-end // Bc), 0)
        # Keys that no query of the head sees are not loaded.
        last = problem.seqlen_q - 1
        self.key_range = (
            (
                int(_band(problem, np.zeros(1, np.int64))[0][0]),
                int(_band(problem, i1[-1:] - 1)[1][0]),
            )
            if last >= 0
            else (0, 0)
        )

    def _keys_before(self, block: np.ndarray) -> np.ndarray:
        """Loaded keys in the key blocks before ``block``."""
        low, high = self.key_range
        return np.clip(block * self.Bc, low, max(low, high)) - low

    def keys_visited(self) -> np.ndarray:
        """Keys in the blocks that each query block visits."""
        return self._keys_before(self.ends) - self._keys_before(self.begins)

    def key_rows_loaded(self, chunks: int) -> int:
        """Rows of K that ``chunks`` thread blocks load; each visits every chunks-th query block."""
        # Both ends of what a query block visits grow with it, so that of its keys those are new
        # to its thread block that lie past the end of the one visited before.
        loaded = np.zeros_like(self.ends)
        loaded[chunks:] = self.ends[:-chunks]
        new = self._keys_before(self.ends) - self._keys_before(np.maximum(self.begins, loaded))
        return int(np.maximum(new, 0).sum())


def _modifier_reads(problem: AttentionProblem, scores: int) -> dict[str, int]:
    reads = {}
    if problem.bias_dtype is not None:
        reads["bias"] = scores
    if problem.has_mask:
        reads["mask"] = scores
    return reads


def _itemsizes(problem: AttentionProblem) -> dict[str, int]:
    acc, element = problem.acc_dtype.itemsize, problem.dtype.itemsize
    return {
        **dict.fromkeys(("Q", "K", "V", "out"), element),
        **dict.fromkeys(("S", "P", "l", "m", "lse", "O"), acc),
        "bias": 0 if problem.bias_dtype is None else problem.bias_dtype.itemsize,
        "mask": 1,
    }
