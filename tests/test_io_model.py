# SPDX-License-Identifier: MIT
"""Page 4 of the notes: every count equals that of loops which move the elements one by one."""

import csv
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cupyflash import _problem, io_model, plan
from cupyflash.reference import visible
from cupyflash.testing import DTYPES

lengths = st.integers(0, 40)
blocks = st.integers(1, 20)
dims = st.integers(1, 5)
ends = st.sampled_from([None, -1, 0, 1, 3, 17, 1000])
options = st.fixed_dictionaries(
    {"dtype": st.sampled_from(DTYPES)},
    optional={
        "causal": st.sampled_from([True, "top_left"]),
        "window": st.tuples(ends, ends),
        "bias_dtype": st.just("float32"),
        "mask": st.just(True),
        "batch": st.integers(0, 2),
        "heads_q": st.sampled_from([2, 4]),
    },
)


def problem(seqlen_q, seqlen_k, d, dv=None, *, heads_k=None, **given):
    if "heads_q" in given:
        heads_k = given["heads_q"] // 2
    return _problem.from_sizes(
        "plan",
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=d,
        head_dim_v=dv,
        heads_k=heads_k,
        **given,
    )


def shown(p) -> np.ndarray:
    """Which keys the queries of one head see, by the oracle."""
    return visible(
        p.seqlen_q,
        p.seqlen_k,
        causal="top_left" if p.top_left else p.window_right == 0,
        window=(p.window_left, p.window_right),
    )


class Counted:
    """Elements moved, array by array; zero where nothing was."""

    def __init__(self, p):
        self.p, self.reads, self.writes = p, Counter(), Counter()

    def modifiers(self, pairs):
        if self.p.bias_dtype is not None:
            self.reads["bias"] += pairs
        if self.p.has_mask:
            self.reads["mask"] += pairs

    def assert_equal(self, traffic):
        heads = self.p.batch * self.p.heads_q
        for name in {*traffic.reads, *self.reads}:
            assert traffic.reads.get(name, 0) == heads * self.reads[name], f"reads of {name}"
        for name in {*traffic.writes, *self.writes}:
            assert traffic.writes.get(name, 0) == heads * self.writes[name], f"writes of {name}"


def walk_algorithm1(p, Br, Bc, chunks, lse) -> Counted:
    """One head of ``fa1_forward``, loop by loop; each chunk is a thread block of its own."""
    moved, seen = Counted(p), shown(p)
    d, dv, half = p.head_dim, p.head_dim_v, p.dtype.itemsize == 2
    any_query = seen.any(axis=0)
    query_blocks = [range(i, min(i + Br, p.seqlen_q)) for i in range(0, p.seqlen_q, Br)]
    key_blocks = [range(j, min(j + Bc, p.seqlen_k)) for j in range(0, p.seqlen_k, Bc)]
    for chunk in range(chunks):
        mine = query_blocks[chunk::chunks]
        last_visit = {rows: None for rows in mine}
        for rows in mine:  # line 2
            moved.writes["O"] += len(rows) * dv
            moved.writes["l"] += len(rows)
            moved.writes["m"] += len(rows)
            for keys in key_blocks:
                if seen[np.ix_(rows, keys)].any():
                    last_visit[rows] = keys
            if last_visit[rows] is None:
                moved.writes["out"] += len(rows) * dv if half else 0
        for keys in key_blocks:  # line 5
            loaded = False
            for rows in mine:  # line 7
                if not seen[np.ix_(rows, keys)].any():
                    continue
                if not loaded:  # line 6, of the keys that any query of the head sees
                    moved.reads["K"] += int(any_query[keys].sum()) * d
                    moved.reads["V"] += int(any_query[keys].sum()) * dv
                    loaded = True
                for name, width in (("Q", d), ("O", dv), ("l", 1), ("m", 1)):  # line 8
                    moved.reads[name] += len(rows) * width
                moved.modifiers(int(seen[np.ix_(rows, keys)].sum()))
                rounds = half and keys is last_visit[rows]
                moved.writes["out" if rounds else "O"] += len(rows) * dv  # line 12
                moved.writes["l"] += len(rows)  # line 13
                moved.writes["m"] += len(rows)
    moved.writes["lse"] += p.seqlen_q if lse else 0
    return moved


