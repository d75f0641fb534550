# SPDX-License-Identifier: MIT
"""A problem of attention, and the bounds that its results are held to."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from cupyflash._dtypes import NAMES as DTYPES
from cupyflash._testing_arrays import copy_with_layout, describe, to_numpy
from cupyflash.reference import _evaluate, attention_reference


@dataclass(frozen=True, eq=False)
class Problem:
    """A call of attention: arrays, options, and how it was made.

    Build one by hand to hold a kernel of your own to the oracle's bounds.

    Parameters
    ----------
    q, k, v : numpy arrays
        As `cupyflash.reference.attention_reference` takes them.
    kwargs : mapping
        Its options, without those that are not used.
    note : str
        Shown in the repr; `attention_problems` says there what it drew.

    Examples
    --------
    >>> Problem(np.ones((2, 4)), np.ones((3, 4))[::-1], np.ones((3, 4)), {"causal": True})
    Problem(q=float64(2, 4), k=float64(3, 4) strides (-4, 1), v=float64(3, 4), causal=True)
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def qkv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The arrays that a kernel takes in front of its options."""
        return self.q, self.k, self.v

    @cached_property
    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        """(o, lse) of the oracle, float64."""
        qkv, kwargs = _on_host(self)
        return attention_reference(*qkv, **kwargs)

    def on(self, xp) -> "Problem":
        """The same problem with its arrays copied, each in its layout.

        Parameters
        ----------
        xp : module
            cupy, or numpy.

        Returns
        -------
        Problem

        Examples
        --------
        >>> Problem(*np.ones((3, 2, 4))).on(np)
        Problem(q=float64(2, 4), k=float64(2, 4), v=float64(2, 4))
        """

        def moved(x):
            return copy_with_layout(x, xp) if isinstance(x, np.ndarray) else x

        kwargs = {name: moved(value) for name, value in self.kwargs.items()}
        return Problem(*(moved(x) for x in self.qkv), kwargs, self.note)

    def _repr_pretty_(self, printer, cycle) -> None:
        """hypothesis would print a dataclass field by field, with every element."""
        printer.text(repr(self))

    def __repr__(self) -> str:
        parts = [f"{name}={describe(getattr(self, name))}" for name in "qkv"]
        for name, value in self.kwargs.items():
            shown = describe(value) if isinstance(value, np.ndarray) and value.ndim else value
            parts.append(f"{name}={shown}")
        return f"Problem({', '.join(parts)}{self.note and '; ' + self.note})"


def error(actual, reference) -> float:
    """``||actual - reference|| / ||reference||`` in float64; a NaN or Inf in actual gives inf.

    Parameters
    ----------
    actual, reference : numpy or CuPy arrays of one shape
        Elements where the reference is not finite are left out.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If the shapes differ.

    Examples
    --------
    >>> error(np.array([3.0, 4.5]), np.array([3.0, 4.0]))
    0.1
    """
    actual, reference = (to_numpy(x).astype(np.float64) for x in (actual, reference))
    if actual.shape != reference.shape:
        raise ValueError(f"error: actual has shape {actual.shape}, reference {reference.shape}")
    known = np.isfinite(reference)
    actual, reference = actual[known], reference[known]
    if not np.isfinite(actual).all():
        return math.inf
    difference, norm = _norm(actual - reference), _norm(reference)
    return difference / norm if norm else (math.inf if difference else 0.0)


def _norm(x) -> float:
    """Euclidean, of numbers whose squares may leave the range of float64."""
    largest = float(np.abs(x).max(initial=0.0))
    return largest * float(np.linalg.norm(x / largest)) if 0 < largest < math.inf else largest


def assert_attention_close(actual, expected, *, max_score: float = 8.0) -> None:
    """Check o, and lse where given, against the oracle, to the accuracy that cupyflash promises.

    With u the rounding unit of the dtype (2^-11 for float16, 2^-8 for bfloat16) and
    g = max(1, max|s| / 8):

    - float32 and float64: ``||o - ref|| <= c g ||ref||`` with c = 1e-6 and 1e-14. For a
      `Problem` max|s| counts the terms that a score is summed from (``scale * |q| |k|^T``, bias
      and ALiBi); past 16 it also counts sqrt(head_dim) / 2 of their roundings; and ||ref|| is
      never taken smaller than ``||sqrt(sum_j p_j^2 v_j^2)||``: where scores or outputs cancel to
      near 0, no arithmetic in the dtype can be accurate relative to them. float32 products on
      tensor cores are sums whose head_dim / 8 steps are cut off, not rounded: for a `Problem`
      max|s| / 8 then counts ``1 + head_dim / 256`` times.
    - float16 and bfloat16: element by element, what rounding P and then o to the dtype makes of
      exact attention: ``min(sum_j p_j |v_j|, |o| + 4 sqrt(sum_j p_j^2 v_j^2)) u + |o| u``, and
      1e-6 g for the float32 arithmetic around it. With a softcap c the scores are off by what
      the special-function unit's tanh is: by at most 2^-15 c (it is good to 2^-16 on the GPUs that
      were measured, PTX promises 2^-11), so that 2^-15 max|s| is added to u. Against a plain
      reference, whose P is not known, ``||o - ref|| <= 2 u ||ref||``.
    - Below the smallest normal number of the dtype, t, rounding errs absolutely, and the arithmetic
      may flush: with t in float32 and float64, u t in 16 bits (beside float32's own t), each
      element may err by ``t (1 + sum_j |v_j|)``, and by 2 t against a plain reference.
    - lse: ``c g max(1, |lse|)``, 1e-5 in place of c for 16 bits; -inf exactly where it must be,
      and o exactly 0 there. With few keys lse is as far off as a single score, which no other
      averages. For a float32 `Problem` the bound is therefore at least ``max|s| (2^-20 + head_dim
      2^-28)``: three TF32 products leave out the product of the low parts, 2^-10 of each factor
      at most; and each of head_dim / 8 sums cuts off 2^-24 of what was added up by then, half of
      the terms, on average. With a softcap and 16 bits it is at least the 2^-15 max|s| of above.

    Parameters
    ----------
    actual : o, or (o, lse)
        numpy or CuPy arrays; the dtype of o sets the bound.
    expected : Problem, or o, or (o, lse)
        A problem is solved by the oracle here. Elements where the reference is not finite (a NaN
        among the keys that a row may see) are left out; elsewhere NaN and Inf never pass.
    max_score : float
        max|s| where expected is not a Problem: the bound is then the contract's, to the letter.

    Raises
    ------
    AssertionError
        Names the worst element, what it was, what was wanted and the bound.
    ValueError
        If lse is given on one side only.
    TypeError
        If o has another dtype than the problem, or none of those served.

    Examples
    --------
    >>> x = np.ones((2, 4), np.float32)
    >>> assert_attention_close((x, np.full(2, 2.6931472, np.float32)), Problem(x, x, x))
    """
    o, lse = actual if isinstance(actual, tuple) else (actual, None)
    o = to_numpy(o)
    if o.dtype.name not in DTYPES:
        raise TypeError(f"assert_attention_close: o is {o.dtype}; expected {', '.join(DTYPES)}")
    if isinstance(expected, Problem):
        dtype = to_numpy(expected.qkv[0]).dtype
        if o.dtype != dtype:
            raise TypeError(f"assert_attention_close: o is {o.dtype} where the inputs are {dtype}")
        ref_o, ref_lse = expected.reference
        title = f"\n{expected!r}"
    else:
        ref_o, ref_lse = expected if isinstance(expected, tuple) else (expected, None)
        ref_o, title = to_numpy(ref_o).astype(np.float64), ""
        if (lse is None) is not (ref_lse is None):
            raise ValueError("assert_attention_close: lse is given on one side only")

    _check_shape("o", o, ref_o, title)
    _check_finite("o", o, ref_o, title)
    if ref_lse is not None and np.any(o[ref_lse == -np.inf] != 0):
        raise AssertionError(f"o is not 0 in a row that sees no key{title}")
    known = np.isfinite(ref_o)
    bound = _Bound(o.dtype, expected, max_score)
    floor = _norm(np.broadcast_to(bound.floor, ref_o.shape)[known])
    if bound.element is not None:
        _check_elements("o", o, ref_o, bound.element, title)
    if bound.relative is not None:
        norm = max(_norm(ref_o[known]), bound.norm)
        off = np.abs(np.where(known, o.astype(np.float64) - np.where(known, ref_o, 0.0), 0.0))
        if not _norm(off) <= bound.relative * norm + floor:
            raise AssertionError(
                f"o: ||actual - reference|| is {_norm(off):.3g} where ||reference|| is "
                f"{norm:.3g}, the bound is {bound.relative:.3g} times that; "
                f"{_worst(o, ref_o, off)}{title}"
            )

    if lse is not None:
        lse, ref_lse = to_numpy(lse), to_numpy(ref_lse).astype(np.float64)
        _check_shape("lse", lse, ref_lse, title)
        empty = ref_lse == -np.inf
        if not np.array_equal(lse == -np.inf, empty):
            at = np.argwhere((lse == -np.inf) != empty)[0]
            at = tuple(at.tolist())
            raise AssertionError(f"lse{list(at)} is {lse[at]}, expected {ref_lse[at]:.9g}{title}")
        _check_finite("lse", lse, ref_lse, title)
        tolerance = np.maximum(bound.lse * np.maximum(1.0, np.abs(ref_lse)), bound.score)
        _check_elements("lse", lse, ref_lse, np.where(empty, np.inf, tolerance), title)


class _Bound:
    """The bounds of one dtype for one problem.

    relative  of ||o - ref||, or None where each element has its own bound
    norm      ||ref|| is not taken to be smaller than this
    floor     of each |o - ref|, added to the relative bound
    element   of each |o - ref|, or None where only the reference is known
    lse       of |lse - ref| / max(1, |ref|)
    score     of a single score, where its products are split or its tanh is the hardware's;
              |lse - ref| may be as large
    """

    def __init__(self, dtype, expected, max_score) -> None:
        c = 1e-14 if dtype == np.float64 else 1e-6
        unit = float(ml_dtypes.finfo(dtype).eps) / 2
        half = dtype.itemsize == 2
        # The accumulation dtype may flush below its smallest normal number; the 16-bit dtypes round
        # absolutely there.
        accumulator = np.float64 if dtype == np.float64 else np.float32
        flushed = float(np.finfo(accumulator).smallest_normal)
        if half:
            flushed += unit * float(ml_dtypes.finfo(dtype).smallest_normal)
        evaluated = None
        if isinstance(expected, Problem):
            qkv, kwargs = _on_host(expected)
            evaluated = _evaluate(*qkv, **kwargs)
            max_score = _largest_terms(evaluated, kwargs.get("softcap"))
        growth = max(1.0, max_score / 8)
        self.score = 0.0
        if evaluated is not None:
            head_dim = evaluated.q.shape[-1]
            if half and kwargs.get("softcap") is not None:
                capped = kwargs["softcap"] * np.tanh(evaluated.product / kwargs["softcap"])
                self.score = 2.0**-15 * _largest(np.abs(capped), evaluated.shown)
            if dtype == np.float32:
                self.score = max_score * (2.0**-20 + head_dim * 2.0**-28)
                growth = max(growth, max_score / 8 * (1 + head_dim / 256))
            # Terms of one sign add up to partial sums as large as the score, and each of head_dim
            # additions rounds at that size; the contract's max|s| is of terms that alternate.
            rounding_walk = math.sqrt(head_dim) / 2
            growth = max(growth, rounding_walk * (max_score - 16) / 8)
        self.lse = (1e-5 if half else c) * growth
        self.relative = 2 * unit if half else c * growth
        self.norm, self.element, self.floor = 0.0, None, 2 * flushed
        if evaluated is None:
            return

        p, v = evaluated.p, np.abs(evaluated.v)
        seen = np.where(evaluated.shown.any(-2)[..., None], v, 0.0)
        with np.errstate(invalid="ignore", over="ignore"):
            linear, quadratic = p @ v, np.sqrt(p**2 @ v**2)
            size = np.abs(evaluated.o)
        self.norm = _norm(quadratic[np.isfinite(quadratic)])
        floor = flushed * (1 + seen.sum(-2, keepdims=True))
        shape = expected.reference[0].shape
        self.floor = np.broadcast_to(floor, size.shape).reshape(shape)
        # Whatever the scores: an average of values is no larger than they are.
        element = np.broadcast_to(2.00002 * seen.max(-2, keepdims=True, initial=0.0), size.shape)
        if half:
            self.relative = None
            if c * growth < 0.25:  # else the scores' own errors may give the row to another key
                element = 4 * c * growth * linear
            averaged = np.minimum(linear, size + 4 * quadratic) + size
            element = element + (unit + self.score) * averaged + floor
        self.element = element.reshape(shape)


def _on_host(problem):
    """(q, k, v) and kwargs with numpy arrays in place of CuPy's."""
    kwargs = {n: x.get() if hasattr(x, "get") else x for n, x in problem.kwargs.items()}
    return tuple(to_numpy(x) for x in problem.qkv), kwargs


def _largest_terms(e, softcap) -> float:
    """The largest sum of magnitudes that a visible score is added up from."""
    with np.errstate(invalid="ignore", over="ignore"):
        terms = np.abs(e.scale) * (np.abs(e.q) @ np.abs(e.k).swapaxes(-1, -2))
        if softcap is not None:  # tanh damps the errors of what came before it
            capped = np.tanh(e.product / softcap)
            terms = terms * (1 - capped**2) + softcap * np.abs(capped)
        terms = terms + np.abs(e.added)
    return _largest(terms, e.shown)


def _largest(magnitudes, shown) -> float:
    """Of the finite ones among those that some query sees."""
    seen = magnitudes[shown]
    return float(seen[np.isfinite(seen)].max(initial=0.0))


def _check_shape(name, actual, reference, title) -> None:
    if actual.shape != reference.shape:
        raise AssertionError(f"{name} has shape {actual.shape}, expected {reference.shape}{title}")


def _check_finite(name, actual, reference, title) -> None:
    wrong = np.isfinite(reference) & ~np.isfinite(actual)
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        raise AssertionError(
            f"{name} has {wrong.sum()} of {wrong.size} elements NaN or Inf, the first is "
            f"{name}{list(at)} = {actual[at]}, expected {reference[at]:.9g}{title}"
        )


def _check_elements(name, actual, reference, tolerance, title) -> None:
    with np.errstate(invalid="ignore"):
        off = np.abs(actual.astype(np.float64) - reference)
    wrong = ~(off <= tolerance) & np.isfinite(reference)
    if wrong.any():
        excess = np.where(wrong, off / np.where(tolerance > 0, tolerance, 1e-300), 0)
        at = tuple(np.argwhere(excess == excess.max())[0].tolist())
        raise AssertionError(
            f"{name}: {wrong.sum()} of {wrong.size} elements are past their bound; "
            f"{_worst(actual, reference, excess)}, bound {tolerance[at]:.3g}{title}"
        )


def _worst(actual, reference, badness) -> str:
    at = tuple(np.argwhere(badness == badness.max())[0].tolist())
    got, wanted = float(actual[at]), float(reference[at])
    return f"worst at {list(at)}: got {got:.9g}, expected {wanted:.9g}, off by {got - wanted:.3g}"
