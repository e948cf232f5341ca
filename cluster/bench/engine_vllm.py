"""The other end of ``engine_peer``: runs vLLM's offline engine over the same work, job by job.

This file is run by the interpreter of *another* environment, one that has vLLM, so it may import
nothing of Tandem and nothing but the standard library before vLLM. It must never choose a
favourable setting: what it is not told is vLLM's own default. vLLM prints to stdout, so answers go
through a pipe of their own.

Life: ``python engine_vllm.py OUT_FD SETTINGS`` -> loads the model, answers ``{"ready": ...}`` ->
one JSON job per line on stdin, one JSON answer per line on ``OUT_FD`` -> ends with stdin.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

# This folder holds modules with names that others use too; a spawned child gets the same path.
sys.path = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(__file__)]


class Peer:
    """A vLLM engine and the measurements that are made on it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """``settings``: model, dtype, max_model_len, max_num_seqs, vocab_size."""
        import vllm
        from vllm import LLM

        self.version = str(vllm.__version__)
        self._vocab = int(settings["vocab_size"])
        self._llm = LLM(
            model=settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
        )
        self._jobs = 0

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Carry out one job: ``{"tokens": n, "seconds": s}``."""
        if job["phase"] == "prefill":
            return self._prefill(job["context"])
        return self._decode(job["batch"], job["context"], job["steps"])

    def _prefill(self, length: int) -> dict[str, Any]:
        """Time to the first token of a prompt that no cache has seen."""
        self._jobs += 1
        begin = time.perf_counter()
        self._add("prefill", self._prompt(length, f"job {self._jobs}"), 1)
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()
        return {"tokens": length, "seconds": time.perf_counter() - begin}

    def _decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """Steady decode: from the moment when every sequence has two tokens to their end.

        The prompts are the same in every repeat, so that the prefix cache makes them cheap; each
        sequence has its own.
        """
        for i in range(batch):
            self._add(f"decode {i}", self._prompt(context, f"sequence {i}"), steps + 2)
        have: dict[str, int] = {}
        begun: float | None = None
        tokens, now = 0, time.perf_counter()
        while self._llm.llm_engine.has_unfinished_requests():
            outputs = self._llm.llm_engine.step()
            now = time.perf_counter()
            for output in outputs:
                n = len(output.outputs[0].token_ids)
                if begun is not None:
                    tokens += n - have.get(output.request_id, 0)
                have[output.request_id] = n
            if begun is None and len(have) == batch and min(have.values()) >= 2:
                begun = now
        return {"tokens": tokens, "seconds": now - (begun or now)}

    def _add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._jobs += 1
        request_id = f"{name} {self._jobs}"
        self._llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def _prompt(self, length: int, seed: str) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(self._vocab) for _ in range(length)]


def main(out_fd: int, settings: dict[str, Any]) -> None:
    """Answer jobs until stdin ends."""
    with os.fdopen(out_fd, "w", encoding="utf-8") as out:

        def say(answer: dict[str, Any]) -> None:
            out.write(json.dumps(answer) + "\n")
            out.flush()

        try:
            peer = Peer(settings)
        except ImportError as e:
            say({"error": f"it has no vllm that can be imported: {e}"})
            return
        say({"ready": f"vllm {peer.version}"})
        for line in sys.stdin:
            say(peer.run(json.loads(line)))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
