# SPDX-License-Identifier: MIT
"""Calls that are made again: found by their signature, launched on other arrays."""

import threading
import types

import ml_dtypes
import numpy as np
import pytest
from paths import KERNELS, a_dtype, launches, normal, qkv

from cupyflash import (
    Algorithm1,
    _call,
    _compile,
    _launch,
    _problem,
    _sm80,
    attention,
    clear_cache,
    devices,
    warmup,
)
from cupyflash.devices import named_device
from cupyflash.plan import make_plan
from cupyflash.reference import attention_reference
from cupyflash.testing import assert_attention_close

BF16 = np.dtype(ml_dtypes.bfloat16)


class FakeArray:
    """As much of a CuPy array as a signature looks at."""

    def __init__(self, *shape, dtype=np.float16, address=512, device=0):
        x = np.empty(shape, dtype)
        self.shape, self.strides, self.dtype = x.shape, x.strides, x.dtype
        self.data = types.SimpleNamespace(ptr=address, device_id=device)


@pytest.fixture
def sign(monkeypatch):
    """The signature of a call of attention, with CuPy's place taken by the arrays above."""
    monkeypatch.setitem(_call.sys.modules, "cupy", types.SimpleNamespace(ndarray=FakeArray))

    def signature(q, k=None, v=None, **options):
        k, v = q if k is None else k, q if v is None else v
        arrays = (q, k, v, *(options.pop(name, None) for name in _problem.ARRAYS[3:]))
        special = [options.pop(name, None) for name in ("out", "window", "kernel")]
        names = ("causal", "softmax_scale", "softcap", "return_lse", "num_splits", "precision")
        plain = [options.pop(name, False if name == "causal" else None) for name in names]
        assert not options
        return _call.signature(arrays, *special, *plain)[0]

    return signature


class TestSignature:
    q = FakeArray(2, 10, 8)

    @pytest.mark.parametrize(
        "other",
        [
            {"q": FakeArray(2, 11, 8)},
            {"k": FakeArray(2, 11, 8)},
            {"v": FakeArray(2, 10, 16)},
            {"q": FakeArray(2, 10, 8, dtype=BF16)},
            {"q": FakeArray(2, 10, 8, address=520)},
            {"q": FakeArray(2, 10, 8, device=1)},
            {"mask": FakeArray(10, 10, dtype=bool)},
            {"bias": FakeArray(10, 10)},
            {"out": FakeArray(2, 10, 8)},
            {"causal": True},
            {"causal": 1},
            {"causal": "top_left"},
            {"window": (1, 2)},
            {"window": (1, 1)},
            {"window": (True, 1)},
            {"window": (1, None)},
            {"softmax_scale": 1.0},
            {"softmax_scale": True},
            {"softcap": 1.0},
            {"precision": "tf32"},
            {"return_lse": True},
            {"return_lse": 1},
            {"num_splits": 1},
            {"num_splits": 2},
            {"num_splits": True},
            {"kernel": "fa1_forward"},
            {"kernel": Algorithm1(chunks=1)},
            {"kernel": Algorithm1(chunks=2)},
        ],
    )
    def test_differs_with_all_that_matters(self, sign, other):
        all_others = [{"causal": True}, {"window": (1, 1)}, {"softmax_scale": 1.0}]
        all_others += [{"return_lse": True}, {}]
        key = sign(**{"q": self.q} | other)
        assert key is not None
        for known in all_others:
            if known != other or list(map(type, known.values())) != list(map(type, other.values())):
                assert key != sign(self.q, **known)

    def test_is_equal_wherever_arrays_lie(self, sign):
        elsewhere = FakeArray(2, 10, 8, address=2**40)
        assert sign(self.q) == sign(elsewhere)
        assert hash(sign(self.q, causal=True)) == hash(sign(elsewhere, causal=True))

    def test_comes_with_the_addresses_of_what_is_there(self, sign):
        arrays = [FakeArray(2, 10, 8, address=512 * n) for n in range(1, 6)]
        q, k, v, mask, out = arrays
        given = (q, k, v, None, mask, None, None)
        key, addresses = _call.signature(given, out, None, None, False)
        assert key is not None
        assert addresses == [512, 1024, 1536, 2048, 2560]

    @pytest.mark.parametrize(
        "option",
        [
            {"seqlens_k": 5},
            {"alibi_slopes": [1.0]},
            {"window": [1, 2]},
            {"window": (np.int64(1), 2)},
            {"softmax_scale": np.float32(1)},
            {"k": np.empty((2, 10, 8))},
        ],
    )
    def test_is_none_where_values_have_to_be_looked_at(self, sign, option):
        assert sign(self.q, **option) is None

    def test_is_none_without_cupy(self, monkeypatch):
        monkeypatch.delitem(_call.sys.modules, "cupy", raising=False)
        x = np.empty((2, 10, 8))
        assert _call.signature((x, x, x), None, None, None) == (None, [])


