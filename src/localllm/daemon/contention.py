"""PURE: how many threads a runner may keep busy beside everything else that computes on the machine.

llama.cpp's threads meet after every operation, hundreds of times per token. Where one of them has to wait for its turn
on a core, all wait for it: one thread fewer is much faster than one too many (docs/decisions/0003).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

# Looks that must agree before a thread is given up, and before one is taken back. A look covers about a second.
_NUM_LOOKS_DOWN = 2
_NUM_LOOKS_UP = 3
# What a look covers, in seconds: less says little, and more is no longer about now.
_SHORTEST, _LONGEST = 0.5, 5.0


@dataclass(frozen=True)
class CpuTimes:
    """Seconds on a clock, and of CPU time since some moment: of everybody on our CPUs, and of one runner."""

    at: float
    num_cpus: int
    everybody: float
    runner: float


class SpareCpus:
    """What other programs leave of the CPUs to one runner."""

    def __init__(self) -> None:
        self._last: CpuTimes | None = None
        self._looks: deque[int] = deque(maxlen=_NUM_LOOKS_UP)
        self._num_spare: int | None = None

    def observe(self, times: CpuTimes) -> int:
        """CPUs that the runner can have for itself, at least 1; to be called about once a second while it computes."""
        last = self._last
        if last is None or times.at >= last.at + _SHORTEST:
            self._last = times
            if last is None or times.at > last.at + _LONGEST or times.num_cpus != last.num_cpus:
                self._looks.clear()
            else:
                others = (times.everybody - last.everybody - times.runner + last.runner) / (times.at - last.at)
                self._looks.append(max(1, math.floor(times.num_cpus - max(0.0, others) + 0.5)))
                self._settle(times.num_cpus)
        return times.num_cpus if self._num_spare is None else min(self._num_spare, times.num_cpus)

    def _settle(self, num_cpus: int) -> None:
        """Follow what several looks in a row agree on: others come and go within a second."""
        looks = list(self._looks)
        spare = num_cpus if self._num_spare is None else self._num_spare
        if len(looks) >= _NUM_LOOKS_UP:
            spare = max(spare, min(looks))
        if len(looks) >= _NUM_LOOKS_DOWN:
            spare = min(spare, max(looks[-_NUM_LOOKS_DOWN:]))
        self._num_spare = spare
