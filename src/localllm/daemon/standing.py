"""PURE: where each request stands, for those who wait and those who watch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from localllm.daemon.entry import Entry, Status

State = Literal["queued", "loading", "running"]


@dataclass(frozen=True)
class Standing:
    """`position` counts those that are decoded before it, itself included; it is 0 while it is decoded itself.

    `load_fraction` is how much of the model is loaded. `eta_seconds` is a guess at when its turn comes, from how long
    requests took lately; a load is not counted. `prefill` is how many tokens of its prompt are computed, of how many.
    """

    id: str
    model: str
    state: State
    position: int
    load_fraction: float
    eta_seconds: float
    prefill: tuple[int, int] | None = None


def standings(entries: Iterable[Entry]) -> Iterator[Standing]:
    """Those that have a slot, then those that wait in the runner, then those that wait for it; model by model."""
    for entry in entries:
        num_slots = max(1, entry.num_slots)
        ids = [*entry.in_flight, *(request.id for request in entry.waiting)]
        for index, id in enumerate(ids):
            is_granted = index < len(entry.in_flight)
            position = 0 if is_granted and index < num_slots else max(1, index + 1 - num_slots)
            yield Standing(
                id,
                entry.name,
                _state(entry, position),
                position,
                entry.fraction if entry.status is Status.LOADING else float(entry.status is Status.READY),
                eta_seconds(entry, index),
            )


def eta_seconds(entry: Entry, num_before: int) -> float:
    """When the turn comes of a request with that many before it."""
    num_slots = max(1, entry.num_slots)
    return max(0, num_before + 1 - num_slots) / num_slots * entry.mean_seconds


def _state(entry: Entry, position: int) -> State:
    if position == 0:
        return "running"
    return "loading" if entry.status is Status.LOADING else "queued"
