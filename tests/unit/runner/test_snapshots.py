"""Which snapshots stay when the budget is full."""

from __future__ import annotations

from localllm.runner.snapshots import SnapshotLedger


def add(
    ledger: SnapshotLedger, id: int, *, size: int = 10, tokens: int = 100, client: str = "", pin: bool = False
) -> set[int]:
    return set(ledger.add(id, num_tokens=tokens, size=size, client=client, is_pinned=pin))


def test_the_oldest_goes_when_all_else_is_equal() -> None:
    ledger = SnapshotLedger(30)
    assert [add(ledger, id) for id in range(5)] == [set(), set(), set(), {0}, {1}]
    assert ledger.size == 30


def test_one_that_is_used_outlives_newer_ones() -> None:
    ledger = SnapshotLedger(30)
    for id in range(3):
        add(ledger, id)
    ledger.use(0)
    assert [add(ledger, id) for id in (3, 4)] == [{1}, {2}]


def test_an_old_one_that_was_used_much_does_not_stay_for_ever() -> None:
    ledger = SnapshotLedger(20)
    add(ledger, 0)
    for _ in range(5):
        ledger.use(0)
    for id in range(1, 20):
        add(ledger, id)
    assert 0 not in ledger


def test_a_longer_prefix_is_worth_more_per_byte_than_a_short_one() -> None:
    ledger = SnapshotLedger(30)
    add(ledger, 0, tokens=8000)
    add(ledger, 1, tokens=100)
    add(ledger, 2, tokens=100)
    assert add(ledger, 3) == {1}


def test_a_client_that_floods_the_cache_evicts_its_own() -> None:
    ledger = SnapshotLedger(50)
    add(ledger, 0, client="chat")
    for id in range(1, 30):
        assert 0 not in add(ledger, id, client="batch")
    assert 0 in ledger


def test_a_pinned_prefix_stays_unless_pins_take_more_than_half_of_the_budget() -> None:
    ledger = SnapshotLedger(40)
    add(ledger, 0, pin=True)
    for id in range(1, 10):
        assert 0 not in add(ledger, id)
    for id in range(10, 20):
        add(ledger, id, pin=True)
    assert 0 not in ledger
    assert ledger.size <= 40


def test_a_snapshot_larger_than_the_budget_is_dropped_at_once() -> None:
    ledger = SnapshotLedger(30)
    add(ledger, 0)
    assert add(ledger, 1, size=31) >= {1}
    assert 1 not in ledger
