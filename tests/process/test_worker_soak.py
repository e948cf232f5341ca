"""Hundreds of requests with hang-ups and cut links at random moments: no wrong token, no leak.

The model echoes its KV, so an answer built on somebody else's page, a stale one or a poisoned one
is a wrong answer. The decode worker's pool holds little more than one long request.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import pytest
from kv_echo import EchoModel, echo_answer, echo_prompt
from serving import Core, options_of, small_config, wait_until

from cluster.worker.process import WorkerProcess

REQUESTS = 400
AT_ONCE = 12


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_every_answer_is_right_or_an_honest_error_and_everything_returns(seed: int) -> None:
    picked = random.Random(seed)
    config = small_config(
        Path("none"), router={"limits": {"max_queued": REQUESTS}}, timing={"lease_s": 2.0}
    )
    decode_options, prefill_options = options_of(config)
    with ExitStack() as stack:
        decode = WorkerProcess(decode_options, engine=EchoModel(pages=30).engine)
        prefill = WorkerProcess(prefill_options, engine=EchoModel(pages=40).engine)
        stack.callback(decode.stop)
        stack.callback(prefill.stop)
        infos = [decode.start(), prefill.start()]
        core = stack.enter_context(Core(config, infos[0].model))
        core.set_workers(infos)
        core.generate(echo_prompt(20, seed=0), 2)
        held = [(w.report().threads, w.report().links) for w in (prefill, decode)]

        right = hung_up = failed = 0
        running = []
        for number in range(REQUESTS):
            prompt = echo_prompt(picked.randrange(1, 330), seed=1000 * seed + number)
            n = picked.randrange(1, 40)
            running.append((prompt, n, core.submit(prompt, n), picked.random() < 0.4))
            if picked.random() < 0.02:
                prefill._links.close("decode-0", outgoing=True, cause="cut by the test")
            if picked.random() < 0.02:
                decode._links.close("prefill-0", outgoing=False, cause="cut by the test")
            while len(running) >= AT_ONCE or (number == REQUESTS - 1 and running):
                prompt, n, answer, hang_up = running.pop(picked.randrange(len(running)))
                if hang_up:
                    picked.choice([lambda: None, lambda a=answer: a.first.wait(1)])()
                    answer.cancel()
                    assert answer.ended.wait(30)
                    got = answer.token_ids
                    assert got == echo_answer(prompt, n)[: len(got)]
                    hung_up += 1
                    continue
                assert answer.ended.wait(60), f"no end: {prefill.report()} {decode.report()}"
                if answer.error is None:
                    assert answer.token_ids == echo_answer(prompt, n)
                    right += 1
                else:
                    assert answer.error.reason == "UNAVAILABLE", answer.error
                    got = answer.token_ids
                    assert got == echo_answer(prompt, n)[: len(got)]
                    failed += 1
        print(f"{right} right, {hung_up} hung up, {failed} failed with a cut link")
        assert right > REQUESTS / 4 and hung_up > REQUESTS / 5

        prompt = echo_prompt(50, seed=9)
        assert core.generate(prompt, 4) == echo_answer(prompt, 4)
        for worker in (prefill, decode):
            wait_until(lambda w=worker: w.report().idle, what=f"{worker.options.worker_id} idle")
            report = worker.report()
            assert report.integrity == "" and report.healthy, report
            assert report.load.free_pages == report.info.total_pages, report
        for worker, (threads, links) in zip((prefill, decode), held, strict=True):
            wait_until(
                lambda w=worker, t=threads: w.report().threads <= t, what=f"{threads} threads"
            )
            assert worker.report().links == links
        assert len(decode._rendezvous) == 1