class FakeMemory:
    ptr = 7 << 24
    cleared = None

    def memset_async(self, value, size):
        self.cleared = size


@pytest.mark.parametrize("given", [None, FakeArray(2, 4, 70, 64, address=5 << 24)])
def test_launches_are_given_all_addresses_and_the_callers_list_stays(monkeypatch, given):
    made = []

    class Recorder:
        def __init__(self, record, places, device):
            self.record, self.places = record, places
            made.append(self)

        def __call__(self, addresses, stream):
            self.addresses, self.stream = addresses, stream

    memory = FakeMemory()
    results = iter([FakeArray(2, 4, 70, 64, address=n) for n in (6 << 24, 13 << 23)])
    made_current = []
    runtime = types.SimpleNamespace(
        getDevice=lambda: 0,
        setDevice=made_current.append,
        memGetInfo=lambda: made_current.append("context"),
        streamIsCapturing=lambda stream: False,
    )
    monkeypatch.setattr(_call, "_threads", _call._Threads())
    monkeypatch.setattr(_call, "_kept", {})
    cuda = types.SimpleNamespace(
        runtime=runtime,
        alloc=lambda size: memory,
        get_current_stream=lambda: types.SimpleNamespace(ptr=9),
    )
    fake = types.SimpleNamespace(cuda=cuda, ndarray=lambda *shape: next(results))
    monkeypatch.setattr(_call, "_Launch", Recorder)
    q, k, v = qkv(0, 2, 4, 70, 64, seqlen_k=3000, dtype=np.float16)
    problem = _problem.from_arrays("attention", q, k, v, seqlens_k=[3000, 20])
    *_, records = launches(q, k, v, kernel="forward_sm80", num_splits=3, seqlens_k=[3000, 20])
    call = _call.Call(problem, records, return_lse=True)
    call._device = 0
    monkeypatch.setitem(_call.sys.modules, "cupy", fake)
    addresses = [n << 24 for n in ((1, 2, 3, 4) if given is None else (1, 2, 3, 4, 5))]
    kept = list(addresses)
    o, lse = call((q, k, v, None, None, None, problem.seqlens_k), addresses, given)
    assert addresses == kept
    results_at = (12, 13) if given is None else (10, 12)
    assert (o.data.ptr, lse.data.ptr) == tuple(n << 23 for n in results_at)
    assert [launch.record.kernel for launch in made] == ["forward_sm80", "combine"]
    for launch in made:
        assert launch.stream == 9
        assert launch.addresses == [*addresses[:4], o.data.ptr, lse.data.ptr, memory.ptr]
    names = ("q", "k", "v", "seqlens_k", "o", "lse")
    assert [made[0].places[name] for name in names] == [(n, 0) for n in range(6)]
    assert made_current == [0, "context"]
    call.launch(addresses[:4], o, lse)
    assert made_current == [0, "context"]
    # Another thread may have no context yet, and a launch by the driver needs one.
    thread = threading.Thread(target=call.launch, args=(addresses[:4], o, lse))
    thread.start()
    thread.join()
    assert made_current == [0, "context"] * 2
    assert memory.cleared is None
    # The parts' O and lse lie behind each other in the workspace, which is the last address.
    parts = [made[1].places[id(p.array)] for p in made[1].record.pointers if p.name in ("O", "lse")]
    assert parts == [(6, 0), (6, 3 * 2 * 4 * 70 * 64 * 4)]


