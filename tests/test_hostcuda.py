# SPDX-License-Identifier: MIT
"""The host layer itself: each kind of fault is planted in a tiny kernel and must be reported."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import hostcuda
import numpy as np
import pytest
from hostcuda import HostFault, Schedule
from hostcuda.modules import compiled, source_of
from hostcuda.probes import MARKS, REASON, REQUIRED, floats, kernel, record

pytestmark = MARKS


def test_unavailable_only_where_that_is_allowed():
    assert not (REQUIRED and REASON), REASON


# ---- faults that end the launch: body, launch arguments, what the report says --------------------

_BARRIER = "__shared__ cupyflash::Mbarrier barrier; "
FAULTS = {
    "read past an array": (
        "y[t] = x[fault ? n : t];",
        {"n": 64},
        "heap-buffer-overflow.*READ of size 4.*thread \\(0, 0, 0\\)",
    ),
    "read before an array": (
        "y[t] = x[t - (fault ? 1 : 0)];",
        {},
        "AddressSanitizer.*READ of size 4",
    ),
    "write past an array": (
        "y[t + (fault && t == 63)] = x[t];",
        {},
        "heap-buffer-overflow.*WRITE of size 4.*block \\(0, 0, 0\\), thread \\(63, 0, 0\\)",
    ),
    "write past dynamic shared memory": (
        "extern __shared__ float s[]; s[t + (fault ? 1 : 0)] = x[t]; "
        "y[t] = s[t + (fault ? 1 : 0)];",
        {"smem": 256},
        "heap-buffer-overflow.*WRITE of size 4",
    ),
    "write past static shared memory, by pointer": (
        "__shared__ float a[64]; __shared__ float b[64]; float* q = a; b[t] = 0;\n"
        "q[t + (fault ? 1 : 0)] = x[t]; y[t] = a[t] + b[t];",
        {},
        "global-buffer-overflow.*WRITE of size 4",
    ),
    "write past static shared memory, in a template": (
        "auto f = [&](auto one) { __shared__ float a[64]; a[t + (fault ? int(one) : 0)] = x[t];\n"
        "return a[t]; }; y[t] = f(1) + f(1u);",
        {},
        "index 64 out of bounds|global-buffer-overflow",
    ),
    "misaligned vector read": (
        "const float4 v = *reinterpret_cast<const float4*>(x + (fault ? 1 : 4));\n"
        "y[t] = v.x + v.w;",
        {},
        "thread \\(0, 0, 0\\).*misaligned address .* requires 16 byte alignment",
    ),
    "misaligned vector write": (
        "if (t < 8) *reinterpret_cast<float2*>(y + 2 * t + (fault ? 1 : 0)) = float2{x[t], x[t]};",
        {},
        "misaligned address .* requires 8 byte alignment",
    ),
    "32-bit index overflow": (
        "int rows = int(n); y[t] = x[t] + (fault ? float(rows * rows) : 0.0f);",
        {"n": 65536},
        "signed integer overflow",
    ),
    "barrier that half of the block reaches": (
        "if (t < 32 || !fault) __syncthreads(); y[t] = x[t];",
        {},
        "deadlock.*threads 0-31: wait in __syncthreads at probe.cu:\\d+.*threads 32-63: exited"
        ".*barrier 0: 32 of 64 threads",
    ),
    "early return before a barrier": (
        "if (fault && t == 5) return; __syncthreads(); y[t] = x[t];",
        {},
        "deadlock.*threads 0-4: wait in __syncthreads.*threads 5-5: exited.*threads 6-63: wait",
    ),
    "two barriers in two branches": (
        "if (t < 32 || !fault) {\n__syncthreads(); }\nelse {\n__syncthreads(); }\ny[t] = x[t];",
        {},
        "divergent barrier.*others of its block in __syncthreads at probe.cu",
    ),
    "shuffle that one lane skips": (
        "float v = x[t]; if (!fault || t % 32 != 3) v = __shfl_xor_sync(0xffffffffu, v, 1);\n"
        "__syncthreads(); y[t] = v;",
        {},
        "deadlock.*threads 0-2: wait in __shfl_xor_sync.*threads 3-3: wait in __syncthreads"
        ".*mask 0xffffffff: 31 have arrived",
    ),
    "shuffle by a lane outside the mask": (
        "const unsigned mask = fault ? 0xffffu : 0xffffffffu; y[t] = __shfl_sync(mask, x[t], 0);",
        {},
        "the calling thread is not in the mask",
    ),
    "wait for what never comes": (
        "__shared__ int flag; if (t == 0) flag = !fault; __syncthreads();\n"
        'host::wait_until([&] { return flag == 1; }, "flag"); y[t] = x[t];',
        {},
        "deadlock.*threads 0-63: wait in flag at probe.cu:\\d+",
    ),
    "poll for what never comes": (
        "__shared__ int flag; if (t == 0) flag = !fault; __syncthreads();\n"
        'while (flag != 1) host::yield("flag"); y[t] = x[t];',
        {},
        "deadlock.*threads 0-63: poll flag at probe.cu:\\d+",
    ),
    "named barrier with a wrong count": (
        "if (t < 32) cupyflash::named_barrier_sync(1, fault ? 64 : 32); y[t] = x[t];",
        {},
        "deadlock.*threads 0-31: wait in named_barrier_sync.*barrier 1: 32 of 64 threads",
    ),
    "named barrier with two counts": (
        "cupyflash::named_barrier_sync(1, fault && t < 32 ? 32 * 3 : 64); y[t] = x[t];",
        {},
        "barrier 1 joined for 64 threads; others joined it for 96",
    ),
    "mbarrier that waits for one arrival too many": (
        _BARRIER + "if (t == 0) mbarrier_init(barrier, 64 + fault); __syncthreads();\n"
        "mbarrier_arrive(barrier);\nmbarrier_wait(barrier, 0); y[t] = x[t];",
        {},
        "deadlock.*threads 0-63: wait in mbarrier_wait at probe.cu:\\d+",
    ),
    "mbarrier that waits for bytes that nobody copies": (
        _BARRIER + "if (t == 0) mbarrier_init(barrier, 1); __syncthreads();\n"
        "if (t == 0) mbarrier_arrive_expect_tx(barrier, fault ? 128 : 0);\n"
        "if (t >= 32) mbarrier_wait(barrier, 0); __syncthreads(); y[t] = x[t];",
        {},
        "deadlock.*threads 0-31: wait in __syncthreads.*threads 32-63: wait in mbarrier",
    ),
    "mbarrier whose buffer is never given back": (
        # A ring of one buffer; the reader leaves out its last arrival but one.
        "extern __shared__ float s[]; __shared__ cupyflash::Mbarrier full, empty;\n"
        "if (t == 0) mbarrier_init(full, 32), mbarrier_init(empty, 32); __syncthreads();\n"
        "for (int i = 0; i < 4; ++i) {\n"
        "if (t < 32) { mbarrier_wait(empty, i % 2 ^ 1); s[t] = x[t] + i; mbarrier_arrive(full); }\n"
        "else { mbarrier_wait(full, i % 2); y[t - 32] = s[t - 32];\n"
        "if (!fault || i != 2) mbarrier_arrive(empty); } }",
        {"smem": 256},
        "deadlock.*threads 0-31: wait in mbarrier_wait.*threads 32-63: wait in mbarrier",
    ),
    "mbarrier waited for by the wrong parity": (
        _BARRIER + "if (t == 0) mbarrier_init(barrier, 64); __syncthreads();\n"
        "mbarrier_arrive(barrier); mbarrier_wait(barrier, 0);\n"
        "mbarrier_wait(barrier, fault); y[t] = x[t];",
        {},
        "deadlock.*threads 0-63: wait in mbarrier_wait",
    ),
    "assertion": ("assert(!fault || t != 7); y[t] = x[t];", {}, "assertion failed.*\\(7, 0, 0\\)"),
    "trap": ("if (fault) __trap(); y[t] = x[t];", {}, "__trap.*at probe.cu:\\d+"),
}


def fault_source(name: str) -> str:
    body = FAULTS[name][0]
    used = [header for header in ("named_barrier", "mbarrier") if header in body]
    return "".join(f'#include "ptx/{header}.cuh"\n' for header in used) + kernel(body)


@pytest.fixture(scope="module", autouse=True)
def modules():
    """Most modules of this file, compiled two at a time."""
    any_record = record(floats(1), floats(1))
    races = [race_source(name) for name in RACES]
    wanted = [(source, "thread") for source in races]
    wanted += [(source, "address") for source in [*map(fault_source, FAULTS), *races]]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda w: compiled(source_of(any_record, source=w[0]), w[1]), wanted))


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_reported(name):
    _, arguments, report = FAULTS[name]
    x, y = floats(64), floats(64, np.nan)
    hostcuda.run(record(x, y, **arguments), source=fault_source(name))
    assert not np.isnan(y[:16]).any()
    start = time.monotonic()
    with pytest.raises(HostFault) as caught:
        hostcuda.run(record(x, y, fault=1, **arguments), source=fault_source(name))
    assert re.search(report, caught.value.report, re.S), caught.value.report
    assert time.monotonic() - start < 10
    # The process that died is replaced.
    hostcuda.run(record(x, y, **arguments), source=fault_source(name))


def test_fault_says_where_in_the_grid():
    x, y = floats(64), floats(64)
    source = kernel("if (blockIdx.y == 2 && threadIdx.z == 1) y[n] = 1;")
    fault = record(x, y, n=64, grid=(1, 3, 1), threads=(4, 4, 2))
    with pytest.raises(HostFault, match=r"block \(0, 2, 0\), thread \(0, 0, 1\)"):
        hostcuda.run(fault, source=source)


def test_endless_loop_ends():
    source = kernel("volatile int64 go = fault; while (go) {} y[t] = x[t];")
    x, y = floats(64), floats(64)
    hostcuda.run(record(x, y), source=source)
    with pytest.raises(HostFault, match=r"no answer within 0.5 s"):
        hostcuda.run(record(x, y, fault=1), source=source, timeout=0.5)


# ---- arrays --------------------------------------------------------------------------------------


def test_strided_view_is_guarded_inside_and_around():
    base = floats(8 * 16)
    y = base.reshape(8, 16)[::2, 3:11]  # 4 rows of 8, 32 apart
    before = base.copy()
    source = kernel(
        "const int64 at = t / 8 * 32 + t % 8 + (fault && t == 31 ? n : 0); y[at] = x[t];"
    )
    x = -floats(32)
    hostcuda.run(record(x, y, threads=32), source=source)
    np.testing.assert_array_equal(y, x.reshape(4, 8))
    outside = np.ones(base.shape, bool)
    outside.reshape(8, 16)[::2, 3:11] = False
    np.testing.assert_array_equal(base[outside], before[outside])
    with pytest.raises(HostFault, match="heap-buffer-overflow"):
        hostcuda.run(record(x, y, threads=32, fault=1, n=1), source=source)
    with pytest.raises(
        HostFault, match=r"a write between the elements of y, 380 bytes from its first"
    ):
        hostcuda.run(record(x, y, threads=32, fault=1, n=-8), source=source)


def test_gaps_of_an_input_are_nan():
    x, y = floats(64)[::2], floats(32, 0)
    hostcuda.run(record(x, y, threads=32), source=kernel("y[t] = x[2 * t];"))
    np.testing.assert_array_equal(y, x)
    hostcuda.run(record(x, y, threads=31), source=kernel("y[t] = x[2 * t + 1];"))
    assert np.isnan(y[:31]).all()


def test_negative_and_zero_strides():
    x, y = floats(64)[::-1], floats(64, 0)
    hostcuda.run(record(x, y), source=kernel("y[t] = x[-t];"))
    np.testing.assert_array_equal(y, x)
    x = np.broadcast_to(np.float32(7), 64)
    hostcuda.run(record(x, y), source=kernel("y[t] = x[0];"))
    assert (y == 7).all()
    with pytest.raises(HostFault, match="heap-buffer-overflow"):
        hostcuda.run(record(x, y), source=kernel("y[t] = x[t];"))


def test_alignment_is_that_of_the_view_in_its_allocation():
    base = floats(128)
    source = kernel("if (t < 8) y[t] = reinterpret_cast<const float4*>(x)[t].y;")
    y = floats(64)
    hostcuda.run(record(base[4:], y), source=source)
    np.testing.assert_array_equal(y[:8], base[5:37:4])
    with pytest.raises(HostFault, match="misaligned"):
        hostcuda.run(record(base[1:], y), source=source)


def test_inputs_are_not_written():
    source = kernel("x[t] = 1; y[t] = 1;")
    x, y = floats(64), floats(64)
    with pytest.raises(HostFault, match="a write to the input x"):
        hostcuda.run(record(x, y), source=source, writes=["y"])
    x.flags.writeable = False
    with pytest.raises(HostFault, match="a write to the input x"):
        hostcuda.run(record(x, y), source=source)
    with pytest.raises(HostFault, match="a write to the input x"):
        hostcuda.run_schedules(record(x, y), source=source)


def test_one_array_passed_twice_is_one_array():
    y = floats(64)
    hostcuda.run(record(y, y), source=kernel("y[t] = 1; x[t] += 1;"))
    assert (y == 2).all()


def test_what_a_gpu_refuses():
    x, y = floats(1), floats(1)
    source = kernel("")
    with pytest.raises(ValueError, match="grid is"):
        hostcuda.run(record(x, y, grid=(1, 65536, 1)), source=source)
    with pytest.raises(ValueError, match="1056 threads"):
        hostcuda.run(record(x, y, threads=(33, 32, 1)), source=source)
    with pytest.raises(ValueError, match="smem_bytes"):
        hostcuda.run(record(x, y, smem=228 * 1024), source=source)


def test_params_of_another_size():
    wrong = record(floats(64), floats(64))
    wrong.params += bytes(8)
    with pytest.raises(HostFault, match="params have 40 bytes, the kernel's parameter has 32"):
        hostcuda.run(wrong, source=kernel(""))


# ---- barriers that are missing -------------------------------------------------------------------

# What a thread needs of another: `fault` leaves out the barrier between them.
RACES = {
    "read after write": (
        "extern __shared__ float s[]; s[t] = x[t]; if (!fault) __syncthreads();\n"
        "y[t] = s[(t + 1) % blockDim.x];"
    ),
    "read after write, downwards": (
        "extern __shared__ float s[]; s[t] = x[t]; if (!fault) __syncthreads();\n"
        "y[t] = t ? s[t - 1] : 0.0f;"
    ),
    "overwritten while it is read": (
        "extern __shared__ float s[]; s[t] = x[t]; __syncthreads(); "
        "float v = s[(t + 32) % blockDim.x];\n"
        "if (!fault) __syncthreads(); s[t] = v + 1; __syncthreads(); y[t] = s[t];"
    ),
    "in a loop with shuffles, between warps": (
        "extern __shared__ float s[]; float sum = 0;\n"
        "for (int i = 0; i < 4; ++i) {\n"
        "  s[t] = x[t] + i; __syncthreads();\n"
        "  float v = s[(t + 32) % blockDim.x];\n"
        "  for (int o = 16; o; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);\n"
        "  sum += v; if (!fault) __syncthreads(); }\n"
        "y[t] = sum;"
    ),
    "between the lanes of a warp": (
        "extern __shared__ float s[]; s[t] = x[t]; if (!fault) __syncwarp(); y[t] = s[t ^ 1];"
    ),
    "named barrier of the wrong half": (
        "extern __shared__ float s[]; const int half = t / 32; s[t] = x[t];\n"
        "cupyflash::named_barrier_sync(1 + half, 32); if (!fault) __syncthreads();\n"
        "y[t] = s[(t + 32) % 64];"
    ),
}


def race_source(name: str) -> str:
    return '#include "ptx/named_barrier.cuh"\n' + kernel(RACES[name])


@pytest.mark.parametrize("name", RACES)
def test_missing_barrier_shows_in_the_schedules(name):
    x, y = floats(64), floats(64)
    hostcuda.run_schedules(record(x, y, smem=256), source=race_source(name))
    with pytest.raises(HostFault, match=r"y differs from what|a barrier or a wait is missing"):
        hostcuda.run_schedules(record(x, y, smem=256, fault=1), source=race_source(name))


@pytest.mark.parametrize("name", RACES)
def test_missing_barrier_shows_in_thread_sanitizer(name):
    x, y = floats(64), floats(64)
    source = race_source(name)
    for order in ("forward", "reverse", "random"):
        schedule = Schedule(order)
        hostcuda.run(
            record(x, y, smem=256, grid=(3, 1, 1)),
            source=source,
            sanitizer="thread",
            schedule=schedule,
        )
    with pytest.raises(HostFault, match=r"ThreadSanitizer: data race[\s\S]*probe\.cu:\d+"):
        hostcuda.run(record(x, y, smem=256, fault=1), source=source, sanitizer="thread")


def test_shared_memory_is_nan_until_written():
    y = floats(128, 0)
    body = "extern __shared__ float s[]; __shared__ float a[64]; __shared__ __half h[64];\n"
    body += "if (fault || blockIdx.x) s[t] = a[t] = 1, h[t] = 2;\n"
    body += "y[blockIdx.x * 64 + t] = s[t] + a[t] + __half2float(h[t]);"
    hostcuda.run(record(floats(1), y, smem=256, grid=(2, 1, 1), fault=1), source=kernel(body))
    assert (y == 4).all()
    # Block 0 comes after block 1, which has written.
    reverse = Schedule("reverse")
    hostcuda.run(
        record(floats(1), y, smem=256, grid=(2, 1, 1)), source=kernel(body), schedule=reverse
    )
    assert np.isnan(y[:64]).all()
    assert (y[64:] == 4).all()
    with pytest.raises(HostFault, match="y differs"):
        hostcuda.run_schedules(record(floats(1), y, smem=256, grid=(2, 1, 1)), source=kernel(body))


def test_blocks_that_depend_on_their_order():
    source = kernel("if (t == 0) { const float v = *x; *x = v * 2 + blockIdx.x; }")
    with pytest.raises(HostFault, match="x differs"):
        hostcuda.run_schedules(record(floats(1), floats(1), grid=(7, 1, 1)), source=source)


# ---- asynchronous operations: the primitives that twins of copies are made of --------------------

_COPY = """
__shared__ float s[64];
float* const slot = s + t; const float value = x[t];
auto copy = host::issue([=] { *slot = value; });
if (!fault) copy->land();
__syncthreads();
y[t] = s[63 - t];
"""


def test_copy_that_is_not_waited_for():
    x, y = floats(64), floats(64)
    hostcuda.run_schedules(record(x, y), source=kernel(_COPY))
    np.testing.assert_array_equal(y, x[::-1])
    hostcuda.run(record(x, y, fault=1), source=kernel(_COPY), schedule=Schedule(landing="eager"))
    np.testing.assert_array_equal(y, x[::-1])
    hostcuda.run(record(x, y, fault=1), source=kernel(_COPY))
    assert np.isnan(y).all()
    with pytest.raises(HostFault, match="y differs"):
        hostcuda.run_schedules(record(x, y, fault=1), source=kernel(_COPY))


def test_copy_over_what_a_product_still_reads():
    body = (
        "__shared__ float s[64]; s[t] = x[t]; float* const from = s + t; float* const to = y + t;\n"
    )
    body += "auto product = host::issue([=] { *to = *from; }, true);\n"
    body += 'if (!fault) host::land(product, "product", host::Place::here());\n'
    body += "host::issue([=] { *from = -1; });\n"
    body += 'host::land(product, "product", host::Place::here());'
    x, y = floats(64), floats(64)
    hostcuda.run_schedules(record(x, y), source=kernel(body))
    np.testing.assert_array_equal(y, x)
    newest = Schedule(landing="newest")
    hostcuda.run(record(x, y, fault=1), source=kernel(body), schedule=newest)
    assert (y == -1).all()


def test_waiting_lands_what_is_on_its_way():
    body = "__shared__ int64 barrier; int& done = host::state_at<int>(&barrier); __syncthreads();\n"
    body += "if (t == 0) host::issue([&] { done = 1; });\n"
    body += 'host::wait_until([&] { return done == 1; }, "barrier"); y[t] = x[t];'
    x, y = floats(64), floats(64, 0)
    hostcuda.run_schedules(record(x, y, grid=(2, 1, 1)), source=kernel(body))
    np.testing.assert_array_equal(y, x)
