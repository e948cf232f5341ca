"""How Tandem's processes reach each other by gRPC: addresses, options, trust, health, errors.

The only place with grpc options. Owns message limits, keepalive on both sides, the rule that a
used port is an error, the cluster's token on every control call, the refusal of bytes that are no
message, the health and reflection services, and the form of an error on the wire
(google.rpc.Status details) in both directions. It must never decide what a message means.

Life of a ``WireServer``, all on one event loop: construct -> add servicers to ``grpc`` ->
``bind`` -> ``start`` (health says SERVING where told so) -> ``set_serving`` -> ``stop``.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protocol.config import TimingConfig
from protocol.errors import (
    BY_REASON,
    Cancelled,
    ConfigError,
    DataLoss,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    Overloaded,
    StaleAttempt,
    TandemError,
    Unauthenticated,
    Unavailable,
    WrongState,
)

TOKEN_KEY = "tandem-cluster-token"
ROUTER_ID_KEY = "tandem-router-id"
ACCEPTED_KEY = "tandem-accepted"  # the server's initial metadata once it has taken a stream
DOMAIN = "tandem"
MESSAGE_LIMIT = 16 << 20
_DETAILS_KEY = "grpc-status-details-bin"
# What grpc.aio makes of a write that meets the end of its stream; the true status is lost then.
_WRITE_RACE = "Internal error from Core"
_MESSAGE_CHARS = 1000  # errors travel as HTTP/2 metadata, which must stay small
_GUARDED = ("/tandem.v1.Session/", "/tandem.v1.Transfer/", "/tandem.v1.Admin/")

_BY_CODE: dict[str, type[TandemError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "OUT_OF_RANGE": InvalidArgument,
    "NOT_FOUND": InvalidArgument,
    "FAILED_PRECONDITION": WrongState,
    "RESOURCE_EXHAUSTED": Overloaded,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "ABORTED": StaleAttempt,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": Unauthenticated,
    "DATA_LOSS": DataLoss,
}


def cluster_token(secret: str) -> str:
    """What calls on the control channels carry; empty for an empty secret (no check)."""
    if not secret:
        return ""
    return hmac.new(secret.encode(), b"tandem.v1 control", hashlib.sha256).hexdigest()


def token_metadata(secret: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a control call."""
    token = cluster_token(secret)
    return ((TOKEN_KEY, token),) if token else ()


def _common_options(timing: TimingConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MESSAGE_LIMIT),
        ("grpc.max_send_message_length", MESSAGE_LIMIT),
        ("grpc.keepalive_time_ms", max(1, round(1000 * timing.heartbeat_s))),
        ("grpc.keepalive_timeout_ms", max(1, round(1000 * timing.peer_dead_s))),
        # Any unanswered ping, not only keepalive's own, ends the connection (default: 60 s).
        ("grpc.http2.ping_timeout_ms", max(1, round(1000 * timing.peer_dead_s))),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(timing: TimingConfig) -> list[tuple[str, int]]:
    """Options of every server: a used port is an error, our clients' keepalive is welcome."""
    return [
        *_common_options(timing),
        ("grpc.so_reuseport", 0),
        # A loaded machine delivers several pings at once; that must never end a connection.
        ("grpc.http2.max_ping_strikes", 0),
        (
            "grpc.http2.min_recv_ping_interval_without_data_ms",
            max(1, round(500 * timing.heartbeat_s)),
        ),
    ]


def client_options(timing: TimingConfig) -> list[tuple[str, int]]:
    """Options of every client. A channel shares no connection: a restarted peer is dialled at
    once, without the back-off that the connection to its predecessor has earned."""
    return [
        *_common_options(timing),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
    ]


def aio_channel(endpoint: str, timing: TimingConfig | None = None) -> grpc.aio.Channel:
    """A client channel of the running event loop to ``host:port``."""
    return grpc.aio.insecure_channel(endpoint, options=client_options(timing or TimingConfig()))


def blocking_channel(endpoint: str, timing: TimingConfig | None = None) -> grpc.Channel:
    """A client channel for threads to ``host:port``."""
    return grpc.insecure_channel(endpoint, options=client_options(timing or TimingConfig()))


# --- errors ------------------------------------------------------------------------------------


def status_of(error: TandemError) -> status_pb2.Status:
    """An error as google.rpc.Status: ErrorInfo, and RetryInfo and BadRequest where they apply."""
    code = grpc.StatusCode[error.grpc_code].value[0]
    message = error.message[:_MESSAGE_CHARS]
    status = status_pb2.Status(code=code, message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    status.details.add().Pack(info)
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(max(0, round(error.retry_after_s * 1e9)))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.field is not None:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=error.field, description=message)
        status.details.add().Pack(bad)
    return status


