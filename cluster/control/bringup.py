"""Brings a whole cluster up and ends it again: what ``serve``, ``demo`` and ``bench`` share.

This file owns the order of a start (checks, Ray, controller, workers, routers) and of an end. It
must never print (progress goes to a callback) and never leave anything behind that it started,
however the start fails.

Life of a ``ClusterHandle``::

    with ClusterHandle(keep_ray=True) as cluster:      # keep_ray: for one arm after the other
        endpoints = cluster.start(config, on_progress) # raises TandemError, all ended
        ...
        cluster.stop()                                 # the cluster's actors; Ray stays
        endpoints = cluster.start(other_config)
    # leaving the block ends cluster and Ray, whatever happened inside
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from cluster.control.readiness import Endpoints, Progress
from protocol.config import TandemConfig

OnProgress = Callable[[Progress], None]


class ClusterHandle:
    """One cluster at a time, started and ended by this process. Use from one thread."""

    def __init__(self, *, keep_ray: bool = False) -> None:
        """``keep_ray``: ``stop`` leaves Ray running for the next ``start``; ``close`` ends it."""

    def start(self, config: TandemConfig, on_progress: OnProgress | None = None) -> Endpoints:
        """Start everything and wait until it serves. Blocks; ``on_progress`` is called from here.

        Raises ``ConfigError`` for what the user must change (port used, model missing, name in
        use), ``Unavailable`` when something did not come up; whatever was started has ended then.
        """
        raise NotImplementedError

    def stop(self) -> tuple[str, ...]:
        """End the cluster; says what it ended. May be called twice."""
        raise NotImplementedError

    def close(self) -> None:
        """``stop``, and end the Ray that this handle started."""
        raise NotImplementedError

    def __enter__(self) -> ClusterHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
