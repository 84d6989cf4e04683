"""PURE: what the engine counts of itself for whoever watches the daemon."""

from __future__ import annotations

from bisect import bisect_left

from localllm.types import BATCH_BOUNDS, STEP_BOUNDS, EngineStats, HistogramCounts

# How often a busy engine tells its numbers.
INTERVAL_SECONDS = 1.0


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def counts(self) -> HistogramCounts:
        return HistogramCounts(tuple(self._counts), self._sum)


class EngineStatistics:
    """Counts since the runner began. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._steps = _Histogram(STEP_BOUNDS)
        self._batches = _Histogram(BATCH_BOUNDS)
        self._told_at = 0.0
        self._is_told = True
        self.num_preemptions = 0

    def observe_step(self, seconds: float, num_sequences: int) -> None:
        """A step took `seconds` and worked for `num_sequences`."""
        self._steps.observe(seconds)
        self._batches.observe(num_sequences)
        self._is_told = False

    def is_due(self, now: float, *, is_idle: bool) -> bool:
        """Whether there is something new to tell and its time has come; an engine that stops to work tells at once."""
        return not self._is_told and (is_idle or now - self._told_at >= INTERVAL_SECONDS)

    def tell(
        self, now: float, *, num_running: int, num_waiting: int, kv_ram_bytes: int, num_evictions: int
    ) -> EngineStats:
        self._told_at, self._is_told = now, True
        return EngineStats(
            steps=self._steps.counts(),
            batches=self._batches.counts(),
            num_preemptions=self.num_preemptions,
            num_evictions=num_evictions,
            num_running=num_running,
            num_waiting=num_waiting,
            kv_ram_bytes=kv_ram_bytes,
        )
