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
from localllm.runner.prefix_cache import Placement
from localllm.runner.scheduler import Chunk, Scheduler, StepPlan
from localllm.runner.sequence import Sequence

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


@dataclass
class StepReport:
    """What one step brought: new tokens by sequence, prompts that got further, sequences that ended."""

    tokens: list[tuple[Sequence, int]] = field(default_factory=list)
    prefills: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, ErrorInfo]] = field(default_factory=list)


class Engine:
    def __init__(self, context: Context, scheduler: Scheduler, report: Callable[[StepReport], None]) -> None:
        """`report` is called from the engine's thread after every step and must not block."""
        self.inbox: queue.SimpleQueue[Arrival | Departure] = queue.SimpleQueue()
        self._context = context
        self._scheduler = scheduler
        self._report = report
        self._samplers: dict[str, Sampler] = {}

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
        self._report(report)

    def _drain_inbox(self, report: StepReport) -> None:
        if not self._scheduler.has_work:
            self._scheduler.check_integrity()
            self._handle(self.inbox.get(), report)
        while True:
            try:
                self._handle(self.inbox.get_nowait(), report)
            except queue.Empty:
                return

    def _handle(self, event: Arrival | Departure, report: StepReport) -> None:
        if isinstance(event, Arrival):
            self._samplers[event.sequence.id] = event.sampler
            self._scheduler.add(event.sequence)
        elif (sequence := self._scheduler.cancel(event.id, time.monotonic())) is not None:
            report.finished.append(sequence)

    def _compute(self, report: StepReport) -> None:
        plan = self._scheduler.schedule(time.monotonic())
        for placement in plan.placements:
            self._place(placement)
        outputs = self._fill_batch(plan)
        started = time.monotonic()
        result = self._context.decode()
        if result is not DecodeResult.OK:
            self._make_room(report)
            return
        seconds = time.monotonic() - started
        sampled = {
            chunk.sequence.id: self._samplers[chunk.sequence.id].sample(self._context, row) for chunk, row in outputs
        }
        finished = self._scheduler.update(plan, sampled, seconds, time.monotonic())
        self._note(plan, sampled, finished, report)

    def _place(self, placement: Placement) -> None:
        if placement.source is not None:
            self._context.copy(placement.source, placement.slot)
        was_cut = self._context.cut(placement.slot, placement.num_cached_tokens)
        assert was_cut or not self._context.can_cut, "a memory that can be cut refused to be"

    def _fill_batch(self, plan: StepPlan) -> list[tuple[Chunk, int]]:
        """Write the plan into the batch; returns the chunks that get logits with their batch rows."""
        batch = self._context.batch
        batch.clear()
        outputs = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            start = sequence.num_computed_tokens
            assert sequence.slot is not None
            tokens = sequence.tokens[start : start + chunk.num_tokens]
            row = batch.add(sequence.slot, tokens, start, wants_output=chunk.wants_output)
            if chunk.wants_output:
                outputs.append((chunk, row))
        return outputs

    @staticmethod
    def _note(plan: StepPlan, sampled: dict[str, int], finished: list[Sequence], report: StepReport) -> None:
        for chunk in plan.chunks:
            if not chunk.wants_output:
                report.prefills.append(chunk.sequence)
            elif chunk.sequence.finish_reason != "stop" and chunk.sequence.num_output_tokens:
                report.tokens.append((chunk.sequence, sampled[chunk.sequence.id]))
        report.finished.extend(finished)

    def _make_room(self, report: StepReport) -> None:
        """The memory had no room for the batch: let somebody wait, or give up on the only one there is."""
        victim = self._scheduler.preempt()
        if victim is not None:
            _log.warning("no room in the KV memory: %s waits", victim.id)
            return
        sequence = self._scheduler.cancel_only_running(time.monotonic())
        error = RunnerCrashed("the KV memory has no room for this request", hint="Use a smaller num_ctx or prompt.")
        report.failed.append((sequence, error.info()))

    def _close_samplers(self, report: StepReport) -> None:
        for sequence in (*report.finished, *(s for s, _ in report.failed)):
            self._samplers.pop(sequence.id).close()
