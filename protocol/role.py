"""The interface between a worker's runtime and the role that it hosts.

A role decides; the runtime carries out. A role is a plain, single-threaded, deterministic
object: the runtime serialises all calls with one lock, hands in the time, and executes the
returned effects in order before it lets the lock go. A role never blocks, sleeps or does I/O.

Life of a role object:
 1. The runtime constructs it over the worker's ``Pages`` (``kv_transfer.pages``).
 2. ``handle`` for every event; ``tick`` at least every 100 ms, so that leases end on a clock.
 3. The engine thread calls ``plan``; not None means a step is running until ``step_done`` (or
    ``step_failed``). Pages used by that step are not freed in between, whatever arrives.
 4. ``check_integrity`` holds whenever no step is running.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from protocol.errors import ConfigError, ContextLengthExceeded, ErrorInfo, InvalidArgument
from protocol.events import Effect, Event
from protocol.step import StepPlan, StepResult
from protocol.types import Ticket, WorkerLoad


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """Everything that a role must be told about its worker. Sizes in bytes, times in seconds."""

    page_bytes: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    min_prefill_tokens: int = 64
    chunked_prefill: bool = True
    eos_token_ids: tuple[int, ...] = ()
    window: int = 8  # segments of one ticket announced and not yet received
    max_segment_bytes: int = 16 << 20  # so that windows and link deadlines mean something
    lease_s: float = 10.0
    link_op_s: float = 4.0
    heartbeat_s: float = 1.0
    max_waiting: int = 1024  # tickets without pages; the next one is refused
    max_parked: int = 256  # early offers per peer
    remembered: int = 4096  # finished requests whose late events are recognised
    retry_after_s: float = 1.0
    # Where page hashes start (``protocol.page_hash.root``, without a tenant); empty: no page is
    # ever found again, as the model is not known.
    hash_root: bytes = b""
    reserve_tokens: int = 64  # growth per running sequence that an admission leaves room for
    host_pages: int = 0  # pages of host memory for preempted sequences

    def __post_init__(self) -> None:
        """``ConfigError`` if a full step of decodes would leave prompts nothing."""
        need = self.max_num_seqs + self.min_prefill_tokens
        if self.max_num_batched_tokens < need:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is smaller than "
                f"max_num_seqs {self.max_num_seqs} + min_prefill_tokens {self.min_prefill_tokens} "
                f"= {need}"
            )

    def refusal(self, ticket: Ticket, *, one_sequence: bool = False) -> ErrorInfo | None:
        """Why no worker with these options could serve the ticket, or None.

        ``one_sequence``: its choices never run apart here, so any number of them will do.
        """
        if not ticket.tokens:
            return InvalidArgument("the prompt is empty", field="prompt").info()
        if not 1 <= ticket.n_prompt <= len(ticket.tokens):
            return InvalidArgument(
                f"n_prompt {ticket.n_prompt} of a ticket with {len(ticket.tokens)} tokens"
            ).info()
        if ticket.n_choices < 1 or (not one_sequence and ticket.n_choices > self.max_num_seqs):
            return InvalidArgument(
                f"{ticket.n_choices} choices; a worker runs 1 to {self.max_num_seqs} sequences",
                field="n",
            ).info()
        if len(ticket.tokens) - ticket.n_prompt >= ticket.sampling.max_tokens:
            return InvalidArgument(
                f"max_tokens {ticket.sampling.max_tokens} leaves nothing to generate",
                field="max_tokens",
            ).info()
        if not isfinite(ticket.order_key) or not isfinite(ticket.remaining_s):
            return InvalidArgument("order_key and remaining_s must be finite").info()
        if ticket.n_tokens_reserved > self.max_model_len:
            return ContextLengthExceeded(
                f"the prompt has {ticket.n_prompt} tokens and max_tokens is "
                f"{ticket.sampling.max_tokens}: together {ticket.n_tokens_reserved}, and this "
                f"model's context holds {self.max_model_len}"
            ).info()
        return None


class WorkerRole(Protocol):
    """What both ``PrefillRole`` and ``DecodeRole`` offer to the runtime."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event. Unknown, late and duplicate ones are counted and ignored."""
        ...

    def tick(self, now: float) -> list[Effect]:
        """End leases and deadlines that have passed."""
        ...

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. One step at a time."""
        ...

    def step_done(self, result: StepResult, now: float) -> list[Effect]:
        """The planned step ran."""
        ...

    def step_failed(self, error: ErrorInfo, now: float) -> list[Effect]:
        """The planned step raised: every request in it fails with ``error``."""
        ...

    def load(self, now: float) -> WorkerLoad:
        """The load report for routers and the controller."""
        ...

    def is_idle(self) -> bool:
        """No ticket, transfer or link operation is live."""
        ...

    def check_integrity(self) -> None:
        """Raise ``InternalError`` with the numbers if the conservation law does not hold."""
        ...
