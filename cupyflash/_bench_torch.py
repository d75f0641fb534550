# SPDX-License-Identifier: MIT
"""torch as a peer of ``bench``: its attention with one backend at a time, if it can be imported."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from cupyflash import _bench
from cupyflash._messages import one_line

BACKENDS = {
    # The name in SDPBackend, and the first word of torch's messages about it.
    _bench.CUDNN: ("CUDNN_ATTENTION", "cudnn"),
    _bench.FLASH2: ("FLASH_ATTENTION", "flash"),
    _bench.EFFICIENT: ("EFFICIENT_ATTENTION", "mem"),
    _bench.UNFUSED: ("MATH", "math"),
    _bench.TORCH: (None, ""),
}


def import_torch() -> tuple[Any, str]:
    """torch and an empty text, or None and why not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            import torch.nn.attention
        if not torch.cuda.is_available():
            return None, "torch is built without CUDA, or sees no GPU"
    except ModuleNotFoundError:
        return None, "not installed"
    except Exception as error:  # a broken installation fails in many ways
        return None, f"can't be imported: {one_line(error)}"
    return torch, ""


@contextlib.contextmanager
def only_backend(torch: Any, backend: str | None, word: str) -> Iterator[None]:
    """Allow torch's attention one backend only; None is its own choice.

    Raises
    ------
    RuntimeError
        With the reason that torch gives as a warning, where the backend refuses a call.
    """
    if backend is None:
        yield
        return
    attention_module = torch.nn.attention
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with attention_module.sdpa_kernel(getattr(attention_module.SDPBackend, backend)):
                yield
        except RuntimeError as error:
            messages = [str(warning.message) for warning in caught]
            reason = refusal_reason(messages, word)
            if reason is None:
                raise
            raise RuntimeError(reason) from error


def refusal_reason(messages: Sequence[str], word: str) -> str | None:
    """What torch's warnings say about the backend whose messages start with ``word``.

    torch announces each backend's reasons by a line of its own.

    Examples
    --------
    >>> refusal_reason(["Memory efficient kernel not used because:", "it is disabled.",
    ...                 "Flash attention kernel not used because: (Triggered internally at x.h:1)",
    ...                 "Expected half precision. (Triggered internally at x.h:2)"], "flash")
    'Expected half precision.'
    """
    plain = [one_line(Warning(text.partition("(Triggered internally")[0])) for text in messages]
    for line, reason in itertools.pairwise(plain):
        if line.lower().startswith(word) and "not used because" in line:
            return reason
    return None


def cudnn_version(number: int | None) -> str:
    """From cuDNN 9 on, ``major * 10,000 + minor * 100 + patch``; before, ``major * 1,000``.

    Examples
    --------
    >>> cudnn_version(91900), cudnn_version(8907), cudnn_version(None)
    ('9.19.0', '8.9.7', 'none')
    """
    if not number:
        return "none"
    major = number // 10_000 if number >= 90_000 else number // 1000
    rest = number % 10_000 if number >= 90_000 else number % 1000
    return f"{major}.{rest // 100}.{rest % 100}"
