# SPDX-License-Identifier: MIT
"""What is forward_simt's own: any head dim, its chunks of it, sums in parts, parts of the keys.

The contract of attention is tested for all kernels alike in test_forward.py and test_cases.py.
"""

import hostcuda
import numpy as np
import pytest
from hostcuda.probes import MARKS as HOSTCUDA
from paths import assert_same_bits, normal, qkv

from cupyflash import _dtypes, _problem, _simt, devices
from cupyflash.plan import plan
from cupyflash.testing import DTYPES, Problem, assert_attention_close

pytestmark = pytest.mark.kernel("forward_simt")
H200 = devices.named_device("H200")


def on_host(q, k, v, *, splits=1, schedules=False, **options):
    """(o, lse) of the kernel on the CPU, with the keys in ``splits`` parts."""
    problem = _problem.from_arrays("attention", q, k, v, **options)
    tiles = _simt.tiles_for(problem)
    work = _simt.parts(problem, tiles, H200, splits)
    o = hostcuda.empty(problem.out_shape, problem.dtype)
    lse = hostcuda.empty(problem.out_shape[:-1], problem.acc_dtype)
    for launch in _simt.records(problem, tiles, work, o, lse, hostcuda):
        (hostcuda.run_schedules if schedules else hostcuda.run)(launch)
    return o, lse


def check(q, k, v, **options):
    actual = on_host(q, k, v, **options)
    for own in ("splits", "schedules"):
        options.pop(own, None)
    assert_attention_close(actual, Problem(q, k, v, options))
    return actual


def columns(v, head_dim_v):
    """v with so many columns."""
    return np.resize(v, (*v.shape[:-1], head_dim_v))


