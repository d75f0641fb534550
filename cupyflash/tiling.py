# SPDX-License-Identifier: MIT
"""Tiles from the SRAM size M and head_dim (pages 2 and 4 of the notes), and all specialisations.

M counts numbers of the accumulation dtype (float32; float64 for float64 inputs) that fit in the
shared memory of one thread block. Algorithm 1, line 1: ``B_c = ceil(M / 4d)``, ``B_r = min(B_c,
d)``. Where head_dim_v differs from head_dim, 4d is ``2 (head_dim + head_dim_v)``: a block of rows
costs one tile each of Q, K, V and O.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cupyflash._dtypes import NAMES
from cupyflash._problem import AttentionProblem

# What fa1_forward.cu does best with: a lane owns every 32nd key, a warp strips of eight queries,
# and the eight strips of 64 queries, each shared by two warps, keep all of a block's warps busy.
_LANES = 32
_STRIP_ROWS = 8
_BLOCK_ROWS = 64
_FLAG_BYTES = 4
_ADDRESS_BYTES = 384  # kAddressBytes

FA1_THREADS = 512


def ceil_div(a: int, b: int) -> int:
    """``ceil(a / b)`` in integers.

    Parameters
    ----------
    a, b : int
        b is positive.

    Returns
    -------
    int

    Examples
    --------
    >>> ceil_div(65, 64)
    2
    """
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of ``b`` that is at least ``a``.

    Parameters
    ----------
    a, b : int
        b is positive.

    Returns
    -------
    int

    Examples
    --------
    >>> round_up(65, 64)
    128
    """
    return ceil_div(a, b) * b


