"""Prefill and decode workers as real processes with a tiny model, the router's core in the test.

Each answer is compared with plain transformers; after each test every page has returned.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import (
    RemoteWorker,
    Serving,
    assert_all_returned,
    options_of,
    serving,
    small_config,
    wait_until,
)
from tiny import reference_generate, reference_logits, tiny_llama

from cluster.bench.agreement import agree
from protocol.config import TandemConfig
from protocol.errors import TandemError
from protocol.types import FinishReason, Role

PAGE = 16
MAX_LEN = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=MAX_LEN)


@pytest.fixture(scope="module")
def config(model: Path) -> TandemConfig:
    return small_config(model)


@pytest.fixture(scope="module")
def running(config: TandemConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(config, log=tmp_path_factory.mktemp("logs")) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Serving) -> Iterator[Serving]:
    """The running cluster, with everything returned after the test."""
    yield running
    running.check_all_returned()


def a_prompt(n: int, seed: int = 0) -> list[int]:
    picked = random.Random(1000 * n + seed)
    return [picked.randrange(4, 320) for _ in range(n)]


def assert_agrees(model: Path, prompt: list[int], got: list[int], *, ends: bool = False) -> None:
    """The answer is transformers' own, by the agreement rule."""
    wanted = reference_generate(model, prompt, len(got), ignore_eos=not ends)
    verdict = agree(prompt, got, wanted, lambda ids: reference_logits(model, ids).numpy())
    assert verdict.ok, f"prompt of {len(prompt)} tokens: {verdict.reason}"


@pytest.mark.parametrize("n", [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 129, 300])
def test_the_answer_is_that_of_plain_transformers(cluster: Serving, model: Path, n: int) -> None:
    prompt = a_prompt(n)
    answer = cluster.core.submit(prompt, 12)
    assert len(answer.result()) == 12
    assert_agrees(model, prompt, answer.token_ids)
    assert answer.finish_reason is FinishReason.LENGTH
    stages = {timing.stage: timing.worker_id for timing in answer.timings}
    assert stages["prefill"] == "prefill-0" and stages["decode"] == "decode-0"


def test_one_token_comes_from_the_prefill_worker_and_is_the_only_one(
    cluster: Serving, model: Path
) -> None:
    prompt = a_prompt(2 * PAGE + 3)
    before = cluster.decode.report()["load"]["steps"]
    assert cluster.core.generate(prompt, 1) == reference_generate(model, prompt, 1)
    assert cluster.decode.report()["load"]["steps"] == before


def test_the_prompt_may_fill_the_context_to_the_last_token(cluster: Serving, model: Path) -> None:
    prompt = a_prompt(MAX_LEN - 3)
    got = cluster.core.generate(prompt, 3)
    assert len(got) == 3
    assert_agrees(model, prompt, got)


def test_an_end_token_ends_the_answer(cluster: Serving, model: Path) -> None:
    for seed in range(200):
        prompt = a_prompt(9, seed)
        expected = reference_generate(model, prompt, 24, ignore_eos=False)
        if len(expected) < 24:
            break
    else:
        pytest.fail("no prompt whose greedy answer has an end token: choose another seed")
    answer = cluster.core.submit(prompt, 24, ignore_eos=False)
    assert answer.result() == expected
    assert answer.finish_reason is FinishReason.STOP


def test_two_and_ten_requests_at_once(cluster: Serving, model: Path) -> None:
    for n in (2, 10):
        prompts = [a_prompt(3 + 17 * i, seed=i) for i in range(n)]
        answers = [cluster.core.submit(prompt, 8) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer.result()) == 8
            assert_agrees(model, prompt, answer.token_ids)
            assert answer.indexes == sorted(set(answer.indexes))


def test_a_seeded_sample_is_the_same_alone_and_in_company(cluster: Serving) -> None:
    prompt = a_prompt(40)
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 77}
    alone = cluster.core.generate(prompt, 10, **sampling)
    company = [cluster.core.submit(a_prompt(30 + i), 20) for i in range(4)]
    assert cluster.core.generate(prompt, 10, **sampling) == alone
    for answer in company:
        answer.result()


def test_hang_ups_at_random_moments_return_every_page(cluster: Serving, model: Path) -> None:
    picked = random.Random(5)
    for _ in range(8):
        answers = [
            cluster.core.submit(a_prompt(picked.randrange(1, 400), i), picked.randrange(1, 100))
            for i in range(8)
        ]
        for answer in answers:
            moment = picked.choice(["now", "soon", "first token", "end"])
            if moment == "soon":
                # Not a wait for anything: the moment of this hang-up is to be an arbitrary one.
                time.sleep(picked.uniform(0, 0.05))
            elif moment == "first token":
                assert answer.first.wait(30)
            elif moment == "end":
                assert answer.ended.wait(30)
            answer.cancel()
        for answer in answers:
            assert answer.ended.wait(30)
        cluster.check_all_returned()
    prompt = a_prompt(60)
    assert_agrees(model, prompt, cluster.core.generate(prompt, 6))


def test_a_report_says_what_a_person_needs(cluster: Serving) -> None:
    cluster.core.generate(a_prompt(30), 3)
    cluster.check_all_returned()
    prefill, decode = cluster.prefill.report(), cluster.decode.report()
    assert prefill["state"] == decode["state"] == "ready"
    assert prefill["healthy"] and prefill["reason"] == ""
    assert (prefill["links"], prefill["peers_out"], prefill["peers_in"]) == (1, 1, 0)
    assert (decode["links"], decode["peers_out"], decode["peers_in"]) == (1, 0, 1)
    assert prefill["compute_threads"] == decode["compute_threads"] == 1
    assert decode["info"]["role"] == Role.DECODE and decode["load"]["steps"] > 0


