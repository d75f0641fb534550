# SPDX-License-Identifier: MIT
"""python -m cupyflash demo: denoise a photograph by exact non-local means, which is attention.

Every pixel becomes an average over all pixels of the picture (see :mod:`cupyflash._nlm`): the
whole 512 x 512 on a GPU, where the score matrix would take 275 GB, a 128 x 128 crop on a CPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import Any, BinaryIO

import numpy as np

from cupyflash import _nlm, _problem, host
from cupyflash._cli_common import (
    CommandError,
    Progress,
    add_device_option,
    check_target,
    pick_device,
    write_files,
)
from cupyflash._messages import install_command, one_line
from cupyflash.attention import attention
from cupyflash.plan import make_plan

_PATCH_RADIUS = 3  # 7 x 7 patches: head_dim 49
_SIGMA = 25.0  # of the noise, in grey levels of 255
# h in units of the noise that a patch's distance sums up, sigma * sqrt(49). Measured on camera with
# sigma from 15 to 30: PSNR peaks between 0.7 and 0.85, and 0.4 leaves the noise as it is.
_H_FACTOR = 0.75
_CENTRE = (124, 252)  # of the crop: a face and a camera, with texture, edges and plain sky
_GPU_SIZE, _CPU_SIZE = 512, 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "-o",
        "--output",
        default="cupyflash-demo.png",
        metavar="PNG",
        help="original, noisy and denoised side by side (default: %(default)s, in this folder)",
    )
    parser.add_argument(
        "--size",
        type=int,
        metavar="N",
        help=f"denoise a crop of N x N pixels (default: {_GPU_SIZE}, the whole picture, on a GPU; "
        f"{_CPU_SIZE} on a CPU)",
    )
    parser.add_argument(
        "--sigma",
        type=float,
        metavar="S",
        default=_SIGMA,
        help="standard deviation of the noise in grey levels of 255 (default: %(default)s)",
    )
    parser.add_argument(
        "--h",
        type=float,
        metavar="H",
        help=f"strength of the filter in grey levels (default: {_H_FACTOR} * 7 * sigma)",
    )
    add_device_option(parser)


def command(args: argparse.Namespace) -> None:
    """Denoise, report and save.

    Raises
    ------
    CommandError
        scikit-image is missing, an option makes no sense, or the picture can't be written.
    """
    check_target("-o", args.output)
    h = _H_FACTOR * (2 * _PATCH_RADIUS + 1) * args.sigma if args.h is None else args.h
    for name, value, largest in (("--sigma", args.sigma, 255), ("--h", h, 10_000)):
        if not 1 <= value <= largest:
            raise CommandError(f"{name} is {value}; expected 1 to {largest} grey levels")
    picture = load_picture()
    cupy, where = pick_device(args.device)
    size = args.size if args.size is not None else _GPU_SIZE if cupy else _CPU_SIZE
    clean = crop(picture, size)
    noisy = add_noise(clean, args.sigma)
    _line("picture", f"camera of scikit-image, {_shape_of(clean, picture)}, noise {args.sigma:g}")
    _line("filter", f"non-local means, patches of 7 x 7, h = {h:g} grey levels")
    _line("device", where)
    try:
        denoised, seconds = denoise(noisy, h / 255, cupy, progress=Progress(sys.stderr))
    except BrokenPipeError:  # from print: nobody reads what is said
        raise
    except (ImportError, OSError, MemoryError) as error:
        raise CommandError(one_line(error)) from error
    _line("time", f"{seconds:.2f} s")
    before, after = psnr(noisy, clean), psnr(denoised, clean)
    _line("PSNR", f"{before:.2f} dB before, {after:.2f} dB after ({after - before:+.2f} dB)")
    write_files({args.output: lambda stream: save_png(stream, [clean, noisy, denoised])})
    _line("saved", f"{args.output}: original, noisy, denoised")


def load_picture() -> np.ndarray:
    """The photograph that scikit-image ships, (512, 512) float32 from 0 to 1.

    Raises
    ------
    CommandError
        scikit-image is not installed.
    """
    try:
        from skimage.data import camera
    except ImportError as error:
        raise CommandError(
            f"the demo needs scikit-image for its photograph ({one_line(error)}): "
            f"{install_command('demo')}"
        ) from error
    return camera().astype(np.float32) / 255


def crop(picture: np.ndarray, size: int) -> np.ndarray:
    """The ``size`` x ``size`` part around the face, moved where it would stick out.

    Raises
    ------
    CommandError
        The picture is smaller than that, or a patch is not.
    """
    smallest = _PATCH_RADIUS + 1  # what reflection at the border needs
    if not smallest <= size <= min(picture.shape):
        raise CommandError(f"--size is {size}; expected {smallest} to {min(picture.shape)}")
    rows, columns = (
        slice(start, start + size)
        for start in (
            min(max(centre - size // 2, 0), extent - size)
            for centre, extent in zip(_CENTRE, picture.shape, strict=True)
        )
    )
    return picture[rows, columns]


def add_noise(clean: np.ndarray, sigma: float) -> np.ndarray:
    """Add Gaussian noise of ``sigma`` grey levels, always the same."""
    noise = np.random.default_rng(0).standard_normal(clean.shape, np.float32)
    return clean + np.float32(sigma / 255) * noise


def psnr(picture: np.ndarray, clean: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB, for pixels from 0 to 1."""
    error = np.square(np.subtract(picture, clean, dtype=np.float64)).mean()
    return math.inf if error == 0 else -10 * math.log10(error)


