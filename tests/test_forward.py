# SPDX-License-Identifier: MIT
"""The forward kernels against the oracle and against themselves, on the CPU and on a GPU.

Each test is one for both: a kernel compiled for the CPU runs under AddressSanitizer on small
problems, on a GPU it takes larger ones. Both start from outputs that are NaN.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hostcuda.launch import SCHEDULES, run_schedules
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import (
    ON_GPU,
    ON_HOST_CUDA,
    assert_same_bits,
    every_kernel,
    launches,
    normal,
    qkv,
)

from cupyflash import Algorithm1, online_softmax
from cupyflash.testing import (
    Problem,
    arrange,
    assert_attention_close,
    attention_problems,
    poison,
    tile_edges,
)

DTYPES = ["float16", "float32", "float64"]


# ---- against the oracle --------------------------------------------------------------------------


# An H200 has room for this many float64 elements, and S_ij, l, m and padding beside them.
LARGEST_M = 20_000


def with_tiles(problem, keys, chunks, most_steps):
    """Settings of Algorithm 1 with B_c = ``keys``, or more where that would take too many steps."""
    if keys is None:
        return Algorithm1(chunks=chunks)
    d, dv = problem.q.shape[-1], problem.v.shape[-1]
    *heads, seqlen_q = problem.reference[1].shape
    seqlen_k = problem.k.shape[-2]
    while math.prod(heads) * -(-seqlen_q // min(keys, d)) * -(-seqlen_k // keys) > most_steps:
        keys *= 2
        if keys > 64:
            return Algorithm1(chunks=chunks)
    if 2 * (d + dv) * keys > LARGEST_M:
        return Algorithm1(chunks=chunks)
    return Algorithm1(sram_elements=2 * (d + dv) * keys, chunks=chunks)


tile_keys = st.sampled_from([None, 1, 3, 8, 17, 40])
chunk_counts = st.sampled_from([None, 1, 2, 5])


@pytest.mark.parametrize("path", ON_HOST_CUDA)
def test_agrees_with_the_oracle_on_the_cpu(path):
    devices = st.sampled_from(["H200", "T4", "RTX 4090", "A100"])
    drawn = {"max_options": 5, "max_scores": 2**11} | path.draws
    if path.kernel != "fa1_forward":
        drawn["head_dims"] = (8, 64)  # each size of tiles is a build of its own

    # Kernels with tiles of one size multiply many zeros in small problems.
    @settings(max_examples=120 if path.kernel == "fa1_forward" else 20)
    @given(attention_problems(**drawn), tile_keys, chunk_counts, devices)
    def agrees(problem, keys, chunks, device):
        settings_of_it = {}
        if path.kernel == "fa1_forward":
            kernel = with_tiles(problem, keys, chunks, most_steps=32)
            settings_of_it["kernel"] = kernel
            settings_of_it["device"] = device if kernel.sram_elements is None else "H200"
        actual = path(*problem.qkv, **settings_of_it, **problem.kwargs)
        assert_attention_close(actual, problem)

    agrees()


@pytest.mark.parametrize("path", ON_GPU)
def test_agrees_with_the_oracle_on_a_gpu(path):
    drawn = {
        "lengths": [*tile_edges(8, 32, 64, 224), 600],
        "head_dims": (1, 3, 8, 40, 64, 80, 128, 200, 256),
        "max_options": 6,
        "max_scores": 2**20,
    }

    @settings(max_examples=600)
    @given(attention_problems(**drawn | path.draws), tile_keys, chunk_counts)
    def agrees(problem, keys, chunks):
        kernel = path.kernel
        if kernel == "fa1_forward":
            kernel = with_tiles(problem, keys, chunks, most_steps=10**5)
        assert_attention_close(path(*problem.qkv, kernel=kernel, **problem.kwargs), problem)

    agrees()


@every_kernel
def test_any_byte_but_0_of_a_mask_shows(path):
    """A view of other bytes as bool is no copy, and nobody has made them 0 and 1."""
    q, k, v = qkv(31, 2, 40, 64, seqlen_k=160, dtype=path.dtypes[0])
    numbers = np.random.default_rng(32).choice(np.uint8([0, 0, 1, 2, 128, 255]), (40, 160))
    assert_same_bits(path(q, k, v, mask=numbers.view(bool)), path(q, k, v, mask=numbers != 0))


@every_kernel
@pytest.mark.parametrize("head_dim", [1, 2, 31, 100, 256])
def test_any_head_dim_with_default_tiles(path, head_dim):
    q, k, v = qkv(head_dim, 1, path.size(500, 20), head_dim, seqlen_k=path.size(700, 70))
    for head_dim_v in {head_dim, 5}:
        values = np.resize(v, (*v.shape[:-1], head_dim_v))
        actual = path(q, k, values, causal=True)
        assert_attention_close(actual, Problem(q, k, values, {"causal": True}))


@every_kernel
@pytest.mark.parametrize("first", [-800, -1000, 582, 580])
@pytest.mark.parametrize("q_entry", [1e4, 50.0, 3.0])
def test_large_scores_of_one_sign_that_differ_little(path, first, q_entry):
    """Scores of up to 8e7 and a second level near the first: all weight is the larger one's."""
    second = {-800: -1000, -1000: -800, 582: 580, 580: 582}[first]
    dtype = np.float32 if "float16" not in path.dtypes else np.float16
    q = np.full((1, 1, 64), q_entry, dtype)
    k = np.full((1, 256, 64), second, dtype)
    v = np.full((1, 256, 64), 5, dtype)
    k[:, :128], v[:, :128] = first, 1
    expected = (1, 5)[second > first]
    o, lse = path(q, k, v)
    np.testing.assert_array_equal(o, expected)
    score = 8 * q_entry * max(first, second)
    np.testing.assert_allclose(lse, score + np.log(128), rtol=2.0**-22)


