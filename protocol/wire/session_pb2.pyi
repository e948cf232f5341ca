from protocol.wire import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_OBJECT: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_LARK: _ClassVar[GrammarKind]
    GRAMMAR_KIND_CHOICE: _ClassVar[GrammarKind]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_OK: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]
    OUTCOME_CANCELLED: _ClassVar[Outcome]
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_OBJECT: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_LARK: GrammarKind
GRAMMAR_KIND_CHOICE: GrammarKind
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_OK: Outcome
OUTCOME_FAILED: Outcome
OUTCOME_CANCELLED: Outcome

class RouterFrame(_message.Message):
    __slots__ = ("open", "stop", "cancel", "heartbeat")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    open: Open
    stop: Stop
    cancel: Cancel
    heartbeat: RouterHeartbeat
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., heartbeat: _Optional[_Union[RouterHeartbeat, _Mapping]] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("queued", "reserved", "tokens", "sender_lost", "done", "heartbeat")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENDER_LOST_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    queued: Queued
    reserved: Reserved
    tokens: TokenBatch
    sender_lost: SenderLost
    done: Done
    heartbeat: WorkerHeartbeat
    def __init__(self, queued: _Optional[_Union[Queued, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., tokens: _Optional[_Union[TokenBatch, _Mapping]] = ..., sender_lost: _Optional[_Union[SenderLost, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., heartbeat: _Optional[_Union[WorkerHeartbeat, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    text: str
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_ids", "biases", "min_tokens", "stop_token_ids", "logprobs", "prompt_logprobs", "grammar")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    ignore_eos: bool
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_ids: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    prompt_logprobs: int
    grammar: Grammar
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., ignore_eos: bool = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_ids: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("id", "sender", "receiver", "tokens", "n_prompt", "sampling", "n_delivered", "n_choices", "priority", "order_key", "ttft_target_s", "remaining_s", "salt")
    ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    N_DELIVERED_FIELD_NUMBER: _ClassVar[int]
    N_CHOICES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ORDER_KEY_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.TicketId
    sender: _common_pb2.Peer
    receiver: _common_pb2.Peer
    tokens: _containers.RepeatedScalarFieldContainer[int]
    n_prompt: int
    sampling: Sampling
    n_delivered: int
    n_choices: int
    priority: int
    order_key: float
    ttft_target_s: float
    remaining_s: float
    salt: str
    def __init__(self, id: _Optional[_Union[_common_pb2.TicketId, _Mapping]] = ..., sender: _Optional[_Union[_common_pb2.Peer, _Mapping]] = ..., receiver: _Optional[_Union[_common_pb2.Peer, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., n_prompt: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., n_delivered: _Optional[int] = ..., n_choices: _Optional[int] = ..., priority: _Optional[int] = ..., order_key: _Optional[float] = ..., ttft_target_s: _Optional[float] = ..., remaining_s: _Optional[float] = ..., salt: _Optional[str] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("ticket_id", "index", "choice")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ticket_id: _common_pb2.TicketId
    index: int
    choice: int
    def __init__(self, ticket_id: _Optional[_Union[_common_pb2.TicketId, _Mapping]] = ..., index: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("ticket_id", "cause")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    ticket_id: _common_pb2.TicketId
    cause: str
    def __init__(self, ticket_id: _Optional[_Union[_common_pb2.TicketId, _Mapping]] = ..., cause: _Optional[str] = ...) -> None: ...

class RouterHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Queued(_message.Message):
    __slots__ = ("ticket_id", "ahead", "reason")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ticket_id: _common_pb2.TicketId
    ahead: int
    reason: str
    def __init__(self, ticket_id: _Optional[_Union[_common_pb2.TicketId, _Mapping]] = ..., ahead: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("ticket_id", "pages")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    ticket_id: _common_pb2.TicketId
    pages: int
    def __init__(self, ticket_id: _Optional[_Union[_common_pb2.TicketId, _Mapping]] = ..., pages: _Optional[int] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("request_ids", "attempts", "indexes", "counts", "token_ids", "finish_reasons", "choices", "cached_tokens", "logprob_counts", "prompt_logprob_counts", "logprobs", "prompt_logprobs")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_COUNTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROB_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reasons: _containers.RepeatedScalarFieldContainer[_common_pb2.FinishReason]
    choices: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    logprob_counts: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprob_counts: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _common_pb2.LogprobColumns
    prompt_logprobs: _common_pb2.LogprobColumns
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reasons: _Optional[_Iterable[_Union[_common_pb2.FinishReason, str]]] = ..., choices: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., logprob_counts: _Optional[_Iterable[int]] = ..., prompt_logprob_counts: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_common_pb2.LogprobColumns, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.LogprobColumns, _Mapping]] = ...) -> None: ...

class SenderLost(_message.Message):
    __slots__ = ("ticket_id", "error")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ticket_id: _common_pb2.TicketId
    error: _common_pb2.Failure
    def __init__(self, ticket_id: _Optional[_Union[_common_pb2.TicketId, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("ticket_id", "outcome", "timings", "error")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ticket_id: _common_pb2.TicketId
    outcome: Outcome
    timings: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageTiming]
    error: _common_pb2.Failure
    def __init__(self, ticket_id: _Optional[_Union[_common_pb2.TicketId, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., timings: _Optional[_Iterable[_Union[_common_pb2.StageTiming, _Mapping]]] = ..., error: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class WorkerHeartbeat(_message.Message):
    __slots__ = ("worker_id", "incarnation", "load")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    load: _common_pb2.WorkerLoad
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...