class TestKeptMemory:
    """What launches of a stream find cleared, and leave cleared."""

    @pytest.fixture
    def taken(self, monkeypatch):
        """The memory that CuPy's place has given."""
        taken = []

        def alloc(size):
            memory = FakeMemory()
            memory.ptr, memory.size = (len(taken) + 1) << 30, size
            taken.append(memory)
            return memory

        cuda = types.SimpleNamespace(alloc=alloc)
        monkeypatch.setitem(_call.sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(_call, "_kept", {})
        return taken

    def test_each_stream_has_its_own_and_keeps_it(self, taken):
        streams = [(0, 0), (0, 1), (0, 9), (1, 9)]
        first = [_call._kept_memory(*stream) for stream in streams]
        assert len({id(memory) for memory in first}) == len(taken) == 4
        assert [_call._kept_memory(*stream) for stream in streams] == first
        for memory in taken:
            assert memory.cleared == 4 * _sm80.MAX_COUNTS
            assert memory.size == memory.cleared + _call._KEPT_BYTES

    def test_threads_share_a_stream_but_not_the_number_of_their_own(self, taken):
        per_thread = [_call._kept_memory(0, stream) for stream in (9, 2)]
        thread = threading.Thread(
            target=lambda: per_thread.extend(_call._kept_memory(0, stream) for stream in (9, 2))
        )
        thread.start()
        thread.join()
        assert per_thread[0] is per_thread[2]
        assert per_thread[1] is not per_thread[3]

    def test_many_streams_are_forgotten(self, taken):
        for stream in range(3, 3 * _call._KEPT_STREAMS):
            _call._kept_memory(0, stream)
            assert len(_call._kept) <= _call._KEPT_STREAMS

    @pytest.mark.parametrize("num_splits", [3, 100])
    def test_counts_come_last_and_large_workspaces_from_the_pool(
        self, monkeypatch, taken, num_splits
    ):
        made = []
        monkeypatch.setattr(
            _call, "_Launch", lambda *how: made.append(how) or (lambda *given: made.append(given))
        )
        q, k, v = qkv(0, 40, 8, 1, 64, seqlen_k=3000, dtype=np.float16)
        *_, records = launches(q, k, v, kernel="forward_sm80", num_splits=num_splits)
        assert [record.kernel for record in records] == ["forward_sm80"]
        call = _call.Call(_problem.from_arrays("attention", q, k, v), records, return_lse=True)
        cuda = _call.sys.modules["cupy"].cuda
        cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=0)
        monkeypatch.setattr(_call, "_threads", types.SimpleNamespace(devices={call._device}))
        o, lse = (FakeArray(1, address=address) for address in (2048, 2560))
        call.launch([512, 1024, 1536], o, lse)
        (_, places, _), (addresses, _) = made
        kept = taken[0].ptr
        large = num_splits == 100
        workspace = taken[1].ptr if large else kept + _call._COUNTS_BYTES
        assert len(taken) == 1 + large
        assert addresses == [512, 1024, 1536, 2048, 2560, workspace, kept]
        by_name = {p.name: places[id(p.array)] for p in records[0].pointers}
        assert by_name["O"] == (5, 0)
        assert by_name["counts"] == (6, 0)

    def test_two_launches_of_a_call_have_a_workspace_of_their_own(self, monkeypatch, taken):
        """A call of another thread may come between them, on the same stream."""
        monkeypatch.setattr(_call, "_Launch", lambda *how: lambda *given: None)
        q, k, v = qkv(0, 40, 8, 1, 64, seqlen_k=3000, dtype=np.float32)
        *_, records = launches(q, k, v, kernel="forward_sm80", num_splits=3)
        assert [record.kernel for record in records] == ["forward_sm80", "combine"]
        call = _call.Call(_problem.from_arrays("attention", q, k, v), records, return_lse=True)
        cuda = _call.sys.modules["cupy"].cuda
        cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=0)
        monkeypatch.setattr(_call, "_threads", types.SimpleNamespace(devices={call._device}))
        for calls in (1, 2):
            call.launch([512, 1024, 1536], *(FakeArray(1, address=2048 + 512 * n) for n in (0, 1)))
            assert len(taken) == calls
        assert not _call._kept


