# SPDX-License-Identifier: MIT
"""Measure the HBM traffic of Algorithm 1 and of standard attention with ncu; draw both over N.

    python docs/io.py measure docs/io.csv    on a machine with an NVIDIA GPU, CuPy and ncu
    python docs/io.py page docs/io.csv       write docs/io.svg and the table of docs/io.md

What is measured is DRAM traffic (``dram__bytes_read.sum``, ``dram__bytes_write.sum``). Every
multiprocessor works on a head of its own (chunks = 1, the paper's loop), so that from about
N = 1,024 on the Q_i, O_i that a key block cycles through exceed the L2 and have to come from HBM.
"""

from __future__ import annotations

import csv
import math
import re
import subprocess
import sys
from pathlib import Path

from cupyflash import Algorithm1, attention, devices, io_model, plan

HEAD_DIM = 64
LENGTHS = (512, 1024, 2048, 4096, 8192)
STANDARD_LENGTHS = LENGTHS[:4]  # S and P of the next one would not fit the memory
HEADS_PER_MULTIPROCESSOR = 2
MARKS = ("<!-- table: docs/io.py -->", "<!-- end of table -->")


def the_plan(n: int, dtype: str, device: object, heads: int):
    """The paper's loop at sequence length n."""
    return plan(
        seqlen_q=n,
        head_dim=HEAD_DIM,
        heads_q=heads,
        dtype=dtype,
        device=device,
        kernel=Algorithm1(chunks=1),
    )


def run_once(method: str, n: int, dtype: str) -> None:
    """One call, for ncu to watch."""
    import cupy

    heads = HEADS_PER_MULTIPROCESSOR * devices.current_device(0).multiprocessors
    shape = (heads, n, HEAD_DIM)
    q, k, v = (cupy.random.standard_normal(shape, "float32").astype(dtype) for _ in range(3))
    cupy.cuda.Device().synchronize()
    with cupy.cuda.profile():
        if method == "algorithm1":
            attention(q, k, v, kernel=Algorithm1(chunks=1))
        else:
            s = cupy.matmul(q, k.swapaxes(1, 2)).astype("float32", copy=False)
            softmax(cupy, 1 / math.sqrt(HEAD_DIM))(s, s)
            cupy.matmul(s, v)
        cupy.cuda.Device().synchronize()


