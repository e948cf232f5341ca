"""The arm beside ours: transformers' plain model on the same weights, threads and dtype.

Owns what "plain" means: ``from_pretrained`` with sdpa, its own ``DynamicCache``, one batch of equal
lengths without padding (the kindest shape for it), and the head on the last token only, so that
both arms compute the same. It must never use anything of ours but the description of the model.

Life: as of ``OurEngine``.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from cluster.bench.engine_work import Case, Phase, Work
from protocol.types import KvGeometry


class PlainTransformers:
    """transformers' forward, prefill and batch decode."""

    name = "transformers"

    def __init__(self, model: str, work: Work, geometry: KvGeometry, vocab_size: int) -> None:
        self._work, self._geometry, self._vocab = work, geometry, vocab_size
        dtype = getattr(torch, geometry.dtype)
        self.module: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
        self.module.train(False)
        # Renamed within the versions that we support.
        named = inspect.signature(self.module.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"
        decodes = [c for c in work.cases if c.phase is Phase.DECODE]
        widest = max((c.batch for c in decodes), default=0)
        longest = max((c.context for c in decodes), default=0)
        shape = (2, widest, geometry.kv_heads, longest, geometry.head_dim)
        self._kv = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)

    @torch.inference_mode()
    def measure(self, case: Case) -> float:
        """Tokens per second of one run of the case."""
        if case.phase is Phase.PREFILL:
            return self._prefill(case.context)
        return self._decode(case.batch, case.context)

    def close(self) -> None:
        """Let the weights go."""
        del self.module

    def flops(self, length: int) -> float:
        """Floating point operations of a prefill: two per weight that a token meets, and
        attention's two products over half of the square."""
        config = self.module.config.get_text_config()
        outside = {id(self.module.get_input_embeddings().weight)}
        if (head := self.module.get_output_embeddings()) is not None:
            outside.add(id(head.weight))
        active = getattr(config, "num_experts_per_tok", None) or 1
        weights = 0.0
        for p in self.module.parameters():
            if p.dim() == 2 and id(p) not in outside:
                weights += p.numel()
            elif p.dim() == 3:  # experts, of which a token meets some
                weights += p.numel() * active / p.shape[0]
        g = self._geometry
        attention = 2 * length * int(config.num_attention_heads) * g.head_dim * g.layers
        return length * (2 * weights + attention)

    def weight_bytes(self) -> int:
        """Bytes of all weights that a decode step reads: the head is read whole, of an untied
        embedding only a few rows."""
        embedding = self.module.get_input_embeddings().weight
        head = self.module.get_output_embeddings()
        tied = head is None or head.weight is embedding
        total: int = sum(p.numel() * p.element_size() for p in self.module.parameters())
        return total - (0 if tied else int(embedding.numel()) * int(embedding.element_size()))

    def _prefill(self, length: int) -> float:
        ids = torch.randint(self._vocab, (1, length))
        begin = time.perf_counter()
        logits = self.module(input_ids=ids, use_cache=True, logits_to_keep=1).logits
        int(logits[0, -1].argmax())
        return length / (time.perf_counter() - begin)

    def _decode(self, batch: int, context: int) -> float:
        cache = DynamicCache(config=self.module.config)
        key, value = self._kv[:, :batch, :, : context - 1]
        for layer in range(self._geometry.layers):
            cache.update(key, value, layer)
        ids = torch.randint(self._vocab, (batch, 1))
        begin = 0.0
        for step in range(self._work.steps + 1):
            if step == 1:
                begin = time.perf_counter()
            logits = self.module(
                input_ids=ids, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache}
            ).logits
            ids = logits[:, -1].argmax(dim=-1, keepdim=True)
            ids.tolist()  # both arms hand over numbers
        return batch * self._work.steps / (time.perf_counter() - begin)
