"""PURE: who gets how many tokens of the next step.

There are no phases. A sequence has tokens that are known and tokens that are computed, and each step closes a part of
the gap under one budget: first every running sequence that lacks a single token (it decodes), then the prompts with
what is left. The clock is an argument; the memory is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from localllm.runner.cost import StepCost
from localllm.runner.fairness import FairShare
from localllm.runner.prefix_cache import Placement, PrefixCache, Swap
from localllm.runner.sequence import Sequence, Status
from localllm.runner.speculate import MAX_DRAFT_TOKENS, Proposal, choose_drafts

# Sharing out each step to many prompts would finish all of them late and none soon.
TURN_TOKENS = 128
# A prompt that can be finished in this many times the time that prompts may add to a step is finished at once: a part
# of a prompt costs a good deal more per token, and all in all everybody would wait longer.
_STRETCH_TO_FINISH = 3.0
# How many that had better wait for a common beginning are passed over in one step: looking at each takes time.
_MAX_PASSED_OVER = 16


@dataclass(frozen=True)
class Chunk:
    """Compute `num_tokens` of `sequence` from its first uncomputed one; `wants_output` when that closes the gap.

    `draft` are tokens to compute after these, each with an output of its own, as if they were known to be right.
    """

    sequence: Sequence
    num_tokens: int
    wants_output: bool
    draft: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shift:
    """Drop `num_dropped` tokens of `slot` after the first `num_kept`, and let those behind them move up."""

    slot: int
    num_kept: int
    num_dropped: int


@dataclass
class StepPlan:
    """What the engine does next, in this order: placements, shifts, a swap; the chunks, by slot, are one batch."""

    placements: list[Placement] = field(default_factory=list)
    shifts: list[Shift] = field(default_factory=list)
    swap: Swap | None = None
    chunks: list[Chunk] = field(default_factory=list)
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_draft_tokens: int = 0


class Scheduler:
    """Owns all live sequences and the leases of slots."""

    def __init__(
        self,
        *,
        cache: PrefixCache,
        max_batch_tokens: int,
        cost: StepCost,
        can_cut: bool = True,
        can_swap: bool = False,
        max_drafts: int = 0,
    ) -> None:
        """`max_drafts`: rows of logits that a step has beyond one per slot. `can_swap`: slots may change places."""
        self._can_swap = can_swap
        self._max_batch_tokens = max_batch_tokens
        self._cost = cost
        self._cache = cache
        self._can_cut = can_cut
        self._max_drafts = max_drafts if can_cut else 0
        self._fair = FairShare()
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        # Set by a preemption until somebody leaves: admitting the victim at once would fill the memory again.
        self._is_full = False

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def find(self, id: str) -> Sequence | None:
        return next((s for s in (*self._running, *self._waiting) if s.id == id), None)

    def cancel(self, id: str, now: float) -> Sequence | None:
        """End a sequence wherever it is; None when it is not (or no longer) here."""
        sequence = self.find(id)
        if sequence is not None:
            sequence.finish("cancelled", now)
            self._drop(sequence)
        return sequence

    def cancel_only_running(self, now: float) -> Sequence:
        """End the one running sequence, for which not even an otherwise empty memory has room."""
        (sequence,) = self._running
        sequence.finish("cancelled", now)
        self._drop(sequence)
        return sequence

    def schedule(self, now: float) -> StepPlan:
        """Admit what fits, then share out one step's tokens. The plan is empty only when there is no work."""
        plan = StepPlan(placements=self._admit(now))
        plan.shifts = [shift for sequence in self._running if (shift := self._shift(sequence)) is not None]
        if not plan.placements:
            plan.swap = self._move_together()
        decoding = [s for s in self._running if s.num_missing_tokens == 1]
        prompts = [s for s in self._running if s.num_missing_tokens > 1]
        shares = {s.id: 1 for s in decoding}
        plan.num_decode_tokens = len(decoding)
        room = self._max_batch_tokens - len(decoding)
        budget = self._cost.prefill_budget(len(decoding))
        enough = self._cost.prefill_budget(len(decoding), stretch=_STRETCH_TO_FINISH)
        shares |= self._share_out(prompts, min(room, budget), min(room, enough))
        plan.num_prefill_tokens = sum(shares.values()) - len(decoding)
        drafts = {} if prompts else self._draft(decoding, room)
        plan.num_draft_tokens = sum(len(draft) for draft in drafts.values())
        plan.chunks = [
            Chunk(s, shares[s.id], shares[s.id] == s.num_missing_tokens, tuple(drafts.get(s.id, ())))
            for s in self._running
            if s.id in shares
        ]
        plan.chunks.sort(key=lambda chunk: chunk.sequence.slot or 0)
        return plan

    def _shift(self, sequence: Sequence) -> Shift | None:
        """Make room for a sequence whose window is full, if it may go on nevertheless."""
        num_dropped = sequence.shift()
        if not num_dropped:
            return None
        assert sequence.slot is not None
        assert sequence.num_missing_tokens + num_dropped == 1, "a full window is computed but for its last token"
        sequence.num_computed_tokens -= num_dropped
        self._cache.shift(sequence.slot, sequence.tokens, sequence.num_keep)
        return Shift(sequence.slot, sequence.num_keep, num_dropped)

    def _move_together(self) -> Swap | None:
        """Let the running sequences' slots follow each other, where moving one costs less than it will save soon."""
        swap = self._cache.scattered() if self._can_swap else None
        if swap is None or not self._cost.is_worth_moving(swap.num_tokens):
            return None
        self._cache.swap(swap)
        (sequence,) = (s for s in self._running if s.slot == swap.leased)
        sequence.slot = swap.free
        return swap

    def _draft(self, decoding: list[Sequence], room: int) -> dict[str, list[int]]:
        """Tokens worth checking along with the next ones."""
        room = min(room, self._max_drafts)
        if room <= 0:
            return {}
        proposals = []
        for sequence in decoding:
            if sequence.drafter is not None:
                # The last token that may come needs no draft, and nor does anything after it.
                limit = min(MAX_DRAFT_TOKENS, room, sequence.room - 1)
                if draft := sequence.drafter.propose(limit):
                    proposals.append(Proposal(sequence.id, draft, sequence.drafter.acceptance))
        return choose_drafts(proposals, len(decoding), self._cost, room)

    def _admit(self, now: float) -> list[Placement]:
        placements: list[Placement] = []
        if self._is_full:
            return placements
        candidates = [sequence for sequence in self._waiting if not sequence.is_fetching]
        patience = _MAX_PASSED_OVER
        while self._cache.num_free_slots and (sequence := self._fair.next(candidates, now)) is not None:
            candidates.remove(sequence)
            if not self._cache.is_worth_waiting(sequence.tokens):
                placements.append(self._start(sequence, now))
            elif not (patience := patience - 1):
                break
        return placements

    def _start(self, sequence: Sequence, now: float) -> Placement:
        # One that was preempted with a full window.
        sequence.shift()
        placement = self._cache.lease(sequence.tokens, client=sequence.client, is_pinned=sequence.is_pinned)
        assert placement is not None, "there was a free slot"
        self._waiting.remove(sequence)
        sequence.slot = placement.slot
        sequence.num_computed_tokens = placement.num_cached_tokens
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            sequence.num_cached_tokens = placement.num_cached_tokens
        sequence.status = Status.RUNNING
        self._running.append(sequence)
        # Charged at once, so that the next choice among many that wait knows of it.
        self._fair.charge(sequence.client, sequence.num_missing_tokens)
        return placement

    def recompute(self, slot: int, plan: StepPlan) -> None:
        """The memory of `slot` is not what `plan` counts on: its sequence starts anew, in a later step."""
        (sequence,) = (s for s in self._running if s.slot == slot)
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence is not sequence]
        if sequence.num_cached_tokens == sequence.num_computed_tokens:
            sequence.num_cached_tokens = 0
        sequence.num_computed_tokens = 0
        self._cache.forget(slot)

    def _share_out(self, prompts: Iterable[Sequence], budget: int, enough: int) -> dict[str, int]:
        """Prompts take turns of many tokens: short ones are computed whole in the order of their arrival, before long
        ones that have had a turn, and long ones alternate. The first is finished if it fits into `enough` tokens.
        """
        shares: dict[str, int] = {}
        for sequence in sorted(prompts, key=lambda s: (s.num_prefilled // TURN_TOKENS, s.priority, s.arrived_at)):
            if budget <= 0:
                break
            if not shares and sequence.num_missing_tokens <= enough:
                budget = max(budget, sequence.num_missing_tokens)
            share = min(sequence.num_missing_tokens, budget)
            if share == sequence.num_missing_tokens and not self._can_cut:
                # The memory at the last token but one is what a repeated or continued prompt can start from.
                share -= 1
            budget -= share
            shares[sequence.id] = share
            sequence.num_prefilled += share
        return shares

    def update(
        self, plan: StepPlan, sampled: dict[str, list[int]], seconds: float, now: float
    ) -> tuple[dict[str, list[int]], list[Sequence]]:
        """Book a computed step. `sampled` maps the ids of chunks with output to their new tokens.

        Those are one more than agreed with the chunk's draft. `seconds` is how long the decode took. Returns the tokens
        that were taken, which are fewer where a sequence ended on the way, and the sequences that the step finished.
        """
        self._cost.observe(plan.num_decode_tokens + plan.num_draft_tokens, plan.num_prefill_tokens, seconds)
        taken: dict[str, list[int]] = {}
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert sequence.slot is not None
            tokens = sampled[sequence.id] if chunk.wants_output else []
            if chunk.draft and sequence.drafter is not None:
                sequence.drafter.learn(len(chunk.draft), len(tokens) - 1)
            taken[sequence.id] = [token for token in tokens if self._take_token(sequence, token, now)]
            # Drafts that agreed are computed already; the last token sampled never is.
            num_known = min(sequence.num_computed_tokens + chunk.num_tokens + len(tokens[1:]), sequence.num_tokens)
            sequence.num_computed_tokens = num_known
            self._cache.advance(sequence.slot, num_known)
            self._fair.charge(sequence.client, len(tokens))
        finished = [chunk.sequence for chunk in plan.chunks if chunk.sequence.status is Status.FINISHED]
        for sequence in finished:
            self._drop(sequence)
        return taken, finished

    @staticmethod
    def _take_token(sequence: Sequence, token: int, now: float) -> bool:
        """Give `token` to the sequence; False when it does not take any more."""
        if sequence.status is Status.FINISHED:
            return False
        if sequence.num_tokens >= sequence.max_tokens:
            # Asked for no tokens at all: the prompt was computed, and that was the wish.
            sequence.finish("length", now)
            return False
        sequence.append(token, now)
        return token not in sequence.eog_tokens

    def preempt(self) -> Sequence | None:
        """Take the slot from the running sequence that matters least and let it wait; None when only one runs.

        It goes on later from what is then still cached.
        """
        if len(self._running) < 2:
            return None
        victim = max(self._running, key=lambda s: (s.priority, s.arrived_at))
        self._drop(victim)
        victim.status = Status.WAITING
        victim.num_computed_tokens = 0
        self._waiting.append(victim)
        self._is_full = True
        return victim

    def _drop(self, sequence: Sequence) -> None:
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._cache.release(sequence.slot)
            sequence.slot = None
            self._is_full = False
        if all(other.client != sequence.client for other in (*self._waiting, *self._running)):
            self._fair.leave(sequence.client)

    def check_integrity(self) -> None:
        """Raises AssertionError when slots and sequences disagree. Cheap; the engine calls it whenever it goes idle."""
        self._cache.check_integrity()
        slots = [s.slot for s in self._running]
        assert None not in slots, "a running sequence has no slot"
        assert len(set(slots)) == len(slots), "two running sequences share a slot"
        assert all(s.slot is None for s in self._waiting), "a waiting sequence holds a slot"
        assert self._cache.num_free_slots + len(slots) == self._cache.num_slots, "a slot is leased to nobody"
