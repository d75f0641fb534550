# SPDX-License-Identifier: MIT
"""python -m cupyflash plan: how a call would run, without arrays and without a GPU."""

from __future__ import annotations

import argparse

from cupyflash import _dtypes
from cupyflash._cli_common import CommandError, add_mask_options, add_split_option
from cupyflash._messages import one_line
from cupyflash.plan import Algorithm1, plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, which are those of :func:`cupyflash.plan`."""
    size = parser.add_argument_group("sizes")
    size.add_argument("--seqlen", type=int, metavar="N", help="both of the next two")
    size.add_argument("--seqlen-q", type=int, metavar="N", help="number of queries")
    size.add_argument("--seqlen-k", type=int, metavar="N", help="number of keys")
    size.add_argument("--head-dim", type=int, metavar="D", required=True)
    size.add_argument("--head-dim-v", type=int, metavar="D", help="default: --head-dim")
    size.add_argument("--batch", type=int, metavar="B", default=1, help="default: 1")
    size.add_argument(
        "--heads",
        type=heads,
        metavar="H or HQ/HK",
        default=(1, None),
        help="query heads, and key heads where they are fewer, as in 32/8 (default: 1)",
    )
    size.add_argument("--dtype", default="float16", help=f"{_dtypes.NAMES_TEXT} (default: float16)")
    score = parser.add_argument_group("scores")
    add_mask_options(score)
    score.add_argument("--scale", type=float, metavar="S", help="softmax_scale")
    score.add_argument("--bias", metavar="DTYPE", help="there is a bias, of that dtype")
    score.add_argument("--mask", action="store_true", help="there is a mask")
    score.add_argument("--alibi", action="store_true", help="there are ALiBi slopes")
    score.add_argument("--seqlens", action="store_true", help="there are seqlens_k")
    where = parser.add_argument_group("where and how")
    where.add_argument(
        "--device",
        metavar="NAME",
        help="such as H200, cpu, or 0 for GPU 0 (default: what this machine has)",
    )
    add_split_option(where)
    where.add_argument("--kernel", metavar="NAME", help="such as fa1_forward (default: the plan's)")
    where.add_argument(
        "--sram-elements",
        type=int,
        metavar="M",
        help="fa1_forward: the M of B_c = ceil(M/4d) (default: what the device has)",
    )
    where.add_argument(
        "--chunks",
        type=int,
        metavar="C",
        help="fa1_forward: thread blocks among which the T_r query blocks of a head are divided; "
        "1 is the paper's loop (default: as many as fill the device)",
    )


def command(args: argparse.Namespace) -> None:
    """Print the plan.

    Raises
    ------
    CommandError
        The sizes, options, device or kernel don't go together.
    """
    seqlen_q = args.seqlen if args.seqlen_q is None else args.seqlen_q
    if seqlen_q is None:
        raise CommandError("say how many queries there are: --seqlen N or --seqlen-q N")
    heads_q, heads_k = args.heads
    try:
        explained = plan(
            seqlen_q=seqlen_q,
            seqlen_k=args.seqlen if args.seqlen_k is None else args.seqlen_k,
            head_dim=args.head_dim,
            head_dim_v=args.head_dim_v,
            batch=args.batch,
            heads_q=heads_q,
            heads_k=heads_k,
            dtype=args.dtype,
            causal=args.causal,
            window=args.window,
            softmax_scale=args.scale,
            softcap=args.softcap,
            bias_dtype=args.bias,
            mask=args.mask,
            alibi=args.alibi,
            seqlens=args.seqlens,
            precision=args.precision,
            device=int(args.device) if (args.device or "").isdecimal() else args.device,
            num_splits=args.num_splits,
            kernel=_kernel(args),
        )
        text = str(explained)
    except (TypeError, ValueError, ImportError, OSError, MemoryError) as error:
        raise CommandError(one_line(error)) from error
    print(text)


def _kernel(args: argparse.Namespace) -> str | Algorithm1 | None:
    settings = {
        name: getattr(args, name)
        for name in ("sram_elements", "chunks")
        if getattr(args, name) is not None
    }
    if not settings:
        return args.kernel
    if args.kernel not in (None, "fa1_forward"):
        raise CommandError(
            f"--sram-elements and --chunks are settings of fa1_forward, not of {args.kernel}"
        )
    return Algorithm1(**settings)


def heads(text: str) -> tuple[int, int | None]:
    """Parse ``H`` or ``HQ/HK``."""
    try:
        counts = [int(part) for part in text.split("/")]
    except ValueError:
        counts = []
    if len(counts) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r} is not H or HQ/HK, such as 8 or 32/8")
    return counts[0], counts[1] if len(counts) == 2 else None
