# SPDX-License-Identifier: MIT
"""The command run: files in, files out, and nothing written where something is wrong."""

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from command_line import ROOT, refused, shell
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cupyflash
from cupyflash import _cli_common, _cli_files, _cli_run
from cupyflash.__main__ import main


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with q, k and v in it, as the current one."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    arrays = {
        "q": rng.standard_normal((2, 4, 33, 16), np.float32),
        "k": rng.standard_normal((2, 2, 50, 16), np.float32),
        "v": rng.standard_normal((2, 2, 50, 8), np.float32),
    }
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
    return arrays


def broken_header():
    """A .npy whose header is no Python literal."""
    Path("v.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 15 + b"\n")


def broken_archive():
    """A compressed .npz with a byte that is no deflate stream."""
    np.savez_compressed("qkv.npz", **{name: np.load(f"{name}.npy") for name in "qkv"})
    data = bytearray(Path("qkv.npz").read_bytes())
    data[60:90] = b"\xff" * 30
    Path("qkv.npz").write_bytes(data)


def negative_axis(name):
    """A .npy, alone or stored in a .npz, whose header has an axis of length -2."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (-2, 6, 8)}
    with io.BytesIO() as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        written = stream.getvalue() + bytes(400)
    if name.endswith(".npy"):
        Path(name).write_bytes(written)
    else:
        with zipfile.ZipFile(name, "w") as archive:
            archive.writestr("v.npy", written)


def nothing():
    """Leave the files as they are."""


QKV = ("q.npy", "k.npy", "v.npy")
OUT = ("--device", "cpu", "-o", "o.npy")


class TestRun:
    def test_writes_what_attention_gives(self, files, capsys):
        assert main(["run", *QKV, "--causal", "--lse", "lse.npy", *OUT]) == 0
        o, lse = cupyflash.attention(**files, causal=True, return_lse=True)
        np.testing.assert_array_equal(np.load("o.npy"), o)
        np.testing.assert_array_equal(np.load("lse.npy"), lse)
        out = capsys.readouterr().out
        assert "(2, 4, 33, 16) float32" in out
        assert "o.npy: (2, 4, 33, 8) float32" in out
        assert "lse.npy: (2, 4, 33) float32" in out
        assert "host" in out
        assert sorted(os.listdir()) == ["k.npy", "lse.npy", "o.npy", "q.npy", "v.npy"]

    def test_every_option_reaches_attention(self, files):
        rng = np.random.default_rng(1)
        extra = {
            "bias": rng.standard_normal((4, 1, 50), np.float32),
            "mask": rng.random((33, 50)) < 0.7,
            "alibi_slopes": np.float32([0.5, 0.25, 0.125, 0.0625]),
            "seqlens_k": np.array([50, 21]),
        }
        np.savez("extra.npz", **extra)
        options = "--causal-top-left --window 20,none --scale -0.3 --softcap 4 --kernel host"
        options += " --num-splits 1 --precision tf32"
        for option in ("bias", "mask", "alibi", "seqlens"):
            options += f" --{option} extra.npz"
        assert main(["run", *QKV, *options.split(), *OUT]) == 0
        expected = cupyflash.attention(
            **files,
            **extra,
            causal="top_left",
            window=(20, None),
            softmax_scale=-0.3,
            softcap=4.0,
        )
        np.testing.assert_array_equal(np.load("o.npy"), expected)

    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_one_archive(self, save, files):
        save("qkv.npz", **files, other=np.zeros(3))
        assert main(["run", "qkv.npz", *OUT]) == 0
        np.testing.assert_array_equal(np.load("o.npy"), cupyflash.attention(**files))

    def test_archives_of_one_array(self, files):
        for name, array in files.items():
            np.savez(f"{name}.npz", array)
        assert main(["run", "q.npz", "k.npz", "v.npz", *OUT]) == 0
        np.testing.assert_array_equal(np.load("o.npy"), cupyflash.attention(**files))

    def test_bfloat16_files(self, files):
        rounded = {name: array.astype(ml_dtypes.bfloat16) for name, array in files.items()}
        for name, array in rounded.items():
            np.save(f"{name}.npy", array)
        assert main(["run", *QKV, "--dtype", "bfloat16", *OUT]) == 0
        o = np.load("o.npy").view(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(o, cupyflash.attention(**rounded))

    def test_converts_on_request(self, files):
        np.save("q.npy", files["q"].astype(np.float64))
        np.save("k.npy", (8 * files["k"]).astype(np.int8))
        np.save("bias.npy", np.arange(50) / 50)
        assert main(["run", *QKV, "--bias", "bias.npy", "--dtype", "float16", *OUT]) == 0
        expected = cupyflash.attention(
            files["q"].astype(np.float16),
            (8 * files["k"]).astype(np.int8).astype(np.float16),
            files["v"].astype(np.float16),
            bias=(np.arange(50) / 50).astype(np.float16),
        )
        np.testing.assert_array_equal(np.load("o.npy"), expected)

    def test_a_name_that_stdout_can_not_encode(self, files, monkeypatch):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["run", *QKV, "--device", "cpu", "-o", "\u00f6.npy"]) == 0
        assert b"\\xf6.npy" in stdout.buffer.getvalue()
        assert os.path.exists("\u00f6.npy")

    def test_replaces_an_older_output(self, files):
        Path("o.npy").write_text("old")
        assert main(["run", *QKV, *OUT]) == 0
        np.testing.assert_array_equal(np.load("o.npy"), cupyflash.attention(**files))

    @pytest.mark.parametrize(
        ("prepare", "argv", "message"),
        [
            (nothing, ("q.npy", "k.npy", "w.npy"), "w.npy: No such file"),
            (nothing, ("q.npy", "k.npy", "."), ".: Is a directory"),
            (nothing, ("q.npy", "k.npy"), "2 input files; expected three"),
            (nothing, ("q.npy",), "q.npy: this is one array; expected"),
            (lambda: Path("v.npy").write_text("1 2 3"), QKV, "v.npy: this is neither"),
            (lambda: Path("v.npy").write_text(""), QKV, "v.npy: this is neither"),
            (lambda: os.truncate("v.npy", 300), QKV, "v.npy: "),
            (lambda: os.truncate("v.npy", 7), QKV, "v.npy: "),
            (lambda: np.save("v.npy", np.array([{}])), QKV, "v.npy: "),
            (broken_header, QKV, "v.npy: "),
            (broken_archive, ("qkv.npz",), "qkv.npz: "),
            (lambda: negative_axis("v.npy"), QKV, "v.npy: "),
            (lambda: negative_axis("v.npz"), (*QKV[:2], "v.npz"), "expected no negative lengths"),
            (
                lambda: np.savez("v.npz", a=1, b=2),
                (*QKV[:2], "v.npz"),
                "no array 'v' (it holds a, b)",
            ),
            (lambda: np.savez("v.npz", np.array([{}])), (*QKV[:2], "v.npz"), "Python objects"),
            (lambda: np.savez("qkv.npz", q=1, k=2), ("qkv.npz",), "no array 'v' (it holds q, k)"),
            (lambda: np.savez("qkv.npz", 1), ("qkv.npz",), "no array 'q' (it holds arr_0)"),
            (
                lambda: np.save("v.npy", np.zeros((2, 2, 49, 8), "f")),
                QKV,
                "v has seqlen_k 49",
            ),
            (lambda: np.save("v.npy", np.zeros((2, 2, 50, 8))), QKV, "one dtype"),
            (lambda: np.save("v.npy", np.zeros((2, 2, 50, 8), "i4")), QKV, "v.dtype is int32"),
            (
                lambda: np.save("v.npy", np.zeros((2, 2, 50, 8), "V2")),
                QKV,
                "--dtype bfloat16 reads",
            ),
            (nothing, (*QKV, "--scale", "0"), "softmax_scale is 0.0"),
            (nothing, (*QKV, "--softcap", "nan"), "softcap is nan"),
            (nothing, (*QKV, "--window=-2,0"), "window left is -2"),
            (nothing, (*QKV, "--mask", "q.npy"), "mask.dtype is float32"),
            (nothing, (*QKV, "--bias", "q.npy"), "bias.shape is (2, 4, 33, 16)"),
            (nothing, (*QKV, "--kernel", "fa3"), "fa3"),
            (nothing, (*QKV, "--device", "cpu", "--num-splits", "2"), "num_splits is 2"),
            (nothing, (*QKV, "--lse", "nowhere/lse.npy"), "there is no folder"),
            (nothing, (*QKV, "--lse", "./o.npy"), "expected two files"),
            (nothing, (*QKV, "--lse", "./k.npy"), "--lse ./k.npy: is an input too"),
        ],
    )
    def test_refusals_write_nothing(self, prepare, argv, message, files, capsys):
        prepare()
        before = {path: Path(path).read_bytes() for path in os.listdir()}
        assert message in refused(capsys, "run", *argv, *OUT)
        assert {path: Path(path).read_bytes() for path in os.listdir()} == before

    @pytest.mark.parametrize("target", ["nowhere/o.npy", ".", os.devnull])
    def test_refuses_an_output_that_is_no_file(self, target, files, monkeypatch, capsys):
        monkeypatch.setattr(_cli_run, "attention", None)  # refused before the work
        assert target in refused(capsys, "run", *QKV, "-o", target)

    def test_asked_gpu_is_not_replaced_by_the_cpu(self, files, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "cupy", None)
        message = refused(capsys, "run", *QKV, "--device", "gpu", "-o", "o.npy")
        assert "pip install 'cupyflash[cuda13]'" in message
        assert not os.path.exists("o.npy")

    def test_auto_says_why_it_takes_the_cpu(self, files, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "cupy", None)
        assert main(["run", *QKV, "-o", "o.npy"]) == 0
        assert "CPU (cupyflash needs CuPy" in capsys.readouterr().out

    def test_in_a_shell(self, files):
        result = shell("run", *QKV, *OUT)
        assert result.returncode == 0
        assert result.stderr == ""
        np.testing.assert_array_equal(np.load("o.npy"), cupyflash.attention(**files))
        result = shell("run", "q.npy", "k.npy", "w.npy", *OUT)
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr == "cupyflash run: w.npy: No such file or directory\n"

    @pytest.mark.gpu
    def test_on_a_gpu(self, files):
        assert main(["run", *QKV, "--causal", "--device", "gpu", "-o", "o.npy"]) == 0
        expected = cupyflash.attention(**files, causal=True)
        np.testing.assert_allclose(np.load("o.npy"), expected, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_closed_pipe_loses_no_work(self, unbuffered, files):
        read_end, write_end = os.pipe()
        os.close(read_end)
        result = subprocess.run(
            [sys.executable, "-m", "cupyflash", "run", *QKV, *OUT],
            stdout=write_end,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
        os.close(write_end)
        assert result.stderr == b""
        assert result.returncode == 0
        np.testing.assert_array_equal(np.load("o.npy"), cupyflash.attention(**files))


class TestFiles:
    @given(
        array=hnp.arrays(
            dtype=st.sampled_from(["float16", "float32", "float64", "int64", "bool", "u2", ">f4"]),
            shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
        ),
        fortran=st.booleans(),
        archive=st.booleans(),
        name=st.sampled_from(["q", "a_rather_long_name"]),
    )
    def test_reads_any_array(self, array, fortran, archive, name, tmp_path_factory):
        path = tmp_path_factory.mktemp("files") / "file"
        if array.dtype == np.uint16:
            array = array.view("V2")  # as bfloat16 is stored
        array = np.asarray(array, order="F" if fortran else "C")
        with open(path, "wb") as stream:
            if archive:
                np.savez(stream, first=np.arange(3), **{name: array})
            else:
                np.save(stream, array)
        got = _cli_files.read_array(str(path), name)
        assert got.dtype == array.dtype
        assert got.shape == array.shape
        assert got.tobytes() == array.tobytes()

    @pytest.mark.parametrize("save", [np.save, np.savez])
    def test_maps_and_does_not_read(self, save, tmp_path):
        with open(tmp_path / "file", "wb") as stream:
            save(stream, np.arange(1000.0))
        mapped = _cli_files.read_array(str(tmp_path / "file"), "q")
        assert isinstance(mapped, np.memmap)
        assert not mapped.flags.writeable

    def test_one_failure_writes_no_file(self, tmp_path):
        def fail(stream):
            stream.write(b"half")
            raise OSError(28, "No space left on device")

        first, second = str(tmp_path / "first"), str(tmp_path / "second")
        Path(first).write_bytes(b"old")
        with pytest.raises(_cli_common.CommandError, match="second: No space left"):
            _cli_common.write_files({first: lambda stream: stream.write(b"new"), second: fail})
        assert Path(first).read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["first"]

    def test_writes_through_a_link(self, tmp_path):
        (tmp_path / "real").write_bytes(b"old")
        (tmp_path / "link").symlink_to(tmp_path / "real")
        _cli_common.write_files({str(tmp_path / "link"): _cli_files.npy_writer(np.arange(3))})
        assert (tmp_path / "link").is_symlink()
        np.testing.assert_array_equal(np.load(tmp_path / "real"), np.arange(3))

    def test_written_arrays_are_plain_npy(self):
        stream = io.BytesIO()
        _cli_files.npy_writer(np.arange(4)[::2])(stream)
        stream.seek(0)
        np.testing.assert_array_equal(np.load(stream), [0, 2])
