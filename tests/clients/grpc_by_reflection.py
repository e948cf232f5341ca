"""A gRPC client that knows nothing but an address: everything is learned by server reflection.

It shares no generated code with the server, as a foreign client would not.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc


class ReflectedClient:
    """Calls methods by full name with plain keyword arguments."""

    def __init__(self, address: str, *more: tuple[str, int]) -> None:
        """``more`` are further channel options."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0), *more]
        self.channel = grpc.insecure_channel(address, options=options)
        self._pool = descriptor_pool.DescriptorPool()
        self._known: set[str] = set()
        self._stub = reflection_pb2_grpc.ServerReflectionStub(self.channel)

    def services(self) -> list[str]:
        """Full names of all services."""
        answer = self._ask(list_services="")
        return [service.name for service in answer.list_services_response.service]

    def call(self, service: str, method: str, fields: dict, **options: Any) -> Any:
        """Start a call; returns what grpc returns: a message, or an iterator of messages."""
        self._learn_symbol(service)
        described = self._pool.FindServiceByName(service).methods_by_name[method]
        request_type = message_factory.GetMessageClass(described.input_type)
        response_type = message_factory.GetMessageClass(described.output_type)
        make = self.channel.unary_stream if described.server_streaming else self.channel.unary_unary
        function = make(
            f"/{service}/{method}",
            request_serializer=request_type.SerializeToString,
            response_deserializer=response_type.FromString,
        )
        return function(request_type(**fields), **options)

    def close(self) -> None:
        """End the channel."""
        self.channel.close()

    def _ask(self, **fields: str) -> Any:
        request = reflection_pb2.ServerReflectionRequest(**fields)
        return next(iter(self._stub.ServerReflectionInfo(iter([request]))))

    def _learn_symbol(self, symbol: str) -> None:
        if symbol not in self._known:
            self._known.add(symbol)
            self._add(self._ask(file_containing_symbol=symbol))

    def _add(self, answer: Any) -> None:
        for raw in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            if file.name in self._known:
                continue
            self._known.add(file.name)
            for dependency in file.dependency:
                if dependency not in self._known:
                    self._add(self._ask(file_by_filename=dependency))
            self._pool.Add(file)
