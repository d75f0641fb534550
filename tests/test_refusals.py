# SPDX-License-Identifier: MIT
"""What a call is refused for, message by message."""

import math
import sys
import types
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from problem_calls import F32, Exported, call, zeros

from cupyflash import attention
from cupyflash.testing import poison


class OnDevice:
    """A DLPack object on a device of this type."""

    def __init__(self, kind):
        self.kind = kind

    def __dlpack__(self, **arguments):
        raise AssertionError("must not be exported")

    def __dlpack_device__(self):
        return (self.kind, 0)


# ---- refusals ------------------------------------------------------------------------------------

REFUSED_SHAPES = {
    "q of rank 1": ({"q": (8,)}, r"q has shape \(8,\); expected \(\.\.\., heads, seqlen, head_dim"),
    "v of rank 0": ({"v": ()}, r"v has shape \(\); expected"),
    "head_dim": (
        {"k": (2, 10, 7)},
        r"k has head_dim 7 but q has 8; q and k must agree \(q.shape=\(4, 6, 8\), k.shape=\(2, 10",
    ),
    "head_dim of 0": ({"q": (4, 6, 0), "k": (2, 10, 0)}, "q has head_dim 0; expected at least 1"),
    "seqlen_k": ({"v": (2, 11, 8)}, "v has seqlen_k 11 but k has 10; k and v must agree"),
    "heads of v": ({"v": (4, 10, 8)}, "v has 4 heads but k has 2; k and v must agree"),
    "33 heads over 2": (
        {"q": (33, 6, 8)},
        "q has 33 heads and k has 2; heads_q must be a multiple of heads_k",
    ),
    "3 heads over 2": ({"q": (3, 6, 8)}, "q has 3 heads and k has 2"),
    "1 head over 2": ({"q": (1, 6, 8)}, "q has 1 heads and k has 2"),
    "heads over none": ({"k": (0, 10, 8), "v": (0, 10, 8)}, "q has 4 heads and k has 0"),
    "batch axes": (
        {"q": (3, 4, 6, 8), "k": (2, 2, 10, 8)},
        r"the leading axes of q, k and v must broadcast to each other \(q.shape=\(3, 4, 6, 8\)",
    ),
    "bias of other keys": (
        {"bias": zeros(6, 20)},
        r"bias.shape is \(6, 20\); expected a shape that broadcasts to \(4, 6, 10\)",
    ),
    "mask of other keys": ({"mask": zeros(6, 17, dtype=bool)}, r"mask.shape is \(6, 17\)"),
    "mask with an axis too many": (
        {"mask": zeros(1, 4, 6, 10, dtype=bool)},
        r"mask.shape is \(1, 4, 6, 10\); expected a shape that broadcasts to \(4, 6, 10\)",
    ),
    "bias of key heads": ({"bias": zeros(2, 6, 10)}, r"bias.shape is \(2, 6, 10\)"),
    "slopes of key heads": (
        {"alibi_slopes": zeros(2)},
        r"alibi_slopes.shape is \(2,\); expected a shape that broadcasts to \(4,\)",
    ),
    "lengths without batch": (
        {"seqlens_k": [3, 4]},
        r"seqlens_k.shape is \(2,\); expected a shape that broadcasts to \(\)",
    ),
    "lengths of another batch": (
        {"q": (3, 4, 6, 8), "seqlens_k": np.array([3, 4])},
        r"seqlens_k.shape is \(2,\); expected a shape that broadcasts to \(3,\)",
    ),
}