def denoise(
    noisy: np.ndarray, h: float, cupy: Any = None, progress: Progress | None = None
) -> tuple[np.ndarray, float]:
    """Filter ``noisy`` on the CPU or with CuPy's current device, and print the plan.

    Returns
    -------
    denoised : array (rows, columns)
    seconds : float
        From arrays on the device to the filtered picture on the host; on a GPU, building the
        kernel for the first time is a part of it.
    """
    mean = noisy.mean()
    arguments = _nlm.attention_arguments(noisy - mean, h, _PATCH_RADIUS)
    scale = arguments.pop("softmax_scale")
    if cupy:
        arguments = {name: cupy.asarray(array) for name, array in arguments.items()}
    problem = _problem.from_arrays("attention", **arguments, softmax_scale=scale)
    tokens = noisy.size
    _line("tokens", f"{tokens:,}, one a pixel")
    _line(
        "scores",
        f"{tokens:,} x {tokens:,}; as a float32 matrix {tokens * tokens * 4 / 1e9:,.1f} GB, "
        "which never exists",
    )
    plan = str(make_plan("attention", problem, None))
    _line("plan", plan.replace("\n", "\n" + 10 * " "))
    start = time.perf_counter()
    if cupy:
        filtered = cupy.asnumpy(attention(**arguments, softmax_scale=scale))
    else:
        filtered, _ = host.run(problem, progress=progress)
    seconds = time.perf_counter() - start
    return filtered.reshape(noisy.shape) + mean, seconds


def save_png(stream: BinaryIO, pictures: list[np.ndarray]) -> None:
    """Write pictures of one height side by side, a white strip between them."""
    from PIL import Image  # a dependency of scikit-image

    strip = np.ones((pictures[0].shape[0], 8), np.float32)
    row = [part for picture in pictures for part in (strip, picture)][1:]
    grey = np.rint(np.clip(np.concatenate(row, axis=1), 0, 1) * 255).astype(np.uint8)
    Image.fromarray(grey).save(stream, format="PNG")


def _shape_of(clean: np.ndarray, picture: np.ndarray) -> str:
    rows, columns = clean.shape
    part = "all" if clean.shape == picture.shape else "a crop"
    return f"{part} of {rows} x {columns} pixels"


def _line(name: str, text: str) -> None:
    # Flushed, so that a person sees the plan before the work and not after it.
    print(f"{name:<9} {text}", flush=True)
