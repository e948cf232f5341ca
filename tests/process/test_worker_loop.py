"""The worker's engine over a scripted role: one lock, effects in order, faults made visible."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.worker.engine_thread import EngineThread
from cluster.worker.loop import RoleHost
from protocol.errors import ErrorInfo, InternalError
from protocol.events import Effect, Event, FromRouter, LinkBroken, RouterLost, ToRouter
from protocol.messages import Done, Open, RouterHeartbeat
from protocol.step import StepPlan, StepResult, StepRow
from protocol.types import Outcome, Peer, SamplingParams, Ticket, TicketId, WorkerLoad

WAIT_S = 10.0


class Role:
    """Plans one step per ``FromRouter`` event; answers with whatever ``answers`` says."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.wanted = 0
        self.results: list[StepResult] = []
        self.errors: list[ErrorInfo] = []
        self.answers: Callable[[Event], list[Effect]] = lambda event: []
        self.integrity: str | None = None
        self.checks = 0

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.events.append(event)
        if isinstance(event, FromRouter):
            self.wanted += 1
        return self.answers(event)

    def tick(self, now: float) -> list[Effect]:
        return []

    def plan(self, now: float) -> StepPlan | None:
        if not self.wanted:
            return None
        self.wanted -= 1
        ticket = TicketId("r")
        return StepPlan({ticket: 1}, (StepRow(ticket, (1,), 0, (0,)),))

    def step_done(self, result: StepResult, now: float) -> list[Effect]:
        self.results.append(result)
        return []

    def step_failed(self, error: ErrorInfo, now: float) -> list[Effect]:
        self.errors.append(error)
        return []

    def load(self, now: float) -> WorkerLoad:
        return WorkerLoad(free_pages=3)

    def is_idle(self) -> bool:
        return not self.wanted

    def check_integrity(self) -> None:
        self.checks += 1
        if self.integrity:
            raise InternalError(self.integrity)


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A host over a scripted role; remembers effects in the order they were carried out."""

    def __init__(self) -> None:
        self.role = Role()
        self.clock = Clock()
        self.effects: list[Effect] = []
        self.also: Callable[[Effect], None] = lambda effect: None
        self.host = RoleHost(worker_id="w", carry_out=self.carry_out, clock=self.clock)
        self.host.install(self.role)

    def carry_out(self, effects) -> None:
        for effect in effects:
            self.effects.append(effect)
            self.also(effect)

    @contextmanager
    def engine(self, run: Callable[[StepPlan], StepResult]) -> Iterator[EngineThread]:
        engine = EngineThread(self.host, run)
        engine.start()
        try:
            yield engine
        finally:
            self.host.stop()
            assert engine.join(WAIT_S)


def beat(router: str = "r0") -> FromRouter:
    return FromRouter(router, RouterHeartbeat())


def said(name: str) -> ToRouter:
    return ToRouter("r0", Done(TicketId(name), Outcome.OK))


def an_open() -> FromRouter:
    me = Peer("w", "i", "127.0.0.1:1")
    return FromRouter(
        "r0", Open(Ticket(TicketId("late"), None, me, (1,), 1, SamplingParams(max_tokens=1)))
    )


def test_an_event_that_an_effect_causes_waits_for_its_turn() -> None:
    bench = Bench()
    broken = LinkBroken("p", ErrorInfo("UNAVAILABLE", "x"), True)
    bench.role.answers = lambda event: (
        [said("1"), said("2")] if isinstance(event, FromRouter) else [said("3")]
    )
    bench.also = lambda effect: bench.host.submit(broken) if effect == said("1") else None
    bench.host.submit(beat())
    assert bench.effects == [said("1"), said("2"), said("3")]
    assert bench.role.events == [beat(), broken]


def test_events_arrive_while_a_step_runs_and_a_new_one_starts_after_it() -> None:
    bench = Bench()
    running, go_on = threading.Event(), threading.Event()
    ran = threading.Semaphore(0)

    def run(plan: StepPlan) -> StepResult:
        running.set()
        assert go_on.wait(WAIT_S)
        ran.release()
        return StepResult(())

    with bench.engine(run):
        bench.host.submit(beat())
        assert running.wait(WAIT_S)
        bench.clock.now = 2.5
        bench.host.submit(RouterLost("r0"))  # must not wait for the step
        assert bench.host.load() == WorkerLoad(free_pages=3, busy_s=2.5)
        assert not bench.host.is_idle()
        bench.host.submit(beat())
        go_on.set()
        assert ran.acquire(timeout=WAIT_S) and ran.acquire(timeout=WAIT_S)
        assert bench.host.wait_idle(WAIT_S)
        assert bench.host.load().steps == 2
        assert len(bench.role.results) == 2


def test_a_step_that_raises_fails_with_an_id_and_the_engine_goes_on(caplog) -> None:
    bench = Bench()

    def run(plan: StepPlan) -> StepResult:
        if not bench.role.errors:
            raise ValueError("secret details")
        return StepResult(())

    with bench.engine(run):
        bench.host.submit(beat())
        assert bench.host.wait_idle(WAIT_S)
        bench.host.submit(beat())
        assert bench.host.wait_idle(WAIT_S)
    (error,) = bench.role.errors
    fault_id = error.message.split("id ")[-1]
    assert error.reason == "INTERNAL" and len(fault_id) == 12
    assert fault_id in caplog.text and "secret details" in caplog.text
    assert "secret details" not in error.message
    assert len(bench.role.results) == 1
    assert bench.host.health().healthy


def test_steps_that_only_fail_make_the_worker_unhealthy() -> None:
    bench = Bench()

    def run(plan: StepPlan) -> StepResult:
        raise RuntimeError("the device is gone")

    with bench.engine(run):
        for _ in range(3):
            bench.host.submit(beat())
        assert bench.host.wait_idle(WAIT_S)
    assert bench.host.health().reason == "the last 3 steps failed"


def test_a_step_without_end_is_not_healthy_by_the_workers_own_clock() -> None:
    bench = Bench()
    running, go_on = threading.Event(), threading.Event()

    def run(plan: StepPlan) -> StepResult:
        running.set()
        assert go_on.wait(WAIT_S)
        return StepResult(())

    with bench.engine(run):
        bench.host.submit(beat())
        assert running.wait(WAIT_S)
        assert bench.host.health().healthy
        bench.clock.now = 100.0
        assert "has run for 100 s" in bench.host.health().reason
        go_on.set()


def test_a_role_that_raises_is_reported_and_later_events_still_arrive(caplog) -> None:
    bench = Bench()

    def answers(event: Event) -> list[Effect]:
        if isinstance(event, RouterLost):
            raise KeyError("a bug")
        return [said("on")]

    bench.role.answers = answers
    bench.host.submit(RouterLost("r0"))
    bench.host.submit(beat())
    assert bench.effects == [said("on")]
    health = bench.host.health()
    assert not health.healthy and "KeyError" in health.reason
    assert health.reason.split("id ")[1].split()[0] in caplog.text


def test_an_idle_worker_checks_its_pages_and_says_what_is_wrong() -> None:
    bench = Bench()
    bench.role.integrity = "pages: 3 free + 1 bound, 5 in all"
    with bench.engine(lambda plan: StepResult(())):
        bench.clock.now = 1.0
        bench.host.submit(beat())
        with bench.host.lock:
            assert bench.host._changed.wait_for(lambda: bench.role.checks > 0, WAIT_S)
    assert bench.host.health().reason == "integrity: pages: 3 free + 1 bound, 5 in all"
    assert bench.host.check_integrity() == bench.role.integrity


def test_a_draining_worker_refuses_new_tickets_only() -> None:
    bench = Bench()
    bench.host.drain()
    bench.host.submit(an_open())
    bench.host.submit(RouterLost("r0"))
    (refusal,) = bench.effects
    assert isinstance(refusal, ToRouter) and isinstance(refusal.message, Done)
    assert refusal.message.outcome is Outcome.FAILED
    assert refusal.message.error is not None and refusal.message.error.reason == "WRONG_STATE"
    assert bench.role.events == [RouterLost("r0")]


def test_many_threads_never_enter_the_role_at_once() -> None:
    bench = Bench()
    inside: list[int] = []
    clashes: list[int] = []

    def answers(event: Event) -> list[Effect]:
        inside.append(1)
        time.sleep(0)  # gives the interpreter away, so that another thread may come in
        clashes.append(len(inside) - 1)
        inside.pop()
        return [said("x")]

    bench.role.answers = answers

    def feed() -> None:
        for _ in range(200):
            bench.host.submit(RouterLost("r0"))

    feeders = [threading.Thread(target=feed) for _ in range(4)]
    for feeder in feeders:
        feeder.start()
    for feeder in feeders:
        feeder.join(WAIT_S)
    assert not any(clashes)
    assert len(bench.effects) == len(bench.role.events) == 800
