"""Who has to go, by table: (key, bytes, seconds left, busy)."""

from __future__ import annotations

import math

import pytest

from localllm.daemon.eviction import Candidate, choose_victims

A = Candidate("a", 10, 100.0, False)
B = Candidate("b", 10, 200.0, False)
BIG = Candidate("big", 50, 200.0, False)
FOREVER = Candidate("forever", 10, math.inf, False)
BUSY = Candidate("busy", 90, 1.0, True)


@pytest.mark.parametrize(
    ("candidates", "num_bytes", "num_models", "can_wait", "victims"),
    [
        ([A, B], 0, 1, False, ["a"]),
        ([B, A], 10, 0, False, ["a"]),
        ([A, B], 11, 0, False, ["a", "b"]),
        ([A, B], 21, 0, False, None),
        ([B, BIG], 1, 0, False, ["big"]),
        ([FOREVER, B], 1, 0, False, ["b"]),
        ([FOREVER], 1, 0, False, ["forever"]),
        ([BUSY, FOREVER], 1, 0, False, ["forever"]),
        ([BUSY], 1, 0, False, None),
        ([BUSY], 1, 0, True, ["busy"]),
        ([BUSY, A], 1, 0, True, ["a"]),
        ([BUSY, A], 90, 0, True, ["busy"]),
        ([BUSY, A], 100, 0, True, ["a", "busy"]),
        ([], 1, 0, False, None),
        ([A, B, BIG], 0, 2, False, ["big", "a"]),
    ],
)
def test_victims(
    candidates: list[Candidate], num_bytes: int, num_models: int, can_wait: bool, victims: list[str] | None
) -> None:
    chosen = choose_victims(candidates, num_bytes=num_bytes, num_models=num_models, can_wait=can_wait)
    assert chosen == victims
