# SPDX-License-Identifier: MIT
"""The command line, and its commands info and plan, called as a user calls them."""

import argparse
import importlib.metadata
import io
import os
import subprocess
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from command_line import ROOT, refused, shell

import cupyflash
from cupyflash import _cli_common, _cli_info, _cli_plan
from cupyflash.__main__ import main
from cupyflash.plan import Algorithm1


class TestMain:
    @pytest.mark.parametrize("command", ["info", "plan", "run", "demo", "bench"])
    def test_every_command_has_help(self, command, capsys):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        assert f"cupyflash {command}" in capsys.readouterr().out

    def test_command_is_required(self, capsys):
        with pytest.raises(SystemExit, match="2"):
            main([])
        assert "COMMAND" in capsys.readouterr().err

    def test_interrupt_is_no_traceback(self, monkeypatch, capsys):
        def interrupted(args):
            raise KeyboardInterrupt

        monkeypatch.setattr(_cli_info, "command", interrupted)
        assert main(["info"]) == 130
        assert capsys.readouterr().err.strip() == "cupyflash info: interrupted"

    @pytest.mark.parametrize("argv", ["info", "plan --seqlen 9 --head-dim 4 --device H200"])
    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_closed_pipe_is_no_traceback(self, argv, unbuffered):
        command = [sys.executable, "-m", "cupyflash", *argv.split()]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
        read_end, write_end = os.pipe()
        os.close(read_end)
        result = subprocess.run(
            command, stdout=write_end, stderr=subprocess.PIPE, env=environment, check=False
        )
        os.close(write_end)
        assert result.returncode == 0
        assert result.stderr == b""

    def test_no_stdout_at_all(self, monkeypatch):
        monkeypatch.setattr(sys, "stdout", None)
        assert main(["plan", "--seqlen", "9", "--head-dim", "4", "--device", "cpu"]) == 0

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
    def test_full_disk_behind_stdout(self):
        with open("/dev/full", "wb") as full:
            result = subprocess.run(
                [sys.executable, "-m", "cupyflash", "info"],
                stdout=full,
                stderr=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                check=False,
            )
        assert result.returncode == 2
        assert result.stderr.startswith(b"cupyflash info: ")
        assert len(result.stderr.splitlines()) == 1


class FakeDriver:
    """libcuda with one device, through the calls that ctypes makes."""

    def __init__(self, version=13010, init_status=0, devices=1):
        self.version, self.init_status, self.devices = version, init_status, devices
        self.attributes = {16: 132, 75: 9, 76: 0, 97: 232448}

    def cuDriverGetVersion(self, version):
        version._obj.value = self.version
        return 0

    def cuInit(self, flags):
        return self.init_status

    def cuGetErrorString(self, status, text):
        text._obj.value = b"no CUDA-capable device is detected"
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = self.devices
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, memory, device):
        memory._obj.value = 140 << 30
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.attributes[attribute]
        return 0


