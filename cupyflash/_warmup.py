# SPDX-License-Identifier: MIT
"""Build and load what a call needs before it is made."""

from __future__ import annotations

from typing import Any

from cupyflash import _checks, _compile, _sm80
from cupyflash.plan import Plan, plan


def warmup(*, device: int | str = 0, **sizes: Any) -> Plan:
    """Build and load the kernels of a call of :func:`attention`, so that it need not wait for them.

    The first call of a specialisation (a dtype, a range of head_dim, with or without options that
    change scores) builds it in 1 to 5 s, or reads it from the cache folder. Neither belongs
    in a measurement, in a server's first answer or between the kernels of a CUDA graph.

    Parameters
    ----------
    device : int or "cpu", default 0
        Number of a GPU that is there; on "cpu" there is nothing to build.
    **sizes
        Sizes and options of the call, as for :func:`plan`.

    Returns
    -------
    Plan
        Of a call with contiguous arrays of these sizes.

    Raises
    ------
    TypeError, ValueError
        As :func:`plan`; and for a GPU that is only named or described.
    ImportError, RuntimeError
        CuPy or NVRTC is missing, or a kernel does not load.

    Examples
    --------
    >>> from cupyflash import warmup
    >>> warmup(seqlen_q=4096, head_dim=64, dtype="float16", device="cpu").kernel
    'host'
    """
    if not isinstance(device, str):
        device = _checks.integer("warmup", "device", device)
    elif device.lower() != "cpu":
        raise ValueError(
            f"warmup: device is {device!r}; expected the number of a GPU that is there, or 'cpu'"
        )
    made = plan(device=device, **sizes)
    if not isinstance(device, str):
        _compile.load(made.kernel, made.options, device, made.smem_bytes)
        if made.parts is not None and made.parts.splits > 1 and not made.parts.merges:
            options = _sm80.combine_options(made.problem.dtype.name)
            _compile.load(_sm80.COMBINE, options, device, 0)
    return made