REFUSED_VALUES = {
    "a length past the keys": (
        {"seqlens_k": 11},
        "seqlens_k holds 11; expected lengths from 0 to k's seqlen 10",
    ),
    "a negative length": (
        {"q": (2, 4, 6, 8), "seqlens_k": np.array([3, -1], np.int8)},
        "seqlens_k holds -1",
    ),
    "a length past 32 bits": ({"seqlens_k": 2**32 + 1}, "seqlens_k holds 4294967297"),
    "scale past float64": ({"softmax_scale": 10**400}, "softmax_scale is inf; expected a finite"),
    "softcap past float64": ({"softcap": -Fraction(10**400)}, "softcap is -inf; expected a finite"),
    "scale 0": ({"softmax_scale": 0}, "softmax_scale is 0.0; expected a finite non-zero number"),
    "scale NaN": ({"softmax_scale": math.nan}, "softmax_scale is nan"),
    "scale inf": ({"softmax_scale": -math.inf}, "softmax_scale is -inf"),
    "scale past float32": (
        {"softmax_scale": 1e39},
        r"softmax_scale is 1e\+39; .* \(of float32, the dtype of the scores\)",
    ),
    "scale below float32": ({"softmax_scale": 1e-50}, "softmax_scale is 1e-50"),
    "softcap 0": ({"softcap": 0.0}, "softcap is 0.0; expected a finite positive number"),
    "softcap negative": ({"softcap": -3}, "softcap is -3.0"),
    "softcap NaN": ({"softcap": math.nan}, "softcap is nan"),
    "precision unknown": ({"precision": "fast"}, "precision is 'fast'; expected 'full', 'tf32'"),
    "softcap inf": ({"softcap": math.inf}, "softcap is inf"),
    "window left": (
        {"window": (-2, 0)},
        "window left is -2; expected 0 or more, or None or -1 for no limit",
    ),
    "window right": ({"window": (-1, -3)}, "window right is -3"),
    "causal of another word": (
        {"causal": "bottom_right"},
        "causal is 'bottom_right'; expected True, False or 'top_left'",
    ),
}

