# SPDX-License-Identifier: MIT
"""For tests of attention kernels: problems to draw, bounds to hold them to, guards around outputs.

::

    from hypothesis import given
    from cupyflash.testing import assert_attention_close, attention_problems, tile_edges

    @given(attention_problems(dtypes=["float16"], lengths=tile_edges(16, 64)))
    def test_my_kernel(problem):
        assert_attention_close(my_kernel(*problem.qkv, **problem.kwargs), problem)

On a GPU, ``problem.on(cupy)`` has the arrays there, each with its strides. Only this module needs
hypothesis (``pip install 'cupyflash[testing]'``).
"""

import math
from collections.abc import Collection, Sequence

import ml_dtypes
import numpy as np

from cupyflash import _checks, _dtypes
from cupyflash._messages import install_command
from cupyflash._testing_arrays import (
    LAYOUTS,
    Guarded,
    arrange,
    copy_with_layout,
    guarded_empty,
    poison,
)
from cupyflash._testing_bounds import DTYPES, Problem, assert_attention_close, error
from cupyflash.reference import visible

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise ImportError(
        f"cupyflash.testing needs hypothesis ({missing}): {install_command('testing')}"
    ) from missing

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "MAGNITUDES",
    "OPTIONS",
    "Guarded",
    "Problem",
    "arrange",
    "assert_attention_close",
    "attention_problems",
    "copy_with_layout",
    "error",
    "guarded_empty",
    "poison",
    "tile_edges",
]

# What a problem may have beyond plain attention of one or two heads. "poisoned": NaN in the keys
# and values past seqlens_k or hidden from every query by mask or by -inf in bias.
OPTIONS = (
    "batch",
    "gqa",
    "head_dim_v",
    "causal",
    "top_left",
    "window",
    "softmax_scale",
    "softcap",
    "bias",
    "mask",
    "alibi_slopes",
    "seqlens_k",
    "poisoned",
)

# How large scores are: about 1e-8, 1 and 100; all near -200; as large as the dtype allows (1e30 at
# most, which float32 statistics must survive), v being as large then.
MAGNITUDES = ("unit", "tiny", "large", "shifted", "limit")


def tile_edges(*tiles: int) -> list[int]:
    """Lengths around the edges of tiles: 0, 1, and for each tile size n: n - 1, n, n + 1, 2n + 1.

    Parameters
    ----------
    *tiles : int
        Sizes of tiles.

    Returns
    -------
    list of int
        In ascending order.

    Raises
    ------
    ValueError
        If a tile size is below 1.
    TypeError
        If one is no integer.

    Examples
    --------
    >>> tile_edges(16, 64)
    [0, 1, 15, 16, 17, 33, 63, 64, 65, 129]
    """
    tiles = tuple(_checks.integer("tile_edges", "a tile", n) for n in tiles)
    if min(tiles, default=1) < 1:
        raise ValueError(f"tile_edges: tiles are {tiles}; expected sizes of at least 1")
    return sorted({0, 1}.union(*((n - 1, n, n + 1, 2 * n + 1) for n in tiles)))


