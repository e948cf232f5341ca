"""The routers of the small world: they open tickets, hear tokens, and hold answers to the truth."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.handoff_device import logprob_of
from sim.handoff_traffic import EOS, answer

from protocol.events import FromRouter, RouterLost
from protocol.messages import Cancel, Done, Open, Stop, TokenItem, Tokens
from protocol.types import FinishReason, Outcome, Ticket, TicketId

if TYPE_CHECKING:
    from sim.handoff_world import Worker, World


@dataclass(eq=False)
class Record:
    """What the routers know about one ticket, by choice where it has several."""

    ticket: Ticket
    router_id: str
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    done: dict[str, Done] = field(default_factory=dict)
    cached_tokens: int = 0

    @property
    def peers(self) -> list[str]:
        """The workers of its legs."""
        return [p.worker_id for p in (self.ticket.receiver, self.ticket.sender) if p is not None]


class Routers:
    """All routers of one world, and every ticket they opened."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.records: dict[TicketId, Record] = {}
        self.failures: Counter[str] = Counter()  # reasons of receivers

    def open(self, ticket: Ticket, router_id: str = "r0") -> None:
        """Open both legs at once, as a router does."""
        record = self.records[ticket.id] = Record(ticket, router_id)
        for worker_id in record.peers:
            self.say(router_id, worker_id, Open(ticket))

    def say(self, router_id: str, worker_id: str, message: Open | Cancel | Stop) -> None:
        """Say something on a Session."""
        worker = self.world.workers[worker_id]
        event = FromRouter(router_id, message)
        self.world.in_order(router_id, worker_id, lambda: self.world.submit(worker, event))

    def lose(self, router_id: str) -> None:
        """Its Sessions end everywhere."""
        for name, worker in self.world.workers.items():
            submit: Callable[[], None] = lambda w=worker: self.world.submit(  # noqa: E731
                w, RouterLost(router_id)
            )
            self.world.in_order(router_id, name, submit)

    def cancel(self, ticket_id: TicketId, cause: str = "the client went away") -> None:
        """End every leg that is not over."""
        record = self.records[ticket_id]
        for worker_id in record.peers:
            if worker_id not in record.done:
                self.say(record.router_id, worker_id, Cancel(ticket_id, cause))

    def hear(self, worker: Worker, message: object) -> None:
        """A worker said this on a Session."""
        name = worker.me.worker_id
        if isinstance(message, Tokens):
            for item in message.items:
                record = self.records[item.ticket_id]
                assert name not in record.done, f"after Done: {item}"
                assert worker.me == record.ticket.receiver, item
                self._take(record, item)
        elif isinstance(message, Done):
            record = self.records[message.ticket_id]
            assert name not in record.done, f"a second Done: {message}"
            assert (message.error is not None) == (message.outcome is Outcome.FAILED)
            record.done[name] = message
            if message.outcome is not Outcome.OK:
                self.cancel(message.ticket_id, "the other leg ended")

    def _take(self, record: Record, item: TokenItem) -> None:
        ticket, choice = record.ticket, item.choice
        tokens = record.tokens[choice]
        assert 0 <= choice < ticket.n_choices and choice not in record.reasons, item
        assert item.index == len(tokens) + len(ticket.tokens) - ticket.n_prompt, item
        if not tokens:
            record.cached_tokens = item.cached_tokens
            if ticket.sampling.prompt_logprobs is not None:
                said = [logprob_of(t) for t in ticket.tokens[1 : ticket.n_prompt]]
                assert list(item.prompt_logprobs) == said, item
            self._check_cached(record)
        if ticket.sampling.logprobs is not None:
            assert list(item.logprobs) == [logprob_of(t) for t in item.token_ids], item
        tokens += item.token_ids
        if item.finish_reason is not None:
            record.reasons[choice] = item.finish_reason
        elif self.world.random.random() < self.world.chances.stop:
            record.stopped.add(choice)
            stop = Stop(item.ticket_id, item.index, choice)
            self.say(record.router_id, ticket.receiver.worker_id, stop)

    def _check_cached(self, record: Record) -> None:
        """``cached_tokens`` are prompt tokens that nobody computed for this ticket."""
        ticket = record.ticket
        computed: Counter[int] = Counter()
        for worker_id in record.peers:
            computed += self.world.workers[worker_id].device.computed[ticket.id]
        never = sum(not computed[i] for i in range(ticket.n_prompt))
        assert record.cached_tokens == never, ticket.id

    def check_end(self) -> Counter[str]:
        """After the last event: one Done per leg, right tokens. How the tickets ended."""
        outcomes: Counter[str] = Counter()
        for record in self.records.values():
            ticket = record.ticket
            assert set(record.done) == set(record.peers), (ticket.id, record.done)
            done = record.done[ticket.receiver.worker_id]
            outcomes[done.outcome] += 1
            if done.error is not None:
                self.failures[done.error.reason] += 1
            for choice in range(ticket.n_choices):
                expected, tokens = answer(ticket, choice), record.tokens[choice]
                assert tokens == expected[: len(tokens)], ticket.id
                if done.outcome is not Outcome.OK or choice in record.stopped:
                    continue
                assert tokens == expected
                eos = tokens[-1] == EOS and not ticket.sampling.ignore_eos
                reason = FinishReason.STOP if eos else FinishReason.LENGTH
                assert record.reasons[choice] is reason
        return outcomes
