# SPDX-License-Identifier: MIT
"""The problems that ``bench`` times, in grids, and what the fastest peers are known to reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cupyflash import _dtypes
from cupyflash.tiling import ceil_div

# What is measured, and the unit that tables give it in.
FLOPS, BANDWIDTH, HOST = "TFLOP/s", "TB/s", "us"
_WINDOW = 512
_SOFTCAP = 30.0
_TOKENS, _HIDDEN = 16_384, 2_048


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem: a line of a table.

    ``option`` is one of :data:`OPTIONS`, or empty for the plain call. ``unit`` says what is
    measured: arithmetic or bandwidth by the GPU's clock, or the time that a call takes the host.
    """

    grid: str
    dtype: str
    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False
    option: str = ""
    unit: str = FLOPS

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _dtypes.named(self.dtype).itemsize

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that see each other, in one head; N^2 / 2 where causal.

        Those that a mask hides are counted, as by the kernels that multiply them.
        """
        if self.option == "window":
            return self.tile_pairs(1, 1)
        return self.seqlen_q * self.seqlen_k / (2 if self.causal else 1)

    @property
    def flops(self) -> float:
        """Of both products: ``4 N^2 d`` a head, and half of that where causal."""
        return 4 * self.pairs * self.head_dim * self.batch * self.heads_q

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.batch * self.heads_k * self.seqlen_k * self.head_dim * self.itemsize

    @property
    def score_bytes(self) -> int:
        """Bytes of the score matrices, which plain attention makes."""
        return self.batch * self.heads_q * self.seqlen_q * self.seqlen_k * self.itemsize

    @property
    def window(self) -> tuple[int, int] | None:
        """The ``window`` of a call."""
        return (_WINDOW, _WINDOW) if self.option == "window" else None

    @property
    def softcap(self) -> float | None:
        """The ``softcap`` of a call."""
        return _SOFTCAP if self.option == "softcap" else None

    @property
    def extra_shape(self) -> tuple[int, int, int, int] | None:
        """Shape of the bias or mask, if there is one."""
        lengths = (self.seqlen_q, self.seqlen_k)
        if self.option.endswith("over batch"):
            return (1, self.heads_q, *lengths)
        return (self.batch, 1, *lengths) if self.option.endswith("over heads") else None

    def tile_pairs(self, Br: int, Bc: int) -> int:
        """Pairs in the tiles of Br x Bc that the window of a head touches."""
        left, right = self.window or (self.seqlen_k, self.seqlen_k)
        offset = self.seqlen_k - self.seqlen_q
        tiles = 0
        for start in range(0, self.seqlen_q, Br):
            last_row = min(start + Br, self.seqlen_q) - 1
            first = max(start + offset - left, 0)
            last = min(last_row + offset + right, self.seqlen_k - 1)
            if last >= first:
                tiles += last // Bc - first // Bc + 1
        return tiles * Br * Bc

    def rate(self, seconds: float) -> float:
        """What a time amounts to, in the row's unit."""
        if self.unit == FLOPS:
            return self.flops / seconds * 1e-12
        if self.unit == BANDWIDTH:
            return self.kv_bytes / seconds * 1e-12
        return seconds * 1e6


# What a call has beside q, k and v. "over batch", "over heads": broadcast along that axis.
OPTIONS = (
    *("bias over batch", "bias over heads", "mask over batch", "mask over heads"),
    *("alibi", "window", "softcap"),
)


def _square(grid: str, dtype: str, batch: int, heads: int, n: int, d: int, **given: Any) -> Row:
    return Row(grid, dtype, batch, heads, heads, n, n, d, **given)


