"""A conversation over the OpenAI HTTP API: what was said so far, and the next answer as it comes.

This file owns the reading of server-sent events on the client's side and the rule that a turn
which failed or was interrupted leaves no trace in the conversation. It must never print.

Life of a ``ChatSession``: ``connect`` (finds the served model) -> ``say`` per turn -> ``close``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

from protocol.errors import BY_REASON, ConfigError, InternalError, TandemError, Unavailable

CONNECT_S = 5.0
SILENCE_S = 60.0  # longest silence: a waiting server sends keep-alive comments
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ChatSession:
    """One conversation with one server. ``options`` are further fields of every request."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        system: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.url = _address(url)
        self.model = model or ""
        self.messages: list[dict[str, str]] = []
        self.usage: dict[str, Any] | None = None  # of the last whole answer
        self._system = system
        self._options = options or {}
        self._client = httpx.Client(
            timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
            # A proxy of the environment cannot reach this machine's own server.
            trust_env=httpx.URL(self.url).host not in LOOPBACK,
        )
        self.forget()

    def connect(self) -> str:
        """Find the server; returns the model's name.

        Raises ``Unavailable`` where none answers, or something that is not one.
        """
        try:
            answer = self._client.get(f"{self.url}/v1/models")
            self._check(answer)
            names = [entry["id"] for entry in answer.json()["data"]]
        except httpx.RemoteProtocolError as error:
            raise Unavailable(
                f"nothing that speaks HTTP answers at {self.url}; a server's gRPC address is for "
                "--grpc, its HTTP address for --url"
            ) from error
        except httpx.TransportError as error:
            raise self._no_server(error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"{self.url} answers, but not as an OpenAI server") from error
        self.model = self.model or names[0]
        return self.model

    def forget(self) -> None:
        """Start the conversation anew."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str) -> Iterator[str]:
        """Send a user's turn; yields the answer as it grows.

        Raises the server's error as a ``TandemError``. Closing the iterator early ends the
        request at the server.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        body = self._options | {
            "model": self.model,
            "messages": asked,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        said = ""
        try:
            with self._client.stream(
                "POST", f"{self.url}/v1/chat/completions", json=body
            ) as answer:
                if answer.is_error:
                    answer.read()
                    self._check(answer)
                for event in _events(answer.iter_lines()):
                    for choice in event.get("choices", ()):
                        piece = choice.get("delta", {}).get("content") or ""
                        said += piece
                        if piece:
                            yield piece
                    self.usage = event.get("usage") or self.usage
        except httpx.TransportError as error:
            raise self._no_server(error) from error
        self.messages = [*asked, {"role": "assistant", "content": said}]

    def close(self) -> None:
        """Give the connection back."""
        self._client.close()

    def _check(self, answer: httpx.Response) -> None:
        if not answer.is_error:
            return
        try:
            raise _error(answer.json()["error"])
        except (ValueError, KeyError, TypeError):
            raise Unavailable(
                f"{self.url} answered {answer.status_code} {answer.reason_phrase}"
            ) from None

    def _no_server(self, error: httpx.TransportError) -> Unavailable:
        return Unavailable(
            f"no answer from {self.url} ({error or type(error).__name__}); "
            "is a server running? start one with: tandem serve CONFIG"
        )


def _address(url: str) -> str:
    """The URL that requests are put behind; without a scheme it is plain HTTP.

    Raises ``ConfigError`` for what is no HTTP address.
    """
    whole = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(whole)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url!r} is not a URL: {error}", field="url") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{url!r} is not an HTTP address such as http://host:port", field="url")
    return whole.rstrip("/").removesuffix("/v1")


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of every event up to ``[DONE]``; raises an error event as what it tells."""
    for line in lines:
        if not line.startswith("data:"):
            continue  # keep-alive comments and blank lines
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if event.get("error"):
            raise _error(event["error"])
        yield event
    raise Unavailable("the server ended the stream before the answer was whole")


def _error(error: dict[str, Any]) -> TandemError:
    """OpenAI's error shape as the cause that our servers write into ``code``."""
    kind = BY_REASON.get(str(error.get("code") or "").upper(), InternalError)
    return kind(str(error.get("message")), field=error.get("param"))
