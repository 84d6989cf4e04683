"""PURE: residency's account of memory and places, and who has to go for somebody else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from localllm.daemon.entry import Entry, Status
from localllm.daemon.eviction import Candidate, choose_victims


@dataclass
class Room:
    """Memory and places, now and once the runners that are ending have ended."""

    bytes_now: int
    models_now: int
    bytes_soon: int
    models_soon: int

    def fits_now(self, size: int) -> bool:
        return self.fits_soon(size) and size <= self.bytes_now and self.models_now > 0

    def fits_soon(self, size: int) -> bool:
        return size <= self.bytes_soon and self.models_soon > 0

    def take_now(self, size: int) -> None:
        self.bytes_now -= size
        self.models_now -= 1
        self.take_soon(size)

    def take_soon(self, size: int) -> None:
        self.bytes_soon -= size
        self.models_soon -= 1


def room_of(entries: Iterable[Entry], num_bytes: int, num_models: int) -> Room:
    """What those that have a runner leave of so many bytes and places."""
    room = Room(num_bytes, num_models, num_bytes, num_models)
    for entry in entries:
        if entry.status is Status.STOPPING:
            room.bytes_now -= entry.plan.size_bytes
            room.models_now -= 1
        else:
            room.take_now(entry.plan.size_bytes)
    return room


def find_victims(entries: Iterable[Entry], size: int, room: Room, now: float, *, can_wait: bool) -> list[Entry] | None:
    """Who makes room for `size` bytes and one place; None when that cannot be. See eviction."""
    known = {e.key: e for e in entries if e.status is Status.READY and not e.is_claimed and not e.is_pinned}
    candidates = [Candidate(e.key, e.plan.size_bytes, e.expires_at(now) - now, not e.is_idle) for e in known.values()]
    keys = choose_victims(
        candidates, num_bytes=size - room.bytes_soon, num_models=1 - room.models_soon, can_wait=can_wait
    )
    return None if keys is None else [known[key] for key in keys]


def pinned_by_others(entries: Iterable[Entry], key: str) -> tuple[int, int]:
    """Bytes and places that no request for the model `key` can ever get."""
    pinned = [e.plan.size_bytes for e in entries if e.is_pinned and e.key != key and e.status is not Status.STOPPING]
    return sum(pinned), len(pinned)