@every_kernel
@pytest.mark.parametrize("slope", [30.0, -30.0])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_scores_that_rise_or_fall_over_many_tiles(path, dtype, slope):
    # Each tile outweighs all before it, whichever end a kernel begins at.
    q, k, v = qkv(12, 1, 2, 20, 64, seqlen_k=path.size(3000, 400), dtype=dtype)
    q[..., 0] = 1
    k[..., 0] += np.linspace(0, 8 * slope, k.shape[-2])
    actual = path(q, k, v, kernel=path.small_tiles(64, 40))
    assert_attention_close(actual, Problem(q, k, v, {}))


# ---- with no tolerance ---------------------------------------------------------------------------


def tiled(path, dtype="float32", **sizes):
    """q, k, v of two entries, four heads over two, several tiles each, and the tiles to use."""
    n_q, n_k = path.size(300, 21), path.size(410, 37)
    if path.kernel == "forward_sm90":  # reads rows of a mask at multiples of 16 bytes
        n_k = path.size(416, 32)
    head_dim = path.size(64, 8)
    arrays = qkv(7, 2, 4, n_q, head_dim, seqlen_k=n_k, heads_k=2, dtype=dtype)
    return arrays, path.small_tiles(head_dim, path.size(64, 8))


@every_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_future_keys_change_no_earlier_row(path, dtype):
    (q, k, v), tiles = tiled(path, dtype)
    before = path(q, k, v, causal=True, kernel=tiles)
    for keys_seen in (k.shape[-2] - 3, k.shape[-2] // 2):
        rows = q.shape[-2] - (k.shape[-2] - keys_seen)
        other_k, other_v = k.copy(), v.copy()
        other_k[..., keys_seen:, :] = 9
        other_v[..., keys_seen:, :] *= -100
        after = path(q, other_k, other_v, causal=True, kernel=tiles)
        assert_same_bits([x[:, :, :rows] for x in after], [x[:, :, :rows] for x in before])
        assert not np.array_equal(after[0][:, :, rows:], before[0][:, :, rows:])


@every_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_entries_and_heads_are_independent(path, dtype):
    (q, k, v), tiles = tiled(path, dtype)
    o, lse = path(q, k, v, kernel=tiles)
    for b, h in ((0, 1), (1, 2)):
        alone = path(q[b, h], k[b, h // 2], v[b, h // 2], kernel=tiles)
        assert_same_bits(alone, (o[b, h], lse[b, h]))
    # Nor does it matter what the others hold.
    q[0], k[0], v[0] = math.nan, math.inf, math.nan
    q[1, 3] = math.nan
    poisoned = path(q, k, v, kernel=tiles)
    assert_same_bits([x[1, :3] for x in poisoned], (o[1, :3], lse[1, :3]))


def unseen(n_q, n_k, dtype="float32"):
    """Ways to hide keys from every query: the keys, and the options that hide them."""
    band = np.arange(n_k) % 5 == 2
    rows = np.arange(n_q)[:, None] % 3 == 0
    bias = np.where(band, np.float32(-np.inf), normal(3, n_q, n_k))
    return {
        "seqlens_k": (np.arange(n_k) >= n_k - 11, {"seqlens_k": n_k - 11}),
        "no key at all": (np.arange(n_k) >= 0, {"seqlens_k": 0}),
        "mask": (band, {"mask": ~band & ~rows}),
        "mask of keys": (band, {"mask": ~band}),
        "bias": (band, {"bias": bias.astype(dtype)}),
        "float32 bias": (band, {"bias": bias}),
        "window": (
            (np.arange(n_k) < n_k - n_q - 2) | (np.arange(n_k) > n_k - 1),
            {"window": (2, 1)},
        ),
        "top left": (np.arange(n_k) > n_q - 1, {"causal": "top_left"}),
        "mask and softcap": (band, {"mask": ~band, "softcap": 5.0, "alibi_slopes": [1.0] * 4}),
    }


@every_kernel
@pytest.mark.parametrize("way", [*unseen(1, 1)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_garbage_in_slots_that_no_query_sees_changes_nothing(path, way, dtype):
    (q, k, v), tiles = tiled(path, dtype)
    hidden, options = unseen(q.shape[-2], k.shape[-2], dtype)[way]
    assert hidden.any()
    results = []
    for garbage_k, garbage_v in ((0, 0), (math.nan, math.nan), (math.inf, -math.inf)):
        k[:, :, hidden], v[:, :, hidden] = garbage_k, garbage_v
        results.append(path(q, k, v, kernel=tiles, **options))
    assert np.isfinite(results[0][0].astype(np.float64)).all()
    for result in results[1:]:
        assert_same_bits(result, results[0])


@every_kernel
def test_garbage_that_one_head_hides_and_another_sees(path):
    (q, k, v), tiles = tiled(path)
    mask = np.ones((4, 1, k.shape[-2]), bool)
    mask[0, :, 3] = mask[2, :, 5] = False
    clean = path(q, k, v, mask=mask, kernel=tiles)
    k[:, 0, 3] = v[:, 0, 3] = k[:, 1, 5] = v[:, 1, 5] = math.nan
    o, lse = path(q, k, v, mask=mask, kernel=tiles)
    assert_same_bits((o[:, ::2], lse[:, ::2]), (clean[0][:, ::2], clean[1][:, ::2]))
    assert np.isnan(o[:, 1::2]).all()


@every_kernel
def test_garbage_behind_the_last_key_and_query(path):
    (q, k, v), tiles = tiled(path)
    wide = [
        poison(np.empty((*x.shape[:2], x.shape[2] + 9, x.shape[3] + 5), x.dtype)) for x in (q, k, v)
    ]
    views = [
        w[:, :, 4 : 4 + x.shape[2], 2 : 2 + x.shape[3]]
        for w, x in zip(wide, (q, k, v), strict=True)
    ]
    for view, x in zip(views, (q, k, v), strict=True):
        view[...] = x
    assert_same_bits(path(*views, kernel=tiles), path(q, k, v, kernel=tiles))


@every_kernel
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_writes_every_element_of_a_view_and_nothing_else(path, dtype):
    (q, k, v), tiles = tiled(path, dtype)
    # More queries than keys: the first rows see nothing, and are written too.
    k, v = k[:, :, :11], v[:, :, :11]
    expected = path(q, k, v, causal=True, kernel=tiles)
    batch, heads, rows, dim = q.shape
    for layout in ("transposed", "sliced", "backwards"):
        buffer = poison(np.empty((batch, rows + 2, heads + 1, dim + 3), dtype))
        view = buffer[:, 1:-1, 1:, 2:-1].swapaxes(1, 2)
        if layout == "sliced":
            buffer = buffer.reshape(batch, heads + 1, rows + 2, dim + 3)
            view = buffer[:, 1:, 1:-1, 2:-1]
        elif layout == "backwards":
            view = view[..., ::-1, ::-1]
        outside = np.ones(buffer.shape, bool)
        np.lib.stride_tricks.as_strided(
            outside.reshape(-1)[(view.ctypes.data - buffer.ctypes.data) // view.itemsize :],
            view.shape,
            [s // view.itemsize for s in view.strides],
        )[...] = False
        o, lse = path(q, k, v, causal=True, kernel=tiles, out=view)
        assert o is view
        assert np.isnan(buffer[outside]).all()
        assert_same_bits((np.ascontiguousarray(o), lse), expected)


@every_kernel
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("columns", [17, 60, 72])
def test_last_columns_that_fill_no_vector(path, dtype, columns):
    # Rows of o are aligned for vectors, but what lies behind their last column is another's.
    q, k, v = qkv(13, 1, 2, 21, 80, seqlen_k=30, dtype=dtype)
    buffer = poison(np.empty((1, 2, 21, 80), dtype))
    o, lse = path(q, k, v[..., :columns], out=buffer[..., :columns])
    assert np.isnan(buffer[..., columns:]).all()
    assert_same_bits((np.ascontiguousarray(o), lse), path(q, k, v[..., :columns]))


@every_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_calls_give_equal_bits(path, dtype):
    (q, k, v), tiles = tiled(path, dtype)
    mask = np.tril(np.ones((q.shape[-2], k.shape[-2]), bool), 5)
    first = path(q, k, v, kernel=tiles, mask=mask)
    for _ in range(path.size(20, 1)):
        assert_same_bits(path(q, k, v, kernel=tiles, mask=mask), first)


@pytest.mark.parametrize("path", ON_HOST_CUDA)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"causal": True}, {"mask": True, "alibi_slopes": [0.5] * 4}])
def test_the_order_of_threads_changes_nothing(path, dtype, options):
    (q, k, v), tiles = tiled(path, dtype)
    n_k = 32 if path.kernel == "forward_sm90" else 19
    q, k, v = q[:1, :, :13], k[:1, :, :n_k], v[:1, :, :n_k]
    if "mask" in options:
        options = options | {"mask": np.random.default_rng(5).random((13, n_k)) < 0.6}
    # Compares every array that the kernel writes, statistics in HBM included.
    result = path(q, k, v, kernel=tiles, schedules=SCHEDULES, **options)
    assert np.isfinite(result[0].astype(np.float64)).all()


@pytest.mark.parametrize("path", [p for p in ON_HOST_CUDA if p.values[0].kernel == "fa1_forward"])
@pytest.mark.parametrize("options", [{}, {"mask": True}])
def test_blocks_that_walk_over_several_heads(path, options):
    # Tiles of 40 rows: several warps have work in every phase, and may run ahead of each other.
    q, k, v = qkv(8, 3, 45, 40, seqlen_k=50)
    tiles = path.small_tiles(40, 40)
    if options:
        options = {"mask": np.random.default_rng(6).random((3, 45, 50)) < 0.5}
    expected = path(q, k, v, kernel=tiles, **options)
    for blocks in (1, 2):
        o, lse, (record,) = launches(q, k, v, kernel=tiles, **options)
        # As where there is more work than a grid can have blocks.
        run_schedules(dataclasses.replace(record, grid=(blocks, 1, 1)))
        assert_same_bits((o, lse), expected)


@every_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_change_no_bit(path, dtype):
    if path.kernel != "fa1_forward":
        pytest.skip("only Algorithm 1 divides its query blocks into chunks")
    (q, k, v), tiles = tiled(path, dtype)
    whole = path(q, k, v, causal=True, kernel=Algorithm1(tiles.sram_elements, chunks=1))
    for chunks in (2, 3, 50):
        shared = path(q, k, v, causal=True, kernel=Algorithm1(tiles.sram_elements, chunks=chunks))
        assert_same_bits(shared, whole)


@every_kernel
@pytest.mark.parametrize("layout", ["broadcast", "negative", "transposed", "strided", "misaligned"])
def test_strides_change_no_bit(path, layout):
    (q, k, v), tiles = tiled(path, "float16")
    views = [arrange(x, layout, axis=1) for x in (q, k, v)]
    copies = [np.ascontiguousarray(x) for x in views]
    assert_same_bits(path(*views, kernel=tiles), path(*copies, kernel=tiles))


# ---- with tolerance ------------------------------------------------------------------------------


@every_kernel
def test_permuting_the_keys(path):
    (q, k, v), tiles = tiled(path)
    order = np.random.default_rng(1).permutation(k.shape[-2])
    o, lse = path(q, k, v, kernel=tiles)
    other_o, other_lse = path(q, k[:, :, order], v[:, :, order], kernel=tiles)
    assert_attention_close((other_o, other_lse), (o, lse))


@every_kernel
@pytest.mark.parametrize("constant", [1.0, -3.0, 1e30])
def test_constant_values(path, constant):
    (q, k, v), tiles = tiled(path)
    o, _ = path(q, k, np.full_like(v, constant), kernel=tiles)
    np.testing.assert_allclose(o, constant, rtol=2e-6)


@every_kernel
@pytest.mark.parametrize("shift", [-300.0, -20.0, 40.0, 300.0])
def test_shifting_all_scores_shifts_lse_alone(path, shift):
    (q, k, v), tiles = tiled(path)
    o, lse = path(q, k, v, kernel=tiles, softmax_scale=0.25)
    # One more column adds the shift to every product.
    q = np.concatenate([q, np.ones_like(q[..., :1])], axis=-1)
    k = np.concatenate([k, np.full_like(k[..., :1], 4 * shift)], axis=-1)
    for more in ({}, {"bias": np.float32([0.0])}):
        other_o, other_lse = path(q, k, v, kernel=tiles, softmax_scale=0.25, **more)
        np.testing.assert_allclose(other_lse, lse + shift, rtol=1e-6, atol=1e-5)
        assert_attention_close(other_o, o, max_score=abs(shift) + 8)


@pytest.mark.parametrize(
    "path", [p for p in ON_HOST_CUDA + ON_GPU if "float64" in p.values[0].dtypes]
)
@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, 37), min_size=1, max_size=3))
def test_merging_any_split_of_the_keys_equals_one_pass(path, cuts):
    q, k, v = qkv(11, 2, path.size(100, 10), 16, seqlen_k=37, dtype="float64")
    whole = path(q, k, v, kernel=path.small_tiles(16, 8))
    state = None
    for begin, end in itertools.pairwise([0, *sorted(cuts), 37]):
        part = online_softmax.resume(*path(q, k[:, begin:end], v[:, begin:end]))
        state = part if state is None else online_softmax.merge(state, part)
    assert_attention_close(online_softmax.finish(state), whole)