@given(lengths, lengths, dims, dims, blocks, blocks, st.integers(1, 5), st.booleans(), options)
@example(33, 65, 3, 2, 8, 16, 2, True, {"dtype": "float16", "causal": True})
@example(40, 7, 3, 2, 8, 4, 3, True, {"dtype": "float16", "causal": True, "mask": True})
@example(7, 40, 3, 2, 4, 8, 1, False, {"dtype": "float32", "window": (1, 0)})
@example(40, 7, 3, 2, 4, 3, 9, False, {"dtype": "float32", "window": (1, 3)})
def test_algorithm1(seqlen_q, seqlen_k, d, dv, Br, Bc, chunks, lse, given_options):
    p = problem(seqlen_q, seqlen_k, d, dv, **given_options)
    expected = walk_algorithm1(p, Br, Bc, chunks, lse)
    expected.assert_equal(io_model.algorithm1(p, Br, Bc, chunks, lse))


@given(lengths, lengths, dims, dims, blocks, blocks, st.booleans(), st.booleans(), options)
def test_q_outer(seqlen_q, seqlen_k, d, dv, Br, Bc, lse, streams_q, given_options):
    p = problem(seqlen_q, seqlen_k, d, dv, **given_options)
    moved, seen = Counted(p), shown(p)
    any_query = seen.any(axis=0)
    for i in range(0, seqlen_q, Br):
        rows = range(i, min(i + Br, seqlen_q))
        moved.reads["Q"] += 0 if streams_q else len(rows) * d
        for j in range(0, seqlen_k, Bc):
            keys = range(j, min(j + Bc, seqlen_k))
            if seen[np.ix_(rows, keys)].any():
                moved.reads["K"] += int(any_query[keys].sum()) * d
                moved.reads["V"] += int(any_query[keys].sum()) * dv
                moved.reads["Q"] += len(rows) * d if streams_q else 0
                moved.modifiers(len(rows) * int(any_query[keys].sum()))
        moved.writes["out"] += len(rows) * dv
        moved.writes["lse"] += len(rows) if lse else 0
    moved.assert_equal(io_model.q_outer(p, Br, Bc, lse, streams_q=streams_q))


@given(lengths, lengths, dims, dims, options)
def test_standard_attention(seqlen_q, seqlen_k, d, dv, given_options):
    p = problem(seqlen_q, seqlen_k, d, dv, **given_options)
    traffic = io_model.standard_attention(p)
    moved = Counted(p)
    scores = np.empty((seqlen_q, seqlen_k)).size
    moved.reads.update(Q=seqlen_q * d, K=seqlen_k * d)  # S = Q K^T
    moved.writes.update(S=scores)
    moved.modifiers(scores)
    moved.reads.update(S=scores)  # P = softmax(S)
    moved.writes.update(P=scores)
    moved.reads.update(P=scores, V=seqlen_k * dv)  # O = P V
    moved.writes.update(out=seqlen_q * dv)
    moved.assert_equal(traffic)


def test_standard_attention_is_4_n_squared_and_4_n_d():
    traffic = io_model.standard_attention(problem(1000, 1000, 64, dtype="float32"))
    assert traffic.elements_read + traffic.elements_written == 4 * 1000**2 + 4 * 1000 * 64
    assert traffic.bytes == 4 * (4 * 1000**2 + 4 * 1000 * 64)


@given(lengths, lengths, options)
def test_visible_pairs(seqlen_q, seqlen_k, given_options):
    p = problem(seqlen_q, seqlen_k, 4, **given_options)
    assert io_model.visible_pairs(p) == shown(p).sum()


def test_visible_pairs_of_a_long_sequence():
    n = 3 * 2**20 + 5  # more rows than are counted at a time
    p = problem(n, n, 64, dtype="float16", causal=True)
    assert io_model.visible_pairs(p) == n * (n + 1) // 2


@pytest.mark.parametrize("d", [16, 64, 128])
@pytest.mark.parametrize("dv_factor", [1, 2])
def test_the_notes_estimate_is_of_the_order_of_the_count(d, dv_factor):
    """A step moves Q_i, O_i twice, l_i, m_i twice: 3d + 4 of the 4d elements a row of the notes.

    K_j and V_j stay for all of them, so that their share vanishes with N.
    """
    dv = dv_factor * d
    M = 50 * 2 * (d + dv)
    ratios = []
    for N in (2**12, 2**16, 2**20):
        p = problem(N, N, d, dv, dtype="float32")
        Br, Bc = min(50, d), 50
        traffic = io_model.algorithm1(p, Br, Bc)
        moved = traffic.elements_read + traffic.elements_written
        ratios.append(moved / io_model.notes_estimate(p, M))
    limit = (d + 2 * dv + 4) / (2 * d + 2 * dv)
    assert ratios[2] == pytest.approx(limit, rel=1e-3)
    errors = [abs(ratio - limit) for ratio in ratios]
    assert errors == sorted(errors, reverse=True)


