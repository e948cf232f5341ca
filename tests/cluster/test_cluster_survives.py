"""What happens to a whole cluster when its parts die, and what is left when it ends. All long."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served, environment, orphans, processes_of, tandem, title, write_config

from cluster.control.processes import alive
from cluster.control.ray_session import RaySession, end_ray, family

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def until(check: Callable[[], Any], limit_s: float = 90.0) -> Any:
    """Ask until the answer is good; what other processes do has no event to wait on."""
    pause, end = threading.Event(), time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := check():
            return found
        pause.wait(0.25)
    raise AssertionError(f"not within {limit_s:.0f} s: {check}")


def answers(where: dict[str, Any]) -> bool:
    """Whether a completion comes back whole."""
    try:
        answer = httpx.post(
            f"{where['url']}/completions",
            json={"model": "tiny", "prompt": [7] * 40, "max_tokens": 4, "ignore_eos": True},
            timeout=30,
        )
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4


def state_of(served: Served) -> dict[str, tuple[str, int]]:
    """Worker id -> state and pid."""
    done = tandem(served.home, "status", "--json")
    if done.returncode != 0:
        return {}
    return {w["worker_id"]: (w["state"], w["pid"]) for w in json.loads(done.stdout)["workers"]}


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_killed_worker_is_replaced_and_the_cluster_serves_again(
    served: Served, victim: str
) -> None:
    before = until(
        lambda: all(s == "ready" for s, _ in state_of(served).values()) and state_of(served)
    )
    os.kill(before[victim][1], signal.SIGKILL)
    served.said(f"{victim} lost: its process died while it served: Worker unexpectedly exits")

    def replaced() -> bool:
        state, pid = state_of(served).get(victim, ("", 0))
        return state == "ready" and pid != before[victim][1]

    until(replaced)
    until(lambda: answers(served.where), 30)
    other = "decode-0" if victim == "prefill-0" else "prefill-0"
    assert state_of(served)[other] == before[other]


def test_a_killed_router_comes_back_on_the_same_port(home: Path, model: Path) -> None:
    cluster = Served(home, write_config(home, model, "reborn"))
    try:
        where = cluster.ready()
        listening = [p for p in processes_of(cluster.record()) if "RouterActor" in title(p)]
        assert len(listening) == 1
        os.kill(listening[0].pid, signal.SIGKILL)
        cluster.said("router-0 lost")
        until(lambda: answers(where))
    finally:
        cluster.close()


def test_down_cleans_up_after_a_killed_serve(home: Path, model: Path) -> None:
    cluster = Served(home, write_config(home, model, "crashed"))
    try:
        where = cluster.ready()
        record = cluster.record()
        cluster.process.kill()
        cluster.process.wait()
        assert answers(where), "detached actors go on serving"
        again = tandem(home, "serve", str(cluster.config))
        assert again.returncode == 2 and "runs already" in again.stderr
        done = tandem(home, "down", str(cluster.config))
        assert done.returncode == 0 and "Ray" in done.stdout, done
        assert not processes_of(record)
        assert not Path(record["ray"]["folder"]).exists()
        assert not cluster.record_file().exists()
        assert "nothing runs" in tandem(home, "down", str(cluster.config)).stderr
    finally:
        cluster.close()


def test_the_death_of_ray_ends_serve_with_a_sentence(home: Path, model: Path) -> None:
    cluster = Served(home, write_config(home, model, "rayless"))
    try:
        cluster.ready()
        record = cluster.record()
        (head,) = (p for p in processes_of(record) if "gcs_server" in title(p))
        os.kill(head.pid, signal.SIGKILL)
        assert cluster.process.wait(30) == 1
        cluster.said("Ray has died", 5)
        assert not processes_of(record)
        assert not cluster.record_file().exists()
    finally:
        cluster.close()


def test_detach_returns_and_down_ends_it(home: Path, model: Path) -> None:
    cluster = Served(home, write_config(home, model, "detached"), ["--detach"])
    try:
        where = cluster.ready()
        assert cluster.process.wait(30) == 0
        record = cluster.record()
        assert answers(where)
        assert tandem(home, "down", "--name", "detached").returncode == 0
        assert not processes_of(record)
    finally:
        cluster.close()


@pytest.mark.parametrize(
    ("number", "words", "sight"),
    [
        (signal.SIGTERM, "ray: loading", ""),
        (signal.SIGINT, "ray: loading", "gcs_server"),
        (signal.SIGINT, "ray: loading", "raylet/raylet"),
        (signal.SIGINT, "ray: loading", "ray::DashboardAgent"),
        (signal.SIGTERM, "ray: loading", "ray::RuntimeEnvAgent"),
        (signal.SIGINT, "controller: loading", ""),
        (signal.SIGINT, "prefill-0: loading", ""),
    ],
)
def test_a_signal_during_the_start_leaves_nothing(
    home: Path, model: Path, number: signal.Signals, words: str, sight: str
) -> None:
    """At moments of Ray's own start too: ``sight`` is who is seen among its processes then."""
    strangers = orphans()
    cluster = Served(home, write_config(home, model, "early"))
    try:
        cluster.said(words)
        until(lambda: cluster.record_file().exists() and cluster.record()["ray"])
        until(lambda: any(sight in title(p) for p in processes_of(cluster.record())) or not sight)
        record = cluster.record()
        assert cluster.end(number) == 130
        cluster.said("ended", 5)
        assert [line for line in cluster.errors if "end" in line] == [
            "ending what was started (Ctrl-C again ends it at once)",
            "ended",
        ]
        assert not orphans() - strangers
        assert not processes_of(record)
        assert not Path(record["ray"]["folder"]).exists()
        assert not cluster.record_file().exists()
    finally:
        cluster.close()


