# SPDX-License-Identifier: MIT
"""Pages 2 and 4 of the notes: block sizes from M, and the SRAM that they take."""

import dataclasses
import itertools
from collections import Counter, defaultdict

import hostcuda
import numpy as np
import pytest
from hostcuda.probes import MARKS as HOSTCUDA
from hypothesis import example, given
from hypothesis import strategies as st
from paths import a_dtype, launches, qkv

from cupyflash import Algorithm1, _problem, _sm80, devices, plan, tiling
from cupyflash.plan import KERNELS
from cupyflash.testing import DTYPES
from cupyflash.tiling import algorithm1_tiling, block_sizes, ceil_div, sram_terms

head_dims = st.integers(1, 256)


def problem(dtype="float32", **sizes):
    return _problem.from_sizes("plan", **({"seqlen_q": 4096, "head_dim": 64} | sizes), dtype=dtype)


# ---- line 1 --------------------------------------------------------------------------------------


@given(M=st.integers(1, 10**6), d=st.integers(1, 1000))
def test_line_1(M, d):
    Br, Bc = block_sizes(M, d)
    assert (Bc - 1) * 4 * d < M <= Bc * 4 * d  # ceil(M / 4d)
    assert Br == min(Bc, d)


@given(M=st.integers(1, 10**6), d=st.integers(1, 1000), dv=st.integers(0, 1000))
def test_line_1_counts_a_tile_each_of_q_k_v_and_o(M, d, dv):
    Br, Bc = block_sizes(M, d, dv)
    assert (Bc - 1) * (2 * d + 2 * dv) < M <= Bc * (2 * d + 2 * dv)
    assert Br == min(Bc, d)
    assert block_sizes(M, d, d) == block_sizes(M, d)


@pytest.mark.parametrize("sizes", [(0, 64), (-5, 64), (1000, 0), (1000, 64, -1)])
def test_line_1_of_no_size(sizes):
    with pytest.raises(ValueError, match=f"block_sizes: M is {sizes[0]}, head_dim {sizes[1]}"):
        block_sizes(*sizes)


@given(a=st.integers(0, 10**12), b=st.integers(1, 10**6))
def test_integer_rounding(a, b):
    assert (ceil_div(a, b) - 1) * b < a <= ceil_div(a, b) * b
    assert tiling.round_up(a, b) == ceil_div(a, b) * b


# ---- the budget ----------------------------------------------------------------------------------


@given(Br=st.integers(1, 256), Bc=st.integers(1, 256), d=head_dims, dv=head_dims)
def test_terms_are_those_of_the_notes_and_little_more(Br, Bc, d, dv):
    terms = sram_terms(Br, Bc, d, dv, 4, general=False)
    # Rows of whole vectors of four, K_j's an odd number of them; whole strips of eight rows.
    notes = {
        "K_j": (Bc * d, 7 * Bc),
        "V_j": (Bc * dv, 3 * dv + 3),
        "Q_i": (Br * d, 3 * Br + 7 * (d + 3)),
        "O_i": (Br * dv, 3 * Br + 7 * (dv + 3)),
        "S_ij": (Br * Bc, 3 * Br + 7 * (Bc + 3)),
    }
    for name, (elements, slack) in notes.items():
        assert 0 <= terms[name] - elements <= slack
    others = sum(elements for name, elements in terms.items() if name not in notes)
    assert 2 * Br <= others <= 8 * Br + 128  # l_i, m_i and what is as small
    general = sram_terms(Br, Bc, d, dv, 4, general=True)
    assert Bc <= general.pop("key flags") < Bc + 4
    assert general == terms


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("tiles", [(5, 3, 7), (9, 7, 2), (40, 33, 33)])
class TestTheKernelTakesThatMuch:
    pytestmark = HOSTCUDA

    def record(self, tiles, dtype, general):
        Bc, d, dv = tiles
        q, k, v = qkv(0, 1, 6, d, seqlen_k=45, dtype=dtype)
        mask = np.ones((6, 45), bool) if general else None
        settings = Algorithm1(sram_elements=2 * (d + dv) * Bc)
        v = np.resize(v, (1, 45, dv))
        *_, (record,) = launches(q, k, v, kernel=settings, mask=mask)
        return record

    def test_and_no_more(self, tiles, dtype, general):
        hostcuda.run(self.record(tiles, dtype, general))

    def test_and_no_less(self, tiles, dtype, general):
        record = self.record(tiles, dtype, general)
        # The last term is of single elements; the tiles before it lie at multiples of 16 bytes.
        less = dataclasses.replace(record, smem_bytes=record.smem_bytes - 8)
        with pytest.raises(hostcuda.HostFault, match="heap-buffer-overflow"):
            hostcuda.run(less)


