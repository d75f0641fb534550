# SPDX-License-Identifier: MIT
"""A plan explains a call: what it prints, what it decides, and that attention does just that."""

import copy
import functools
import gc
import pickle
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import KERNELS, a_dtype, launches, normal, qkv

from cupyflash import Algorithm1, Plan, _params, _problem, attention, devices, io_model, plan
from cupyflash._launch import MAX_GRID_X
from cupyflash.reference import visible
from cupyflash.testing import DTYPES

fa1_plan = functools.partial(plan, kernel="fa1_forward")
DEVICE_NAMES = [*devices.DEVICES]


def table(p):
    """The printed plan as a mapping."""
    lines = (line.strip().split("  ", 1) for line in str(p).splitlines())
    return {name.removeprefix("SRAM "): value.strip() for name, value in lines}


# ---- printing ------------------------------------------------------------------------------------


def test_prints_what_explains_the_call():
    p = plan(seqlen_q=4096, head_dim=64, dtype="float32", device="H200", kernel="fa1_forward")
    assert isinstance(p, Plan)
    rows = table(p)
    assert rows["kernel"] == "fa1_forward"
    assert rows["problem"].startswith(
        "float32, batch 1, heads 1/1, seqlen 4096 x 4096, head_dim 64"
    )
    assert rows["M"] == "58112 float32 elements: B_c = ceil(M/4d) = 227, B_r = 64"
    assert rows["M used"].startswith(f"{p.tiling.M_used}")
    assert rows["B_r, B_c"] == f"{p.tiling.Br}, {p.tiling.Bc}"
    assert rows["T_r, T_c"] == f"{p.tiling.Tr}, {p.tiling.Tc}" == "64, 19"
    assert rows["grid"].startswith(f"({p.chunks}, 1, 1): {p.chunks} chunks of T_r")
    assert rows["in all"] == f"{p.smem_bytes} of 232448 bytes"
    for name, elements in p.tiling.terms:
        assert rows[name] == f"{elements} elements"
    assert rows["HBM, exact"].startswith(f"{p.hbm_bytes / 1e6:.3f} MB: ")
    assert rows["HBM, notes"].startswith("16 N^2 d^2 / M = ")
    assert rows["score matrix"] == "67.109 MB, never made"
    assert rows["FLOPs"] == f"{4 * 4096**2 * 64:.3e}"


@pytest.mark.parametrize(
    ("kernel", "grid"),
    [
        ("fa1_forward", "1 chunk of T_r for each of the batch's heads"),
        ("forward_sm80", "1 block of queries of 1 head"),
        ("forward_sm90", "persistent, for 1 block of queries"),
    ],
)
def test_one_of_a_thing_is_no_plural(kernel, grid):
    p = plan(seqlen_q=64, head_dim=64, dtype="float16", device="H200", kernel=kernel)
    assert table(p)["grid"] == f"(1, 1, 1): {grid}"


def test_prints_its_options_and_hides_what_is_not_there():
    p = fa1_plan(
        seqlen_q=64,
        head_dim=8,
        causal="top_left",
        window=(3, None),
        softcap=2,
        mask=True,
        alibi=True,
        seqlens=True,
        bias_dtype="float32",
        dtype="bfloat16",
        device="T4",
    )
    assert table(p)["options"] == (
        "causal (top left), window (3, 0), softcap 2, bias float32, mask, alibi, seqlens"
    )
    assert table(fa1_plan(seqlen_q=64, head_dim=8, device="T4"))["options"] == "none"
    tf32 = plan(seqlen_q=64, head_dim=8, dtype="float32", precision="tf32", device="A100")
    assert table(tf32)["options"] == "TF32 products"
    assert "-DCUPYFLASH_TF32=1" in tf32.options
    with pytest.raises(ValueError, match="precision 'tf32' is for float32, q"):
        plan(seqlen_q=64, head_dim=8, dtype="float64", precision="tf32", device="A100")
    host = table(plan(seqlen_q=64, head_dim=8, device="cpu"))
    assert "M" not in host
    assert host["device"] == "cpu: numpy, tiled, products through BLAS"


def test_says_when_a_call_is_too_small_for_the_device():
    small = fa1_plan(seqlen_q=64, head_dim=64, dtype="float32", device="H200")
    assert "too few to fill the device" in table(small)["blocks"]
    large = fa1_plan(
        seqlen_q=4096, head_dim=64, heads_q=32, batch=8, dtype="float32", device="H200"
    )
    assert "too few" not in table(large)["blocks"]


def test_prints_when_the_whole_sram_is_too_small_for_the_budget():
    rows = table(fa1_plan(seqlen_q=4096, head_dim=1, dtype="float32", device="T4"))
    assert rows["M used"].endswith(", the largest that fits")
    assert int(rows["M used"].split(",")[0]) < int(rows["M"].split()[0]) == 16384


