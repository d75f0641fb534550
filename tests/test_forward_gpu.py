# SPDX-License-Identifier: MIT
"""What only a GPU can show: its streams and devices, arrays of other libraries, huge grids."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from paths import KERNELS, a_dtype, qkv
from problem_calls import Exported

from cupyflash import Algorithm1, _arrays, attention
from cupyflash.reference import attention_reference
from cupyflash.testing import assert_attention_close

pytestmark = pytest.mark.gpu

every_gpu_kernel = pytest.mark.parametrize("kernel", KERNELS)


def on_gpu(cupy, seed, *shape, dtype=None, kernel=None, **sizes):
    dtype = a_dtype(kernel) if dtype is None else dtype
    return tuple(cupy.asarray(x) for x in qkv(seed, *shape, dtype=dtype, **sizes))


# ---- grids ---------------------------------------------------------------------------------------


@every_gpu_kernel
@pytest.mark.parametrize("shape", [(80_000, 1, 16, 32), (1, 80_000, 16, 32), (300, 300, 16, 32)])
def test_h13_more_entries_and_heads_than_65535(cupy, kernel, shape):
    """Dao-AILab/flash-attention#1786: an invalid configuration."""
    q, k, v = on_gpu(cupy, 13, *shape, kernel=kernel)
    o, lse = attention(q, k, v, causal=True, return_lse=True, kernel=kernel)
    axis = 0 if shape[0] > 1 else 1
    half = shape[axis] // 2
    for part in (slice(None, half), slice(half, None)):
        index = (part,) if axis == 0 else (slice(None), part)
        half_o, half_lse = attention(
            q[index], k[index], v[index], causal=True, return_lse=True, kernel=kernel
        )
        assert (half_o == o[index]).all()
        assert (half_lse == lse[index]).all()
    last = (slice(-3, None), slice(-3, None))
    expected = attention_reference(*(x[last].get() for x in (q, k, v)), causal=True)
    assert_attention_close((o[last], lse[last]), expected)


@pytest.mark.kernel("fa1_forward")
@pytest.mark.parametrize("chunks", [None, 1, 70_000])
def test_more_query_blocks_than_65535(cupy, chunks):
    q, k, v = on_gpu(cupy, 14, 1, 70_000, 8, seqlen_k=3, dtype=np.float32)
    one_row_a_block = Algorithm1(sram_elements=4 * 8, chunks=chunks)
    actual = attention(q, k, v, return_lse=True, kernel=one_row_a_block)
    assert_attention_close(actual, attention_reference(q.get(), k.get(), v.get()))


# ---- streams and devices -------------------------------------------------------------------------


@pytest.fixture
def spin(cupy):
    """A launch that keeps the current stream busy for about so many milliseconds."""
    kernel = cupy.RawKernel(
        'extern "C" __global__ void spin(long long cycles) {'
        "  const long long start = clock64(); while (clock64() - start < cycles) {} }",
        "spin",
    )
    return lambda milliseconds: kernel((1,), (1,), (np.int64(milliseconds * 1_500_000),))


@every_gpu_kernel
def test_work_goes_to_the_current_stream_and_the_host_does_not_wait(cupy, spin, kernel):
    q, k, v = on_gpu(cupy, 15, 4, 200, 64, kernel=kernel)
    expected = attention(q, k, v, kernel=kernel)
    late_q = cupy.zeros_like(q)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attention(late_q, k, v, kernel=kernel)  # builds, and fills the stream's memory pool
        spin(1)
    cupy.cuda.Device().synchronize()
    with stream:
        spin(300)
        late_q[...] = q
        o = attention(late_q, k, v, kernel=kernel)
        assert not stream.done, "the call has waited for its stream"
    stream.synchronize()
    # A launch on any other stream would have read the zeros.
    assert (o == expected).all()


@every_gpu_kernel
def test_workspaces_are_not_handed_out_before_the_kernel_is_done(cupy, spin, kernel):
    q, k, v = on_gpu(cupy, 16, 4, 200, 64, kernel=kernel)
    expected, expected_lse = attention(q, k, v, return_lse=True, kernel=kernel)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        spin(50)
        results = [attention(q, k, v, return_lse=True, kernel=kernel) for _ in range(5)]
        for _ in range(20):
            cupy.full((2, 4, 200), 7, np.float32)
    stream.synchronize()
    for o, lse in results:
        assert (o == expected).all()
        assert (lse == expected_lse).all()