# ---- the choice ----------------------------------------------------------------------------------


@given(
    device=st.sampled_from([*devices.DEVICES.values()]),
    dtype=st.sampled_from(DTYPES),
    d=head_dims,
    dv=head_dims,
    lengths=st.tuples(st.integers(0, 5000), st.integers(0, 5000)),
    mask=st.booleans(),
)
@example(devices.named_device("T4"), "float64", 256, 256, (4096, 4096), True)
def test_every_head_dim_fits_every_device(device, dtype, d, dv, lengths, mask):
    seqlen_q, seqlen_k = lengths
    asked = problem(
        dtype, head_dim=d, head_dim_v=dv, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask
    )
    tiles = algorithm1_tiling(asked, device.smem_block_bytes)
    assert tiles is not None
    assert 0 < tiles.smem_bytes <= device.smem_block_bytes
    assert tiles.itemsize == asked.acc_dtype.itemsize
    assert device.smem_block_bytes // tiles.itemsize == tiles.M
    assert (tiles.Tr - 1) * tiles.Br < seqlen_q <= tiles.Tr * tiles.Br
    assert (tiles.Tc - 1) * tiles.Bc < seqlen_k <= tiles.Tc * tiles.Bc
    terms = sram_terms(tiles.Br, tiles.Bc, d, dv, tiles.itemsize, mask)
    assert dict(tiles.terms) == terms


@given(
    device=st.sampled_from([*devices.DEVICES.values()]),
    dtype=st.sampled_from(DTYPES),
    d=head_dims,
    dv=head_dims,
    mask=st.booleans(),
)
def test_M_used_is_the_largest_that_fits(device, dtype, d, dv, mask):
    asked = problem(dtype, seqlen_q=10**6, head_dim=d, head_dim_v=dv, mask=mask)
    tiles = algorithm1_tiling(asked, device.smem_block_bytes)
    four_d = 2 * (d + dv)

    def smem_bytes(M):
        Br, Bc = block_sizes(M, d, dv)
        if tiles.Br >= 8:  # B_r in whole strips of eight rows, of 64 where there are as many
            Br = Br // 64 * 64 or tiling.round_up(Br, 8)
        return tiles.itemsize * sum(sram_terms(Br, Bc, d, dv, tiles.itemsize, mask).values())

    assert smem_bytes(tiles.M_used) <= device.smem_block_bytes
    if tiles.M_used < tiles.M:
        assert smem_bytes(tiles.M_used + four_d) > device.smem_block_bytes
    # Only whole warps of keys are taken of it.
    assert 0 <= block_sizes(tiles.M_used, d, dv)[1] - tiles.Bc < 32


