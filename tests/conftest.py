# SPDX-License-Identifier: MIT
"""Profiles of hypothesis, the GPU that may be there, the narrowing to one kernel, a summary."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter

# Before numpy is loaded: each of xdist's workers would start a BLAS thread for every core, and on
# 16 cores the oracle took ten times as long. Two are left for the host path to share work among.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")

import hostcuda
import pytest
from hypothesis import HealthCheck, settings

from cupyflash import _cache, _call, _compile

# A first example may build a kernel, so no deadline; and machines of CI are slow.
_slow_is_fine = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", **_slow_is_fine)
settings.register_profile("ci", derandomize=True, database=None, **_slow_is_fine)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@functools.cache
def _no_gpu() -> str:
    """Why tests marked gpu can't run here; empty if they can."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    except OSError as error:
        return f"CuPy can't be imported: {error}"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no GPU: {error}"
    return ""


@pytest.fixture
def cupy():
    """CuPy, in a test marked gpu."""
    return sys.modules["cupy"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no memory of earlier builds or warnings."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(folder))
    monkeypatch.delenv("CUPYFLASH_CACHE_SIZE_MB", raising=False)
    monkeypatch.setattr(_compile, "_memory", {})
    monkeypatch.setattr(_compile, "_loaded", {})
    monkeypatch.setattr(_call, "_calls", {})
    monkeypatch.setattr(_cache, "_warned", False)
    return folder


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and (reason := _no_gpu()):
        pytest.skip(reason)


def pytest_collection_modifyitems(config, items):
    wanted = os.environ.get("CUPYFLASH_TEST_KERNEL")
    if not wanted:
        return
    if wanted not in (known := _compile.kernel_names()):
        raise pytest.UsageError(f"no kernel {wanted!r}; there are: {', '.join(known)}")
    kept = [item for item in items if _concerns(item, wanted)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _concerns(item, kernel):
    """Whether a test belongs to a kernel: by its marker, by a parameter, or by its name."""
    marked = any(kernel in marker.args for marker in item.iter_markers("kernel"))
    return marked or kernel in item.nodeid


# ---- what the run says at its end ----------------------------------------------------------------

# Launches by kernel and options, of this process and of xdist's workers that are done.
_on_gpu: Counter = Counter()
_launches = {"the CPU": hostcuda.launches, "a GPU": _on_gpu}


def pytest_configure():
    make, launch = _call._Launch.__init__, _call._Launch.__call__

    @functools.wraps(make)
    def made(self, record, *rest):
        make(self, record, *rest)
        self.specialisation = record.kernel, tuple(record.options)

    @functools.wraps(launch)
    def launched(self, *args):
        launch(self, *args)
        _on_gpu[self.specialisation] += 1

    _call._Launch.__init__, _call._Launch.__call__ = made, launched


def pytest_sessionfinish(session):
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        for place, counts in _launches.items():
            output[place] = [(kernel, options, n) for (kernel, options), n in counts.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    for place, counts in _launches.items():
        for kernel, options, n in getattr(node, "workeroutput", {}).get(place, ()):
            counts[kernel, tuple(options)] += n


def pytest_terminal_summary(terminalreporter):
    for place, counts in _launches.items():
        if counts:
            kernels = sorted({kernel for kernel, _ in counts})
            terminalreporter.write_line(
                f"{counts.total()} kernel launches on {place}, of {len(counts)} specialisations of "
                f"{len(kernels)} kernels: {', '.join(kernels)}"
            )
    reports = terminalreporter.getreports("passed")
    for kind, title in (
        ("ptx twin", "instructions on the GPU and their twins on the CPU"),
        ("random problems", "random problems against float64"),
    ):
        measured = [text for r in reports for name, text in r.user_properties if name == kind]
        if measured:
            terminalreporter.section(title)
            for text in measured:
                terminalreporter.write_line(text)