def _paper(dtype: str) -> list[Row]:
    return [
        _square("paper", dtype, _TOKENS // n, _HIDDEN // d, n, d, causal=causal)
        for d in (64, 128, 256)
        for causal in (False, True)
        for n in (512, 1024, 2048, 4096, 8192, 16384)
    ]


def _full_precision(dtype: str) -> list[Row]:
    shapes = ((4, 4096, 16, 64), (4, 4096, 16, 128), (1, 16384, 16, 64))
    return [_square(dtype, dtype, batch, heads, n, d) for batch, n, heads, d in shapes]


def _decode(dtype: str) -> list[Row]:
    shapes = (
        (1, 32, 8, 8192),
        (1, 32, 8, 131_072),
        (8, 32, 8, 32_768),
        (64, 32, 8, 4096),
        (16, 64, 1, 32_768),
        (8, 32, 32, 16_384),
    )
    return [
        Row("decode", dtype, batch, heads_q, heads_k, 1, keys, 128, unit=BANDWIDTH)
        for batch, heads_q, heads_k, keys in shapes
    ]


def _options(dtype: str) -> list[Row]:
    return [
        _square("options", dtype, 4, _HIDDEN // d, 4096, d, option=option)
        for d in (64, 128)
        for option in OPTIONS
    ]


def _small(dtype: str) -> list[Row]:
    # The second has few queries and many keys, which a plan may divide and merge.
    return [
        _square("small", dtype, 1, 8, 128, 64, unit=HOST),
        Row("small", dtype, 1, 8, 8, 1, 4096, 64, unit=HOST),
    ]


def _quick(dtype: str) -> list[Row]:
    return [
        _square("quick", dtype, 2, 8, 1024, d, causal=causal)
        for d in (64, 128)
        for causal in (False, True)
    ]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Rows to choose by name; ``columns`` are what tells them apart."""

    text: str
    rows: Callable[[str], list[Row]]
    columns: tuple[str, ...]
    dtype: str = "bfloat16"
    fixed_dtype: bool = False


GRIDS = {
    "paper": Grid(
        "16,384 tokens, heads x head_dim = 2,048", _paper, ("head_dim", "causal", "seqlen_k")
    ),
    "float32": Grid(
        "float32 at full precision",
        _full_precision,
        ("batch", "seqlen_k", "heads_q", "head_dim"),
        "float32",
        True,
    ),
    "float64": Grid(
        "float64",
        _full_precision,
        ("batch", "seqlen_k", "heads_q", "head_dim"),
        "float64",
        True,
    ),
    "decode": Grid(
        "one query, K and V from HBM: buffers rotated past three times the L2",
        _decode,
        ("batch", "heads", "head_dim", "seqlen_k"),
    ),
    "options": Grid(
        "what bias, mask, ALiBi, window and softcap cost over the plain call, 4 x 4,096 tokens",
        _options,
        ("head_dim", "option"),
    ),
    "small": Grid(
        "host time of one call, back to back", _small, ("batch", "heads", "seqlen", "head_dim")
    ),
    "quick": Grid("a few seconds", _quick, ("batch", "heads_q", "head_dim", "causal", "seqlen_k")),
}


def rows_of(names: Iterable[str], dtype: str | None = None) -> list[Row]:
    """The rows of grids.

    Parameters
    ----------
    names : iterable of str
        Keys of :data:`GRIDS`.
    dtype : str, optional
        In place of the grids' own.

    Raises
    ------
    ValueError
        An unknown grid or dtype, or a dtype that contradicts a grid.
    """
    rows: list[Row] = []
    for name in dict.fromkeys(names):
        if name not in GRIDS:
            raise ValueError(f"there is no grid {name!r}; expected {', '.join(GRIDS)}")
        grid = GRIDS[name]
        if dtype not in (None, *_dtypes.NAMES):
            raise ValueError(f"dtype is {dtype!r}; expected {_dtypes.NAMES_TEXT}")
        if grid.fixed_dtype and dtype not in (None, grid.dtype):
            raise ValueError(f"grid {name} and dtype {dtype} contradict each other")
        rows += grid.rows(dtype or grid.dtype)
    return rows


_FILTERS: dict[str, Callable[[Row], Any]] = {
    "batch": lambda row: row.batch,
    "heads": lambda row: row.heads_q,
    "seqlen": lambda row: row.seqlen_k,
    "head_dim": lambda row: row.head_dim,
    "causal": lambda row: "yes" if row.causal else "no",
    "option": lambda row: row.option.split()[0] if row.option else "",
}


def keep(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """The rows for which every condition ``KEY=VALUE[,VALUE...]`` holds.

    Raises
    ------
    ValueError
        A condition is of another form, or no row is left.

    Examples
    --------
    >>> [row.seqlen_k for row in keep(rows_of(["paper"]), ["head_dim=64", "causal=yes",
    ...                                                   "seqlen=512,4096"])]
    [512, 4096]
    """
    kept = list(rows)
    for condition in conditions:
        key, equals, values = condition.partition("=")
        if not equals or key not in _FILTERS:
            raise ValueError(
                f"{condition!r} selects no rows; expected KEY=VALUE[,VALUE...] with a key of "
                f"{', '.join(_FILTERS)}"
            )
        wanted = {value.strip() for value in values.split(",")}
        kept = [row for row in kept if str(_FILTERS[key](row)) in wanted]
    if not kept:
        raise ValueError(f"no row is left by {' '.join(conditions)}")
    return kept


def rotations(row: Row, l2_bytes: int) -> int:
    """How many sets of K and V to walk through, so that none is in the L2 when its turn comes.

    Only where bandwidth is measured: arithmetic hides what the L2 saves.
    """
    return max(ceil_div(3 * l2_bytes, row.kv_bytes), 1) if row.unit == BANDWIDTH else 1


# Forward pass, bfloat16, 16,384 tokens, heads x head_dim = 2,048, in TFLOP/s: cuDNN, and the best
# of cuDNN, FlashAttention-2, -3 (head_dim 128) and -4. Source: measured by this project on one
# NVIDIA H200 with driver 580.159, CUDA 13.0, torch 2.11 and cuDNN 9.19, medians of CUDA events over
# random inputs. GPUs of one kind differ by up to 14 %, so only the ratio of the two is used, times
# what cuDNN reaches beside our own kernel.
_KNOWN_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_KNOWN = {
    # head_dim, causal: (cuDNN, best) for these
    (64, False): ((379, 379), (412, 412), (436, 460), (442, 489), (446, 515), (446, 532)),
    (64, True): ((259, 259), (330, 330), (367, 369), (406, 406), (425, 481), (429, 494)),
    (128, False): ((491, 491), (547, 547), (573, 588), (593, 626), (593, 641), (600, 655)),
    (128, True): ((323, 323), (410, 410), (467, 495), (506, 554), (532, 600), (541, 606)),
    (256, False): ((505, 505), (572, 581), (617, 644), (637, 673), (642, 694), (649, 702)),
    (256, True): ((335, 335), (433, 436), (509, 539), (540, 540), (566, 651), (585, 687)),
}
_KNOWN_CAPABILITY = "9.0"


def best_to_cudnn(row: Row, compute_capability: str) -> float | None:
    """How much faster than cuDNN the fastest peer is known to be; None where that is not known.

    Examples
    --------
    >>> row = keep(rows_of(["paper"]), ["head_dim=64", "causal=no", "seqlen=16384"])[0]
    >>> round(best_to_cudnn(row, "9.0"), 3), best_to_cudnn(row, "8.0")
    (1.193, None)
    """
    if row.grid != "paper" or row.dtype != "bfloat16" or compute_capability != _KNOWN_CAPABILITY:
        return None
    rates = dict(zip(_KNOWN_LENGTHS, _KNOWN.get((row.head_dim, row.causal), ()), strict=False))
    if row.seqlen_k not in rates:
        return None
    cudnn, best = rates[row.seqlen_k]
    return best / cudnn
