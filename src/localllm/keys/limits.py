"""PURE: how many requests and tokens a key still has."""

from __future__ import annotations

import math
from collections import deque

from localllm.errors import QuotaExceeded, RateLimited
from localllm.keys.key import Key

WINDOW_SECONDS = 60.0


class RequestRates:
    """When each key's requests of the last minute came."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}

    def admit(self, key: Key, now: float) -> None:
        """Count one more request, or raise RateLimited. `now` is of a monotonic clock, in seconds."""
        if not key.rpm:
            return
        times = self._times.setdefault(key.name, deque())
        while times and now - times[0] >= WINDOW_SECONDS:
            times.popleft()
        if len(times) >= key.rpm:
            # The limit may have been lowered: the request comes in when enough of the others are out of the window.
            seconds = math.ceil(times[len(times) - key.rpm] + WINDOW_SECONDS - now)
            raise RateLimited(
                f"the key {key.name} may send {key.rpm} requests a minute",
                hint=f"Try again in {seconds} s.",
                retry_after=seconds,
            )
        times.append(now)


def check_quota(key: Key, num_tokens: int, seconds_left: float) -> None:
    """`num_tokens` were used today, of which `seconds_left` are left. Raises QuotaExceeded.

    A request that is let in is finished, so the last one of a day may go beyond the limit.
    """
    if key.tokens_per_day and num_tokens >= key.tokens_per_day:
        raise QuotaExceeded(
            f"the key {key.name} has used {num_tokens} of its {key.tokens_per_day} tokens for today",
            hint="The next day begins at midnight UTC.",
            retry_after=max(1, math.ceil(seconds_left)),
        )
