"""Two whole workers in this process, with a model that only echoes its KV: the hand-off end to end.

Real gRPC, real links, the real roles and dispatcher; only the arithmetic is replaced, by one in
which every byte of KV counts (``kv_echo``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from kv_echo import EchoModel, echo_answer, echo_prompt
from serving import WAIT_S, Core, options_of, small_config, wait_until

from cluster.worker.process import WorkerProcess
from kv_transfer.transport import Transport
from kv_transfer.transports.loopback import LoopbackTransport
from protocol.config import TandemConfig
from protocol.errors import ConfigError, TandemError, Unauthenticated, Unavailable
from protocol.types import FinishReason

PAGE = 16


@dataclass
class Pair:
    """A prefill and a decode worker with a model each, and a core in front."""

    config: TandemConfig
    prefill: WorkerProcess
    decode: WorkerProcess
    prefill_model: EchoModel
    decode_model: EchoModel
    core: Core

    def check_all_returned(self) -> None:
        for worker in (self.prefill, self.decode):
            wait_until(lambda w=worker: w.report().idle, what=f"{worker.options.worker_id} idle")
            report = worker.report()
            assert report.integrity == "" and report.healthy, report
            assert report.load.free_pages == report.info.total_pages, report


def a_config(**changes) -> TandemConfig:
    return small_config(Path("no-model-needed"), **changes)


@contextmanager
def pair(
    config: TandemConfig | None = None,
    *,
    transport: str = "p2p",
    prefill_model: EchoModel | None = None,
    decode_model: EchoModel | None = None,
) -> Iterator[Pair]:
    config = config or a_config()
    prefill_model, decode_model = prefill_model or EchoModel(), decode_model or EchoModel()
    shared: Transport | None = LoopbackTransport() if transport == "loopback" else None
    decode_options, prefill_options = options_of(config)
    with ExitStack() as stack:
        decode = WorkerProcess(decode_options, transport=shared, engine=decode_model.engine)
        prefill = WorkerProcess(prefill_options, transport=shared, engine=prefill_model.engine)
        stack.callback(decode.stop)
        stack.callback(prefill.stop)
        infos = [decode.start(), prefill.start()]
        core = stack.enter_context(Core(config, infos[0].model))
        core.set_workers(infos)
        yield Pair(config, prefill, decode, prefill_model, decode_model, core)


@pytest.mark.parametrize("transport", ["p2p", "loopback"])
def test_answers_depend_on_every_byte_of_the_handed_over_pages(transport: str) -> None:
    with pair(transport=transport) as both:
        both.prefill.warm([both.decode.report().info.peer])
        for n in (1, 2, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 130, 300):
            prompt = echo_prompt(n, seed=n)
            assert both.core.generate(prompt, 9) == echo_answer(prompt, 9), n
        both.check_all_returned()
        # Handed over, not computed twice: the decode worker saw no prompt token.
        assert both.decode_model.tokens_computed == 8 * 8
        report = both.prefill.report()
        assert (report.peers_out, report.links, report.routers) == (1, 1, 1)
        assert both.decode.report().peers_in == 1


def test_one_token_is_one_token_and_ends_by_length() -> None:
    with pair(transport="loopback") as both:
        prompt = echo_prompt(40, seed=1)
        answer = both.core.submit(prompt, 1)
        assert answer.result() == echo_answer(prompt, 1)
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.indexes == [0]
        both.check_all_returned()
        assert both.decode_model.tokens_computed == 0


def test_requests_at_once_share_steps_and_keep_apart() -> None:
    with pair() as both:
        prompts = [echo_prompt(5 + 11 * i, seed=i) for i in range(12)]
        answers = [both.core.submit(prompt, 6 + i) for i, prompt in enumerate(prompts)]
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert answer.result() == echo_answer(prompt, 6 + i)
            assert answer.indexes == sorted(answer.indexes)
        both.check_all_returned()


@pytest.mark.parametrize("transport", ["p2p", "loopback"])
def test_a_second_turn_computes_only_what_is_new(transport: str) -> None:
    with pair(transport=transport) as both:
        turn = echo_prompt(5 * PAGE + 3, seed=1)
        for _ in range(4):
            before = both.prefill_model.tokens_computed
            assert both.core.generate(turn, 6) == echo_answer(turn, 6)
            computed = both.prefill_model.tokens_computed - before
            found = 0 if before == 0 else (len(turn) - 28) // PAGE * PAGE  # the last turn's pages
            assert computed == len(turn) - found
            both.check_all_returned()
            turn = (*turn, *echo_answer(turn, 6), *echo_prompt(22, seed=len(turn)))


def test_colocated_is_the_same_answer_from_one_worker() -> None:
    config = a_config(mode="colocated")
    (options,) = options_of(config)
    model = EchoModel()
    worker = WorkerProcess(options, engine=model.engine)
    try:
        info = worker.start()
        with Core(config, info.model) as core:
            core.set_workers([info])
            for n in (1, PAGE, 200):
                prompt = echo_prompt(n, seed=n)
                assert core.generate(prompt, 5) == echo_answer(prompt, 5)
    finally:
        worker.stop()


def test_a_hang_up_during_a_prefill_step_returns_every_page() -> None:
    with pair(transport="loopback") as both:
        both.prefill_model.gate.clear()
        answer = both.core.submit(echo_prompt(200, seed=3), 5)
        assert both.prefill_model.entered.wait(WAIT_S)
        answer.cancel()
        assert answer.ended.wait(WAIT_S)
        both.prefill_model.gate.set()
        both.check_all_returned()
        prompt = echo_prompt(33, seed=4)
        assert both.core.generate(prompt, 3) == echo_answer(prompt, 3)


def test_a_hang_up_during_a_decode_step_returns_every_page() -> None:
    with pair(transport="loopback") as both:
        both.decode_model.gate.clear()
        answer = both.core.submit(echo_prompt(100, seed=3), 50)
        assert answer.first.wait(WAIT_S)  # the prefill worker's token is delivered
        assert both.decode_model.entered.wait(WAIT_S)
        answer.cancel()
        assert answer.ended.wait(WAIT_S)
        both.decode_model.gate.set()
        both.check_all_returned()


def test_pages_arrive_while_a_decode_step_runs() -> None:
    """Bytes land and are sealed during a step: a long step delays nobody's hand-off."""
    with pair() as both:
        both.core.generate(echo_prompt(3, seed=0), 2)  # the link is there
        both.decode_model.gate.clear()
        both.decode_model.entered.clear()
        first = both.core.submit(echo_prompt(10, seed=1), 4)
        assert both.decode_model.entered.wait(WAIT_S)
        prompt = echo_prompt(150, seed=2)
        second = both.core.submit(prompt, 4)
        # The prefill worker is done with it only when the decode worker has sealed.
        assert second.first.wait(WAIT_S)
        wait_until(lambda: both.prefill.report().idle, what="prefill done during the step")
        both.decode_model.gate.set()
        assert second.result() == echo_answer(prompt, 4)
        first.result()
        both.check_all_returned()


