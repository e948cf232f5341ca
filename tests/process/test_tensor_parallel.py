"""A worker of two ranks: the same tokens as one, and lost as a whole when it loses one."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from serving import Serving, options_of, serving, small_config, wait_until
from tiny import FAMILIES, reference_generate, tiny_llama, tiny_model

from cluster.control.checks import check_model
from cluster.worker.engine import Engine, load_engine, use_threads
from cluster.worker.options import WorkerOptions
from protocol.config import TandemConfig, TimingConfig
from protocol.errors import ConfigError, TandemError, Unavailable
from protocol.step import StepPlan, StepRow
from protocol.types import Role, SamplingParams, TicketId

WAYS = {
    "greedy": SamplingParams(10),
    "drawn": SamplingParams(10, temperature=1.0, top_p=0.9, seed=5),
}
PAGE = 16


def a_config(folder: Path, ranks: int = 2) -> TandemConfig:
    return small_config(folder, mode="colocated", pools={"decode": {"tensor_parallel": ranks}})


def a_prompt(n: int, seed: int = 0) -> list[int]:
    picked = random.Random(1000 * n + seed)
    return [picked.randrange(4, 320) for _ in range(n)]


def child_processes(pid: int) -> list[int]:
    """The processes that this one has started and not waited for."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def is_gone(pid: int) -> bool:
    """No process, or one that only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def generate(engine: Engine, prompts: Sequence[list[int]], sampling: SamplingParams) -> list:
    """Answers of prompts that run together, in chunks of seven tokens."""
    sequences, done = [list(p) for p in prompts], [0] * len(prompts)
    while any(
        len(s) < len(p) + sampling.max_tokens for s, p in zip(sequences, prompts, strict=True)
    ):
        rows = []
        for i, tokens in enumerate(sequences):
            n = min(7, len(tokens) - done[i])
            rows.append(
                StepRow(
                    TicketId(str(i)),
                    tokens[done[i] : done[i] + n],
                    done[i],
                    range(i * 8, i * 8 + 8),
                    sampling if done[i] + n == len(tokens) else None,
                    len(tokens) - len(prompts[i]),
                    history=tokens,
                    n_prompt=len(prompts[i]),
                )
            )
            done[i] += n
        result = engine.run(StepPlan({}, tuple(rows)))
        for tokens, got in zip(sequences, result.rows, strict=True):
            assert got.error is None
            tokens += got.tokens
    return [s[len(p) : len(p) + 10] for s, p in zip(sequences, prompts, strict=True)]


def an_engine(folder: Path, ranks: int) -> Engine:
    engine = load_ranks(folder, ranks)
    engine.prepare_thread(1)
    return engine


def load_ranks(folder: Path, ranks: int, timing: TimingConfig | None = None) -> Engine:
    """Ranks that have met and loaded, and not run a step."""
    use_threads(1)
    options = WorkerOptions(
        "decode-0",
        Role.DECODE,
        str(folder),
        kv_memory="4MiB",
        page_size=PAGE,
        max_model_len=128,
        tensor_parallel=ranks,
        timing=timing or TimingConfig(),
    )
    return load_engine(options)


# Families that differ in what is cut: bias, tied embeddings, norms of heads, experts.
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(f, marks=pytest.mark.long) for f in ("qwen2", "gemma", "qwen3", "mixtral")),
    ],
)
def test_two_ranks_answer_as_one_does(family: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / family, family)
    assert family in FAMILIES
    prompts = [a_prompt(n, seed=n) for n in (1, 20, 45)]
    answers = []
    for ranks in (1, 2):
        engine = an_engine(folder, ranks)
        try:
            answers.append({way: generate(engine, prompts, how) for way, how in WAYS.items()})
        finally:
            engine.close()
    assert answers[0] == answers[1]


@pytest.mark.long
def test_a_rank_may_be_slow_to_start_but_not_in_a_step(tmp_path: Path) -> None:
    """Compiling takes one rank longer than another; the waits are bounded when all are ready."""
    short = TimingConfig(link_op_s=0.1, peer_dead_s=0.1)
    engine = load_ranks(tiny_llama(tmp_path / "tiny"), 2, short)
    try:
        (rank,) = child_processes(os.getpid())
        os.kill(rank, signal.SIGSTOP)
        starting = threading.Thread(target=engine.prepare_thread, args=(1,))
        starting.start()
        starting.join(1.0)  # five times the bound of a step
        assert starting.is_alive() and not engine.loss.reason
        os.kill(rank, signal.SIGCONT)
        starting.join(60)
        assert not starting.is_alive() and not engine.loss.reason
        os.kill(rank, signal.SIGSTOP)
        row = StepRow(TicketId("late"), [5, 6], 0, range(1), SamplingParams(1), 0, history=[5, 6])
        with pytest.raises(Unavailable):
            engine.run(StepPlan({}, (row,)))
        os.kill(rank, signal.SIGCONT)
    finally:
        engine.close()


def test_a_family_whose_attention_stays_whole_is_refused_in_these_words(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "phi3", "phi3")
    with pytest.raises(ConfigError, match=r"tensor_parallel 2.*phi3.*attention whole"):
        an_engine(folder, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=512)


def ranks_of(cluster: Serving) -> list[int]:
    (rank,) = child_processes(cluster.decode.process.pid)
    return [rank]


def test_a_worker_of_two_ranks_serves_and_leaves_no_process(model: Path, tmp_path: Path) -> None:
    with serving(a_config(model), log=tmp_path) as cluster:
        (rank,) = ranks_of(cluster)
        prompts = [a_prompt(n) for n in (1, 17, 200)]
        answers = [cluster.core.submit(prompt, 8) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result() == reference_generate(model, prompt, 8)
        cluster.check_all_returned()
    wait_until(lambda: is_gone(rank), what="the second rank's end")


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_loses_a_rank_is_lost_as_a_whole(
    model: Path, tmp_path: Path, how: signal.Signals
) -> None:
    config = a_config(model)
    with serving(config, log=tmp_path) as cluster:
        (rank,) = ranks_of(cluster)
        answers = [cluster.core.submit(a_prompt(100, seed=i), 300) for i in range(4)]
        answers[0].first.wait(30)
        os.kill(rank, how)
        for answer in answers:
            with pytest.raises(TandemError) as caught:
                answer.result(config.timing.link_op_s + config.timing.peer_dead_s + 5)
            assert caught.value.reason == "UNAVAILABLE", caught.value
        wait_until(lambda: not cluster.decode.report()["healthy"], what="it says so")
    wait_until(lambda: is_gone(rank), what="the second rank's end")


@pytest.mark.long
def test_a_rank_ends_with_a_killed_worker(model: Path, tmp_path: Path) -> None:
    with serving(a_config(model), log=tmp_path) as cluster:
        (rank,) = ranks_of(cluster)
        cluster.core.submit(a_prompt(100), 300).first.wait(30)
        (meeting,) = (part for part in command_of(rank) if "tandem-ranks-" in part)
        assert Path(meeting).parent.is_dir()
        cluster.decode.kill()
        wait_until(lambda: is_gone(rank), what="the second rank's end")
        assert not Path(meeting).parent.exists()


def test_what_cannot_be_shared_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m", heads=6, kv_heads=3, hidden=96)
    with pytest.raises(ConfigError, match="num_key_value_heads 3, and 2 ranks"):
        check_model(a_config(folder))
    check_model(a_config(folder, ranks=3))
    with pytest.raises(ValueError, match="tensor_parallel 2 with mode disaggregated"):
        small_config(folder, pools={"decode": {"tensor_parallel": 2}})
    with pytest.raises(ValueError, match="num_gpus 1 for tensor_parallel 2"):
        one_gpu = {"tensor_parallel": 2, "resources": {"num_gpus": 1}}
        small_config(folder, mode="colocated", pools={"decode": one_gpu})
    assert options_of(a_config(folder, ranks=3))[0].tensor_parallel == 3
