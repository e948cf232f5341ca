"""Decode through the fixed buffers of CUDA graphs, on a CPU: same logits, same tokens, no trace.

The model runs anew where a GPU would replay; all else (padding, buffers, the one copy) is the
real path. Attention is our Triton kernel in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny import tiny_llama, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM
from triton_kernels_as import interpreted_kernels

from kernels.attention_op import PagedStep
from kernels.attn_flash import FlashAttention
from kernels.attn_triton import TritonAttention
from kernels.batch import pack
from kernels.graphs import GraphedDecode, obstacle
from kernels.model import forward, load_model
from kernels.runner import Runner
from protocol.errors import InternalError
from protocol.step import StepRow
from protocol.types import SamplingParams, TicketId

PAGE, PAGES, SIZES = 4, 64, (1, 2, 4, 8)
CPU = torch.device("cpu")
BACKEND = TritonAttention()
GREEDY = SamplingParams(max_tokens=1)


@pytest.fixture(autouse=True)
def interpreter():
    with interpreted_kernels():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    shape = {"hidden": 32, "heads": 2, "kv_heads": 1, "max_position_embeddings": 64}
    return load_model(tiny_llama(folder, **shape))  # few heads: the interpreter is slow


class Rig:
    """A pool of its own beside the model; the plain path and the graphed one."""

    def __init__(self, model, record: bool = True) -> None:
        self.model = model
        self.geometry = g = model.geometry(PAGE)
        generator = torch.Generator().manual_seed(3)
        self.kv = torch.randn(PAGES, g.layers, 2, PAGE, g.kv_heads, g.head_dim, generator=generator)
        self.graphs = GraphedDecode(self.forward, BACKEND, g, CPU, 64, SIZES)
        if record:
            self.graphs.record()

    def forward(self, tokens, positions, sampled_at, plan):
        step = PagedStep(self.kv, plan, BACKEND.declaration.name)
        return forward(
            self.model.module,
            tokens,
            position_ids=positions[None],
            logits_to_keep=sampled_at,
            tandem_step=step,
        )

    @torch.inference_mode()
    def plain(self, batch):
        plan = BACKEND.plan(batch, self.geometry, CPU)
        return self.forward(batch.tokens_T, batch.positions_T, batch.sampled_at, plan)

    def pack(self, rows):
        return pack(rows, PAGE, PAGES, self.model.described.vocab_size, CPU)


def decode_rows(n: int, step: int = 0, tokens=None) -> list[StepRow]:
    """Row ``r`` has ``3 * r + step`` positions behind it, in pages of its own."""
    rows, free = [], 0
    for r in range(n):
        start = 3 * r + step
        n_pages = (3 * r + 8) // PAGE + 1
        token = tokens[r] if tokens else 5 + r
        pages = tuple(range(free, free + n_pages))
        rows.append(StepRow(TicketId(str(r)), [token], start, pages, GREEDY))
        free += n_pages
    return rows


@pytest.mark.parametrize("n", [1, 3, pytest.param(8, marks=pytest.mark.long)])
def test_every_batch_size_has_the_plain_paths_logits_and_kv(model, n) -> None:
    plain, graphed = Rig(model), Rig(model)
    want = plain.plain(plain.pack(decode_rows(n)))
    got = graphed.graphs.run(graphed.pack(decode_rows(n)))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(graphed.kv, plain.kv, atol=1e-6, rtol=1e-6)


def test_recording_touches_no_page(model) -> None:
    before = Rig(model, record=False).kv
    assert torch.equal(Rig(model).kv, before)


def test_a_sequence_of_steps_gives_the_same_tokens(model) -> None:
    """The buffers carry nothing over: sizes change from step to step, downwards too."""
    plain, graphed = Rig(model), Rig(model)
    tokens = [7, 8, 9]
    for step, n in enumerate([3, 3, 1, 2]):
        rows = decode_rows(n, step, tokens)
        want = plain.plain(plain.pack(rows)).argmax(-1).tolist()
        got = graphed.graphs.run(graphed.pack(rows)).argmax(-1).tolist()
        assert got == want
        tokens[:n] = got


def test_steps_that_are_not_plain_decode_are_left_to_the_plain_path(model) -> None:
    graphs, rig = Rig(model).graphs, Rig(model)
    rows = decode_rows(2)
    several = [dataclasses.replace(rows[0], tokens=[1, 2]), rows[1]]
    unsampled = [dataclasses.replace(rows[0], sample=None), rows[1]]
    for step in (several, unsampled, decode_rows(9)):
        assert graphs.run(rig.pack(step)) is None
    assert Rig(model, record=False).graphs.run(rig.pack(rows)) is None


def test_a_runner_draws_the_same_tokens_from_a_graphs_logits(model, monkeypatch) -> None:
    here = dataclasses.replace(BACKEND.declaration, devices=frozenset({"cpu"}), missing=None)
    monkeypatch.setattr(TritonAttention, "declaration", here)
    monkeypatch.setattr("kernels.runner.BACKENDS", (TritonAttention(),))
    drawn = []
    for graphed in (False, True):
        rig = Rig(model, record=False)
        runner = Runner(model, rig.kv, PAGE)
        if graphed:
            runner._graphs = GraphedDecode(runner._forward, BACKEND, rig.geometry, CPU, 64, SIZES)
            runner._graphs.record()
        results = runner.run(decode_rows(3)).rows
        drawn.append([r.tokens for r in results])
        assert all(r.error is None and len(r.tokens) == 1 for r in results)
    assert drawn[0] == drawn[1]


def test_only_a_backend_that_knows_padding_rows_is_taken(model) -> None:
    with pytest.raises(InternalError, match="flash is not safe"):
        GraphedDecode(Rig(model).forward, FlashAttention(), model.geometry(PAGE), CPU, 64, SIZES)


def test_experts_in_host_loops_are_an_obstacle(tmp_path) -> None:
    folder = tiny_model(tmp_path, "qwen3_moe")
    how = {"eager": None, "grouped_mm": None}
    for name in how:
        config = AutoConfig.from_pretrained(folder)
        module = AutoModelForCausalLM.from_config(config, experts_implementation=name)
        how[name] = obstacle(module, torch.bfloat16)
        assert "float32" in str(obstacle(module, torch.float32)) or name == "eager"
    assert how == {"eager": "its experts run as eager, with loops on the host", "grouped_mm": None}


def test_a_model_without_experts_has_no_obstacle(model) -> None:
    assert obstacle(model.module, torch.float32) is None
