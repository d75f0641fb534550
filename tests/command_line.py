# SPDX-License-Identifier: MIT
"""How the tests of the command line call it."""

import os
import subprocess
import sys
from pathlib import Path

import cupyflash
from cupyflash.__main__ import main

ROOT = Path(cupyflash.__file__).parents[1]


def shell(*argv):
    """Run ``python -m cupyflash`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "cupyflash", *argv],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def refused(capsys, *argv):
    """Run a command that must fail, and return its one line on stderr."""
    assert main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"cupyflash {argv[0]}: ")
    return lines[0]
