from protocol.wire import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SenderFrame(_message.Message):
    __slots__ = ("hello", "offer", "announce", "commit", "abort", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    offer: Offer
    announce: Announce
    commit: Commit
    abort: Abort
    heartbeat: TransferHeartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., announce: _Optional[_Union[Announce, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., heartbeat: _Optional[_Union[TransferHeartbeat, _Mapping]] = ...) -> None: ...

class ReceiverFrame(_message.Message):
    __slots__ = ("hello", "grant", "window", "sealed", "abort", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    grant: Grant
    window: Window
    sealed: Sealed
    abort: Abort
    heartbeat: TransferHeartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., window: _Optional[_Union[Window, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., heartbeat: _Optional[_Union[TransferHeartbeat, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "endpoint", "fingerprint", "geometry", "wire_dtype", "protocol_version", "link_epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LINK_EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    endpoint: str
    fingerprint: str
    geometry: _common_pb2.KvGeometry
    wire_dtype: str
    protocol_version: int
    link_epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., endpoint: _Optional[str] = ..., fingerprint: _Optional[str] = ..., geometry: _Optional[_Union[_common_pb2.KvGeometry, _Mapping]] = ..., wire_dtype: _Optional[str] = ..., protocol_version: _Optional[int] = ..., link_epoch: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("ticket_id", "n_tokens", "predicted_start_s")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_START_S_FIELD_NUMBER: _ClassVar[int]
    ticket_id: _common_pb2.TicketId
    n_tokens: int
    predicted_start_s: float
    def __init__(self, ticket_id: _Optional[_Union[_common_pb2.TicketId, _Mapping]] = ..., n_tokens: _Optional[int] = ..., predicted_start_s: _Optional[float] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("ticket_id", "segment", "first_page", "n_pages", "n_bytes")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    N_PAGES_FIELD_NUMBER: _ClassVar[int]
    N_BYTES_FIELD_NUMBER: _ClassVar[int]
    ticket_id: _common_pb2.TicketId
    segment: int
    first_page: int
    n_pages: int
    n_bytes: int
    def __init__(self, ticket_id: _Optional[_Union[_common_pb2.TicketId, _Mapping]] = ..., segment: _Optional[int] = ..., first_page: _Optional[int] = ..., n_pages: _Optional[int] = ..., n_bytes: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("ticket_id", "first_tokens", "n_pages", "n_bytes", "checksums", "logprobs", "prompt_logprobs", "cached_tokens")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_PAGES_FIELD_NUMBER: _ClassVar[int]
    N_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ticket_id: _common_pb2.TicketId
    first_tokens: _containers.RepeatedScalarFieldContainer[int]
    n_pages: int
    n_bytes: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _common_pb2.LogprobColumns
    prompt_logprobs: _common_pb2.LogprobColumns
    cached_tokens: int
    def __init__(self, ticket_id: _Optional[_Union[_common_pb2.TicketId, _Mapping]] = ..., first_tokens: _Optional[_Iterable[int]] = ..., n_pages: _Optional[int] = ..., n_bytes: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_common_pb2.LogprobColumns, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.LogprobColumns, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("ticket_id", "error")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ticket_id: _common_pb2.TicketId
    error: _common_pb2.Failure
    def __init__(self, ticket_id: _Optional[_Union[_common_pb2.TicketId, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class TransferHeartbeat(_message.Message):
    __slots__ = ("live",)
    LIVE_FIELD_NUMBER: _ClassVar[int]
    live: _containers.RepeatedCompositeFieldContainer[_common_pb2.TicketId]
    def __init__(self, live: _Optional[_Iterable[_Union[_common_pb2.TicketId, _Mapping]]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("ticket_id", "pages", "window", "prefix_tokens")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ticket_id: _common_pb2.TicketId
    pages: int
    window: int
    prefix_tokens: int
    def __init__(self, ticket_id: _Optional[_Union[_common_pb2.TicketId, _Mapping]] = ..., pages: _Optional[int] = ..., window: _Optional[int] = ..., prefix_tokens: _Optional[int] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("ticket_id", "segments")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ticket_id: _common_pb2.TicketId
    segments: int
    def __init__(self, ticket_id: _Optional[_Union[_common_pb2.TicketId, _Mapping]] = ..., segments: _Optional[int] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("ticket_id",)
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ticket_id: _common_pb2.TicketId
    def __init__(self, ticket_id: _Optional[_Union[_common_pb2.TicketId, _Mapping]] = ...) -> None: ...

class StoreSetRequest(_message.Message):
    __slots__ = ("link", "key", "value")
    LINK_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    link: str
    key: str
    value: bytes
    def __init__(self, link: _Optional[str] = ..., key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class StoreSetResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreGetRequest(_message.Message):
    __slots__ = ("link", "key", "timeout_s")
    LINK_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    link: str
    key: str
    timeout_s: float
    def __init__(self, link: _Optional[str] = ..., key: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class StoreGetResponse(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    def __init__(self, value: _Optional[bytes] = ...) -> None: ...

class StoreCheckRequest(_message.Message):
    __slots__ = ("link", "keys")
    LINK_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    link: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, link: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...

class StoreCheckResponse(_message.Message):
    __slots__ = ("present",)
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    present: bool
    def __init__(self, present: bool = ...) -> None: ...

class StoreDeleteRequest(_message.Message):
    __slots__ = ("link", "key")
    LINK_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    link: str
    key: str
    def __init__(self, link: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class StoreDeleteResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    def __init__(self, deleted: bool = ...) -> None: ...
