# SPDX-License-Identifier: MIT
"""The numpy path: its memory, what it skips, its threads, progress and interrupts."""

import threading
import tracemalloc

import numpy as np
import pytest
import threadpoolctl
from host_calls import attend, tiling
from paths import assert_same_bits, qkv

from cupyflash import _host_schedule

pytestmark = pytest.mark.filterwarnings("error")

MIB = 2**20


# --- Memory and work ---------------------------------------------------------------------------


def working_bytes(call):
    """Peak of what numpy allocates in a call, without the two results."""
    call()
    tracemalloc.start()
    try:
        results = call()
        return tracemalloc.get_traced_memory()[1] - sum(x.nbytes for x in results)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_memory_of_a_large_call(dtype):
    q, k, v = qkv(18, 1, 8, 4096, 64, dtype=dtype)
    q = q[:, :, :1024]  # the scores alone would be 128 MiB in float32
    assert working_bytes(lambda: attend(q, k, v)) < 32 * MIB


@pytest.mark.parametrize("seqlen", [2048, 8192])
def test_memory_does_not_grow_with_length_and_options(seqlen):
    q, k, v = qkv(19, 1, 64, 2048, seqlen_k=seqlen, heads_k=1)
    q = np.broadcast_to(q[:1, :, :16], (4, 64, 16))
    q, k, v = q[:, :32], k[..., :16], v[..., :16]
    bias = np.zeros((32, 1), np.float32)
    mask = np.broadcast_to(np.arange(seqlen) % 3 > 0, (4, 32, seqlen))
    options = {"bias": bias, "mask": mask, "alibi_slopes": 0.5, "softcap": 9.0}
    assert working_bytes(lambda: attend(q, k, v, **options)) < 32 * MIB


def test_memory_at_a_large_head_dim_and_many_threads(monkeypatch):
    q, k, v = qkv(20, 2, 40, 6000, seqlen_k=300, dtype=np.float16)
    with tiling(monkeypatch, rows=256, keys=4096, threads=64):
        assert working_bytes(lambda: attend(q, k, v)) < 64 * MIB


def multiplications(monkeypatch, *arrays, **options):
    """How many the matrix products of a call make."""
    count = 0
    matmul = np.matmul

    def counting(a, b, **kwargs):
        nonlocal count
        result = matmul(a, b, **kwargs)
        count += result.size * a.shape[-1]
        return result

    with monkeypatch.context() as patch:
        patch.setattr(np, "matmul", counting)
        attend(*arrays, **options)
    return count


def test_hidden_tiles_are_skipped(monkeypatch):
    arrays = qkv(21, 1, 2048, 16)
    full = multiplications(monkeypatch, *arrays)
    assert multiplications(monkeypatch, *arrays, causal=True) < 0.6 * full
    assert multiplications(monkeypatch, *arrays, window=(100, 100)) < 0.3 * full
    assert multiplications(monkeypatch, *arrays, seqlens_k=512) < 0.26 * full
    i, j = np.ogrid[:2048, :2048]
    blocks = i // 512 == j // 512
    assert multiplications(monkeypatch, *arrays, mask=blocks) < 0.26 * full
    bias = np.where(blocks, np.float32(0), np.float32(-np.inf))
    assert multiplications(monkeypatch, *arrays, bias=bias) < 0.26 * full


# --- Threads -----------------------------------------------------------------------------------


def blas_threads():
    info = threadpoolctl.ThreadpoolController().select(user_api="blas").info()
    # numpy's own: scipy, which other tests load, brings another one.
    return [library["num_threads"] for library in info if "scipy" not in library["filepath"]]


def test_calls_from_several_threads_at_once(monkeypatch):
    problems = [qkv(30 + n, 3, 40 + n, 16) for n in range(6)]
    before = blas_threads()
    expected = [attend(*arrays, causal=True) for arrays in problems]
    results = {}
    together = threading.Barrier(len(problems))

    def call(n):
        together.wait()
        for _ in range(10):
            results[n] = attend(*problems[n], causal=True)

    with tiling(monkeypatch, rows=256, keys=4096, threads=2):
        threads = [threading.Thread(target=call, args=(n,)) for n in range(len(problems))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for n, result in enumerate(expected):
        assert_same_bits(results[n], result)
    assert blas_threads() == before


def test_blas_has_one_thread_meanwhile_and_its_own_afterwards():
    seen = []
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        attend(*qkv(40, 2, 9, 4), progress=lambda done, total: seen.append(blas_threads()))
        assert blas_threads() == before
    assert seen
    assert all(n == 1 for counts in seen for n in counts)


def test_uses_no_more_threads_than_the_blas_may(monkeypatch):
    monkeypatch.setattr(_host_schedule, "_THREAD_WORK", 0)
    monkeypatch.setattr(_host_schedule, "_processors", lambda: 2)
    names = set()

    def progress(done, total):
        names.add(threading.current_thread().name)

    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        attend(*qkv(41, 64, 20, 8), progress=progress)
    assert names == {threading.current_thread().name}


def test_progress_counts_up_to_its_total(monkeypatch):
    calls, inside = [], threading.Lock()

    def progress(done, total):
        assert inside.acquire(blocking=False), "two calls overlap"
        calls.append((done, total))
        inside.release()

    with tiling(monkeypatch, threads=4):
        attend(*qkv(42, 2, 100, 8), progress=progress)
    total = calls[0][1]
    assert total > 10
    assert calls == [(done, total) for done in range(1, total + 1)]


def test_a_failure_in_progress_ends_the_call(monkeypatch):
    calls, before = [], blas_threads()

    def progress(done, total):
        calls.append((done, total))
        if done == 1:
            raise KeyboardInterrupt

    with tiling(monkeypatch, threads=3), pytest.raises(KeyboardInterrupt):
        attend(*qkv(43, 2, 400, 8), progress=progress)
    assert len(calls) < calls[0][1] / 2
    assert blas_threads() == before


def test_an_interrupt_while_threads_start_ends_the_call_and_leaves_none(monkeypatch):
    before = threading.active_count()
    start, started, done = threading.Thread.start, [], []

    def interrupted(thread):
        if len(started) == 2:
            raise KeyboardInterrupt
        started.append(thread)
        start(thread)

    with tiling(monkeypatch, threads=4), monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            attend(*qkv(44, 2, 4000, 8), progress=lambda *counts: done.append(counts))
    assert threading.active_count() == before
    assert len(done) < done[0][1]


def test_an_interrupt_while_threads_end_leaves_none(monkeypatch):
    finish, failures = threading.Event(), []
    thread = threading.Thread(target=finish.wait)
    join = thread.join

    def interrupted():
        if not finish.is_set():
            finish.set()
            raise KeyboardInterrupt
        join()

    monkeypatch.setattr(thread, "join", interrupted)
    thread.start()
    _host_schedule._join([thread], failures)
    assert not thread.is_alive()
    assert [type(failure) for failure in failures] == [KeyboardInterrupt]


def test_does_with_fewer_threads_where_the_system_gives_no_more(monkeypatch):
    arrays = qkv(45, 2, 200, 8)
    expected = attend(*arrays)

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(_host_schedule, "_THREAD_WORK", 0)
        patch.setattr(threading.Thread, "start", start)
        assert_same_bits(attend(*arrays), expected)
