"""A router as a Ray actor: the shell around ``RouterApp`` and nothing more.

This file owns the translation of a router's failures into values. It must never decide anything;
requests reach the router through its own ports, never through Ray.

Life: constructed by Ray (cheap) -> ``prepare`` (while workers still load) -> ``start``
once a worker has told what the model is -> ``set_workers`` whenever they change -> ``stop``.
``until_end`` stays open for the actor's whole life: it fails when Ray sees the process die.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from protocol.config import TandemConfig
from protocol.errors import ErrorInfo, TandemError
from protocol.types import ModelInfo, WorkerInfo

if TYPE_CHECKING:
    from router.app import RouterApp, RouterEndpoints
    from router.text import TextCodec

_log = logging.getLogger(__name__)

CALLS_AT_ONCE = 8


class RouterActor:
    """One router in a process of its own."""

    def __init__(self, config: TandemConfig, router_id: str, secret: str, controller: str) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self._config = config
        self._router_id = router_id
        self._secret = secret
        self._controller = controller
        self._app: RouterApp | None = None
        self._codec: TextCodec | None = None
        self._ended = threading.Event()

    def prepare(self) -> ErrorInfo | None:
        """Do what needs no worker: imports, the tokenizer."""
        try:
            import router.app  # noqa: F401
            from router.text import TextCodec

            self._codec = TextCodec(self._config.model.path)
        except TandemError as error:
            return error.info()
        return None

    def start(
        self, model: ModelInfo, http: str | None, grpc: str | None
    ) -> RouterEndpoints | ErrorInfo:
        """Take the ports and serve. ``http`` and ``grpc``: where a predecessor did."""
        try:
            from router.app import RouterApp

            self._app = RouterApp(
                self._config,
                router_id=self._router_id,
                model=model,
                secret=self._secret,
                controller=self._controller,
                codec=self._codec,
                http=http,
                grpc=grpc,
            )
            return self._app.start()
        except TandemError as error:
            return error.info()
        except Exception as error:
            _log.exception("router %s did not start", self._router_id)
            return ErrorInfo("INTERNAL", f"{type(error).__name__}: {error}")

    def set_workers(self, workers: tuple[WorkerInfo, ...]) -> None:
        """The whole list of workers that are up."""
        if self._app is not None:
            self._app.set_workers(workers)

    def report(self) -> bool:
        """Whether the router runs; that it answers at all is the news."""
        return self._app is not None

    def until_end(self) -> None:
        """Answers when this router was stopped; fails when its process dies."""
        self._ended.wait()

    def stop(self) -> None:
        """What runs ends with an honest error, the ports are given back."""
        if self._app is not None:
            self._app.stop()
        self._ended.set()
