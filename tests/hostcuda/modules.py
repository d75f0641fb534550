# SPDX-License-Identifier: MIT
"""Compile a kernel into a program that serves launches, and keep it.

The kernel's text is compiled as it stands, but for two things: the headers of ``ptx/`` are replaced
by their twins in ``hostcuda/ptx/``, and ``extern __shared__ T name[];`` becomes a pointer to the
block's memory, since C++ has no array whose address is known only at run time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hostcuda.toolchain import Toolchain, toolchain

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
_UNUSED_DAYS = 14

# -O1 is the best total of compiling and running for small shapes. Type punning is everyday in CUDA
# code. Registers that were never set hold a pattern, as they hold anything on a GPU.
_FLAGS = (
    "-std=c++17",
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fno-strict-aliasing",
    "-ftrivial-auto-var-init=pattern",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused",
)
_UNDEFINED = "alignment,bounds,integer-divide-by-zero,shift,signed-integer-overflow"
_SANITIZERS = {
    "address": (
        f"-fsanitize=address,{_UNDEFINED}",
        "-fno-sanitize-recover=all",
        "-fsanitize-sections=hostcuda_shared",
        "-DHOSTCUDA_ASAN",
    ),
    "thread": ("-fsanitize=thread", "-Wno-tsan", "-DHOSTCUDA_TSAN"),
    "none": (),
}
_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?P<align>(?:__align__|alignas)\s*\(\s*(?P<bytes>[^()]+)\)\s*)?"
    r"(?P<type>[\w:<>\s]+?)\s*\b(?P<name>\w+)\s*\[\s*\]\s*;"
)


class CompileError(Exception):
    """g++ refused a kernel; the message is the compiler's."""


@dataclass(frozen=True)
class Source:
    """A kernel's text and everything that it may include.

    Attributes
    ----------
    kernel : str
        The entry, and the name of the file: ``<kernel>.cu``.
    options : tuple of str
        ``-D`` macros.
    files : dict of str to (str, str)
        Path as included -> text, and the path that reports are to show.
    """

    kernel: str
    options: tuple[str, ...]
    files: dict[str, tuple[str, str]] = field(repr=False)


@functools.lru_cache(maxsize=16)
def _read_folder(root: Path, stamp: tuple[Any, ...]) -> dict[str, tuple[str, str]]:
    return {path.relative_to(root).as_posix(): (path.read_text(), str(path)) for path, *_ in stamp}


def _folder(root: Path) -> dict[str, tuple[str, str]]:
    """Every ``.cu``, ``.cuh``, ``.h`` and ``.cpp`` below root; read again when one has changed."""
    suffixes = {".cu", ".cuh", ".h", ".cpp"}
    paths = sorted(p for p in root.rglob("*") if p.suffix in suffixes)
    stats = [(p, p.stat()) for p in paths]
    return _read_folder(root, tuple((p, s.st_mtime_ns, s.st_size) for p, s in stats))


def source_of(record: Any, kernels: Path | None = None, source: str | None = None) -> Source:
    """The text behind a launch record.

    Parameters
    ----------
    record : LaunchRecord
        Its ``kernel`` and ``options`` are read.
    kernels : Path, optional
        Root of the sources; :func:`kernels_folder` by default.
    source : str, optional
        Text used in place of the file ``<kernel>.cu``.
    """
    root = kernels_folder() if kernels is None else Path(kernels)
    files = dict(_folder(root)) if root.is_dir() else {}
    twins = {f"ptx/{name}": entry for name, entry in _folder(HERE / "ptx").items()}
    for name in files:
        if name.startswith("ptx/") and name not in twins:
            message = f'#error "{name} has no twin in tests/hostcuda/ptx/"\n'
            files[name] = (message, files[name][1])
    files |= twins
    name = f"{record.kernel}.cu"
    if source is not None:
        files[name] = (source, name)
    if name not in files:
        raise FileNotFoundError(f"hostcuda: {root / name} does not exist")
    return Source(record.kernel, tuple(record.options), files)


def _translate(text: str, path: str) -> str:
    def pointer(match: re.Match[str]) -> str:
        kind, name = match["type"].strip(), match["name"]
        alignment = match["bytes"] or f"alignof({kind})"
        lines = "\n" * match[0].count("\n")
        return f"{kind}* const {name} = host::dynamic_shared<{kind}>({alignment});{lines}"

    return f'#line 1 "{path}"\n' + _DYNAMIC_SHARED.sub(pointer, text)


def kernels_folder() -> Path:
    """``CUPYFLASH_HOSTCUDA_KERNELS``, else ``kernels/`` of the checkout."""
    named = os.environ.get("CUPYFLASH_HOSTCUDA_KERNELS")
    return Path(named) if named else CHECKOUT / "kernels"


def cache_folder() -> Path:
    """``CUPYFLASH_HOSTCUDA_CACHE``, else ``build/hostcuda`` in the checkout."""
    named = os.environ.get("CUPYFLASH_HOSTCUDA_CACHE")
    return Path(named) if named else CHECKOUT / "build" / "hostcuda"


