"""What the engine believes a step costs, and how many prompt tokens it therefore allows."""

from __future__ import annotations

import pytest

from localllm.runner.cost import MIN_PREFILL_TOKENS, StepCost

# Seconds of a micro-batch, of a token of an answer and of a token of a prompt.
BATCH, TOKEN, PROMPT = 0.008, 0.004, 0.0024


def observe(cost: StepCost, num_decode: int, num_prefill: int, *, slowness: float = 1.0) -> None:
    batches = bool(num_decode) + bool(num_prefill)
    cost.observe(num_decode, num_prefill, slowness * (BATCH * batches + TOKEN * num_decode + PROMPT * num_prefill))


def test_a_step_of_a_size_never_seen_is_foretold_from_others() -> None:
    cost = StepCost(0.1)
    for num_decode in (1, 2, 4, 8):
        observe(cost, num_decode, 0)
    assert cost.decode_step(16) == pytest.approx(BATCH + 16 * TOKEN)
    assert cost.read_weights == pytest.approx(BATCH)


def test_prompts_get_the_tokens_that_fit_the_target() -> None:
    cost = StepCost(0.1)
    for num_prefill in (30, 80, 0, 200):
        observe(cost, 4, num_prefill)
    assert cost.prefill_budget(4) == pytest.approx((0.1 - BATCH) / PROMPT, abs=1)
    assert cost.prefill_budget(4, stretch=3) == pytest.approx((0.3 - BATCH) / PROMPT, abs=1)


def test_a_machine_that_becomes_slower_is_noticed_though_every_step_has_prompts_in_it() -> None:
    cost = StepCost(0.1)
    for num_decode in range(1, 9):
        observe(cost, num_decode, 0)
    for index in range(200):
        observe(cost, 15 + index % 4, 16 + index % 7, slowness=2)
    # The target does not matter any more: prompts may take as long as the rest of the step.
    allowed = (cost.decode_step(16) - 2 * BATCH) / (2 * PROMPT)
    assert cost.prefill_budget(16) == pytest.approx(allowed, rel=0.2)


def test_a_large_batch_lets_prompts_take_as_long_as_it_does_itself() -> None:
    cost = StepCost(0.1)
    for num_decode in (1, 10, 60):
        observe(cost, num_decode, 0)
    assert cost.prefill_budget(60) == pytest.approx(60 * TOKEN / PROMPT, abs=1)


def test_prompts_always_get_a_little_and_without_a_target_all() -> None:
    slow = StepCost(0.1)
    for num_decode in (1, 2, 4):
        observe(slow, num_decode, 100, slowness=100)
    assert slow.prefill_budget(1) >= MIN_PREFILL_TOKENS
    assert StepCost(0.0).prefill_budget(4) > 1_000_000


def test_a_move_is_worth_it_as_long_as_it_costs_no_more_than_a_few_readings_of_the_weights() -> None:
    cost = StepCost(0.1)
    assert not cost.is_worth_moving(10)
    observe(cost, 1, 0)
    observe(cost, 8, 0)
    assert cost.is_worth_moving(200)
    for _ in range(50):
        cost.observe_move(100, 0.1)
    assert not cost.is_worth_moving(200)