@pytest.mark.parametrize("device", DEVICE_NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_needs_no_gpu_for_a_named_device(device, dtype):
    for head_dim in (1, 64, 256):
        p = fa1_plan(seqlen_q=1000, head_dim=head_dim, dtype=dtype, device=device)
        assert p.device.name == device
        assert p.smem_bytes <= p.device.smem_block_bytes
        assert device in str(p)
        assert p.hbm_bytes > 0


def test_prints_empty_problems_too():
    for sizes in (
        {"batch": 0},
        {"seqlen_q": 0},
        {"seqlen_k": 0},
        {"head_dim_v": 0},
        {"heads_q": 0},
    ):
        p = plan(**({"seqlen_q": 5, "head_dim": 8, "device": "H200"} | sizes))
        assert "kernel" in str(p)


# ---- decisions -----------------------------------------------------------------------------------


@given(
    device=st.sampled_from(DEVICE_NAMES),
    seqlen_q=st.integers(1, 20_000),
    head_dim=st.integers(1, 256),
    batch=st.integers(1, 300),
    heads_q=st.integers(1, 300),
)
def test_the_grid_covers_all_query_blocks_once(device, seqlen_q, head_dim, batch, heads_q):
    p = fa1_plan(seqlen_q=seqlen_q, head_dim=head_dim, batch=batch, heads_q=heads_q, device=device)
    assert p.grid == (min(batch * heads_q * p.chunks, MAX_GRID_X), 1, 1)
    assert p.blocks == batch * heads_q * p.chunks
    assert 1 <= p.chunks <= p.tiling.Tr
    rows = [i for chunk in range(p.chunks) for i in range(chunk, p.tiling.Tr, p.chunks)]
    assert sorted(rows) == [*range(p.tiling.Tr)]
    assert p.tiling.Tr * p.tiling.Br >= seqlen_q


def test_chunks_fill_the_device():
    one_head = fa1_plan(seqlen_q=65536, head_dim=64, dtype="float32", device="H200")
    assert one_head.blocks >= 0.9 * 132
    many_heads = fa1_plan(
        seqlen_q=1024, head_dim=64, heads_q=132, batch=4, dtype="float32", device="H200"
    )
    assert many_heads.chunks == 1  # more would only load K and V more often
    assert fa1_plan(seqlen_q=10, head_dim=64, dtype="float32", device="H200").chunks == 1


@given(heads=st.integers(1, 200), seqlen_q=st.integers(1, 20_000), chunks=st.integers(1, 400))
def test_no_other_number_of_chunks_keeps_the_busiest_multiprocessor_less_busy(
    heads, seqlen_q, chunks
):
    p = fa1_plan(seqlen_q=seqlen_q, head_dim=128, heads_q=heads, dtype="float32", device="A100")
    Tr = p.tiling.Tr
    chunks = min(chunks, Tr, max(8 * 108 // heads, 1))  # eight blocks a place are enough

    def steps(chunks):
        return -(-heads * chunks // 108) * -(-Tr // chunks)

    assert steps(p.chunks) <= steps(chunks)


def test_settings_are_taken_as_asked():
    p = plan(seqlen_q=1000, head_dim=64, device="A100", kernel=Algorithm1(chunks=1))
    assert (p.chunks, p.grid) == (1, (1, 1, 1))
    p = plan(seqlen_q=1000, head_dim=64, device="A100", kernel=Algorithm1(4096, chunks=7))
    assert (p.tiling.M, p.tiling.Br, p.tiling.Bc, p.chunks) == (4096, 16, 16, 7)


def test_a_grid_at_its_limit_still_covers_all():
    p = fa1_plan(seqlen_q=1, head_dim=1, batch=2**20, heads_q=2**12, device="H200")
    assert p.grid == (2**31 - 1, 1, 1)
    assert p.blocks == 2**32


@given(
    seqlen_q=st.integers(0, 50),
    seqlen_k=st.integers(0, 50),
    causal=st.sampled_from([False, True, "top_left"]),
    window=st.sampled_from([None, (3, 4), (0, None), (None, 2)]),
)
def test_flops_are_those_of_the_pairs_that_see_each_other(seqlen_q, seqlen_k, causal, window):
    p = plan(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=8,
        head_dim_v=5,
        heads_q=3,
        batch=2,
        causal=causal,
        window=window,
        device="cpu",
    )
    pairs = int(visible(seqlen_q, seqlen_k, causal=causal, window=window).sum())
    assert p.flops == 2 * (8 + 5) * 6 * pairs


def test_traffic_is_that_of_the_plans_own_tiles():
    p = fa1_plan(seqlen_q=1000, head_dim=64, dtype="float16", heads_q=3, causal=True, device="A100")
    expected = io_model.algorithm1(p.problem, p.tiling.Br, p.tiling.Bc, p.chunks)
    assert p.hbm_bytes == expected.bytes
    assert plan(seqlen_q=1000, head_dim=64, device="cpu").hbm_bytes is None


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"device": "H900"}, ValueError, "no device 'H900'; known are V100, T4"),
        ({"device": 1000}, ValueError, "plan: device is 1000; this machine has"),
        ({"device": 1.5}, TypeError, "plan: device is 1.5; expected an integer"),
        ({"kernel": "fa8"}, ValueError, "plan: kernel is 'fa8'; expected one of host, fa1_forward"),
        ({"kernel": "host"}, ValueError, "plan: kernel 'host' takes numpy arrays"),
        ({"kernel": ("fa1_forward",)}, TypeError, "plan: kernel is a tuple"),
        ({"kernel": "fa1_forward", "device": "cpu"}, ValueError, "'fa1_forward' runs on a GPU"),
        (
            {"head_dim": 20_000, "kernel": "fa1_forward"},
            ValueError,
            "can't hold one query and one key of head_dim 20000 and head_dim_v 20000 in the 232448",
        ),
        (
            {"kernel": Algorithm1(sram_elements=100_000)},
            ValueError,
            "can't hold the blocks of sram_elements=100000 of head_dim 64",
        ),
    ],
)
def test_refusals(arguments, error, match):
    with pytest.raises(error, match=match):
        plan(**({"seqlen_q": 64, "head_dim": 64, "device": "H200"} | arguments))


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"sram_elements": 0}, ValueError, "Algorithm1: sram_elements is 0; expected a positive"),
        ({"chunks": -1}, ValueError, "Algorithm1: chunks is -1; expected a positive integer"),
        ({"chunks": 1.5}, TypeError, "Algorithm1: chunks is 1.5; expected an integer"),
        ({"sram_elements": True}, TypeError, "Algorithm1: sram_elements is True"),
    ],
)
def test_settings_that_are_refused(settings, error, match):
    with pytest.raises(error, match=f"^{match}"):
        Algorithm1(**settings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [False, True])
