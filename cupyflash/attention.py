# SPDX-License-Identifier: MIT
"""The public function: validate, plan, run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyflash import _call, _problem, host
from cupyflash.plan import Algorithm1, make_plan


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: Sequence[int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    seqlens_k: Any = None,
    return_lse: bool = False,
    out: Any = None,
    precision: str | None = None,
    num_splits: int | None = None,
    kernel: str | Algorithm1 | None = None,
) -> Any:
    """Exact softmax attention, without the N x N score matrix.

    ``O = softmax(softmax_scale * Q K^T + bias) V``, row-wise, by the running statistics (m, l) of
    FlashAttention (Dao et al. 2022, arXiv:2205.14135, Algorithm 1). The scores of query i and key
    j are made in this order: ``s = softmax_scale * q_i . k_j``; ``s = softcap * tanh(s /
    softcap)``; ``s += bias``; ``s -= slope * abs(i + offset - j)`` (ALiBi); hidden ones are -inf.

    Parameters
    ----------
    q : array (..., heads_q, seqlen_q, head_dim)
        Queries: float16, bfloat16 (``ml_dtypes``), float32 or float64; any strides. A 2-D array
        is one head; leading axes are batch axes and broadcast as numpy's do. numpy arrays run on
        the CPU and give numpy arrays; CuPy arrays, and objects with ``__dlpack__`` or
        ``__cuda_array_interface__`` on a GPU, run on their device and give CuPy arrays.
    k : array (..., heads_k, seqlen_k, head_dim)
        Keys, of q's dtype. ``heads_q`` is a multiple of ``heads_k``; query head h reads key head
        ``h // (heads_q // heads_k)``.
    v : array (..., heads_k, seqlen_k, head_dim_v)
        Values, of q's dtype.
    causal : bool or "top_left", default False
        Query i sees the keys ``j <= i + offset``. ``offset = seqlen_k - seqlen_q`` aligns the
        last query with the last key (bottom right); "top_left" makes ``offset`` 0, for ``window``
        and ``alibi_slopes`` too. For seqlen_q = 2, seqlen_k = 4 and for seqlen_q = 4, seqlen_k =
        2, bottom right (x: seen)::

            x x x .        . .
            x x x x        . .
                           x .
                           x x
    window : (left, right), optional
        Query i sees the keys ``i + offset - left <= j <= i + offset + right``, both ends
        inclusive; None or -1 is no limit. With ``causal``, right is 0.
    softmax_scale : float, optional
        Any finite non-zero number; default ``1 / sqrt(head_dim)``.
    softcap : float, optional
        Positive bound of the scores, by ``tanh``. Below 1e-12 it is taken as that, above 1e34 as
        no bound (float64 inputs: 1e-30 and 1e150), which changes no result.
    bias : array, optional
        Of q's dtype or float32; broadcasts to (..., heads_q, seqlen_q, seqlen_k) and is never
        expanded in memory. -inf hides as ``mask`` does.
    mask : array of bool, optional
        True where a query sees a key; broadcasts as ``bias``. Keys hidden from every query of a
        head are never multiplied, so NaN there changes nothing; a NaN in a row of ``v`` that only
        some queries see may reach others, as ``0 * NaN`` does in numpy.
    alibi_slopes : array or sequence of float, optional
        float32 or q's dtype; broadcasts to (..., heads_q).
    seqlens_k : int, or array or sequence of int, optional
        How many keys of each batch entry are in use, broadcasting to the batch axes; ``offset``
        uses that length. Values on a GPU are clamped to 0..seqlen_k there, others are checked.
    return_lse : bool, default False
        Also return the log-sum-exp of each row's scores.
    out : array, optional
        Where to write the output: its shape and dtype, any strides, no element twice, no memory
        shared with an input. On a GPU its elements lie at multiples of their size.
    precision : {None, "full", "tf32"}, default None
        "tf32" bounds the error of float32 products by that of TF32, operands of 11 bits, and lets
        ``forward_sm80`` use one such product for each: 4.4e-4 relative to float64 on normal
        numbers, in half the time. Other kernels compute at full precision, and so does the host;
        on Hopper ``forward_sm90_float32`` does, in nearly the same time. None is "full".
    num_splits : int, optional
        Parts of the keys, up to 128, that thread blocks of "forward_sm80", "forward_sm90_float32"
        or "forward_simt" work on side by side and whose results are merged. By default the plan
        chooses by how many blocks there are; 1 never divides, and makes what a batch entry gives
        independent of how many others there are, bit for bit. No other kernel divides keys: more
        than 1 takes one of these or is refused.
    kernel : str or Algorithm1, optional
        "host" for numpy arrays; "forward_sm90", "forward_sm90_float32", "forward_sm80",
        "forward_simt" or "fa1_forward", or an :class:`Algorithm1` with settings of the last, for
        arrays on a GPU. By default the plan chooses (:func:`plan` explains its choice).

    Returns
    -------
    o : array (..., heads_q, seqlen_q, head_dim_v)
        Of q's dtype; 2-D if q, k and v are all 2-D. A row that sees no key is 0.
    lse : array (..., heads_q, seqlen_q)
        Only with ``return_lse``: natural logarithm, float32 (float64 for float64 inputs); -inf
        for a row that sees no key.

    Raises
    ------
    TypeError
        An argument of another type or dtype, or numpy mixed with CuPy.
    ValueError
        Shapes, devices or numbers that don't fit each other, or a kernel that can't run the call.
        Like a TypeError it is raised before anything is written.
    ImportError
        CuPy, or NVRTC where a kernel has to be built, is missing; the message has the command
        that installs it.
    RuntimeError
        CuPy was built for ROCm, a kernel does not build, or the driver refuses it.

    Notes
    -----
    float16 and bfloat16 are computed with float32 statistics and sums (tensor cores take the
    weights rounded to 16 bits); float32 and float64 in their own precision, which is also that of
    ``lse``. In that precision ``q_i . k_j`` itself and the sums of ``v`` have to stay finite: a
    GPU multiplies by ``softmax_scale`` after the product (the numpy path scales q first, unless
    the scale is above 2^32), and weights of up to 256 are divided by their sum at the end, so that
    ``v`` up to 1e30 is safe with a million keys in float32; of up to 16,384 in ``forward_sm90``,
    and bfloat16 ``v`` up to 1e28.

    Work on a GPU goes to the current stream of the arrays' device and is not waited for. The first
    call of a specialisation builds and loads its kernels, which :func:`warmup` does ahead; a CUDA
    graph captures calls after that. Calls on CuPy arrays are remembered by shapes, strides, dtypes
    and options. Inputs at odd addresses (of elements that are not at multiples of their size) are
    copied on every call. Two equal calls give equal bits.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64), np.float32)
    >>> o, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> o.shape, lse.shape, bool(np.allclose(o[:, 0], v[:, 0]))
    ((8, 100, 64), (8, 100), True)
    """
    arrays = (q, k, v, bias, mask, alibi_slopes, seqlens_k)
    key, addresses = _call.signature(
        arrays,
        out,
        window,
        kernel,
        causal,
        softmax_scale,
        softcap,
        return_lse,
        num_splits,
        precision,
    )
    if key is not None and (call := _call.find(key)) is not None:
        o, lse = call(arrays, addresses, out)
        return (o, lse) if return_lse else o
    if not isinstance(return_lse, (bool, np.bool_)):
        raise TypeError(
            f"attention: return_lse is a {type(return_lse).__name__}; expected True or False"
        )
    problem = _problem.from_arrays(
        "attention",
        q,
        k,
        v,
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        bias=bias,
        mask=mask,
        alibi_slopes=alibi_slopes,
        seqlens_k=seqlens_k,
        precision=precision,
    )
    if out is not None:
        _problem.check_out("attention", problem, out)
    plan = make_plan("attention", problem, kernel, num_splits=num_splits)
    if plan.kernel == "host":
        o, lse = host.run(problem, out)
    else:
        o, lse = _call.run(plan, problem, arrays, out, bool(return_lse), key)
    return (o, lse) if return_lse else o
