"""The real model through paged attention: a known answer, and agreement with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoTokenizer

from cluster.bench.agreement import agree
from kernels.model import load_model
from kernels.runner import Runner
from protocol.step import StepRow
from protocol.types import SamplingParams, TicketId

MODEL = Path(__file__).parents[2] / "models" / "smollm2-135m"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not MODEL.is_dir(), reason="run 'tandem model fetch smollm2-135m' for this test"
    ),
]


def answer(runner: Runner, prompt: list[int], n: int, ends: tuple[int, ...]) -> list[int]:
    pages, tokens, done = range(64), list(prompt), 0
    while len(tokens) < len(prompt) + n and not (done and tokens[-1] in ends):
        chunk = tokens[done : done + 24]
        last = done + len(chunk) == len(tokens)
        greedy = SamplingParams(max_tokens=n) if last else None
        row = StepRow(TicketId("a"), chunk, done, pages, greedy, len(tokens) - len(prompt))
        tokens += runner.run([row]).rows[0].tokens
        done += len(chunk)
    return tokens[len(prompt) :]


def test_capital_of_france() -> None:
    model = load_model(MODEL)
    info = model.info(16)
    g = info.geometry
    assert g.token_bytes == 45 * 1024
    kv = torch.full((64, g.layers, 2, 16, g.kv_heads, g.head_dim), float("nan"))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    got = answer(Runner(model, kv, 16), prompt, 40, info.eos_token_ids)
    assert tokenizer.decode(got, skip_special_tokens=True) == "The capital of France is Paris."
    want = tiny.reference_generate(MODEL, prompt, 40, ignore_eos=False)
    verdict = agree(prompt, got, want, lambda ids: tiny.reference_logits(MODEL, ids))
    assert verdict, verdict.reason


def test_digits_are_tokens_of_their_own() -> None:
    """As the model was trained; the tokenizer stored in the GGUF file alone would merge them."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert len(tokenizer("12345").input_ids) == 5