def attention_problems(
    *,
    dtypes: Collection[str] = DTYPES,
    lengths: Collection[int] = (0, 1, 2, 7, 8, 9, 31, 32, 33),
    head_dims: Collection[int] = (1, 3, 8, 16, 33, 64),
    options: Collection[str] = OPTIONS,
    layouts: Collection[str] = LAYOUTS,
    magnitudes: Collection[str] = MAGNITUDES,
    max_options: int = 4,
    max_scores: int = 2**18,
) -> st.SearchStrategy[Problem]:
    """A strategy of complete attention problems.

    Choices are hypothesis's, and shrink towards the first of each list; the numbers in the arrays
    come from one seeded numpy Generator.

    Parameters
    ----------
    dtypes : names among `DTYPES`
    lengths : ints
        For seqlen_q and seqlen_k; see `tile_edges`. 0 makes empty axes.
    head_dims : ints
        For head_dim, and for head_dim_v with that option.
    options : names among `OPTIONS`
        What a problem may have; it has up to max_options of them.
    layouts : names among `LAYOUTS`
        Of q, k, v, bias and mask, each drawn separately.
    magnitudes : names among `MAGNITUDES`
    max_options : int
    max_scores : int
        Heads and batch stay small enough for at most so many scores where the lengths allow it.

    Returns
    -------
    hypothesis strategy of `Problem`

    Raises
    ------
    ValueError
        If one of the lists is empty or has a name that is not among the allowed ones, if a
        head_dim is below 1, or if a length, max_options or max_scores is negative.
    TypeError
        If one of these numbers is no integer.

    Examples
    --------
    >>> attention_problems(options=["rope"])
    Traceback (most recent call last):
    ValueError: attention_problems: options has 'rope'; expected names among batch, gqa, ...
    """
    named = {"dtypes": (dtypes, DTYPES), "layouts": (layouts, LAYOUTS)}
    named |= {"options": (options, OPTIONS), "magnitudes": (magnitudes, MAGNITUDES)}
    for argument, (given, allowed) in named.items():
        for name in given:
            if name not in allowed:
                raise ValueError(
                    f"attention_problems: {argument} has {name!r}; "
                    f"expected names among {', '.join(allowed)}"
                )
    lists = {"dtypes": dtypes, "lengths": lengths, "head_dims": head_dims}
    for argument, given in (lists | {"layouts": layouts, "magnitudes": magnitudes}).items():
        if not given:
            raise ValueError(f"attention_problems: {argument} is empty; expected at least one")
    for argument, given, least in (("lengths", lengths, 0), ("head_dims", head_dims, 1)):
        entry = f"an entry of {argument}"
        if min(_checks.integer("attention_problems", entry, n) for n in given) < least:
            raise ValueError(
                f"attention_problems: {argument} has {min(given)}; expected at least {least}"
            )
    return _problems(
        list(dtypes),
        sorted(lengths),
        list(head_dims),
        list(options),
        list(layouts),
        list(magnitudes),
        _checks.at_least("attention_problems", "max_options", max_options, 0),
        _checks.at_least("attention_problems", "max_scores", max_scores, 0),
    )


@st.composite
def _problems(
    draw, dtypes, lengths, head_dims, options, layouts, magnitudes, max_options, max_scores
) -> Problem:
    def pick(choices: Sequence):
        return draw(st.sampled_from(choices))

    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = _dtypes.named(pick(dtypes))
    magnitude = pick(magnitudes)
    has = draw(st.sets(st.sampled_from(options), max_size=max_options)) if options else set()

    # Shapes.
    seqlen_q, seqlen_k, head_dim = pick(lengths), pick(lengths), pick(head_dims)
    head_dim_v = pick(head_dims) if "head_dim_v" in has else head_dim
    room = max_scores // max(seqlen_q * seqlen_k, 1)
    heads = [(2, 1), (3, 1), (6, 1), (4, 2), (12, 2)] if "gqa" in has else [(1, 1), (2, 2)]
    heads_q, heads_k = pick([pair for pair in heads if pair[0] <= room] or [(1, 1)])
    batches = [()]
    if "batch" in has:
        batches = [b for b in [(1,), (2,), (0,), (3,), (2, 3)] if math.prod(b) * heads_q <= room]
    drawn_batch = pick(batches or [(1,)])
    # Each array has all of the batch axes, or some of length 1, or none.
    ones = (1,) * len(drawn_batch)
    parts = [drawn_batch, drawn_batch[:1] + ones[1:], ones, ()] if drawn_batch else [()]
    shapes = {
        "q": (*pick(parts), heads_q, seqlen_q, head_dim),
        "k": (*pick(parts), heads_k, seqlen_k, head_dim),
        "v": (*pick(parts), heads_k, seqlen_k, head_dim_v),
    }
    batch = np.broadcast_shapes(*(shape[:-3] for shape in shapes.values()))
    if heads_q == 1 and not batch and draw(st.booleans()):
        shapes = {name: shape[1:] for name, shape in shapes.items()}

    # Options, in the order in which attention lists them.
    kwargs = {}
    if has & {"causal", "top_left"}:
        kwargs["causal"] = "top_left" if "top_left" in has else True
    if "window" in has:
        ends = [0, 1, 5, -1, None, 2**31 - 1]
        kwargs["window"] = (pick(ends), pick(ends))
    if "softmax_scale" in has:
        kwargs["softmax_scale"] = pick([1.0, 0.3, -0.5])
    if "softcap" in has:
        kwargs["softcap"] = pick([50.0, 2.0])
    full = (*batch, heads_q, seqlen_q, seqlen_k)
    pair_shapes = [full[-2:], full[-1:], (seqlen_q, 1), full[-3:], (*batch, 1, 1, seqlen_k), full]
    if "bias" in has:
        bias = rng.standard_normal(pick(pair_shapes))
        if draw(st.booleans()):
            bias[~_random_mask(rng, bias.shape)] = -np.inf
        bias = bias.astype(pick([dtype, np.dtype(np.float32)]))
        kwargs["bias"] = arrange(bias, pick(layouts))
    if "mask" in has:
        kwargs["mask"] = arrange(_random_mask(rng, pick(pair_shapes)), pick(layouts))
    if "alibi_slopes" in has:
        kwargs["alibi_slopes"] = rng.random(pick([(heads_q,), (*batch, heads_q)])).astype("f4")
    if "seqlens_k" in has:
        shape = pick([batch, batch[1:]])
        kwargs["seqlens_k"] = rng.integers(0, seqlen_k, shape, pick(["i4", "i8"]), endpoint=True)

    # Numbers, then their places.
    scale = kwargs.get("softmax_scale", head_dim**-0.5)
    values = _values(rng, shapes, dtype, scale, magnitude)
    plans = {name: (pick(layouts), pick(range(x.ndim - 1))) for name, x in values.items()}
    if "poisoned" in has:
        used = _keys_in_use(full, heads_k, kwargs)
        for name in "kv":
            layout, axis = plans[name]
            _poison_unused(values[name], used, axis if layout == "broadcast" else None)
    arrays = {name: arrange(x, plans[name][0], axis=plans[name][1]) for name, x in values.items()}
    note = f"{magnitude} scores" + (", unused keys NaN" if "poisoned" in has else "")
    return Problem(**arrays, kwargs=kwargs, note=note)


