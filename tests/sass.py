# SPDX-License-Identifier: MIT
"""Build one specialisation of a kernel and print its SASS.

    make sass KERNEL=name [SPEC='element=bfloat16 head_dim=64 sm_90a']

SPEC holds words of the lines that ``make compile`` prints: macros, and the architecture. Of the
specialisations that have them all the first is taken.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from compile_matrix import cases, label

from cupyflash import _compile

_TOOLS = {"nvdisasm": ("-c",), "cuobjdump": ("-sass",)}
_MISSING = (
    f"{' and '.join(_TOOLS)} are missing; they come with the CUDA toolkit, or: {sys.executable} -m "
    "pip install 'cuda-toolkit[nvdisasm]'"
)


def disassembler() -> list[str] | None:
    """The command that makes SASS of a cubin: on the PATH, of a toolkit, or of a wheel."""
    toolkits = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [Path(root, "bin") for root in toolkits if root]
    folders += [found for path in sys.path for found in Path(path).glob("nvidia/*/bin")]
    places = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])
    for tool, arguments in _TOOLS.items():
        if found := shutil.which(tool, path=places):
            return [found, *arguments]
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", choices=_compile.kernel_names())
    parser.add_argument("words", nargs="*", help="of the specialisation")
    asked = parser.parse_args(arguments)
    wanted = set(asked.words)
    found = [c for c in cases(asked.kernel) if wanted <= {*label(c[1]).split(), c[2]}]
    if not found:
        parser.error(f"no specialisation of {asked.kernel} has {' '.join(asked.words)}")
    if (command := disassembler()) is None:
        print(f"sass.py: {_MISSING}", file=sys.stderr)
        return 1
    built = _compile.build(*found[0])
    title = f"{built.kernel} {built.architecture} {label(built.options)}"
    print(f"// {title}: the first of {len(found)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, f"{built.kernel}.cubin")
        cubin.write_bytes(built.cubin)
        return subprocess.run([*command, str(cubin)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
