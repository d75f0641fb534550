# SPDX-License-Identifier: MIT
"""What the host layer's instructions compute, and how kernels become modules."""

from __future__ import annotations

import hostcuda
import ml_dtypes
import numpy as np
import pytest
from hostcuda.modules import CompileError, cache_folder
from hostcuda.probes import MARKS, floats, kernel, record

pytestmark = MARKS


# ---- what the instructions compute ---------------------------------------------------------------


def test_shuffles():
    source = kernel(
        "float v = x[t]; y[t] = __shfl_sync(0xffffffffu, v, 5, 8);\n"
        "y[64 + t] = __shfl_up_sync(0xffffffffu, v, 3, 16);\n"
        "y[128 + t] = __shfl_down_sync(0xffffffffu, v, 3, 16);\n"
        "y[192 + t] = __shfl_xor_sync(0xffffffffu, v, 9);\n"
        "y[256 + t] = float(__shfl_sync(0xffffffffu, double(v) + 1e-12, t + 1) - double(t));\n"
        "y[320 + t] = __half2float(__shfl_xor_sync(0xffffffffu, __float2half(v), 1));\n"
        "if (t % 32 < 16) y[384 + t] = __shfl_xor_sync(0xffffu, v, 8);"
    )
    x, y = floats(64), floats(448, 0)
    hostcuda.run_schedules(record(x, y), source=source)
    t = np.arange(64)
    up = np.where(t % 16 >= 3, t - 3, t)
    down = np.where(t % 16 + 3 < 16, t + 3, t)
    got = y.reshape(7, 64)
    np.testing.assert_array_equal(got[0], t // 8 * 8 + 5)
    np.testing.assert_array_equal(got[1], up)
    np.testing.assert_array_equal(got[2], down)
    np.testing.assert_array_equal(got[3], t ^ 9)
    expected = (t // 32 * 32 + (t + 1) % 32 - t).astype(np.float64) + 1e-12
    np.testing.assert_allclose(got[4], expected, rtol=1e-6, atol=2e-14)
    np.testing.assert_array_equal(got[5], t ^ 1)
    np.testing.assert_array_equal(got[6], np.where(t % 32 < 16, t ^ 8, 0))


def test_votes_reductions_and_counts():
    source = kernel(
        "int* const r = reinterpret_cast<int*>(y); const bool odd = x[t] > 0; "
        "const unsigned all = ~0u;\n"
        "r[t] = __ballot_sync(all, odd); r[64 + t] = __any_sync(all, odd); "
        "r[128 + t] = __all_sync(all, odd);\n"
        "r[192 + t] = __reduce_add_sync(all, int(x[t])); "
        "r[256 + t] = __reduce_max_sync(all, int(x[t]));\n"
        "r[320 + t] = __syncthreads_count(odd); r[384 + t] = __syncthreads_or(odd);\n"
        "r[448 + t] = __syncthreads_and(odd); "
        "r[512 + t] = __reduce_min_sync(all, unsigned(int(x[t])));"
    )
    rng = np.random.default_rng(1)
    x = rng.integers(-4, 5, 64).astype(np.float32)
    x[32:] = abs(x[32:]) + 1
    y = floats(576, 0)
    hostcuda.run_schedules(record(x, y), source=source)
    got = y.view(np.int32).reshape(9, 2, 32)
    warps = x.reshape(2, 32)
    odd = warps > 0
    ballot = (odd * (1 << np.arange(32, dtype=np.uint64))).sum(1).astype(np.uint32).view(np.int32)
    unsigned = warps.astype(np.int32).view(np.uint32).min(1).view(np.int32)
    per_warp = [ballot, odd.any(1), odd.all(1), warps.sum(1), warps.max(1)]
    whole = [[odd.sum()] * 2, [odd.any()] * 2, [odd.all()] * 2]
    for row, expected in zip(got, [*per_warp, *whole, unsigned], strict=True):
        np.testing.assert_array_equal(row, np.broadcast_to(np.reshape(expected, (2, 1)), (2, 32)))


def test_exited_lanes_and_ragged_warps_are_not_waited_for():
    source = kernel("if (t % 32 >= 20) return; y[t] = float(__ballot_sync(0xffffffffu, 1));")
    y = floats(40, 0)
    hostcuda.run_schedules(record(floats(1), y, threads=40), source=source)
    expected = np.where(
        np.arange(40) % 32 >= 20, 0, np.where(np.arange(40) < 32, 2**20 - 1, 2**8 - 1)
    )
    np.testing.assert_array_equal(y, expected)


def test_atomics():
    source = kernel(
        "__shared__ int top; __shared__ double sum; if (t == 0) top = -1, sum = 0; "
        "__syncthreads();\n"
        "atomicMax(&top, int(x[t])); atomicAdd(&sum, double(x[t])); atomicAdd(y, x[t]);\n"
        "const unsigned turn = atomicCAS(reinterpret_cast<unsigned*>(y + 3), 0u, unsigned(t + "
        "1));\n"
        "if (turn == 0) y[4] = 1; __syncthreads(); if (t == 0) y[1] = top, y[2] = float(sum);"
    )
    x, y = floats(64), floats(5, 0)
    hostcuda.run(record(x, y), source=source)
    hostcuda.run(record(x, y * 0), source=source, sanitizer="thread")
    np.testing.assert_array_equal(y[[0, 1, 2, 4]], [2016, 63, 2016, 1])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_arithmetic_rounds_as_numpy_does(dtype):
    half = dtype is np.float16
    kind, down, up = (
        ("__half", "__float2half", "__half2float")
        if half
        else ("__nv_bfloat16", "__float2bfloat16", "__bfloat162float")
    )
    source = kernel(
        f"for (int64 i = t; i < n; i += blockDim.x) {{ const {kind} a = {down}(x[i]);\n"
        f"y[i] = {up}(a); y[n + i] = {up}(a * a); y[2 * n + i] = {up}(a + {down}(1.0f)); }}"
    )
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.standard_normal(4000), 2.0 ** rng.uniform(-30, 15, 90), [0, np.inf]])
    x = x.astype(np.float32)
    y = floats(3 * len(x), 0)
    hostcuda.run(record(x, y, n=len(x)), source=source)
    with np.errstate(over="ignore"):
        a = x.astype(dtype)
        expected = [a, a * a, a + dtype(1)]
    for got, want in zip(y.reshape(3, -1), expected, strict=True):
        np.testing.assert_array_equal(got, want.astype(np.float32))