def _digest(*parts: str) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.encode())
        sha.update(b"\0")
    return sha.hexdigest()[:32]


def _flags(tools: Toolchain, sanitizer: str) -> list[str]:
    includes = [f"-I{HERE / 'include'}", f"-I{HERE / 'runtime'}"]
    includes += [f"-isystem{folder}" for folder in tools.headers]
    return [*_FLAGS, *_SANITIZERS[sanitizer], *includes]


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"hostcuda: {what} does not compile for the CPU\n{done.stderr}")


@contextlib.contextmanager
def _building(target: Path) -> Iterator[Path | None]:
    """A folder to build in, renamed to ``target`` at the end; None if another process was first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield None
            return
        scratch = Path(tempfile.mkdtemp(prefix="tmp-", dir=target.parent))
        try:
            yield scratch
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _base(tools: Toolchain, sanitizer: str) -> Path:
    """The runtime's objects and the precompiled CUDA headers: what all modules share."""
    flags = _flags(tools, sanitizer)
    texts = [
        text for folder in ("include", "runtime") for text, _ in _folder(HERE / folder).values()
    ]
    target = cache_folder() / f"base-{_digest(tools.version, *flags, *texts)}"
    if target.exists():
        return target
    with _building(target) as scratch:
        if scratch is not None:
            # The runtime moves between stacks and copies what is no access of the kernel's: it is
            # told to the sanitizers by hand, not instrumented.
            plain = [f for f in flags if not f.startswith(("-fsanitize", "-fno-sanitize"))]
            for unit in ("scheduler", "server"):
                text = str(HERE / "runtime" / f"{unit}.cpp")
                _run([tools.compiler, *plain, "-O2", "-c", text, "-o", f"{scratch}/{unit}.o"], unit)
            header = str(HERE / "include" / "cuda_host.h")
            pch = f"{scratch}/cuda_host.h.gch"
            _run([tools.compiler, *flags, "-x", "c++-header", header, "-o", pch], "cuda_host.h")
    return target


def compiled(source: Source, sanitizer: str = "address") -> Path:
    """The program that serves launches of this kernel, compiled if it was not found.

    Raises
    ------
    CompileError
        With the compiler's messages.
    RuntimeError
        If the compiler or the headers are missing.
    """
    if sanitizer not in _SANITIZERS:
        raise ValueError(f"compiled: sanitizer is {sanitizer!r}; expected one of {[*_SANITIZERS]}")
    tools = toolchain()
    base = _base(tools, sanitizer)
    parts = [f"{name}\0{text}" for name, (text, _) in sorted(source.files.items())]
    key = _digest(base.name, source.kernel, *source.options, *parts)
    target = cache_folder() / f"{source.kernel}-{sanitizer}-{key}"
    program = target / "module"
    if program.exists():
        os.utime(target)
        return program
    with _building(target) as scratch:
        if scratch is not None:
            with tempfile.TemporaryDirectory() as tree:
                for name, (text, path) in source.files.items():
                    file = Path(tree, name)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(_translate(text, path))
                # In a namespace of its own, the kernel may define what the host's headers define
                # too, and its static shared arrays are ordinary variables in any template.
                Path(tree, "hostcuda_module.cpp").write_text(
                    f'namespace {{\n#include "{source.kernel}.cu"\n}}\n'
                    f"HOSTCUDA_ENTRY({source.kernel});\n"
                )
                unit, objects = f"{tree}/hostcuda_module.cpp", f"{tree}/module.o"
                command = [tools.compiler, f"-I{base}", *_flags(tools, sanitizer)]
                command += ["-include", "cuda_host.h", *source.options, f"-I{tree}"]
                _run([*command, "-c", unit, "-o", objects], f"{source.kernel}.cu")
                link = [f for f in _SANITIZERS[sanitizer] if f.startswith("-fsanitize=")]
                runtime = [str(base / "scheduler.o"), str(base / "server.o")]
                output = ["-lboost_context", "-o", f"{scratch}/module"]
                _run([tools.compiler, *link, objects, *runtime, *output], f"{source.kernel}.cu")
            _prune()
    return program


def _prune() -> None:
    """Drops what no run has used for two weeks."""
    limit = time.time() - _UNUSED_DAYS * 86400
    for entry in cache_folder().iterdir():
        with contextlib.suppress(OSError):
            if entry.stat().st_mtime < limit:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def compile_many(
    records: Iterable[Any],
    *,
    sanitizer: str = "address",
    kernels: Path | None = None,
    jobs: int = 2,
) -> int:
    """Compile the modules of launch records, ``jobs`` at a time; returns how many there are."""
    sources = [source_of(record, kernels) for record in records]
    distinct = {(s.kernel, s.options): s for s in sources}
    if distinct:
        _base(toolchain(), sanitizer)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda s: compiled(s, sanitizer), distinct.values()))
    return len(distinct)