def test_nothing_grows_with_the_requests_served(cluster: Serving) -> None:
    def held() -> list[tuple[int, int, int]]:
        reports = [worker.report() for worker in cluster.workers]
        return [(r["threads"], r["fds"], r["links"]) for r in reports]

    cluster.core.generate(a_prompt(30), 3)
    before = held()
    for i in range(30):
        cluster.core.submit(a_prompt(40, seed=i), 4)
    last = cluster.core.submit(a_prompt(41), 4)
    last.result()
    cluster.check_all_returned()
    assert held() == before


# --- workers that die or freeze: a cluster of their own each -------------------------------------


@pytest.mark.long
def test_a_killed_prefill_worker_ends_its_requests_honestly_and_at_once(
    config: TandemConfig, tmp_path: Path
) -> None:
    with serving(config, log=tmp_path) as cluster:
        # Long prompts, so that some are computed, some on their way, some waiting.
        answers = [cluster.core.submit(a_prompt(400, seed=i), 40) for i in range(12)]
        answers[0].first.wait(30)
        cluster.prefill.kill()
        killed = time.monotonic()
        failed = 0
        for answer in answers:
            assert answer.ended.wait(config.timing.closed_or_killed_s)
            failed += answer.error is not None and answer.error.reason == "UNAVAILABLE"
        assert time.monotonic() - killed < config.timing.closed_or_killed_s + 3
        assert failed > 0
        assert_all_returned(cluster.decode)


@pytest.mark.long
def test_a_frozen_prefill_worker_ends_its_requests_in_time(
    config: TandemConfig, tmp_path: Path
) -> None:
    with serving(config, log=tmp_path) as cluster:
        answers = [cluster.core.submit(a_prompt(400, seed=i), 40) for i in range(12)]
        answers[0].first.wait(30)
        cluster.prefill.freeze()
        frozen = time.monotonic()
        bound_s = config.timing.peer_dead_s + 2
        failed = []
        for answer in answers:
            assert answer.ended.wait(max(0.1, frozen + bound_s - time.monotonic())), "too late"
            failed += [answer.error] if answer.error is not None else []
        assert failed and all(error.reason == "UNAVAILABLE" for error in failed)
        assert_all_returned(cluster.decode)
        cluster.prefill.thaw()
        assert_all_returned(cluster.prefill)


@pytest.mark.long
def test_a_killed_decode_worker_ends_its_requests_and_prefill_pages_return(
    config: TandemConfig, tmp_path: Path, model: Path
) -> None:
    with serving(config, log=tmp_path) as cluster:
        answers = [cluster.core.submit(a_prompt(300, seed=i), 40) for i in range(8)]
        answers[0].first.wait(30)
        cluster.decode.kill()
        for answer in answers:
            assert answer.ended.wait(config.timing.closed_or_killed_s + 2)
        assert all(isinstance(a.error, TandemError) for a in answers[1:])
        assert_all_returned(cluster.prefill)


@pytest.mark.long
def test_without_a_prefill_worker_the_decode_worker_computes_the_prompt(
    config: TandemConfig, tmp_path: Path, model: Path
) -> None:
    with serving(config, log=tmp_path) as cluster:
        cluster.prefill.kill()
        wait_until(
            lambda: any(w.session == "lost" for w in cluster.core.status().workers),
            what="the router knows",
        )
        prompt = a_prompt(50)
        assert_agrees(model, prompt, cluster.core.generate(prompt, 5))
        assert_all_returned(cluster.decode)


@pytest.mark.long
def test_a_frozen_decode_worker_ends_its_requests_and_prefill_pages_return(
    config: TandemConfig, tmp_path: Path
) -> None:
    with serving(config, log=tmp_path) as cluster:
        answers = [cluster.core.submit(a_prompt(400, seed=i), 40) for i in range(12)]
        answers[0].first.wait(30)
        cluster.decode.freeze()
        frozen = time.monotonic()
        bound_s = config.timing.peer_dead_s + 2
        for answer in answers:
            assert answer.ended.wait(max(0.1, frozen + bound_s - time.monotonic())), "too late"
        assert all(a.error is None or a.error.reason == "UNAVAILABLE" for a in answers)
        assert_all_returned(cluster.prefill)
        cluster.decode.thaw()
        assert_all_returned(cluster.decode)


def test_colocated_answers_are_the_same(model: Path, tmp_path: Path) -> None:
    with serving(small_config(model, mode="colocated"), log=tmp_path) as cluster:
        prompts = [a_prompt(n) for n in (1, PAGE, PAGE + 1, 300)]
        answers = [cluster.core.submit(prompt, 12) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer.result()) == 12
            assert_agrees(model, prompt, answer.token_ids)
        cluster.check_all_returned()


def test_a_model_that_is_not_there_is_one_sentence_and_exit_2(tmp_path: Path) -> None:
    (options, _) = options_of(small_config(tmp_path / "nowhere"))
    worker = RemoteWorker(options, tmp_path / "log")
    try:
        with pytest.raises(AssertionError, match="exit 2"):
            _ = worker.info
    finally:
        worker.stop()
    lines = (tmp_path / "log").read_text().strip().splitlines()
    assert "nowhere" in lines[-1] and "Traceback" not in "".join(lines)
