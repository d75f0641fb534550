# SPDX-License-Identifier: MIT
"""The demo: attention is exact non-local means, and it denoises a photograph."""

import os
import subprocess
import sys

import numpy as np
import pytest
from command_line import ROOT, shell

import cupyflash
from cupyflash import _nlm, demo
from cupyflash.__main__ import main


@pytest.fixture
def photograph():
    pytest.importorskip("skimage", reason="scikit-image is not installed")
    return demo.load_picture()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def non_local_means(picture, h, radius, rows=512):
    """The filter from its definition, in float64: distances, weights, quotient."""
    picture = picture.astype(np.float64)
    side = 2 * radius + 1
    padded = np.pad(picture, radius, mode="reflect")
    p = np.stack(
        [
            padded[i : i + picture.shape[0], j : j + picture.shape[1]].ravel()
            for i in range(side)
            for j in range(side)
        ],
        axis=1,
    )
    norms, x = (p * p).sum(1), picture.ravel()
    filtered = np.empty_like(x)
    for start in range(0, x.size, rows):
        part = slice(start, start + rows)
        weights = p[part] @ p.T
        weights *= -2
        weights += norms
        weights += norms[part, None]  # squared distances
        weights /= -h * h
        np.exp(weights, out=weights)
        filtered[part] = weights @ x / weights.sum(1)
    return filtered.reshape(picture.shape)


class TestFilter:
    @pytest.mark.parametrize("radius", [0, 1, 3])
    @pytest.mark.parametrize("shape", [(4, 4), (5, 9)])
    def test_attention_is_the_filter(self, shape, radius):
        picture = np.random.default_rng(0).standard_normal(shape)
        filtered = cupyflash.attention(**_nlm.attention_arguments(picture, 2.5, radius))
        np.testing.assert_allclose(
            filtered.reshape(shape), non_local_means(picture, 2.5, radius), rtol=1e-12
        )

    def test_constant_picture_stays(self):
        picture = np.full((6, 7), 0.25, np.float32)
        filtered = cupyflash.attention(**_nlm.attention_arguments(picture, 0.1))
        np.testing.assert_allclose(filtered, 0.25, rtol=1e-6)

    def test_arguments_are_float32_without_a_score_matrix(self):
        arguments = _nlm.attention_arguments(np.zeros((8, 9), np.float32), 0.5)
        shapes = {name: x.shape for name, x in arguments.items() if name != "softmax_scale"}
        assert shapes == {"q": (72, 49), "k": (72, 49), "v": (72, 1), "bias": (1, 72)}
        assert all(arguments[name].dtype == np.float32 for name in shapes)
        assert arguments["softmax_scale"] == 8.0


class TestPhotograph:
    def test_cpu_crop_matches_float64_and_is_denoised(self, photograph, capsys):
        clean = demo.crop(photograph, 128)
        noisy = demo.add_noise(clean, 25.0)
        h = 0.75 * 7 * 25 / 255
        denoised, _ = demo.denoise(noisy, h)
        assert denoised.dtype == np.float32
        plain = non_local_means(noisy, h, 3)
        assert np.abs(denoised - plain).max() <= 1e-5  # pixels range from 0 to 1
        assert demo.psnr(noisy, clean) == pytest.approx(20.2, abs=0.2)
        assert demo.psnr(denoised, clean) > demo.psnr(noisy, clean) + 6

    @pytest.mark.gpu
    def test_gpu_crop_matches_float64(self, photograph, cupy):
        noisy = demo.add_noise(demo.crop(photograph, 128), 25.0)
        h = 0.75 * 7 * 25 / 255
        denoised, _ = demo.denoise(noisy, h, cupy)
        assert np.abs(denoised - non_local_means(noisy, h, 3)).max() <= 1e-5

    def test_crop_stays_inside(self, photograph):
        for size in (4, 128, 300, 512):
            assert demo.crop(photograph, size).shape == (size, size)
        np.testing.assert_array_equal(demo.crop(photograph, 512), photograph)

    def test_crop_has_texture_and_plain_parts(self, photograph):
        part = demo.crop(photograph, 128)
        gradient = np.hypot(*np.gradient(part))
        assert (gradient > 0.1).mean() > 0.05
        assert (gradient < 0.02).mean() > 0.2


class TestCommand:
    def test_says_and_saves(self, photograph, folder, capsys):
        from PIL import Image

        assert main(["demo", "--size", "48", "--device", "cpu"]) == 0
        out, err = capsys.readouterr()
        assert "2,304 x 2,304" in out
        assert "PSNR" in out
        assert "host" in out
        assert "cupyflash-demo.png" in out
        assert "100 %" in err
        assert os.listdir(folder) == ["cupyflash-demo.png"]
        with Image.open("cupyflash-demo.png") as image:
            pixels = np.asarray(image)
        assert pixels.shape == (48, 3 * 48 + 2 * 8)
        clean = demo.crop(photograph, 48)
        noisy = demo.add_noise(clean, 25.0)
        denoised, _ = demo.denoise(noisy, 0.75 * 7 * 25 / 255)
        for panel, picture in enumerate((clean, noisy, denoised)):
            shown = pixels[:, panel * 56 : panel * 56 + 48] / 255
            assert np.abs(shown - np.clip(picture, 0, 1)).max() <= 0.5 / 255 + 1e-6

    def test_options_reach_the_filter(self, photograph, folder, monkeypatch, capsys):
        seen = []
        monkeypatch.setattr(
            demo, "denoise", lambda noisy, h, *_, **__: (seen.append((noisy, h)), (noisy, 0.0))[1]
        )
        argv = "demo --size 16 --sigma 10 --h 51 -o picture.png --device cpu"
        assert main(argv.split()) == 0
        ((noisy, h),) = seen
        assert h == pytest.approx(0.2)
        np.testing.assert_array_equal(noisy, demo.add_noise(demo.crop(photograph, 16), 10.0))
        assert os.listdir(folder) == ["picture.png"]

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ("--size 513", "--size is 513; expected 4 to 512"),
            ("--size 3", "--size is 3"),
            ("--sigma 0", "--sigma is 0.0"),
            ("--sigma nan", "--sigma is nan"),
            ("--h -1", "--h is -1.0"),
            ("-o nowhere/x.png", "there is no folder"),
        ],
    )
    def test_refusals(self, argv, message, photograph, folder, capsys):
        assert main(["demo", "--device", "cpu", *argv.split()]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert os.listdir(folder) == []

    def test_without_scikit_image(self, folder, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "skimage", None)
        monkeypatch.setitem(sys.modules, "skimage.data", None)
        assert main(["demo"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("pip install 'cupyflash[demo]'")
        assert os.listdir(folder) == []

    def test_in_a_shell(self, photograph, folder):
        result = shell("demo", "--size", "32", "--device", "cpu")
        assert result.returncode == 0, result.stderr
        assert "PSNR" in result.stdout
        assert (folder / "cupyflash-demo.png").stat().st_size > 0

    def test_closed_pipe_loses_no_work(self, photograph, folder):
        read_end, write_end = os.pipe()
        os.close(read_end)
        result = subprocess.run(
            [sys.executable, "-m", "cupyflash", "demo", "--size", "32", "--device", "cpu"],
            stdout=write_end,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=False,
        )
        os.close(write_end)
        assert result.returncode == 0
        assert b"Traceback" not in result.stderr
        assert (folder / "cupyflash-demo.png").stat().st_size > 0


def test_psnr():
    clean = np.zeros((4, 4))
    assert demo.psnr(clean + 0.1, clean) == pytest.approx(20.0)
    assert demo.psnr(clean, clean) == np.inf
