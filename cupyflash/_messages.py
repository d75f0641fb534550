# SPDX-License-Identifier: MIT
"""What messages share: an error on one line, the commands that install what is missing."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """The message of ``error`` on one line, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def install_command(extra: str) -> str:
    """The command that installs an extra of this package."""
    return f"pip install 'cupyflash[{extra}]'"


# What brings CuPy, NVRTC and their bindings, behind the name of what is missing.
INSTALL_GPU = f"{install_command('cuda13')} (or 'cupyflash[cuda12]' for a CUDA 12 driver)"
