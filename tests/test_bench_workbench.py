# SPDX-License-Identifier: MIT
"""The workbench of bench without a GPU, on stand-ins for CuPy and torch."""

import contextlib
import dataclasses
import sys
import types
import warnings

import numpy as np
import pytest

from cupyflash import _bench, _bench_gpu, _bench_grids, _bench_torch, _dtypes, devices
from cupyflash._bench import Report
from cupyflash._bench_grids import BANDWIDTH, FLOPS, HOST, OPTIONS, Row, rows_of
from cupyflash.reference import attention_reference


class TestReference:
    """The parts of the GPU's workbench that take any array module, with numpy's."""

    @pytest.mark.parametrize("option", ["", "causal", *OPTIONS])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_rows_are_those_of_the_oracle(self, option, dtype):
        rng = np.random.default_rng(0)
        given = {"causal": True} if option == "causal" else {"option": option}
        row = Row("options", dtype, 2, 4, 2, 37, 700, 16, **given)

        def normal(*shape):
            return rng.standard_normal(shape).astype(_dtypes.named(dtype))

        arrays = normal(2, 4, 37, 16), normal(2, 2, 700, 16), normal(2, 2, 700, 16)
        options = {"causal": row.causal}
        if row.window:
            options["window"] = row.window
        if row.softcap:
            options["softcap"] = row.softcap
        if option == "alibi":
            options["alibi_slopes"] = np.float32([0.5, 0.25, 0.125, 0.0625])
        if row.extra_shape:
            extra = normal(*row.extra_shape)
            options |= {"mask": extra > -1} if "mask" in option else {"bias": extra}
        expected, _ = attention_reference(*arrays, **options)
        for head in (0, 3):
            for step in (1, 5):
                actual = _bench_gpu.reference_rows(np, row, arrays, options, head, step)
                np.testing.assert_allclose(actual, expected[-1, head, ::step], rtol=1e-10)

    def test_float64_reads_the_bits_of_bfloat16(self):
        x = np.array([1.5, -2.0, 3e38, np.inf, 0.0]).astype(_dtypes.named("bfloat16"))
        np.testing.assert_array_equal(_bench_gpu.float64(x), x.astype(np.float64))
        np.testing.assert_array_equal(_bench_gpu.float64(x[::2]), x[::2].astype(np.float64))

    @pytest.mark.parametrize("heads_k", [4, 2, 1])
    def test_plain_attention(self, heads_k):
        rng = np.random.default_rng(1)
        q = rng.standard_normal((2, 4, 9, 8))
        k, v = rng.standard_normal((2, 2, heads_k, 30, 8))
        expected, _ = attention_reference(q, k, v)
        np.testing.assert_allclose(_bench_gpu.plain_attention(np, q, k, v), expected, rtol=1e-10)

    def test_plain_attention_with_hidden_scores(self):
        rng = np.random.default_rng(2)
        q, k, v = rng.standard_normal((3, 1, 2, 9, 8))
        hidden = np.where(np.tri(9, dtype=bool), 0.0, -np.inf)
        expected, _ = attention_reference(q, k, v, causal=True)
        actual = _bench_gpu.plain_attention(np, q, k, v, hidden)
        np.testing.assert_allclose(actual, expected, rtol=1e-10)


