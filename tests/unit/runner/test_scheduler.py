"""The scheduler without a model: who is scheduled for how many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.runner.cost import StepCost
from localllm.runner.prefix_cache import PrefixCache, Save
from localllm.runner.scheduler import TURN_TOKENS, Scheduler, StepPlan
from localllm.runner.sequence import Sequence, Status
from localllm.runner.speculate import Drafter

EOG = 0


class FixedBudget(StepCost):
    """A step may compute so many tokens of prompts while somebody decodes, and three times that to finish one."""

    def __init__(self, budget: int) -> None:
        super().__init__(0.1)
        self._budget = budget

    def prefill_budget(self, num_decode: int, *, stretch: float = 1.0) -> int:
        return int(self._budget * stretch) if num_decode else 1 << 30


def create_scheduler(
    num_slots: int = 4, *, max_batch_tokens: int = 64, prefill_budget: int | None = None, **options: Any
) -> Scheduler:
    """`prefill_budget`: prompt tokens allowed in a step in which somebody decodes; None for no limit."""
    cost = StepCost(0.0) if prefill_budget is None else FixedBudget(prefill_budget)
    cache = PrefixCache(num_slots, can_cut=True)
    return Scheduler(cache=cache, max_batch_tokens=max_batch_tokens, cost=cost, **options)


def create_sequence(
    id: str, num_prompt: int, *, max_new: int = 100, arrived_at: float = 0.0, first: int = 1000, priority: int = 0
) -> Sequence:
    """A sequence with a prompt that shares nothing with one of another `first`."""
    tokens = list(range(first, first + num_prompt))
    return Sequence(id, tokens, num_prompt + max_new, arrived_at, frozenset({EOG}), priority)


def run_step(scheduler: Scheduler, *, token: int = 7, now: float = 1.0) -> StepPlan:
    plan = scheduler.schedule(now)
    sampled = {chunk.sequence.id: [token] for chunk in plan.chunks if chunk.wants_output}
    num_decode_tokens = plan.num_decode_tokens + plan.num_draft_tokens
    scheduler.update(plan, sampled, 0.01 + 0.001 * num_decode_tokens + 0.0006 * plan.num_prefill_tokens, now)
    scheduler.check_integrity()
    return plan


def shares(plan: StepPlan) -> dict[str, int]:
    return {chunk.sequence.id: chunk.num_tokens for chunk in plan.chunks}


def test_prompt_is_chunked_by_the_batch_size_and_then_decodes_one_token_per_step() -> None:
    scheduler = create_scheduler(max_batch_tokens=64)
    scheduler.add(create_sequence("a", 150))
    assert [shares(run_step(scheduler)) for _ in range(4)] == [{"a": 64}, {"a": 64}, {"a": 22}, {"a": 1}]


def test_a_long_prompt_never_takes_the_place_of_a_decoding_sequence() -> None:
    scheduler = create_scheduler(prefill_budget=20)
    scheduler.add(create_sequence("a", 4))
    run_step(scheduler)
    scheduler.add(create_sequence("b", 100, first=5000))
    assert [shares(run_step(scheduler)) for _ in range(4)] == [
        {"a": 1, "b": 20},
        {"a": 1, "b": 20},
        {"a": 1, "b": 60},
        {"a": 1, "b": 1},
    ]


def test_short_prompts_are_finished_in_the_order_of_their_arrival() -> None:
    scheduler = create_scheduler(prefill_budget=20)
    scheduler.add(create_sequence("running", 4))
    run_step(scheduler)
    scheduler.add(create_sequence("first", 80, first=5000, arrived_at=1))
    scheduler.add(create_sequence("second", 80, first=6000, arrived_at=2))
    turns = [shares(run_step(scheduler)) for _ in range(4)]
    # What is left of a prompt is finished if that takes no more than three times the time.
    assert [turn.get("first") for turn in turns] == [20, 60, 1, 1]
    assert [turn.get("second") for turn in turns] == [None, None, 20, 60]


def test_long_prompts_take_turns_and_a_new_arrival_goes_first() -> None:
    scheduler = create_scheduler(prefill_budget=TURN_TOKENS, max_batch_tokens=4 * TURN_TOKENS)
    scheduler.add(create_sequence("running", 4))
    run_step(scheduler)
    scheduler.add(create_sequence("first", 1000, first=5000, arrived_at=1))
    scheduler.add(create_sequence("second", 1000, first=7000, arrived_at=2))
    turns = []
    for step in range(4):
        if step == 2:
            scheduler.add(create_sequence("third", 10, first=9000, arrived_at=3))
        turns.append(shares(run_step(scheduler)))
    assert [turn.keys() - {"running", "third"} for turn in turns[:3]] == [{"first"}, {"second"}, {"first"}]
    assert turns[2]["third"] == 10


def test_chunks_are_in_slot_order_whatever_the_order_of_arrival() -> None:
    scheduler = create_scheduler(3)
    for index in range(3):
        scheduler.add(create_sequence(str(index), 5, first=1000 * (index + 1)))
    run_step(scheduler)
    scheduler.cancel("0", 1.0)
    scheduler.add(create_sequence("late", 5, first=9000))
    plan = run_step(scheduler)
    slots = [chunk.sequence.slot for chunk in plan.chunks]
    assert slots == sorted(slot for slot in slots if slot is not None)
    assert len(slots) == 3


def test_more_sequences_than_slots_wait_and_follow_by_priority_then_arrival() -> None:
    scheduler = create_scheduler(1)
    scheduler.add(create_sequence("a", 4, arrived_at=0))
    run_step(scheduler)
    scheduler.add(create_sequence("later", 4, first=2000, arrived_at=2))
    scheduler.add(create_sequence("sooner", 4, first=3000, arrived_at=3, priority=-1))
    assert scheduler.num_waiting == 2
    scheduler.cancel("a", 1.0)
    assert list(shares(run_step(scheduler))) == ["sooner"]


def test_end_token_finishes_with_stop_and_is_not_part_of_the_text() -> None:
    scheduler = create_scheduler()
    sequence = create_sequence("a", 4)
    scheduler.add(sequence)
    run_step(scheduler)
    run_step(scheduler, token=EOG)
    assert (sequence.finish_reason, sequence.tokens[4:], sequence.num_output_tokens) == ("stop", [7], 2)
    assert not scheduler.has_work


def test_length_limit_finishes_with_exactly_that_many_tokens() -> None:
    scheduler = create_scheduler()
    sequence = create_sequence("a", 4, max_new=3)
    scheduler.add(sequence)
    while scheduler.has_work:
        run_step(scheduler)
    assert (sequence.finish_reason, sequence.num_output_tokens) == ("length", 3)


def test_no_tokens_wanted_computes_the_prompt_and_gives_none() -> None:
    scheduler = create_scheduler()
    sequence = create_sequence("a", 4, max_new=0)
    scheduler.add(sequence)
    run_step(scheduler)
    assert (sequence.finish_reason, sequence.num_output_tokens, sequence.num_tokens) == ("length", 0, 4)


def test_cancel_frees_the_slot_for_the_next_step() -> None:
    scheduler = create_scheduler(1, max_batch_tokens=8)
    scheduler.add(create_sequence("long", 1000))
    scheduler.add(create_sequence("next", 4, first=5000, arrived_at=1))
    run_step(scheduler)
    cancelled = scheduler.cancel("long", 1.0)
    assert cancelled is not None and cancelled.finish_reason == "cancelled"
    assert list(shares(run_step(scheduler))) == ["next"]


def test_cancel_of_an_unknown_or_finished_sequence_is_no_error() -> None:
    scheduler = create_scheduler()
    assert scheduler.cancel("nobody", 0.0) is None


def test_second_turn_of_a_chat_computes_only_what_is_new() -> None:
    scheduler = create_scheduler()
    first = create_sequence("a", 40, max_new=3)
    scheduler.add(first)
    while scheduler.has_work:
        run_step(scheduler)
    second = Sequence("b", [*first.tokens, 50, 51, 52], 200, 1.0)
    scheduler.add(second)
    plan = run_step(scheduler)
    # The last generated token was never computed, so it is computed with the three new ones.
    assert second.num_cached_tokens == 42
    assert shares(plan) == {"b": 4}


def test_same_prompt_again_computes_one_token_for_its_logits() -> None:
    scheduler = create_scheduler()
    scheduler.add(create_sequence("a", 40, max_new=1))
    run_step(scheduler)
    again = create_sequence("b", 40)
    scheduler.add(again)
    assert shares(run_step(scheduler)) == {"b": 1}
    assert again.num_cached_tokens == 39


def test_prefix_of_a_running_sequence_is_copied_to_another_slot() -> None:
    scheduler = create_scheduler(2, max_batch_tokens=512)
    scheduler.add(create_sequence("a", 100))
    run_step(scheduler)
    other = Sequence("b", [*range(1000, 1080), 1, 2, 3], 200, 1.0)
    scheduler.add(other)
    plan = run_step(scheduler)
    (placement,) = plan.placements
    assert (placement.source, placement.slot, placement.num_cached_tokens) == (0, 1, 80)
    assert shares(plan) == {"a": 1, "b": 3}


def test_prompts_that_begin_alike_and_arrive_together_are_computed_once() -> None:
    scheduler = create_scheduler(4, max_batch_tokens=512)
    system = list(range(1000, 1100))
    sequences = [Sequence(str(i), [*system, 10 + i, 20 + i], 200, float(i)) for i in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert shares(run_step(scheduler)) == {"0": 102}
    assert shares(run_step(scheduler)) == {"0": 1, "1": 2, "2": 2, "3": 2}
    assert [s.num_cached_tokens for s in sequences] == [0, 100, 100, 100]


def test_nobody_waits_for_the_rest_of_a_long_prompt_once_the_common_part_is_computed() -> None:
    scheduler = create_scheduler(2, max_batch_tokens=64)
    scheduler.add(Sequence("long", list(range(1000, 1600)), 700, 0.0))
    scheduler.add(Sequence("short", [*range(1000, 1100), 1, 2], 200, 1.0))
    assert [set(shares(run_step(scheduler))) for _ in range(3)] == [{"long"}, {"long"}, {"long", "short"}]


def test_memory_that_cannot_be_cut_serves_only_an_extension() -> None:
    scheduler = Scheduler(cache=PrefixCache(1, can_cut=False), max_batch_tokens=64, cost=StepCost(0.0), can_cut=False)
    first = create_sequence("a", 40, max_new=2)
    scheduler.add(first)
    while scheduler.has_work:
        run_step(scheduler)
    scheduler.add(extension := Sequence("b", [*first.tokens, 50], 45, 1.0))
    run_step(scheduler)
    assert extension.num_cached_tokens == 41
    scheduler.cancel("b", 1.0)
    scheduler.add(branch := Sequence("c", [*first.tokens[:30], 60], 45, 2.0))
    run_step(scheduler)
    assert branch.num_cached_tokens == 0


def test_preempted_sequence_waits_until_somebody_leaves_and_loses_nothing() -> None:
    scheduler = create_scheduler(2)
    scheduler.add(create_sequence("a", 10, max_new=2, arrived_at=0))
    scheduler.add(late := create_sequence("b", 10, first=5000, arrived_at=1))
    run_step(scheduler)
    known = list(late.tokens)
    assert scheduler.preempt() is late
    statuses = [late.status]
    assert list(shares(run_step(scheduler))) == ["a"]
    run_step(scheduler)
    statuses.append(late.status)
    assert statuses == [Status.WAITING, Status.RUNNING]
    assert late.tokens[: len(known)] == known
    assert late.num_prompt_tokens == 10


def test_drafts_are_checked_in_one_step_and_only_what_agrees_is_kept() -> None:
    scheduler = create_scheduler(1, max_drafts=8)
    sequence = create_sequence("a", 6)
    sequence.tokens[:] = [1, 2, 3, 4, 1, 2]
    sequence.drafter = Drafter(sequence.tokens)
    scheduler.add(sequence)
    run_step(scheduler, token=3)
    plan = scheduler.schedule(1.0)
    assert plan.chunks[0].draft == (4, 1)
    taken, _ = scheduler.update(plan, {"a": [4, 9]}, 0.011, 1.0)
    assert taken == {"a": [4, 9]}
    assert sequence.tokens == [1, 2, 3, 4, 1, 2, 3, 4, 9]
    assert sequence.num_computed_tokens == 8


def test_an_answer_that_ends_within_a_draft_takes_nothing_more() -> None:
    scheduler = create_scheduler(1, max_drafts=8)
    sequence = create_sequence("a", 7, max_new=4)
    sequence.tokens[:] = [1, 2, 3, 4, 1, 2, 3]
    sequence.drafter = Drafter(sequence.tokens)
    scheduler.add(sequence)
    run_step(scheduler, token=4)
    plan = run_step(scheduler, token=1)
    plan = scheduler.schedule(1.0)
    # Two tokens may still come, so one is worth guessing.
    assert plan.chunks[0].draft == (2,)
    taken, finished = scheduler.update(plan, {"a": [2, 3]}, 0.01, 1.0)
    assert (taken, finished, sequence.finish_reason) == ({"a": [2, 3]}, [sequence], "length")
    scheduler.check_integrity()


def test_running_sequences_move_together_when_one_between_them_has_left() -> None:
    cost = StepCost(0.0)
    cost.observe(1, 0, 0.01)
    cache = PrefixCache(4, can_cut=True)
    scheduler = Scheduler(cache=cache, max_batch_tokens=64, cost=cost, can_swap=True)
    for index in range(4):
        scheduler.add(create_sequence(str(index), 10, first=1000 * (index + 1)))
    run_step(scheduler)
    scheduler.cancel("1", 1.0)
    plan = run_step(scheduler)
    assert plan.swap is not None, "no move, although it costs little"
    assert [chunk.sequence.slot for chunk in plan.chunks] in ([0, 1, 2], [1, 2, 3])
    assert run_step(scheduler).swap is None


def test_a_slot_that_is_taken_over_is_saved_first_and_comes_back_from_memory() -> None:
    cache = PrefixCache(1, can_cut=True, snapshot_budget=1000)
    scheduler = Scheduler(cache=cache, max_batch_tokens=512, cost=StepCost(0.0))
    scheduler.add(create_sequence("a", 100, max_new=1))
    run_step(scheduler)
    scheduler.add(create_sequence("b", 100, max_new=1, first=5000))
    (placement,) = run_step(scheduler).placements
    assert placement.save is not None and placement.save.tokens == list(range(1000, 1100))
    cache.store(placement.save, 10)
    scheduler.add(again := create_sequence("c", 120, max_new=1))
    (placement,) = run_step(scheduler).placements
    assert (placement.snapshot, again.num_cached_tokens) == (1, 100)


def test_what_another_holder_has_is_not_saved_again() -> None:
    cache = PrefixCache(2, can_cut=True, snapshot_budget=1000)
    scheduler = Scheduler(cache=cache, max_batch_tokens=512, cost=StepCost(0.0))
    scheduler.add(create_sequence("a", 100))
    run_step(scheduler)
    scheduler.add(create_sequence("b", 102))
    run_step(scheduler)
    scheduler.cancel("b", 1.0)
    scheduler.add(create_sequence("c", 100, first=5000))
    (placement,) = run_step(scheduler).placements
    assert placement.save is None


def test_a_chat_that_grows_keeps_only_its_longest_snapshot() -> None:
    cache = PrefixCache(1, can_cut=True, snapshot_budget=1000)
    tokens = list(range(1000))
    dropped = [cache.store(cache.new_save(tokens[:length], ""), 10) for length in (200, 400, 600)]
    assert dropped == [[], [1], [2]]


def test_files_are_read_only_for_a_good_deal_more_than_is_at_hand() -> None:
    cache = PrefixCache(1, can_cut=True, snapshot_budget=1000)
    tokens = list(range(1000))
    cache.add_file(7, tokens[:900])
    assert cache.file_for(tokens) == 7
    assert cache.file_for([*tokens[:100], 5, 6]) is None
    cache.store(cache.new_save(tokens[:800], ""), 10)
    assert cache.file_for(tokens) is None


def test_a_growing_chat_is_not_written_to_disk_at_every_turn() -> None:
    cache = PrefixCache(1, can_cut=True)
    tokens = list(range(10_000))
    written = []
    for length in range(300, 10_000, 300):
        if cache.is_worth_a_file(tokens[:length]):
            written.append(length)
            cache.add_file(length, tokens[:length])
    assert len(written) < 15
    assert cache.is_worth_a_file([*tokens[: written[-1]], *range(50_000, 50_400)], is_last_chance=True)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_random_traffic_keeps_all_invariants_and_every_sequence_ends_once(data: st.DataObject) -> None:
    """Arrivals, cancels, preemptions, evictions, shifts, drafts and end tokens, over prompts that share prefixes."""
    num_slots = data.draw(st.integers(1, 4))
    can_cut_snapshots = data.draw(st.booleans())
    cache = PrefixCache(
        num_slots,
        can_cut=True,
        can_cut_snapshots=can_cut_snapshots,
        snapshot_budget=data.draw(st.sampled_from([0, 2000, 10_000])),
    )
    scheduler = Scheduler(
        cache=cache, max_batch_tokens=data.draw(st.integers(20, 200)), cost=StepCost(0.02), can_swap=True, max_drafts=4
    )
    memory = Memory(cache, num_slots, can_cut_snapshots=can_cut_snapshots)
    live: dict[str, Sequence] = {}
    ended: list[str] = []

    def step(now: float) -> None:
        plan = scheduler.schedule(now)
        assert plan.chunks, "there is work but the plan is empty"
        for refused in memory.place(plan, is_refused=lambda: data.draw(st.integers(0, 9)) == 0):
            scheduler.recompute(refused, plan)
        memory.play(plan)
        sampled = {}
        for chunk in plan.chunks:
            if chunk.wants_output:
                agreed = data.draw(st.integers(0, len(chunk.draft)))
                sampled[chunk.sequence.id] = [*chunk.draft[:agreed], data.draw(st.sampled_from([EOG, 6, 7, 8]))]
        slots = [(chunk.sequence.slot, chunk.sequence) for chunk in plan.chunks]
        for sequence in scheduler.update(plan, sampled, 0.01, now)[1]:
            del live[sequence.id]
            ended.append(sequence.id)
        for slot, sequence in slots:
            assert slot is not None
            memory.cut(slot, sequence.num_computed_tokens)

    for number in range(40):
        action = data.draw(st.sampled_from(["add", "add", "cancel", "preempt", "evict", "step", "step", "step"]))
        if action == "add":
            shared = data.draw(st.sampled_from([0, 10, 90, 150]))
            own = data.draw(st.lists(st.integers(6, 8), min_size=1, max_size=90))
            tokens = [*range(100, 100 + shared), *own]
            sequence = Sequence(f"s{number}", tokens, len(tokens) + 6, float(number), frozenset({EOG}))
            sequence.client = data.draw(st.sampled_from(["x", "y"]))
            sequence.drafter = Drafter(sequence.tokens)
            if data.draw(st.booleans()):
                sequence.window, sequence.num_keep = len(tokens) + 2, min(4, len(tokens))
            live[sequence.id] = sequence
            scheduler.add(sequence)
        elif action == "cancel" and live:
            id = data.draw(st.sampled_from(sorted(live)))
            assert scheduler.cancel(id, 0.0) is live.pop(id)
            ended.append(id)
        elif action == "preempt":
            scheduler.preempt()
        elif action == "evict":
            if (evicted := cache.evict()) is not None:
                memory.evict(*evicted)
        elif scheduler.has_work:
            step(float(number))
        scheduler.check_integrity()
    while scheduler.has_work:
        step(99.0)
    assert not live
    assert len(set(ended)) == len(ended)


Cell = tuple[int, int]


def chain(tokens: list[int], cells: list[Cell]) -> list[Cell]:
    """The cells of `tokens` after `cells`: each depends on its own token and on all before it."""
    added: list[Cell] = []
    for token in tokens:
        before = (*cells, *added)[-1:]
        added.append((token, hash((token, before))))
    return added


class Memory:
    """A model of the KV memory and of the snapshots: each sequence must find exactly its own tokens in its slot."""

    def __init__(self, cache: PrefixCache, num_slots: int, *, can_cut_snapshots: bool) -> None:
        self._cache = cache
        self._can_cut_snapshots = can_cut_snapshots
        self._held: dict[int, list[Cell]] = {slot: [] for slot in range(num_slots)}
        self._saved: dict[int, list[Cell]] = {}

    def place(self, plan: StepPlan, is_refused: Callable[[], bool]) -> list[int]:
        """Carry out the placements; returns the slots that were to be filled from elsewhere and could not be."""
        refused = []
        for placement in plan.placements:
            snapshot = None if placement.snapshot is None else self._saved.get(placement.snapshot, [])
            if placement.save is not None:
                self._save(placement.slot, placement.save)
            if placement.source is not None:
                self._held[placement.slot] = list(self._held[placement.source])
            if snapshot is not None:
                assert self._can_cut_snapshots or len(snapshot) == placement.num_cached_tokens
                self._held[placement.slot] = [] if is_refused() else list(snapshot)
            self.cut(placement.slot, placement.num_cached_tokens)
            # Also what is copied from a slot that could not be filled itself.
            if len(self._held[placement.slot]) != placement.num_cached_tokens:
                self._held[placement.slot] = []
                refused.append(placement.slot)
        return refused

    def play(self, plan: StepPlan) -> None:
        for shift in plan.shifts:
            held = self._held[shift.slot]
            self._held[shift.slot] = held[: shift.num_kept] + held[shift.num_kept + shift.num_dropped :]
        if plan.swap is not None:
            one, other = plan.swap.leased, plan.swap.free
            self._held[one], self._held[other] = self._held[other], self._held[one]
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert sequence.slot is not None
            done, held = sequence.num_computed_tokens, self._held[sequence.slot]
            assert [token for token, _ in held] == sequence.tokens[:done], "a sequence would read another's memory"
            if not sequence.num_dropped_tokens:
                assert held == chain(sequence.tokens[:done], []), "a sequence would read what was written after others"
            assert chunk.wants_output == (done + chunk.num_tokens == sequence.num_tokens), "a token after a part of it"
            assert done + chunk.num_tokens + len(chunk.draft) <= (sequence.window or 1000), "beyond the window"
            self._held[sequence.slot] += chain(
                [*sequence.tokens[done : done + chunk.num_tokens], *chunk.draft], self._held[sequence.slot]
            )

    def evict(self, slot: int, save: Save | None) -> None:
        if save is not None:
            self._save(slot, save)
        self._held[slot] = []

    def _save(self, slot: int, save: Save) -> None:
        assert self._held[slot][: len(save.tokens)] == chain(save.tokens, [])
        self._saved[save.id] = self._held[slot][: len(save.tokens)]
        for id in self._cache.store(save, 8 * len(save.tokens)):
            del self._saved[id]

    def cut(self, slot: int, length: int) -> None:
        self._held[slot] = self._held[slot][:length]