def block_sizes(M: int, head_dim: int, head_dim_v: int | None = None) -> tuple[int, int]:
    """Line 1 of Algorithm 1 (arXiv:2205.14135): ``B_c = ceil(M / 4d)``, ``B_r = min(B_c, d)``.

    Parameters
    ----------
    M : int
        SRAM size in elements.
    head_dim : int
        d.
    head_dim_v : int, optional
        Where it differs from d, 4d is ``2 (head_dim + head_dim_v)``.

    Returns
    -------
    Br, Bc : int
        Rows of a block of queries and of a block of keys.

    Raises
    ------
    ValueError
        If M or head_dim is not positive.

    Examples
    --------
    >>> block_sizes(58112, 64)
    (64, 227)
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    if M < 1 or head_dim < 1 or head_dim_v < 0:
        raise ValueError(
            f"block_sizes: M is {M}, head_dim {head_dim}, head_dim_v {head_dim_v}; expected "
            "positive numbers"
        )
    Bc = ceil_div(M, 2 * (head_dim + head_dim_v))
    return min(Bc, head_dim), Bc


def sram_terms(
    Br: int, Bc: int, head_dim: int, head_dim_v: int, itemsize: int, general: bool
) -> dict[str, int]:
    """Elements of SRAM that one step of ``fa1_forward`` holds, term by term.

    The notes' budget is K_j, V_j, Q_i, O_i, S_ij, l_i and m_i. The kernel's own terms are larger
    by what its accesses ask for: rows of 16-byte vectors, K_j's an odd number of them (no bank
    conflicts); Q_i and S_ij in whole strips; two factors a row beside l and m; addresses; with
    ``general``, a flag a key.

    Parameters
    ----------
    Br, Bc : int
        Rows of a block of queries and of a block of keys.
    head_dim, head_dim_v : int
        Columns of q and k, and of v.
    itemsize : int
        Bytes of an element: 4, or 8 for float64 inputs.
    general : bool
        Whether scores are changed or hidden by softcap, bias, mask or ALiBi.

    Returns
    -------
    dict of str to int
        Elements by term.

    Examples
    --------
    >>> sram_terms(64, 32, 64, 64, 4, general=False)["S_ij"]
    2048
    """
    vec = 16 // itemsize
    ldq = round_up(head_dim, vec)
    ldk = ldq if ldq // vec % 2 else ldq + vec
    lds = round_up(Bc, vec)
    strips = round_up(Br, _STRIP_ROWS)
    terms = {
        "addresses": _ADDRESS_BYTES // itemsize,
        "K_j": Bc * ldk,
        "V_j": round_up(lds * head_dim_v, vec),
        "Q_i": strips * ldq,
        "O_i": round_up(Br * head_dim_v, vec),
        "S_ij": strips * lds,
        "m_i, l_i and factors": 4 * Br,
    }
    if general:
        terms["key flags"] = ceil_div(lds * _FLAG_BYTES, itemsize)
    return terms


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Block sizes of one ``fa1_forward`` call, and the SRAM that they take.

    Attributes
    ----------
    M : int
        Elements of SRAM: all that the device has, or what was asked for.
    M_used : int
        The largest M whose true budget fits; M itself where that does.
    Br, Bc : int
        Rows of a block of queries and of a block of keys. They follow from M_used, rounded to
        whole warps of work unless M was asked for.
    Tr, Tc : int
        Blocks of queries and of keys.
    itemsize : int
        Bytes of an element of SRAM.
    terms : tuple of (str, int)
        The elements that a thread block holds, by term; see :func:`sram_terms`.

    Examples
    --------
    >>> from cupyflash import plan
    >>> t = plan(seqlen_q=4096, head_dim=64, device="T4", kernel="fa1_forward").tiling
    >>> t.M, t.M_used, t.Br, t.Bc, t.smem_bytes
    (16384, 12288, 48, 32, 48768)
    """

    M: int
    M_used: int
    Br: int
    Bc: int
    Tr: int
    Tc: int
    itemsize: int
    terms: tuple[tuple[str, int], ...]

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a thread block."""
        return self.itemsize * sum(elements for _, elements in self.terms)


def algorithm1_tiling(
    problem: AttentionProblem, sram_bytes: int, sram_elements: int | None = None
) -> Tiling | None:
    """Choose B_r and B_c for ``problem`` on a device with ``sram_bytes`` a thread block.

    ``sram_elements`` asks for an M: then line 1 is taken to the letter. Otherwise M is all of the
    SRAM, B_c is rounded down to whole warps of keys and B_r to whole strips of queries, and
    neither exceeds what the sequences need.

    Parameters
    ----------
    problem : AttentionProblem
        Lengths, head dims, dtype and options.
    sram_bytes : int
        Shared memory that a thread block may have.
    sram_elements : int, optional
        M.

    Returns
    -------
    Tiling or None
        None where not even one row of each fits, or not what was asked for.

    Examples
    --------
    M = 8192 by the letter, ``B_c = ceil(8192 / 256)``; 256 bytes hold no row of each:

    >>> from cupyflash import plan
    >>> p = plan(seqlen_q=128, head_dim=64, dtype="float32", device="H200").problem
    >>> t = algorithm1_tiling(p, sram_bytes=65536, sram_elements=8192)
    >>> t.Br, t.Bc, t.Tr, t.Tc
    (32, 32, 4, 4)
    >>> algorithm1_tiling(p, sram_bytes=256) is None
    True
    """
    itemsize = problem.acc_dtype.itemsize
    d, dv = problem.head_dim, problem.head_dim_v
    four_d = 2 * (d + dv)

    def terms(Br: int, Bc: int) -> dict[str, int]:
        return sram_terms(Br, Bc, d, dv, itemsize, problem.general)

    def fits(Br: int, Bc: int) -> bool:
        return itemsize * sum(terms(Br, Bc).values()) <= sram_bytes

    M = sram_bytes // itemsize if sram_elements is None else sram_elements
    _, Bc = block_sizes(M, d, dv)
    if sram_elements is None:
        M_used, Bc = _largest_that_fits(M, Bc, four_d, lambda n: fits(_strip_rows(min(n, d)), n))
        if Bc == 0:  # not even with a strip of queries: a single query and key, then
            M_used, Bc = _largest_that_fits(M, 1, four_d, lambda n: fits(n, n))
            Br = Bc
        else:
            Br = _strip_rows(min(Bc, d))
            Br = min(Br, round_up(max(problem.seqlen_q, 1), _STRIP_ROWS))
        if Bc >= _LANES:
            Bc = min(Bc // _LANES * _LANES, round_up(max(problem.seqlen_k, 1), _LANES))
    else:
        M_used, Br = M, min(Bc, d)
    if Bc == 0 or not fits(Br, Bc):
        return None
    return Tiling(
        M=M,
        M_used=M_used,
        Br=Br,
        Bc=Bc,
        Tr=ceil_div(problem.seqlen_q, Br),
        Tc=ceil_div(problem.seqlen_k, Bc),
        itemsize=itemsize,
        terms=tuple(terms(Br, Bc).items()),
    )


def _strip_rows(Br: int) -> int:
    """B_r in whole strips, and in whole 64 rows where there are as many."""
    return Br // _BLOCK_ROWS * _BLOCK_ROWS or round_up(Br, _STRIP_ROWS)


def _largest_that_fits(M: int, Bc: int, four_d: int, fits) -> tuple[int, int]:
    """The largest M, and its B_c, that ``fits(B_c)``; the budget grows with B_c."""
    if fits(Bc):
        return M, Bc
    low, high = 0, Bc  # fits(low) or low == 0, not fits(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * four_d, low


def specialisations() -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Every (kernel, options, architectures) that the tile table can ask to be built.

    Yields
    ------
    kernel : str
    options : tuple of str
        The -D macros of the specialisation.
    architectures : tuple of str
        Where a plan may ask for it.

    Examples
    --------
    >>> ", ".join(sorted({kernel for kernel, _, _ in specialisations()}))
    'combine, fa1_forward, forward_simt, forward_sm80, forward_sm90, forward_sm90_float32'
    """
    from cupyflash import _simt, _sm80, _sm90, _sm90_float32  # which use this module

    architectures = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
    for dtype in NAMES:
        for general in (False, True):
            yield "fa1_forward", fa1_options(dtype, general), architectures
    yield from _simt.specialisations()
    yield from _sm80.specialisations()
    yield from _sm90.specialisations()
    yield from _sm90_float32.specialisations()


def fa1_options(dtype: str, general: bool) -> tuple[str, ...]:
    """What ``fa1_forward`` is specialised by; sizes are run-time numbers.

    Parameters
    ----------
    dtype : str
        Name of q's dtype.
    general : bool
        Whether scores are changed or hidden by softcap, bias, mask or ALiBi.

    Returns
    -------
    tuple of str
        -D macros.

    Examples
    --------
    >>> fa1_options("float16", general=False)
    ('-DCUPYFLASH_ELEMENT=float16', '-DCUPYFLASH_GENERAL=0')
    """
    return (f"-DCUPYFLASH_ELEMENT={dtype}", f"-DCUPYFLASH_GENERAL={int(general)}")
