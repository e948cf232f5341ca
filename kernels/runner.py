"""Runs one step on one device: rows in, tokens out.

This file owns the way of a step through batch, model, attention and sampling, on a KV pool that
it was handed and does not own. It must never know requests beyond the id that it passes through,
and never decide which rows run.

Life of a ``Runner``:
 1. Built once over a loaded model and the pool; checks that they fit and picks the attention.
 2. ``warm_up`` before the first real step, while no page is in use.
 3. ``run`` for every step, from one thread. Pages not named by the rows may be written by other
    threads meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from kernels.attention import choose
from kernels.attention_op import BACKENDS, PagedStep
from kernels.batch import pack
from kernels.model import LoadedModel, forward
from kernels.sampling import Draw, sample
from protocol.errors import InternalError
from protocol.step import RowResult, StepResult, StepRow
from protocol.types import SamplingParams, TicketId


class Runner:
    """See the file's head. ``attention`` is a line for the start-up log."""

    def __init__(
        self, model: LoadedModel, kv: torch.Tensor, page_size: int, backend: str | None = None
    ) -> None:
        """``kv`` is the pool ``[pages, layers, 2, page_size, kv_heads, head_dim]``, contiguous.

        ``backend`` names an attention backend instead of the best one (tests compare with the
        oracle). Raises ``InternalError`` for a pool of another shape, ``ConfigError`` when no
        backend can serve the model.
        """
        geometry = model.geometry(page_size)
        expected = (geometry.layers, 2, page_size, geometry.kv_heads, geometry.head_dim)
        if tuple(kv.shape[1:]) != expected or not kv.is_contiguous():
            raise InternalError(
                f"KV pool of shape {tuple(kv.shape)} where [pages, *{expected}] is needed"
            )
        if kv.dtype != getattr(torch, geometry.dtype) or kv.device.type != model.device.type:
            raise InternalError(
                f"KV pool is {kv.dtype} on {kv.device}, the model {geometry.dtype} on "
                f"{model.device}"
            )
        self._model = model
        self._kv = kv
        self._geometry = geometry
        offered = [b for b in BACKENDS if backend in (None, b.declaration.name)]
        self._backend, self.attention = choose(offered, model.needs, geometry, model.device.type)

    @torch.inference_mode()
    def run(self, rows: Sequence[StepRow]) -> StepResult:
        """Compute one step and write its KV. Blocks until the tokens are known.

        A row with non-finite logits fails alone; anything else that goes wrong raises.
        """
        started = time.perf_counter()
        vocab = self._model.described.vocab_size
        batch = pack(rows, self._geometry.page_size, len(self._kv), vocab, self._model.device)
        plan = self._backend.plan(batch, self._geometry, self._model.device)
        logits_SV = forward(
            self._model.module,
            batch.tokens_T,
            position_ids=batch.positions_T[None],
            logits_to_keep=batch.sampled_at,
            tandem_step=PagedStep(self._kv, plan, self._backend.declaration.name),
        )
        results = [RowResult()] * len(rows)
        if batch.sampled:
            sampled = [rows[r] for r in batch.sampled]
            draws = [Draw(row.sample, row.token_index) for row in sampled if row.sample]
            for r, token in zip(batch.sampled, sample(logits_SV, draws), strict=True):
                if token is None:
                    what = f"the model's output for {rows[r].ticket_id} is not finite"
                    results[r] = RowResult(error=InternalError(what).info())
                else:
                    results[r] = RowResult((token,))
        return StepResult(tuple(results), time.perf_counter() - started)

    def warm_up(self) -> None:
        """Run each kind of row once, so that the first request does not pay for it.

        Writes into page 0: call it only while no page is in use.
        """
        greedy = SamplingParams(max_tokens=1)
        drawn = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
        page = (0,)
        n = self._geometry.page_size
        self.run([StepRow(TicketId("warm-up"), [0] * n, 0, page, greedy)])
        self.run([StepRow(TicketId("warm-up"), [0] * max(1, n // 2), n - max(1, n // 2), page)])
        self.run([StepRow(TicketId("warm-up"), [0], 0, page, drawn)])

    def poison(self, pages: Iterable[int]) -> None:
        """Fill pages with NaN, so that whoever reads them after their free is found out."""
        at = torch.tensor(list(pages), dtype=torch.int64, device=self._kv.device)
        self._kv.index_fill_(0, at, float("nan"))
