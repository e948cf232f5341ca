"""Processes by pid and start time, and the record that outlives a crash."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.control import records
from cluster.control.processes import (
    Family,
    ProcessId,
    alive,
    end,
    end_family,
    identify,
)
from cluster.control.records import ClusterRecord, RayRecord
from protocol.errors import ConfigError

IGNORES_TERM = "import signal,sys; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "


@contextmanager
def child(code: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun to run ``code`` and then waits for its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code + "sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | environ,
        text=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


WAITS = "import sys; print(1, flush=True); "


def test_this_process_is_alive_and_a_namesake_is_not() -> None:
    me = identify(os.getpid())
    assert me is not None and alive(me)
    assert not alive(ProcessId(me.pid, me.started - 1))


def test_who_ignores_the_request_is_killed() -> None:
    with child(IGNORES_TERM) as process:
        found = identify(process.pid)
        assert found is not None
        assert end([found], grace_s=0.1) == (found,)
        assert not alive(found)
        assert process.wait() == -signal.SIGKILL


def test_a_process_that_took_over_the_pid_is_left_alone() -> None:
    with child(WAITS) as process:
        found = identify(process.pid)
        assert found is not None
        assert end([replace(found, started=found.started - 5)], grace_s=0.0) == ()
        assert alive(found)


def test_a_mark_is_found_in_children_and_only_there() -> None:
    with child(WAITS, TANDEM_TEST_MARK="m1") as one, child(WAITS, TANDEM_TEST_MARK="m12"):
        assert [p.pid for p in Family("TANDEM_TEST_MARK=m1", "").members()] == [one.pid]


# What setproctitle does, and worse: name and environment of the process are gone from /proc.
WIPES = """
import ctypes, sys
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
for first, last in (fields[45:47], fields[47:49]):
    ctypes.memset(int(first), 0, int(last) - int(first))
"""
STARTS_ONE_THAT_WIPES = """
import subprocess, sys
code = sys.argv[1] + "\\nprint(1, flush=True); sys.stdin.read()"
inner = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
inner.stdout.readline()
print(inner.pid, flush=True)
"""


def starts(code: str) -> str:
    """Code of a process that starts one which runs ``code``, and prints that one's pid."""
    return STARTS_ONE_THAT_WIPES.replace("sys.argv[1]", repr(code))


def born(process: subprocess.Popen[str]) -> ProcessId:
    """The process whose pid this one prints."""
    assert process.stdout is not None
    found = identify(int(process.stdout.readline()))
    assert found is not None
    return found


def gone_for_good(process: ProcessId) -> bool:
    """Whether it is gone; ends it if not, so that a failed test leaves nothing."""
    return not end([process], 0.0)


SAYS_READY = "import sys; print(1, flush=True)\n"


def test_a_child_without_name_and_environment_is_found_by_its_parent() -> None:
    with child(SAYS_READY + starts(WIPES), TANDEM_TEST_MARK="m2") as outer:
        inner = born(outer)
        assert Path(f"/proc/{inner.pid}/environ").read_bytes().strip(b"\0") == b""
        family = Family("TANDEM_TEST_MARK=m2", "")
        assert {p.pid for p in family.members()} == {outer.pid, inner.pid}
        assert {p.pid for p in end_family(family, 2.0)} == {outer.pid, inner.pid}
        assert gone_for_good(inner)


def test_an_orphan_without_environment_is_found_by_the_file_that_it_writes(tmp_path: Path) -> None:
    log = tmp_path / "session" / "agent.log"
    log.parent.mkdir()
    code = WIPES + f"out = open({str(log)!r}, 'w')\n"
    with child(SAYS_READY + starts(code)) as outer:
        inner = born(outer)
        outer.kill()
        outer.wait()
        try:
            log.unlink()
            log.parent.rmdir()
            assert Family("", str(tmp_path / "other")).members() == frozenset()
            assert Family("", str(tmp_path)).members() == {inner}
            assert end_family(Family("", str(tmp_path)), 2.0) == {inner}
        finally:
            assert gone_for_good(inner)


def test_who_only_looks_into_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x")
    looks = f"import os, sys; os.chdir({str(tmp_path)!r}); log = open('log'); "
    with child(looks + "print(1, flush=True); ") as process:
        assert end_family(Family("", str(tmp_path)), 0.0) == frozenset()
        assert process.poll() is None


def test_one_that_is_born_while_its_family_ends_is_ended_too(tmp_path: Path) -> None:
    heir = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    leaves_an_heir = f"""
import os, signal, subprocess, sys
def bear(number, frame):
    heir = subprocess.Popen([sys.executable, "-S", "-c", {heir!r}])
    open({str(tmp_path / "heir")!r}, "w").write(str(heir.pid))
    os._exit(0)
signal.signal(15, bear)
print(1, flush=True)
"""
    with child(leaves_an_heir, TANDEM_TEST_MARK="m3") as process:
        ended = {p.pid for p in end_family(Family("TANDEM_TEST_MARK=m3", ""), 0.5)}
        heir_pid = int((tmp_path / "heir").read_text())
        assert ended == {process.pid, heir_pid}
        left = identify(heir_pid)
        assert left is None or gone_for_good(left)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "tandem"


def test_a_record_comes_back_as_it_was(state: Path) -> None:
    ray = RayRecord("127.0.0.2:1", True, "mark", "/tmp/x", (ProcessId(1, 2), ProcessId(3, 4)))
    record = ClusterRecord("a", "secret", ProcessId(5, 6), ray, "h:1", "g:2", "c:3")
    records.save(record)
    records.save(ClusterRecord("b", "other"))
    assert records.load("a") == record
    assert {r.name for r in records.load_all()} == {"a", "b"}
    records.forget("a")
    records.forget("a")
    assert records.load("a") is None


def test_secrets_are_for_the_user_only(state: Path) -> None:
    records.save(ClusterRecord("a", "secret"))
    for file in (state / "a.json", records.ray_token_file()):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_token_is_drawn_once(state: Path) -> None:
    first = records.ray_token_file().read_text()
    assert len(first) == 64
    assert records.ray_token_file().read_text() == first


def test_a_record_that_cannot_be_read_names_its_file(state: Path) -> None:
    records.save(ClusterRecord("a", "secret"))
    (state / "a.json").write_text('{"version": 99, "name": "a"}')
    with pytest.raises(ConfigError, match=r"a\.json"):
        records.load("a")


def test_only_processes_that_run_keep_a_record_alive(state: Path) -> None:
    me = identify(os.getpid())
    assert me is not None
    gone = ProcessId(me.pid, me.started - 1)
    ray = RayRecord("x", True, processes=(gone,))
    assert ClusterRecord("a", "s", me).owner_alive
    assert not ClusterRecord("a", "s", gone, ray).owner_alive
    assert not ClusterRecord("a", "s", gone, ray).ray_alive
    assert ClusterRecord("a", "s", None, replace(ray, processes=(gone, me))).ray_alive
