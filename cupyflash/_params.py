# SPDX-License-Identifier: MIT
"""Parameter structs of ``kernels/common/params.cuh`` as bytes, field by field.

Every field has eight bytes, so one format string packs a whole struct. Pointers are packed as 0
and listed beside it: the GPU path puts device addresses there, a host harness its own.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

from cupyflash import _arrays

BATCH_AXES = 3  # kBatchAxes

# The fields of struct TensorView and struct Problem, in order.
_VIEW = ("data", *(f"batch[{axis}]" for axis in range(BATCH_AXES)), "head", "row", "col")
_TENSORS = ("q", "k", "v", "o", "lse", "bias", "mask", "alibi_slopes", "seqlens_k")
_SCALARS = (
    *(f"batch[{axis}]" for axis in range(BATCH_AXES)),
    "heads_q",
    "heads_k",
    "seqlen_q",
    "seqlen_k",
    "head_dim",
    "head_dim_v",
    "softmax_scale",
    "softcap",
    "window_left",
    "window_right",
    "top_left",
    "bias_is_float",
    "seqlens_are_int32",
)
PROBLEM_FIELDS = (*(f"{t}.{field}" for t in _TENSORS for field in _VIEW), *_SCALARS)
# struct Fa1Params of fa1_forward.cu.
FA1_FIELDS = (*(f"problem.{name}" for name in PROBLEM_FIELDS), "O", "l", "m", "Br", "Bc", "chunks")


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A pointer field at byte ``offset`` of a struct, and what it points to.

    That is ``byte_offset`` behind the first element of ``array``.
    """

    offset: int
    name: str
    array: Any
    byte_offset: int = 0


def pack(fields: tuple[str, ...], values: dict[str, Any]) -> tuple[bytes, tuple[Pointer, ...]]:
    """Pack ``values`` in the order of ``fields``: numbers, arrays, or pairs (array, byte offset).

    Fields without a value are 0, which is a null pointer.
    """
    if unknown := values.keys() - set(fields):
        raise AssertionError(f"no such fields: {unknown}")
    numbers = []
    pointers = []
    for position, name in enumerate(fields):
        value = values.get(name, 0)
        if not isinstance(value, (int, float)):
            target = value if isinstance(value, tuple) else (value,)
            pointers.append(Pointer(8 * position, name, *target))
            value = 0
        numbers.append(value)
    layout = "<" + "".join("d" if isinstance(x, float) else "q" for x in numbers)
    return struct.pack(layout, *numbers), tuple(pointers)


def view_fields(
    name: str, array: Any, byte_offset: int, batch_strides: tuple[int, ...], *axes: str
) -> dict[str, Any]:
    """Fields of a TensorView: ``array`` from ``byte_offset`` on, its last axes being ``axes``.

    Strides are in bytes on the way in, in elements on the way out.
    """
    itemsize = array.dtype.itemsize
    argument = "out" if name == "o" else name
    if (_arrays.address(array) + byte_offset) % itemsize:
        raise ValueError(
            f"attention: {argument} begins at an address that is no multiple of its itemsize "
            f"{itemsize}; expected an aligned one"
        )
    strides = dict(zip(axes, array.strides[array.ndim - len(axes) :], strict=True))
    strides |= {f"batch[{axis}]": stride for axis, stride in enumerate(batch_strides)}
    for axis, stride in strides.items():
        if stride % itemsize:
            raise ValueError(
                f"attention: {argument} has a stride of {stride} bytes ({axis}); expected a "
                f"multiple of its itemsize {itemsize}"
            )
    fields = {f"{name}.{axis}": stride // itemsize for axis, stride in strides.items()}
    return {f"{name}.data": (array, byte_offset)} | fields
