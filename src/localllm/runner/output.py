"""The output thread: turns the engine's step reports into one frame of typed deltas each.

It works while the engine computes the next step. It alone decides that a request has ended: a stream is dropped with
its terminal message, so later reports about it find nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from localllm.errors import ErrorInfo
from localllm.llama.constraint import Constraint
from localllm.protocol.messages import Done, Failed, Output, Outputs, Prefill, Stats, Text
from localllm.runner.engine import StepReport
from localllm.runner.sequence import Sequence
from localllm.runner.text import TextStream
from localllm.types import Finished, FinishReason, Timings, Usage


@dataclass(frozen=True)
class LiveRequest:
    """What the output side keeps of a request while it runs."""

    sequence: Sequence
    text: TextStream
    return_tokens: bool = False
    num_dropped_messages: int = 0
    constraint: Constraint | None = None


class OutputThread:
    def __init__(self, send: Callable[[Outputs | Stats], object], stop: Callable[[str], None]) -> None:
        """`send` ships a frame; `stop` tells the engine that a stop string has ended a sequence."""
        self._send = send
        self._stop = stop
        self._reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        self._live: dict[str, LiveRequest] = {}
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def register(self, request: LiveRequest) -> None:
        """Must come before the sequence reaches the engine."""
        self._live[request.sequence.id] = request

    def report(self, report: StepReport) -> None:
        self._reports.put(report)

    def _run(self) -> None:
        while True:
            report = self._reports.get()
            items = self.process(report)
            if items:
                self._send(Outputs(items))
            if report.stats is not None:
                self._send(Stats(report.stats))

    def process(self, report: StepReport) -> list[Output]:
        """The messages that a report is worth, terminal ones last."""
        items: list[Output] = []
        for sequence in report.prefills:
            items.append(Prefill(sequence.id, sequence.num_computed_tokens, sequence.num_prompt_tokens))
        for sequence, token in report.tokens:
            self._on_token(sequence, token, items)
        for sequence in report.finished:
            assert sequence.finish_reason is not None
            self._end(sequence.id, sequence.finish_reason, sequence.num_output_tokens, items)
        for sequence, error in report.failed:
            self._fail(sequence.id, error, items)
        return items

    def _on_token(self, sequence: Sequence, token: int, items: list[Output]) -> None:
        request = self._live.get(sequence.id)
        if request is None:
            return
        delta = request.text.feed(token)
        if delta is not None:
            items.append(Text(sequence.id, delta))
        if request.text.is_stopped:
            self._stop(sequence.id)
            self._end(sequence.id, "stop", request.text.num_tokens, items)

    def _end(self, id: str, reason: FinishReason, num_output_tokens: int, items: list[Output]) -> None:
        request = self._live.pop(id, None)
        if request is None:
            return
        delta = request.text.finish()
        if delta is not None and reason != "cancelled":
            items.append(Text(id, delta))
        if request.constraint is not None and (error := request.constraint.error) is not None:
            items.append(Failed(id, error.info()))
            return
        items.append(Done(id, _finished(request, reason, num_output_tokens)))

    def _fail(self, id: str, error: ErrorInfo, items: list[Output]) -> None:
        if self._live.pop(id, None) is not None:
            items.append(Failed(id, error))


def _finished(request: LiveRequest, reason: FinishReason, num_output_tokens: int) -> Finished:
    sequence = request.sequence
    end = sequence.num_prompt_tokens + request.text.num_tokens
    return Finished(
        finish_reason=reason,
        usage=Usage(
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            num_output_tokens=num_output_tokens,
            num_dropped_messages=request.num_dropped_messages,
            num_dropped_tokens=sequence.num_dropped_tokens,
            num_draft_tokens=sequence.drafter.num_draft_tokens if sequence.drafter else 0,
            num_accepted_tokens=sequence.drafter.num_accepted_tokens if sequence.drafter else 0,
        ),
        timings=_timings(sequence),
        tokens=tuple(sequence.tokens[:end]) if request.return_tokens else (),
        stopped_by=request.text.stopped_by,
    )


def _timings(sequence: Sequence) -> Timings:
    """Split a request's life at its admission and its first token; a part that never began counts as nothing."""
    admitted = sequence.admitted_at
    first = sequence.first_token_at
    # A stop string is found here, before the engine knows that the sequence has ended.
    end = sequence.finished_at if sequence.finished_at is not None else time.monotonic()
    return Timings(
        queue_ns=_span(sequence.arrived_at, admitted if admitted is not None else end),
        prefill_ns=_span(admitted, first if first is not None else end),
        decode_ns=_span(first, end),
    )


def _span(start: float | None, end: float | None) -> int:
    return 0 if start is None or end is None else max(0, int((end - start) * 1e9))
