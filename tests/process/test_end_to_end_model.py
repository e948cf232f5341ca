"""The real model: disaggregated, colocated and transformers' own ``generate`` give one answer.

20 prompts of 1 to 2,000 tokens, greedy, compared by the agreement rule; near ties are counted
and printed. Skipped where ``tandem model fetch smollm2-135m`` has not been run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from serving import ROOT, Serving, serving, small_config
from tiny import reference_generate, reference_logits

from cluster.bench.agreement import agree, verdict
from cluster.bench.prompts import long_prompt
from protocol.config import TandemConfig
from router.text import TextCodec

FOLDER = ROOT / "models" / "smollm2-135m"
PAGE = 16
LENGTHS = (
    *(1, 2, 7, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 100),
    *(127, 128, 129, 255, 256, 257, 511, 513, 1000, 2000),
)
NEW_TOKENS = 16

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (FOLDER / "config.json").is_file(), reason="models/smollm2-135m is not fetched"
    ),
]


def a_config(mode: str) -> TandemConfig:
    pool = {"max_num_batched_tokens": 256, "max_num_seqs": 16, "min_prefill_tokens": 64}
    return small_config(
        FOLDER,
        mode=mode,
        model={"max_model_len": 2048},
        kv={"memory": "400MiB"},
        pools={"prefill": pool, "decode": pool},
        timing={"heartbeat_s": 1, "peer_dead_s": 10, "lease_s": 60, "link_op_s": 10},
    )


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    assert len(LENGTHS) == 20
    codec = TextCodec(str(FOLDER))
    return [long_prompt(codec, n, number=n) for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [reference_generate(FOLDER, prompt, NEW_TOKENS, attention="sdpa") for prompt in prompts]


def answers(cluster: Serving, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """All prompts: a few alone, then the rest ten at a time."""
    started = time.monotonic()
    got = [cluster.core.generate(prompt, NEW_TOKENS, deadline_s=300) for prompt in prompts[:4]]
    for first in range(4, len(prompts), 10):
        group = [
            cluster.core.submit(prompt, NEW_TOKENS, deadline_s=300)
            for prompt in prompts[first : first + 10]
        ]
        got += [answer.result(300) for answer in group]
    cluster.check_all_returned()
    print(f"{len(prompts)} prompts in {time.monotonic() - started:.0f} s")
    return got


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
def test_twenty_prompts_agree_with_transformers(
    mode: str, prompts: Sequence[Sequence[int]], expected: Sequence[list[int]], tmp_path: Path
) -> None:
    with serving(a_config(mode), log=tmp_path) as cluster:
        got = answers(cluster, prompts)
        if mode == "disaggregated":
            assert cluster.prefill.report()["load"]["steps"] > 0
    near = []
    for prompt, ours, wanted in zip(prompts, got, expected, strict=True):
        agreement = agree(
            prompt, ours, wanted, lambda ids: reference_logits(FOLDER, ids, "sdpa").numpy()
        )
        assert agreement.ok, f"prompt of {len(prompt)} tokens: {agreement.reason}"
        near += [(len(prompt), index) for index in agreement.near_ties]
    total = verdict(len(LENGTHS) * NEW_TOKENS, [index for _, index in near], "float32")
    print(f"{mode}: {total.reason}; near ties (prompt length, token): {near}")
    assert total.ok, total.reason
