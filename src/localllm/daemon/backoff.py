"""PURE: how long to wait before a model whose runner died is loaded again."""

from __future__ import annotations

WINDOW_SECONDS = 300.0
MAX_DELAY_SECONDS = 60.0


class CrashHistory:
    """The deaths of one model's runners. A single one costs no delay; from the second in a row on it doubles."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self.last_words = ""

    def note(self, now: float, last_words: str) -> None:
        self._times = [*self._recent(now), now]
        self.last_words = last_words

    def num_recent(self, now: float) -> int:
        return len(self._recent(now))

    def ready_at(self, now: float) -> float:
        """The time from which a load may start; in the past when nothing stands against it."""
        times = self._recent(now)
        if len(times) < 2:
            return float("-inf")
        return times[-1] + min(MAX_DELAY_SECONDS, 2.0 ** (len(times) - 2))

    def _recent(self, now: float) -> list[float]:
        return [time for time in self._times if now - time < WINDOW_SECONDS]
