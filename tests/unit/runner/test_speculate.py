"""What is guessed ahead, and when it is worth checking."""

from __future__ import annotations

from localllm.runner.cost import StepCost
from localllm.runner.speculate import Drafter, Proposal, choose_drafts


def known_cost(*, base: float, marginal: float) -> StepCost:
    cost = StepCost(0.1)
    for num_tokens in (1, 2, 4, 8, 16) * 20:
        cost.observe(num_tokens, 0, base + marginal * num_tokens)
    return cost


def test_a_draft_is_what_followed_the_same_words_before() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 9, 9, 1, 2, 3]
    assert Drafter(tokens).propose(4) == [4, 5, 6, 7]


def test_the_latest_occurrence_counts_and_new_tokens_are_seen() -> None:
    tokens = [1, 2, 3, 4, 1, 2, 3, 5, 8]
    drafter = Drafter(tokens)
    assert drafter.propose(2) == []
    tokens += [1, 2, 3]
    assert drafter.propose(2) == [5, 8]


def test_a_text_that_has_begun_to_repeat_is_drafted_on() -> None:
    assert Drafter([7, 1, 2, 3, 1, 2, 3, 1, 2, 3]).propose(7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_text_that_repeats_nothing_is_not_drafted() -> None:
    assert Drafter(list(range(100))).propose(8) == []
    assert Drafter([1, 2]).propose(8) == []


def test_drafts_that_keep_failing_pause_and_are_tried_again_later() -> None:
    tokens = [1, 2, 3, 4, 1, 2, 3]
    drafter = Drafter(tokens)
    for _ in range(20):
        drafter.learn(4, 0)
    assert drafter.propose(1) == []
    tokens += [9] * 60 + [1, 2, 3]
    assert drafter.propose(1) == [9]


def test_a_single_stream_drafts_when_a_token_more_costs_little() -> None:
    cost = known_cost(base=0.01, marginal=0.001)
    assert choose_drafts([Proposal("a", list(range(16)), 0.99)], 1, cost, 16)["a"] == list(range(16))


def test_nobody_drafts_when_tokens_cost_as_much_in_a_batch_as_alone() -> None:
    cost = known_cost(base=0.0, marginal=0.01)
    assert choose_drafts([Proposal("a", list(range(8)), 0.95)], 1, cost, 16) == {}


def test_a_full_batch_does_not_draft_for_one_of_many() -> None:
    cost = known_cost(base=0.008, marginal=0.003)
    assert choose_drafts([Proposal("a", list(range(8)), 0.9)], 16, cost, 16) == {}


def test_all_drafts_of_a_step_have_one_length() -> None:
    cost = known_cost(base=0.02, marginal=0.001)
    drafts = choose_drafts([Proposal("a", [1, 2, 3, 4], 0.95), Proposal("b", [5, 6, 7], 0.95)], 2, cost, 16)
    assert len({len(draft) for draft in drafts.values()}) == 1
    assert drafts.keys() == {"a", "b"}


def test_drafts_fit_the_rows_that_there_are() -> None:
    cost = known_cost(base=0.02, marginal=0.001)
    drafts = choose_drafts([Proposal(str(i), list(range(16)), 0.95) for i in range(4)], 4, cost, 10)
    assert 0 < sum(len(draft) for draft in drafts.values()) <= 10
