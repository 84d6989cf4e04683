"""Whose turn it is."""

from __future__ import annotations

from localllm.runner.fairness import AGEING_SECONDS, MAX_PRIORITY, FairShare
from localllm.runner.sequence import Sequence


def request(client: str, number: int = 0, *, priority: int = 0, arrived_at: float = 0.0) -> Sequence:
    return Sequence(f"{client}{number}", [1, 2], 10, arrived_at + number / 1000, client=client, priority=priority)


def serve(fair: FairShare, waiting: list[Sequence], count: int, *, cost: int = 100) -> list[str]:
    """The clients of the next `count` requests, each charged `cost` tokens."""
    served = []
    for _ in range(count):
        sequence = fair.next(waiting, 0.0)
        assert sequence is not None
        waiting.remove(sequence)
        fair.charge(sequence.client, cost)
        served.append(sequence.client)
    return served


def test_a_client_with_many_requests_gets_no_more_tokens_than_one_with_few() -> None:
    waiting = [request("batch", number) for number in range(50)] + [request("chat", 99 + number) for number in range(5)]
    served = serve(FairShare(), waiting, 10)
    assert served.count("chat") >= 4


def test_shares_are_in_tokens_not_in_requests() -> None:
    fair = FairShare()
    waiting = [request("long", n) for n in range(100)] + [request("short", n) for n in range(100)]
    tokens = {"long": 0, "short": 0}
    for _ in range(100):
        sequence = fair.next(waiting, 0.0)
        assert sequence is not None
        waiting.remove(sequence)
        cost = 400 if sequence.client == "long" else 50
        fair.charge(sequence.client, cost)
        tokens[sequence.client] += cost
    assert 0.7 < tokens["long"] / tokens["short"] < 1.4


def test_within_a_client_the_first_to_come_is_the_first_to_be_served() -> None:
    waiting = [request("a", number) for number in (3, 1, 2)]
    chosen = FairShare().next(waiting, 0.0)
    assert chosen is not None and chosen.id == "a1"


def test_a_better_class_goes_first_whatever_its_client_has_had() -> None:
    fair = FairShare()
    fair.charge("urgent", 100_000)
    waiting = [request("other"), request("urgent", priority=-1)]
    assert serve(fair, waiting, 1) == ["urgent"]


def test_the_worst_class_reaches_the_front_by_waiting() -> None:
    fair = FairShare()
    old = request("batch", priority=1_000_000)
    now = AGEING_SECONDS * 25
    fresh = [request("chat", number, priority=-5, arrived_at=now) for number in range(3)]
    chosen = fair.next([old, *fresh], now + (MAX_PRIORITY + 6 - 25) * AGEING_SECONDS)
    assert chosen is old


def test_debts_are_forgotten_with_the_last_request() -> None:
    fair = FairShare()
    fair.charge("a", 100_000)
    fair.leave("a")
    waiting = [request("a"), request("b", 1)]
    assert sorted(serve(fair, waiting, 2)) == ["a", "b"]


def test_nobody_waits_nobody_is_next() -> None:
    assert FairShare().next([], 0.0) is None
