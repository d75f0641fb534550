# SPDX-License-Identifier: MIT
"""From arrays to launch records: batch axes, strides, pointers, the structs that kernels read."""

import itertools
import math
import struct
from types import SimpleNamespace

import hostcuda
import numpy as np
import pytest
from hostcuda.probes import MARKS as HOSTCUDA
from hypothesis import example, given
from hypothesis import strategies as st
from paths import a_dtype, every_kernel, launches, normal, qkv, run_on_host_cuda

from cupyflash import (
    _arrays,
    _compile,
    _launch,
    _params,
    _simt,
    _sm80,
    _sm90,
    _sm90_float32,
    _tensormap,
    plan,
)
from cupyflash._launch import MAX_GRID_X, merge_axes
from cupyflash.testing import Problem, assert_attention_close

# ---- batch axes ----------------------------------------------------------------------------------


@st.composite
def strided_axes(draw):
    """Sizes of batch axes, and the strides of a few arrays that have them."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), max_size=5)))
    arrays = []
    for _ in range(draw(st.integers(1, 3))):
        strides, step = [], draw(st.sampled_from([8, 96, -8]))
        for size in reversed(sizes):
            kind = draw(st.sampled_from(["packed", "packed", "packed", "broadcast", "padded"]))
            strides.append(0 if kind == "broadcast" else step)
            step *= size if kind == "packed" else 1 if kind == "broadcast" else size + 1
        arrays.append(tuple(reversed(strides)))
    return sizes, arrays


def offsets(sizes, arrays):
    """What every array's offset is at each index, in the order of the indices."""
    return [
        tuple(sum(i * s for i, s in zip(index, strides, strict=True)) for strides in arrays)
        for index in itertools.product(*map(range, sizes))
    ]


@given(strided_axes())
@example(((), [()]))
@example(((1, 1), [(5, 7)]))
@example(((2, 2), [(0, 0), (16, 8)]))
def test_merged_axes_lead_to_the_same_addresses(axes):
    sizes, arrays = axes
    merged_sizes, merged = merge_axes(sizes, arrays)
    assert offsets(merged_sizes, merged) == offsets(sizes, arrays)
    assert 1 not in merged_sizes
    for axis in range(1, len(merged_sizes)):
        size = merged_sizes[axis]
        assert any(s[axis - 1] != s[axis] * size for s in merged), "two axes could still be merged"


def test_contiguous_axes_become_one():
    x = np.empty((2, 3, 4, 5, 6, 7))
    assert merge_axes(x.shape[:3], [x.strides[:3]]) == ((24,), [(x.strides[2],)])


def mixed_batch():
    """Five batch axes of which no two neighbours can be walked as one."""
    q = normal(0, 2, 1, 2, 1, 3, 1, 5, 8)
    k = normal(1, 1, 2, 1, 2, 1, 1, 9, 8)
    v = normal(2, 1, 2, 1, 2, 1, 1, 9, 4)
    return Problem(q, k, v, {"seqlens_k": np.arange(6).reshape(2, 1, 1, 1, 3) + 3})


@every_kernel
def test_more_batch_axes_than_a_kernel_walks(path):
    problem = mixed_batch()
    *_, records = launches(*problem.qkv, **problem.kwargs)
    assert len(records) == 4
    assert (
        len({tuple(p.byte_offset for p in r.pointers if p.name[-6:] == "o.data") for r in records})
        == 4
    )
    assert_attention_close(path(*problem.qkv, **problem.kwargs), problem)


def test_batch_axes_that_all_arrays_pack_are_one_launch():
    q, k, v = qkv(0, 2, 3, 2, 2, 2, 2, 5, 8)
    *_, records = launches(q, k, v)
    assert len(records) == 1
    *_, records = launches(q, k[0, 0, 0, 0, 0], v[0, 0, 0, 0, 0], causal=True)
    assert len(records) == 1


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8)])
def test_nothing_to_write_is_no_launch(shape):
    q = np.empty(shape, np.float32)
    *_, records = launches(q, q[..., :, :], q)
    assert records == []


# ---- records -------------------------------------------------------------------------------------


def fields(record):
    """The parameter struct as a mapping, numbers as integers."""
    words = struct.unpack(f"<{len(_params.FA1_FIELDS)}q", record.params)
    return dict(zip(_params.FA1_FIELDS, words, strict=True))


def as_double(word):
    return struct.unpack("<d", struct.pack("<q", word))[0]


def test_numbers_of_a_problem():
    q, k, v = qkv(0, 3, 4, 5, 8, seqlen_k=9, heads_k=2)
    *_, (record,) = launches(
        q, k, v[..., :7], window=(2, 3), softmax_scale=-0.25, softcap=30.0, causal="top_left"
    )
    values = fields(record)
    expected = {"heads_q": 4, "heads_k": 2, "seqlen_q": 5, "seqlen_k": 9, "head_dim": 8}
    expected |= {"head_dim_v": 7, "window_left": 2, "window_right": 0, "top_left": 1}
    expected |= {"batch[0]": 1, "batch[1]": 1, "batch[2]": 3}
    expected |= {"bias_is_float": 0, "seqlens_are_int32": 0}
    assert {name: values[f"problem.{name}"] for name in expected} == expected
    assert as_double(values["problem.softmax_scale"]) == -0.25
    assert as_double(values["problem.softcap"]) == 30.0


