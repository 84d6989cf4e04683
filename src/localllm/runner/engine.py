"""The engine loop: the only thread that touches the context.

inbox → schedule → placements → decode → sample → update → one report to the output thread, and again. It blocks on the
inbox only when there is nothing to compute.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from localllm.errors import ErrorInfo, RunnerCrashed
from localllm.llama.context import Context, DecodeResult
from localllm.llama.sampler import Sampler
from localllm.runner.cost import StepCost
from localllm.runner.kv_files import Fetched
from localllm.runner.kv_tiers import IDLE_SECONDS, KVTiers
from localllm.runner.prefix_cache import PrefixCache, Swap
from localllm.runner.scheduler import Chunk, Scheduler, StepPlan
from localllm.runner.sequence import Sequence
from localllm.runner.statistics import EngineStatistics
from localllm.types import EngineStats

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrival:
    """A prepared sequence enters the engine; from here on the engine owns its sampler."""

    sequence: Sequence
    sampler: Sampler


@dataclass(frozen=True)
class Departure:
    """A sequence is to end: its client left, or a stop string was found. Unknown ids are ignored."""

    id: str


@dataclass(frozen=True)
class Ending:
    """The process is about to end: keep what is worth keeping, for at most about `seconds`, then call `done`."""

    seconds: float
    done: Callable[[], None]


@dataclass
class StepReport:
    """What one step brought: new tokens by sequence, prompts that got further, sequences that ended."""

    tokens: list[tuple[Sequence, int]] = field(default_factory=list)
    prefills: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, ErrorInfo]] = field(default_factory=list)
    stats: EngineStats | None = None


@dataclass(frozen=True)
class Retuned:
    """The machine lets us use another number of threads from now on."""

    num_threads: int


InboxItem = Arrival | Departure | Fetched | Retuned | Ending
Inbox = queue.SimpleQueue[InboxItem]


class Engine:
    def __init__(
        self,
        context: Context,
        scheduler: Scheduler,
        cache: PrefixCache,
        report: Callable[[StepReport], None],
        inbox: Inbox,
        tiers: KVTiers,
        cost: StepCost,
    ) -> None:
        """`report` is called from the engine's thread after every step and must not block."""
        self._inbox = inbox
        self._context = context
        self._scheduler = scheduler
        self._cache = cache
        self._cost = cost
        self._tiers = tiers
        self._report = report
        self._statistics = EngineStatistics()
        self._samplers: dict[str, Sampler] = {}
        # The one sequence whose prompt is all that a step computes, if there is one: cancelling it may abort the step.
        self._alone: str | None = None

    def cancel(self, id: str) -> None:
        """End a sequence; may be called from any thread. A step that works for nobody else is broken off."""
        self._inbox.put(Departure(id))
        if self._alone == id:
            self._context.abort()

    def run(self) -> None:
        """Work until the process ends. Raises DecodeError when llama.cpp is beyond repair."""
        while True:
            self.step()

    def step(self) -> None:
        """One turn of the loop: take in what arrived (waiting for it when idle), then compute one batch."""
        report = StepReport()
        self._drain_inbox(report)
        if self._scheduler.has_work:
            self._compute(report)
        self._close_samplers(report)
        self._tell(report)
        self._report(report)

    def _tell(self, report: StepReport) -> None:
        now = time.monotonic()
        if self._statistics.is_due(now, is_idle=not self._scheduler.has_work):
            report.stats = self._statistics.tell(
                now,
                num_running=self._scheduler.num_running,
                num_waiting=self._scheduler.num_waiting,
                kv_ram_bytes=self._tiers.num_ram_bytes,
                num_evictions=self._tiers.num_evictions,
            )

    def _drain_inbox(self, report: StepReport) -> None:
        if not self._scheduler.has_work:
            self._scheduler.check_integrity()
            self._handle(self._wait(), report)
        while True:
            try:
                self._handle(self._inbox.get_nowait(), report)
            except queue.Empty:
                return

    def _wait(self) -> InboxItem:
        """The next event; meanwhile, what slots hold goes to disk, a piece at a time."""
        delay = IDLE_SECONDS
        while True:
            try:
                return self._inbox.get(timeout=delay)
            except queue.Empty:
                if not self._tiers.write_idle():
                    return self._inbox.get()
                delay = 0.0

    def _handle(self, event: InboxItem, report: StepReport) -> None:
        match event:
            case Arrival(sequence, sampler):
                self._samplers[sequence.id] = sampler
                self._tiers.fetch(sequence)
                self._scheduler.add(sequence)
            case Departure(id):
                if (leaver := self._scheduler.cancel(id, time.monotonic())) is not None:
                    report.finished.append(leaver)
            case Fetched():
                self._tiers.take_in(event)
            case Retuned(num_threads):
                self._context.set_threads(num_threads, num_threads)
            case Ending(seconds, done):
                self._tiers.flush(seconds)
                done()

    def _compute(self, report: StepReport) -> None:
        plan = self._scheduler.schedule(time.monotonic())
        for placement in plan.placements:
            if not self._tiers.fill(placement):
                self._scheduler.recompute(placement.slot, plan)
        for shift in plan.shifts:
            self._context.shift(shift.slot, shift.num_kept, shift.num_dropped)
        if plan.swap is not None:
            self._swap(plan.swap)
        if not plan.chunks:
            if not plan.placements:
                # All that wait do so for files, which take a moment.
                self._handle(self._inbox.get(), report)
            return
        outputs = self._fill_batch(plan)
        started = time.monotonic()
        self._alone = plan.chunks[0].sequence.id if len(plan.chunks) == 1 and plan.num_prefill_tokens else None
        result = self._context.decode()
        self._alone = None
        if result is not DecodeResult.OK:
            self._take_back(plan, result, report)
            return
        seconds = time.monotonic() - started
        self._statistics.observe_step(seconds, len(plan.chunks))
        sampled = {chunk.sequence.id: self._sample(chunk, rows) for chunk, rows in outputs}
        slots = {chunk.sequence.id: chunk.sequence.slot for chunk in plan.chunks}
        taken, finished = self._scheduler.update(plan, sampled, seconds, time.monotonic())
        for chunk in plan.chunks:
            slot = slots[chunk.sequence.id]
            assert slot is not None
            if chunk.draft:
                self._context.cut(slot, chunk.sequence.num_computed_tokens)
            elif not self._context.can_cut and chunk.sequence.num_missing_tokens == 1 and not chunk.wants_output:
                self._checkpoint(slot)
        self._note(plan, taken, finished, report)

    def _swap(self, swap: Swap) -> None:
        started = time.monotonic()
        self._context.swap(swap.leased, swap.free)
        self._cost.observe_move(swap.num_tokens, time.monotonic() - started)

    def _sample(self, chunk: Chunk, rows: range) -> list[int]:
        """One token, and one more for as long as the draft has foretold them."""
        sampler = self._samplers[chunk.sequence.id]
        tokens: list[int] = []
        for row, guess in zip(rows, (*chunk.draft, None), strict=True):
            tokens.append(sampler.sample(self._context, row))
            if tokens[-1] != guess or guess in chunk.sequence.eog_tokens:
                break
        return tokens

    def _checkpoint(self, slot: int) -> None:
        save = self._cache.checkpoint(slot)
        if save is not None:
            self._tiers.save(slot, save)

    def _fill_batch(self, plan: StepPlan) -> list[tuple[Chunk, range]]:
        """Write the plan into the batch; returns the chunks that get logits with their batch rows."""
        batch = self._context.batch
        batch.clear()
        outputs = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            start = sequence.num_computed_tokens
            assert sequence.slot is not None
            tokens = [*sequence.tokens[start : start + chunk.num_tokens], *chunk.draft]
            num_outputs = 1 + len(chunk.draft) if chunk.wants_output else 0
            rows = batch.add(sequence.slot, tokens, start, num_outputs=num_outputs)
            if rows:
                outputs.append((chunk, rows))
        return outputs

    @staticmethod
    def _note(plan: StepPlan, taken: dict[str, list[int]], finished: list[Sequence], report: StepReport) -> None:
        for chunk in plan.chunks:
            if not chunk.wants_output:
                report.prefills.append(chunk.sequence)
            report.tokens.extend((chunk.sequence, token) for token in taken[chunk.sequence.id])
        report.finished.extend(finished)

    def _take_back(self, plan: StepPlan, result: DecodeResult, report: StepReport) -> None:
        """The batch was not computed, or only in part: the memory goes back to what the sequences know of."""
        for chunk in list(plan.chunks):
            slot = chunk.sequence.slot
            assert slot is not None
            if not self._context.cut(slot, chunk.sequence.num_computed_tokens):
                self._context.cut(slot, 0)
                self._scheduler.recompute(slot, plan)
        if result is DecodeResult.NO_ROOM:
            self._make_room(report)

    def _make_room(self, report: StepReport) -> None:
        """The memory had no room for the batch: give up old prefixes, let somebody wait, or give up on the only one."""
        if self._context.is_unified and (evicted := self._cache.evict()) is not None:
            self._tiers.evict(*evicted)
            return
        victim = self._scheduler.preempt()
        if victim is not None:
            self._statistics.num_preemptions += 1
            _log.warning("no room in the KV memory: %s waits", victim.id)
            return
        sequence = self._scheduler.cancel_only_running(time.monotonic())
        error = RunnerCrashed("the KV memory has no room for this request", hint="Use a smaller num_ctx or prompt.")
        report.failed.append((sequence, error.info()))

    def _close_samplers(self, report: StepReport) -> None:
        for sequence in (*report.finished, *(s for s, _ in report.failed)):
            self._samplers.pop(sequence.id).close()