REFUSED_TYPES = {
    "integers": (
        {"q": zeros(4, 6, 8, dtype=int)},
        "q.dtype is int64; expected float16, bfloat16, float32 or float64, the same for q, k",
    ),
    "big-endian numbers": ({"k": zeros(2, 10, 8, dtype=">f4")}, "k.dtype is >f4; expected float16"),
    "8-bit floats": (
        {"v": zeros(2, 10, 8, dtype=ml_dtypes.float8_e4m3fn)},
        "v.dtype is float8_e4m3fn",
    ),
    "complex numbers": ({"q": zeros(4, 6, 8, dtype=np.complex64)}, "q.dtype is complex64"),
    "mixed dtypes": (
        {"v": zeros(2, 10, 8, dtype=np.float16)},
        "q, k and v must have one dtype, got float32, float32 and float16",
    ),
    "16 bits of two kinds": (
        {
            "q": zeros(4, 6, 8, dtype=np.float16),
            "k": zeros(2, 10, 8, dtype=ml_dtypes.bfloat16),
            "v": zeros(2, 10, 8, dtype=np.float16),
        },
        "q, k and v must have one dtype, got float16, bfloat16 and float16",
    ),
    "bias of another dtype": (
        {"bias": zeros(6, 10, dtype=np.float64)},
        "bias.dtype is float64; expected q's dtype float32 or float32",
    ),
    "bias of bool": ({"bias": zeros(6, 10, dtype=bool)}, "bias.dtype is bool"),
    "mask of numbers": (
        {"mask": zeros(6, 10)},
        r"mask.dtype is float32; expected bool, .* \(an additive mask is bias=\)",
    ),
    "mask of bytes": ({"mask": zeros(6, 10, dtype=np.uint8)}, "mask.dtype is uint8"),
    "slopes of another dtype": (
        {"alibi_slopes": zeros(4, dtype=np.float64)},
        "alibi_slopes.dtype is float64; expected float32 or q's dtype float32",
    ),
    "slopes of nothing": ({"alibi_slopes": [None, 1, 1, 1]}, "alibi_slopes is .*expected num"),
    "slopes of digits": ({"alibi_slopes": ["1"] * 4}, "alibi_slopes is .*expected numbers"),
    "slopes of truths": ({"alibi_slopes": [True] * 4}, "alibi_slopes is .*expected numbers"),
    "slopes of words": (
        {"alibi_slopes": ["steep"] * 4},
        r"alibi_slopes is \['steep'.*expected num",
    ),
    "lengths of floats": ({"seqlens_k": [3.0]}, r"seqlens_k is \[3.0\]; expected integers"),
    "ragged lengths": (
        {"seqlens_k": [[1], [2, 3]]},
        r"seqlens_k is \[\[1\], \[2, 3\]\]; expected int",
    ),
    "a length past 64 bits": ({"seqlens_k": 2**64}, "seqlens_k is 1.*; expected .*64 bits"),
    "a masked array": (
        {"k": np.ma.masked_array(zeros(2, 10, 8), mask=True)},
        "k is a masked array, whose mask would be ignored",
    ),
    "a masked mask": (
        {"mask": np.ma.masked_array(zeros(6, 10, dtype=bool), mask=True)},
        "mask is a masked array",
    ),
    "an array of floats as lengths": (
        {"seqlens_k": zeros()},
        "seqlens_k.dtype is float32; expected an integer dtype",
    ),
    "length True": ({"seqlens_k": True}, "seqlens_k is True; expected a number, a sequence"),
    "slopes as a string": (
        {"alibi_slopes": "ab"},
        "alibi_slopes is 'ab'; expected a number, a seq",
    ),
    "slopes in a set": ({"alibi_slopes": {1.0}}, "alibi_slopes is {1.0}; expected a number"),
    "scale True": ({"softmax_scale": True}, "softmax_scale is a bool; expected a real number"),
    "scale of a word": ({"softmax_scale": "0.5"}, "softmax_scale is a str"),
    "scale complex": ({"softmax_scale": 1j}, "softmax_scale is a complex"),
    "scale of rank 1": ({"softmax_scale": zeros(1) + 1}, "softmax_scale is a ndarray"),
    "precision of a number": ({"precision": 32}, "precision is a int; expected 'full', 'tf32'"),
    "softcap of a word": ({"softcap": "50"}, "softcap is a str; expected a real number"),
    "window of one number": ({"window": 3}, r"window is 3; expected \(left, right\)"),
    "window of three": ({"window": (1, 2, 3)}, r"window is \(1, 2, 3\); expected \(left, right\)"),
    "window of a word": ({"window": "ab"}, "window is 'ab'"),
    "window of floats": ({"window": (1.5, 0)}, "window left is 1.5; expected an integer"),
    "window of bools": ({"window": (1, True)}, "window right is True; expected an integer"),
    "causal a number": ({"causal": 1}, "causal is 1; expected True, False or 'top_left'"),
    "causal None": ({"causal": None}, "causal is None"),
    "a list": ({"q": [[1.0]]}, "q is a list; expected a numpy or CuPy array, or an object with"),
    "None": ({"k": None}, "k is a NoneType"),
    "mask as a list": ({"mask": [[True]]}, "mask is a list; expected a numpy or CuPy array"),
    "another device": (
        {"v": OnDevice(10)},
        "v is on DLPack device type 10; expected a CPU or a CUDA device",
    ),
}


@pytest.mark.parametrize(("arguments", "match"), REFUSED_SHAPES.values(), ids=REFUSED_SHAPES)
def test_shapes_that_do_not_fit(arguments, match):
    with pytest.raises(ValueError, match=f"^attention: {match}"):
        call(**arguments)


@pytest.mark.parametrize(("arguments", "match"), REFUSED_VALUES.values(), ids=REFUSED_VALUES)
def test_values_out_of_range(arguments, match):
    with pytest.raises(ValueError, match=f"^attention: {match}"):
        call(**arguments)


@pytest.mark.parametrize(("arguments", "match"), REFUSED_TYPES.values(), ids=REFUSED_TYPES)
def test_types_that_are_not_served(arguments, match):
    with pytest.raises(TypeError, match=f"^attention: {match}"):
        call(**arguments)


@pytest.mark.parametrize("device", [None, 1, (1,), "cpu"])
def test_dlpack_that_tells_no_device(device):
    exporter = types.SimpleNamespace(__dlpack_device__=lambda: device)
    with pytest.raises(TypeError, match=r"attention: k is a .* does not tell \(type, id\)"):
        attention(zeros(3, 4), exporter, zeros(3, 4))