class TestTorch:
    def torch(self, entered):
        """As much of torch as choosing a backend looks at."""

        @contextlib.contextmanager
        def sdpa_kernel(backend):
            entered.append(backend)
            yield

        backends = types.SimpleNamespace(CUDNN_ATTENTION="cudnn!")
        module = types.SimpleNamespace(sdpa_kernel=sdpa_kernel, SDPBackend=backends)
        return types.SimpleNamespace(nn=types.SimpleNamespace(attention=module))

    def test_one_backend(self):
        entered = []
        with _bench_torch.only_backend(self.torch(entered), "CUDNN_ATTENTION", "cudnn"):
            pass
        assert entered == ["cudnn!"]
        with _bench_torch.only_backend(self.torch(entered), None, ""):
            pass
        assert entered == ["cudnn!"]

    @pytest.mark.parametrize(
        ("messages", "reason"),
        [
            (
                (
                    "cuDNN attention kernel not used because: (Triggered internally at y)",
                    "Only half precision. (Triggered internally at x)",
                ),
                r"^Only half precision\.$",
            ),
            ((), "No available kernel"),
        ],
    )
    def test_refusal_has_torchs_reason(self, messages, reason):
        def refuse():
            with _bench_torch.only_backend(self.torch([]), "CUDNN_ATTENTION", "cudnn"):
                for message in messages:
                    warnings.warn(message, stacklevel=1)
                raise RuntimeError("No available kernel. Aborting execution.")

        with pytest.raises(RuntimeError, match=reason):
            refuse()

    def test_missing_torch(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        assert _bench_torch.import_torch() == (None, "not installed")

    def test_broken_torch(self, tmp_path, monkeypatch):
        (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: cannot open')")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        torch, reason = _bench_torch.import_torch()
        assert torch is None
        assert reason == "can't be imported: libtorch.so: cannot open"

    @pytest.mark.parametrize(
        ("peer", "grid", "timed"),
        [
            ("cuDNN", "paper", True),
            ("torch unfused", "paper", False),
            ("torch unfused", "float32", True),
            ("torch's choice", "small", True),
            ("torch's choice", "paper", False),
        ],
    )
    def test_who_is_timed_where(self, peer, grid, timed):
        assert _bench_gpu._concerns(peer, rows_of([grid])[0]) is timed


class Tensor(np.ndarray):
    """numpy's array with what the workbench asks of torch's."""

    def expand(self, shape):
        return np.broadcast_to(self, shape)


class FakeTorch:
    """As much of torch as the workbench uses, on the CPU."""

    __version__ = "2.11.0"
    float32, float64 = np.float32, np.float64
    bfloat16, bool = _dtypes.named("bfloat16"), np.bool_

    def __init__(self):
        def attention(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
            assert enable_gqa == (q.shape[1] != k.shape[1])
            extra = {}
            if attn_mask is not None:
                assert attn_mask.shape == (*q.shape[:3], k.shape[2])
                extra = {"mask" if attn_mask.dtype == bool else "bias": np.asarray(attn_mask)}
            arrays = map(np.asarray, (q, k, v))
            return attention_reference(*arrays, causal=is_causal, **extra)[0].astype(q.dtype)

        names = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
        self.nn = types.SimpleNamespace(
            functional=types.SimpleNamespace(scaled_dot_product_attention=attention),
            attention=types.SimpleNamespace(
                sdpa_kernel=lambda backend: contextlib.nullcontext(),
                SDPBackend=types.SimpleNamespace(**dict.fromkeys(names)),
            ),
        )
        self.cuda = types.SimpleNamespace(
            empty_cache=lambda: None,
            device=lambda number: contextlib.nullcontext(),
            stream=lambda stream: contextlib.nullcontext(),
            Stream=lambda: types.SimpleNamespace(cuda_stream=0),
        )
        self.backends = types.SimpleNamespace(cudnn=types.SimpleNamespace(version=lambda: 91900))
        self.mm = np.matmul

    def as_tensor(self, array, device):
        assert device == "cuda"
        return array.view(Tensor)


class FakeCupy:
    """As much of CuPy as the workbench uses: numpy, and a GPU that does nothing."""

    __version__ = "14.0.0"

    def __init__(self):
        rng, now = np.random.default_rng(0), iter(range(10**9))

        class Event:
            def record(self):
                self.time = next(now)

            def synchronize(self):
                """Nothing runs."""

        def normal(seed, x):
            assert isinstance(seed, np.uint64)
            x[...] = rng.standard_normal(x.shape)

        stream = types.SimpleNamespace(synchronize=lambda: None)
        self.RawKernel = lambda source, name: lambda grid, block, arguments: None
        self.ElementwiseKernel = lambda *arguments: normal
        self.get_default_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: None)
        self.cuda = types.SimpleNamespace(
            Event=Event,
            Device=lambda: types.SimpleNamespace(id=0),
            Stream=lambda non_blocking: contextlib.nullcontext(),
            ExternalStream=lambda pointer: contextlib.nullcontext(),
            get_current_stream=lambda: stream,
            get_elapsed_time=lambda start, end: float(end.time - start.time),
            runtime=types.SimpleNamespace(
                driverGetVersion=lambda: 13000,
                runtimeGetVersion=lambda: 12090,
                memGetInfo=lambda: (10**9, 10**9),
            ),
        )

    def __getattr__(self, name):
        return getattr(np, name)


class TestWorkbench:
    """The GPU's workbench with stand-ins for CuPy and torch."""

    @pytest.fixture
    def open_bench(self, monkeypatch):
        device = dataclasses.replace(devices.named_device("H200"), l2_bytes=20_000)
        monkeypatch.setattr(_bench_gpu._arrays, "import_cupy", FakeCupy)
        monkeypatch.setattr(_bench_gpu.devices, "current_device", lambda number: device)

        def open_bench(torch=True):
            found = (FakeTorch(), "") if torch else (None, "not installed")
            monkeypatch.setattr(_bench_torch, "import_torch", lambda: found)
            return _bench_gpu.GpuWorkbench([None], list(_bench.PEERS.values())).open()

        return open_bench

    def timings(self, bench, row):
        report = Report()
        bench.matmul = lambda dtype, matmul=bench.matmul: matmul(dtype, 16)
        _bench.run(bench, [row], report, rounds=2, seconds=1.0)
        return report, {timing.candidate: timing for timing in report.timings}

    @pytest.mark.parametrize("option", ["", *OPTIONS])
    def test_options(self, open_bench, option):
        row = Row("options", "float32", 2, 4, 4, 33, 65, 16, option=option)
        with open_bench() as bench:
            _, found = self.timings(bench, row)
        assert found["ours"].seconds
        assert found["ours"].kernel == "host"
        assert found["ours"].error < 1e-6
        assert ("plain call" in found) == bool(option)
        assert ("CuPy" in found) == (not option)
        if option in ("alibi", "window", "softcap"):
            assert found["cuDNN"].reason.startswith("scaled_dot_product_attention has no ")
        else:
            assert found["cuDNN"].error < 1e-6
            assert found["cuDNN"].seconds

    @pytest.mark.parametrize("torch", [True, False])
    @pytest.mark.parametrize("unit", [FLOPS, BANDWIDTH, HOST])
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_units(self, open_bench, unit, dtype, torch):
        row = Row("quick", dtype, 1, 4, 2, 1, 60, 8, unit=unit)
        with open_bench(torch) as bench:
            report, found = self.timings(bench, row)
        assert report.matmul[dtype] > 0
        assert report.machine["CUDA"].startswith("driver 13.0, runtime 12.9, NVRTC ")
        assert report.machine["torch"] == ("2.11.0" if torch else "not installed")
        assert report.machine.get("cuDNN") == ("9.19.0" if torch else None)
        names = {"ours", "CuPy"}
        if torch:
            names |= {"cuDNN", "FlashAttention-2", "mem.-efficient", "torch unfused"}
            names |= {"torch's choice"} if unit == HOST else set()
        assert set(found) == names
        for timing in found.values():
            assert timing.seconds, timing
            assert timing.error < (1e-6 if dtype == "float32" else 1e-14)

    def test_causal(self, open_bench):
        row = Row("quick", "float32", 2, 2, 2, 40, 40, 8, causal=True)
        with open_bench() as bench:
            _, found = self.timings(bench, row)
        for timing in found.values():
            assert timing.error < 1e-6, timing

    def test_bfloat16(self, open_bench):
        row = Row("quick", "bfloat16", 1, 2, 2, 40, 40, 8)
        with open_bench() as bench:
            _, found = self.timings(bench, row)
        assert 1e-4 < found["ours"].error < 1e-2
        assert 1e-4 < found["cuDNN"].error < 1e-2

    def test_inputs_are_rotated(self, open_bench):
        row = Row("decode", "float32", 1, 1, 1, 1, 64, 16, unit=BANDWIDTH)
        with open_bench() as bench, bench.row(row) as candidates:
            outputs = [candidates[0].call(i) for i in range(16)]
        assert not np.array_equal(outputs[0], outputs[1])
        sets = _bench_grids.rotations(row, 20_000)
        assert 1 < sets < 16
        np.testing.assert_array_equal(outputs[0], outputs[sets])

    def test_scores_that_do_not_fit(self, open_bench):
        row = Row("quick", "float32", 1, 1, 1, 16_384, 16_384, 1)
        with open_bench() as bench, bench.row(row) as candidates:
            reasons = {c.name: c.reason for c in candidates}
        assert reasons["CuPy"] == "the scores take 1.1 GB, 1.0 GB are free"
        assert reasons["torch unfused"] == "its score matrices don't fit the memory"

    def test_refused_kernel(self, open_bench):
        row = Row("quick", "float32", 1, 1, 1, 8, 8, 8)
        with open_bench() as bench:
            bench._kernels = ["fa1_forward"]
            _, found = self.timings(bench, row)
        assert found["ours"].seconds is None
        assert "fa1_forward" in found["ours"].reason
