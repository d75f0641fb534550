# SPDX-License-Identifier: MIT
"""Exact non-local means, which is attention between the patches of a picture.

The filter replaces each pixel by an average over *all* pixels of the picture, weighted by how
much their surroundings look alike (Buades, Coll and Morel 2005)::

    u_i = sum_j w_ij x_j / sum_j w_ij,     w_ij = exp(-|p_i - p_j|^2 / h^2),

where p_i is the patch around pixel i as a vector. Since ``-|p_i - p_j|^2 = 2 p_i . p_j - |p_j|^2 -
|p_i|^2``, and what depends on i alone cancels in the quotient, u is softmax attention with the
patches as queries and keys, ``softmax_scale = 2 / h^2``, the bias ``-|p_j|^2 / h^2`` per key, and
the pixels as values.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def patches(picture: np.ndarray, radius: int) -> np.ndarray:
    """The patch around each pixel, (rows * columns, (2 radius + 1)^2); the border is reflected.

    Examples
    --------
    >>> patches(np.arange(12.0).reshape(3, 4), 1)[0]
    array([5., 4., 5., 1., 0., 1., 5., 4., 5.])
    """
    side = 2 * radius + 1
    padded = np.pad(picture, radius, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (side, side))
    return windows.reshape(picture.size, side * side)


def attention_arguments(picture: np.ndarray, h: float, radius: int = 3) -> dict[str, Any]:
    """The arguments with which ``attention`` filters ``picture``, as one column of pixels.

    Parameters
    ----------
    picture : array (rows, columns)
        float32 or float64, best with its mean subtracted: distances don't depend on the mean,
        but the products that they are made of do, and small ones lose less to rounding.
    h : float
        Distance, in the picture's unit, at which a weight has fallen to 1/e.
    radius : int
        Patches are ``2 * radius + 1`` pixels wide.

    Returns
    -------
    dict
        ``q``, ``k`` (rows * columns, (2 radius + 1)^2), ``v`` (rows * columns, 1), ``bias`` (1,
        rows * columns) and ``softmax_scale``.
    """
    p = patches(picture, radius)
    return {
        "q": p,
        "k": p,
        "v": picture.reshape(-1, 1),
        "bias": -np.square(p).sum(axis=1)[None] / np.asarray(h * h, p.dtype),
        "softmax_scale": 2.0 / (h * h),
    }
