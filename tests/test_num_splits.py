# SPDX-License-Identifier: MIT
"""num_splits: who divides keys, in how many parts, and that nothing but rounding depends on it."""

import hostcuda
import ml_dtypes
import numpy as np
import pytest
from hostcuda.probes import MARKS as HOSTCUDA
from paths import assert_same_bits, launches, qkv, run_on_gpu, run_on_host_cuda

from cupyflash import _dtypes, attention, plan
from cupyflash.testing import DTYPES, Problem, assert_attention_close

SIZES = {"seqlen_q": 64, "head_dim": 64, "device": "H200"}
DECODE = {**SIZES, "seqlen_q": 1, "seqlen_k": 8192, "heads_q": 32, "heads_k": 8}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_splits": 0}, ValueError, "plan: num_splits is 0; expected 1 to 128, or None"),
        ({"num_splits": 129}, ValueError, "plan: num_splits is 129; expected 1 to 128, or None"),
        ({"num_splits": -1}, ValueError, "plan: num_splits is -1; expected 1 to 128"),
        ({"num_splits": 2.0}, TypeError, "plan: num_splits is 2.0; expected an integer"),
        ({"num_splits": True}, TypeError, "plan: num_splits is True; expected an integer"),
        (
            {"num_splits": 2, "kernel": "forward_sm90", "dtype": "float16"},
            ValueError,
            "num_splits is 2, but kernel 'forward_sm90' does not divide keys; expected 1 or None",
        ),
        ({"num_splits": 2, "kernel": "fa1_forward"}, ValueError, "'fa1_forward' does not divide"),
        ({"num_splits": 2, "device": "cpu"}, ValueError, "numpy's kernel 'host' does not divide"),
        (
            {"num_splits": 2, "seqlen_k": 2**29},
            ValueError,
            "'forward_simt', which divides keys, takes sequences of less than 536870912; expected",
        ),
    ],
)
def test_refusals(arguments, error, match):
    with pytest.raises(error, match=match):
        plan(**SIZES | arguments)


def test_numpy_arrays_are_never_divided():
    q, k, v = qkv(1, 2, 5, 8, seqlen_k=70)
    assert (attention(q, k, v, num_splits=1) == attention(q, k, v)).all()
    with pytest.raises(ValueError, match="attention: num_splits is 3, but numpy's kernel 'host'"):
        attention(q, k, v, num_splits=3)
    with pytest.raises(TypeError, match="attention: num_splits is 'two'; expected an integer"):
        attention(q, k, v, num_splits="two")


def test_the_plan_divides_as_asked():
    for dtype in DTYPES:
        for asked in (1, 2, 17, np.int64(128)):
            p = plan(**DECODE, dtype=dtype, num_splits=asked)
            assert (p.kernel, p.parts.splits) == ("forward_sm80", asked)
            assert f"{asked}, merged" in str(p) or asked == 1
            assert p.grid == (8 * p.parts.slices * asked, 1, 1)
    assert plan(**DECODE).parts.splits > 1
    for others in ({"device": "T4"}, {"head_dim": 300}, {"kernel": "forward_simt"}):
        p = plan(**DECODE | others, num_splits=3)
        assert (p.kernel, p.parts.splits) == ("forward_simt", 3)
    # Long rows are forward_sm90's, unless their keys are to be divided.
    assert plan(**SIZES | {"seqlen_q": 4096, "heads_q": 8}).kernel == "forward_sm90"
    assert plan(**SIZES | {"seqlen_q": 4096, "heads_q": 8}, num_splits=2).kernel == "forward_sm80"


@pytest.mark.parametrize("seqlen_q", [1, 64, 200, 4096])
@pytest.mark.parametrize("device", ["H200", "A100", "T4", "cpu"])
def test_one_part_is_planned_alike_for_every_batch(device, seqlen_q):
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": 4096, "head_dim": 64, "heads_q": 2, "num_splits": 1}
    plans = [plan(**sizes, device=device, batch=batch) for batch in (1, 3, 1000)]
    for p in plans[1:]:
        assert (p.kernel, p.tiles, p.options) == (plans[0].kernel, plans[0].tiles, plans[0].options)
        assert (p.parts and (p.parts.pack, p.parts.splits)) == (
            plans[0].parts and (plans[0].parts.pack, 1)
        )


