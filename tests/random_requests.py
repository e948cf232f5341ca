"""Random requests through a real role and a real runner; the pool is barely larger than one.

This file owns the requests (prompts that share beginnings, turns of one conversation, every way to
sample, choices, priorities, tenants), the reference answers and the loop around role and runner. It
must never look into role or runner: what a router could see, and the page account, is all.

The reference is transformers' plain model, one sequence at a time, with our sampler alone on its
logits. A request whose answer hangs on a near tie (it changes when the logits are shaken a little)
is not asked, so that every other answer must be equal token by token.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import tiny
import torch

from decode_worker.role import DecodeRole
from kernels.model import load_model
from kernels.runner import Runner
from kernels.sampling import Sampler
from kernels.settings import Draw
from kv_transfer.pages import Pages
from protocol.errors import ErrorInfo
from protocol.events import Count, Effect, FromRouter, ToRouter
from protocol.messages import Cancel, Done, Open, Stop, Tokens
from protocol.page_hash import root
from protocol.role import RoleOptions
from protocol.types import FinishReason, Outcome, Peer, SamplingParams, Ticket, TicketId

PAGE = 4
LONGEST = 96  # tokens of one sequence
POOL = 26  # pages: one longest sequence needs 24
ME = Peer("decode-0", "one", "d:1")
VOCAB = 320
SHAKE = 2e-3
OPEN_AT_MOST = 40


@dataclass(frozen=True)
class Spec:
    """One distinct request and its right answers, one per choice."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    answers: tuple[tuple[tuple[int, ...], FinishReason], ...]


@dataclass
class Asked:
    """One request as its router sees it."""

    spec: Spec
    got: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason] = field(default_factory=dict)
    stopped: dict[int, int] = field(default_factory=dict)  # choice -> tokens before its Stop
    cancelled: bool = False
    refused: bool = False  # it can never fit, and this must be said
    cached: int = 0
    prompt_logprobs: int = 0
    done: Done | None = None


class Reference:
    """Answers by the plain model."""

    def __init__(self, folder: Path, eos: tuple[int, ...]) -> None:
        self._folder, self._eos = folder, eos
        self._sampler = Sampler(VOCAB, torch.device("cpu"), eos)
        shakes = torch.rand(2, VOCAB, generator=torch.Generator().manual_seed(0))
        self._shakes = torch.cat([torch.zeros(1, VOCAB), SHAKE * shakes])

    def answer(
        self, prompt: tuple[int, ...], sampling: SamplingParams, choice: int
    ) -> tuple[tuple[int, ...], FinishReason] | None:
        """None where slightly other logits give another token."""
        tokens = list(prompt)
        for index in range(sampling.max_tokens):
            logits = tiny.reference_logits(self._folder, tokens)[-1]
            draws = [
                Draw(sampling, index, choice, row, None, tokens, len(prompt)) for row in range(3)
            ]
            drawn = self._sampler.sample(logits + self._shakes, draws)
            assert not any(d.error for d in drawn)
            if len({d.token for d in drawn}) > 1:
                return None
            tokens.append(drawn[0].token)
            ends = () if sampling.ignore_eos else self._eos
            if tokens[-1] in (*ends, *sampling.stop_token_ids):
                return tuple(tokens[len(prompt) :]), FinishReason.STOP
        return tuple(tokens[len(prompt) :]), FinishReason.LENGTH

    def spec(self, prompt: tuple[int, ...], sampling: SamplingParams, n: int) -> Spec | None:
        """The request with its answers; None where one of them hangs on a near tie."""
        answers = []
        for choice in range(n):
            if (answer := self.answer(prompt, sampling, choice)) is None:
                return None
            answers.append(answer)
        return Spec(prompt, sampling, tuple(answers))


def make_specs(reference: Reference, draw: random.Random, n: int) -> list[Spec]:
    """``n`` distinct requests; a third of them go on from another one's answer."""
    beginnings = [_tokens(draw, k) for k in (0, 0, 5, 8, 13, 24)]
    specs: list[Spec] = []
    while len(specs) < n:
        if specs and draw.random() < 0.35:
            earlier = draw.choice(specs)
            prompt = (*earlier.prompt, *earlier.answers[0][0], *_tokens(draw, draw.randint(1, 5)))
        else:
            prompt = (*draw.choice(beginnings), *_tokens(draw, draw.randint(1, 30)))
        longest = draw.random() < 0.05
        room = LONGEST - len(prompt)
        if room < 1:
            continue
        sampling = _sampling(draw, room if longest else min(room, draw.randint(1, 24)))
        choices = draw.choice((1, 1, 1, 2, 3)) if sampling.max_tokens < 16 else 1
        if (spec := reference.spec(prompt, sampling, choices)) is not None:
            specs.append(spec)
    return specs


