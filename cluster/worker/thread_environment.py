"""The environment variables of the compute threads, which their libraries read once, at import.

This file owns how many threads compute and how they wait for work. It must never import torch:
what it sets would come too late.
"""

from __future__ import annotations

from collections.abc import MutableMapping

COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
# Turns that an idle compute thread looks for work before it sleeps: some ten microseconds. By
# default it looks for milliseconds, on the core that another process, or this one's network
# threads, could use. (Measured on two shared cores: docs/decisions.md.)
_SPINS = "1000"
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def prepare_threads(environment: MutableMapping[str, str], threads: int) -> None:
    """Set the counts to ``threads``, and how they wait unless the user has said it."""
    for name in COUNTS:
        environment[name] = str(threads)
    if not any(name in environment for name in _WAITING):
        environment["GOMP_SPINCOUNT"] = _SPINS
