# SPDX-License-Identifier: MIT
"""Build every specialisation for every architecture and print what each one takes.

    make compile [KERNEL=name]

One line per specialisation and architecture; "smem" is static and dynamic shared memory of a block,
"blocks" how many thread blocks of the largest size a multiprocessor holds. The exit code is 1 if
one spills, keeps a stack frame, takes more than the architecture has, or does not build.

What was built without a fault is remembered in ``build/compiled/`` by all that a build depends on,
so that ``make test`` builds what has changed since.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cupyflash import _compile, _dtypes, _simt, _sm80, _sm90, _sm90_float32, devices, tiling

Case = tuple[str, tuple[str, ...], str]
CHECKED = Path(__file__).resolve().parent.parent / "build" / "compiled"


def cases(kernel: str | None = None) -> Iterator[Case]:
    """Every (kernel, options, architecture) that the tile table can ask for with this NVRTC."""
    # CUDA 13 builds for sm_75 and newer only.
    oldest = (7, 5) if _compile.nvrtc_version() >= (13, 0) else (7, 0)
    for name, options, architectures in tiling.specialisations():
        for architecture in architectures:
            capability = devices.architecture_device(architecture).compute_capability
            if kernel in (None, name) and capability >= oldest:
                yield name, tuple(options), architecture


def label(options: tuple[str, ...]) -> str:
    """``-DCUPYFLASH_ELEMENT=float32`` as ``element=float32``, for people and test ids."""
    return " ".join(option.removeprefix("-DCUPYFLASH_").lower() for option in options)


def tiles(kernel: str, options: tuple[str, ...]) -> _sm80.Tiles | _sm90.Tiles | None:
    """The row of a tile table behind a specialisation; None where sizes are run-time numbers."""
    modules = (_simt, _sm80, _sm90, _sm90_float32)
    table = {module.KERNEL: module.Tiles for module in modules}.get(kernel)
    if table is None:
        return None
    macros = dict(option.removeprefix("-DCUPYFLASH_").split("=") for option in options)
    dtype = macros["ELEMENT"]
    known = {"itemsize": _dtypes.named(dtype).itemsize}
    names = [field.name for field in dataclasses.fields(table)]
    found = {name: macros[name.upper()] for name in names if name.upper() in macros}
    known |= {name: int(x) if x.isdigit() else x for name, x in found.items()}
    return table(**{name: known[name] for name in names if name in known})


def dynamic_smem_bytes(kernel: str, options: tuple[str, ...], architecture: str) -> int:
    """Dynamic shared memory of a block; the most of it, where it is a run-time number."""
    if kernel == "fa1_forward":  # M of the paper: all that there is
        return devices.architecture_device(architecture).smem_block_bytes
    row = tiles(kernel, options)
    return row.smem_bytes if row else 0


def resident_blocks(build: _compile.Build) -> int:
    """Thread blocks of the largest size on a multiprocessor."""
    smem_bytes = build.static_smem_bytes + dynamic_smem_bytes(
        build.kernel, build.options, build.architecture
    )
    device = devices.architecture_device(build.architecture)
    return device.resident_blocks(build.max_threads, build.registers, smem_bytes)


def spill_bytes_allowed(kernel: str, architecture: str) -> int:
    """How many bytes a thread may spill where the compiler can't be talked out of it.

    fa1_forward's 512 threads have 128 registers each and its products fill them; what ptxas puts
    to local memory are the numbers of the step (i, j), read once a step. The loops of the products
    hold no access to local memory (read in the SASS for sm_90a, sm_100 and sm_120). Volta has no
    uniform registers, so that what is the same for all lanes takes ordinary ones.

    Which build of the others doesn't fit by a number or two differs from one NVRTC to the next.
    forward_sm80 spills 8 bytes in one by 13.5, float32 at head_dim 128 for sm_120. For sm_100 every
    NVRTC puts up to ten numbers to local memory at head_dim 128 in 16 bits, where two blocks share
    a multiprocessor, in the build with all options or in the other: written before a product of a
    step and read behind it, none between the product's instructions. So does forward_simt in
    float64 with two, by 13.0. forward_sm90 spills 16 bytes (by 13.5 24) in one build, that with a
    mask at head_dim 64, whose three consumers have 160 registers a thread.
    """
    allowed = {
        "fa1_forward": 160 if architecture == "sm_70" else 48,
        "forward_simt": 16 if architecture == "sm_100" else 0,
        "forward_sm80": 40 if architecture == "sm_100" else 16,
        "forward_sm90": 24,
    }
    return allowed.get(kernel, 0)


def faults(build: _compile.Build) -> list[str]:
    """What a build must not have.

    Thread-private data that went to local memory, more shared memory than there is, fewer blocks on
    a multiprocessor than the tile table counts on, and warnings. Where a spill is allowed,
    `spill_bytes_allowed` says.
    """
    found = []
    allowed = spill_bytes_allowed(build.kernel, build.architecture)
    for name in ("spill_store_bytes", "spill_load_bytes", "stack_bytes"):
        if (count := getattr(build, name)) > allowed:
            found.append(f"{name} {count}")
    limit = devices.architecture_device(build.architecture).smem_block_bytes
    dynamic = dynamic_smem_bytes(build.kernel, build.options, build.architecture)
    if build.static_smem_bytes + dynamic > limit:
        found.append(
            f"shared memory {build.static_smem_bytes} static + {dynamic} dynamic, of {limit}"
        )
    expected = getattr(tiles(build.kernel, build.options), "blocks", 1)
    if (blocks := resident_blocks(build)) < expected:
        found.append(f"blocks on a multiprocessor {blocks}, expected {expected}")
    # That NVRTC 12.9 will be the last to know sm_70 is no fault of the text.
    warnings = (line.strip() for line in build.log.splitlines() if "warning" in line.lower())
    found += [line for line in warnings if "Architectures prior to" not in line]
    return found


def included(kernel: str, sources: dict[str, bytes]) -> dict[str, bytes]:
    """The kernel's text and those that it includes, however deep and under whatever condition."""
    wanted, found = [f"{kernel}.cu"], {}
    while wanted:
        name = wanted.pop()
        if name in sources and name not in found:
            found[name] = sources[name]
            wanted += [n.decode() for n in re.findall(rb'#include "([^"]+)"', sources[name])]
    return found


