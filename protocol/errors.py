"""One class per cause of failure, and what each cause means to every kind of client.

This file owns the mapping from a cause to its gRPC code, HTTP status and OpenAI error type, and
whether a repeat can help. Everything that fails for a reason a person should read raises a
``TandemError``; across a process boundary it travels as ``ErrorInfo``. A class here never
formats a traceback and never carries prompt text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """A failure as messages carry it. ``reason`` is the stable name of a class in this file."""

    reason: str
    message: str
    field: str | None = None
    retry_after_s: float | None = None

    def to_error(self) -> TandemError:
        """The exception of this cause; an unknown reason becomes ``InternalError``."""
        kind = BY_REASON.get(self.reason, InternalError)
        return kind(self.message, field=self.field, retry_after_s=self.retry_after_s)


class TandemError(Exception):
    """Base of all causes. ``field`` names the offending input, ``retry_after_s`` is a hint."""

    reason: ClassVar[str] = "INTERNAL"
    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False  # may the router try another attempt?
    exit_code: ClassVar[int] = 1  # of the command line

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        """This failure as a message carries it."""
        return ErrorInfo(self.reason, self.message, self.field, self.retry_after_s)


class InvalidArgument(TandemError):
    """The request itself is wrong; a repeat cannot help."""

    reason = "INVALID_ARGUMENT"
    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    openai_type = "invalid_request_error"
    exit_code = 2


class ContextLengthExceeded(InvalidArgument):
    """Prompt plus answer cannot fit the model's context; the message has the numbers."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class RequestTooLarge(InvalidArgument):
    """The request has more bytes than the router reads."""

    reason = "REQUEST_TOO_LARGE"
    http_status = 413


class RequestTooSlow(InvalidArgument):
    """The request's body did not arrive in time."""

    reason = "REQUEST_TOO_SLOW"
    http_status = 408


class NeverFits(InvalidArgument):
    """The request needs more KV pages than a worker has in all."""

    reason = "NEVER_FITS"


class MalformedFrame(InvalidArgument):
    """A message between processes has no meaning: a missing part, an unknown kind or value."""

    reason = "MALFORMED_FRAME"


class ModelNotFound(TandemError):
    """No model of that name is served."""

    reason = "MODEL_NOT_FOUND"
    grpc_code = "NOT_FOUND"
    http_status = 404
    openai_type = "invalid_request_error"


class ConfigError(TandemError):
    """The configuration is wrong; the message starts with file:line:column where known."""

    reason = "CONFIG"
    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    openai_type = "invalid_request_error"
    exit_code = 2


class Unauthenticated(TandemError):
    """The caller did not prove that it belongs to this cluster or tenant."""

    reason = "UNAUTHENTICATED"
    grpc_code = "UNAUTHENTICATED"
    http_status = 401
    openai_type = "authentication_error"


class WrongState(TandemError):
    """The worker is in a state that cannot serve this (wrong role, draining)."""

    reason = "WRONG_STATE"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 503
    retryable = True


class Overloaded(TandemError):
    """A bounded queue is full."""

    reason = "OVERLOADED"
    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 503
    openai_type = "overloaded_error"
    retryable = True


class Unavailable(TandemError):
    """Nothing can serve this now: a worker died, a link broke, a pool is empty."""

    reason = "UNAVAILABLE"
    grpc_code = "UNAVAILABLE"
    http_status = 503
    openai_type = "overloaded_error"
    retryable = True


class SlowReader(TandemError):
    """The client read too slowly and its buffer is full."""

    reason = "SLOW_READER"
    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 503


class DeadlineExceeded(TandemError):
    """The request's own deadline passed."""

    reason = "DEADLINE_EXCEEDED"
    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class Cancelled(TandemError):
    """The client went away or asked for the end."""

    reason = "CANCELLED"
    grpc_code = "CANCELLED"
    http_status = 499


class StaleAttempt(TandemError):
    """A newer attempt of this request is known; this one is refused."""

    reason = "STALE_ATTEMPT"
    grpc_code = "ABORTED"
    http_status = 409


class PeerMismatch(TandemError):
    """Two workers disagree on model, geometry, dtype or version; the message has both values."""

    reason = "PEER_MISMATCH"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 503


class DataLoss(TandemError):
    """Counts, generations or checksums of a transfer do not agree."""

    reason = "DATA_LOSS"
    grpc_code = "DATA_LOSS"
    http_status = 500
    retryable = True


class InternalError(TandemError):
    """A bug of ours, or non-finite logits; the message carries an id that is also in the log."""

    reason = "INTERNAL"


def _classes(base: type[TandemError]) -> list[type[TandemError]]:
    return [base, *(c for sub in base.__subclasses__() for c in _classes(sub))]


BY_REASON: dict[str, type[TandemError]] = {
    c.reason: c for c in _classes(TandemError) if c is not TandemError
}
