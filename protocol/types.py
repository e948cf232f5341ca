"""The nouns that every part of Tandem shares, as frozen dataclasses.

This file owns the meaning of ids, tickets, sampling parameters, worker descriptions and the
shape of the KV cache. It must never import anything that does I/O: the same values travel
through the live system, the simulator and the property tests.

Units: seconds for every duration and instant, bytes for sizes, tokens for lengths. Instants are
monotonic and have meaning only inside one process; across processes *remaining* time travels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Role(StrEnum):
    """What a worker does now. Run-time state of a worker, not its class."""

    PREFILL = "prefill"
    DECODE = "decode"


class Mode(StrEnum):
    """How requests are spread over the pools (YAML ``mode``)."""

    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"


class FinishReason(StrEnum):
    """Why an answer ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class Outcome(StrEnum):
    """How one leg of a request ended on one worker."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, order=True)
class TicketId:
    """One attempt at one request; the key of every transfer and every sequence."""

    request_id: str
    attempt: int = 1

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


class GrammarKind(StrEnum):
    """In which language a grammar is written."""

    JSON_OBJECT = "json_object"  # any JSON object; the text is empty
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"  # a JSON list of strings


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer's text must match."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn and when an answer ends.

    ``temperature`` 0 is greedy. ``top_p`` 1, ``top_k`` 0 and ``min_p`` 0 keep every candidate.
    ``seed`` is always set: the router draws one when the client gives none. ``max_tokens`` counts
    every output token, the first one included, whichever worker sampled it.

    Presence and frequency penalties look at output tokens, the repetition penalty at the prompt's
    too. ``logit_bias`` is added to the raw logits. No end-of-sequence and no ``stop_token_ids``
    token is drawn before ``min_tokens`` output tokens. ``logprobs`` k asks for the logprob of each
    output token and of the k likeliest, by the raw distribution; None for none at all;
    ``prompt_logprobs`` is the same for the prompt.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's natural-log probability in the model's raw distribution, and the likeliest ones.

    ``rank`` is 1 for the likeliest token. ``top`` holds (token id, logprob), likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker as another worker or a router addresses it."""

    worker_id: str
    incarnation: str
    endpoint: str  # host:port of its gRPC server (Session and Transfer)


@dataclass(frozen=True, slots=True)
class Ticket:
    """One attempt at one request, as both legs receive it.

    ``sender`` None means local: the receiver computes the prompt itself. Tokens after
    ``n_prompt`` are output in every respect; ``n_delivered`` of them have reached the client.
    ``order_key`` is computed once by the router; smaller is more urgent. ``remaining_s`` is what
    is left of the request's deadline.
    """

    id: TicketId
    sender: Peer | None
    receiver: Peer
    tokens: tuple[int, ...]
    n_prompt: int
    sampling: SamplingParams
    n_delivered: int = 0
    n_choices: int = 1
    priority: int = 0
    order_key: float = 0.0
    ttft_target_s: float | None = None
    remaining_s: float = 600.0
    salt: str = ""

    @property
    def n_tokens_reserved(self) -> int:
        """Most tokens whose KV this ticket can ever need on its receiver."""
        return self.n_prompt + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of the KV cache: ``[pages, layers, 2, page_size, kv_heads, head_dim]``.

    ``dtype`` is torch's name without the prefix, e.g. ``float32``.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token position, all layers, keys and values."""
        return self.layers * 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: one contiguous run."""
        return self.token_bytes * self.page_size

    def pages_for(self, n_tokens: int) -> int:
        """Pages that hold ``n_tokens`` token positions."""
        return -(-n_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class PageRef:
    """A page as a transfer names it: its index and the generation it had then."""

    page: int
    generation: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the router and the workers must agree on about the model.

    ``fingerprint`` covers config, safetensors headers, sizes and sampled bytes, not the name.
    """

    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    geometry: KvGeometry


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker that is up: who it is, where it listens and what it can hold.

    ``notes`` are for people: what was chosen at its start, and why, a line each.
    """

    worker_id: str
    incarnation: str
    role: Role
    endpoint: str
    model: ModelInfo
    total_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    node: str = ""
    pid: int = 0
    threads: int = 1
    notes: tuple[str, ...] = ()

    @property
    def peer(self) -> Peer:
        """How others address this worker."""
        return Peer(self.worker_id, self.incarnation, self.endpoint)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's state by its own clock; rides on every Session heartbeat."""

    running: int = 0
    waiting: int = 0
    transferring: int = 0
    free_pages: int = 0
    total_pages: int = 0
    steps: int = 0  # raised by every finished step: "made progress"
    step_s: float = 0.0  # moving average of a step's time
    busy_s: float = 0.0  # how long the step now running has run; 0 when idle
    queued_tokens: int = 0  # prompt tokens not yet computed


@dataclass(frozen=True, slots=True)
class Request:
    """One generation as a client's front end hands it to the router's core."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    priority: int = 0
    deadline_s: float = 600.0  # remaining time
    skip_special_tokens: bool = True
    n_choices: int = 1
    echo: bool = False  # the front end puts the prompt before every choice
    prompt_only: bool = False  # the one token that the engine draws is neither shown nor counted


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as OpenAI reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StageTiming:
    """How long one stage of a request took and on which worker."""

    stage: str  # queue, prefill, transfer, reserve, decode
    worker_id: str
    seconds: float


def stage_timings(
    worker_id: str, marks: Iterable[tuple[str, float | None, float | None]]
) -> tuple[StageTiming, ...]:
    """The stages of which both the begin and the end (instants of one clock) are known."""
    return tuple(
        StageTiming(stage, worker_id, end - begin)
        for stage, begin, end in marks
        if begin is not None and end is not None
    )


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: new tokens and the text that they completed (may be empty).

    ``logprobs`` has one entry per token, and the first piece of a choice ``prompt_logprobs``,
    where asked for. Where there are several choices, the last piece of each says how it ended.
    """

    index: int  # sequence number of the first of ``token_ids`` within the choice, from 0
    token_ids: tuple[int, ...]
    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | None = None


@dataclass(frozen=True, slots=True)
class Complete:
    """The end of an answer, of all its choices; the reason is the first choice's."""

    finish_reason: FinishReason
    usage: Usage
    matched_stop: str | None = None
    timings: tuple[StageTiming, ...] = field(default=())
