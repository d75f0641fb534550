# SPDX-License-Identifier: MIT
"""Arrays from .npy and .npz files, mapped into memory and not read."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from typing import Any

import numpy as np

from cupyflash import _dtypes
from cupyflash._cli_common import CommandError
from cupyflash._messages import one_line

_NPY_MAGIC = b"\x93NUMPY"
_LOCAL_HEADER_BYTES = 30  # of a zip member; the lengths of its name and extra field come last
_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_array(path: str, name: str, shared: bool = False) -> np.ndarray:
    """Map the array in ``path``, of a .npz the one called ``name`` or else the only one.

    A compressed member of a .npz can't be mapped and is read.

    Parameters
    ----------
    path : str
    name : str
    shared : bool
        The file holds other arrays as well: it must be a .npz, and the names in it are binding.

    Raises
    ------
    CommandError
        The file is missing, unreadable, cut short, of another kind, or holds Python objects.
    """
    try:
        with open(path, "rb") as stream:
            magic = stream.read(len(_NPY_MAGIC))
        if magic == _NPY_MAGIC:
            if shared:
                raise CommandError(f"{path}: this is one array; expected a .npz that holds several")
            return np.load(path, mmap_mode="r", allow_pickle=False)
        if zipfile.is_zipfile(path):
            return _read_member(path, name, shared)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or one_line(error)}") from error
    except (
        # A header that numpy can't read, or a negative axis in it.
        *(ValueError, EOFError, SyntaxError, tokenize.TokenError, OverflowError),
        *(zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError),  # or an archive
    ) as error:
        raise CommandError(f"{path}: {one_line(error)}") from error
    raise CommandError(f"{path}: this is neither a .npy nor a .npz file")


def as_dtype(array: np.ndarray, dtype: str | None, path: str) -> np.ndarray:
    """Convert to ``dtype``, if one was asked for; the files know bfloat16 only as two raw bytes.

    Raises
    ------
    CommandError
        The array is made of raw bytes, or of something that is no real number.
    """
    if array.dtype == np.dtype("V2") and dtype == "bfloat16":
        return array.view(_dtypes.bfloat16)
    if array.dtype.kind == "V":
        hint = "; --dtype bfloat16 reads them so" if array.dtype == np.dtype("V2") else ""
        raise CommandError(
            f"{path}: this holds raw elements of {array.dtype.itemsize} bytes, not numbers{hint}"
        )
    if dtype is None:
        return array
    if array.dtype.kind not in "fiu":
        raise CommandError(f"{path}: {array.dtype} can't be converted to {dtype}")
    return array.astype(_dtypes.named(dtype), copy=False)


def npy_writer(array: Any) -> Any:
    """A function that writes ``array`` as .npy into a stream."""
    return lambda stream: np.save(stream, array, allow_pickle=False)


def _read_member(path: str, name: str, shared: bool) -> np.ndarray:
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if name not in members:
            if shared or len(members) != 1:
                found = ", ".join(members) or "nothing"
                raise CommandError(f"{path}: this has no array {name!r} (it holds {found})")
            (name,) = members
        info = members[name]
        with archive.open(info) as stream:
            read_header = _HEADER_READERS.get(np.lib.format.read_magic(stream))
            if info.compress_type != zipfile.ZIP_STORED or read_header is None:
                with np.load(path, allow_pickle=False) as arrays:
                    return arrays[name]
            shape, fortran_order, dtype = read_header(stream)
            header_bytes = stream.tell()
    if dtype.hasobject:
        raise CommandError(f"{path}: {name!r} holds Python objects; expected numbers")
    if min(shape, default=0) < 0:
        raise CommandError(f"{path}: {name!r} has shape {shape}; expected no negative lengths")
    if header_bytes + math.prod(shape) * dtype.itemsize > info.file_size:
        raise CommandError(f"{path}: {name!r} is cut short")
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    with open(path, "rb") as stream:
        stream.seek(info.header_offset)
        local = stream.read(_LOCAL_HEADER_BYTES)
    name_and_extra = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    return np.memmap(
        path,
        dtype,
        mode="r",
        offset=info.header_offset + _LOCAL_HEADER_BYTES + name_and_extra + header_bytes,
        shape=shape,
        order="F" if fortran_order else "C",
    )