def test_the_papers_kernel_runs_by_name_only(dtype, mask):
    for device in DEVICE_NAMES:
        for head_dim in (1, 64, 256, 257, 1000, 5000):
            sizes = {"seqlen_q": 1000, "head_dim": head_dim, "dtype": dtype, "mask": mask}
            assert plan(**sizes, device=device).kernel != "fa1_forward"
    assert fa1_plan(seqlen_q=1000, head_dim=1000, device="T4").kernel == "fa1_forward"


# ---- the plan is what attention does -------------------------------------------------------------


def assert_launched_as_planned(planned, records):
    (record,) = records
    for field in ("kernel", "options", "grid", "block", "smem_bytes"):
        assert getattr(record, field) == getattr(planned, field)


SIZES = {"seqlen_q": 70, "seqlen_k": 90, "head_dim": 24, "batch": 2, "heads_q": 6, "heads_k": 3}


@pytest.mark.parametrize("kernel", [*KERNELS, Algorithm1(sram_elements=3000, chunks=2)], ids=str)
def test_the_launch_is_as_planned(kernel):
    dtype = a_dtype(kernel)
    arrays = qkv(0, 2, 6, 70, 24, seqlen_k=90, heads_k=3, dtype=np.dtype(dtype))
    *_, records = launches(*arrays, kernel=kernel, causal=True)
    planned = plan(**SIZES, dtype=dtype, causal=True, device="H200", kernel=kernel)
    assert_launched_as_planned(planned, records)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("device", ["T4", "H200"])
def test_algorithm_1_gets_the_planned_tiles(mask, device):
    arrays = qkv(0, 2, 6, 70, 24, seqlen_k=90, heads_k=3, dtype=np.float16)
    options = {"mask": np.ones((70, 90), bool)} if mask else {}
    *_, records = launches(*arrays, device=device, **options)
    planned = fa1_plan(**SIZES, dtype="float16", mask=mask, device=device)
    assert_launched_as_planned(planned, records)
    t = planned.tiling
    for name, expected in (("Br", t.Br), ("Bc", t.Bc), ("chunks", planned.chunks)):
        at = 8 * _params.FA1_FIELDS.index(name)
        assert int.from_bytes(records[0].params[at : at + 8], "little") == expected


def test_plans_keep_no_array_alive():
    arrays = [normal(n, 2, 30, 8) for n in range(3)]
    mask = np.ones((30, 30), bool)
    references = [weakref.ref(x) for x in (*arrays, mask)]
    o = attention(*arrays, mask=mask)
    _, _, records = launches(*arrays, mask=mask)
    references += [weakref.ref(o), *(weakref.ref(p.array) for p in records[0].pointers)]
    del arrays, mask, o, records, _
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_a_problem_that_was_seen_is_not_planned_again():
    sizes = {"seqlen_q": 123, "head_dim": 45, "device": "H200"}
    assert plan(**sizes) is plan(**sizes)
    assert plan(**sizes) is not plan(**sizes, kernel=Algorithm1(chunks=1))
    assert _problem.from_sizes("plan", seqlen_q=1, head_dim=1) == _problem.from_sizes(
        "attention", seqlen_q=1, head_dim=1
    )


def test_pickles_and_copies_are_equal():
    for kernel in (None, "fa1_forward"):
        p = plan(seqlen_q=100, head_dim=64, device="H200", kernel=kernel)
        for other in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p)):
            assert other == p
            assert hash(other) == hash(p)
            assert str(other) == str(p)


def test_questions_of_astronomic_size_are_answered_at_once():
    n = 2**31 - 1
    p = plan(seqlen_q=n, head_dim=64, causal=True, device="cpu")
    assert p.flops == 4 * 64 * n * (n + 1) // 2
