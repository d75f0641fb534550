# SPDX-License-Identifier: MIT
"""A folder of built kernels that many processes share, and that may vanish or rot at any time.

An entry is two files: ``<key>.json`` says what a build reported and names its cubin by checksum,
``<sha256>.cubin`` is the cubin. Each is written aside and renamed, the cubin first, so that a
reader sees a whole entry or none; whatever can't be read or does not match its checksum is a miss.
Nothing here raises for a folder that can't be used: the caller then keeps the build in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

_DEFAULT_SIZE_MB = 512
_OURS = re.compile(r"[0-9a-f]{64}\.(json|cubin)|tmp-cupyflash-.*")

_warned = False


def folder() -> Path | None:
    """Where cubins are kept: ``CUPYFLASH_CACHE_DIR``, else ``cupyflash`` in the user's cache.

    Returns
    -------
    Path or None
        None where there is no home directory, or where the size limit is 0.

    Raises
    ------
    ValueError
        If ``CUPYFLASH_CACHE_SIZE_MB`` is not a number of megabytes.
    """
    if size_limit() == 0:
        return None
    if chosen := os.environ.get("CUPYFLASH_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification says to ignore a relative one
        return Path(base) / "cupyflash"
    try:
        return Path.home() / ".cache" / "cupyflash"
    except RuntimeError:
        return None


def size_limit() -> int:
    """Bytes that the folder may hold, from ``CUPYFLASH_CACHE_SIZE_MB`` (default 512)."""
    text = os.environ.get("CUPYFLASH_CACHE_SIZE_MB", "") or str(_DEFAULT_SIZE_MB)
    try:
        megabytes = float(text)
        if megabytes >= 0:
            return int(megabytes * 1e6)
    except (OverflowError, ValueError):
        pass
    raise ValueError(
        f"cupyflash: the environment variable CUPYFLASH_CACHE_SIZE_MB is {text!r}; expected a "
        "number of megabytes, 0 or more (0 keeps kernels in memory only)"
    )


def find(key: str) -> tuple[dict[str, Any], bytes, Path] | None:
    """Return what :func:`store` was given under ``key`` and the cubin's path, or None."""
    where = folder()
    if where is None:
        return None
    try:
        record = json.loads((where / f"{key}.json").read_bytes())
        checksum, report = record["sha256"], record["report"]
        path = where / f"{checksum}.cubin"
        cubin = path.read_bytes()
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if hashlib.sha256(cubin).hexdigest() != checksum or not isinstance(report, dict):
        return None
    for used in (where / f"{key}.json", path):
        with contextlib.suppress(OSError):  # a folder that can only be read keeps its times
            os.utime(used)
    return report, cubin, path


def store(key: str, report: dict[str, Any], cubin: bytes) -> Path | None:
    """Keep a build for later processes.

    Parameters
    ----------
    key : str
        64 hexadecimal digits that stand for everything the build depends on.
    report : dict
        What the build reported; anything JSON can hold.
    cubin : bytes
        The built kernel.

    Returns
    -------
    Path or None
        The cubin's path; None if it could not be stored, which is warned of once a process.
    """
    where = folder()
    if where is None:
        return None
    checksum = hashlib.sha256(cubin).hexdigest()
    path = where / f"{checksum}.cubin"
    try:
        where.mkdir(parents=True, exist_ok=True)
        _replace(path, cubin)
        _replace(where / f"{key}.json", json.dumps({"sha256": checksum, "report": report}).encode())
    except OSError as error:
        _warn_once(where, error)
        return None
    _evict(where, {path.name, f"{key}.json"})
    return path


def clear() -> None:
    """Delete every file in the folder that this module wrote; other files stay."""
    where = folder()
    if where is not None:
        for path, _ in _files(where):
            with contextlib.suppress(OSError):
                path.unlink()


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that no reader ever sees a part of it."""
    handle, aside = tempfile.mkstemp(prefix="tmp-cupyflash-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def _files(where: Path) -> list[tuple[Path, os.stat_result]]:
    """Our files in the folder, the longest unused first."""
    found = []
    with contextlib.suppress(OSError):
        for path in where.iterdir():
            if _OURS.fullmatch(path.name):
                with contextlib.suppress(OSError):  # another process may have deleted it
                    found.append((path, path.stat()))
    return sorted(found, key=lambda entry: entry[1].st_mtime_ns)


def _evict(where: Path, keep: set[str]) -> None:
    """Delete what was not used for longest until the folder is within its limit.

    Files are judged one by one: half an entry is a miss, and its other half ages in turn.
    """
    files = _files(where)
    excess = sum(stat.st_size for _, stat in files) - size_limit()
    for path, stat in files:
        if excess <= 0:
            return
        if path.name not in keep:
            with contextlib.suppress(OSError):
                path.unlink()
            excess -= stat.st_size


def _warn_once(where: Path, error: OSError) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"cupyflash can't keep built kernels in {where} ({error.strerror or error}); each "
            "process will build its own. Point CUPYFLASH_CACHE_DIR at a folder that can be "
            "written, or set CUPYFLASH_CACHE_SIZE_MB=0 to keep kernels in memory",
            RuntimeWarning,
            stacklevel=4,
        )
