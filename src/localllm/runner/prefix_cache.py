"""PURE index of what slots, snapshots in memory and files on disk hold, and where a new prompt is best placed.

A slot keeps its tokens after its sequence has left, so a prompt that starts the same way need not be computed again.
What is about to be overwritten is saved as a snapshot first, if no other holder has it. Owns which slots are leased;
the KV memory, the snapshots' bytes and the files belong to the engine, which carries out the `Placement`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from localllm.runner.prefix_index import PrefixIndex, common_prefix
from localllm.runner.snapshots import SnapshotLedger

# Copying a stream moves all of its cells, however few are wanted; below this many tokens computing again is as quick.
MIN_COPY_TOKENS = 16
# A snapshot must save this many tokens more than a slot does, and holds at least as many that nobody else has.
MIN_SNAPSHOT_TOKENS = 64
# Reading a file pays only for a good deal more than that.
MIN_FETCH_TOKENS = 128
# A file is written when it has this many tokens that no other file has, and when they are this part of it: a chat that
# grows turn by turn would otherwise be written whole each time.
MIN_FILE_TOKENS = 256
MIN_NEW_SHARE_OF_FILE = 0.25


class Tier(enum.Enum):
    SLOT = "slot"
    RAM = "ram"
    DISK = "disk"


class Holder(NamedTuple):
    tier: Tier
    id: int


@dataclass(frozen=True)
class Save:
    """Keep what the slot holds as snapshot `id` before the slot is overwritten."""

    id: int
    tokens: list[int]
    client: str
    is_pinned: bool


@dataclass(frozen=True)
class Placement:
    """Lease `slot`, whose memory must hold `num_cached_tokens` of the prompt before it is used.

    In this order: carry out `save`; replace the slot's memory by a copy of slot `source` or by snapshot `snapshot`, if
    one of them is not None; cut the memory to that length.
    """

    slot: int
    num_cached_tokens: int
    source: int | None = None
    snapshot: int | None = None
    save: Save | None = None


@dataclass(frozen=True)
class Swap:
    """The memories of a leased and a free slot change places; `num_tokens` is what both hold."""

    leased: int
    free: int
    num_tokens: int


@dataclass(slots=True)
class _Slot:
    id: int
    # The sequence's own list while the slot is leased: it grows with the answer.
    tokens: list[int]
    is_leased: bool = False
    last_used: int = 0
    client: str = ""
    is_pinned: bool = False
    # The window was shifted: only the tokens before that point are followed by what they say.
    is_shifted: bool = False

    @property
    def holder(self) -> Holder:
        return Holder(Tier.SLOT, self.id)


class PrefixCache:
    def __init__(
        self, num_slots: int, *, can_cut: bool, can_cut_snapshots: bool = True, snapshot_budget: int = 0
    ) -> None:
        """`can_cut` False: the memory cannot drop a tail, so a holder serves only a prompt that extends all it holds.

        `can_cut_snapshots` False: so it is with snapshots and files, if not with slots.
        `snapshot_budget`: bytes of main memory for snapshots; 0 for none.
        """
        self.num_slots = num_slots
        self.snapshots = SnapshotLedger(snapshot_budget)
        self._index: PrefixIndex[Holder] = PrefixIndex()
        self._slots = [_Slot(id, []) for id in range(num_slots)]
        for slot in self._slots:
            self._index.put(slot.holder, slot.tokens, 0)
        self._can_cut = can_cut
        self._can_cut_snapshots = can_cut and can_cut_snapshots
        self._clock = 0
        self._next_id = 0

    @property
    def num_free_slots(self) -> int:
        return sum(not slot.is_leased for slot in self._slots)

    # -- leases of slots

    def lease(self, tokens: list[int], *, client: str = "", is_pinned: bool = False) -> Placement | None:
        """Take a free slot for a prompt; None when there is none. At least the last token is left to compute."""
        free = [slot for slot in self._slots if not slot.is_leased]
        if not free:
            return None
        placement = self._place(self._usable(tokens), free)
        slot = self._slots[placement.slot]
        slot.client, slot.is_pinned = client, is_pinned
        if placement.snapshot is not None:
            self.snapshots.use(placement.snapshot)
        self._take(slot, tokens, placement.num_cached_tokens)
        return placement

    def is_worth_waiting(self, tokens: list[int]) -> bool:
        """True when a sequence that is at work will soon hold a good deal more of this prompt than any holder does now.

        Prompts that begin alike and arrive together are then computed once and copied.
        """
        if not self._can_cut:
            return False
        now = max(self._usable(tokens).values(), default=0)
        return self._soon(tokens) - now >= MIN_COPY_TOKENS

    def _soon(self, tokens: list[int]) -> int:
        limit = len(tokens) - 1
        growing = (slot for slot in self._slots if slot.is_leased and not slot.is_shifted)
        return max((common_prefix(slot.tokens, tokens, limit) for slot in growing), default=0)

    def _usable(self, tokens: list[int]) -> dict[Holder, int]:
        """How many tokens of the prompt each slot and snapshot could supply; those that supply none are left out."""
        usable = {}
        for holder, length in self._index.matches(tokens, len(tokens) - 1).items():
            if holder.tier is Tier.DISK or not length:
                continue
            is_leased = holder.tier is Tier.SLOT and self._slots[holder.id].is_leased
            can_cut = self._can_cut if holder.tier is Tier.SLOT else self._can_cut_snapshots
            if can_cut or (length == self._index.length(holder) and not is_leased):
                usable[holder] = length
        return usable

    def _place(self, usable: dict[Holder, int], free: list[_Slot]) -> Placement:
        slots = {h.id: length for h, length in usable.items() if h.tier is Tier.SLOT}
        snapshots = {h.id: length for h, length in usable.items() if h.tier is Tier.RAM}
        best = max(self._slots, key=lambda slot: (slots.get(slot.id, 0), not slot.is_leased, slot.last_used))
        match = slots.get(best.id, 0)
        snapshot = max(snapshots, key=lambda id: snapshots[id], default=None)
        if snapshot is not None and snapshots[snapshot] - match >= MIN_SNAPSHOT_TOKENS:
            victim = self._victim(free)
            return Placement(victim.id, snapshots[snapshot], snapshot=snapshot, save=self._save(victim, 0))
        # A slot that holds much more than the match is worth more to whoever comes back for the rest: copy from it.
        held = self._index.length(best.holder)
        if match and not best.is_leased and (2 * match >= held or len(free) == 1):
            return Placement(best.id, match, save=self._save(best, match))
        others = [slot for slot in free if slot is not best]
        if match >= MIN_COPY_TOKENS and others:
            victim = self._victim(others)
            return Placement(victim.id, match, source=best.id, save=self._save(victim, 0))
        victim = self._victim(free)
        return Placement(victim.id, 0, save=self._save(victim, 0))

    def _victim(self, free: list[_Slot]) -> _Slot:
        """The free slot whose loss hurts least: keeps the leased ids together (see `scattered`), then the longest
        unused.
        """
        leased = {slot.id for slot in self._slots if slot.is_leased}

        def num_new_runs(slot: _Slot) -> int:
            return 1 - (slot.id - 1 in leased) - (slot.id + 1 in leased)

        return min(free, key=lambda slot: (num_new_runs(slot), slot.last_used, slot.id))

    def _save(self, slot: _Slot, num_kept: int) -> Save | None:
        """What must be kept of a slot that is cut to `num_kept` tokens: nothing that another holder has."""
        held = self._index.length(slot.holder)
        covered = max(num_kept, self._covered(slot, Tier.SLOT, Tier.RAM))
        minimum = 1 if slot.is_pinned else MIN_SNAPSHOT_TOKENS
        if not self.snapshots.budget or held - covered < minimum:
            return None
        return self.new_save(slot.tokens[:held], slot.client, is_pinned=slot.is_pinned)

    def _covered(self, slot: _Slot, *tiers: Tier) -> int:
        """How many tokens that the slot holds some other holder in `tiers` has as well."""
        held = self._index.length(slot.holder)
        found = self._index.matches(slot.tokens, held)
        return max((n for holder, n in found.items() if holder != slot.holder and holder.tier in tiers), default=0)

    def _take(self, slot: _Slot, tokens: list[int], num_held: int) -> None:
        assert not slot.is_leased, "a leased slot was leased again"
        slot.is_leased = True
        slot.is_shifted = False
        slot.tokens = tokens
        self._index.put(slot.holder, tokens, num_held)
        self._touch(slot)

    def scattered(self) -> Swap | None:
        """A swap that brings the leased slots closer together; None when their ids follow each other already.

        llama.cpp puts split streams into one micro-batch only then, and each further one reads all weights again.
        """
        leased = [slot.id for slot in self._slots if slot.is_leased]
        if not leased or leased[-1] - leased[0] < len(leased):
            return None
        starts = range(self.num_slots - len(leased) + 1)
        start = max(starts, key=lambda first: sum(first <= id < first + len(leased) for id in leased))
        window = range(start, start + len(leased))
        outside = min((id for id in leased if id not in window), key=self._held)
        hole = min((id for id in window if not self._slots[id].is_leased), key=self._held)
        return Swap(outside, hole, self._held(outside) + self._held(hole))

    def swap(self, swap: Swap) -> None:
        """The memories have changed places, and the lease goes with its memory."""
        leased, free = self._slots[swap.leased], self._slots[swap.free]
        lengths = self._held(leased.id), self._held(free.id)
        self._slots[swap.leased], self._slots[swap.free] = free, leased
        free.id, leased.id = swap.leased, swap.free
        self._index.put(leased.holder, leased.tokens, lengths[0])
        self._index.put(free.holder, free.tokens, lengths[1])

    def _held(self, slot: int) -> int:
        return self._index.length(Holder(Tier.SLOT, slot))

    def advance(self, slot: int, num_held: int) -> None:
        """The leased slot now holds the first `num_held` tokens of its sequence."""
        assert self._slots[slot].is_leased
        if not self._slots[slot].is_shifted:
            self._index.advance(Holder(Tier.SLOT, slot), num_held)

    def shift(self, slot: int, tokens: list[int], num_kept: int) -> None:
        """The leased slot's sequence is `tokens` now; of its memory, only the first `num_kept` tokens fit it.

        What comes after them was computed when there were others between.
        """
        leased = self._slots[slot]
        assert leased.is_leased
        leased.tokens, leased.is_shifted = tokens, True
        self._index.put(leased.holder, tokens, min(num_kept, self._held(slot)))

    def forget(self, slot: int) -> None:
        """The leased slot turned out to hold nothing."""
        self._index.put(Holder(Tier.SLOT, slot), self._slots[slot].tokens, 0)

    def evict(self) -> tuple[int, Save | None] | None:
        """Give up what the longest unused free slot holds: its id and what to keep of it first. None: none holds any.

        For a memory that all slots share.
        """
        holding = [slot for slot in self._slots if not slot.is_leased and self._held(slot.id)]
        if not holding:
            return None
        victim = min(holding, key=lambda slot: (slot.is_pinned, slot.last_used))
        save = self._save(victim, 0)
        self._index.put(victim.holder, [], 0)
        return victim.id, save

    def release(self, slot: int) -> None:
        """End a lease; what the slot holds stays for later prompts."""
        leased = self._slots[slot]
        assert leased.is_leased, "a free slot was released"
        leased.is_leased = False
        self._touch(leased)

    def _touch(self, slot: _Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock

    # -- snapshots in main memory

    def new_save(self, tokens: list[int], client: str, *, is_pinned: bool = False) -> Save:
        self._next_id += 1
        return Save(self._next_id, tokens, client, is_pinned)

    def checkpoint(self, slot: int) -> Save | None:
        """What to keep of a slot at work whose memory cannot be cut, so that its beginning can serve others."""
        leased = self._slots[slot]
        held = self._index.length(leased.holder)
        if self._can_cut or not self.snapshots.budget or self._covered(leased, Tier.RAM) == held:
            return None
        return self.new_save(leased.tokens[:held], leased.client, is_pinned=leased.is_pinned)

    def store(self, save: Save, size: int) -> list[int]:
        """Snapshot `save.id` of `size` bytes exists now; returns the ids of the snapshots to drop."""
        redundant = self._made_redundant(Tier.RAM, save.tokens)
        for id in redundant:
            self.drop(id)
        self._index.put(Holder(Tier.RAM, save.id), save.tokens, len(save.tokens))
        dropped = self.snapshots.add(
            save.id, num_tokens=len(save.tokens), size=size, client=save.client, is_pinned=save.is_pinned
        )
        for id in dropped:
            self._index.remove(Holder(Tier.RAM, id))
        return redundant + dropped

    def drop(self, snapshot: int) -> None:
        """The snapshot is of no use any more."""
        self.snapshots.remove(snapshot)
        self._index.remove(Holder(Tier.RAM, snapshot))

    # -- files on disk

    def add_file(self, id: int, tokens: list[int]) -> list[int]:
        """File `id` holds `tokens` now; returns the ids of the files that it makes redundant."""
        redundant = self._made_redundant(Tier.DISK, tokens)
        for other in redundant:
            self.remove_file(other)
        self._index.put(Holder(Tier.DISK, id), tokens, len(tokens))
        return redundant

    def remove_file(self, id: int) -> None:
        self._index.remove(Holder(Tier.DISK, id))

    def file_for(self, tokens: list[int]) -> int | None:
        """The file worth reading for a prompt: it holds a good deal more than slots and snapshots have or soon will."""
        known = max(max(self._usable(tokens).values(), default=0), self._soon(tokens))
        files = {
            holder.id: length
            for holder, length in self._index.matches(tokens, len(tokens) - 1).items()
            if holder.tier is Tier.DISK and (self._can_cut_snapshots or length == self._index.length(holder))
        }
        best = max(files, key=lambda id: files[id], default=None)
        return best if best is not None and files[best] - known >= MIN_FETCH_TOKENS else None

    def file_tokens(self, id: int) -> list[int]:
        return self._index.tokens(Holder(Tier.DISK, id))

    def is_worth_a_file(self, tokens: list[int], *, is_last_chance: bool = False) -> bool:
        """Whether a file with these tokens would save enough. `is_last_chance`: the memory is about to be given up."""
        matches = self._index.matches(tokens, len(tokens))
        known = max((n for holder, n in matches.items() if holder.tier is Tier.DISK), default=0)
        num_new = len(tokens) - known
        return num_new >= MIN_FILE_TOKENS and (is_last_chance or num_new >= MIN_NEW_SHARE_OF_FILE * len(tokens))

    def idle_slots(self) -> list[tuple[int, list[int]]]:
        """Free slots with what they hold, the most recently used first."""
        free = sorted((slot for slot in self._slots if not slot.is_leased), key=lambda slot: -slot.last_used)
        return [(slot.id, self._index.tokens(slot.holder)) for slot in free]

    def _made_redundant(self, tier: Tier, tokens: list[int]) -> list[int]:
        """Holders in `tier` that have nothing but a beginning of `tokens`: of no use where snapshots can be cut."""
        if not self._can_cut_snapshots:
            return []
        matches = self._index.matches(tokens, len(tokens))
        return [h.id for h, length in matches.items() if h.tier is tier and length == self._index.length(h)]

    def check_integrity(self) -> None:
        """Raises AssertionError when the index and its holders disagree."""
        self._index.check_integrity()
        assert self.snapshots.size <= max(self.snapshots.budget, 0), "snapshots take more than their budget"