def test_indices_beyond_16_bits_and_offsets_beyond_32():
    source = kernel(
        "const int64 block = blockIdx.x + int64(gridDim.x) * blockIdx.y;\n"
        "if (block == n) y[threadIdx.y] = threadIdx.z + 10 * warpSize;\n"
        "y[4] = gridDim.x; float* const far = y - (n << 20) * 4; "
        "if (block == 0) far[(n << 20) * 4 + 5] = 1;"
    )
    y = floats(6, 0)
    grid = (70000, 2, 1)
    hostcuda.run(record(floats(1), y, n=139_999, threads=(1, 4, 1), grid=grid), source=source)
    np.testing.assert_array_equal(y, [320, 320, 320, 320, 70000, 1])


def test_print_and_options():
    source = kernel('if (t == 3) printf("%d %s\\n", t, WORD);')
    printed = hostcuda.run(record(floats(1), floats(1), options=('-DWORD="seen"',)), source=source)
    assert printed == "3 seen\n"


def test_warpgroup_collective_and_named_halves():
    source = '#include "ptx/named_barrier.cuh"\n' + kernel(
        'const float sum = host::warpgroup_collective<float>("sum", host::Place::here(), x[t],\n'
        "  [](const float* v, host::Members, float* r) { float s = 0; for (int i = 0; "
        "i < 128; ++i) s += v[i];\n"
        "    for (int i = 0; i < 128; ++i) r[i] = s; });\n"
        "__shared__ float s[2]; if (t % 128 == 0) s[t / 128] = sum;\n"
        "if (t < 128) cupyflash::named_barrier_arrive(2, 256); "
        "else cupyflash::named_barrier_sync(2, 256);\n"
        "if (t >= 128) y[t] = s[0] + sum; else y[t] = sum;"
    )
    x, y = floats(256), floats(256)
    hostcuda.run_schedules(record(x, y, threads=256), source=source)
    low, high = x[:128].sum(), x[128:].sum()
    np.testing.assert_array_equal(y, np.repeat([low, low + high], 128).astype(np.float32))


# ---- building ------------------------------------------------------------------------------------


def test_modules_are_kept_by_content(tmp_path, monkeypatch):
    shared = cache_folder().resolve()
    monkeypatch.setenv("CUPYFLASH_HOSTCUDA_CACHE", str(tmp_path))
    (tmp_path / "k" / "common").mkdir(parents=True)
    kernels = tmp_path / "k"
    for base in shared.glob("base-*"):
        (tmp_path / base.name).symlink_to(base)
    header = kernels / "common" / "value.cuh"
    (kernels / "probe.cu").write_text('#include "common/value.cuh"\n' + kernel("y[t] = kValue;"))
    y = floats(64)
    for value in (1, 2, 2):
        header.write_text(f"constexpr int kValue = {value};\n")
        hostcuda.run(record(y, y), kernels=kernels)
        assert (y == value).all()
    modules = [p for p in tmp_path.iterdir() if p.name.startswith("probe-") and p.is_dir()]
    assert len(modules) == 2
    assert hostcuda.compile_many([record(y, y)] * 3, kernels=kernels) == 1
    assert not list(tmp_path.glob("tmp-*"))


def test_compile_error_shows_the_compiler_s_message():
    with pytest.raises(CompileError, match=r"probe.cu:\d+:\d+: error: .*undeclared_name"):
        hostcuda.run(record(floats(1), floats(1)), source=kernel("y[t] = undeclared_name;"))


def test_ptx_header_without_a_twin(tmp_path):
    (tmp_path / "ptx").mkdir()
    (tmp_path / "ptx" / "lone.cuh").write_text("")
    (tmp_path / "probe.cu").write_text('#include "ptx/lone.cuh"\n' + kernel(""))
    with pytest.raises(CompileError, match=r"ptx/lone.cuh has no twin in tests/hostcuda/ptx/"):
        hostcuda.run(record(floats(1), floats(1)), kernels=tmp_path)
