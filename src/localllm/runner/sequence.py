"""One stream of tokens on its way through the engine. Plain state: the scheduler is its only writer."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from localllm.runner.speculate import Drafter
from localllm.types import FinishReason


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Progress is two counters: `num_tokens` known and `num_computed_tokens` of them in the KV memory.

    Times are in seconds of one monotonic clock. `max_tokens` bounds prompt plus answer. `num_prefilled` counts the
    tokens of its prompt that were computed for it. `is_fetching`: it waits for a file of the prefix cache.
    `drafter` proposes tokens to check together with the next one; None when that is not wanted.
    `window` is how many tokens the memory holds, for an answer that may go on beyond that: tokens after the first
    `num_keep` are then dropped. None for one that ends there.
    """

    id: str
    tokens: list[int]
    max_tokens: int
    arrived_at: float
    eog_tokens: frozenset[int] = frozenset()
    priority: int = 0
    client: str = ""
    is_pinned: bool = False
    drafter: Drafter | None = None
    window: int | None = None
    num_keep: int = 0
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_dropped_tokens: int = 0
    slot: int | None = None
    status: Status = Status.WAITING
    num_prefilled: int = 0
    is_fetching: bool = False
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens known but not yet computed: what a step works on."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def is_alive(self) -> bool:
        return self.status is not Status.FINISHED

    def append(self, token: int, now: float) -> None:
        """Take the sampled `token` and finish when it ends the answer or the answer is as long as it may be."""
        self.num_output_tokens += 1
        if self.first_token_at is None:
            self.first_token_at = now
        if token in self.eog_tokens:
            self.finish("stop", now)
            return
        self.tokens.append(token)
        if len(self.tokens) >= self.max_tokens:
            self.finish("length", now)

    @property
    def room(self) -> int:
        """How many tokens may still come before the answer ends or the window is full."""
        return min(self.max_tokens, self.window or self.max_tokens) - len(self.tokens)

    def shift(self) -> int:
        """Make room in a full window: drop half of what comes after the kept tokens. Returns how many were dropped.

        As in llama.cpp's own programs (context shift); 0 while there is room, or when the answer ends with the window.
        """
        if self.window is None or len(self.tokens) < self.window:
            return 0
        num_dropped = (len(self.tokens) - self.num_keep + 1) // 2
        self.tokens = self.tokens[: self.num_keep] + self.tokens[self.num_keep + num_dropped :]
        self.max_tokens -= num_dropped
        self.num_dropped_tokens += num_dropped
        if self.drafter is not None:
            self.drafter.restart(self.tokens)
        return num_dropped

    def finish(self, reason: FinishReason, now: float) -> None:
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.finished_at = now