@pytest.mark.parametrize(
    ("kernel", "num_splits"),
    [
        ("fa1_forward", None),
        ("forward_sm80", 3),
        ("forward_simt", 3),
        ("forward_sm90_float32", 3),
        ("forward_sm90", None),
    ],
)
def test_a_first_call_allocates_results_only(kernel, num_splits):
    """A graph that captures it would clear, at each replay, memory that went back to the pool."""
    allocated = []

    class Allocator:
        def empty(self, shape, dtype):
            allocated.append(shape)
            return np.empty(shape, dtype)

    q, k, v = qkv(0, 40, 8, 300, 64, dtype=a_dtype(kernel))
    device = named_device("H200")
    problem = _problem.from_arrays("attention", q, k, v, causal=True)
    plan = make_plan("attention", problem, kernel, device=device, num_splits=num_splits)
    described = _launch.Described
    *_, records = _launch.prepare(plan, problem, None, True, Allocator(), described)
    assert allocated == [q.shape, q.shape[:-1]]
    workspaces = _call._workspaces(records)
    assert workspaces
    for pointer in workspaces:
        assert pointer.array.nbytes == pointer.array.size * pointer.array.itemsize
        assert pointer.array.base.nbytes == pointer.array.itemsize
    *_, allocating = _launch.prepare(plan, problem, None, True, np)
    assert [p.array.nbytes for p in _call._workspaces(allocating)] == [
        p.array.nbytes for p in workspaces
    ]


# ---- on a GPU ------------------------------------------------------------------------------------

every_gpu_kernel = pytest.mark.parametrize("kernel", [None, *KERNELS])


def on_gpu(cupy, seed, *shape, dtype=None, kernel=None, **sizes):
    dtype = a_dtype(kernel) if dtype is None else dtype
    return tuple(cupy.asarray(x) for x in qkv(seed, *shape, dtype=dtype, **sizes))


def check(arrays, result, **options):
    expected = attention_reference(*(x.get() for x in arrays), **options)
    assert_attention_close(result, expected)


@pytest.fixture
def no_validation(monkeypatch):
    """A function after which a call must be one that was made before."""

    def forbid():
        def fail(*args, **kwargs):
            raise AssertionError("the call was not found again")

        monkeypatch.setattr(_problem, "from_arrays", fail)

    return forbid


@pytest.mark.gpu
@every_gpu_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_call_on_other_arrays(cupy, kernel, causal, no_validation):
    sizes = [on_gpu(cupy, seed, 3, 4, 300, 64, heads_k=2, kernel=kernel) for seed in (1, 2, 3)]
    options = {"causal": causal, "return_lse": True, "kernel": kernel}
    first = attention(*sizes[0], **options)
    no_validation()
    results = [attention(*arrays, **options) for arrays in sizes]
    for arrays, result in zip(sizes, results, strict=True):
        check(arrays, result, causal=causal)
    assert (first[0] == results[0][0]).all()
    assert (first[1] == results[0][1]).all()