@pytest.mark.parametrize("device", ["T4", "A100", "RTX 4090", "H200", "B200"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [32, 64, 128])
def test_usual_head_dims_give_the_kernel_whole_warps_of_work(device, dtype, d):
    tiles = algorithm1_tiling(
        problem(dtype, head_dim=d), devices.named_device(device).smem_block_bytes
    )
    assert tiles.Br % 8 == 0
    assert tiles.Bc % 32 == 0 or tiles.Bc < 32


def test_short_sequences_take_small_tiles():
    tiles = algorithm1_tiling(problem(seqlen_q=3, seqlen_k=40), 232448)
    assert (tiles.Br, tiles.Bc, tiles.Tr, tiles.Tc) == (8, 64, 1, 1)


@given(M=st.integers(1, 60_000), d=head_dims, dv=head_dims, dtype=st.sampled_from(DTYPES))
def test_an_asked_M_is_taken_to_the_letter(M, d, dv, dtype):
    smem = devices.named_device("H200").smem_block_bytes
    tiles = algorithm1_tiling(problem(dtype, head_dim=d, head_dim_v=dv), smem, M)
    Br, Bc = block_sizes(M, d, dv)
    needed = tiling.sram_terms(Br, Bc, d, dv, 8 if dtype == "float64" else 4, False)
    if sum(needed.values()) * (8 if dtype == "float64" else 4) > smem:
        assert tiles is None
    else:
        assert (tiles.M, tiles.M_used, tiles.Br, tiles.Bc) == (M, M, Br, Bc)


def test_what_does_not_fit_is_none():
    assert algorithm1_tiling(problem(head_dim=20_000), 232448) is None
    assert algorithm1_tiling(problem(head_dim=4_000), 232448) is not None


# ---- the tile table ------------------------------------------------------------------------------


def test_few_specialisations():
    every = [*tiling.specialisations()]
    builds = [(kernel, options) for kernel, options, _ in every]
    assert len(set(builds)) == len(builds)
    for kernel, count in Counter(kernel for kernel, _ in builds).items():
        assert count <= 200, f"{kernel} is built in {count} ways; specialise by less"


def test_the_table_lists_what_plans_ask_for():
    """No more and no less: what is not listed is not tested, what is never asked for is dead."""
    table = {(kernel, options): set(where) for kernel, options, where in tiling.specialisations()}
    sizes = itertools.product(
        {device.architecture: device for device in devices.DEVICES.values()}.values(),
        DTYPES,
        [(d, dv) for d in (8, 64, 96, 128, 192, 256, 300) for dv in (64, 128, d)],
        [(1, 600), (300, 300), (5008, 5008)],
        [
            "",
            "causal",
            "mask",
            "alibi causal",
            "bias",
            "bias mask",
            "float mask",
            "float",
        ],
        [None, "tf32"],
        [None, *(kernel for kernel in KERNELS if kernel != "host")],
    )
    asked = defaultdict(set)
    for device, dtype, (d, dv), (seqlen_q, seqlen_k), words, precision, kernel in sizes:
        options = {word: True for word in words.split() if word not in ("bias", "float")}
        if "bias" in words or "float" in words:
            options["bias_dtype"] = dtype if "bias" in words else "float32"
        if precision and dtype != "float32":
            continue
        try:
            made = plan(
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                head_dim=d,
                head_dim_v=dv,
                heads_q=8,
                dtype=dtype,
                device=device,
                kernel=kernel,
                precision=precision,
                **options,
            )
        except ValueError:
            assert kernel in ("forward_sm80", "forward_sm90", "forward_sm90_float32")
            continue
        builds = [(made.kernel, made.options)]
        if made.parts is not None and made.parts.splits > 1:
            builds.append(("combine", _sm80.combine_options(dtype)))
        for build in builds:
            asked[build].add(device.architecture)
    assert asked == table


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "host"])
@pytest.mark.parametrize("seqlen_q", [1, 200])
def test_launches_are_of_what_the_plan_asked_for(kernel, seqlen_q):
    table = {(name, options) for name, options, _ in tiling.specialisations()}
    dtype = a_dtype(kernel)
    q, k, v = qkv(0, 2, seqlen_q, 64, seqlen_k=3000, dtype=dtype)
    *_, records = launches(q, k, v, kernel=kernel)
    asked = plan(
        **{"seqlen_q": seqlen_q, "seqlen_k": 3000, "head_dim": 64, "heads_q": 2},
        **{"device": "H200", "kernel": kernel, "dtype": dtype},
    )
    first = records[0]
    assert (first.kernel, first.options, first.grid) == (kernel, asked.options, asked.grid)
    assert (first.block, first.smem_bytes) == (asked.block, asked.smem_bytes)
    assert {(r.kernel, r.options) for r in records} <= table
    merged_by_combine = asked.parts is not None and not asked.parts.merges
    assert [r.kernel for r in records[1:]] == ["combine"] * merged_by_combine