def changes(seqlen_q, seqlen_k, dtype):
    """Options that change scores or hide some of them."""
    rng = np.random.default_rng(5)
    return {
        "mask": rng.random((seqlen_q, seqlen_k)) < 0.7,
        "bias": rng.standard_normal((seqlen_q, seqlen_k)).astype(dtype),
        "softcap": 4.0,
        "alibi_slopes": [0.1, 0.02],
        "window": (seqlen_k // 2, 3),
    }


class TestOnHostCuda:
    pytestmark = HOSTCUDA

    @pytest.mark.parametrize("name", DTYPES)
    @pytest.mark.parametrize(("head_dim", "n_q", "n_k"), [(300, 70, 150), (1000, 9, 140)])
    def test_large_head_dims(self, name, head_dim, n_q, n_k):
        q, k, v = qkv(1, 1, 2, n_q, head_dim, seqlen_k=n_k, heads_k=1, dtype=_dtypes.named(name))
        check(q, k, v, causal=True)
        check(q, k, v, **changes(n_q, n_k, q.dtype))

    @pytest.mark.parametrize("name", DTYPES)
    def test_no_limit_of_shared_memory(self, name):
        """Algorithm 1 can't hold one query and one key of these."""
        q, k, v = qkv(2, 1, 5, 5000, seqlen_k=40, dtype=_dtypes.named(name))
        check(q, k, v)

    @pytest.mark.parametrize("name", DTYPES)
    @pytest.mark.parametrize("dims", [(300, 5), (5, 300), (64, 1100), (129, 128), (300, 0)])
    def test_values_of_other_columns_than_keys(self, name, dims):
        q, k, v = qkv(3, 1, 9, dims[0], seqlen_k=150, dtype=_dtypes.named(name))
        check(q, k, columns(v, dims[1]))

    @pytest.mark.parametrize("name", DTYPES)
    @pytest.mark.parametrize("head_dim", [40, 300])
    def test_no_schedule_changes_a_bit(self, name, head_dim):
        q, k, v = qkv(4, 1, 2, 70, head_dim, seqlen_k=150, dtype=_dtypes.named(name))
        check(q, k, v, causal=True, schedules=True)

    @pytest.mark.parametrize("general", [False, True])
    def test_no_data_race(self, general):
        q, k, v = qkv(5, 1, 1, 40, 300, seqlen_k=150, dtype=np.float16)
        options = {"softcap": 3.0} if general else {}
        problem = _problem.from_arrays("attention", q, k, v, **options)
        tiles = _simt.tiles_for(problem)
        o = hostcuda.empty((1, 1, 40, 300), q.dtype)
        work = _simt.parts(problem, tiles, H200, 1)
        (launch,) = _simt.records(problem, tiles, work, o, None, hostcuda)
        hostcuda.run(launch, sanitizer="thread")
        assert np.isfinite(o.astype(float)).all()

    @pytest.mark.parametrize("name", DTYPES)
    @pytest.mark.parametrize("splits", [2, 3, 7])
    def test_parts_of_the_keys_are_merged(self, name, splits):
        q, k, v = qkv(6, 2, 2, 5, 40, seqlen_k=230, dtype=_dtypes.named(name))
        # The first entry has keys in the first part only, the last query of none in the others.
        check(q, k, v, splits=splits, causal=True, seqlens_k=np.array([20, 230]))
        check(q, k, columns(v, 600), splits=splits)

    def test_a_row_without_keys_stays_empty_when_merged(self):
        q, k, v = qkv(7, 1, 1, 9, 40, seqlen_k=6)
        o, lse = on_host(q, k, v, splits=2, causal=True)
        assert (o[..., :3, :] == 0).all()
        assert (lse[..., :3] == -np.inf).all()
        assert np.isfinite(lse[..., 3:]).all()

    def test_a_row_that_sees_nothing_beside_one_that_sees_nan(self):
        q, k, v = qkv(8, 1, 1, 4, 40, seqlen_k=6)
        v[..., 2, :] = np.nan
        mask = np.ones((4, 6), bool)
        mask[1] = False
        o, lse = on_host(q, k, v, mask=mask)
        assert np.isnan(o[0, 0, [0, 2, 3]]).all()
        assert (o[0, 0, 1] == 0).all()
        assert lse[0, 0, 1] == -np.inf

    def test_sums_over_head_dim_are_made_in_parts(self):
        """One plain float32 sum of 20,000 positive products errs by more than three times this."""
        rng = np.random.default_rng(9)
        q, k = (rng.random((1, 1, n, 20_000), dtype=np.float32) for n in (64, 1))
        _, lse = on_host(q, k, np.ones((1, 1, 1, 8), np.float32), softmax_scale=1.0)
        exact = q.astype(np.float64)[0, 0] @ k.astype(np.float64)[0, 0, 0]
        error = np.linalg.norm(lse[0, 0] - exact) / np.linalg.norm(exact)
        assert error < 4e-7

    def test_sums_over_keys_are_made_in_parts(self):
        """One plain float32 sum over 16,384 keys errs by more than three times this."""
        rng = np.random.default_rng(10)
        q, k = np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 16_384, 1), np.float32)
        v = 1 + rng.random((1, 1, 16_384, 64), dtype=np.float32)
        o, _ = on_host(q, k, v)
        exact = v.astype(np.float64).mean(axis=2)
        assert np.linalg.norm(o[:, :, 0] - exact) / np.linalg.norm(exact) < 3e-7

    @pytest.mark.parametrize("name", ["float16", "float64"])
    def test_strides_change_no_bit_beyond_256_columns(self, name):
        q, k, v = qkv(11, 2, 2, 20, 301, seqlen_k=40, dtype=_dtypes.named(name))
        expected = check(q, k, v)
        backwards = [np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1] for x in (q, k, v)]
        assert_same_bits(on_host(*backwards), expected)
        swapped = [np.ascontiguousarray(x.swapaxes(1, 3)).swapaxes(1, 3) for x in (q, k, v)]
        assert_same_bits(on_host(*swapped), expected)


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_left_to_it(name):
    def chosen(device, head_dim, head_dim_v=None):
        sizes = {"seqlen_q": 4096, "heads_q": 16, "dtype": name}
        return plan(**sizes, head_dim=head_dim, head_dim_v=head_dim_v, device=device).kernel

    for device in devices.DEVICES.values():
        old = device.compute_capability < (8, 0)
        for head_dim in (1, 64, 256):
            assert (chosen(device, head_dim) == "forward_simt") == old
        for dims in ((257, 257), (257, 64), (4141, 4141), (100_000, 3)):
            assert chosen(device, *dims) == "forward_simt"


