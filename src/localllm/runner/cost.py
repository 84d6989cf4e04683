"""PURE model of how long a step takes, learnt from the steps themselves."""

from __future__ import annotations

_SMOOTHING = 0.2
# Weight of the past in the line through the decode steps: half of it is gone after about 35 steps.
_DECAY = 0.98
# What a further token costs in parts of a step for one, until steps of different sizes have been seen.
_MARGINAL_SHARE = 0.35
# Fewer prompt tokens than this per step make the weights be read once more for almost nothing.
MIN_PREFILL_TOKENS = 16
# With nobody decoding, a step is bounded only so that a cancel or a new arrival need not wait long.
IDLE_STEP_SECONDS = 0.5
MIN_IDLE_PREFILL_TOKENS = 64


class StepCost:
    """Seconds of a pure decode step as a line over its number of tokens, and seconds of one prompt token."""

    def __init__(self, target_itl: float) -> None:
        """`target_itl`: seconds that prefill may add to a step in which somebody decodes; 0 means no limit."""
        self._target_itl = target_itl
        self.prefill_token = 0.001
        # Exponentially weighted sums for a least-squares line: 1, x, x², y, xy.
        self._n = self._x = self._xx = self._y = self._xy = 0.0

    def observe(self, num_decode: int, num_prefill: int, seconds: float) -> None:
        """A step computed `num_decode` tokens of answers (drafts included) and `num_prefill` of prompts."""
        if num_decode and not num_prefill:
            self._n = self._n * _DECAY + 1
            self._x = self._x * _DECAY + num_decode
            self._xx = self._xx * _DECAY + num_decode * num_decode
            self._y = self._y * _DECAY + seconds
            self._xy = self._xy * _DECAY + num_decode * seconds
        elif num_prefill >= MIN_PREFILL_TOKENS:
            rest = max(seconds - self.decode_step(num_decode), 0.0)
            self.prefill_token = _average(self.prefill_token, rest / num_prefill)

    @property
    def is_known(self) -> bool:
        return self._n > 0

    def decode_step(self, num_tokens: int) -> float:
        """Expected seconds of a step that computes `num_tokens` of answers; 0 when none are, or no step was seen."""
        if not num_tokens or not self.is_known:
            return 0.0
        base, marginal = self._line()
        return base + marginal * num_tokens

    def _line(self) -> tuple[float, float]:
        """Base and marginal seconds. Sizes that hardly varied say nothing of the slope, and then a guess stands in."""
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        guess = mean_y * _MARGINAL_SHARE / (1 - _MARGINAL_SHARE + _MARGINAL_SHARE * mean_x)
        if variance < 0.25:
            return mean_y - guess * mean_x, guess
        slope = (self._xy / self._n - mean_x * mean_y) / variance
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return mean_y - slope * mean_x, slope

    @property
    def read_weights(self) -> float:
        """Expected seconds of a micro-batch apart from its tokens."""
        return self._line()[0] if self.is_known else 0.0

    def prefill_budget(self, num_decode: int) -> int:
        """Prompt tokens that the next step may compute beside `num_decode` decoding sequences."""
        if num_decode == 0:
            return max(MIN_IDLE_PREFILL_TOKENS, int(IDLE_STEP_SECONDS / self.prefill_token))
        if self._target_itl <= 0:
            return 1 << 30
        return max(MIN_PREFILL_TOKENS, int(self._target_itl / self.prefill_token))


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _SMOOTHING * (new - old)