def test_the_notes_estimate_itself():
    p = problem(4096, 4096, 64, dtype="float32", batch=2, heads_q=4)
    assert io_model.notes_estimate(p, 50_000) == pytest.approx(8 * 16 * 4096**2 * 64**2 / 50_000)


def test_a_larger_sram_means_less_traffic():
    p = problem(8192, 8192, 64, dtype="float32")
    moved = [io_model.algorithm1(p, 64, Bc).bytes for Bc in (32, 64, 128, 256)]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < io_model.standard_attention(p).bytes / 2


def test_bytes_are_of_each_arrays_own_dtype():
    p = problem(32, 32, 8, dtype="float16", bias_dtype="float32", mask=True)
    traffic = io_model.algorithm1(p, 8, 8, return_lse=True)
    wide = {"O", "l", "m", "lse", "bias"}
    for moved, total in (
        (traffic.reads, traffic.bytes_read),
        (traffic.writes, traffic.bytes_written),
    ):
        sizes = {n: 1 if n == "mask" else 4 if n in wide else 2 for n in moved}
        assert total == sum(sizes[n] * count for n, count in moved.items())
    assert traffic.bytes == traffic.bytes_read + traffic.bytes_written


@pytest.mark.parametrize(
    ("function", "arguments", "options", "error", "message"),
    [
        ("algorithm1", (0, 1), {}, ValueError, "algorithm1: Br is 0; expected 1 or more"),
        ("algorithm1", (-8, 8), {}, ValueError, "Br is -8"),
        ("algorithm1", (8, 8, 0), {}, ValueError, "chunks is 0"),
        ("algorithm1", (8, 8.0), {}, TypeError, "algorithm1: Bc is 8.0; expected an integer"),
        ("q_outer", (64, 64), {"pack": 0}, ValueError, "q_outer: pack is 0; expected 1 or more"),
        ("q_outer", (64, 64), {"splits": 0}, ValueError, "splits is 0"),
        ("q_outer", (64, 64), {"slices": 1.5}, TypeError, "slices is 1.5; expected an integer"),
        ("notes_estimate", (0,), {}, ValueError, "notes_estimate: M is 0; expected 1 or more"),
    ],
)
def test_sizes_of_nothing_are_refused(function, arguments, options, error, message):
    with pytest.raises(error, match=message):
        getattr(io_model, function)(problem(64, 64, 64), *arguments, **options)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("notes_estimate", (1,)),
        ("standard_attention", ()),
        ("algorithm1", (8, 8)),
        ("q_outer", (8, 8)),
        ("visible_pairs", ()),
    ],
)
def test_a_plan_is_not_its_problem(function, arguments):
    p = plan(seqlen_q=64, head_dim=64, device="H200")
    message = f"{function}: problem is a Plan; expected an AttentionProblem, as plan"
    with pytest.raises(TypeError, match=message):
        getattr(io_model, function)(p, *arguments)


# ---- docs/io.md ----------------------------------------------------------------------------------

DOCS = Path(__file__).resolve().parent.parent / "docs"
with (DOCS / "io.csv").open(newline="") as file:
    MEASURED = list(csv.DictReader(file))


@pytest.fixture(scope="module")
def io_page():
    """``docs/io.py`` as a module."""
    return SimpleNamespace(**runpy.run_path(str(DOCS / "io.py"), run_name="io_page"))


@pytest.mark.parametrize("row", MEASURED, ids=lambda r: f"{r['method']}-{r['dtype']}-{r['N']}")
def test_the_counts_of_the_page_are_the_models(io_page, row):
    p = io_page.the_plan(int(row["N"]), row["dtype"], "H200", int(row["heads"]))
    traffic = p.traffic if row["method"] == "algorithm1" else io_page.standard(p)
    assert int(row["counted_read"]) == traffic.bytes_read
    assert int(row["counted_written"]) == traffic.bytes_written
    measured = int(row["read"]) + int(row["written"])
    if int(row["N"]) >= 1024:  # less stays in the L2 cache
        assert measured / traffic.bytes == pytest.approx(1, abs=0.04)


def test_the_page_and_its_plot_are_of_the_measurements(io_page):
    text = (DOCS / "io.md").read_text()
    shown = text.split(io_page.MARKS[0])[1].split(io_page.MARKS[1])[0]
    assert shown.split("\n")[1:-1] == io_page.table(MEASURED)
    assert (DOCS / "io.svg").read_text() == io_page.plot(MEASURED)
