# SPDX-License-Identifier: MIT
"""What the tests of arguments share: problems of zeros, and arrays of other libraries."""

import numpy as np

from cupyflash._problem import from_arrays

F32 = np.float32


def zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


def call(q=(4, 6, 8), k=(2, 10, 8), v=(2, 10, 8), **options):
    """Pose a problem; shapes stand for arrays of zeros."""
    arrays = (zeros(*x) if isinstance(x, tuple) else x for x in (q, k, v))
    return from_arrays("attention", *arrays, **options)


class Exported:
    """An array of some other library, which can only be taken through DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()
