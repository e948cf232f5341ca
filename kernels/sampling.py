"""Draws the next token of each row of a step, as each row's ``SamplingParams`` asks.

This file owns the order of things: logits are edited (penalties, ``logit_bias``, ``min_tokens``,
the grammar), then divided by the temperature, cut by ``min_p``, ``top_k`` and ``top_p``, and drawn
from; greedy takes the largest edited logit. The draw is Gumbel-max: the token with the largest
scaled logit plus noise is an exact draw from the softmax, and the noise is a hash, so a row draws
the same token alone or in any batch, on any worker, before and after a failover.

It must never let one row's trouble touch another: a row whose logits are not finite, whose grammar
does not compile or of which no token is left fails alone. Logprobs are of the raw logits, which
are therefore never written to; rows to be edited are copied.

Shape suffixes: S rows of logits, V vocabulary, Q draws, E edited draws, L logprobs asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from kernels import draw_torch
from kernels.edits import Edit, Edits, check_bias, collect, edited, penalised, too_early
from kernels.grammar import GrammarState, TokenTable
from kernels.logprobs import words
from kernels.sequence_state import SequenceStates, TokenCounts
from kernels.settings import NOT_FINITE, NOTHING_LEFT, OK, SPOILED, Draw, settings_of
from protocol.errors import ErrorInfo, InternalError, InvalidArgument, TandemError
from protocol.types import SamplingParams, TokenLogprobs

_UNEDITED = Draw(SamplingParams(max_tokens=1), 0)  # stands in for a draw that failed


@dataclass(slots=True)
class Drawn:
    """One draw's outcome: a token, its logprobs if asked for; or an error and nothing else. Never
    changed once it is made (see ``Draw``)."""

    token: int = -1
    logprobs: TokenLogprobs | None = None
    error: ErrorInfo | None = None


class Sampler:
    """Draws for one model on one device. From one thread; see the file's head."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: tuple[int, ...] = (),
        tokens: TokenTable | None = None,
        compiled: bool = True,
    ) -> None:
        """``tokens`` are needed for grammars only. Not ``compiled``: torch even on a CPU."""
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokens = tokens
        self._backend: ModuleType = draw_torch
        if device.type == "cpu" and compiled:
            from kernels import draw_cpu  # half a second of numba that a GPU does not need

            self._backend = draw_cpu
        self._counts = SequenceStates(_new_counts)
        self._grammars = SequenceStates(self._new_grammar)

    @property
    def remembered(self) -> int:
        """How many sequences something is kept of."""
        return max(len(self._counts), len(self._grammars))

    def sample(self, logits_SV: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """Draw once for each of ``draws``. Waits for the device once, at the end.

        ``logits_SV``: any float dtype, on the sampler's device; not written to.
        """
        logits_SV = logits_SV.float()
        token_Q, status_Q, failed = self.queue(logits_SV, draws)
        return self._outcomes(logits_SV, draws, token_Q, status_Q, failed)

    def queue(
        self, logits_SV: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, ErrorInfo]]:
        """Put the draws on the device, without waiting: tokens and statuses ``[Q]``.

        Draws that fail before they get there are in the dictionary, by their place.
        """
        self._counts.next_step()
        self._grammars.next_step()
        failed: dict[int, ErrorInfo] = {}
        changed = [q for q, d in enumerate(draws) if edited(d)]
        plain = list(range(len(draws)))
        if changed:
            plain = [q for q, d in enumerate(draws) if not edited(d)]
        token_Q, status_Q = self._draw(logits_SV, [draws[q] for q in plain])
        if changed:
            made = {}
            for q in changed:
                try:
                    made[q] = self._edit(draws[q])
                except TandemError as error:
                    failed[q] = error.info()
                    made[q] = Edit(_UNEDITED)
            changed_token, changed_status = self._draw(
                logits_SV,
                [draws[q] for q in changed],
                collect(list(made.values()), self._vocab_size, self._eos_token_ids),
            )
            token_Q = torch.cat([token_Q, changed_token])
            status_Q = torch.cat([status_Q, changed_status])
            back = np.empty(len(draws), dtype=np.int64)  # from the draws' order to this one
            back[[*plain, *changed]] = np.arange(len(draws))
            at = draw_torch.to_device(back, token_Q.device)
            token_Q, status_Q = token_Q[at], status_Q[at]
        return token_Q, status_Q, failed

    def _draw(
        self, logits_SV: torch.Tensor, draws: Sequence[Draw], edits: Edits | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = np.array([d.row for d in draws], dtype=np.int64)
        drawn: tuple[torch.Tensor, torch.Tensor] = self._backend.draw_tokens(
            logits_SV, rows, settings_of(draws), edits
        )
        return drawn

    def _edit(self, draw: Draw) -> Edit:
        """What changes for this draw. Raises a ``TandemError`` where it cannot be said."""
        check_bias(draw.params, self._vocab_size)
        counts = self._counts.of(draw) if penalised(draw.params) else None
        if draw.params.grammar is None:
            return Edit(draw, counts, may_end=not too_early(draw))
        state = self._grammars.of(draw)
        # A complete grammar has no way on but to end, whatever min_tokens says.
        return Edit(draw, counts, state.mask(), state.complete or not too_early(draw))

    def _outcomes(
        self,
        logits_SV: torch.Tensor,
        draws: Sequence[Draw],
        token_Q: torch.Tensor,
        status_Q: torch.Tensor,
        failed: dict[int, ErrorInfo],
    ) -> list[Drawn]:
        asked = [q for q, d in enumerate(draws) if d.params.logprobs is not None]
        k = max((min(draws[q].params.logprobs or 0, self._vocab_size) for q in asked), default=0)
        if asked:
            rows = np.array([draws[q].row for q in asked], dtype=np.int64)
            at = draw_torch.to_device(np.array(asked, dtype=np.int64), token_Q.device)
            table_L = self._backend.read_logprobs(logits_SV, rows, token_Q[at], k)
        else:
            table_L = token_Q.new_empty(0, 2, dtype=torch.float64)
        tokens, statuses, table = _to_host(token_Q, status_Q, table_L)
        logprobs: dict[int, TokenLogprobs] = {}
        if asked:
            good = [(q, line) for q, line in zip(asked, table, strict=True) if statuses[q] == OK]
            ks = [min(draws[q].params.logprobs or 0, k) for q, _ in good]
            some = words([line for _, line in good], [tokens[q] for q, _ in good], ks, k)
            logprobs = dict(zip([q for q, _ in good], some, strict=True))
        if not failed and not any(statuses) and not asked:
            return [Drawn(token) for token in tokens]
        return [
            Drawn(error=error)
            if (error := failed.get(q) or _error(draws[q], status))
            else Drawn(token, logprobs.get(q))
            for q, (token, status) in enumerate(zip(tokens, statuses, strict=True))
        ]

    def prompt_table(self, logits_SV: torch.Tensor, tokens: Sequence[int], k: int) -> torch.Tensor:
        """Logprobs of ``tokens``, one per row of raw logits, as ``read_logprobs`` gives them.

        Stays on the device: the tables of all slices of a chunk are fetched together.
        """
        token_S = draw_torch.to_device(np.array(tokens, dtype=np.int64), logits_SV.device)
        table_S: torch.Tensor = self._backend.read_logprobs(
            logits_SV.float(), np.arange(len(tokens)), token_S, min(k, self._vocab_size)
        )
        return table_S

    def prompt_logprobs(
        self, tables: Sequence[torch.Tensor], tokens: Sequence[int], k: int
    ) -> list[TokenLogprobs]:
        """What ``prompt_table`` gave for all of ``tokens``, in words. Waits for the device.

        Raises ``InternalError`` for logits that are not finite.
        """
        table = torch.cat(list(tables)).cpu()
        if not torch.isfinite(table).all():
            raise InternalError("the model's output is not finite")
        k = min(k, self._vocab_size)
        return words(table.tolist(), tokens, [k] * len(tokens), k)

    def _new_grammar(self, draw: Draw, _prompt: Sequence[int]) -> GrammarState:
        if self._tokens is None:
            raise InvalidArgument("this worker's model has no tokenizer for grammars")
        if draw.params.grammar is None:
            raise InternalError("a grammar's state for a draw without a grammar")
        return self._tokens.start(draw.params.grammar)


def _new_counts(draw: Draw, prompt: Sequence[int]) -> TokenCounts:
    """Only the repetition penalty looks at the prompt."""
    return TokenCounts(prompt if draw.params.repetition_penalty != 1.0 else ())


def _to_host(
    token_Q: torch.Tensor, status_Q: torch.Tensor, table_L: torch.Tensor
) -> tuple[list[int], list[int], list[list[float]]]:
    """Everything in one transfer (doubles hold token ids exactly): the step's only wait."""
    if token_Q.device.type == "cpu":
        return token_Q.tolist(), status_Q.tolist(), table_L.tolist()
    packed = torch.cat([token_Q.double(), status_Q.double(), table_L.flatten()]).cpu().numpy()
    n = len(token_Q)
    tokens, statuses = packed[: 2 * n].astype(np.int64).reshape(2, n).tolist()
    return tokens, statuses, packed[2 * n :].reshape(tuple(table_L.shape)).tolist()


def _error(draw: Draw, status: int) -> ErrorInfo | None:
    """What a status means for a row, in a sentence."""
    if status == OK:
        return None
    of = "" if draw.ticket_id is None else f" for {draw.ticket_id}"
    if status == NOT_FINITE:
        return InternalError(f"the model's output{of} is not finite").info()
    p = draw.params
    by = [
        name
        for name, used in (
            ("the grammar", p.grammar is not None),
            ("logit_bias", bool(p.logit_bias)),
            ("min_tokens", too_early(draw)),
        )
        if used
    ]
    names = " and ".join(by) or "its penalties"
    if status == SPOILED:
        return InvalidArgument(f"logit_bias and penalties give numbers without meaning{of}").info()
    if status == NOTHING_LEFT:
        return InvalidArgument(f"no token is left{of}: {names} exclude every one").info()
    raise InternalError(f"a draw of status {status}")