def test_a_model_that_does_not_load_is_one_sentence_and_leaves_nothing(
    home: Path, model: Path, tmp_path: Path
) -> None:
    """Its headers are in order, so that only a worker finds what is wrong."""
    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    content = json.loads((model / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "fp8"}
    (broken / "config.json").write_text(json.dumps(content))
    cluster = Served(home, write_config(home, broken, "broken"))
    try:
        cluster.said("ray: ready")
        record = cluster.record()
        assert cluster.process.wait(120) in (1, 2)
        errors = [line for line in cluster.errors if line.startswith("error:")]
        assert len(errors) == 1 and "did not start" in errors[0]
        assert sum("quantised" in line for line in cluster.errors) == 1
        assert not processes_of(record)
        assert not cluster.record_file().exists()
    finally:
        cluster.close()


def test_another_ray_on_the_machine_is_untouched(
    served: Served, home: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``served`` is the other one: a whole cluster comes and goes beside it."""
    before = [p for p in processes_of(served.record()) if "ray::" not in title(p)]
    cluster = Served(home, write_config(home, model, "guest"))
    try:
        cluster.ready()
        assert cluster.end(signal.SIGTERM) == 0
    finally:
        cluster.close()
    assert before and all(alive(p) for p in before)
    assert until(lambda: answers(served.where), 30)


def test_a_cluster_in_a_ray_that_it_joined_leaves_that_ray_alone(
    home: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(home).items():
        monkeypatch.setenv(name, value)
    session = RaySession.open("local", 4, lambda record: None)
    session.leave()
    host = session.record
    try:
        token = home / ".local" / "state" / "tandem" / "ray_token"
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        config = write_config(home, model, "guest2", ray={"address": host.address})
        cluster = Served(home, config)
        try:
            where = cluster.ready()
            assert answers(where)
            assert cluster.end(signal.SIGINT) == 0
        finally:
            cluster.close()
        assert all(alive(p) for p in host.processes)
        assert not [p for p in family(host).members() if "WorkerActor" in title(p)]
    finally:
        end_ray(host)
