"""Where requests stand, told from what residency knows."""

from __future__ import annotations

from typing import Any, cast

import pytest

from localllm.daemon.decisions import LoadPlan, Request
from localllm.daemon.entry import Entry, Running, Status
from localllm.daemon.standing import eta_seconds, standings
from localllm.types import LoadOptions, LoadWishes


def entry(status: Status, *, in_flight: int = 0, waiting: int = 0, num_parallel: int = 2) -> Entry:
    options = LoadOptions(num_ctx=64, num_parallel=num_parallel, num_threads=1, num_threads_batch=1)
    found = Entry("key", "tiny:latest", cast(Any, None), LoadPlan(options, 1, 64), 5.0, status=status, mean_seconds=4.0)
    found.in_flight = {f"f{index}": Running(request(f"f{index}"), 0.0) for index in range(in_flight)}
    found.waiting = [request(f"w{index}") for index in range(waiting)]
    return found


def request(id: str) -> Request:
    return Request(id, "key", "tiny", cast(Any, None), LoadWishes(), 5.0, 0.0, 0)


def test_slots_first_then_the_runners_queue_then_ours() -> None:
    found = list(standings([entry(Status.READY, in_flight=3, waiting=1)]))
    assert [(s.id, s.state, s.position, s.eta_seconds) for s in found] == [
        ("f0", "running", 0, 0.0),
        ("f1", "running", 0, 0.0),
        ("f2", "queued", 1, 2.0),
        ("w0", "queued", 2, 4.0),
    ]


def test_those_who_wait_for_a_load_see_how_far_it_is() -> None:
    loading = entry(Status.LOADING, waiting=3)
    loading.fraction = 0.4
    assert [(s.state, s.position, s.load_fraction) for s in standings([loading])] == [
        ("loading", 1, 0.4),
        ("loading", 1, 0.4),
        ("loading", 1, 0.4),
    ]


@pytest.mark.parametrize(("num_before", "seconds"), [(0, 0.0), (1, 0.0), (2, 2.0), (5, 8.0)])
def test_the_guess_at_when_a_turn_comes(num_before: int, seconds: float) -> None:
    assert eta_seconds(entry(Status.READY), num_before) == seconds