def _sampling(draw: random.Random, max_tokens: int) -> SamplingParams:
    params = SamplingParams(max_tokens=max_tokens, seed=draw.randrange(1 << 40))
    kind = draw.random()
    if kind < 0.4:
        params = replace(params, ignore_eos=draw.random() < 0.5)
    else:
        params = replace(
            params,
            temperature=draw.choice((0.3, 0.8, 1.2)),
            top_p=draw.choice((1.0, 0.9)),
            top_k=draw.choice((0, 20)),
            min_p=draw.choice((0.0, 0.05)),
        )
    if draw.random() < 0.2:
        params = replace(params, repetition_penalty=1.3, presence_penalty=0.4)
    if draw.random() < 0.1:
        params = replace(params, min_tokens=min(4, max_tokens), frequency_penalty=0.3)
    if draw.random() < 0.1:
        params = replace(params, stop_token_ids=tuple(draw.sample(range(4, VOCAB), 20)))
    if draw.random() < 0.1:
        params = replace(params, prompt_logprobs=0)
    return params


def _tokens(draw: random.Random, n: int) -> tuple[int, ...]:
    return tuple(draw.randrange(4, VOCAB) for _ in range(n))


class Storm:
    """Requests come, are cancelled and stopped at random moments, until all have ended."""

    def __init__(self, folder: Path, seed: int, host_pages: int) -> None:
        self.draw = random.Random(seed)
        model = load_model(folder, max_model_len=LONGEST)
        info = model.info(PAGE)
        g = info.geometry
        shape = (g.layers, 2, PAGE, g.kv_heads, g.head_dim)
        kv = torch.full((POOL, *shape), float("nan"))
        host = torch.full((host_pages, *shape), float("nan")) if host_pages else None
        self.runner = Runner(model, kv, PAGE, host_kv=host)
        self.pages = Pages(POOL, PAGE)
        self.eos = info.eos_token_ids
        options = RoleOptions(
            # What a copy is believed to cost, at first: nothing, where copies are to be tried.
            page_bytes=1 if host_pages else g.page_bytes,
            max_num_batched_tokens=48,
            max_num_seqs=12,
            max_model_len=LONGEST,
            min_prefill_tokens=8,
            eos_token_ids=info.eos_token_ids,
            max_waiting=1 << 20,
            remembered=256,
            hash_root=root(info.fingerprint, g.dtype, PAGE),
            reserve_tokens=2,
            host_pages=host_pages,
        )
        self.role = DecodeRole(ME, self.pages, options)
        self.open: dict[TicketId, Asked] = {}
        self.ended: list[Asked] = []
        self.counts: Counter[str] = Counter()
        self.now = 0.0
        self._asked = 0

    def run(self, specs: list[Spec], n_requests: int) -> None:
        """Ask ``n_requests``, and go on until every one has its Done."""
        idle = 0
        while self._asked < n_requests or self.open:
            while self._asked < n_requests and len(self.open) < self.draw.randint(1, OPEN_AT_MOST):
                self._ask(self.draw.choice(specs))
            self._disturb()
            idle = 0 if self._step() else idle + 1
            assert idle < 50, f"nothing runs, {len(self.open)} requests wait"
            if self.counts["steps"] % 50 == 0:
                self.role.check_integrity()
                self._carry_out(self.role.tick(self.now))

    def _ask(self, spec: Spec) -> None:
        self._asked += 1
        refused = self.draw.random() < 0.01
        ticket = Ticket(
            TicketId(f"q{self._asked}"),
            None,
            ME,
            spec.prompt,
            len(spec.prompt),
            spec.sampling,
            n_choices=12 if refused else len(spec.answers),
            priority=self.draw.choice((0, 0, 1, 2)),
            order_key=self.draw.random() * 10,
            remaining_s=1e9,
            salt=self.draw.choice(("", "", "tenant")),
        )
        if refused:  # twelve choices of the longest sequence
            most = LONGEST - len(spec.prompt)
            ticket = replace(ticket, sampling=replace(spec.sampling, max_tokens=most))
        asked = Asked(spec, refused=refused)
        self.open[ticket.id] = asked
        self._carry_out(self.role.handle(FromRouter("r", Open(ticket)), self.now))

    def _disturb(self) -> None:
        if not self.open or self.draw.random() > 0.06:
            return
        ticket_id = self.draw.choice(list(self.open))
        asked = self.open[ticket_id]
        if self.draw.random() < 0.6:
            asked.cancelled = True
            message: Cancel | Stop = Cancel(ticket_id, "the client hung up")
        else:
            choice = self.draw.randrange(len(asked.spec.answers))
            if not asked.got.get(choice) or choice in asked.ends:
                return
            asked.stopped.setdefault(choice, len(asked.got[choice]))
            message = Stop(ticket_id, len(asked.got[choice]), choice)
        self._carry_out(self.role.handle(FromRouter("r", message), self.now))

    def _step(self) -> bool:
        self.now += 0.01
        plan = self.role.plan(self.now)
        if plan is None:
            return False
        self.counts["steps"] += 1
        self.counts["copies"] += len(plan.copies)
        result = self.runner.run(plan.rows, plan.copies)
        # A machine's own times would decide what is copied and what is computed again.
        result = replace(result, seconds=1e-3 * (1 + plan.n_tokens))
        if self.draw.random() < 0.3:
            self._disturb()  # while the step runs
        self._carry_out(self.role.step_done(result, self.now))
        if freed := self.pages.take_freed():
            self.runner.poison(freed)
        return True

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ToRouter(_, Tokens(items)):
                    for item in items:
                        self._take(item)
                case ToRouter(_, Done(ticket_id) as done):
                    asked = self.open.pop(ticket_id)
                    asked.done = done
                    self.ended.append(asked)
                case Count(metric, label, amount):
                    self.counts[f"{metric} {label}"] += amount

    def _take(self, item) -> None:
        asked = self.open[item.ticket_id]
        got = asked.got.setdefault(item.choice, [])
        assert item.index == len(got), "tokens come in order, each once"
        assert item.choice not in asked.ends, "nothing follows the end of a choice"
        if item.index == 0:
            asked.cached = max(asked.cached, item.cached_tokens)
            asked.prompt_logprobs += len(item.prompt_logprobs)
        got.extend(item.token_ids)
        if item.finish_reason is not None:
            asked.ends[item.choice] = item.finish_reason


