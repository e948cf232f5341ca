"""``tandem serve``: one command from a configuration to a cluster that answers.

This file owns what a person sees of a start and how signals end it: the first Ctrl-C (or SIGTERM,
or a closed terminal) ends everything in order, at any moment of the start too; the second ends
the processes at once. Progress goes to stderr, where the cluster answers to stdout.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.config import SetOption

if TYPE_CHECKING:
    from cluster.control.bringup import ClusterHandle
    from cluster.control.readiness import Endpoints
    from protocol.config import TandemConfig

_WATCH_S = 2.0
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def serve(
    config: Annotated[Path, typer.Argument(help="The cluster's YAML file.", show_default=False)],
    set_: SetOption = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once it serves; `tandem down` ends it.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print where it answers as one JSON object.")
    ] = False,
) -> None:
    """Start a cluster and serve until Ctrl-C."""
    from protocol.load import load_config

    loaded = load_config(config, set_ or (), os.environ)
    from cluster.cli.serve_view import ready_json, ready_text
    from cluster.control.bringup import ClusterHandle

    handle = ClusterHandle()
    with _signals_end(handle):
        try:
            endpoints = _start(handle, loaded)
            for warning in handle.warnings:
                typer.echo(f"warning: {warning}", err=True)
            typer.echo(ready_json(endpoints) if as_json else ready_text(endpoints, loaded, detach))
            sys.stdout.flush()
            if detach:
                handle.detach()
                return
            _watch(handle)
        except KeyboardInterrupt:
            typer.echo("ending the cluster (Ctrl-C again ends it at once)", err=True)
            typer.echo(f"ended: {', '.join(handle.stop('tandem serve ends'))}", err=True)
        finally:
            handle.close()


def _start(handle: ClusterHandle, config: TandemConfig) -> Endpoints:
    """Start with everything to be seen. An interrupted start ends what it had started."""
    from cluster.cli.model_hint import fetch_hint
    from cluster.cli.serve_view import ProgressView
    from protocol.errors import ConfigError

    ending = False

    def failed(error: BaseException) -> None:
        nonlocal ending
        view.close()
        if isinstance(error, KeyboardInterrupt):
            ending = True
            typer.echo("ending what was started (Ctrl-C again ends it at once)", err=True)

    with ProgressView(sys.stderr) as view:
        try:
            return handle.start(config, view.show, failed)
        except KeyboardInterrupt:
            if not ending:  # nothing had been started
                raise typer.Exit(130) from None
            typer.echo("ended", err=True)
            sys.stderr.flush()
            # Ray's client, torn out of its start, crashes in the interpreter's own exit.
            os._exit(130)
        except ConfigError as error:
            if error.field != "model.path":
                raise
            hint = fetch_hint(config.model.path)
            raise ConfigError(f"{error.message} ({hint})", field=error.field) from None


def _watch(handle: ClusterHandle) -> None:
    """Tell what happens to the cluster until it is shut down or a signal comes."""
    from protocol.errors import Unavailable

    told: set[str] = set()
    wait = threading.Event()
    lost_sight = False
    while True:
        if not handle.ray_alive:
            # Ray's client would wait a minute for it and then end this process without a word.
            typer.echo("error: Ray has died under the cluster; ending what is left of it", err=True)
            handle.force()
            os._exit(1)
        if handle.was_shut_down():
            break
        try:
            for note in handle.status().notes:
                if note.text not in told:
                    told.add(note.text)
                    typer.echo(note.text, err=True)
        except Unavailable as error:
            if not lost_sight and handle.ray_alive and not handle.was_shut_down():
                typer.echo(f"warning: {error.message}; serving goes on without it", err=True)
                lost_sight = True
        wait.wait(_WATCH_S)
    typer.echo("the cluster was shut down", err=True)


@contextmanager
def _signals_end(handle: ClusterHandle) -> Iterator[None]:
    """The first signal raises ``KeyboardInterrupt`` here, the second ends the processes."""

    def first(number: int, frame: Any) -> None:
        for name in before:
            signal.signal(name, second)
        raise KeyboardInterrupt

    def second(number: int, frame: Any) -> None:
        handle.force()
        os._exit(130)

    before = {
        getattr(signal, name): signal.getsignal(getattr(signal, name))
        for name in _SIGNALS
        if hasattr(signal, name)
    }
    for name in before:
        signal.signal(name, first)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
