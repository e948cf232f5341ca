"""The interference comparison: chats stream steadily, then one very long prompt arrives.

Owns the procedure of one run and the alternation of arms. It starts and stops every arm itself,
keeps every token's arrival, and never chooses among repeats: medians and all runs are reported.

Life of one run:
 1. The arm's cluster is up; one short and one medium request warm it.
 2. Chats start together; each reaches its 8th token.
 3. *Before* is watched until it has enough gaps; then the long prompt is submitted.
 4. *During* ends with the long prompt's second token; *after* is watched likewise.
 5. All streams hang up; the arm is taken down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from cluster.bench import windows
from cluster.bench.arms import Arm
from cluster.bench.progress import StartLines
from cluster.bench.prompts import chat_prompt, long_prompt
from cluster.bench.quiet import busy_share
from cluster.bench.results import ArmResult, Run, Stream, Workload
from cluster.bench.streams import Recorder
from cluster.bench.windows import Marks
from cluster.control.bringup import ClusterHandle
from protocol.errors import InternalError, TandemError
from protocol.wire.inference_client import GenerateCall, InferenceClient
from router.text import TextCodec

Progress = Callable[[str], None]

PHASE_LIMIT_S = 180.0  # no phase of a run takes this long unless something is wrong


def compare(
    arms: Sequence[Arm], workload: Workload, repeats: int, progress: Progress
) -> list[ArmResult]:
    """Run every arm ``repeats`` times, alternating, each on a cluster of its own.

    Raises the ``TandemError`` of a stream that failed, with the arm and repeat in the message.
    """
    runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
    foreign: dict[str, list[float]] = {arm.name: [] for arm in arms}
    plan = [(repeat, arm) for repeat in range(repeats) for arm in arms]
    with ClusterHandle(keep_ray=True) as cluster:
        for number, (repeat, arm) in enumerate(plan, 1):
            label = f"[{number}/{len(plan)}] {arm.name}"
            if repeats > 1:
                label += f", repeat {repeat + 1}"

            def say(line: str, label: str = label) -> None:
                progress(f"{label}: {line}")

            say(f"starting {arm.describe_workers()}")
            share = busy_share()
            if share is not None:
                foreign[arm.name].append(share)
            endpoints = cluster.start(arm.config, StartLines(say).show)
            codec = TextCodec(arm.config.model.path)
            run = asyncio.run(_measure(endpoints.grpc, workload, codec, say))
            runs[arm.name].append(run)
            say(f"longest silence of a chat {run.gaps()['during'].max:.0f} ms")
            cluster.stop()
    return [
        ArmResult(arm, tuple(runs[arm.name]), max(foreign[arm.name], default=None)) for arm in arms
    ]


async def _measure(endpoint: str, workload: Workload, codec: TextCodec, progress: Progress) -> Run:
    async with InferenceClient(endpoint) as client:
        recorder = Recorder(client)
        try:
            return await _one_run(recorder, workload, codec, progress)
        except TimeoutError as e:
            raise InternalError(str(e)) from None
        finally:
            await recorder.close()


async def _one_run(
    recorder: Recorder, workload: Workload, codec: TextCodec, progress: Progress
) -> Run:
    for i, length in enumerate((32, 640)):
        prompt = long_prompt(codec, length, number=900 + i)
        stream = recorder.start(f"warm-up {length}", _call(prompt, 4))
        await _reach(recorder, [stream], partial(_has_finished, stream), "the warm-up request")

    progress(f"{workload.chats} chats are streaming")
    chats = [
        recorder.start(f"chat {i + 1}", _call(chat_prompt(codec, i), workload.chat_output))
        for i in range(workload.chats)
    ]

    def new_gaps(since: float) -> int:
        return sum(max(0, sum(1 for t in c.arrivals if t > since) - 1) for c in chats)

    await _reach(
        recorder,
        chats,
        lambda: all(len(c.arrivals) >= windows.WARM_TOKENS for c in chats),
        "every chat's 8th token",
    )
    warm_at = recorder.now()
    await _reach(
        recorder, chats, lambda: new_gaps(warm_at) >= workload.window_gaps, "the window before"
    )
    progress(f"a prompt of {workload.long_tokens} tokens arrives")
    prompt = long_prompt(codec, workload.long_tokens, number=1)
    long = recorder.start("long prompt", _call(prompt, workload.long_output))
    await _reach(
        recorder, [*chats, long], lambda: len(long.arrivals) >= 2, "the long prompt's second token"
    )
    second = long.arrivals[1]
    await _reach(
        recorder,
        [*chats, long],
        lambda: new_gaps(second) >= workload.window_gaps,
        "the last window",
    )
    end = recorder.now()
    for chat in chats:
        if chat.finished:
            raise InternalError(
                f"{chat.name} ended after {len(chat.arrivals)} tokens, before the measurement did"
            )
    return Run(tuple(chats), long, Marks(warm_at, long.submitted, second), end)


def _has_finished(stream: Stream) -> bool:
    return stream.finished


async def _reach(
    recorder: Recorder, streams: Sequence[Stream], reached: Callable[[], bool], what: str
) -> None:
    """Wait until ``reached()``, or raise the first error of ``streams``."""

    def over() -> bool:
        return any(s.error for s in streams) or reached()

    await recorder.until(over, PHASE_LIMIT_S, what)
    for stream in streams:
        if stream.error:
            raise _named(stream.error, f"{stream.name}, waiting for {what}")


def _named(error: TandemError, where: str) -> TandemError:
    return type(error)(f"{where}: {error.message}", field=error.field)


def _call(prompt: tuple[int, ...], max_tokens: int) -> GenerateCall:
    return GenerateCall(token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