@pytest.fixture
def only_required(monkeypatch):
    """Pretend that nothing but numpy and ml_dtypes is installed."""
    real = importlib.metadata.version

    def version(package):
        if package in ("numpy", "ml_dtypes"):
            return real(package)
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    for module in ("cupy", "threadpoolctl", "skimage", "cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, module, None)

    def no_nvrtc():
        raise ImportError("cuda-bindings is not installed")

    monkeypatch.setattr(_cli_info._compile, "nvrtc_version", no_nvrtc)


def without_driver(monkeypatch):
    def not_found():
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(_cli_info, "_load_driver", not_found)


class TestInfo:
    def test_says_what_is_installed(self, capsys):
        assert main(["info"]) == 0
        lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
        assert lines["cupyflash"].startswith(cupyflash.__version__)
        assert lines["numpy"] == np.__version__
        assert lines["ml_dtypes"] == ml_dtypes.__version__

    def test_needs_only_numpy_and_ml_dtypes(self, only_required, monkeypatch, capsys):
        without_driver(monkeypatch)
        assert main(["info"]) == 0
        out = capsys.readouterr().out
        assert "threadpoolctl  not installed" in out
        assert "missing        CuPy, for arrays on a GPU: pip install 'cupyflash[cuda13]'" in out
        assert "missing        NVRTC, which builds the kernels: pip install" in out
        assert "missing        scikit-image, for the demo: pip install 'cupyflash[demo]'" in out
        assert "an NVIDIA driver" in out
        assert "no GPU" in out

    def test_describes_devices(self, monkeypatch, capsys):
        monkeypatch.setattr(_cli_info, "_load_driver", lambda: FakeDriver(devices=2))
        assert main(["info"]) == 0
        out = capsys.readouterr().out
        for ordinal in range(2):
            assert (
                f"device {ordinal}       NVIDIA H200, compute capability 9.0, 132 "
                "multiprocessors, 227 KiB opt-in shared memory a block, 140 GiB memory" in out
            )
        assert "driver         for CUDA up to 13.1\n" in out

    def test_old_driver_gets_the_older_extra(self, only_required, monkeypatch, capsys):
        monkeypatch.setattr(_cli_info, "_load_driver", lambda: FakeDriver(version=12040))
        assert main(["info"]) == 0
        out = capsys.readouterr().out
        assert "CuPy, for arrays on a GPU: pip install 'cupyflash[cuda12]'" in out

    def test_nvrtc_is_of_the_installed_cupys_kind(self, only_required, monkeypatch, capsys):
        without_driver(monkeypatch)
        monkeypatch.setattr(_cli_info, "_cupy_packages", lambda: ["cupy-cuda12x 13.6.0"])
        assert main(["info"]) == 0
        out = capsys.readouterr().out
        assert "NVRTC, which builds the kernels: pip install 'cupyflash[cuda12]'" in out
        assert "CuPy, for arrays" not in out

    def test_cupy_without_metadata_is_seen(self, only_required, tmp_path, monkeypatch, capsys):
        (tmp_path / "cupy.py").write_text("raise RuntimeError('half built')")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "cupy")
        assert main(["info"]) == 0
        assert "of a package unknown here; half built" in capsys.readouterr().out

    def test_driver_without_device_says_why(self, monkeypatch, capsys):
        monkeypatch.setattr(_cli_info, "_load_driver", lambda: FakeDriver(init_status=100))
        assert main(["info"]) == 0
        out = capsys.readouterr().out
        assert "error 100 from the driver: no CUDA-capable device is detected" in out
        assert "no GPU" in out

    def test_measures_the_cache(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "kernels"))
        assert main(["info"]) == 0
        assert f"{tmp_path / 'kernels'} (nothing built yet)" in capsys.readouterr().out
        (tmp_path / "kernels").mkdir()
        for name in "ab":
            (tmp_path / "kernels" / name).write_bytes(bytes(1024))
        assert main(["info"]) == 0
        assert f"{tmp_path / 'kernels'}, 2 files, 2 KiB" in capsys.readouterr().out

    def test_broken_cache_setting_is_reported(self, monkeypatch, capsys):
        monkeypatch.setenv("CUPYFLASH_CACHE_SIZE_MB", "plenty")
        assert main(["info"]) == 0
        assert "CUPYFLASH_CACHE_SIZE_MB is 'plenty'" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            ("raise AttributeError('no attribute _core')", "no attribute _core"),
            ("raise ImportError('libcublas.so.13: cannot open')", "libcublas.so.13"),
            ("raise OSError(30, 'Read-only file system')", "CUPY_CACHE_DIR"),
        ],
    )
    def test_broken_cupy_is_reported(self, body, reason, tmp_path, monkeypatch, capsys):
        (tmp_path / "cupy.py").write_text(body)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "cupy", raising=False)
        monkeypatch.setattr(_cli_info, "_cupy_packages", lambda: ["cupy-cuda13x 14.2.0"])
        assert main(["info"]) == 0
        (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("cupy "))
        assert "cupy-cuda13x 14.2.0; " in line
        assert reason in line

    def test_two_cupys_are_one_too_many(self, monkeypatch, capsys):
        both = ["cupy-cuda13x 14.2.0", "cupy-cuda12x 13.6.0"]
        monkeypatch.setattr(_cli_info, "_cupy_packages", lambda: both)
        assert main(["info"]) == 0
        assert "they overwrite each other; uninstall all but one" in capsys.readouterr().out

    def test_in_a_shell(self):
        result = shell("info")
        assert result.returncode == 0
        assert result.stderr == ""
        assert result.stdout.startswith("cupyflash ")


def fake_cupy(devices=1, is_hip=False):
    """As much of CuPy as the choice of a device looks at."""
    runtime = types.SimpleNamespace(
        is_hip=is_hip,
        getDeviceCount=lambda: devices,
        getDeviceProperties=lambda ordinal: {"name": b"NVIDIA H200"},
    )
    cuda = types.SimpleNamespace(runtime=runtime, Device=lambda: types.SimpleNamespace(id=0))
    return types.SimpleNamespace(cuda=cuda)


class TestDevice:
    @pytest.mark.parametrize("asked", ["auto", "gpu"])
    def test_takes_the_gpu(self, asked, monkeypatch):
        monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
        cupy, text = _cli_common.pick_device(asked)
        assert cupy is sys.modules["cupy"]
        assert text == "GPU 0, NVIDIA H200"

    def test_cpu_on_request_imports_no_cupy(self, monkeypatch):
        monkeypatch.setattr(_cli_common._arrays, "import_cupy", None)
        assert _cli_common.pick_device("cpu") == (None, "CPU (as asked)")

    @pytest.mark.parametrize(
        ("cupy", "reason"),
        [(fake_cupy(devices=0), "CuPy sees no GPU"), (fake_cupy(is_hip=True), "ROCm")],
    )
    def test_useless_gpu(self, cupy, reason, monkeypatch):
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        unused, text = _cli_common.pick_device("auto")
        assert unused is None
        assert reason in text
        with pytest.raises(_cli_common.CommandError, match=reason):
            _cli_common.pick_device("gpu")