def softmax(cupy, scale: float):
    """Softmax of the last axis in one pass over it in HBM, as the count assumes."""
    source = r"""
    extern "C" __global__ void softmax(const float* s, float* p, int n, float scale) {
      extern __shared__ float row[];
      __shared__ float part[32];
      const float* const from = s + (long long)blockIdx.x * n;
      float* const to = p + (long long)blockIdx.x * n;
      float m = -1e38f, l = 0;
      for (int j = threadIdx.x; j < n; j += blockDim.x) m = fmaxf(m, row[j] = scale * from[j]);
      for (int x = 16; x; x /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, x));
      if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = m;
      __syncthreads();
      for (int w = 0; w < blockDim.x / 32; ++w) m = fmaxf(m, part[w]);
      __syncthreads();
      for (int j = threadIdx.x; j < n; j += blockDim.x) l += row[j] = __expf(row[j] - m);
      for (int x = 16; x; x /= 2) l += __shfl_xor_sync(~0u, l, x);
      if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = l;
      __syncthreads();
      l = 0;
      for (int w = 0; w < blockDim.x / 32; ++w) l += part[w];
      for (int j = threadIdx.x; j < n; j += blockDim.x) to[j] = row[j] / l;
    }"""
    kernel = cupy.RawKernel(source, "softmax")

    def launch(s, p):
        n = s.shape[-1]
        arguments = (s, p, cupy.int32(n), cupy.float32(scale))
        kernel((s.size // n,), (256,), arguments, shared_mem=4 * n)

    return launch


def measure(path: Path) -> None:
    """Run every size under ncu and write bytes, counted and measured."""
    device = devices.current_device(0)
    heads = HEADS_PER_MULTIPROCESSOR * device.multiprocessors
    fields = ("method", "dtype", "N", "device", "heads")
    fields += ("read", "written", "counted_read", "counted_written")
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(fields)
        for method, dtype, lengths in (
            ("algorithm1", "float32", LENGTHS),
            ("algorithm1", "float16", LENGTHS),
            ("standard", "float32", STANDARD_LENGTHS),
        ):
            for n in lengths:
                read, written = under_ncu(method, n, dtype)
                p = the_plan(n, dtype, device, heads)
                count = p.traffic if method == "algorithm1" else standard(p)
                row = (method, dtype, n, device.name, heads, read, written)
                table.writerow((*row, count.bytes_read, count.bytes_written))
                print(*row, f"ratio {(read + written) / count.bytes:.3f}", flush=True)


def standard(p) -> io_model.Traffic:
    """The count for standard attention."""
    return io_model.standard_attention(p.problem)


def under_ncu(method: str, n: int, dtype: str) -> tuple[int, int]:
    """DRAM bytes read and written by one call."""
    command = [
        *("ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv"),
        *("--print-units", "base", "--metrics", "dram__bytes_read.sum,dram__bytes_write.sum"),
        *(sys.executable, __file__, "one", method, str(n), dtype),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ncu failed:\n{done.stdout}{done.stderr}")
    sums = {"read": 0.0, "write": 0.0}
    for kind, value in re.findall(
        r'"dram__bytes_(read|write)\.sum","[^"]*","([\d.,]+)"', done.stdout
    ):
        sums[kind] += float(value.replace(",", ""))
    if not all(sums.values()):
        raise SystemExit(f"ncu gave no DRAM traffic:\n{done.stdout}{done.stderr}")
    return round(sums["read"]), round(sums["write"])


def page(path: Path) -> None:
    """Write the plot, and the table between its marks in io.md."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    Path(__file__).with_name("io.svg").write_text(plot(rows))
    markdown = Path(__file__).with_name("io.md")
    text = markdown.read_text()
    before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    markdown.write_text(before + "\n".join([MARKS[0], *table(rows), MARKS[1]]) + after)


def table(rows: list[dict[str, str]]) -> list[str]:
    """Markdown: counted and measured gigabytes, and their ratio."""
    lines = [
        "| method | dtype | N | read, counted | measured | written, counted | measured | ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        numbers = [float(row[f]) for f in ("counted_read", "read", "counted_written", "written")]
        ratio = (numbers[1] + numbers[3]) / (numbers[0] + numbers[2])
        cells = [f"{x / 1e9:.3f} GB" for x in numbers]
        name = "Algorithm 1" if row["method"] == "algorithm1" else "standard"
        cells = [name, row["dtype"], row["N"], *cells, f"{ratio:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def plot(rows: list[dict[str, str]]) -> str:
    """SVG, both axes logarithmic: lines are counts, circles are measurements."""
    device, heads = devices.named_device("H200"), int(rows[0]["heads"])
    lengths = [256 * 2 ** (n / 4) for n in range(4 * 9 + 1)]
    curves = {
        "standard attention": ("#b3402a", lambda p: standard(p).bytes),
        "Algorithm 1": ("#1f5f8b", lambda p: p.traffic.bytes),
        "the notes' 16 N²d²/M": (
            "#888888",
            lambda p: 4 * io_model.notes_estimate(p.problem, p.tiling.M_used),
        ),
    }
    width, height, left, bottom = 640, 420, 70, 50

    def x(n: float) -> float:
        return left + (math.log2(n) - 8) / 9 * (width - left - 40)

    def y(size: float) -> float:
        return height - bottom - (math.log10(size) - 8) / 7 * (height - bottom - 20)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for power in range(8, 18):
        n = 2**power
        parts.append(
            f'<line x1="{x(n):.1f}" y1="20" x2="{x(n):.1f}" y2="{height - bottom}" '
            'stroke="#e5e5e5"/>'
            f'<text x="{x(n):.1f}" y="{height - bottom + 18}" text-anchor="middle">{n}</text>'
        )
    for power, label in zip(
        range(8, 16),
        ("100 MB", "1 GB", "10 GB", "100 GB", "1 TB", "10 TB", "100 TB", "1 PB"),
        strict=True,
    ):
        at = y(10.0**power)
        parts.append(
            f'<line x1="{left}" y1="{at:.1f}" x2="{width - 40}" y2="{at:.1f}" stroke="#e5e5e5"/>'
            f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for index, (name, (colour, size_of)) in enumerate(curves.items()):
        plans = [the_plan(round(n), "float32", device, heads) for n in lengths]
        path = " ".join(
            f"{x(n):.1f},{y(size_of(p)):.1f}" for n, p in zip(lengths, plans, strict=True)
        )
        dash = ' stroke-dasharray="4 4"' if colour == "#888888" else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
            f'<text x="{left + 14}" y="{40 + 18 * index}" fill="{colour}">{name}</text>'
        )
    for row in rows:
        if row["dtype"] == "float32":
            colour = curves[
                "Algorithm 1" if row["method"] == "algorithm1" else "standard attention"
            ][0]
            size = float(row["read"]) + float(row["written"])
            parts.append(
                f'<circle cx="{x(int(row["N"])):.1f}" cy="{y(size):.1f}" r="4" fill="{colour}"/>'
            )
    parts.append(
        f'<text x="{(width + left) / 2}" y="{height - 10}" text-anchor="middle">N (float32, '
        f"{heads} heads, head_dim {HEAD_DIM}); circles: measured by ncu</text></svg>"
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or [""]
    if command == "measure":
        measure(Path(arguments[0]))
    elif command == "page":
        page(Path(arguments[0]))
    elif command == "one":
        run_once(arguments[0], int(arguments[1]), arguments[2])
    else:
        raise SystemExit(__doc__)
