"""Tries clients' grammars in a child process, which a bad one may freeze, fill or break.

This file owns that child (``kernels.grammar_judge``): one at a time, started with the first
grammar and again after one that ended it. It must never compile a grammar itself: llguidance
would end the router, and every answer with it, where it overflows its stack.

Life of a ``GrammarTrial``: made with the router -> ``complaint`` from any thread, one grammar at
a time -> ``close``: the child is gone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from kernels.grammar_judge import WORK_S
from protocol.errors import InternalError, Unavailable
from protocol.types import Grammar

KEPT = 64  # verdicts: clients repeat their grammars, and a call with many prompts its one
# A child that says nothing for so long is stopped or starved: its own limit is processor time.
SILENT_S = 30.0
_END_S = 5.0
_ROOT = Path(__file__).resolve().parents[1]
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # it needs no others
_BY_SIGNAL: dict[int, str] = {
    signal.SIGPROF: f"takes more than {WORK_S:g} s of work to compile",
    signal.SIGSEGV: "goes too deep, rule within rule, to be compiled",
}


class GrammarTrial:
    """See the file's head."""

    def __init__(self, tokens_json: Callable[[], str]) -> None:
        """``tokens_json`` is what ``TokenTable.to_json`` says, or null to take names of special
        tokens on trust; called once, before the first trial."""
        self._tokens_json = functools.cache(tokens_json)  # a child that was ended needs it again
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._known: OrderedDict[Grammar, str | None] = OrderedDict()
        self._closed = False

    def complaint(self, grammar: Grammar) -> str | None:
        """Why ``grammar`` cannot be followed, in one sentence, or None. Blocks for its trial.

        Raises ``Unavailable`` when the child gives no answer for a reason of its own.
        """
        with self._lock:
            if grammar not in self._known:
                self._known[grammar] = self._tried(grammar)
            self._known.move_to_end(grammar)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
            return self._known[grammar]

    def close(self) -> None:
        """End the child. A trial that is under way is cut short."""
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()
        with self._lock:
            self._end()

    def _tried(self, grammar: Grammar) -> str | None:
        if self._closed:
            raise Unavailable("the router is stopping", retry_after_s=1.0)
        child = self._child
        if child is None or child.poll() is not None:
            child = self._start()
        told = self._ask(child, json.dumps({"kind": grammar.kind.value, "text": grammar.text}))
        if told:
            verdict: str | None = json.loads(told)
            return verdict
        code = self._end()
        if self._closed or code == -signal.SIGTERM:
            raise Unavailable("the grammar could not be tried", retry_after_s=1.0)
        why = _BY_SIGNAL.get(-code, "is more than its compiler can take")
        return f"the {grammar.kind} grammar {why}"

    def _start(self) -> subprocess.Popen[str]:
        """A child that has read the model's tokens. Raises ``Unavailable`` if there is none."""
        self._end()
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        child = self._child = subprocess.Popen(
            [sys.executable, "-m", "kernels.grammar_judge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        if not self._ask(child, self._tokens_json()):
            self._end()
            raise Unavailable("grammars cannot be tried: their compiler does not start")
        return child

    def _ask(self, child: subprocess.Popen[str], line: str) -> str:
        """The child's next line; an empty one when it has ended."""
        if child.stdin is None or child.stdout is None:
            raise InternalError("a child without pipes")
        watch = threading.Timer(SILENT_S, child.terminate)
        watch.start()
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
            return child.stdout.readline()
        except (BrokenPipeError, ValueError):  # ValueError: closed by ``close``
            return ""
        finally:
            watch.cancel()

    def _end(self) -> int:
        """End the child, if there is one; its exit code."""
        child, self._child = self._child, None
        if child is None:
            return 0
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            return child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()
