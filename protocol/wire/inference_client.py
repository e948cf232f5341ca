"""A typed client of ``tandem.v1.Inference``, for the command line and the benchmarks.

Owns one gRPC channel to a router. It takes plain values, gives ``Delta`` and ``Complete``, and
raises ``TandemError``; it never retries, so what a caller measures is one request.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from protocol.config import TimingConfig
from protocol.errors import DeadlineExceeded, InvalidArgument, TandemError, Unavailable
from protocol.types import Complete, Delta
from protocol.wire import inference_pb2 as pb
from protocol.wire.channel import aio_channel, from_rpc_error
from protocol.wire.convert_front import decode_answer
from protocol.wire.inference_pb2_grpc import InferenceStub

# A client's connection is not a sign of life between workers: it is watched, but not eagerly.
_PATIENT = TimingConfig(heartbeat_s=10, peer_dead_s=20)
# grpc's words for a peer that accepts a connection and then does not speak HTTP/2.
_NOT_GRPC = "SETTINGS frame"
# The server ends a call a little before its deadline (``router.grpc_front``); an end earlier than
# this share of it is about a limit of the server's own.
_OWN_DEADLINE = 0.8
_OPTIONAL = (
    *("text", "max_tokens", "temperature", "top_p", "top_k", "seed", "n", "min_p", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs"),
    "prompt_logprobs",
)


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """What to ask for. Exactly one of ``text``, ``messages`` and ``token_ids`` is set.

    ``messages`` are (role, content) pairs. None leaves a value to the server's default. At most
    one of ``json_schema`` (its text) and ``regex`` says what the answer must match.
    """

    text: str | None = None
    messages: Sequence[tuple[str, str]] | None = None
    token_ids: Sequence[int] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    n: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None

    def to_wire(self) -> pb.GenerateRequest:
        """This call as protobuf; unset optional fields stay unset. Raises ``InvalidArgument``."""
        request = pb.GenerateRequest(stop=self.stop, ignore_eos=self.ignore_eos)
        for name in _OPTIONAL:
            self._put(request, name)
        try:
            request.logit_bias.update(self.logit_bias)
            request.stop_token_ids.extend(self.stop_token_ids)
        except ValueError as error:
            raise InvalidArgument(f"a token id is out of range: {error}") from None
        if self.json_schema is not None and self.regex is not None:
            raise InvalidArgument("json_schema and regex contradict each other", field="regex")
        for name in ("json_schema", "regex"):
            if getattr(self, name) is not None:
                self._put(request.structured_output, name)
        if self.messages is not None:
            request.chat.messages.extend(
                pb.ChatMessage(role=role, content=content) for role, content in self.messages
            )
        if self.token_ids is not None:
            request.token_ids.ids.extend(self.token_ids)
        return request

    def _put(self, message: Any, name: str) -> None:
        """Set one field where this call says something about it."""
        value = getattr(self, name)
        if value is None:
            return
        try:
            setattr(message, name, value)
        except ValueError:  # more digits than the field has
            raise InvalidArgument(f"{name} is out of range: {value}", field=name) from None


class InferenceClient:
    """One channel to one router's gRPC address. Use as an async context manager."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> InferenceClient:
        self._channel = aio_channel(self.endpoint, _PATIENT)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def generate(
        self, call: GenerateCall, timeout_s: float | None = None
    ) -> AsyncGenerator[Delta | Complete, None]:
        """Pieces of the answer in order, then its end. Closing the generator cancels the request.

        Raises the ``TandemError`` that the server reports, ``DeadlineExceeded`` once
        ``timeout_s`` has passed, and ``Unavailable`` where nothing speaks gRPC.
        """
        if self._channel is None:
            raise RuntimeError("InferenceClient is used outside of its context")
        stub = InferenceStub(self._channel)
        begin = time.monotonic()
        stream = stub.Generate(call.to_wire(), timeout=timeout_s)
        try:
            async for message in stream:
                yield decode_answer(message)
        except grpc.RpcError as e:
            raise self._cause(e, timeout_s, time.monotonic() - begin) from None
        finally:
            stream.cancel()

    def _cause(self, error: grpc.RpcError, timeout_s: float | None, passed_s: float) -> TandemError:
        """What failed, in words for whoever made the call instead of grpc's own."""
        cause = from_rpc_error(error)
        if isinstance(cause, Unavailable) and _NOT_GRPC in cause.message:
            return Unavailable(
                f"nothing that speaks gRPC answers at {self.endpoint}; a server's HTTP address "
                "is for --url, its gRPC address for --grpc"
            )
        expired = timeout_s is not None and passed_s >= _OWN_DEADLINE * timeout_s
        if isinstance(cause, DeadlineExceeded) and expired:
            return DeadlineExceeded(f"no complete answer within {timeout_s:g} s")
        return cause