class TestPlan:
    H200 = ("--seqlen", "4096", "--head-dim", "64", "--dtype", "float32", "--device", "H200")

    def test_prints_what_plan_answers(self, capsys):
        assert main(["plan", *self.H200, "--kernel", "fa1_forward"]) == 0
        out = capsys.readouterr().out
        expected = cupyflash.plan(
            seqlen_q=4096, head_dim=64, dtype="float32", device="H200", kernel="fa1_forward"
        )
        assert out == f"{expected}\n"
        for quantity in ("M ", "B_r", "B_c", "T_r", "T_c", "grid", "HBM"):
            assert quantity in out

    def test_passes_every_option_on(self, monkeypatch):
        got = {}
        monkeypatch.setattr(_cli_plan, "plan", lambda **arguments: got.update(arguments))
        options = "--seqlen 100 --seqlen-k 300 --head-dim 64 --head-dim-v 32 --batch 2 --heads 8/4"
        options += " --dtype bfloat16 --causal --window 16,none --scale 0.5 --softcap 5"
        options += " --precision full"
        options += " --bias float32 --mask --alibi --seqlens --device A100 --kernel fa1_forward"
        options += " --num-splits 3"
        assert main(["plan", *options.split()]) == 0
        assert got == {
            "seqlen_q": 100,
            "seqlen_k": 300,
            "head_dim": 64,
            "head_dim_v": 32,
            "batch": 2,
            "heads_q": 8,
            "heads_k": 4,
            "dtype": "bfloat16",
            "causal": True,
            "window": (16, None),
            "softmax_scale": 0.5,
            "softcap": 5.0,
            "precision": "full",
            "bias_dtype": "float32",
            "mask": True,
            "alibi": True,
            "seqlens": True,
            "device": "A100",
            "num_splits": 3,
            "kernel": "fa1_forward",
        }

    def test_settings_of_algorithm_1(self, capsys):
        options = ("--sram-elements", "2048", "--chunks", "1")
        assert main(["plan", *self.H200, *options]) == 0
        expected = cupyflash.plan(
            seqlen_q=4096,
            head_dim=64,
            dtype="float32",
            device="H200",
            kernel=Algorithm1(sram_elements=2048, chunks=1),
        )
        assert capsys.readouterr().out == f"{expected}\n"

    def test_refusals(self, capsys):
        size = ("--seqlen", "64", "--head-dim", "64")
        assert "H200" in refused(capsys, "plan", *size, "--device", "H2000")
        assert "GPUs" in refused(capsys, "plan", *size, "--device", "1000")
        assert "dtype" in refused(capsys, "plan", *size, "--device", "H200", "--dtype", "int8")
        assert "heads" in refused(capsys, "plan", *size, "--device", "H200", "--heads", "8/3")
        assert "--seqlen N" in refused(capsys, "plan", "--head-dim", "64")
        assert "fa1_forward, not of host" in refused(
            capsys, "plan", *size, "--kernel", "host", "--chunks", "1"
        )

    @pytest.mark.parametrize("text", ["x", "8/", "8/4/2", ""])
    def test_heads_that_are_none(self, text):
        with pytest.raises(argparse.ArgumentTypeError, match="HQ/HK"):
            _cli_plan.heads(text)

    @pytest.mark.parametrize("text", ["1", "1,2,3", "a,b", "1.5,0", ""])
    def test_window_that_is_none(self, text):
        with pytest.raises(argparse.ArgumentTypeError, match="L,R"):
            _cli_common.window(text)

    def test_in_a_shell(self):
        result = shell("plan", *self.H200, "--kernel", "fa1_forward")
        assert result.returncode == 0
        assert result.stderr == ""
        assert "B_c" in result.stdout


class TestProgress:
    def test_bar_on_a_terminal(self):
        stream = io.StringIO()
        stream.isatty = lambda: True
        progress = _cli_common.Progress(stream)
        for done in range(1, 1001):
            progress(done, 1000)
        drawn = stream.getvalue().split("\r")[1:]
        assert len(drawn) == 40
        assert drawn[19].startswith("[" + "#" * 20 + "." * 20 + "]  50 %")
        assert drawn[-1].startswith("[" + "#" * 40 + "] 100 %")
        assert stream.getvalue().count("\n") == 1

    def test_lines_elsewhere(self):
        stream = io.StringIO()
        progress = _cli_common.Progress(stream)
        for done in range(1, 8):
            progress(done, 7)
        percents = [int(line.split("%")[0]) for line in stream.getvalue().splitlines()]
        assert percents == [25, 50, 75, 100]

    def test_close_ends_the_line(self):
        stream = io.StringIO()
        stream.isatty = lambda: True
        progress = _cli_common.Progress(stream)
        progress(1, 2)
        progress.close()
        progress.close()
        assert stream.getvalue().endswith("s\n")
        assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (140 << 30, "140 GiB")],
)
def test_bytes_text(count, text):
    assert _cli_common.bytes_text(count) == text
