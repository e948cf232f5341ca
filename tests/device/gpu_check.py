"""The check to run on a machine with a GPU: one command, under eight minutes, prints as it goes.

    python tests/device/gpu_check.py

Needs a checkout, torch, transformers and triton; flash-attn is checked too where it is installed.
Exit code 0: every backend agrees with the oracle on the whole table, and graphs with the plain
path. What is measured (step times, share of the memory's bandwidth, kernels and launches, mixed
steps, tiles) is printed with its target and decides nothing. ``--device cpu --tiny`` runs every
line of it on a machine without a GPU, with the kernels in Triton's interpreter.
"""

# ruff: noqa: E402 (a plain checkout is on no path before the lines that put it there)

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
sys.path.append(str(Path(__file__).parent))

import torch
from attention_cases import ROWS, ROWS_256, SHAPES, SHAPES_256, Shape, agree, random_rows
from gpu_measure import Budget, alternating, bandwidth, shares, step_seconds
from gpu_model import LARGE, SMALL, TINY, ModelShape, Rig
from triton_kernels_as import interpreted_kernels

from kernels import attn_triton
from kernels.attention import AttentionBackend
from kernels.attention_op import BACKENDS
from kernels.attn_triton import Tile, TritonAttention

DECODE_TILES = (Tile(16, 64, 4, 3), Tile(16, 128, 4, 2), Tile(16, 32, 4, 4), Tile(16, 64, 2, 3))
PROMPT_TILES = (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(128, 128, 8, 2), Tile(128, 64, 4, 3))
LONG_CONTEXTS = [(1500, 1), (600, 8), (0, 70), (1100, 3)]


