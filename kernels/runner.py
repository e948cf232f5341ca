"""Runs one step on one device: copies and rows in, tokens out.

This file owns the way of a step through page copies, batch, model, attention and sampling, on a KV
pool that it was handed and does not own. It must never know requests beyond the id that it passes
through, and never decide which rows run. Nothing in a step waits for the device but its end.

Life of a ``Runner``:
 1. Built once over a loaded model and the pool; checks that they fit and picks the attention.
 2. ``warm_up`` before the first real step, while no page is in use.
 3. ``run`` for every step, from one thread. Pages not named by the step may be written by other
    threads meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch

from kernels.attention import Plan
from kernels.attention_op import BACKENDS, PagedStep
from kernels.attention_trial import fastest
from kernels.batch import Batch, pack
from kernels.grammar import TokenTable
from kernels.graphs import decode_graphs
from kernels.model import LoadedModel, forward
from kernels.page_copies import PageCopier
from kernels.page_tables import PageTables
from kernels.prompt_logprobs import HiddenStates, prompt_logprobs
from kernels.sampling import Drawn, Sampler
from kernels.settings import Draw
from protocol.errors import ErrorInfo, InternalError, TandemError
from protocol.step import PageCopy, RowResult, StepResult, StepRow
from protocol.types import Grammar, GrammarKind, SamplingParams, TicketId, TokenLogprobs

_NOTHING = RowResult()


class Runner:
    """See the file's head. ``attention`` is a line for the start-up log."""

    def __init__(
        self,
        model: LoadedModel,
        kv: torch.Tensor,
        page_size: int,
        backend: str | None = None,
        host_kv: torch.Tensor | None = None,
    ) -> None:
        """``kv`` is the pool ``[pages, layers, 2, page_size, kv_heads, head_dim]``, contiguous.

        ``backend`` names an attention backend instead of the best one (tests compare with the
        oracle). ``host_kv`` holds pages that left the pool (pinned for a GPU). Raises
        ``InternalError`` for a pool of another shape, ``ConfigError`` when no backend can serve
        the model.
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
        heads: int = model.described.config.get_text_config().num_attention_heads
        self._backend, self.attention = fastest(
            offered,
            model.needs,
            geometry,
            heads // model.described.geometry(page_size).kv_heads,
            model.device,
        )
        described = model.described
        self._graphs, words = decode_graphs(
            self._forward,
            model.module,
            self._backend,
            geometry,
            model.device,
            described.max_model_len,
            model.ranks,
        )
        self.attention += words
        self._copier = PageCopier(kv, host_kv)
        self._tables = PageTables()
        ends = described.eos_token_ids
        tokens = None
        if model.path is not None:
            tokens = TokenTable(model.path, described.vocab_size, ends)
        self._sampler = Sampler(described.vocab_size, model.device, ends, tokens)

    @torch.inference_mode()
    def run(self, rows: Sequence[StepRow], copies: Sequence[PageCopy] = ()) -> StepResult:
        """Carry out ``copies``, then compute one step and write its KV; either may be empty.

        Blocks until the tokens are known. A row whose token cannot be drawn (logits that are not
        finite, a grammar without a way on) fails alone; anything else that goes wrong raises.
        """
        started = time.perf_counter()
        self._copier.run(copies)
        results = self._run(rows) if rows else []
        return StepResult(tuple(results), time.perf_counter() - started)

    def _run(self, rows: Sequence[StepRow]) -> list[RowResult]:
        vocab = self._model.described.vocab_size
        size, pages = self._geometry.page_size, len(self._kv)
        batch = pack(rows, size, pages, vocab, torch.device("cpu"), self._tables)
        asking = [r for r, row in enumerate(rows) if row.prompt_logprobs is not None]
        states = HiddenStates(self._model.module) if asking else None
        with states.kept() if states else nullcontext():
            graphed = self._graphs.run(batch) if self._graphs and not states else None
            logits_SV = self._logits(batch) if graphed is None else graphed
        results = self._draw(rows, batch.sampled, logits_SV)
        if states:
            for r in asking:
                results[r] = self._with_prompt_logprobs(
                    states, rows[r], int(batch.q_start_R[r]), results[r]
                )
        return results

    def _logits(self, batch: Batch) -> torch.Tensor:
        """Logits ``[S, vocab]`` of the sampled rows, in their order."""
        plan = self._backend.plan(batch, self._geometry, self._model.device)
        there = batch.to(self._model.device)
        return self._forward(there.tokens_T, there.positions_T, there.sampled_at, plan)

    def _forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        sampled_at: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor:
        return forward(
            self._model.module,
            tokens_T,
            position_ids=positions_T[None],
            logits_to_keep=sampled_at,
            tandem_step=PagedStep(self._kv, plan, self._backend.declaration.name),
        )

    def _draw(
        self, rows: Sequence[StepRow], sampled: Sequence[int], logits_SV: torch.Tensor
    ) -> list[RowResult]:
        """The results of all rows; ``logits_SV`` has one line for each of the ``sampled``."""
        results = [_NOTHING] * len(rows)
        draws = [
            Draw(row.sample, row.token_index, choice, s, row.ticket_id, row.history, row.n_prompt)
            for s, row in enumerate([rows[r] for r in sampled])
            if row.sample
            for choice in row.choices
        ]
        if not draws:
            return results
        drawn = iter(self._sampler.sample(logits_SV, draws))
        for r in sampled:
            results[r] = _row_result([next(drawn) for _ in rows[r].choices])
        return results

    def _with_prompt_logprobs(
        self, states: HiddenStates, row: StepRow, q_start: int, result: RowResult
    ) -> RowResult:
        if result.error:
            return result
        try:
            found: tuple[TokenLogprobs, ...] = prompt_logprobs(states, row, q_start, self._sampler)
        except TandemError as e:
            return RowResult(error=e.info())
        return RowResult(result.tokens, result.logprobs, found)

    def warm_up(self) -> None:
        """Run each kind of row once, so that no request pays for what happens once.

        Writes into page 0: call it only while no page is in use.
        """
        if self._graphs:
            self._graphs.record()
        n = self._geometry.page_size
        a, history = TicketId("warm-up"), [0] * (n + 1)
        half = max(1, n // 2)
        greedy = SamplingParams(max_tokens=1)
        drawn = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, logprobs=1)
        edited = SamplingParams(
            max_tokens=1, repetition_penalty=1.1, logit_bias=((0, 0.5),), min_tokens=1,
            stop_token_ids=(0,),
        )  # fmt: skip
        self.run([StepRow(a, [0] * n, 0, (0,), greedy, history=history, n_prompt=n)])
        if self._model.device.type == "cuda":  # long contexts are cut by kernels of their own
            deep = min(self._model.described.max_model_len, 8192) - 2
            pages = (0,) * self._geometry.pages_for(deep + 2)
            for tokens in ([0], [0, 0]):
                self.run([StepRow(a, tokens, deep, pages)])
        self.run([StepRow(a, [0] * half, n - half, (0,))])
        last = StepRow(a, [0], 0, (0,), drawn, 0, (0, 1), history, 1)
        self.run([last])
        asks = StepRow(a, [0], 0, (0,), edited, 0, (0,), history, 1, prompt_logprobs=1)
        self.run([asks])
        in_grammar = SamplingParams(max_tokens=1, grammar=Grammar(GrammarKind.JSON_OBJECT))
        self.run([StepRow(a, [0], 0, (0,), in_grammar, 0, (0,), history, 1)])

    def poison(self, pages: Iterable[int]) -> None:
        """Fill pages with NaN, so that whoever reads them after their free is found out."""
        at = torch.tensor(list(pages), dtype=torch.int64, device=self._kv.device)
        self._kv.index_fill_(0, at, float("nan"))


def _row_result(drawn: Sequence[Drawn]) -> RowResult:
    """One row's choices together; one failed choice fails the row."""
    if len(drawn) == 1 and drawn[0].error is None and drawn[0].logprobs is None:
        return RowResult((drawn[0].token,))
    errors: list[ErrorInfo] = [d.error for d in drawn if d.error]
    if errors:
        return RowResult(error=errors[0])
    return RowResult(tuple(d.token for d in drawn), tuple(d.logprobs for d in drawn if d.logprobs))
