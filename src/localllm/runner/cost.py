"""PURE model of how long a step takes, learnt from the steps themselves."""

from __future__ import annotations

# Weight of the past: half of it is gone after about 35 observations.
_DECAY = 0.98
_SMOOTHING = 0.2
# What a prompt token costs in parts of a token of an answer, which needs a row of logits and attention of its own.
_PROMPT_TOKEN = 0.6
# What a further token costs in parts of a step for one, until steps of different sizes have been seen.
_MARGINAL_SHARE = 0.35
# Seconds of a token, and of moving a token's memory, until some have been seen.
_FIRST_TOKEN = 2e-3
_FIRST_MOVE_TOKEN = 1e-5
# How soon a move must have paid for itself.
_STEPS_OF_A_MOVE = 4
# Fewer prompt tokens than this per step make the weights be read once more for almost nothing.
MIN_PREFILL_TOKENS = 16
# With nobody decoding, a step is bounded only so that a cancel or a new arrival need not wait long.
IDLE_STEP_SECONDS = 0.5
MIN_IDLE_PREFILL_TOKENS = 64
_NO_LIMIT = 1 << 30


class StepCost:
    """Expected seconds of a step: so much for each micro-batch, which reads all weights, and so much for each token.

    Exponentially weighted least squares over all steps. Tokens of answers and of prompts are computed in micro-batches
    of their own; that they cost the same up to a factor keeps the two apart even when no step has only one kind.
    """

    def __init__(self, target_itl: float) -> None:
        """`target_itl`: seconds that prefill may add to a step in which somebody decodes; 0 means no limit.

        It may always add as much as the step takes without it: a large batch would else be starved of new members.
        """
        self._target_itl = target_itl
        self._move_token = _FIRST_MOVE_TOKEN
        # Sums of products of micro-batches (m), tokens (t) and seconds (s).
        self._mm = self._mt = self._tt = self._ms = self._ts = 0.0

    def observe(self, num_decode: int, num_prefill: int, seconds: float) -> None:
        """A step computed `num_decode` tokens of answers (drafts included) and `num_prefill` of prompts."""
        batches = (num_decode > 0) + (num_prefill > 0)
        tokens = num_decode + _PROMPT_TOKEN * num_prefill
        self._mm = self._mm * _DECAY + batches * batches
        self._mt = self._mt * _DECAY + batches * tokens
        self._tt = self._tt * _DECAY + tokens * tokens
        self._ms = self._ms * _DECAY + batches * seconds
        self._ts = self._ts * _DECAY + tokens * seconds

    def _fit(self) -> tuple[float, float]:
        """Seconds of a micro-batch apart from its tokens, and of a token; neither is negative."""
        if not self.is_known:
            return 0.0, _FIRST_TOKEN
        determinant = self._mm * self._tt - self._mt * self._mt
        if determinant < 1e-3 * self._mm * self._tt:
            # All steps were alike, which says nothing of how the time divides.
            token = self._ms / (self._mm * (1 / _MARGINAL_SHARE - 1) + self._mt)
            return token * (1 / _MARGINAL_SHARE - 1), token
        batch = (self._ms * self._tt - self._ts * self._mt) / determinant
        token = (self._mm * self._ts - self._mt * self._ms) / determinant
        if batch < 0:
            return 0.0, self._ts / self._tt
        return (batch, token) if token > 0 else (self._ms / self._mm, 0.0)

    @property
    def is_known(self) -> bool:
        """Whether a step has been seen."""
        return self._ms > 0

    def decode_step(self, num_tokens: int) -> float:
        """Expected seconds of a step that computes `num_tokens` of answers and nothing else."""
        batch, token = self._fit()
        return batch + token * num_tokens

    @property
    def read_weights(self) -> float:
        """Expected seconds of a micro-batch apart from its tokens."""
        return self._fit()[0]

    def observe_move(self, num_tokens: int, seconds: float) -> None:
        """The memory of `num_tokens` was moved to another slot."""
        if num_tokens:
            self._move_token += _SMOOTHING * (seconds / num_tokens - self._move_token)

    def is_worth_moving(self, num_tokens: int) -> bool:
        """Whether a move that spares every step a micro-batch pays for itself within a few steps."""
        return self.is_known and self._move_token * num_tokens <= _STEPS_OF_A_MOVE * self.read_weights

    def prefill_budget(self, num_decode: int, *, stretch: float = 1.0) -> int:
        """Prompt tokens that the next step may compute beside `num_decode` decoding sequences.

        `stretch` multiplies the target.
        """
        batch, token = self._fit()
        if num_decode and self._target_itl <= 0:
            return _NO_LIMIT
        seconds = max(self._target_itl * stretch, self.decode_step(num_decode)) if num_decode else IDLE_STEP_SECONDS
        least = MIN_PREFILL_TOKENS if num_decode else MIN_IDLE_PREFILL_TOKENS
        return max(least, int((seconds - batch) / (token * _PROMPT_TOKEN)) if token else _NO_LIMIT)