class Check:
    """The parts in order; ``failures`` decides the exit code."""

    def __init__(self, device: torch.device, tiny: bool, seconds: float) -> None:
        self.device, self.tiny = device, tiny
        self.budget = Budget(seconds)
        self.failures: list[str] = []
        self.bandwidth = 0.0

    @contextmanager
    def part(self, name: str, needs_s: float = 0.0) -> Iterator[bool]:
        """One part; yields False where the time left is too short. A crash in it is a failure."""
        started = time.monotonic()
        go = self.tiny or self.budget.left() >= needs_s
        print(f"\n== {name}" + ("" if go else ": left out, no time"), flush=True)
        try:
            yield go
        except Exception as e:
            self.failures.append(f"{name}: {type(e).__name__}: {e}")
            print(f"FAILED: {type(e).__name__}: {e}", flush=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if go:
            print(f"   ({time.monotonic() - started:.0f} s)", flush=True)

    # Right answers

    def table(self, backend: AttentionBackend) -> None:
        """The whole table of mixed batches, features and types."""
        name = backend.declaration.name
        declared = "cuda" if name == "triton" and self.device.type == "cpu" else None
        passed, undeclared, wrong = 0, {}, []
        for case, shape, rows, seed in self._cases(backend.declaration.page_multiple):
            if self.budget.left() < 60 and not self.tiny:
                wrong.append("the time ran out")
                break
            try:
                reason = agree(backend, shape, rows, seed, str(self.device), declared)
            except Exception as e:  # an assertion, a compiler, a foreign library
                wrong.append(f"{case}: {' '.join(str(e).split())[:160]}")
                continue
            if reason:
                undeclared[reason] = undeclared.get(reason, 0) + 1
            passed += not reason
        for reason, n in undeclared.items():
            print(f"   {name}: {n} cases not declared: {reason}")
        for line in wrong[:8]:
            print(f"   {name}: WRONG {line}")
        print(f"   {name}: {passed} agree with the oracle, {len(wrong)} do not", flush=True)
        if wrong:
            self.failures.append(f"{name}: {len(wrong)} cases, {wrong[0]}")

    def _cases(self, multiple: int) -> Iterator[tuple[str, Shape, list[tuple[int, int]], int]]:
        shapes, rows = (SHAPES, ROWS) if multiple == 1 else (SHAPES_256, ROWS_256)
        if self.tiny:
            shapes = {name: shapes[name] for name in list(shapes)[-1:]}
            rows = {"mixed": ROWS["mixed"]}
        elif multiple == 1:
            shapes = shapes | {"float16": Shape(dtype="float16")}
            for head_dim in (64, 80, 128, 256):  # the tiles that real models get
                name = f"head size {head_dim}, bfloat16"
                shapes[name] = Shape(8, 2, head_dim, 16, "bfloat16")
        if not self.tiny:  # contexts that are cut into parts and joined
            for name, shape in shapes.items():
                if shape.page_size >= 16:
                    yield f"{name}, long contexts", shape, LONG_CONTEXTS, 0
        for shape_name, shape in shapes.items():
            for rows_name, lengths in rows.items():
                yield f"{shape_name}, {rows_name}", shape, lengths, 0
        for seed in range(1 if self.tiny else 6):
            names = list(shapes)
            yield f"random {seed}", shapes[names[seed % len(names)]], random_rows(seed), seed

    # Times

    def memory(self) -> None:
        """What the device's memory gives to reading."""
        self.bandwidth = bandwidth(self.device)
        print(f"   {self.bandwidth / 1e9:,.0f} GB/s")

    def decode(self, rig: Rig) -> None:
        """Decode steps with and without graphs, beside the time that reading alone takes."""
        sizes, contexts = ((1, 2), (8,)) if self.tiny else ((8, 16, 32, 64), (1024, 4096, 8192))
        rig.record(sizes)
        print("   batch context |   graph   eager | reads alone   ratio (target 1.4)", flush=True)
        for context in contexts:
            for size in sizes:
                if size * rig.geometry.pages_for(context + 1) > len(rig.kv):
                    print(f"   {size:5} {context:7} | the pool is too small here")
                    continue
                rows = rig.rows([(context, 1)] * size)
                arms = {"graph": partial(rig.graphed, rows), "eager": partial(rig.eager, rows)}
                took = alternating(arms, self.device, 2 if self.tiny else 9)
                held = size * context * rig.geometry.page_bytes / rig.page_size
                least = (rig.weight_bytes + held) / self.bandwidth
                graph, eager = took["graph"], took["eager"]
                print(
                    f"   {size:5} {context:7} | {graph * 1e3:7.2f} {eager * 1e3:7.2f} |"
                    f" {least * 1e3:8.2f} ms  {graph / least:5.2f}",
                    flush=True,
                )

    def graphs_agree(self, rig: Rig) -> None:
        """Logits of graph and plain path on the same pool, at sizes between the recorded ones."""
        sizes = (1, 2) if self.tiny else (1, 3, 7, 8, 13, 33)
        rig.record((1, 2) if self.tiny else (1, 2, 4, 8, 16, 64))
        for size in sizes:
            rows = rig.rows([(3 + 5 * r if self.tiny else 200 + 37 * r, 1) for r in range(size)])
            want = rig.eager(rows).float()
            got = rig.graphed(rows).float()
            apart = (got - want).abs().max().item()
            print(f"   batch {size}: largest difference of logits {apart:.2e}", flush=True)
            if not apart <= 0.1 * max(1.0, want.abs().max().item()):
                self.failures.append(f"graphs: batch {size} differs by {apart}")

    def who_took_the_time(self, rig: Rig) -> None:
        """Kernels and launches of one decode step."""
        size, context = (2, 8) if self.tiny else (8, 1024)
        rows = rig.rows([(context, 1)] * size)
        for name, step in (("eager", rig.eager), ("graph", rig.graphed)):
            took = step_seconds(partial(step, rows), self.device, 2 if self.tiny else 9)
            s = shares(partial(step, rows), self.device)
            print(
                f"   {name}: {took * 1e3:.2f} ms, {s.kernels} kernels, {s.busy_s * 1e3:.2f} ms in"
                f" them (attention {s.attention:.0%}, products {s.products:.0%});"
                f" outside them {max(0.0, 1 - s.busy_s / took):.0%}",
                flush=True,
            )

    def mixed(self, rig: Rig) -> None:
        """A mixed step beside its parts alone."""
        cases = [(2, 8, 6, 0)] if self.tiny else [(32, 4096, 2016, 2048), (16, 1024, 512, 0)]
        for n, context, chunk, behind in cases:
            decodes, prompt = [(context, 1)] * n, [(behind, chunk)]
            parts = {"decodes": decodes, "chunk": prompt, "mixed": decodes + prompt}
            arms = {name: partial(rig.eager, rig.rows(part)) for name, part in parts.items()}
            t = alternating(arms, self.device, 2 if self.tiny else 9)
            whole, aim = t["decodes"] + t["chunk"], t["chunk"] + t["decodes"] / 2
            print(
                f"   {n} decodes at {context} {t['decodes'] * 1e3:.2f} ms + chunk of {chunk} after"
                f" {behind} {t['chunk'] * 1e3:.2f} ms; mixed {t['mixed'] * 1e3:.2f} ms ="
                f" {t['mixed'] / whole:.2f} of the sum (target 1.00, aim {aim / whole:.2f})",
                flush=True,
            )

    def tiles(self) -> None:
        """One layer of attention in an 8B shape with each tile: where a better one may be."""
        cut = [("decode", DECODE_TILES, [(4096, 1)] * 32), ("chunk", PROMPT_TILES, [(4096, 2048)])]
        shape = ModelShape("one layer", 1, 4096, 32, 8, 64, 320)
        for name, tiles, lengths in cut:
            if self.tiny:
                lengths, tiles, shape = [(5, len(name) // 6 + 1)], tiles[:1], TINY
            rig = Rig(shape, TritonAttention(), self.device, 8 if self.tiny else 10_000)
            batch = rig.pack(rig.rows(lengths))
            T, D = len(batch.tokens_T), rig.geometry.head_dim
            q, k = (
                torch.randn(h, T, D, dtype=rig.kv.dtype, device=self.device).transpose(0, 1)
                for h in (shape.heads, shape.kv_heads)
            )
            for tile in tiles:
                backend = TritonAttention(tiles=lambda *_args, tile=tile: tile)
                plan = backend.plan(batch, rig.geometry, self.device)
                call = attn_triton.LayerCall(0, D**-0.5)
                step = partial(backend.attend, q, k, k, rig.kv, plan, call)
                took = step_seconds(step, self.device, 2 if self.tiny else 15)
                print(f"   {name} {tile}: {took * 1e6:,.0f} us", flush=True)

    def compiled_blocks(self, rig: Rig) -> None:
        """The same decode steps with each decoder layer compiled (target 1.2 of reading alone)."""
        for layer in rig.module.model.layers:
            layer.compile(dynamic=False)
        rig.record((8,))
        for context in (1024, 4096):
            rows = rig.rows([(context, 1)] * 8)
            took = step_seconds(partial(rig.graphed, rows), self.device)
            held = 8 * context * rig.geometry.page_bytes / rig.page_size
            least = (rig.weight_bytes + held) / self.bandwidth
            print(f"   batch 8, context {context}: {took * 1e3:.2f} ms, ratio {took / least:.2f}")

    def run(self) -> int:
        """Everything; 0 if all answers are right."""
        for backend in BACKENDS:
            d = backend.declaration
            here = "cuda" in d.devices or (self.tiny and d.name == "cpu")
            missing = d.missing() if d.missing and self.device.type == "cuda" else None
            if d.name == "reference" or not here or (self.tiny and d.page_multiple > 1):
                continue
            with self.part(f"{d.name} against the oracle") as go:
                if go and missing:
                    print(f"   left out: {missing}")
                elif go:
                    self.table(backend)
        with self.part("memory bandwidth", 20) as go:
            if go:
                self.memory()
        for shape in (TINY,) if self.tiny else (SMALL, LARGE):
            self._model(shape)
        with self.part("tiles of the attention kernel", 40) as go:
            if go:
                self.tiles()
        print("\n== " + ("all answers are right" if not self.failures else "WRONG:"))
        for failure in self.failures:
            print(f"   {failure}")
        return 1 if self.failures else 0

    def _model(self, shape: ModelShape) -> None:
        rig = None
        with self.part(f"{shape.name}, {shape.dtype}: loading", 60) as go:
            if go:
                rig = Rig(shape, TritonAttention(), self.device, self._pages(shape))
                print(f"   {rig.weight_bytes / 1e9:.2f} GB read per step, {len(rig.kv)} pages")
        if rig is None:
            return
        for name, measure in (
            ("graphs against the plain path", self.graphs_agree),
            ("decode steps", self.decode),
            ("where a decode step's time goes", self.who_took_the_time),
            ("mixed steps", self.mixed),
        ):
            with self.part(f"{shape.name}: {name}", 30) as go:
                if go:
                    measure(rig)
        if shape is LARGE:
            with self.part(f"{shape.name}: compiled blocks", 100) as go:
                if go:
                    self.compiled_blocks(rig)

    def _pages(self, shape: ModelShape) -> int:
        if self.device.type == "cpu":
            return 32
        page_bytes = shape.layers * 2 * 16 * shape.kv_heads * (shape.hidden // shape.heads) * 2
        weights = 2 * shape.layers * shape.hidden * (3 * shape.ffn + 3 * shape.hidden)
        free = torch.cuda.mem_get_info(self.device)[0] - 1.3 * weights - 6e9
        return max(64, min(64 * 8208 // 16, int(0.85 * free / page_bytes)))


def main() -> int:
    """Parse, describe the machine, check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="every line once, on tiny shapes")
    parser.add_argument("--seconds", type=float, default=450, help="time to stay within")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        device = torch.device("cuda", torch.cuda.current_device())
        print(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    print(f"torch {torch.__version__}, {given.device}{', tiny' if given.tiny else ''}")
    with nullcontext() if device.type == "cuda" else interpreted_kernels():
        return Check(device, given.tiny, given.seconds).run()


if __name__ == "__main__":
    sys.exit(main())