async def abort_with(context: Any, error: TandemError) -> NoReturn:
    """End a call of an aio server with this error; never returns."""
    status = status_of(error)
    details = ((_DETAILS_KEY, status.SerializeToString()),)
    await context.abort(grpc.StatusCode[error.grpc_code], status.message, details)
    raise AssertionError("abort returned")  # it raises by contract


def from_rpc_error(error: grpc.RpcError) -> TandemError:
    """The cause behind a failed call, by its details where ours, else by its code."""
    code: grpc.StatusCode = error.code()
    message = error.details() or code.name
    if message == _WRITE_RACE:
        return Unavailable("the stream ended while it was being written to")
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            found = _from_status(value, message)
            if found is not None:
                return found
    return _BY_CODE.get(code.name, InternalError)(message)


def _from_status(raw: bytes, message: str) -> TandemError | None:
    try:
        status = status_pb2.Status.FromString(raw)
    except ValueError:  # protobuf's DecodeError: some other server's idea of details
        return None
    kind: type[TandemError] | None = None
    field: str | None = None
    retry_after_s: float | None = None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(info) and info.domain == DOMAIN:
            kind = BY_REASON.get(info.reason, InternalError)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
    if kind is None:
        return None
    return kind(status.message or message, field=field, retry_after_s=retry_after_s)


# --- servers -----------------------------------------------------------------------------------


class ClusterAuth(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses control calls that do not carry the cluster's token; other calls pass."""

    def __init__(self, secret: str, on_refused: Callable[[str], None] | None = None) -> None:
        self._token = cluster_token(secret).encode()
        self._on_refused = on_refused

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Pass the call on, or put a refusal in its handler's place."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not self._token or not method.startswith(_GUARDED):
            return handler
        sent = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_KEY, "")
        if isinstance(sent, str) and hmac.compare_digest(sent.encode(), self._token):
            return handler
        if self._on_refused is not None:
            self._on_refused("unauthenticated")
        return _refusal(handler)


async def _refuse(request: Any, context: Any) -> NoReturn:
    await abort_with(context, Unauthenticated(f"the call needs this cluster's {TOKEN_KEY}"))


def _refusal(handler: Any) -> Any:
    """A handler of the same shape that refuses."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[(bool(handler.request_streaming), bool(handler.response_streaming))]
    # No deserializer: a stranger's bytes are not even looked at.
    return make(_refuse, None, handler.response_serializer)


class MessageCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Answers bytes that are no message with INVALID_ARGUMENT.

    grpc itself would say UNKNOWN and log a traceback for each, which any client could use to fill
    the log. Only calls with one request; a stream of frames is its service's to read.
    """

    def __init__(self, on_refused: Callable[[str], None] | None = None) -> None:
        self._on_refused = on_refused

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Pass the call on, its request decoded where a failure can be answered."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        method = handler.unary_stream if handler.response_streaming else handler.unary_unary
        if not inspect.iscoroutinefunction(method):
            return handler
        decode = handler.request_deserializer

        async def checked(raw: bytes, context: Any) -> Any:
            try:
                request = decode(raw)
            except DecodeError:
                if self._on_refused is not None:
                    self._on_refused("malformed")
                error = InvalidArgument("the request's bytes are not a message of this method")
                await abort_with(context, error)
            return await method(request, context)

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(checked, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(checked, None, handler.response_serializer)


class WireServer:
    """A grpc.aio server with the cluster's trust, health and reflection built in."""

    def __init__(
        self,
        *,
        secret: str = "",
        timing: TimingConfig | None = None,
        on_refused: Callable[[str], None] | None = None,
    ) -> None:
        """Must be made on the event loop that will serve. ``on_refused(cause)`` counts."""
        self.grpc = grpc.aio.server(
            interceptors=(ClusterAuth(secret, on_refused), MessageCheck(on_refused)),
            options=server_options(timing or TimingConfig()),
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    def bind(self, address: str) -> int:
        """Listen on ``host:port`` (port 0: any); returns the port.

        Raises ``ConfigError`` naming the address when it is used or not ours.
        """
        try:
            port = self.grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: used or not available") from error
        if port == 0:
            raise ConfigError(f"cannot listen on {address}: used or not available")
        return int(port)

    async def start(self, services: Sequence[str], *, serving: bool = True) -> None:
        """Serve; ``services`` are full names (``tandem.v1.Session``) for reflection and health."""
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)
        await self.set_serving(dict.fromkeys(("", *services), serving))
        await self.grpc.start()

    async def set_serving(self, states: Mapping[str, bool]) -> None:
        """Set health by service name; ``""`` is the server as a whole."""
        kinds = health_pb2.HealthCheckResponse
        for service, serving in states.items():
            await self._health.set(service, kinds.SERVING if serving else kinds.NOT_SERVING)

    async def stop(self, grace_s: float = 0.5) -> None:
        """Say NOT_SERVING, refuse new calls, cancel what still runs after ``grace_s``."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