@pytest.mark.parametrize("error", [ValueError, OSError, AssertionError, AttributeError])
def test_dlpack_that_fails(error):
    def fail(**arguments):
        raise error("not today")

    exporter = types.SimpleNamespace(__dlpack_device__=lambda: (1, 0), __dlpack__=fail)
    with pytest.raises(TypeError, match=r"attention: v is a .* DLPack export numpy can't read"):
        attention(zeros(3, 4), zeros(3, 4), exporter)


def test_more_axes_than_numpy_broadcasts():
    x = np.zeros((1,) * 30 + (3, 4))
    assert attention(x, x, x).shape == x.shape
    with pytest.raises(ValueError, match="attention: k has 33 axes; expected at most 32"):
        attention(x, x[None], x)


@pytest.mark.parametrize("lengths", [range(2, 4), (2, 3)])
def test_any_sequence_of_numbers_is_taken(lengths):
    x = np.random.default_rng(0).standard_normal((2, 1, 4, 8))
    expected = attention(x, x, x, seqlens_k=[2, 3], alibi_slopes=[1.0])
    actual = attention(x, x, x, seqlens_k=lengths, alibi_slopes=range(1, 2))
    np.testing.assert_array_equal(actual, expected)


def test_what_dlpack_can_not_export():
    with pytest.raises(TypeError, match=r"q is a .*Exported whose DLPack export numpy can't read"):
        call(q=Exported(zeros(4, 6, 8, dtype=ml_dtypes.bfloat16)))


@pytest.fixture
def fake_cupy(monkeypatch):
    """A module named cupy whose arrays stay off every GPU."""

    class ndarray:
        shape, ndim, dtype = (2, 10, 8), 3, np.dtype(F32)
        device = types.SimpleNamespace(id=0)

    module = types.ModuleType("cupy")
    module.ndarray = ndarray
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_numpy_mixed_with_cupy(fake_cupy):
    expected = r"^attention: q is a numpy array but {} is a CuPy array; expected all of them in one"
    there = fake_cupy.ndarray()
    for name in ("k", "v", "bias", "mask", "alibi_slopes", "seqlens_k"):
        with pytest.raises(TypeError, match=expected.format(name)):
            call(**{name: there})
    with pytest.raises(TypeError, match="q is a CuPy array but k is a numpy array"):
        call(q=there)
    with pytest.raises(TypeError, match="q is a numpy array but out is a CuPy array"):
        attention(*(zeros(2, 10, 8) for _ in range(3)), out=there)


def test_arrays_on_two_devices(fake_cupy):
    here, there = fake_cupy.ndarray(), fake_cupy.ndarray()
    there.device = types.SimpleNamespace(id=1)
    with pytest.raises(ValueError, match="q is on device 0 but v is on device 1; expected one"):
        call(q=here, k=here, v=there)


@pytest.mark.parametrize(
    ("kernel", "error", "match"),
    [
        ("fa9_forward", ValueError, "kernel is 'fa9_forward'; expected one of host, fa1_forward"),
        ("fa1_forward", ValueError, "kernel 'fa1_forward' runs on a GPU; pass CuPy arrays, or"),
        (3, TypeError, "kernel is a int; expected a name or an Algorithm1"),
        (["host"], TypeError, "kernel is a list; expected a name or an Algorithm1"),
    ],
)
def test_kernels_that_can_not_run(kernel, error, match):
    x = zeros(3, 4)
    with pytest.raises(error, match=f"^attention: {match}"):
        attention(x, x, x, kernel=kernel)


# ---- out -----------------------------------------------------------------------------------------


def test_out_of_another_shape_or_dtype():
    q, k = zeros(2, 5, 8), zeros(2, 6, 8)
    with pytest.raises(ValueError, match=r"out.shape is \(5, 8\); expected \(2, 5, 8\)"):
        attention(q, k, k, out=zeros(5, 8))
    with pytest.raises(ValueError, match=r"out.shape is \(1, 2, 5, 8\); expected \(2, 5, 8\)"):
        attention(q, k, k, out=zeros(1, 2, 5, 8))
    with pytest.raises(TypeError, match=r"out.dtype is float64; expected float32"):
        attention(q, k, k, out=zeros(2, 5, 8, dtype=float))