@pytest.mark.parametrize("scale", [1, np.float16(1), 1.0])
def test_scalars_arrive_as_doubles(scale):
    q, k, v = qkv(0, 1, 5, 8)
    *_, (record,) = launches(q, k, v, softmax_scale=scale, softcap=scale)
    assert as_double(fields(record)["problem.softmax_scale"]) == 1.0
    assert as_double(fields(record)["problem.softcap"]) == 1.0


@pytest.mark.parametrize("integers", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
def test_lengths_of_any_integer_dtype(integers):
    q, k, v = qkv(0, 2, 1, 5, 8)
    *_, (record,) = launches(q, k, v, seqlens_k=np.array([3, 5], integers))
    (pointer,) = (p for p in record.pointers if p.name == "problem.seqlens_k.data")
    assert fields(record)["problem.seqlens_are_int32"] == (pointer.array.dtype == np.int32)
    assert pointer.array.dtype in (np.int32, np.int64)
    assert pointer.array.tolist() == [3, 5]


def test_strides_are_counted_in_elements_from_the_first_one():
    base = normal(0, 3, 9, 2, 16, dtype=np.float16)
    k = base[:, ::-1, :, 1::2].swapaxes(1, 2)  # (3, 2, 9, 8), rows backwards
    q, v = normal(1, 2, 5, 8, dtype=np.float16), np.broadcast_to(base[0, 0, 0, :4], (2, 9, 4))
    *_, (record,) = launches(q, k, v)
    values = fields(record)
    strides = ("batch[0]", "batch[1]", "batch[2]", "head", "row", "col")
    assert [values[f"problem.k.{s}"] for s in strides] == [0, 0, 288, 16, -32, 2]
    assert [values[f"problem.v.{s}"] for s in strides] == [0, 0, 0, 0, 0, 1]
    pointer = next(p for p in record.pointers if p.name == "problem.k.data")
    assert _arrays.address(pointer.array) + pointer.byte_offset == k.ctypes.data
    assert k.ctypes.data == base.ctypes.data + 8 * 64 + 2


def test_every_pointer_is_null_in_the_struct_and_listed_beside_it():
    q, k, v = qkv(0, 2, 5, 8, dtype=np.float16)
    bias = normal(3, 5, 5)
    *_, (record,) = launches(q, k, v, bias=bias, alibi_slopes=[1.0, 2.0])
    names = {p.name for p in record.pointers}
    present = {f"problem.{n}.data" for n in ("q", "k", "v", "o", "lse", "bias", "alibi_slopes")}
    assert names == present | {"O", "l", "m"}
    for pointer in record.pointers:
        assert _params.FA1_FIELDS[pointer.offset // 8] == pointer.name
    for name in _params.FA1_FIELDS:
        if name.endswith(".data") or name in "Olm":
            assert fields(record)[name] == 0
    assert fields(record)["problem.bias_is_float"] == 1


def test_pack_knows_its_fields():
    with pytest.raises(AssertionError, match="no such fields"):
        _params.pack(("a", "b"), {"c": 1})
    x = np.arange(3.0)
    params, pointers = _params.pack(("a", "b", "c", "d"), {"a": 1.5, "b": (x, 16), "d": -2})
    assert struct.unpack("<dqqq", params) == (1.5, 0, 0, -2)
    assert [(p.offset, p.name, p.byte_offset) for p in pointers] == [(8, "b", 16)]


def odd_stride(shape):
    """float32 numbers five bytes apart."""
    return np.zeros(shape, [("x", "<f4"), ("y", "u1")])["x"]


def odd_address(shape):
    """float32 numbers that begin one byte after a multiple of four."""
    buffer = np.zeros(4 * math.prod(shape) + 4, np.uint8)
    return buffer[1:-3].view(np.float32).reshape(shape)


@pytest.mark.parametrize(
    "odd", [pytest.param(f, marks=HOSTCUDA) for f in (odd_stride, odd_address)]
)
def test_inputs_that_no_kernel_can_read_in_place_are_copied(odd):
    def arranged(x):
        copy = odd(x.shape)
        copy[...] = x
        assert not _arrays.is_aligned(copy)
        return copy

    q, k, v = qkv(0, 2, 5, 8, seqlen_k=9)
    bias = normal(1, 5, 9)
    copies = [arranged(x) for x in (q, k, v)]
    actual = run_on_host_cuda(*copies, bias=arranged(bias))
    assert_attention_close(actual, Problem(q, k, v, {"bias": bias}))


@pytest.mark.parametrize("odd", [odd_stride, odd_address])
def test_an_output_that_no_kernel_can_write_is_refused(odd):
    x = np.zeros((5, 8), np.float32)
    with pytest.raises(ValueError, match=r"^attention: out (has a stride of 5|begins at an addr)"):
        launches(x, x, x, out=odd((5, 8)))


@pytest.mark.parametrize(("batch", "heads"), [(2**16, 2**16), (70_000, 2), (2, 70_000), (1, 1)])
def test_no_grid_passes_the_limits(batch, heads):
    x = np.broadcast_to(np.zeros(8, np.float32), (batch, heads, 1, 8))
    problem_plan = plan(
        seqlen_q=1, head_dim=8, batch=batch, heads_q=heads, dtype="float32", device="H200"
    )
    assert problem_plan.grid == (min(batch * heads, MAX_GRID_X), 1, 1)
    if batch * heads < 2**20:
        *_, records = launches(x, x, x)
        assert [r.grid for r in records] == [problem_plan.grid]


# ---- the structs of both sides -------------------------------------------------------------------

_SCHEDULE = ("bunch", "blocks", "heads", "counter")
# Each kernel's struct, the fields that Python packs, and what is in front of these.
STRUCTS = {
    "fa1_forward": ("Fa1Params", _params.FA1_FIELDS, 0),
    "forward_sm80": ("Sm80Params", _sm80._FIELDS, 0),
    "forward_simt": ("SimtParams", _simt._FIELDS, 0),
    "forward_sm90_float32": ("Sm90Float32Params", _sm90_float32._FIELDS, 0),
    "combine": ("CombineParams", _sm80._COMBINE_FIELDS, 0),
    "forward_sm90": (
        "Sm90Params",
        tuple(f"schedule.{name}" if name in _SCHEDULE else name for name in _sm90._FIELDS),
        len(_sm90.MAPS) * _tensormap.BYTES,
    ),
}
_OFFSETS = """
struct Probe {{ long long* at; }};
extern "C" __global__ void {kernel}(const __grid_constant__ Probe probe) {{
  using cupyflash::{struct};
  if (threadIdx.x != 0) return;
  long long* at = probe.at;
  {offsets}
  *at++ = sizeof({struct});
}}
"""


def a_record(kernel) -> _launch.LaunchRecord:
    """One of a call that has all of the kernel's pointers: parts of the keys, many works."""
    heads = 200 if kernel == "forward_sm90" else 1
    q, k, v = qkv(0, heads, 70, 64, seqlen_k=5000, heads_k=1, dtype=a_dtype(kernel))
    name = "forward_sm80" if kernel == "combine" else kernel
    options = {"mask": np.ones((70, 5008), bool)[:, :5000]} if kernel == "forward_sm90" else {}
    *_, records = launches(q, k, v, kernel=name, causal=True, seqlens_k=4000, **options)
    return next(record for record in records if record.kernel == kernel)


def test_every_kernel_has_its_struct_here():
    assert {*STRUCTS} == {*_compile.kernel_names()}


@pytest.mark.parametrize("kernel", [*STRUCTS])
class TestParameterStruct:
    pytestmark = HOSTCUDA

    def test_fields_lie_where_the_kernel_reads_them(self, kernel):
        name, fields, front = STRUCTS[kernel]
        record = a_record(kernel)
        text = (_compile.kernels_folder() / f"{kernel}.cu").read_text()
        text = text[: text.index('extern "C" __global__')]
        maps = _sm90.MAPS if front else ()
        offsets = "\n  ".join(
            f"*at++ = __builtin_offsetof({name}, {field});" for field in (*maps, *fields)
        )
        at = np.zeros(len(maps) + len(fields) + 1, np.int64)
        probe = SimpleNamespace(
            kernel=kernel,
            options=record.options,
            grid=(1, 1, 1),
            block=(1, 1, 1),
            smem_bytes=0,
            params=bytes(8),
            pointers=(_params.Pointer(0, "at", at),),
        )
        text += _OFFSETS.format(kernel=kernel, struct=name, offsets=offsets)
        hostcuda.run(probe, source=text)
        *found, size = at.tolist()
        lie = dict(zip((*maps, *fields), found, strict=True))
        assert [lie[field] for field in fields] == [front + 8 * n for n in range(len(fields))]
        assert size == len(record.params)
        for pointer in record.pointers:
            prefix = "schedule." if pointer.name in _SCHEDULE else ""
            assert pointer.offset == lie[prefix + pointer.name]
        for tensor_map in record.tensor_maps:
            name = tensor_map.pointer.name
            assert tensor_map.pointer.offset == lie["scores" if name == "mask" else name.upper()]
        assert len(record.tensor_maps) == len(maps)


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_arrays_of_the_gpu_path_are_allocated_by_cupy(cupy):
    from cupyflash import Algorithm1, _problem
    from cupyflash.plan import make_plan

    x = cupy.zeros((2, 5, 8), cupy.float16)
    problem = _problem.from_arrays("attention", x, x, x)
    made = make_plan("attention", problem, Algorithm1())
    o, lse, (record,) = _launch.prepare(made, problem, None, True, cupy)
    assert {type(p.array) for p in record.pointers} == {cupy.ndarray}
    assert (o.dtype, lse.dtype) == (cupy.float16, cupy.float32)
    assert made.device.name in str(made)
