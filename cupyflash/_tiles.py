# SPDX-License-Identifier: MIT
"""What the kernels that have tile tables share: macros, the width of accesses, the L2 cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupyflash import _arrays, _params

if TYPE_CHECKING:
    from cupyflash import _sm80, _sm90

# The K and V of the heads that are walked together take at most this part of the L2 cache: half,
# since each of its two partitions keeps what the other's multiprocessors ask for.
L2_SHARE = 0.4
_VECTOR = 16  # bytes of the widest access


def options(tiles: _sm80.Tiles | _sm90.Tiles, dtype: str, general: bool) -> tuple[str, ...]:
    """The -D macros that all of them have."""
    return (
        f"-DCUPYFLASH_ELEMENT={dtype}",
        f"-DCUPYFLASH_GENERAL={int(general)}",
        f"-DCUPYFLASH_HEAD_DIM={tiles.head_dim}",
        f"-DCUPYFLASH_HEAD_DIM_V={tiles.head_dim_v}",
        f"-DCUPYFLASH_BR={tiles.Br}",
        f"-DCUPYFLASH_BC={tiles.Bc}",
        f"-DCUPYFLASH_STAGES={tiles.stages}",
    )


def vectors(name: str, views: dict[str, Any]) -> bool:
    """Whether rows can be accessed 16 bytes at a time: contiguous, all of them aligned."""
    if f"{name}.data" not in views:
        return False
    contiguous = views[f"{name}.col"] == 1 or views[f"{name}.data"][0].shape[-1] == 1
    return contiguous and not any(step % _VECTOR for step in _steps(name, views))


def _steps(name: str, views: dict[str, Any]) -> list[int]:
    """Bytes from one row, head or batch entry of an array to the next, and to its first element."""
    array, byte_offset = views[f"{name}.data"]
    axes = ("row", "head", *(f"batch[{axis}]" for axis in range(_params.BATCH_AXES)))
    steps = [array.dtype.itemsize * views.get(f"{name}.{axis}", 0) for axis in axes]
    return [*steps, _arrays.address(array) + byte_offset]