def test_out_that_can_not_be_written():
    q, k = zeros(2, 5, 8), zeros(2, 6, 8)
    read_only = zeros(2, 5, 8)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only; expected an array that can be written"):
        attention(q, k, k, out=read_only)
    one_row = np.lib.stride_tricks.as_strided(zeros(8), (2, 5, 8), (0, 0, 4), writeable=True)
    with pytest.raises(ValueError, match=r"out overlaps itself \(strides \(0, 0, 4\)\)"):
        attention(q, k, k, out=one_row)
    windows = np.lib.stride_tricks.as_strided(zeros(40), (2, 5, 8), (64, 16, 4), writeable=True)
    with pytest.raises(ValueError, match="out overlaps itself"):
        attention(q, k, k, out=windows)


@pytest.mark.parametrize("out", [Exported(zeros(2, 5, 8)), [[[0.0]]], memoryview(b"")])
def test_out_that_is_no_array(out):
    q, k = zeros(2, 5, 8), zeros(2, 6, 8)
    with pytest.raises(TypeError, match=f"out is a {type(out).__name__}; expected a numpy array"):
        attention(q, k, k, out=out)


def test_out_that_shares_memory_with_an_input():
    buffer = zeros(400)
    q, k = buffer[:80].reshape(2, 5, 8), zeros(2, 6, 8)
    expected = "^attention: out shares memory with {}; expected separate memory"
    with pytest.raises(ValueError, match=expected.format("q")):
        attention(q, k, k, out=q)
    with pytest.raises(ValueError, match=expected.format("k")):
        attention(
            zeros(2, 5, 8), buffer[:96].reshape(2, 6, 8), k, out=buffer[90:170].reshape(2, 5, 8)
        )
    bias = buffer[100:160].reshape(2, 5, 6)
    with pytest.raises(ValueError, match=expected.format("bias")):
        attention(q, k, k, bias=bias, out=buffer[80:160].reshape(2, 5, 8))


def test_out_between_the_elements_of_an_input_is_separate():
    both = np.random.default_rng(0).standard_normal((2, 5, 16)).astype(F32)
    q, out = both[..., ::2], both[..., 1::2]
    expected = attention(q.copy(), q.copy(), q.copy())
    assert attention(q, q, q, out=out) is out
    np.testing.assert_array_equal(out, expected)


def test_out_beside_inputs_that_are_no_numpy_arrays():
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, 2, 5, 8))
    options = {"alibi_slopes": [0.5, 1.0], "seqlens_k": 4}
    out = poison(zeros(2, 5, 8, dtype=float))
    assert attention(Exported(q), Exported(k), Exported(v), out=out, **options) is out
    np.testing.assert_array_equal(out, attention(q, k, v, **options))
    with pytest.raises(ValueError, match="out shares memory with v"):
        attention(q, k, Exported(v), out=v, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"softmax_scale": 0.0},
        {"window": (-3, 0)},
        {"mask": zeros(9, 9, dtype=bool)},
        {"seqlens_k": 7},
        {"kernel": "fa1_forward"},
        {"causal": "left"},
    ],
)
def test_nothing_is_written_after_a_refusal(options):
    out = poison(zeros(2, 5, 8))
    with pytest.raises(ValueError, match=r"^attention: "):
        attention(zeros(2, 5, 8), zeros(2, 6, 8), zeros(2, 6, 8), out=out, **options)
    assert np.isnan(out).all()


@pytest.mark.parametrize("slope", [1e39, math.inf, math.nan])
def test_slopes_that_float32_does_not_hold(slope):
    x = np.zeros((2, 3, 4), np.float32)
    with pytest.raises(ValueError, match=r"alibi_slopes is .* expected finite numbers of float32"):
        attention(x, x, x, alibi_slopes=[1.0, slope])
