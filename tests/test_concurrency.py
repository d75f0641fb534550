# SPDX-License-Identifier: MIT
"""Many processes on one cache of kernels; many threads, streams and GPUs in one process."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from paths import normal, qkv

from cupyflash import _compile, _sm80, attention

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = 16

# ---- processes -----------------------------------------------------------------------------------

# Both wait until all are there, so that every process finds the cache empty.
BUILDS = f"""
import sys
from cupyflash import _compile
print(flush=True), sys.stdin.readline()
built = _compile.build("combine", {_sm80.combine_options("float32")!r}, "sm_80")
print(built.path.stem, built.path.read_bytes() == built.cubin)
"""
CALLS = """
import hashlib, sys
import cupy, numpy as np
from cupyflash import attention
q, k, v = (cupy.asarray(x) for x in np.random.default_rng(0).standard_normal((3, 4, 600, 64), "f4"))
print(flush=True), sys.stdin.readline()
few = attention(q[:, :3], k, v, num_splits=2)
half = attention(*(x.astype("e") for x in (q, k, v)))
print(hashlib.sha256(few.get().tobytes() + half.get().tobytes()).hexdigest(), few.shape)
"""


def check_whole(folder: Path) -> None:
    """Every file that a reader would take is complete; files with other names are on their way."""
    for record in folder.glob("[0-9a-f]*.json"):
        checksum = json.loads(record.read_bytes())["sha256"]
        assert (folder / f"{checksum}.cubin").exists(), "a record without its cubin"
    for cubin in folder.glob("[0-9a-f]*.cubin"):
        assert hashlib.sha256(cubin.read_bytes()).hexdigest() == cubin.stem, "a part of a cubin"


def answers_at_once(program: str, folder: Path) -> list[str]:
    """What so many processes print that run a program at the same time; warnings are errors."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error:cupyflash", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        for _ in range(PROCESSES)
    ]
    for process in processes:
        process.stdout.readline()
    assert not list(folder.glob("*.json"))
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    while any(process.poll() is None for process in processes):
        check_whole(folder)
        time.sleep(0.002)
    answers = [process.communicate()[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES
    check_whole(folder)
    assert {path.suffix for path in folder.iterdir()} == {".cubin", ".json"}, "something is left"
    return answers


@pytest.mark.slow
def test_processes_that_build_one_kernel(cache):
    (answer,) = set(answers_at_once(BUILDS, cache))
    built = _compile.build("combine", _sm80.combine_options("float32"), "sm_80")
    assert built.cached
    assert answer == f"{built.path.stem} True"
    assert len(list(cache.iterdir())) == 2


@pytest.mark.gpu
@pytest.mark.slow
def test_processes_that_make_the_same_calls(cupy, cache):
    (answer,) = set(answers_at_once(CALLS, cache))
    q, k, v = (
        cupy.asarray(x) for x in np.random.default_rng(0).standard_normal((3, 4, 600, 64), "f4")
    )
    few = attention(q[:, :3], k, v, num_splits=2)
    half = attention(*(x.astype("e") for x in (q, k, v)))
    expected = hashlib.sha256(few.get().tobytes() + half.get().tobytes()).hexdigest()
    assert answer == f"{expected} (4, 3, 64)"


# ---- threads, streams, GPUs ----------------------------------------------------------------------


def calls(cupy):
    """Calls of every kind: persistent with a counter, divided keys, other dtypes, Algorithm 1."""

    def arrays(seed, *shape, **sizes):
        return [cupy.asarray(x) for x in qkv(seed, *shape, **sizes)]

    long = arrays(1, 2, 40, 700, 64, dtype=np.float16)
    few = arrays(2, 2, 8, 1, 128, seqlen_k=3000, heads_k=2, dtype=np.float16)
    wide = arrays(3, 4, 130, 40)
    slopes = cupy.asarray(abs(normal(4, 40)))
    return (
        (long, {"causal": True}),
        (few, {}),
        (few, {"num_splits": 3}),
        (few, {"num_splits": 64, "seqlens_k": cupy.asarray([3000, 900])}),
        (wide, {"num_splits": 2, "window": (50, 20)}),
        (wide, {"kernel": "fa1_forward", "causal": True}),
        (long, {"alibi_slopes": slopes, "window": (100, None)}),
    )


def check_in_threads(cupy, devices_of_threads, turns=40):
    """Every thread makes all calls over and over, on a stream of its own, in another order."""
    expected, made = {}, {}
    for device in {*devices_of_threads}:
        with cupy.cuda.Device(device):
            made[device] = calls(cupy)
            expected[device] = [
                attention(*arrays, **options, return_lse=True) for arrays, options in made[device]
            ]
            cupy.cuda.Device().synchronize()
    start = threading.Barrier(len(devices_of_threads))
    wrong, failed = [], []

    def work(thread, device):
        order = np.random.default_rng(thread).integers(len(made[device]), size=turns)
        with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
            start.wait()
            results = []
            for n in order:
                arrays, options = made[device][n]
                out = cupy.full_like(expected[device][n][0], cupy.nan)
                results.append(attention(*arrays, **options, out=out, return_lse=True))
            for n, result in zip(order, results, strict=True):
                for x, wanted in zip(result, expected[device][n], strict=True):
                    if not (x == wanted).all():
                        wrong.append((thread, device, int(n)))
            stream.synchronize()

    def watched(*arguments):
        try:
            work(*arguments)
        except Exception as error:
            failed.append(error)
            start.abort()

    threads = [
        threading.Thread(target=watched, args=(n, device))
        for n, device in enumerate(devices_of_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert not wrong


@pytest.mark.gpu
def test_many_threads_and_streams(cupy):
    check_in_threads(cupy, [0] * 8)


@pytest.mark.gpu
def test_two_gpus_at_once(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    check_in_threads(cupy, [0, 1] * 3)
    assert cupy.cuda.runtime.getDevice() == 0
