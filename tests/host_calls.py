# SPDX-License-Identifier: MIT
"""What the tests of the numpy path share: calls of it, small tiles."""

import contextlib

from cupyflash import _host_schedule, _problem, host


def attend(q, k, v, *, out=None, progress=None, **options):
    return host.run(_problem.from_arrays("attention", q, k, v, **options), out, progress=progress)


@contextlib.contextmanager
def tiling(monkeypatch, *, rows=8, keys=16, threads=None):
    """Tiles so small that small problems have many, on so many threads."""
    with monkeypatch.context() as patch:
        patch.setattr(_host_schedule, "_MAX_ROWS", rows)
        patch.setattr(_host_schedule, "_MAX_KEYS", keys)
        if threads:
            patch.setattr(_host_schedule, "_THREAD_WORK", 0)
            of = _host_schedule.Schedule.of
            patch.setattr(host.Schedule, "of", lambda problem, allowed: of(problem, threads))
        yield
