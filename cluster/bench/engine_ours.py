"""Our arm of the engine benchmark: one worker's engine, composed as a worker composes it.

Owns the rows of its steps, which a scheduler would make in a worker. It must never reach past
``Engine``: what is measured is what serves.

Life of an ``OurEngine``: built once over a model; the pool is filled with noise, so that every
cell that a step reads holds something; ``measure`` per case and repeat; ``close``.
"""

from __future__ import annotations

import random
import time

import torch

from cluster.bench.engine_work import Case, Phase, Work
from cluster.worker.engine import Engine, load_engine
from cluster.worker.options import WorkerOptions
from protocol.errors import InternalError
from protocol.step import StepPlan, StepRow
from protocol.types import KvGeometry, Role, SamplingParams, TicketId

GREEDY = SamplingParams(max_tokens=1 << 20, ignore_eos=True)


def engine_options(
    model: str,
    work: Work,
    geometry: KvGeometry,
    *,
    dtype: str,
    threads: int,
    chunk: int,
    extra_pages: int = 0,
) -> WorkerOptions:
    """A worker that holds the largest case and no more. ``chunk``: tokens of a prefill step."""
    longest = geometry.pages_for(work.longest)
    pages = max(work.pages(geometry.page_size), longest, extra_pages)
    widest = max(work.widest, 1)
    return WorkerOptions(
        worker_id="bench-0",
        role=Role.DECODE,
        model_path=model,
        dtype=dtype,
        max_model_len=work.longest,
        page_size=geometry.page_size,
        kv_memory=str(pages * geometry.page_bytes),
        max_num_batched_tokens=max(chunk, widest + 1),
        max_num_seqs=widest,
        min_prefill_tokens=1,
        threads=threads,
    )


class OurEngine:
    """Tandem's engine at work on one case at a time."""

    name = "tandem"

    def __init__(self, options: WorkerOptions, work: Work, chunk: int) -> None:
        self._work, self._chunk = work, chunk
        self.engine: Engine = load_engine(options)
        self.engine.prepare_thread(options.threads)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.engine.pool.tensor.normal_()
        self._draw = random.Random(0)
        # As after a long life: a sequence's pages lie anywhere.
        self._pages = list(range(self.engine.pool.pages))
        self._draw.shuffle(self._pages)

    def measure(self, case: Case) -> float:
        """Tokens per second of one run of the case."""
        if case.phase is Phase.PREFILL:
            return self._prefill(case.context)
        return self._decode(case.batch, case.context)

    def close(self) -> None:
        """Let the device go."""
        self.engine.close()

    def _prefill(self, length: int) -> float:
        ticket_id = TicketId("prefill")
        tokens = self._tokens(length)
        table = self._table(0, length)
        begin = time.perf_counter()
        for start in range(0, length, self._chunk):
            piece = tokens[start : start + self._chunk]
            last = start + len(piece) == length
            self._step(
                StepRow(
                    ticket_id,
                    piece,
                    start,
                    table,
                    GREEDY if last else None,
                    history=tokens,
                    n_prompt=length,
                )
            )
        return length / (time.perf_counter() - begin)

    def _decode(self, batch: int, context: int) -> float:
        ids = [TicketId(f"sequence-{i}") for i in range(batch)]
        histories = [self._tokens(context) for _ in ids]
        tables = [self._table(i, context + self._work.steps) for i in range(batch)]
        begin = 0.0
        for step in range(self._work.steps + 1):
            if step == 1:  # the first one brings code and data near
                begin = time.perf_counter()
            at = context - 1 + step
            rows = [
                StepRow(
                    ticket_id,
                    history[-1:],
                    at,
                    table,
                    GREEDY,
                    token_index=step,
                    history=history,
                    n_prompt=context,
                )
                for ticket_id, history, table in zip(ids, histories, tables, strict=True)
            ]
            for history, tokens in zip(histories, self._step(*rows), strict=True):
                history += tokens
        return batch * self._work.steps / (time.perf_counter() - begin)

    def _step(self, *rows: StepRow) -> list[tuple[int, ...]]:
        result = self.engine.run(StepPlan({r.ticket_id: len(r.tokens) for r in rows}, rows))
        for row, got in zip(rows, result.rows, strict=True):
            if got.error is not None:
                raise InternalError(f"{row.ticket_id}: {got.error.message}")
        return [got.tokens for got in result.rows]

    def _tokens(self, n: int) -> list[int]:
        return [self._draw.randrange(self.engine.model.vocab_size) for _ in range(n)]

    def _table(self, sequence: int, n_tokens: int) -> list[int]:
        """A sequence's pages; with contexts of one length, no two sequences share one."""
        need = self.engine.model.geometry.pages_for(n_tokens)
        first = sequence * need
        return [self._pages[(first + i) % len(self._pages)] for i in range(need)]
