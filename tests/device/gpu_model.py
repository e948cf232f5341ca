"""A random model of a given shape with a pool of pages, as the GPU check runs it.

This file owns how weights and pages come to be without a model folder: the shape is made up, the
numbers are random, the code is transformers' own with our attention. It must never measure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kernels.attention import AttentionBackend, Plan
from kernels.attention_op import NAME, PagedStep
from kernels.batch import Batch, pack
from kernels.graphs import GraphedDecode
from kernels.model import forward
from protocol.step import StepRow
from protocol.types import KvGeometry, SamplingParams, TicketId

SAMPLED = SamplingParams(max_tokens=1)


@dataclass(frozen=True)
class ModelShape:
    """A llama's numbers."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    max_positions: int = 16384
    dtype: str = "bfloat16"

    def config(self) -> object:
        """transformers' configuration of it."""
        return AutoConfig.for_model(
            "llama",
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.ffn,
            vocab_size=self.vocab,
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=False,
        )


LARGE = ModelShape("8B-shaped llama", 32, 4096, 32, 8, 14336, 128256)
SMALL = ModelShape("SmolLM2-135M-shaped llama", 30, 576, 9, 3, 1536, 49152)
TINY = ModelShape("tiny llama", 2, 32, 2, 1, 64, 320, 64, "float32")


class Rig:
    """A model, its pool, and steps of chosen sizes through either path."""

    def __init__(
        self, shape: ModelShape, backend: AttentionBackend, device: torch.device, pages: int
    ) -> None:
        self.shape, self.backend, self.device = shape, backend, device
        self.page_size = 16 if shape.max_positions > 64 else 4
        head_dim = shape.hidden // shape.heads
        self.geometry = KvGeometry(
            shape.layers, shape.kv_heads, head_dim, self.page_size, shape.dtype
        )
        dtype = getattr(torch, shape.dtype)
        torch.manual_seed(0)
        with device:
            self.module = AutoModelForCausalLM.from_config(
                shape.config(), dtype=dtype, attn_implementation=NAME
            )
        self.module.eval().requires_grad_(False)
        size = (pages, shape.layers, 2, self.page_size, shape.kv_heads, head_dim)
        self.kv = torch.empty(size, dtype=dtype, device=device)
        for page in self.kv.split(1024):
            page.normal_()
        self.graphs: GraphedDecode | None = None

    @property
    def weight_bytes(self) -> int:
        """What every step reads: all weights but the table of embeddings."""
        table = self.module.get_input_embeddings().weight
        return sum(w.numel() * w.element_size() for w in self.module.parameters()) - (
            table.numel() * table.element_size()
        )

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        """Logits of a packed step; see ``kernels.graphs.Forward``."""
        step = PagedStep(self.kv, plan, self.backend.declaration.name)
        return forward(
            self.module,
            tokens,
            position_ids=positions[None],
            logits_to_keep=keep,
            tandem_step=step,
        )

    def record(self, sizes: tuple[int, ...]) -> None:
        """Record graphs of these batch sizes."""
        positions = self.shape.max_positions
        self.graphs = GraphedDecode(
            self.forward, self.backend, self.geometry, self.device, positions, sizes
        )
        self.graphs.record()

    def rows(self, lengths: list[tuple[int, int]]) -> list[StepRow]:
        """A row per ``(start, tokens)`` over scattered pages; pages repeat where the pool ends."""
        order = np.random.default_rng(1).permutation(len(self.kv))
        rows, at = [], 0
        for start, n in lengths:
            count = self.geometry.pages_for(start + n)
            pages = order[np.arange(at, at + count) % len(order)].tolist()
            at += count
            rows.append(StepRow(TicketId(str(len(rows))), [7] * n, start, pages, SAMPLED))
        return rows

    def pack(self, rows: list[StepRow]) -> Batch:
        """The step on the host."""
        cpu = torch.device("cpu")
        return pack(rows, self.page_size, len(self.kv), self.shape.vocab, cpu)

    @torch.inference_mode()
    def eager(self, rows: list[StepRow]) -> torch.Tensor:
        """One step as it runs without graphs, from rows to logits."""
        batch = self.pack(rows).to(self.device)
        plan = self.backend.plan(batch, self.geometry, self.device)
        return self.forward(batch.tokens_T, batch.positions_T, batch.sampled_at, plan)

    @torch.inference_mode()
    def graphed(self, rows: list[StepRow]) -> torch.Tensor:
        """One decode step as it runs with graphs, from rows to logits."""
        if self.graphs is None or (logits := self.graphs.run(self.pack(rows))) is None:
            raise ValueError("not a step for a graph, or nothing recorded")
        return logits
