"""From the device's table of logprobs to what an answer reports.

This file owns the words, not the arithmetic (that is the backends'). It must never look at edited
logits: logprobs are those of the model's raw distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.types import TokenLogprobs


def words(
    table: Sequence[Sequence[float]], tokens: Sequence[int], ks: Sequence[int], k: int
) -> list[TokenLogprobs]:
    """One ``TokenLogprobs`` per line of a table ``[L, 2 + 2 * k]`` as ``read_logprobs`` gives it.

    Line l reports its ``ks[l]`` likeliest tokens, at most ``k``.
    """
    return [
        TokenLogprobs(
            token_id=token,
            logprob=line[0],
            rank=int(line[1]),
            top=tuple(
                (int(i), p) for i, p in zip(line[2 : 2 + n], line[2 + k : 2 + k + n], strict=True)
            ),
        )
        for line, token, n in zip(table, tokens, ks, strict=True)
    ]
