"""PURE model of how long a step takes, learnt from the steps themselves."""

from __future__ import annotations

from dataclasses import dataclass

# Weight of the past: half of it is gone after about 35 observations.
_DECAY = 0.98
_SMOOTHING = 0.2
# What a further token of an answer costs in parts of a step for one, until steps of different sizes have been seen.
_DECODE_MARGINAL_SHARE = 0.35
# The same for prompts, whose parts are never small.
_PREFILL_MARGINAL_SHARE = 0.95
# Seconds of a prompt token and of moving a token's memory, until some have been seen.
_FIRST_PREFILL_TOKEN = 1e-3
_FIRST_MOVE_TOKEN = 1e-5
# How soon a move must have paid for itself.
_STEPS_OF_A_MOVE = 4
# Fewer prompt tokens than this per step make the weights be read once more for almost nothing.
MIN_PREFILL_TOKENS = 16
# With nobody decoding, a step is bounded only so that a cancel or a new arrival need not wait long.
IDLE_STEP_SECONDS = 0.5
MIN_IDLE_PREFILL_TOKENS = 64


@dataclass
class _Line:
    """Seconds over a number of tokens: exponentially weighted least squares.

    Sizes that hardly varied say nothing of the slope; then `marginal_share` of what one token costs stands in for it.
    """

    marginal_share: float
    n: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        self.n = self.n * _DECAY + 1
        self.x = self.x * _DECAY + num_tokens
        self.xx = self.xx * _DECAY + num_tokens * num_tokens
        self.y = self.y * _DECAY + seconds
        self.xy = self.xy * _DECAY + num_tokens * seconds

    def fit(self) -> tuple[float, float]:
        """Seconds of no token and of each further one; neither is negative."""
        mean_x, mean_y = self.x / self.n, self.y / self.n
        variance = self.xx / self.n - mean_x * mean_x
        share = self.marginal_share
        slope = mean_y * share / (1 - share + share * mean_x)
        if variance >= 0.25:
            slope = min(max((self.xy / self.n - mean_x * mean_y) / variance, 0.0), mean_y / mean_x)
        return mean_y - slope * mean_x, slope


class StepCost:
    """Expected seconds of a pure decode step and of the prompt tokens beside it, each a line over their number."""

    def __init__(self, target_itl: float) -> None:
        """`target_itl`: seconds that prefill may add to a step in which somebody decodes; 0 means no limit."""
        self._target_itl = target_itl
        self._decode = _Line(_DECODE_MARGINAL_SHARE)
        self._prefill = _Line(_PREFILL_MARGINAL_SHARE)
        self._move_token = _FIRST_MOVE_TOKEN

    def observe(self, num_decode: int, num_prefill: int, seconds: float) -> None:
        """A step computed `num_decode` tokens of answers (drafts included) and `num_prefill` of prompts."""
        if num_decode and not num_prefill:
            self._decode.observe(num_decode, seconds)
        elif num_prefill >= MIN_PREFILL_TOKENS:
            self._prefill.observe(num_prefill, max(seconds - self.decode_step(num_decode), 0.0))

    @property
    def is_known(self) -> bool:
        """Whether a decode step has been seen."""
        return self._decode.y > 0

    def decode_step(self, num_tokens: int) -> float:
        """Expected seconds of a step that computes `num_tokens` of answers; 0 when none are, or no step was seen."""
        if not num_tokens or not self.is_known:
            return 0.0
        base, marginal = self._decode.fit()
        return base + marginal * num_tokens

    @property
    def read_weights(self) -> float:
        """Expected seconds of a micro-batch apart from its tokens."""
        return self._decode.fit()[0] if self.is_known else 0.0

    def observe_move(self, num_tokens: int, seconds: float) -> None:
        """The memory of `num_tokens` was moved to another slot."""
        if num_tokens:
            self._move_token += _SMOOTHING * (seconds / num_tokens - self._move_token)

    def is_worth_moving(self, num_tokens: int) -> bool:
        """Whether a move that spares every step a micro-batch pays for itself within a few steps."""
        return self.is_known and self._move_token * num_tokens <= _STEPS_OF_A_MOVE * self.read_weights

    def prefill_budget(self, num_decode: int, *, stretch: float = 1.0) -> int:
        """Prompt tokens that the next step may compute beside `num_decode` decoding sequences.

        `stretch` multiplies the time that they may take.
        """
        if num_decode == 0:
            return max(MIN_IDLE_PREFILL_TOKENS, self._prefill_within(IDLE_STEP_SECONDS))
        if self._target_itl <= 0:
            return 1 << 30
        return max(MIN_PREFILL_TOKENS, self._prefill_within(self._target_itl * stretch))

    def _prefill_within(self, seconds: float) -> int:
        fixed, token = self._prefill.fit() if self._prefill.y > 0 else (0.0, _FIRST_PREFILL_TOKEN)
        return int((seconds - fixed) / token) if token else 1 << 30