def _random_mask(rng, shape) -> np.ndarray:
    """About two pairs in three visible, and of more than one row about a fifth all hidden."""
    mask = rng.random(shape) < 0.67
    if len(shape) > 1 and shape[-2] > 1:
        mask &= rng.random((*shape[:-1], 1)) < 0.8
    return mask


def _values(rng, shapes, dtype, scale, magnitude) -> dict[str, np.ndarray]:
    q, k, v = (rng.standard_normal(shape) for shape in shapes.values())
    head_dim = q.shape[-1]
    if magnitude == "limit":
        largest = float(ml_dtypes.finfo(dtype).max)
        q, k = (np.clip(x * min(1e14, largest / 6), -largest, largest) for x in (q, k))
        v = np.clip(v * min(1e30, largest / 6), -largest, largest)
    else:
        spread = {"tiny": 1e-8, "large": 100.0}.get(magnitude, 1.0)
        factor = math.sqrt(spread / (abs(scale) * math.sqrt(head_dim)))
        q, k = q * factor, k * factor
        if magnitude == "shifted":
            one = math.sqrt(200 / abs(scale))
            q[..., 0], k[..., 0] = one, -math.copysign(one, scale)
    return {name: x.astype(dtype) for name, x in zip("qkv", (q, k, v), strict=True)}


def _keys_in_use(full, heads_k, kwargs) -> np.ndarray:
    """bool (*batch, heads_k, seqlen_k): which keys mask, bias and seqlens_k leave to any query."""
    *batch, heads_q, seqlen_q, seqlen_k = full
    used = visible(seqlen_q, seqlen_k, seqlens_k=kwargs.get("seqlens_k"))[..., None, :, :]
    used = np.broadcast_to(used & kwargs.get("mask", True), full)
    if "bias" in kwargs:
        used = used & (kwargs["bias"] != -np.inf)
    per_head = used.any(axis=-2)
    return per_head.reshape(*batch, heads_k, heads_q // heads_k, seqlen_k).any(axis=-2)


def _poison_unused(x, used, broadcast_axis) -> None:
    """NaN in the rows of x that no entry of the batch, and nothing along the axis, uses."""
    rows = x.shape[:-1]
    used = used.any(axis=tuple(range(used.ndim - len(rows))))
    used = used.any(axis=tuple(a for a, n in enumerate(rows) if n == 1), keepdims=True)
    if broadcast_axis is not None:
        used = used.any(axis=broadcast_axis, keepdims=True)
    x[~np.broadcast_to(used, rows)] = math.nan
