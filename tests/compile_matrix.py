# SPDX-License-Identifier: MIT
"""Build every specialisation for every architecture and print what each one takes.

    make compile [KERNEL=name]

One line per specialisation and architecture; "blocks" is how many thread blocks of the largest size
a multiprocessor holds by its registers and threads (dynamic shared memory is the plan's matter, and
limits them further). The exit code is 1 if one spills, keeps a stack frame or does not build.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from cupyflash import _compile, devices, tiling

Case = tuple[str, tuple[str, ...], str]


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


def faults(build: _compile.Build) -> list[str]:
    """What a build must not have: thread-private data that went to local memory, and warnings.

    The tile table says where a spill is allowed.
    """
    found = []
    allowed = tiling.spill_bytes_allowed(build.kernel, build.architecture)
    for name in ("spill_store_bytes", "spill_load_bytes", "stack_bytes"):
        if (count := getattr(build, name)) > allowed:
            found.append(f"{name} {count}")
    found += [line.strip() for line in build.log.splitlines() if "warning" in line.lower()]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", choices=_compile.kernel_names(), help="only this kernel")
    parser.add_argument("--jobs", type=int, default=2, help="builds at a time (default 2)")
    arguments = parser.parse_args()

    print("NVRTC {}.{}".format(*_compile.nvrtc_version()))
    print(
        f"{'kernel':20} {'specialisation':34} {'arch':8} {'regs':>4} {'spill':>5} {'stack':>5} "
        f"{'smem':>6} {'threads':>7} {'blocks':>6} {'seconds':>7}"
    )
    failures = count = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for case, line, wrong in pool.map(_line, cases(arguments.kernel)):
            count += 1
            print(f"{case[0]:20} {label(case[1]):34} {case[2]:8} {line}", flush=True)
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
    blocks = devices.architecture_device(build.architecture).resident_blocks(
        build.max_threads, build.registers, build.static_smem_bytes
    )
    numbers = (
        f"{build.registers:4} {build.spill_store_bytes + build.spill_load_bytes:5} "
        f"{build.stack_bytes:5} {build.static_smem_bytes:6} {build.max_threads:7} {blocks:6} "
        f"{build.seconds:7.2f}"
    )
    return case, numbers, faults(build)


if __name__ == "__main__":
    sys.exit(main())
