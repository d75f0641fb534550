# SPDX-License-Identifier: MIT
"""Built kernels become functions of a device, once each; without a GPU, of a stand-in for CuPy."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from test_compile import SOURCES, build

from cupyflash import _compile, devices


class FakeCupy(types.ModuleType):
    """As much of CuPy as loading a kernel touches, which notes what is asked of it."""

    def __init__(self):
        super().__init__("cupy")
        self.devices, self.modules = [], []
        capability = {75: 8, 76: 0}  # cudaDevAttrComputeCapabilityMajor, ...Minor
        runtime = types.SimpleNamespace(
            is_hip=False,
            deviceGetAttribute=lambda attribute, device_id: capability.get(attribute, 1000),
            getDeviceProperties=lambda device_id: {"name": b"fake"},
        )
        driver = types.SimpleNamespace(CUDADriverError=type("CUDADriverError", (Exception,), {}))
        self.cuda = types.SimpleNamespace(runtime=runtime, driver=driver, Device=self.device)

    @contextlib.contextmanager
    def device(self, device_id):
        self.devices.append(device_id)
        yield

    def RawModule(self, path):
        self.modules.append(Path(path).read_bytes())
        return types.SimpleNamespace(get_function=lambda name: types.SimpleNamespace(name=name))


@pytest.fixture
def fake_cupy(monkeypatch):
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(_compile, "kernel_sources", lambda: SOURCES)
    devices.current_device.cache_clear()
    yield fake
    devices.current_device.cache_clear()


def test_load_builds_for_the_device_and_loads_once(cache, fake_cupy):
    function = _compile.load("probe", (), 1, 1024)
    assert function.name == "probe"
    assert fake_cupy.modules == [build().cubin]
    assert set(fake_cupy.devices) == {1}
    assert _compile.load("probe", (), 1, 2048) is function
    assert len(fake_cupy.modules) == 1
    assert _compile.load("probe", (), 0, 1024) is not function


def test_load_raises_the_shared_memory_limit_when_more_is_asked_for(cache, fake_cupy):
    function = _compile.load("probe", (), 0, 48 * 1024)
    assert not hasattr(function, "max_dynamic_shared_size_bytes")
    _compile.load("probe", (), 0, 100_000)
    assert function.max_dynamic_shared_size_bytes == 100_000
    _compile.load("probe", (), 0, 60_000)
    assert function.max_dynamic_shared_size_bytes == 100_000


def test_static_shared_memory_counts_in_what_needs_no_asking(cache, fake_cupy, monkeypatch):
    static = dataclasses.replace(build(), static_smem_bytes=128)
    monkeypatch.setattr(_compile, "build", lambda *_: static)
    function = _compile.load("probe", (), 0, 48 * 1024 - 128)
    assert not hasattr(function, "max_dynamic_shared_size_bytes")
    _compile.load("probe", (), 0, 48 * 1024)
    assert function.max_dynamic_shared_size_bytes == 48 * 1024


def test_load_without_a_cache_folder(cache, fake_cupy, monkeypatch):
    monkeypatch.setenv("CUPYFLASH_CACHE_SIZE_MB", "0")
    _compile.load("probe", (), 0, 0)
    assert fake_cupy.modules == [build().cubin]


def test_load_after_another_process_emptied_the_cache(cache, fake_cupy):
    built = build()
    built.path.unlink()
    _compile.load_build(built, 0)
    assert fake_cupy.modules == [built.cubin]


def test_load_refuses_rocm(cache, fake_cupy):
    fake_cupy.cuda.runtime.is_hip = True
    with pytest.raises(RuntimeError, match="ROCm"):
        _compile.load("probe", (), 0, 0)


def test_load_says_what_the_driver_refused(cache, fake_cupy, monkeypatch):
    def refuse(path):
        raise fake_cupy.cuda.driver.CUDADriverError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(fake_cupy, "RawModule", refuse)
    with pytest.raises(RuntimeError, match=r"device 0 refuses kernel 'probe' built for sm_80"):
        _compile.load("probe", (), 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("size_mb", ["512", "0"])
def test_loaded_kernel_runs(cache, cupy, monkeypatch, size_mb):
    monkeypatch.setenv("CUPYFLASH_CACHE_SIZE_MB", size_mb)
    monkeypatch.setattr(_compile, "kernel_sources", lambda: SOURCES)
    function = _compile.load("probe", (), 0, 64 * 1024)
    x = cupy.zeros(32, np.float32)
    function((1,), (32,), (x,), shared_mem=64 * 1024)
    assert cupy.asnumpy(x).tolist() == [3.0] * 32


@pytest.mark.gpu
def test_current_device_agrees_with_the_table(cupy):
    device = devices.current_device(0)
    limits = devices.architecture_device(device.architecture)
    for name in ("smem_block_bytes", "smem_multiprocessor_bytes", "threads_per_multiprocessor"):
        assert getattr(device, name) == getattr(limits, name)
    assert 1e11 < device.memory_bandwidth < 2e13