def test_a_pool_that_is_full_makes_requests_wait_their_turn() -> None:
    small = EchoModel(pages=12)
    with pair(decode_model=small) as both:
        prompts = [echo_prompt(80, seed=i) for i in range(8)]
        answers = [both.core.submit(prompt, 8) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result(60) == echo_answer(prompt, 8)
        both.check_all_returned()


def test_a_step_that_fails_ends_its_request_honestly_and_the_next_one_works() -> None:
    with pair(transport="loopback") as both:
        engine = both.prefill._engine
        run, failing = engine.run, threading.Event()
        failing.set()

        def sometimes(plan):
            if failing.is_set():
                raise RuntimeError("device lost")
            return run(plan)

        both.prefill._thread._run = sometimes
        with pytest.raises(TandemError, match="the model step failed"):
            both.core.generate(echo_prompt(20, seed=1), 3)
        failing.clear()
        prompt = echo_prompt(20, seed=2)
        assert both.core.generate(prompt, 3) == echo_answer(prompt, 3)
        both.check_all_returned()


def test_workers_of_different_models_refuse_each_other_with_both_values() -> None:
    with pair(
        prefill_model=EchoModel(fingerprint="aaaa"), decode_model=EchoModel(fingerprint="bbbb")
    ) as both:
        with pytest.raises(TandemError, match=r"fingerprint.*(aaaa.*bbbb|bbbb.*aaaa)"):
            both.prefill.warm([both.decode.report().info.peer])
        with pytest.raises(TandemError):
            both.core.generate(echo_prompt(20, seed=1), 3)
        both.check_all_returned()


def test_workers_of_different_page_shapes_refuse_each_other_with_both_values() -> None:
    with (
        pair(prefill_model=EchoModel(layers=2), decode_model=EchoModel(layers=3)) as both,
        pytest.raises(TandemError, match=r"layers[= ]\d.*layers[= ]\d|layers \d and \d"),
    ):
        both.prefill.warm([both.decode.report().info.peer])


def test_a_wrong_secret_opens_neither_session_nor_transfer() -> None:
    config = a_config()
    decode_options, prefill_options = options_of(config)
    decode = WorkerProcess(decode_options, engine=EchoModel().engine)
    stranger = WorkerProcess(replace(prefill_options, secret="wrong"), engine=EchoModel().engine)
    try:
        info = decode.start()
        stranger.start()
        with pytest.raises(Unauthenticated):
            stranger.warm([info.peer])
        with Core(config, info.model, secret="wrong") as core:
            core.set_workers([info], wait=False)
            wait_until(
                lambda: "tandem-cluster-token" in core.status().workers[0].detail,
                what="the session's refusal",
            )
            with pytest.raises(TandemError):
                core.generate(echo_prompt(3, seed=1), 1)
        assert decode.telemetry.value("frames_refused", "unauthenticated") >= 2
    finally:
        stranger.stop()
        decode.stop()


def test_a_worker_that_is_gone_cannot_be_warmed() -> None:
    with pair() as both:
        peer = both.decode.report().info.peer
        both.decode.stop()
        with pytest.raises(Unavailable):
            both.prefill.warm([peer])


def test_a_restarted_receiver_is_found_again_and_old_state_is_void() -> None:
    with pair() as both:
        prompt = echo_prompt(50, seed=1)
        assert both.core.generate(prompt, 3) == echo_answer(prompt, 3)
        old = both.decode.report().info
        both.decode.stop()
        again = WorkerProcess(
            replace(both.decode.options, listen=old.endpoint), engine=both.decode_model.engine
        )
        info = again.start()
        try:
            assert info.endpoint == old.endpoint and info.incarnation != old.incarnation
            both.core.set_workers([info, both.prefill.report().info])
            assert both.core.generate(prompt, 4) == echo_answer(prompt, 4)
            wait_until(lambda: both.prefill.report().idle, what="prefill idle")
            assert both.prefill.report().peers_out == 1
        finally:
            again.stop()


def test_stopping_ends_running_requests_honestly_and_frees_everything() -> None:
    with pair() as both:
        both.decode_model.gate.clear()
        answer = both.core.submit(echo_prompt(30, seed=1), 20)
        assert both.decode_model.entered.wait(WAIT_S)
        stopping = threading.Thread(target=both.decode.stop)
        stopping.start()
        with pytest.raises(TandemError):
            answer.result()
        both.decode_model.gate.set()
        stopping.join(WAIT_S)
        assert not stopping.is_alive()


def test_draining_lets_running_requests_end_and_refuses_new_ones() -> None:
    with pair() as both:
        both.decode_model.gate.clear()
        prompt = echo_prompt(30, seed=1)
        answer = both.core.submit(prompt, 20)
        assert both.decode_model.entered.wait(WAIT_S)
        drained: list[bool] = []
        stopping = threading.Thread(target=lambda: drained.append(both.decode.stop(WAIT_S)))
        stopping.start()
        wait_until(lambda: both.decode._host._draining, what="draining")
        with pytest.raises(TandemError, match="draining"):
            both.core.generate(echo_prompt(5, seed=2), 2)
        both.decode_model.gate.set()
        assert answer.result() == echo_answer(prompt, 20)
        stopping.join(WAIT_S)
        assert drained == [True]


def test_a_port_in_use_is_one_sentence_and_the_next_port_works() -> None:
    decode_options, prefill_options = options_of(a_config())
    first = WorkerProcess(decode_options, engine=EchoModel().engine)
    try:
        taken = first.start().endpoint
        refused = WorkerProcess(replace(prefill_options, listen=taken), engine=EchoModel().engine)
        with pytest.raises(ConfigError, match=taken):
            refused.start()
    finally:
        first.stop()


@pytest.mark.parametrize("outgoing", [True, False])
def test_a_link_that_breaks_fails_its_own_transfers_and_is_made_anew(outgoing: bool) -> None:
    with pair() as both:
        prompt = echo_prompt(100, seed=1)
        assert both.core.generate(prompt, 3) == echo_answer(prompt, 3)
        both.prefill_model.gate.clear()
        both.prefill_model.entered.clear()
        hit = both.core.submit(echo_prompt(120, seed=2), 3)
        assert both.prefill_model.entered.wait(WAIT_S)
        breaking, peer = (both.prefill, "decode-0") if outgoing else (both.decode, "prefill-0")
        assert breaking._links.close(peer, outgoing=outgoing, cause="the test cut it")
        with pytest.raises(Unavailable):
            hit.result()
        both.prefill_model.gate.set()
        assert both.core.generate(prompt, 5) == echo_answer(prompt, 5)
        both.check_all_returned()


def test_two_prefill_and_two_decode_workers_serve_together() -> None:
    config = a_config(pools={"prefill": {"replicas": 2}, "decode": {"replicas": 2}})
    models = [EchoModel() for _ in range(4)]
    with ExitStack() as stack:
        workers = [
            WorkerProcess(options, engine=model.engine)
            for options, model in zip(options_of(config), models, strict=True)
        ]
        for worker in workers:
            stack.callback(worker.stop)
        infos = [worker.start() for worker in workers]
        core = stack.enter_context(Core(config, infos[0].model))
        core.set_workers(infos)
        prompts = [echo_prompt(40 + 7 * i, seed=i) for i in range(24)]
        answers = [core.submit(prompt, 6) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result() == echo_answer(prompt, 6)
        assert all(model.tokens_computed > 0 for model in models)
        for worker in workers:
            wait_until(lambda w=worker: w.report().idle, what="idle")
            report = worker.report()
            assert report.integrity == "" and report.load.free_pages == report.info.total_pages
