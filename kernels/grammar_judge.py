"""Compiles grammars for a router in a process of its own: what breaks there breaks nothing else.

A grammar is a client's program for llguidance, and some programs end it: a chain of thousands of
rules overflows its stack, ``multipleOf`` of a large prime takes minutes and gigabytes. So a router
hands each new grammar to a child process (``router.grammar_trial``) that does what a worker will
do, with less stack, memory and time. This file owns that child's loop and its limits. It must
never import torch or transformers: it is started while a request waits.

Life: ``python -m kernels.grammar_judge``; the first line on stdin says what the model's tokens
are (answered by ``ready``), each further one is a grammar, answered by a complaint or null. It ends
with its stdin, or by a signal where a grammar took too much.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading

from kernels.grammar import TokenTable, check_grammar
from protocol.types import Grammar, GrammarKind

WORK_S = 0.3  # processor time of one grammar; a worker's other rows wait as long, once
MEMORY_BYTES = 4 << 30  # address space
STACK_BYTES = 4 << 20  # a worker's threads have twice as much


def main() -> None:
    """Answer every grammar on stdin; see the file's head."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    loop = threading.Thread(target=_answer_all)
    loop.start()
    loop.join()


def _answer_all() -> None:
    told = sys.stdin.readline()
    tokens = None if json.loads(told) is None else TokenTable.from_json(told)
    _say("ready")
    for line in sys.stdin:
        asked = json.loads(line)
        grammar = Grammar(GrammarKind(asked["kind"]), asked["text"])
        # Without a handler the alarm ends the process, whatever foreign code it is in.
        signal.setitimer(signal.ITIMER_PROF, WORK_S)
        complaint = check_grammar(tokens, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(json.dumps(complaint))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
