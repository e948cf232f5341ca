"""One worker as a plain process: ``python -m cluster.worker.main --options FILE_OR_JSON``.

This file owns the conversation with whoever started the process, one JSON object a line: the
``WorkerInfo`` on standard output once the worker serves, then one answer per command read from
standard input. It must never print anything else there (logs go to standard error).

Commands: ``{"do": "report"}``, ``{"do": "warm", "peers": [Peer]}``, ``{"do": "stop", "drain_s":
seconds}``. An answer is ``{"ok": value}`` or ``{"error": {"reason", "message"}}``.

Life: options read -> worker up -> commands -> ``stop``, end of standard input (whoever started it
is gone: no drain) or SIGTERM (drains for ``timing.drain_s``) -> exit 0. Options or a start that
fail: one sentence on standard error, exit 2.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from cluster.worker.options import WorkerOptions
from cluster.worker.process import WorkerProcess
from protocol.errors import InvalidArgument, TandemError
from protocol.types import Peer


class _Terminated(Exception):
    """SIGTERM came."""


def main() -> int:
    """Run one worker to its end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.worker.main", description=__doc__)
    parser.add_argument("--options", required=True, help="WorkerOptions as JSON, or a file of it")
    parser.add_argument("--log", default="INFO", help="log level (standard error)")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=arguments.log, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Whatever prints by itself goes to standard error: the lines here are a protocol.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        worker = WorkerProcess(_read_options(arguments.options))
        info = worker.start()
    except TandemError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    drain_s = 0.0
    try:
        signal.signal(signal.SIGTERM, _terminated)
        _say(out, {"ok": asdict(info)})
        drain_s = _converse(worker, out)
    except _Terminated:
        drain_s = worker.options.timing.drain_s
    except (KeyboardInterrupt, BrokenPipeError):
        drain_s = 0.0
    worker.stop(drain_s)
    return 0


def _terminated(signum: int, frame: object) -> NoReturn:
    raise _Terminated


def _read_options(text: str) -> WorkerOptions:
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidArgument(f"--options: {error}") from error
    return WorkerOptions.from_json(text)


def _converse(worker: WorkerProcess, out: TextIO) -> float:
    """Answer commands until the end; returns how long the worker may drain."""
    for line in sys.stdin:
        command = json.loads(line)
        if command.get("do") == "stop":
            return float(command.get("drain_s", 0.0))
        _say(out, _answer(partial(_do, worker, command)))
    return 0.0


def _do(worker: WorkerProcess, command: dict[str, Any]) -> Any:
    match command.get("do"):
        case "report":
            return asdict(worker.report())
        case "warm":
            worker.warm([Peer(**peer) for peer in command["peers"]])
            return None
        case other:
            raise InvalidArgument(f"no command is called {other!r}")


def _answer(do: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"ok": do()}
    except TandemError as error:
        return {"error": {"reason": error.reason, "message": error.message}}


def _say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
