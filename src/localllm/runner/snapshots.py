"""PURE ledger of the KV snapshots in main memory: how large they are, whose, and which to drop when room is needed.

Greedy-Dual-Size-Frequency (L. Cherkasova, 1998): each entry has a credit of its worth per byte, multiplied by how often
it was used, on top of a level that rises to the credit of whatever was dropped last. So old entries lose to new ones
unless they are used, and of two that are as old the one that costs more to compute again stays.
"""

from __future__ import annotations

from dataclasses import dataclass

# Attention makes each further token of a prompt dearer; at this length a token costs about twice the first one.
_TOKENS_OF_DOUBLE_COST = 4096
# Pins hold at most this part of the budget; beyond it the least useful of them count as unpinned.
_MAX_PINNED_SHARE = 0.5


@dataclass(slots=True)
class _Entry:
    num_tokens: int
    size: int
    client: str
    is_pinned: bool
    num_uses: int = 1
    credit: float = 0.0


class SnapshotLedger:
    def __init__(self, budget: int) -> None:
        """`budget` in bytes; 0 keeps nothing."""
        self._budget = budget
        self._entries: dict[int, _Entry] = {}
        self._level = 0.0

    @property
    def budget(self) -> int:
        return self._budget

    @property
    def size(self) -> int:
        """Bytes of all entries."""
        return sum(entry.size for entry in self._entries.values())

    def __contains__(self, id: int) -> bool:
        return id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, id: int, *, num_tokens: int, size: int, client: str, is_pinned: bool) -> list[int]:
        """Enter a snapshot; returns the ids to drop so that the budget holds, which may include `id` itself."""
        entry = _Entry(num_tokens, size, client, is_pinned)
        self._entries[id] = entry
        self._renew(entry)
        dropped = []
        while self.size > self._budget:
            victim = self._victim()
            self._level = max(self._level, self._entries[victim].credit)
            self.remove(victim)
            dropped.append(victim)
        return dropped

    def use(self, id: int) -> None:
        """The snapshot saved somebody the computing."""
        entry = self._entries[id]
        entry.num_uses += 1
        self._renew(entry)

    def remove(self, id: int) -> None:
        del self._entries[id]

    def _renew(self, entry: _Entry) -> None:
        worth = 1 + entry.num_tokens / _TOKENS_OF_DOUBLE_COST
        entry.credit = self._level + entry.num_uses * worth

    def _victim(self) -> int:
        """The entry of least credit, of the client that takes most, so that one client cannot flush the others."""
        candidates = self._unpinned() or list(self._entries)
        taken: dict[str, int] = {}
        for id in candidates:
            entry = self._entries[id]
            taken[entry.client] = taken.get(entry.client, 0) + entry.size
        greediest = max(taken, key=lambda client: taken[client])
        return min(
            (id for id in candidates if self._entries[id].client == greediest), key=lambda id: self._entries[id].credit
        )

    def _unpinned(self) -> list[int]:
        pinned = sorted(
            (id for id, e in self._entries.items() if e.is_pinned), key=lambda id: -self._entries[id].credit
        )
        room = self._budget * _MAX_PINNED_SHARE
        kept = set()
        for id in pinned:
            room -= self._entries[id].size
            if room >= 0:
                kept.add(id)
        return [id for id in self._entries if id not in kept]
