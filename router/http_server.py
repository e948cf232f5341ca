"""An ASGI application on a socket of our own, inside a running event loop.

This file owns uvicorn: no signal handlers (it never runs in a main thread), no access log, no
lifespan, and the socket, which is bound before anything else starts, so that a used port is one
sentence. It must never know what is served.

Life of an ``HttpServer``: ``bind`` (any thread) -> ``start`` -> ``stop``, which lets running
responses end for a moment and then cancels them.
"""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

from protocol.errors import ConfigError

BACKLOG = 1024


def split_address(address: str, field: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` as a pair; ``ConfigError`` naming ``field`` otherwise."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{field}: {address!r} is not host:port", field=field)
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The reverse of ``split_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening_socket(host: str, port: int, field: str) -> socket.socket:
    """A socket that listens there; ``ConfigError`` with one sentence when it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {join_address(host, port)}: {error.strerror or error}; "
            f"choose another address with {field}",
            field=field,
        ) from error
    return listener


class HttpServer:
    """One listening socket and the uvicorn server on it."""

    def __init__(self, address: str, field: str = "router.http") -> None:
        self._host, self._port = split_address(address, field)
        self._field = field
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def bind(self) -> str:
        """Take the port (0: any) and return the real address; ``ConfigError`` when it is used."""
        self._socket = listening_socket(self._host, self._port, self._field)
        return join_address(self._host, self._socket.getsockname()[1])

    async def start(self, app: ASGIApp, grace_s: float) -> None:
        """Serve ``app``. ``grace_s``: how long running responses may go on after ``stop``."""
        if self._socket is None:
            raise RuntimeError("the HTTP server has no socket: bind it first")
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(grace_s)),
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        """Stop accepting, end what runs, give the port back. May be called twice."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
