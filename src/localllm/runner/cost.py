"""PURE model of how long a step takes, learnt from the steps themselves."""

from __future__ import annotations

_SMOOTHING = 0.2
# Fewer prompt tokens than this per step make the weights be read once more for almost nothing.
MIN_PREFILL_TOKENS = 16
# With nobody decoding, a step is bounded only so that a cancel or a new arrival need not wait long.
IDLE_STEP_SECONDS = 0.5
MIN_IDLE_PREFILL_TOKENS = 64


class StepCost:
    """Exponentially weighted averages of the seconds of a pure decode step and of one prompt token."""

    def __init__(self, target_itl: float) -> None:
        """`target_itl`: seconds that prefill may add to a step in which somebody decodes; 0 means no limit."""
        self._target_itl = target_itl
        self.decode_step = 0.0
        self.prefill_token = 0.001

    def observe(self, num_decode: int, num_prefill: int, seconds: float) -> None:
        if num_decode and not num_prefill:
            self.decode_step = _average(self.decode_step, seconds)
        elif num_prefill >= MIN_PREFILL_TOKENS:
            rest = max(seconds - self.decode_step, 0.0) if num_decode else seconds
            self.prefill_token = _average(self.prefill_token, rest / num_prefill)

    def prefill_budget(self, num_decode: int) -> int:
        """Prompt tokens that the next step may compute beside `num_decode` decoding sequences."""
        if num_decode == 0:
            return max(MIN_IDLE_PREFILL_TOKENS, int(IDLE_STEP_SECONDS / self.prefill_token))
        if self._target_itl <= 0:
            return 1 << 30
        return max(MIN_PREFILL_TOKENS, int(self._target_itl / self.prefill_token))


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _SMOOTHING * (new - old)