@every_gpu_kernel
def test_h32_arrays_on_a_device_that_is_not_current(cupy, kernel):
    """flashinfer-ai/flashinfer#452, cupy/cupy#3193: an illegal access."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    arrays = qkv(17, 2, 100, 64, dtype=a_dtype(kernel))
    expected = attention_reference(*arrays)
    here, there = [], []
    for device, moved in ((0, here), (1, there)):
        with cupy.cuda.Device(device):
            moved += [cupy.asarray(x) for x in arrays]
    with cupy.cuda.Device(0):
        for device, moved in ((1, there), (0, here), (1, there)):
            o, lse = attention(*moved, return_lse=True, kernel=kernel)
            assert (o.device.id, lse.device.id) == (device, device)
            assert cupy.cuda.runtime.getDevice() == 0
            with cupy.cuda.Device(device):
                assert_attention_close((o, lse), expected)
        with pytest.raises(ValueError, match="q is on device 1 but k is on device 0; expected one"):
            attention(there[0], here[1], there[2])
        with pytest.raises(ValueError, match="q is on device 1 but out is on device 0"):
            attention(*there, out=cupy.empty_like(here[0]))


# ---- arrays --------------------------------------------------------------------------------------


class ThroughInterface:
    """An array of another library, to be taken through ``__cuda_array_interface__``."""

    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


@every_gpu_kernel
@pytest.mark.parametrize("wrapper", [Exported, ThroughInterface])
def test_arrays_of_other_libraries_are_taken_without_a_copy(cupy, wrapper, kernel):
    q, k, v = on_gpu(cupy, 18, 2, 100, 64, kernel=kernel)
    k = k[:, ::2]
    v = v[:, 1::2]
    seqlens_k = cupy.asarray(37)
    wrapped = [wrapper(x) for x in (q, k, v)]
    taken = [_arrays.adopt("attention", "x", x) for x in wrapped]
    assert [x.data.ptr for x in taken] == [x.data.ptr for x in (q, k, v)]
    assert [x.strides for x in taken] == [x.strides for x in (q, k, v)]
    o = attention(*wrapped, seqlens_k=wrapper(seqlens_k), kernel=kernel)
    assert isinstance(o, cupy.ndarray)
    assert (o == attention(q, k, v, seqlens_k=seqlens_k, kernel=kernel)).all()


def test_bfloat16_through_dlpack(cupy):
    import ml_dtypes

    q, k, v = on_gpu(cupy, 20, 2, 100, 64, dtype=ml_dtypes.bfloat16)
    o = attention(*(Exported(x) for x in (q, k, v)))
    assert o.dtype == ml_dtypes.bfloat16
    assert (o == attention(q, k, v)).all()


@pytest.mark.parametrize("name", ["k", "v", "bias", "mask", "alibi_slopes", "seqlens_k", "out"])
def test_numpy_mixed_with_cupy(cupy, name):
    q, k, v = on_gpu(cupy, 21, 2, 10, 8, dtype=np.float32)
    here = {
        "bias": np.zeros((10, 10), np.float32),
        "mask": np.ones((10, 10), bool),
        "alibi_slopes": np.zeros(2, np.float32),
        "seqlens_k": np.array(3),
        "out": np.zeros((2, 10, 8), np.float32),
    }
    arguments = {"q": q, "k": k, "v": v}
    arguments[name] = arguments[name].get() if name in arguments else here[name]
    with pytest.raises(TypeError, match=f"q is a CuPy array but {name} is a numpy array"):
        attention(**arguments)
    arguments = {n: x.get() if n != name and hasattr(x, "get") else x for n, x in arguments.items()}
    arguments[name] = cupy.asarray(arguments[name])
    with pytest.raises(TypeError, match=f"q is a numpy array but {name} is a CuPy array"):
        attention(**arguments)


def test_a_kernel_of_the_host_is_refused(cupy):
    q, k, v = on_gpu(cupy, 22, 2, 10, 8)
    with pytest.raises(ValueError, match="kernel 'host' takes numpy arrays"):
        attention(q, k, v, kernel="host")


@every_gpu_kernel
@pytest.mark.parametrize("integers", [np.int32, np.int64, np.int16])
def test_lengths_on_the_device_are_clamped_there(cupy, integers, kernel):
    q, k, v = on_gpu(cupy, 23, 4, 2, 30, 16, seqlen_k=50, kernel=kernel)
    wild = cupy.array([-5, 1000, 50, 7], integers)
    tame = cupy.array([0, 50, 50, 7], integers)
    for options in ({}, {"causal": True}):
        actual = attention(q, k, v, seqlens_k=wild, return_lse=True, kernel=kernel, **options)
        expected = attention(q, k, v, seqlens_k=tame, return_lse=True, kernel=kernel, **options)
        for a, e in zip(actual, expected, strict=True):
            assert (a == e).all()
    with pytest.raises(ValueError, match="seqlens_k holds 1000; expected lengths from 0 to"):
        attention(q, k, v, seqlens_k=[0, 1000, 50, 7])


def test_axes_of_length_zero_are_no_errors(cupy):
    for q, k, v in (
        ((0, 2, 3, 4), (0, 2, 5, 4), (0, 2, 5, 4)),
        ((2, 0, 4), (2, 5, 4), (2, 5, 4)),
        ((0, 3, 4), (0, 5, 4), (0, 5, 4)),
        ((2, 3, 4), (1, 0, 4), (1, 0, 6)),
        ((2, 3, 4), (2, 5, 4), (2, 5, 0)),
    ):
        arrays = (cupy.ones(shape, np.float16) for shape in (q, k, v))
        o, lse = attention(*arrays, return_lse=True)
        assert o.shape == (*q[:-1], v[-1])
        assert (o == 0).all()
        assert bool(cupy.isneginf(lse).all()) == (k[-2] == 0 or lse.size == 0)


def test_out_that_shares_memory_with_an_input(cupy):
    q, k, v = on_gpu(cupy, 24, 2, 10, 8)
    with pytest.raises(ValueError, match="out shares memory with k"):
        attention(q, k, v, out=k)
    with pytest.raises(ValueError, match="out overlaps itself"):
        attention(q, k, v, out=cupy.broadcast_to(q[:1], q.shape))


# ---- the process ---------------------------------------------------------------------------------


def test_torch_is_never_imported():
    program = (
        "import sys, cupy, cupyflash\n"
        "x = cupy.ones((2, 10, 8), 'float16')\n"
        "cupyflash.attention(x, x, x)\n"
        "print('torch' in sys.modules)\n"
    )
    checkout = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, (checkout, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.stdout == "False\n"


# ---- where arrays lie ----------------------------------------------------------------------------


@every_gpu_kernel
@pytest.mark.parametrize("gap", [0, 1])
def test_elements_at_odd_addresses_are_copied(cupy, kernel, gap):
    def arranged(x):
        step = x.itemsize + gap
        memory = cupy.zeros(step * x.size + 1, np.uint8)
        strides = tuple(step * s // x.itemsize for s in x.strides)
        odd = cupy.ndarray(x.shape, x.dtype, memptr=memory.data + 1, strides=strides)
        every_byte = cupy.ndarray(
            (*x.shape, x.itemsize), np.uint8, memptr=odd.data, strides=(*odd.strides, 1)
        )
        every_byte[...] = x[..., None].view(np.uint8)
        return odd

    q, k, v = on_gpu(cupy, 22, 2, 30, 64, kernel=kernel)
    expected = attention(q, k, v, kernel=kernel)
    assert (attention(arranged(q), k, arranged(v)) == attention(q, k, v)).all()
    if kernel != "forward_sm90":  # which takes no such arrays; the plan saw them before the copy
        assert (attention(arranged(q), arranged(k), v, kernel=kernel) == expected).all()
    with pytest.raises(ValueError, match="out"):
        attention(q, k, v, out=arranged(q), kernel=kernel)


def test_arguments_made_from_numbers_are_made_on_the_device_of_q(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(1):
        q, k, v = on_gpu(cupy, 23, 2, 4, 50, 64)
    expected = attention_reference(
        *(x.get() for x in (q, k, v)), seqlens_k=[20, 30], alibi_slopes=[0.1, 0.2, 0.3, 0.4]
    )
    assert cupy.cuda.Device().id == 0
    for _ in range(2):
        actual = attention(
            q, k, v, seqlens_k=[20, 30], alibi_slopes=[0.1, 0.2, 0.3, 0.4], return_lse=True
        )
        assert_attention_close(actual, expected)
