"""One whole run of the engine comparison: arms up, measured, down, one report.

Owns the composition of the arms and the report's outermost shape. It never measures itself.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transformers.utils import logging

from cluster.bench import engine_machine, engine_thread
from cluster.bench.engine import Arm, Progress, Results, compare
from cluster.bench.engine_ours import OurEngine, engine_options
from cluster.bench.engine_peer import Peer, PeerFailed, check_python
from cluster.bench.engine_report import PEER, Yardstick, machine_rate, rows_json, targets
from cluster.bench.engine_transformers import PlainTransformers
from cluster.bench.engine_work import Phase, Work
from cluster.bench.quiet import busy_share
from cluster.worker.engine import use_threads
from cluster.worker.options import DEFAULT_PAGE_SIZE
from kernels.gguf_folder import model_folder
from kernels.model_info import read_model_info
from protocol.config import TandemConfig
from protocol.errors import InvalidArgument
from protocol.types import ModelInfo

THREAD_BATCHES = (16, 256)
THREAD_STEPS = 8


def measure(
    base: TandemConfig,
    work: Work,
    *,
    repeats: int,
    threads: int,
    chunk: int,
    peer: tuple[str, str] | None,
    progress: Progress,
) -> dict[str, Any]:
    """The report. ``peer`` is its kind and its Python. Raises ``ConfigError`` for a model that
    cannot be loaded or a Python that cannot run the peer; a peer that fails later is noted."""
    if peer is not None:
        check_python(*peer)
    page_size = DEFAULT_PAGE_SIZE if base.kv.page_size == "auto" else base.kv.page_size
    path, dtype = str(model_folder(base.model.path, progress).resolve()), base.model.dtype
    info = read_model_info(path, dtype, page_size, None)
    if work.longest > info.max_model_len:
        raise InvalidArgument(
            f"the longest case needs {work.longest} positions, this model has "
            f"{info.max_model_len}: lower --prompts, --contexts or --steps",
            field="prompts",
        )
    use_threads(threads)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    foreign = busy_share()
    options = engine_options(
        path,
        work,
        info.geometry,
        dtype=dtype,
        threads=threads,
        chunk=chunk,
        extra_pages=engine_thread.pages_needed(THREAD_BATCHES, THREAD_STEPS, page_size),
    )
    progress(f"loading {path} twice: for tandem, for transformers")
    ours = OurEngine(options, work, chunk)
    try:
        plain = PlainTransformers(path, work, info.geometry, info.vocab_size)
        results, other = _compare(
            (ours, plain, engine_machine.Machine(info.geometry.dtype)),
            _start_peer(peer, path, info, work, threads, progress),
            work,
            repeats,
            progress,
        )
        engine_threads = []
        for batch in THREAD_BATCHES:
            progress(f"engine thread around the model, batch {batch}")
            engine_threads.append(engine_thread.outside_the_model(ours.engine, batch, THREAD_STEPS))
    finally:
        ours.close()
    lengths = {c.context for c in work.cases if c.phase is Phase.PREFILL}
    yardstick = Yardstick(info.geometry, plain.weight_bytes(), {n: plain.flops(n) for n in lengths})
    rows = rows_json(results, yardstick)
    return {
        "rows": rows,
        "model": path,
        "dtype": info.geometry.dtype,
        "repeats": repeats,
        "steps": work.steps,
        "chunk": chunk,
        "machine": engine_machine.describe()
        | {
            "threads": threads,
            "matmul_gflops": machine_rate(results, Phase.PREFILL),
            "read_gbytes_s": machine_rate(results, Phase.DECODE),
            "foreign_load": None if foreign is None else round(foreign, 3),
        },
        "engine_thread": engine_threads,
        "peer": other,
        "lost": results.lost,
        "targets": [asdict(t) for t in targets(rows, engine_threads)],
    }


def _start_peer(
    peer: tuple[str, str] | None,
    path: str,
    info: ModelInfo,
    work: Work,
    threads: int,
    progress: Progress,
) -> Peer | PeerFailed | None:
    if peer is None:
        return None
    kind, python = peer
    progress(f"starting {kind} by {python}; it compiles the model first, a minute or two")
    settings = {
        "model": path,
        "dtype": info.geometry.dtype,
        "max_model_len": work.longest + info.geometry.page_size,
        "max_num_seqs": max(work.widest, 1),
        "vocab_size": info.vocab_size,
        # Room for every case's prompts at once: what its prefix cache has need not be computed
        # again for each repeat of a decode case.
        "kv_bytes": 2 * work.pages(info.geometry.page_size) * info.geometry.page_bytes,
    }
    try:
        return Peer.start(kind, python, settings, work, threads)
    except PeerFailed as e:
        progress(f"the peer is lost: {e.message}")
        return e


def _compare(
    arms: tuple[Arm, ...],
    peer: Peer | PeerFailed | None,
    work: Work,
    repeats: int,
    progress: Progress,
) -> tuple[Results, str | None]:
    """The results, and what the peer calls itself."""
    if peer is None:
        return compare(arms, work, repeats, progress), None
    if isinstance(peer, PeerFailed):
        results = compare(arms, work, repeats, progress)
        results.lost[PEER] = peer.message
        return results, None
    try:
        return compare((*arms, peer), work, repeats, progress), peer.version
    finally:
        peer.close()
