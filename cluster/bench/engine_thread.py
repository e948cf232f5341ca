"""What the engine thread spends around the model: deciding, packing, sampling, delivering.

Owns one measurement: CPU seconds of the thread that runs steps, split at the borders of the model.
A step here is what it is in a worker: ``role.plan``, ``Engine.run``, ``role.step_done``. It must
never count the model's own time, nor that of other threads.

Where the model begins is seen by torch's hooks on the outermost module, so that no part of the
engine has to know that it is watched.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch.nn.modules import module as torch_modules

from cluster.worker.engine import Engine
from decode_worker.role import DecodeRole
from kv_transfer.pages import Pages
from protocol.errors import InternalError
from protocol.events import FromRouter
from protocol.messages import Open
from protocol.role import RoleOptions
from protocol.types import Peer, SamplingParams, Ticket, TicketId

PROMPT_TOKENS = 8
_ME = Peer("bench-0", "bench", "127.0.0.1:1")


@dataclass(slots=True)
class Border:
    """CPU instants of this thread at which the outermost module of a step began and ended."""

    depth: int = 0
    entered: float = 0.0
    left: float = 0.0
    inside: float = 0.0
    calls: int = 0

    def enter(self, _module: Any, _arguments: Any) -> None:
        """Before any module's forward."""
        if self.depth == 0:
            now = time.thread_time()
            self.entered = self.entered or now
            self._began = now
        self.depth += 1

    def leave(self, _module: Any, _arguments: Any, _output: Any) -> None:
        """After any module's forward, also one that raised."""
        self.depth -= 1
        if self.depth == 0:
            self.left = time.thread_time()
            self.inside += self.left - self._began
            self.calls += 1

    _began: float = field(default=0.0)


@contextmanager
def watched() -> Iterator[Border]:
    """A ``Border`` that is told of every module call in this process."""
    border = Border()
    hooks = (
        torch_modules.register_module_forward_pre_hook(border.enter),
        torch_modules.register_module_forward_hook(border.leave, always_call=True),
    )
    try:
        yield border
    finally:
        for hook in hooks:
            hook.remove()


def outside_the_model(engine: Engine, batch: int, steps: int) -> dict[str, Any]:
    """Median CPU milliseconds per step of ``batch`` greedy sequences, outside of the model.

    ``role_ms`` is ``plan`` and ``step_done``, ``before_ms`` from the plan to the model,
    ``after_ms`` from the logits to the tokens; None where no module was called.
    """
    role = DecodeRole(
        _ME,
        Pages(engine.pool.pages, engine.pool.geometry.page_size),
        _options(engine, batch, steps),
    )
    draw = random.Random(0)
    for i in range(batch):
        prompt = tuple(draw.randrange(engine.model.vocab_size) for _ in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=steps + 2, ignore_eos=True)
        ticket = Ticket(TicketId(f"q{i}"), None, _ME, prompt, PROMPT_TOKENS, sampling)
        role.handle(FromRouter("bench", Open(ticket)), time.monotonic())
    parts: dict[str, list[float]] = {n: [] for n in ("role", "before", "after", "outside")}
    called = True
    while True:
        with watched() as border:
            begin = time.thread_time()
            plan = role.plan(time.monotonic())
            if plan is None:
                break
            planned = time.thread_time()
            result = engine.run(plan)
            ran = time.thread_time()
            role.step_done(result, time.monotonic())
            end = time.thread_time()
        if any(r.error for r in result.rows):
            raise InternalError(f"a step failed: {next(r.error for r in result.rows if r.error)}")
        if plan.n_tokens != batch or len(plan.rows) != batch:
            continue  # the prompts
        called = called and border.calls > 0
        parts["role"].append(planned - begin + end - ran)
        parts["before"].append(border.entered - planned)
        parts["after"].append(ran - border.left)
        parts["outside"].append(end - begin - border.inside)
    role.check_integrity()
    if not role.is_idle() or not parts["role"]:
        raise InternalError(f"{batch} sequences did not run side by side")
    names = parts if called else ("role",)
    ms = {f"{name}_ms": round(median(parts[name]) * 1e3, 3) for name in names}
    return (
        {"batch": batch, "steps": len(parts["role"])}
        | dict.fromkeys(f"{name}_ms" for name in parts)
        | ms
    )


def pages_needed(batches: tuple[int, ...], steps: int, page_size: int) -> int:
    """Pages that ``outside_the_model`` fills."""
    return max(batches, default=0) * -(-(PROMPT_TOKENS + steps + 4) // page_size)


def _options(engine: Engine, batch: int, steps: int) -> RoleOptions:
    return RoleOptions(
        page_bytes=engine.model.geometry.page_bytes,
        max_num_batched_tokens=max(512, 2 * batch, batch * PROMPT_TOKENS),
        max_num_seqs=batch,
        max_model_len=engine.model.max_model_len,
        min_prefill_tokens=1,
        eos_token_ids=engine.model.eos_token_ids,
    )