@pytest.mark.gpu
@every_gpu_kernel
def test_the_same_call_into_an_output(cupy, kernel, no_validation):
    arrays = on_gpu(cupy, 4, 2, 70, 64, kernel=kernel)
    out = cupy.full((2, 70, 64), cupy.nan, arrays[0].dtype)
    attention(*arrays, out=out, kernel=kernel)
    expected = out.copy()
    no_validation()
    out[...] = cupy.nan
    assert attention(*arrays, out=out, kernel=kernel) is out
    assert (out == expected).all()
    for n, name in enumerate("qkv"):
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            attention(*arrays, out=arrays[n], kernel=kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_same_call_with_every_array(cupy, dtype, no_validation):
    def arguments(seed):
        q, k, v = on_gpu(cupy, seed, 2, 4, 60, 40, seqlen_k=90, heads_k=2, dtype=dtype)
        options = {
            "bias": cupy.asarray(normal(seed + 1, 60, 90).astype(dtype)),
            "mask": cupy.asarray(normal(seed + 2, 2, 1, 60, 90) > -1),
            "alibi_slopes": cupy.asarray(abs(normal(seed + 3, 4)).astype(np.float32)),
            "seqlens_k": cupy.asarray([90, 40 + seed]),
        }
        return (q, k, v), options

    calls = [arguments(seed) for seed in (5, 6)]
    attention(*calls[0][0], **calls[0][1], return_lse=True)
    if dtype != "float64":  # whose slopes are converted
        no_validation()
    for arrays, options in calls:
        result = attention(*arrays, **options, return_lse=True)
        check(arrays, result, **{name: x.get() for name, x in options.items()})


@pytest.mark.gpu
def test_a_wrong_option_that_equals_a_right_one(cupy):
    arrays = on_gpu(cupy, 7, 2, 50, 64)
    attention(*arrays, causal=True)
    with pytest.raises(TypeError, match="causal is 1"):
        attention(*arrays, causal=1)


@pytest.mark.gpu
@every_gpu_kernel
def test_one_call_in_many_threads_and_streams(cupy, kernel):
    arrays = [on_gpu(cupy, seed, 2, 4, 400, 64, kernel=kernel) for seed in range(8)]
    expected = [attention(*a, causal=True, kernel=kernel) for a in arrays]
    cupy.cuda.Device().synchronize()
    wrong = []

    def work(n):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for turn in range(50):
                index = (n + turn) % len(arrays)
                o = attention(*arrays[index], causal=True, kernel=kernel)
                if not (o == expected[index]).all():
                    wrong.append((n, turn))
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
@every_gpu_kernel
def test_a_thread_that_has_done_nothing_else(cupy, kernel):
    arrays = on_gpu(cupy, 7, 2, 4, 100, 64, kernel=kernel)
    expected = attention(*arrays, kernel=kernel)
    outs = [cupy.zeros_like(expected) for _ in range(3)]
    cupy.cuda.Device().synchronize()
    failures = []

    def work(out):
        try:
            attention(*arrays, kernel=kernel, out=out)
        except Exception as error:
            failures.append(error)

    for out in outs:
        thread = threading.Thread(target=work, args=(out,))
        thread.start()
        thread.join()
    assert not failures
    assert all((out == expected).all() for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "num_splits"), [("forward_sm90", None), ("forward_sm80", 3)])
def test_a_graph_captures_a_first_call(cupy, kernel, num_splits):
    """Replays write to the call's own memory only, not to what the pool has given away since."""
    if kernel == "forward_sm90" and devices.current_device(0).compute_capability != (9, 0):
        pytest.skip("needs compute capability 9.0")
    q, k, v = on_gpu(cupy, 8, 40, 8, 300, 64, kernel=kernel)
    how = {"causal": True, "kernel": kernel, "num_splits": num_splits}
    expected = attention(q, k, v, **how)
    out = cupy.zeros_like(expected)
    _call._calls.clear()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        attention(q, k, v, out=out, **how)
        graph = stream.end_capture()
        canaries = [cupy.full(n, 77, np.uint8) for n in (4, 512, 512, 512, 10**6, 10**7, 10**8)]
        for _ in range(2):
            out[...] = 0
            graph.launch(stream)
            stream.synchronize()
            assert (out == expected).all()
        assert all((canary == 77).all() for canary in canaries)


