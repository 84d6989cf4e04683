"""PURE index of what each slot's KV memory holds, and where a new prompt is best placed.

A slot keeps its tokens after its sequence has left, so a prompt that starts the same way need not be computed again.
Owns which slots are leased; the KV memory itself belongs to the engine, which carries out the `Placement`.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

# Copying a stream moves all of its cells, however few are wanted; below this many tokens computing again is as quick.
MIN_COPY_TOKENS = 16


@dataclass(frozen=True)
class Placement:
    """Lease `slot`, whose memory must hold `num_cached_tokens` of the prompt before it is used.

    When `source` is not None, first replace the slot's memory by a copy of that slot's; then cut it to that length.
    """

    slot: int
    num_cached_tokens: int
    source: int | None = None


@dataclass(slots=True)
class _Slot:
    id: int
    tokens: list[int] = field(default_factory=list)
    num_held: int = 0
    is_leased: bool = False
    last_used: int = 0


def common_prefix(left: Tokens[int], right: Tokens[int], limit: int) -> int:
    """Length of the common prefix, at most `limit`. Compares slices, which runs at C speed."""
    low, high = 0, min(len(left), len(right), limit)
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


class PrefixCache:
    def __init__(self, num_slots: int, *, can_cut: bool) -> None:
        """`can_cut` False: the memory cannot drop a tail, so a slot serves only a prompt that extends all it holds."""
        self.num_slots = num_slots
        self._slots = [_Slot(id) for id in range(num_slots)]
        self._can_cut = can_cut
        self._clock = 0

    @property
    def num_free_slots(self) -> int:
        return sum(not slot.is_leased for slot in self._slots)

    def lease(self, tokens: list[int]) -> Placement | None:
        """Take a free slot for a prompt; None when there is none. At least the last token is left to compute."""
        free = [slot for slot in self._slots if not slot.is_leased]
        if not free:
            return None
        matches = {slot.id: self._match(slot, tokens) for slot in self._slots}
        best = max(self._slots, key=lambda slot: (matches[slot.id], not slot.is_leased, slot.last_used))
        placement = self._place(best, matches[best.id], free)
        self._take(placement, tokens)
        return placement

    def is_worth_waiting(self, tokens: list[int]) -> bool:
        """True when a sequence that is at work will soon hold a good deal more of this prompt than any slot does now.

        Prompts that begin alike and arrive together are then computed once and copied.
        """
        now = max((self._match(slot, tokens) for slot in self._slots), default=0)
        soon = max(
            (common_prefix(slot.tokens, tokens, len(tokens) - 1) for slot in self._slots if slot.is_leased), default=0
        )
        return self._can_cut and soon - now >= MIN_COPY_TOKENS

    def _match(self, slot: _Slot, tokens: list[int]) -> int:
        """How many tokens of the prompt the slot's memory could supply."""
        length = common_prefix(slot.tokens, tokens, min(slot.num_held, len(tokens) - 1))
        if self._can_cut or (length == slot.num_held and not slot.is_leased):
            return length
        return 0

    def _place(self, best: _Slot, match: int, free: list[_Slot]) -> Placement:
        # A slot that holds much more than the match is worth more to whoever comes back for the rest: copy from it.
        can_take = not best.is_leased and (2 * match >= best.num_held or len(free) == 1)
        if match and can_take:
            return Placement(best.id, match)
        others = [slot for slot in free if slot is not best]
        if match >= MIN_COPY_TOKENS and others:
            return Placement(self._victim(others).id, match, best.id)
        return Placement(self._victim(free).id, 0)

    def _victim(self, free: list[_Slot]) -> _Slot:
        """The free slot whose loss hurts least: keeps the leased ids in few runs, then the longest unused.

        llama.cpp puts split streams into one micro-batch only when their ids follow each other, and each further
        micro-batch reads all weights again.
        """
        leased = {slot.id for slot in self._slots if slot.is_leased}

        def num_new_runs(slot: _Slot) -> int:
            return 1 - (slot.id - 1 in leased) - (slot.id + 1 in leased)

        return min(free, key=lambda slot: (num_new_runs(slot), slot.last_used, slot.id))

    def _take(self, placement: Placement, tokens: list[int]) -> None:
        slot = self._slots[placement.slot]
        assert not slot.is_leased, "a leased slot was leased again"
        slot.is_leased = True
        slot.tokens = tokens
        slot.num_held = placement.num_cached_tokens
        self._touch(slot)

    def advance(self, slot: int, num_held: int) -> None:
        """The leased slot now holds the first `num_held` tokens of its sequence."""
        assert self._slots[slot].is_leased
        self._slots[slot].num_held = num_held

    def release(self, slot: int) -> None:
        """End a lease; what the slot holds stays for later prompts."""
        leased = self._slots[slot]
        assert leased.is_leased, "a free slot was released"
        leased.is_leased = False
        leased.tokens = leased.tokens[: leased.num_held]
        self._touch(leased)

    def _touch(self, slot: _Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock

    def check_integrity(self) -> None:
        for slot in self._slots:
            assert 0 <= slot.num_held <= len(slot.tokens), f"slot {slot.id} claims more than it was given"
