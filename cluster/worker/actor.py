"""A worker as a Ray actor: the shell around ``WorkerProcess`` and nothing more.

This file owns what must happen in the actor's process before the compute library is loaded (its
thread counts and NCCL's variables are read once, at import) and the translation of failures into
values: an exception that crosses Ray loses its class and gains a traceback. It must never decide
anything, and Ray is never on the path of a token.

Life: constructed by Ray (cheap) -> ``start`` (loads the model; blocks) -> ``warm``, ``report`` at
any time -> ``stop``. ``until_end`` is a call that stays open for the actor's whole life: it fails
at the moment Ray sees the process die. Calls run in threads, several at a time.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.worker.options import WorkerOptions
from cluster.worker.thread_environment import prepare_threads
from kv_transfer.transports.nccl_env import prepare_nccl_environment
from protocol.errors import ErrorInfo, TandemError
from protocol.types import Peer, WorkerInfo

if TYPE_CHECKING:
    from cluster.worker.process import WorkerProcess
    from cluster.worker.reports import WorkerReport

_log = logging.getLogger(__name__)

CALLS_AT_ONCE = 8


class WorkerActor:
    """One worker in a process of its own."""

    def __init__(self, options: WorkerOptions) -> None:
        prepare_threads(os.environ, options.threads)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        # Ray keeps standard error in its folder of logs, but sets up no logging of its own.
        logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        if options.use_gpu:
            # Without a device's name: NCCL finds the one that leads to the other worker.
            prepare_nccl_environment(os.environ, "")
        self._options = options
        self._process: WorkerProcess | None = None
        self._ended = threading.Event()

    def start(self) -> WorkerInfo | ErrorInfo:
        """Load the model and serve."""
        try:
            from cluster.worker.process import WorkerProcess

            self._process = WorkerProcess(self._options)
            return self._process.start()
        except TandemError as error:
            return error.info()
        except Exception as error:
            _log.exception("%s did not start", self._options.worker_id)
            return ErrorInfo("INTERNAL", f"{type(error).__name__}: {error}")

    def warm(self, peers: Sequence[Peer]) -> ErrorInfo | None:
        """Have streams and links to these receivers before a request needs them."""
        if self._process is None:
            return ErrorInfo("WRONG_STATE", f"{self._options.worker_id} is not started")
        try:
            self._process.warm(peers)
        except TandemError as error:
            return error.info()
        return None

    def report(self) -> WorkerReport | ErrorInfo:
        """How this worker is."""
        if self._process is None:
            return ErrorInfo("WRONG_STATE", f"{self._options.worker_id} is not started")
        try:
            return self._process.report()
        except TandemError as error:
            return error.info()

    def until_end(self) -> None:
        """Answers when this worker was stopped; fails when its process dies."""
        self._ended.wait()

    def stop(self, drain_s: float) -> bool:
        """End the worker in order; whether everything it ran had ended within ``drain_s``."""
        drained = self._process is None or self._process.stop(drain_s)
        self._ended.set()
        return drained
