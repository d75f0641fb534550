# SPDX-License-Identifier: MIT
"""Layouts of arrays, guards around them, poison."""

import ml_dtypes
import numpy as np
import pytest

from cupyflash.testing import (
    LAYOUTS,
    arrange,
    copy_with_layout,
    guarded_empty,
    poison,
)

NUMPY_DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


# ---- layouts


@pytest.mark.parametrize("dtype", [*NUMPY_DTYPES, bool])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 4), (5,), (2, 0, 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_the_values(layout, shape, dtype):
    values = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    array = arrange(values, layout)
    expected = np.broadcast_to(values[:1], shape) if layout == "broadcast" else values
    np.testing.assert_array_equal(array, expected)
    assert array.dtype == values.dtype
    assert not np.shares_memory(array, values)

    copied = copy_with_layout(array)
    np.testing.assert_array_equal(copied, expected)
    if array.size:
        assert copied.strides == array.strides
        assert copied.ctypes.data % 256 == array.ctypes.data % 256
        assert not np.shares_memory(copied, array)


@pytest.mark.parametrize("layout", ["sliced", "strided"])
def test_slack_between_rows_is_nan(layout):
    array = arrange(np.ones((3, 4), np.float16), layout)
    assert np.isnan(array.base).sum() == array.base.size - 12


def test_arrange_refuses_an_unknown_layout():
    with pytest.raises(ValueError, match="layout is 'fortran'; expected one of contiguous"):
        arrange(np.ones((2, 2)), "fortran")


# ---- guards


@pytest.mark.parametrize("dtype", [*NUMPY_DTYPES, np.int32])
@pytest.mark.parametrize("shape", [(3, 5), 7, (), (0, 4)])
def test_guarded_array_is_poisoned_and_watched(shape, dtype):
    array, check = guarded_empty(shape, dtype, guard_bytes=256)
    assert array.shape == np.empty(shape).shape
    assert np.all(array == -1) if dtype == np.int32 else np.isnan(array).all()
    array[...] = 1
    check()


@pytest.mark.parametrize(
    ("past", "message"),
    [(15, "4 bytes after .* nearest 1 bytes"), (-1, "4 bytes before .* nearest 1 bytes")],
)
def test_guard_reports_a_write_outside(past, message):
    array, check = guarded_empty((3, 5), np.float32)
    beyond = np.lib.stride_tricks.as_strided(array[:1, :1], (40,), (4,))
    if past < 0:
        beyond = np.flip(np.lib.stride_tricks.as_strided(array[:1, :1], (2,), (-4,)))
        beyond[0] = 0
    else:
        beyond[past] = 0
    with pytest.raises(AssertionError, match=message):
        check()


def test_guard_width_is_checked():
    with pytest.raises(ValueError, match="guard_bytes is 100"):
        guarded_empty(3, np.float32, guard_bytes=100)
    with pytest.raises(TypeError, match=r"guarded_empty: guard_bytes is 256.0"):
        guarded_empty(3, np.float32, guard_bytes=256.0)


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        (-1, ValueError, "an axis of shape is -1; expected 0 or more"),
        ((-2, -3), ValueError, "an axis of shape is -2"),
        ((2, 1.5), TypeError, "an axis of shape is 1.5; expected an integer"),
    ],
)
def test_guarded_shape_is_checked(shape, error, message):
    with pytest.raises(error, match=f"guarded_empty: {message}"):
        guarded_empty(shape, np.float32)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_poison_is_nan(dtype):
    assert np.isnan(poison(np.zeros((2, 3), dtype))).all()


@pytest.mark.parametrize("dtype", ["int16", "uint8", "uint64"])
def test_poison_sets_all_bits_of_an_integer(dtype):
    assert set(poison(np.zeros(3, dtype)).tobytes()) == {0xFF}
