# SPDX-License-Identifier: MIT
"""The device table and what follows from it; whether there is a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from cupyflash import _gpu, devices, plan


@pytest.mark.parametrize(
    ("name", "architecture", "smem_kib"),
    [
        ("V100", "sm_70", 96),
        ("T4", "sm_75", 64),
        ("A100", "sm_80", 163),
        ("RTX 3090", "sm_86", 99),
        ("RTX 4090", "sm_89", 99),
        ("H200", "sm_90a", 227),
        ("B200", "sm_100", 227),
        ("RTX 5090", "sm_120", 99),
    ],
)
def test_shared_memory_of_a_block(name, architecture, smem_kib):
    device = devices.named_device(name)
    assert device.architecture == architecture
    assert device.smem_block_bytes == smem_kib * 1024
    limits = devices.architecture_device(architecture)
    assert limits.compute_capability == device.compute_capability


@pytest.mark.parametrize("name", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "rtx-4090"])
def test_names_are_taken_as_people_write_them(name):
    assert devices.named_device(name) is devices.DEVICES["RTX 4090"]


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"no device 'H300'; known are V100, T4, .*, H200"):
        devices.named_device("H300")
    with pytest.raises(TypeError, match="name is 90; expected a string"):
        devices.named_device(90)
    with pytest.raises(ValueError, match=r"no device has 'sm_35'; known are sm_70, sm_75"):
        devices.architecture_device("sm_35")


@pytest.mark.parametrize(
    ("name", "threads", "registers", "smem_bytes", "blocks"),
    [
        ("H200", 256, 32, 0, 8),  # threads: 2048 / 256
        ("H200", 32, 16, 0, 32),  # the most blocks that one multiprocessor takes
        ("H200", 256, 255, 0, 1),  # registers: 8192 a warp, 2 warps in each quarter of the file
        ("H200", 256, 168, 0, 1),  # 5376 a warp, 3 in a quarter: 12 warps, one block of 8
        ("H200", 128, 64, 227 * 1024, 1),  # shared memory: 228 KiB, of which 1 KiB is kept
        ("H200", 128, 64, 114 * 1024, 1),  # and 2 x (114 + 1) KiB do not fit
        ("H200", 128, 64, 113 * 1024, 2),
        ("H200", 128, 64, 227 * 1024 + 1, 0),
        ("T4", 128, 64, 32 * 1024, 2),  # nothing is kept before 8.0
        ("T4", 512, 255, 0, 0),  # 16 warps x 8192 registers: the block does not launch
        ("V100", 1024, 32, 0, 2),
    ],
)
def test_resident_blocks(name, threads, registers, smem_bytes, blocks):
    assert devices.named_device(name).resident_blocks(threads, registers, smem_bytes) == blocks


def fake_cupy(gpus, is_hip=False):
    """As much of CuPy as tells whether there is a GPU."""
    runtime = SimpleNamespace(is_hip=is_hip, getDeviceCount=lambda: gpus)
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))


@pytest.mark.parametrize(
    ("cupy", "obstacle"),
    [
        (None, "cupyflash needs CuPy for arrays on a GPU: pip install 'cupyflash[cuda13]'"),
        (fake_cupy(0), "CuPy sees no GPU"),
        (
            fake_cupy(2, is_hip=True),
            "this CuPy was built for AMD's ROCm; cupyflash needs",
        ),
    ],
)
def test_no_gpu_and_why(cupy, obstacle, monkeypatch):
    """None in sys.modules is a module that can't be found."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert _gpu.gpu_obstacle().startswith(obstacle)
    assert _gpu.gpu_count() == 0
    assert plan(seqlen_q=5, head_dim=8).kernel == "host"
    with pytest.raises(
        ValueError, match=r"plan: device is 0; this machine has 0 GPUs \("
    ) as caught:
        plan(seqlen_q=5, head_dim=8, device=0)
    assert obstacle in str(caught.value)


def test_as_many_gpus_as_cupy_sees(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(2))
    assert (_gpu.gpu_obstacle(), _gpu.gpu_count()) == (None, 2)
    with pytest.raises(ValueError, match=r"plan: device is 2; this machine has 2 GPUs$"):
        plan(seqlen_q=5, head_dim=8, device=2)


def test_current_device_of_rocm(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(1, is_hip=True))
    devices.current_device.cache_clear()
    with pytest.raises(RuntimeError, match="cupyflash: this CuPy was built for AMD's ROCm"):
        devices.current_device(0)