@pytest.mark.kernel("forward_sm80", "forward_simt", "combine")
class TestOnHostCuda:
    pytestmark = HOSTCUDA

    @pytest.mark.parametrize("kernel", ["forward_sm80", "forward_simt"])
    @pytest.mark.parametrize("name", DTYPES)
    @pytest.mark.parametrize("num_splits", [1, 2, 5, 9])
    def test_any_number_of_parts_gives_the_result(self, name, num_splits, kernel):
        """9: more than there are tiles of keys."""
        q, k, v = qkv(2, 2, 4, 3, 40, seqlen_k=130, heads_k=2, dtype=_dtypes.named(name))
        options = {"causal": True, "seqlens_k": np.array([130, 2])}
        how = {"kernel": kernel, "num_splits": num_splits}
        actual = run_on_host_cuda(q, k, v, **how, **options)
        assert_attention_close(actual, Problem(q, k, v, options))
        assert_same_bits(run_on_host_cuda(q, k, v, **how, **options), actual)

    @pytest.mark.parametrize(
        ("seqlen_q", "heads_q", "head_dim", "merges"),
        [(1, 2, 40, True), (3, 8, 72, True), (1, 2, 42, False), (9, 16, 40, False)],
    )
    def test_the_last_block_merges_the_parts_of_its_tile(self, seqlen_q, heads_q, head_dim, merges):
        """Where they fit its shared memory and can be read 16 bytes at a time."""
        q, k, v = qkv(4, 2, heads_q, seqlen_q, head_dim, seqlen_k=700, heads_k=2, dtype=BFLOAT16)
        options = {"causal": True, "seqlens_k": np.array([700, 3])}
        how = {"kernel": "forward_sm80", "num_splits": 7 if heads_q < 16 else 12}
        o, lse, records = launches(q, k, v, **how, **options)
        names = [record.kernel for record in records]
        assert names == ["forward_sm80"] if merges else ["forward_sm80", "combine"]
        for record in records:
            hostcuda.run_schedules(record)
        assert_attention_close((o, lse), Problem(q, k, v, options))
        for pointer in records[0].pointers:
            assert pointer.name != "counts" or not pointer.array.any()

    def test_undivided_entries_do_not_depend_on_the_batch(self):
        q, k, v = qkv(3, 3, 2, 5, 64, seqlen_k=150, dtype=np.float16)
        how = {"kernel": None, "num_splits": 1}
        o, lse = run_on_host_cuda(q, k, v, **how)
        for n in range(3):
            one = slice(n, n + 1)
            assert_same_bits(run_on_host_cuda(q[one], k[one], v[one], **how), (o[one], lse[one]))


@pytest.mark.gpu
@pytest.mark.kernel("forward_sm80", "forward_simt", "combine")
@pytest.mark.parametrize("kernel", ["forward_sm80", "forward_simt"])
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 2, 3, 16, 128])
def test_any_number_of_parts_on_a_gpu(cupy, name, num_splits, kernel):
    q, k, v = qkv(4, 2, 8, 3, 64, seqlen_k=5000, heads_k=2, dtype=_dtypes.named(name))
    mask = np.random.default_rng(5).random((3, 5000)) < 0.5
    for options in ({}, {"causal": True, "seqlens_k": np.array([5000, 7])}, {"mask": mask}):
        how = {"kernel": kernel, "num_splits": num_splits}
        actual = run_on_gpu(q, k, v, **how, **options)
        assert_attention_close(actual, Problem(q, k, v, options))
        for _ in range(3):
            assert_same_bits(run_on_gpu(q, k, v, **how, **options), actual)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 100, 300])
def test_undivided_entries_do_not_depend_on_the_batch_on_a_gpu(cupy, seqlen_q):
    q, k, v = qkv(6, 200, 4, seqlen_q, 64, seqlen_k=2000, heads_k=2, dtype=BFLOAT16)
    o, lse = run_on_gpu(q, k, v, num_splits=1)
    for some in (slice(0, 1), slice(7, 10), slice(199, 200)):
        part = run_on_gpu(q[some], k[some], v[some], num_splits=1)
        assert_same_bits(part, (o[some], lse[some]))


@pytest.mark.gpu
def test_calls_of_different_numbers_of_parts_are_not_mistaken_for_each_other(cupy):
    q, k, v = (cupy.asarray(x) for x in qkv(7, 2, 1, 64, seqlen_k=4000))
    expected = {n: attention(q, k, v, num_splits=n) for n in (None, 1, 2, 30)}
    assert any((expected[1] != expected[n]).any() for n in (2, 30))
    for n, o in expected.items():
        assert (attention(q, k, v, num_splits=n) == o).all()
    with pytest.raises(TypeError, match="num_splits is True"):
        attention(q, k, v, num_splits=True)


@pytest.mark.gpu
@pytest.mark.kernel("forward_sm80", "combine")
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_merge_waits_for_all_parts(cupy, dtype):
    """It begins while they are computed, and finds those of the call before in the workspace."""
    sizes = {"seqlen_k": 16384, "heads_k": 2, "dtype": dtype}
    sets = [[cupy.asarray(x) for x in qkv(seed, 2, 8, 1, 128, **sizes)] for seed in (8, 9)]
    expected = []
    for arrays in sets:
        expected.append(attention(*arrays, num_splits=16, return_lse=True))
        cupy.cuda.Device().synchronize()
    results = [attention(*sets[n % 2], num_splits=16, return_lse=True) for n in range(60)]
    for n, result in enumerate(results):
        for x, wanted in zip(result, expected[n % 2], strict=True):
            assert (x == wanted).all()


@pytest.mark.gpu
@pytest.mark.kernel("forward_sm80")
def test_streams_and_graphs_count_apart(cupy):
    """Who merges is found out by counting: calls side by side must not share a count."""
    sizes = {"seqlen_k": 8192, "heads_k": 2, "dtype": np.float16}
    sets = [[cupy.asarray(x) for x in qkv(seed, 2, 8, 1, 64, **sizes)] for seed in range(10, 16)]
    expected = [attention(*arrays, num_splits=32) for arrays in sets]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in sets]
    graphs, outs = [], [cupy.zeros_like(o) for o in expected]
    cupy.cuda.Device().synchronize()
    for stream, arrays, out in zip(streams, sets, outs, strict=True):
        with stream:
            stream.begin_capture()
            attention(*arrays, num_splits=32, out=out)
            graphs.append(stream.end_capture())
    results = [[] for _ in sets]
    for _ in range(30):
        for n, stream in enumerate(streams):
            with stream:
                results[n].append(attention(*sets[n], num_splits=32))
                graphs[n].launch(stream)
    cupy.cuda.Device().synchronize()
    for n, wanted in enumerate(expected):
        assert (outs[n] == wanted).all()
        for o in results[n]:
            assert (o == wanted).all()