def _stamp(case: Case) -> Path:
    kernel, options, architecture = case
    texts = included(kernel, _compile.kernel_sources())
    key = _compile._key(kernel, options, architecture, texts)
    rules = (
        spill_bytes_allowed(kernel, architecture),
        dynamic_smem_bytes(kernel, options, architecture),
    )
    return CHECKED / hashlib.sha256(f"{key} {rules}".encode()).hexdigest()[:32]


def is_checked(case: Case) -> bool:
    """Whether this very build, by this NVRTC, had no fault."""
    return _stamp(case).exists()


def check(case: Case) -> list[str]:
    """Faults of a build, remembered where there are none."""
    found = faults(_compile.build(*case))
    if not found:
        CHECKED.mkdir(parents=True, exist_ok=True)
        _stamp(case).touch()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", choices=_compile.kernel_names(), help="only this kernel")
    parser.add_argument("--jobs", type=int, default=2, help="builds at a time (default 2)")
    arguments = parser.parse_args()

    print("NVRTC {}.{}".format(*_compile.nvrtc_version()))
    print(
        f"{'kernel':14} {'arch':7} {'regs':>4} {'spill':>5} {'stack':>5} {'smem':>11} "
        f"{'threads':>7} {'blocks':>6} {'seconds':>7}  specialisation"
    )
    failures = count = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for case, line, wrong in pool.map(_line, cases(arguments.kernel)):
            count += 1
            print(f"{case[0]:14} {case[2]:7} {line:51}  {label(case[1])}", flush=True)
            if wrong:
                failures += 1
                print("    " + "\n    ".join(wrong), flush=True)
    print(f"{count} builds, {failures} with faults")
    return int(failures > 0)


def _line(case: Case) -> tuple[Case, str, list[str]]:
    try:
        build = _compile.build(*case)
    except RuntimeError as error:
        return case, "does not build", str(error).splitlines()
    smem = f"{build.static_smem_bytes}+{dynamic_smem_bytes(*case)}"
    numbers = (
        f"{build.registers:4} {build.spill_store_bytes + build.spill_load_bytes:5} "
        f"{build.stack_bytes:5} {smem:>11} {build.max_threads:7} {resident_blocks(build):6} "
        f"{build.seconds:7.2f}"
    )
    return case, numbers, check(case)


if __name__ == "__main__":
    sys.exit(main())