@pytest.mark.parametrize("device", devices.DEVICES.values(), ids=lambda device: device.name)
def test_tiles_fit_every_device(device):
    for name in DTYPES:
        for head_dim_v in (1, 128, 129, 5000):
            p = plan(seqlen_q=999, head_dim=300, head_dim_v=head_dim_v, dtype=name, device=device)
            assert 0 < p.smem_bytes <= device.smem_block_bytes
            assert p.parts.slices == -(-head_dim_v // p.tiles.head_dim_v)


def test_a_plan_explains_it():
    p = plan(seqlen_q=2048, head_dim=512, heads_q=16, dtype="float32", device="T4")
    lines = str(p).splitlines()
    assert "tiles hold     head_dim any in chunks of 16, head_dim_v 512" in lines
    assert not any(line.startswith("heads at a time") for line in lines)
    few = plan(seqlen_q=1, seqlen_k=30_000, head_dim=64, device="T4")
    assert few.parts.splits > 8
    assert "merged by combine" in str(few)
    assert "no fast float64" in str(plan(seqlen_q=9, head_dim=64, dtype="float64", device="T4"))


def test_refusals():
    for lengths in ({"seqlen_q": 2**29}, {"seqlen_q": 1, "seqlen_k": 2**29}):
        sizes = {"head_dim": 64, "device": "T4"} | lengths
        with pytest.raises(ValueError, match="'forward_simt' takes sequences of less than 536870"):
            plan(**sizes, kernel="forward_simt")
        assert plan(**sizes).kernel == "fa1_forward"


@pytest.mark.gpu
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 128, 256, 300, 1000, 5000])
def test_on_a_gpu(cupy, name, head_dim):
    from paths import run_on_gpu

    dtype = _dtypes.named(name)
    q, k, v = qkv(13, 1, 2, 200, head_dim, seqlen_k=311, heads_k=1, dtype=dtype)
    for options in (
        {},
        {"causal": True},
        {"seqlens_k": np.array([100])},
        changes(200, 311, dtype),
    ):
        actual = run_on_gpu(q, k, v, kernel="forward_simt", **options)
        assert_attention_close(actual, Problem(q, k, v, options))
    few = q[:, :, :3]
    assert_attention_close(run_on_gpu(few, k, v, kernel="forward_simt"), Problem(few, k, v))


@pytest.mark.gpu
def test_offsets_past_31_bits(cupy):
    from cupyflash import attention

    rows, row = 90, 2**25 + 8  # the last row begins 3e9 elements behind the first
    memory = cupy.zeros(rows * row, cupy.float16)
    q, k, v = (normal((14, n), rows, 300).astype(np.float16) for n in range(3))
    apart = cupy.lib.stride_tricks.as_strided(memory, (rows, 300), (2 * row, 2))
    for name, x in (("q", q), ("k", k), ("v", v)):
        apart[...] = cupy.asarray(x)
        arrays = {n: cupy.asarray(a) for n, a in (("q", q), ("k", k), ("v", v))} | {name: apart}
        o = attention(**arrays, kernel="forward_simt")
        assert_attention_close(cupy.asnumpy(o), Problem(q, k, v).reference[0])
    attention(*map(cupy.asarray, (q, k, v)), kernel="forward_simt", out=apart)
    assert_attention_close(cupy.asnumpy(apart), Problem(q, k, v).reference[0])