@pytest.mark.gpu
@every_gpu_kernel
def test_a_graph_captures_a_call(cupy, kernel):
    q, k, v = on_gpu(cupy, 8, 2, 4, 200, 64, seqlen_k=3000, kernel=kernel)
    out = cupy.empty_like(q)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attention(q, k, v, causal=True, out=out, kernel=kernel)
        stream.begin_capture()
        attention(q, k, v, causal=True, out=out, kernel=kernel)
        graph = stream.end_capture()
        for seed in (9, 10):
            new = on_gpu(cupy, seed, 2, 4, 200, 64, seqlen_k=3000, kernel=kernel)
            for old, x in zip((q, k, v), new, strict=True):
                old[...] = x
            out[...] = cupy.nan
            graph.launch(stream)
            stream.synchronize()
            assert (out == attention(*new, causal=True, kernel=kernel)).all()


@pytest.mark.gpu
def test_warmup_leaves_nothing_to_build(cupy, cache, monkeypatch):
    sizes = {"seqlen_q": 3, "seqlen_k": 5000, "head_dim": 40, "heads_q": 4, "dtype": "float16"}
    made = warmup(**sizes, device=0)
    assert made.parts is None or made.parts.splits > 1
    monkeypatch.setattr("cupyflash._compile.build", lambda *args: pytest.fail("built again"))
    arrays = on_gpu(cupy, 11, 4, 3, 40, seqlen_k=5000)
    check(arrays, attention(*arrays, return_lse=True))


@pytest.mark.gpu
def test_a_cleared_cache_builds_again(cupy, cache, monkeypatch):
    arrays = on_gpu(cupy, 12, 2, 50, 64)
    expected = attention(*arrays)
    built = []
    build = _compile.build
    monkeypatch.setattr(_compile, "build", lambda *args: built.append(args) or build(*args))
    attention(*arrays)
    assert not built
    clear_cache()
    assert not _call._calls
    assert (attention(*arrays) == expected).all()
    assert built


@pytest.mark.gpu
def test_one_array_in_all_roles_and_then_three(cupy):
    x, k, v = on_gpu(cupy, 13, 2, 50, 64)
    assert (attention(x, x, x) == attention(x, x.copy(), x.copy())).all()
    check((x, k, v), attention(x, k, v, return_lse=True))


def test_warmup_without_a_gpu_has_nothing_to_do():
    assert warmup(seqlen_q=10, head_dim=8, device="cpu").kernel == "host"


def test_warmup_for_a_gpu_that_is_only_named():
    with pytest.raises(ValueError, match="device is 'H200'"):
        warmup(seqlen_q=10, head_dim=8, device="H200")


@pytest.mark.parametrize("device", [None, True, 0.0, named_device("H200")])
def test_warmup_takes_a_number_or_cpu(device):
    with pytest.raises(TypeError, match=r"^warmup: device is .*; expected an integer"):
        warmup(seqlen_q=10, head_dim=8, device=device)


def test_warmup_of_a_gpu_that_is_there(monkeypatch):
    loaded = []
    monkeypatch.setattr(devices, "current_device", lambda number: named_device("H200"))
    monkeypatch.setattr("cupyflash._gpu.gpu_count", lambda: 2)
    monkeypatch.setattr("cupyflash._compile.load", lambda *call: loaded.append(call))
    made = warmup(seqlen_q=1, seqlen_k=9000, head_dim=64, heads_q=2, device=np.int64(1))
    assert made.parts.splits > 1
    assert [(kernel, device) for kernel, _, device, _ in loaded] == [("forward_sm80", 1)]
    assert loaded[0][1:] == (made.options, 1, made.smem_bytes)
    made = warmup(seqlen_q=1, seqlen_k=9000, head_dim=64, heads_q=2, alibi=True, device=np.int64(1))
    assert made.parts.splits > 1
    assert [(kernel, device) for kernel, _, device, _ in loaded[1:]] == [
        ("forward_sm80", 1),
        ("combine", 1),
    ]