def complaint(asked: Asked) -> str:
    """What is wrong with a request that has ended; empty if nothing is."""
    done, spec = asked.done, asked.spec
    if done is None:
        return "it has not ended"
    if asked.refused:
        right = done.outcome is Outcome.FAILED and _reason(done.error) == "NEVER_FITS"
        return "" if right or asked.cancelled else f"not refused but {done}"
    for choice, got in asked.got.items():
        want, reason = spec.answers[choice]
        if tuple(got) != want[: len(got)]:
            return f"choice {choice} of {spec} is {got}"
        if asked.ends.get(choice, reason) is not reason:
            return f"choice {choice} of {spec} ended by {asked.ends[choice]}"
        cut = asked.cancelled or choice in asked.stopped
        if not cut and len(got) != len(want):
            return f"choice {choice} of {spec} has only {got}"
    if asked.cancelled:
        return "" if done.outcome is not Outcome.FAILED else str(done)
    if done.outcome is not Outcome.OK:
        return str(done)
    if len(asked.got) != len(spec.answers):
        return f"{len(asked.got)} choices of {spec}"
    if asked.cached >= len(spec.prompt):
        return f"{asked.cached} cached tokens of a prompt of {len(spec.prompt)}"
    if spec.sampling.prompt_logprobs is not None:
        wanted = (len(spec.prompt) - 1) * len(spec.answers)
        if asked.cached or asked.prompt_logprobs not in (wanted, len(spec.prompt) - 1):
            return f"{asked.prompt_logprobs} prompt logprobs, {asked.cached} cached tokens: {spec}"
    return ""


def _reason(error: ErrorInfo | None) -> str:
    return error.reason if error is not None else ""
