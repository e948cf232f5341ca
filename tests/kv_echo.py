"""A model without a model: its next token depends on every byte of KV that it should depend on.

This file owns an ``Engine`` for ``WorkerProcess`` that writes each token into its place in the
pool and, to draw one, reads every place of the sequence back. A page that was lost, mixed up,
read too early or poisoned changes the answer; ``echo_answer`` says what it must be. No weights,
no transformers, no randomness.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from cluster.worker.engine import Engine
from cluster.worker.options import WorkerOptions
from kv_transfer.pool import KvPool
from protocol.step import CopyKind, PageCopy, RowResult, StepPlan, StepResult
from protocol.types import KvGeometry, ModelInfo, TokenLogprobs

VOCAB = 997
MAX_LEN = 512


def echo_next(tokens: Sequence[int], choice: int = 0) -> int:
    """The token that follows these."""
    return (sum((i + 1) * (t + 1) for i, t in enumerate(tokens)) + choice) % VOCAB


def echo_answer(prompt: Sequence[int], n: int, choice: int = 0) -> list[int]:
    """The whole answer of ``n`` tokens."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(echo_next(tokens, choice))
    return tokens[len(prompt) :]


class EchoModel:
    """Makes echo engines. ``gate``, when cleared, holds every step that starts."""

    def __init__(
        self, *, pages: int = 64, page_size: int = 16, fingerprint: str = "echo", layers: int = 2
    ) -> None:
        self.geometry = KvGeometry(
            layers=layers, kv_heads=1, head_dim=4, page_size=page_size, dtype="float32"
        )
        self.pages = pages
        self.info = ModelInfo(fingerprint, VOCAB, MAX_LEN, (), self.geometry)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.tokens_computed = 0

    def engine(self, options: WorkerOptions) -> Engine:
        """The engine of one worker, with a pool of its own."""
        pool = KvPool(self.geometry, self.pages)
        return Engine(
            model=self.info,
            pool=pool,
            run=self._runner(pool),
        )

    def _runner(self, pool: KvPool) -> Callable[[StepPlan], StepResult]:
        size = self.geometry.page_size
        host: dict[int, torch.Tensor] = {}

        def copy(one: PageCopy) -> None:
            match one.kind:
                case CopyKind.WITHIN:
                    pool.tensor[one.target] = pool.tensor[one.source]
                case CopyKind.TO_HOST:
                    host[one.target] = pool.tensor[one.source].clone()
                case CopyKind.FROM_HOST:
                    pool.tensor[one.target] = host.pop(one.source)

        def run(plan: StepPlan) -> StepResult:
            self.entered.set()
            if not self.gate.wait(30):
                raise RuntimeError("nobody opened the gate")
            for one in plan.copies:
                copy(one)
            results: list[RowResult] = []
            for row in plan.rows:
                for i, token in enumerate(row.tokens, row.start):
                    pool.tensor[row.pages[i // size], :, :, i % size] = token + 1
                self.tokens_computed += len(row.tokens)
                results.append(RowResult())
                if row.sample is None:
                    continue
                end = row.start + len(row.tokens)
                held = [pool.tensor[row.pages[i // size], :, :, i % size] for i in range(end)]
                total = 0
                for i, place in enumerate(held):
                    low, high = float(place.min()), float(place.max())
                    # Every layer, half and element must agree, or the page is not what it says.
                    total += (i + 1) * int(low) if low == high else -1
                tokens = tuple((total + choice) % VOCAB for choice in row.choices)
                asked = row.sample.logprobs is not None
                logprobs = tuple(TokenLogprobs(t, 0.0, 1) for t in tokens) if asked else ()
                results[-1] = RowResult(tokens, logprobs)
            return StepResult(tuple(results))

        return run


def echo_prompt(n: int, seed: int) -> tuple[int, ...]:
    """A prompt of ``n`` tokens, different for every seed."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist())
