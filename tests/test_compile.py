# SPDX-License-Identifier: MIT
"""Kernels build without spills; builds are cached, shared by processes and survive rot."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
import types
from pathlib import Path

import compile_matrix
import pytest
from compile_matrix import cases, check, faults, is_checked, label

from cupyflash import _cache, _compile, devices, tiling

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    "probe.cu": b"""#include "common/value.cuh"
extern "C" __global__ void probe(float* x) { x[threadIdx.x] = kValue; }
""",
    "common/value.cuh": b"constexpr float kValue = 3;\n",
}
EDITED = SOURCES | {"common/value.cuh": b"constexpr float kValue = 4;\n"}


def build(sources=SOURCES, options=(), architecture="sm_80"):
    return _compile.build("probe", options, architecture, sources)


# --- the kernels of this project -------------------------------------------------------------


# Head dims of the tiles that are built here: the smallest that are used much, and the largest.
HEAD_DIMS = ("64", "256")


def specialisations_to_test():
    """A part of what `make compile` builds, which takes minutes for each NVRTC.

    Each kernel in each dtype, for one shape of tiles of a few head dims: for its oldest
    architecture, or for Hopper in bfloat16, which differs from float16 in two instructions.
    """
    seen = set()
    for kernel, options, architectures in tiling.specialisations():
        macros = dict(option.removeprefix("-DCUPYFLASH_").split("=") for option in options)
        which = (kernel, macros["ELEMENT"], macros["GENERAL"], macros.get("HEAD_DIM", "64"))
        if which[-1] not in HEAD_DIMS or which in seen:
            continue
        if kernel == "forward_sm90" and macros["ELEMENT"] == "bfloat16":
            continue  # tests/test_forward_sm90.py builds these
        if kernel == "forward_sm90_float32":
            continue  # and tests/test_forward_sm90_float32.py these
        seen.add(which)
        capability = {a: devices.architecture_device(a).compute_capability for a in architectures}
        built = sorted((a for a in architectures if capability[a] >= (7, 5)), key=capability.get)
        bfloat16 = macros["ELEMENT"] == "bfloat16"
        architecture = "sm_90a" if bfloat16 and "sm_90a" in built else built[0]
        name = f"{kernel}-{label(options)}-{architecture}".replace(" ", "-")
        yield pytest.param(kernel, tuple(options), architecture, id=name)


@pytest.mark.parametrize(("kernel", "options", "architecture"), list(specialisations_to_test()))
def test_specialisation_builds_without_spills(kernel, options, architecture):
    assert check((kernel, options, architecture)) == []


def test_what_has_changed_builds_without_spills():
    """Further architectures and tiles, for some seconds; `make compile` builds all."""
    seconds = float(os.environ.get("CUPYFLASH_COMPILE_SECONDS", "10"))
    kernel = os.environ.get("CUPYFLASH_TEST_KERNEL") or None
    changed = [case for case in cases(kernel) if not is_checked(case)]
    random.Random(0).shuffle(changed)  # or the first kernel takes all of the time
    end, found = time.monotonic() + seconds, {}
    while changed and time.monotonic() < end:
        case = changed.pop(0)
        if wrong := check(case):
            found[case] = wrong
    assert found == {}


def test_a_build_without_faults_is_remembered(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_matrix, "CHECKED", tmp_path / "compiled")
    monkeypatch.setattr(_compile, "kernel_sources", lambda: dict(SOURCES))
    case = ("probe", (), "sm_80")
    assert not is_checked(case)
    assert check(case) == []
    assert is_checked(case)
    assert not is_checked(("probe", ("-DX=1",), "sm_80"))
    assert not is_checked(("probe", (), "sm_90a"))
    monkeypatch.setattr(_compile, "kernel_sources", lambda: SOURCES | {"other.cu": b"// unrelated"})
    assert is_checked(case)
    monkeypatch.setattr(_compile, "kernel_sources", lambda: dict(EDITED))
    assert not is_checked(case)


def test_shared_memory_and_blocks_are_held_against_the_architecture():
    kernel = "forward_sm80"
    options = next(o for name, o, _ in tiling.specialisations() if name == kernel)
    row = compile_matrix.tiles(kernel, options)
    assert row.options("float16", False) == options
    assert compile_matrix.dynamic_smem_bytes(kernel, options, "sm_80") == row.smem_bytes > 0
    good = _compile.build(kernel, options, "sm_80")
    assert faults(good) == []
    too_much = dataclasses.replace(good, static_smem_bytes=160_000)
    assert any("of 166912" in fault for fault in faults(too_much))
    crowded = dataclasses.replace(good, registers=255, max_threads=256)
    assert faults(crowded) == [f"blocks on a multiprocessor 1, expected {row.blocks}"]


def test_every_kernel_has_specialisations():
    assert {kernel for kernel, _, _ in tiling.specialisations()} == set(_compile.kernel_names())


def test_faults_sees_spills_and_stack(cache):
    spilling = {
        "probe.cu": b"""extern "C" __global__ void __launch_bounds__(1024) probe(float* x, int n) {
  float kept[64];
  for (int i = 0; i < 64; ++i) kept[i] = x[i];
  for (int i = 0; i < 64; ++i) x[kept[(i * n) & 63] > 0 ? i : n] += kept[(i + n) & 63];
}
"""
    }
    built = build(spilling)
    assert built.stack_bytes >= 64 * 4
    assert any("stack_bytes" in fault for fault in faults(built))


# --- what a build says ------------------------------------------------------------------------


def test_build_reports_what_the_kernel_takes(cache):
    source = b"""extern "C" __global__ void __launch_bounds__(96) probe(float* x) {
  __shared__ float kept[96];
  kept[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = kept[95 - threadIdx.x];
}
"""
    built = build({"probe.cu": source})
    assert built.static_smem_bytes == 96 * 4
    assert built.max_threads == 96
    assert 0 < built.registers < 32
    assert faults(built) == []
    assert built.cubin.startswith(b"\x7fELF")
    assert built.path.read_bytes() == built.cubin
    assert built.nvrtc == "{}.{}".format(*_compile.nvrtc_version())


def test_resources_of_the_entry_not_of_a_function_it_calls():
    log = """ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas info    : Function properties for other
    64 bytes stack frame, 64 bytes spill stores, 64 bytes spill loads
ptxas info    : Used 99 registers, 64 bytes smem
ptxas info    : Compiling entry function 'probe' for 'sm_80'
ptxas info    : Function properties for _Z6helperv
    32 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Function properties for probe
    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 368 bytes cmem[0]"""
    assert _compile.resources("probe", log) == {
        "registers": 40,
        "spill_store_bytes": 4,
        "spill_load_bytes": 8,
        "stack_bytes": 0,
        "static_smem_bytes": 0,
    }


def test_file_without_the_entry_is_refused(cache):
    with pytest.raises(RuntimeError, match="entry 'probe'; the kernel needs an extern \"C\""):
        build({"probe.cu": b'extern "C" __global__ void other(float* x) { *x = 0; }'})


def test_half_precision_headers_are_found(cache):
    source = b"""#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void probe(__half* x, __nv_bfloat16* y) {
  x[0] = __hadd(x[1], x[2]);
  y[0] = __hadd(y[1], y[2]);
}
"""
    assert faults(build({"probe.cu": source})) == []


def test_headers_are_the_given_ones_whatever_the_current_folder_holds(cache, tmp_path, monkeypatch):
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "value.cuh").write_text("#error of another project\n")
    monkeypatch.chdir(tmp_path)
    built = build()
    assert not built.cached
    assert built.max_threads == 1024


# --- errors -----------------------------------------------------------------------------------


def test_unknown_kernel():
    with pytest.raises(ValueError, match="no kernel 'nothing'; there are: probe"):
        _compile.build("nothing", (), "sm_80", SOURCES)


def test_compile_error_names_the_kernel_and_keeps_the_log(cache):
    broken = SOURCES | {"common/value.cuh": b"#error kValue is lost\n"}
    with pytest.raises(RuntimeError) as caught:
        build(broken, ("-DCUPYFLASH_ELEMENT=float32",))
    message = str(caught.value)
    assert "'probe' with options -DCUPYFLASH_ELEMENT=float32 does not build for sm_80" in message
    assert "common/value.cuh(1)" in message
    assert "kValue is lost" in message
    assert caught.value.__cause__ is not None
    assert not cache.exists()


def test_unknown_architecture(cache):
    with pytest.raises(RuntimeError, match=r"sm_35 with NVRTC .* does not know the architecture"):
        build(architecture="sm_35")


@pytest.mark.parametrize(
    ("kernel", "architecture", "reason"),
    [
        ("forward_sm80", "sm_75", "cp.async exists from sm_80 on"),
        ("forward_sm90", "sm_80", "wgmma exists on sm_90a only: build with -arch=sm_90a"),
        ("forward_sm90", "sm_90", "wgmma exists on sm_90a only: build with -arch=sm_90a"),
        ("forward_sm90", "sm_100", "wgmma exists on sm_90a only: build with -arch=sm_90a"),
    ],
)
def test_kernel_for_another_architecture(cache, kernel, architecture, reason):
    options = next(o for name, o, _ in tiling.specialisations() if name == kernel)
    with pytest.raises(RuntimeError) as caught:
        _compile.build(kernel, options, architecture)
    what, log = str(caught.value).split("\n", 1)
    assert what.startswith(
        f"cupyflash: kernel '{kernel}' with options {' '.join(options)} does not"
    )
    assert f"build for {architecture} with NVRTC" in what
    assert f'#error directive: "{reason}"' in log
    assert len(log.splitlines()) < 10


def test_missing_cuda_headers_are_one_line_that_says_what_to_install(cache, monkeypatch):
    monkeypatch.setattr(_compile, "_toolkit", lambda: (None, "none"))
    with pytest.raises(RuntimeError) as caught:
        build({"probe.cu": b"#include <cuda_fp16.h>\n"})
    message = str(caught.value)
    assert "cuda_fp16.h is missing" in message
    assert "pip install 'cupyflash[cuda13]'" in message
    assert "\n" not in message


def test_missing_bindings_say_what_to_install(cache, monkeypatch):
    for module in [name for name in sys.modules if name.startswith("cuda.bindings")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError, match=r"cuda-bindings is missing.*pip install 'cupyflash\["):
        build()


def test_nvrtc_that_does_not_load_says_what_to_install(cache, monkeypatch):
    def nothing():
        raise RuntimeError("no such library")

    from cuda import bindings

    broken = types.SimpleNamespace(nvrtcVersion=nothing)
    monkeypatch.setattr(bindings, "nvrtc", broken, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", broken)
    with pytest.raises(ImportError, match=r"NVRTC can't be loaded.*pip install 'cupyflash\["):
        build()


# --- the cache --------------------------------------------------------------------------------


def test_second_build_is_found(cache):
    first, second = build(), build()
    assert not first.cached
    assert second.cached
    assert (second.cubin, second.log, second.path) == (first.cubin, first.log, first.path)
    assert sorted(path.suffix for path in cache.iterdir()) == [".cubin", ".json"]


def test_whatever_a_cubin_depends_on_makes_a_new_one(cache, monkeypatch):
    build()
    assert not build(EDITED).cached
    assert not build(options=("-DX=1",)).cached
    assert not build(architecture="sm_90a").cached
    unrelated = SOURCES | {"other.cu": b"// part of kernels/ all the same\n"}
    assert not build(unrelated).cached
    monkeypatch.setattr(_compile, "_nvrtc_identity", lambda: "another NVRTC")
    assert not build().cached
    monkeypatch.setattr(_compile, "_toolkit", lambda: (None, "other headers"))
    assert not build().cached


SCRIPT = f"""
import hashlib, sys
sys.path.insert(0, {str(ROOT)!r})
from cupyflash import _compile
built = _compile.build("probe", (), "sm_80", {SOURCES!r})
loaded = any(name.startswith("cuda.bindings") for name in sys.modules)
print(built.cached, loaded, hashlib.sha256(built.cubin).hexdigest())
"""


def test_hit_in_another_process_loads_no_nvrtc(cache):
    build()
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout.split()[:2] == ["True", "False"]


def spoil_record(change):
    def spoil(folder):
        (path,) = folder.glob("*.json")
        path.write_bytes(change(path.read_bytes()))

    return spoil


def spoil_cubin(change):
    def spoil(folder):
        (path,) = folder.glob("*.cubin")
        path.write_bytes(change(path.read_bytes()))

    return spoil


def without_registers(text):
    record = json.loads(text)
    del record["report"]["registers"]
    return json.dumps(record).encode()


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(spoil_cubin(lambda cubin: cubin[:100]), id="cubin-cut"),
        pytest.param(spoil_cubin(lambda cubin: cubin[:-1] + bytes([cubin[-1] ^ 1])), id="bit"),
        pytest.param(spoil_cubin(lambda cubin: b""), id="cubin-empty"),
        pytest.param(spoil_record(lambda text: b""), id="record-empty"),
        pytest.param(spoil_record(lambda text: b"\xff\xfe{"), id="record-not-text"),
        pytest.param(spoil_record(lambda text: b"[1]"), id="record-of-another-kind"),
        pytest.param(spoil_record(lambda text: b'{"sha256": 1, "report": {}}'), id="no-name"),
        pytest.param(spoil_record(without_registers), id="record-incomplete"),
        pytest.param(lambda folder: next(folder.glob("*.cubin")).unlink(), id="cubin-gone"),
        pytest.param(lambda folder: next(folder.glob("*.json")).unlink(), id="record-gone"),
    ],
)
def test_spoilt_entry_is_built_again(cache, spoil):
    first = build()
    spoil(cache)
    again = build()
    assert not again.cached
    assert again.cubin == first.cubin
    assert build().cached


def test_folder_that_cannot_be_written_warns_once_and_keeps_builds_in_memory(
    cache, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="CUPYFLASH_CACHE_DIR") as caught:
        first, _ = build(), build(EDITED)
    assert len(caught) == 1
    assert first.path is None
    assert build().cached
    assert build().cubin == first.cubin


def test_folder_follows_the_environment(tmp_path, monkeypatch):
    for variable in ("CUPYFLASH_CACHE_DIR", "CUPYFLASH_CACHE_SIZE_MB", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _cache.folder() == tmp_path / ".cache" / "cupyflash"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert _cache.folder() == tmp_path / ".cache" / "cupyflash"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _cache.folder() == tmp_path / "xdg" / "cupyflash"
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "own"))
    assert _cache.folder() == tmp_path / "own"


def test_no_home_folder(cache, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CUPYFLASH_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert build().path is None
    assert build().cached


def test_size_limit_deletes_what_was_not_used_for_longest(cache, monkeypatch):
    oldest, used, newest = SOURCES, EDITED, SOURCES | {"extra.cuh": b"// makes another key\n"}
    paths = [build(oldest).path, build(used, architecture="sm_90a").path]
    entry_bytes = sum(path.stat().st_size for path in cache.iterdir()) / 2
    for age, path in enumerate(sorted(cache.iterdir(), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, ns=(0, age))  # far in the past, in the order of their making
    assert build(used, architecture="sm_90a").cached
    monkeypatch.setenv("CUPYFLASH_CACHE_SIZE_MB", str(2.5 * entry_bytes / 1e6))
    build(newest, architecture="sm_86")
    assert not paths[0].exists()
    assert build(used, architecture="sm_90a").cached
    assert build(newest, architecture="sm_86").cached
    assert not build(oldest).cached


def test_new_build_stays_however_small_the_limit(cache, monkeypatch):
    monkeypatch.setenv("CUPYFLASH_CACHE_SIZE_MB", "1e-6")
    assert build().path.exists()


def test_size_limit_of_zero_keeps_builds_in_memory(cache, monkeypatch):
    monkeypatch.setenv("CUPYFLASH_CACHE_SIZE_MB", "0")
    assert build().path is None
    assert build().cached
    assert not cache.exists()


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf"])
def test_size_limit_that_is_no_number(cache, monkeypatch, text):
    monkeypatch.setenv("CUPYFLASH_CACHE_SIZE_MB", text)
    with pytest.raises(ValueError, match=f"CUPYFLASH_CACHE_SIZE_MB is '{text}'"):
        build()


def test_clear_cache_deletes_our_files_only(cache, monkeypatch):
    build()
    (cache / "notes.json").write_text("a user's own")
    _compile.clear_cache()
    assert [path.name for path in cache.iterdir()] == ["notes.json"]
    assert not build().cached
    monkeypatch.setenv("CUPYFLASH_CACHE_SIZE_MB", "0")
    build()
    _compile.clear_cache()
    assert not build().cached


def test_nvrtc_is_told_by_its_wheel_else_by_its_file_else_by_itself(tmp_path, monkeypatch):
    identity = _compile._nvrtc_identity.__wrapped__
    (wheels := tmp_path / "site-packages").mkdir()
    (libraries := tmp_path / "lib64").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "missing"), str(wheels)])
    monkeypatch.setattr(_compile, "_library_directories", lambda: [libraries])
    monkeypatch.setattr(_compile, "nvrtc_version", lambda: (12, 3))
    assert identity() == "NVRTC 12.3"
    (wheels / "cuda_bindings-12.9.10.dist-info").mkdir()
    assert identity() == "cuda_bindings-12.9.10.dist-info, NVRTC 12.3"
    (libraries / "libnvrtc.so.12.9.86").touch()
    (libraries / "libnvrtc.so.12").symlink_to("libnvrtc.so.12.9.86")
    assert f"{libraries / 'libnvrtc.so.12.9.86'} " in identity()
    (wheels / "nvidia_cuda_nvrtc_cu12-12.9.86.dist-info").mkdir()
    assert identity() == (
        "cuda_bindings-12.9.10.dist-info, nvidia_cuda_nvrtc_cu12-12.9.86.dist-info"
    )
