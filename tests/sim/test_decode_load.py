"""What the reserve is worth, and that skipping repeated plans changes not one byte.

`python -m pytest -s tests/sim/test_decode_load.py -m long` prints the whole table of the reserve.
Everything is simulated time: the figures are exact and the same on every machine.
"""

from __future__ import annotations

import random

import pytest
from sim.decode_load import (
    AZURE,
    EOS,
    Arrival,
    DecodeLoad,
    Outcome,
    StepModel,
    azure_lengths,
    first_token_times,
    percentile,
)

from protocol.role import RoleOptions

GPU, CPU = StepModel(), StepModel(step=0.05, token=1.5e-3, pair=1e-7, copy=1e-3)
RESERVES = (0, 16, 64, 128, 256, 512, 1 << 20)
CHOSEN = RoleOptions(1, 128, 32, 100).reserve_tokens


def options(**changes: object) -> RoleOptions:
    values: dict[str, object] = {
        "page_bytes": 1 << 20,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
        "max_model_len": 1 << 20,
        "eos_token_ids": (EOS,),
        "hash_root": b"root",
        "max_waiting": 1 << 20,
        "lease_s": 1e9,
        **changes,
    }
    return RoleOptions(**values)  # type: ignore[arg-type]


def chat(n: int, max_tokens: int, spacing_s: float = 0.01) -> list[Arrival]:
    """Recorded lengths; the clients ask for far more tokens than they get."""
    return [
        Arrival(spacing_s * i, min(n_in, 4000), min(n_out, max_tokens), max_tokens)
        for i, (n_in, n_out) in enumerate(azure_lengths(n, seed=1))
    ]


def long_answers(n: int) -> list[Arrival]:
    """Answers much longer than their prompts: what is admitted is not what will be needed."""
    rng = random.Random(3)
    return [Arrival(0.05 * i, rng.randint(50, 400), rng.randint(500, 1500), 2000) for i in range(n)]


def run(
    arrivals: list[Arrival], pages: int, reserve: int, model: StepModel = GPU, host: int = 0
) -> Outcome:
    budget = 2048 if model is GPU else 384
    made = options(reserve_tokens=reserve, host_pages=host, max_num_batched_tokens=budget)
    return DecodeLoad(arrivals, pages, made, model=model).run()


def line(name: str, reserve: int, out: Outcome, arrivals: list[Arrival]) -> str:
    needed = sum(a.n_in + a.n_out - 1 for a in arrivals)
    waits = first_token_times(arrivals, out.log)
    return (
        f"{name:<28} reserve {reserve if reserve < 1 << 20 else 'all':>4}: "
        f"{out.tokens / out.seconds:7.1f} tokens/s, {out.computed / needed:.2f} x computed, "
        f"preempted {out.counts['preemptions recompute']} + {out.counts['preemptions offload']} "
        f"moved, first token p50 {percentile(waits, 0.5):.1f} s, p99 {percentile(waits, 0.99):.1f}"
    )


@pytest.mark.parametrize(
    ("arrivals", "pages", "gain"),
    [(chat(70, 4096), 1200, 2.0), (long_answers(16), 300, 2.0)],
    ids=["chat", "long answers"],
)
def test_the_chosen_reserve_is_near_the_best_of_all(
    arrivals: list[Arrival], pages: int, gain: float
) -> None:
    """By throughput; and far ahead of what keeps room for every token that was asked for."""
    speed = {}
    for reserve in (0, CHOSEN, 256, 1 << 20):
        out = run(arrivals, pages, reserve)
        assert out.tokens == sum(a.n_out for a in arrivals)
        speed[reserve] = out.tokens / out.seconds
        print(f"\n{line('', reserve, out, arrivals)}", end="")
    assert speed[CHOSEN] > 0.93 * max(speed.values()), speed
    assert speed[CHOSEN] > gain * speed[1 << 20], speed


@pytest.mark.parametrize("host_pages", [0, 100])
def test_five_minutes_are_the_same_with_and_without_skipping(host_pages: int) -> None:
    rng = random.Random(5)
    arrivals = [
        Arrival(
            at=rng.random() * 300,
            n_in=rng.choice((5, 40, 300)),
            n_out=rng.randint(1, 300),
            max_tokens=300,
            n_choices=rng.choice((1, 1, 1, 3)),
            cancel_after=rng.choice((None, None, None, rng.random() * 20)),
        )
        for _ in range(120)
    ]
    made = options(reserve_tokens=16, host_pages=host_pages)
    one = DecodeLoad(arrivals, 150, made, model=CPU, skip=False).run()
    two = DecodeLoad(arrivals, 150, made, model=CPU, skip=True).run()
    assert one.seconds == two.seconds > 300
    assert "\n".join(one.log).encode() == "\n".join(two.log).encode()
    how = "offload" if host_pages else "recompute"
    assert one.counts == two.counts and one.counts[f"preemptions {how}"] > 0
    assert one.steps == two.steps == one.plans and two.plans < one.plans / 2
    print(f"\n{one.plans} plans became {two.plans}")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_the_whole_table_of_the_reserve(device: str) -> None:
    model = GPU if device == "gpu" else CPU
    print(f"\nlengths: {AZURE.name if AZURE.exists() else 'made up'}")
    cases = [(f"chat, max_tokens {m}", chat(150, m), 2000, 0) for m in (256, 1024, 4096)]
    cases += [("long answers", long_answers(80), 600, host) for host in (0, 600)]
    for name, arrivals, pages, host in cases:
        speed = {}
        for reserve in RESERVES:
            out = run(arrivals, pages, reserve, model, host)
            speed[reserve] = out.tokens / out.seconds
            print(line(f"{device}, {name}{', host' * bool(host)}", reserve, out, arrivals))
        assert speed[CHOSEN] > 0.9 * max(speed.values())
