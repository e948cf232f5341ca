"""The cost model: finds what it was fed, follows a change, is not led astray, never negative."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.costs import LinearCost, StepCosts, StepShape, TransferCosts, attended_by
from protocol.errors import InternalError

TRUE = (0.012, 4e-4, 3e-8, 2e-4)


def any_shape(rng: random.Random) -> StepShape:
    decodes, chunk = rng.randint(1, 64), rng.choice((0, 0, 64, 512, rng.randint(1, 2048)))
    attended = sum(rng.randint(10, 4000) for _ in range(decodes))
    attended += attended_by(rng.randint(0, 4000), chunk)
    return StepShape(decodes + chunk, attended, rng.choice((0, 0, 0, rng.randint(1, 200))))


def seconds(shape: StepShape, truth: tuple[float, ...] = TRUE) -> float:
    return sum(c * a for c, a in zip(truth, shape.amounts, strict=True))


def worst(model: StepCosts, truth: tuple[float, ...] = TRUE, share: float = 1.0) -> float:
    """The largest relative error over the best ``share`` of 200 shapes it has not seen."""
    rng = random.Random(99)
    shapes = [any_shape(rng) for _ in range(200)]
    errors = sorted(abs(model.step_s(s) / seconds(s, truth) - 1) for s in shapes)
    return errors[int(share * len(errors)) - 1]


@pytest.mark.parametrize("seed", range(5))
def test_known_coefficients_are_found(seed: int) -> None:
    rng, model = random.Random(seed), StepCosts()
    for _ in range(1500):
        shape = any_shape(rng)
        model.observe(shape, seconds(shape))
    assert worst(model) < 0.02
    for found, true in zip(model.coefficients, TRUE, strict=True):
        assert found == pytest.approx(true, rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_wild_outliers_do_not_lead_it_astray(seed: int) -> None:
    rng, model = random.Random(seed), StepCosts()
    for _ in range(2000):
        shape = any_shape(rng)
        took = seconds(shape) * rng.uniform(0.9, 1.1)
        if rng.random() < 0.05:
            took *= rng.choice((0.01, 20, 100))
        model.observe(shape, took)
    assert worst(model, share=0.9) < 0.25


@pytest.mark.parametrize("factor", [0.1, 10])
def test_it_follows_a_machine_that_changed(factor: float) -> None:
    rng, model = random.Random(1), StepCosts()
    changed = tuple(c * factor for c in TRUE)
    for i in range(6000):
        shape = any_shape(rng)
        model.observe(shape, seconds(shape, changed if i > 3000 else TRUE))
    assert worst(model, changed) < 0.1


amounts = st.lists(st.floats(0, 1e6), min_size=3, max_size=3)


@settings(max_examples=200)
@given(st.lists(st.tuples(amounts, st.floats(1e-6, 1e4)), max_size=60), amounts)
def test_no_prediction_is_ever_negative(
    seen: list[tuple[list[float], float]], asked: list[float]
) -> None:
    model = LinearCost((0.1, 0.0, 1e-6))
    for work, took in seen:
        model.observe(work, took)
        assert all(c >= 0 for c in model.coefficients)
    assert model.predict(asked) >= 0


def test_one_shape_alone_is_predicted_and_the_rest_keeps_its_guess() -> None:
    model = StepCosts(page_bytes=2_000_000)
    for _ in range(50):
        model.observe(StepShape(8, 800), 0.2)
    assert model.step_s(StepShape(8, 800)) == pytest.approx(0.2, rel=0.01)
    assert model.copy_s(10) == pytest.approx(0.01)  # never seen: 2 GB/s


def test_what_took_no_time_says_nothing() -> None:
    model = TransferCosts()
    before = model.transfer_s(10**9)
    model.observe(10**9, 0.0)
    assert model.transfer_s(10**9) == before == pytest.approx(1.001)


def test_marginal_costs_leave_the_fixed_part_out() -> None:
    model = StepCosts()
    _, token_s, pair_s, _ = model.coefficients
    assert model.recompute_s(100, 50) == pytest.approx(100 * token_s + (5000 + 5050) * pair_s)
    assert attended_by(0, 3) == 1 + 2 + 3 and attended_by(10, 2) == 11 + 12
    with pytest.raises(InternalError):
        LinearCost((-1.0,))
