"""``tandem.v1.Inference``: the gRPC surface, over the same service as the HTTP one.

This file owns the reading of client-facing protobuf messages and the end of a call: the call's
deadline is the request's, its hang-up cancels both legs, its failure is a rich status. It must
never check a value (``router.params`` does) or know what a worker is.

Life of a ``Generate``: read the input -> one ``Request`` -> each piece of the answer is written
as it comes -> the call ends after ``complete``. grpc cancels the coroutine when the client hangs
up, wherever it waits; leaving the ``aclosing`` block then closes the answer.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from protocol.errors import InvalidArgument, RequestTooLarge
from protocol.types import Delta, Request
from protocol.wire import inference_pb2 as pb
from protocol.wire.channel import abort_with
from protocol.wire.convert_front import encode_answer
from protocol.wire.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from router.grpc_sampling import asked_of
from router.params import chat_role, check_conversation, check_text
from router.service import InferenceService

SERVICE = "tandem.v1.Inference"


class InferenceFront(InferenceServicer):
    """One per router; every method runs on the router's event loop."""

    def __init__(self, service: InferenceService, max_request_bytes: int) -> None:
        self._service = service
        self._max_request_bytes = max_request_bytes

    def add_to(self, server: Any) -> None:
        """Register with a ``grpc.aio`` server."""
        add_InferenceServicer_to_server(self, server)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Stream the answer of one prompt."""
        try:
            made = await self._request(request, context.time_remaining())
        except Exception as error:
            await abort_with(context, self._service.failures.refused(error))
        try:
            echoing = set(range(made.n_choices)) if made.echo else set()
            async with aclosing(self._service.answer(made)) as answer:
                async for piece in answer:
                    message = encode_answer(piece, self._service.codec.token_bytes)
                    if isinstance(piece, Delta) and piece.choice in echoing:
                        echoing.remove(piece.choice)
                        self._echo(message.chunk, request, made)
                    await context.write(message)
        except Exception as error:
            await abort_with(context, self._service.failures.known(error))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Token ids of a text or a conversation."""
        try:
            self._service.intake.check_model(request.model)
            self._check_size(request)
            return pb.TokenizeResponse(
                token_ids=await self._tokens(request),
                max_model_len=self._service.intake.limits.max_model_len,
            )
        except Exception as error:
            await abort_with(context, self._service.failures.refused(error))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        """Text of token ids."""
        try:
            self._service.intake.check_model(request.model)
            if request.token_ids:
                self._service.intake.check_sequence(request.token_ids, "token_ids")
            text = self._service.codec.decode(
                request.token_ids, skip_special_tokens=request.skip_special_tokens
            )
            return pb.DetokenizeResponse(text=text)
        except Exception as error:
            await abort_with(context, self._service.failures.refused(error))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        """The one model that is served."""
        limits = self._service.intake.limits
        model = pb.ServedModel(
            id=limits.served_name,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
        )
        return pb.ListModelsResponse(models=[model])

    def _echo(self, chunk: pb.Chunk, request: pb.GenerateRequest, made: Request) -> None:
        """The prompt, as it was given and as the model saw it, on a choice's first chunk."""
        given = request.text if request.WhichOneof("input") == "text" else made.prompt
        chunk.prompt_text = self._service.prompt_text(made, given)
        chunk.prompt_token_ids.extend(made.prompt)

    async def _request(self, request: pb.GenerateRequest, remaining_s: float | None) -> Request:
        self._service.intake.check_model(request.model)
        self._check_size(request)
        asked = asked_of(request, remaining_s)
        kind = request.WhichOneof("input")
        if kind == "text":
            check_text(request.text, "text")
            return await self._service.from_text(request.text, asked, "text")
        if kind == "chat":
            messages = messages_of(request.chat)
            check_conversation(messages, "chat.messages")
            return await self._service.from_chat(messages, asked)
        if kind == "token_ids":
            return await self._service.from_tokens(request.token_ids.ids, asked, "token_ids")
        raise _no_input("text, chat or token_ids")

    async def _tokens(self, request: pb.TokenizeRequest) -> tuple[int, ...]:
        kind = request.WhichOneof("input")
        if kind == "text":
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return await self._service.encode(request.text, add_special_tokens=special)
        if kind == "chat":
            return await self._service.encode_chat(messages_of(request.chat))
        raise _no_input("text or chat")

    def _check_size(self, request: pb.GenerateRequest | pb.TokenizeRequest) -> None:
        size = request.ByteSize()
        if size > self._max_request_bytes:
            raise RequestTooLarge(
                f"the request has {size} bytes; this server reads {self._max_request_bytes}"
            )


def messages_of(chat: pb.Chat) -> tuple[dict[str, str], ...]:
    """The conversation as the chat template takes it."""
    if not chat.messages:
        raise InvalidArgument("chat.messages is empty", field="chat.messages")
    return tuple(
        {
            "role": chat_role(message.role, f"chat.messages[{i}].role"),
            "content": message.content,
        }
        for i, message in enumerate(chat.messages)
    )


def _no_input(choices: str) -> InvalidArgument:
    return InvalidArgument(f"the request has no input: set {choices}", field="input")
