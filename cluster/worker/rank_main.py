"""A further rank of a tensor-parallel worker: ``python -m cluster.worker.rank_main RANK MEETING``.

This file owns the loop of a rank: read a step, compute it, again. It must never talk to anybody but
the other ranks: no port, no role, no tokens. Started by ``cluster.worker.ranks`` only, which
describes the frames on standard input.

Life: options read -> the others met, model loaded, warmed up in step with rank 0 -> steps -> end of
standard input: rank 0 is closing or gone, exit 0, and the folder of their meeting goes, which a
killed rank 0 leaves behind. A step that fails here ends the process (exit 1): the ranks are out of
step, and rank 0, which sees this end, gives the worker up.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from cluster.worker.engine import load_rank, use_threads
from cluster.worker.options import WorkerOptions
from cluster.worker.ranks import FRAME
from kernels.parallel import RankPlace, decode_step
from protocol.errors import TandemError
from protocol.step import StepPlan

_log = logging.getLogger(__name__)


def main() -> int:
    """Run one rank to its end; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is rank 0's business
    rank, meeting = int(sys.argv[1]), Path(sys.argv[2])
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    pipe = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    first = _read(pipe)
    if first is None:
        return 0
    options = WorkerOptions.from_json(first.decode())
    use_threads(options.threads)
    try:
        engine = load_rank(options, RankPlace(rank, options.tensor_parallel), meeting)
        engine.prepare_thread(options.threads)
        while (frame := _read(pipe)) is not None:
            rows, copies = decode_step(frame)
            engine.run(StepPlan({}, tuple(rows), copies=tuple(copies)))
    except TandemError as error:
        _log.error("rank %d: %s", rank, error.message)
        return 1
    except Exception:
        _log.exception("rank %d ends: a step failed", rank)
        return 1
    return 0


def _read(pipe: BinaryIO) -> bytes | None:
    """The next frame; None at the end of the pipe."""
    head = pipe.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    (length,) = FRAME.unpack(head)
    frame = pipe.read(length)
    return frame if len(frame) == length else None


if __name__ == "__main__":
    # Not sys.exit alone: a rank that lost its others would wait for them at the interpreter's end.
    code = main()
    shutil.rmtree(Path(sys.argv[2]).parent, ignore_errors=True)  # whoever is last finds it gone
    sys.stderr.flush()
    os._exit(code)
